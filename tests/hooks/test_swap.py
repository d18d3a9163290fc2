"""Parameters and buffers with another value for a while: memory that is shared, NaN, and no memory at all."""

import pytest
import torch
from torch import nn

from tenterhook import EditError, TenterhookWarning, edit
from tenterhook.changes import add, scale, zero


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)


def test_one_tensor_under_two_names_is_changed_once():
    model = Two()
    model.b.weight = model.a.weight
    before = model.a.weight.detach().clone()
    with edit(model, {"**.weight": scale(2.0)}):
        assert torch.equal(model.a.weight, before * 2)
    assert torch.equal(model.a.weight, before)


@pytest.mark.parametrize("share", [lambda w: w, lambda w: w.T, lambda w: w[1:]])
def test_two_tensors_in_the_same_memory_are_not_edited_both(share):
    model = Two()
    model.b.weight = nn.Parameter(share(model.a.weight.detach()))
    before = model.a.weight.detach().clone()
    with pytest.raises(EditError, match=r"^b.weight cannot be edited: it shares its memory with another .* one tensor"):
        edit(model, {"**.weight": scale(2.0)}).__enter__()
    assert torch.equal(model.a.weight, before)
    with edit(model, {"a.weight": scale(2.0)}), pytest.raises(EditError, match="shares its memory"):
        edit(model, {"b.weight": scale(2.0)}).__enter__()
    with edit(model, {"b.weight": scale(2.0)}):
        assert not torch.equal(model.a.weight, before)
    assert torch.equal(model.a.weight, before)


def test_parts_of_one_storage_are_edited_each():
    model, flat = Two(), torch.randn(18)
    model.a.weight, model.b.weight = (nn.Parameter(part.view(3, 3)) for part in flat.split(9))
    before = flat.clone()
    with edit(model, {"**.weight": scale(2.0)}):
        assert torch.equal(flat, before * 2)
    assert torch.equal(flat, before)


def test_nan_is_no_change_of_somebody_elses():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0] = torch.nan
    with edit(model, {"weight": add(1.0)}):
        pass
    with (
        pytest.warns(TenterhookWarning, match="weight was changed inside"),
        edit(model, {"weight": add(1.0)}),
    ):
        with torch.no_grad():
            model.weight[1] = torch.nan
    assert model.weight[0].isnan().all() and not model.weight[1].isnan().any()


def test_a_model_without_values_is_refused():
    with pytest.raises(EditError, match="weight cannot be edited: it is on the meta device and has no values"):
        edit(nn.Linear(2, 2, device="meta"), {"weight": zero()}).__enter__()
