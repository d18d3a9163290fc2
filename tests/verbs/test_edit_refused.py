"""edit: what is refused, and which words the error has."""

import pytest
import torch
from torch import nn

from tenterhook import AddressError, EditError, edit, observe
from tenterhook.changes import add, any_shape, at, mean, replace, scale, zero
from tests.verbs.models import X, raises


def test_another_shape_or_dtype_is_an_error_that_names_both(net):
    with pytest.raises(EditError, match=r"the change at a@0 made 3×2 float32 of 3×4 float32; .*any_shape"):
        with edit(net, {"a": lambda v: v[:, :2]}):
            net(X)
    with pytest.raises(EditError, match=r"b:in\[0\]@0 made 3×4 float64 of 3×4 float32"):
        with edit(net, {"b:in[0]": lambda v: v.double()}):
            net(X)
    with pytest.raises(EditError, match=r"a@0 made 3×4 float32 of 3×4 bfloat16"):
        with edit(net, {"a": lambda v: v.float()}), torch.autocast("cpu", torch.bfloat16):
            net(X)
    with pytest.raises(EditError, match="made tuple"), edit(net, {"a": lambda v: (v,)}):
        net(X)
    with pytest.raises(EditError, match=r"made 2×2 float32 of 4×4 float32"):
        edit(net, {"a.weight": lambda w: w[:2, :2]}).__enter__()
    with pytest.raises(ValueError, match=r"replacement has shape 5, the value 3×4; .*\(in the change at a@0\)"):
        with edit(net, {"a": torch.zeros(5)}):
            net(X)


@pytest.mark.parametrize("address", ["a", "b:in", "grad(a)", "grad(b:in)", "grad(c.weight)"])
def test_an_exception_in_a_change_carries_the_address_and_leaves_the_model_as_it_was(net, address):
    plain = net(X)
    with pytest.raises(ValueError) as caught, edit(net, {address: raises}):
        net(X.clone().requires_grad_()).sum().backward()
    assert str(caught.value).startswith("boom (in the change at ") and address.rstrip(")") in str(caught.value)
    assert torch.equal(net(X), plain)


def test_an_exception_without_a_message_gets_a_note(net):
    def fail(value):
        raise OSError(2, "no such thing")

    with pytest.raises(OSError) as caught, edit(net, {"a": fail}):
        net(X)
    assert caught.value.__notes__ == ["in the change at a@0"]


def test_what_is_no_change_is_refused_at_once(net):
    with pytest.raises(TypeError, match=r"a: a change is a function of the value, a tensor, .* got str"):
        edit(net, {"a": "zero"})
    with pytest.raises(TypeError, match=r"a: scale needs its arguments: scale\(by"):
        edit(net, {"a": scale})
    with pytest.raises(TypeError, match=r"edit needs one dict of selector: change, .*; got str"):
        edit(net, "a")
    with pytest.raises(TypeError, match="needs a model"):
        edit({"a": zero()}, net)
    with pytest.raises(AddressError, match="did you mean act"):
        edit(net, {"actt": zero()})


def test_whole_numbers_take_no_parts():
    model, x = nn.Identity(), torch.tensor([1, 2, 3])
    for change in (scale(torch.tensor(0.5)), add(torch.tensor(0.7)), scale(0.5), replace(torch.tensor(0.5))):
        with pytest.raises(EditError, match="of 3 int64"), edit(model, {".": change}):
            model(x)
    with pytest.raises(ValueError, match=r"1.5 is no int64, which the value is"), edit(model, {".": 1.5}):
        model(x)
    with edit(model, {".": 2.0}):
        assert model(x).tolist() == [2, 2, 2]
    linear = nn.Linear(4, 2)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), edit(linear, {".": torch.tensor([1, 2])}):
            assert linear(X).tolist() == [[1, 2]] * 3


def test_parts_of_another_shape_are_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"at these positions it made 1 float32 of 4 float32 \(in the change at \.@0\)"
    ):
        with edit(model, {".": at(0, lambda v: v[:1])}):
            model(X)
    with pytest.raises(EditError, match="made 1×4 float32 of 4×4 float32"):
        edit(model, {"weight": any_shape(lambda w: w[:1])}).__enter__()
    with pytest.raises(EditError, match=r"grad\(\.\): a gradient has the shape"):
        edit(model, {"grad(.)": any_shape(lambda g: g[:1])})


def test_parts_of_another_dtype_are_refused():
    for change, x in ((scale(0.5), torch.tensor([3, 4])), (lambda v: v.double(), torch.ones(2))):
        with (
            pytest.raises(ValueError, match="at these positions it made"),
            edit(nn.Identity(), {".": at([0], change)}) as e,
        ):
            e._model(x)
    with edit(nn.Identity(), {".": at(0, scale(2))}) as edits:
        assert edits._model(torch.tensor([3, 4])).tolist() == [6, 4]


def test_mistakes_of_the_first_hour(net):
    with pytest.raises(TypeError, match=r'edit needs one dict .*edit\(model, {"fc": zero\(\)}\); got str and 1 more'):
        edit(net, "a", zero())
    with pytest.raises(TypeError, match=r"at\(index: Any, change: Any\): a change is a function .* got ellipsis"):
        at(zero(), ...)
    with pytest.raises(TypeError, match=r"mean\(dim: .*\): missing a required argument: 'dim'"):
        mean()
    with pytest.raises(TypeError, match="add: vector is a tensor or a number, got list"):
        add([1.0, 2.0])
    with pytest.raises(TypeError, match=r"a: observing changes nothing; zero\(\) is for edit"):
        observe(net, {"a": zero()})
    assert repr(edit(net, {"a": zero(), "b": 1})) == "<edit of a: zero(), b: replace(1)>"
    assert "use it in a `with` block" in str(edit(net, {"a": zero()}).report())
