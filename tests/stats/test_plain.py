"""Tensors of every kind as what can be measured."""

import numpy as np
import pytest
import torch

from tenterhook.record.gather import Gather
from tenterhook.stats.plain import plain
from tests.stats.measuring import check, measured


def test_complex_counts_its_parts():
    value = torch.randn(50, dtype=torch.complex64)
    check(measured(value)[0], torch.view_as_real(value).numpy())
    check(measured(value.conj())[0], torch.view_as_real(value.conj().resolve_conj()).numpy())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_what_has_the_other_sign_in_memory(dtype):
    value = torch.tensor([1 + 2j], dtype=dtype).conj().imag
    assert value.is_neg() and value.is_contiguous()
    check(measured(value)[0], np.array([-2.0]))


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*:UserWarning", "ignore:.*quantiz.*")
@pytest.mark.parametrize("layout", ["sparse", "meta", "quantized", "vmap"])
def test_what_cannot_be_measured_is_counted(layout):
    gather = Gather(set())
    if layout == "vmap":
        torch.vmap(lambda x: gather.add([0], x, 0) or x)(torch.randn(3, 4))
    else:
        made = {
            "sparse": lambda: torch.eye(3).to_sparse(),
            "meta": lambda: torch.empty(3, device="meta"),
            "quantized": lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
        }
        gather.add([0], made[layout](), 0)
    gather.settle()
    assert gather.skipped == 1 and not gather.blocks


def test_nested_rows_one_after_another():
    rows = [torch.randn(3, 4), torch.randn(5, 4)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    check(measured(nested)[0], torch.cat(rows).numpy())


def test_plain_does_not_copy_what_lies_densely():
    value = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert plain(value).data_ptr() == value.data_ptr()
