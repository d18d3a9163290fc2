import pytest
import torch

from tenterhook.platform.operations import OVERLOADS, SPACES, name_of, writes, written_by


@pytest.mark.parametrize("name", ["relu", "linalg_svd", "special_erf", "fft_fft", "gelu", "sparse_sampled_addmm"])
def test_every_operation_has_its_name_somewhere(name):
    assert any(hasattr(space, name) for space in SPACES), f"{name} is nowhere where torch keeps its operations"


def test_calls_of_torch_ops_are_told_by_their_types():
    assert isinstance(torch.ops.aten.add, OVERLOADS) and isinstance(torch.ops.aten.add.Tensor, OVERLOADS)
    assert not isinstance(torch.add, OVERLOADS)


def test_what_an_operation_writes_into():
    add, result = torch.ops.aten.add_.Tensor, torch.ones(2)
    assert writes(add) and not writes(torch.ops.aten.add.Tensor) and name_of(add) == "add"
    assert written_by(add, (result, torch.ones(2)))[0] is result
    assert add.namespace == "aten" and name_of(torch.ops.aten._softmax.default) == "_softmax"
