"""Sessions on plain functions instead of modules."""

import functools
import os
from pathlib import Path

import pytest
import torch

from tenterhook import AddressError, NotSeenError, capture, edit, observe, sites
from tenterhook.changes import scale
from tenterhook.inside.functions import is_followed
from tests.inside.models import X, dressed, five, helper


def test_the_gradient_of_an_intermediate():
    def function(x):
        y = x + 2
        z = torch.mean(y**2)
        return z

    x = torch.tensor([1.0, 5.0], requires_grad=True)
    with capture(function, "y", "grad(y)") as seen:
        function(x).backward()
    assert torch.equal(seen["grad(y)"], seen["y"]) and torch.equal(seen["y"], torch.tensor([3.0, 7.0]))


def test_gradients_arrive_from_the_end_and_can_be_doubled():
    def function():
        a = torch.ones(5, requires_grad=True)
        b = 2 * a
        c = b.mean()
        c.backward()
        return a.grad

    came = []
    with observe(function, {"grad(*)": lambda grad, site: came.append((str(site), grad.tolist()))}):
        function()
    shown = [(name, grad) for name, grad in came if name != "grad(c@0)"]
    assert shown[0] == ("grad(b@0)", pytest.approx([0.2] * 5)) and shown[1] == ("grad(a@0)", pytest.approx([0.4] * 5))
    with edit(function, {"grad(b)": scale(2.0)}):
        torch.testing.assert_close(function(), torch.full((5,), 0.8))


def test_functions_of_all_kinds():
    class Callable:
        def __call__(self, x):
            y = x + 1
            return y

        def method(self, x):
            y = x + 1
            return y

    with capture(dressed, "inner") as seen:
        dressed(X)
    assert torch.equal(seen["inner"], X - 1)
    for function in (Callable(), Callable().method, functools.partial(Callable().method)):
        with capture(function, "y", "x") as seen:
            function(X)
        assert torch.equal(seen["y"], X + 1) and torch.equal(seen["x"], X)
    square = lambda x: (x * x).sum()  # noqa: E731
    with capture(square, "mul", "grad(mul)") as seen:
        square(X.clone().requires_grad_()).backward()
    assert torch.equal(seen["mul"], X * X) and torch.equal(seen["grad(mul)"], torch.ones(3, 4))
    with capture(helper, "yy") as seen:
        helper(X)
    with pytest.raises(
        NotSeenError, match="yy never came: no value of that name came while it ran; its variables are q"
    ):
        seen["yy"]
    with pytest.raises(AddressError, match="':in' belongs to modules"):
        capture(helper, "q:in")
    with pytest.raises(TypeError, match="known when it runs: sites"):
        sites(helper)


def test_a_method_is_that_of_its_own_object():
    class Thing:
        def run(self, x):
            y = x + 1
            return y

    mine, other = Thing(), Thing()
    with capture(mine.run, "y") as seen:
        other.run(X)
        mine.run(X * 2)
    assert torch.equal(seen["y"], X * 2 + 1)


def test_patches_of_functions_and_overlapping_requests():
    def function(x):
        y = x + 1
        y = y * 2
        return y

    with capture(function, "y", "y#1", "*") as seen:
        clean = function(X)
    assert list(seen) == ["y#0", "y#1"] and len(seen.report().rows) == 2
    with edit(function, seen.patch("y#1")):
        assert torch.equal(function(X * 7), clean)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: None, "it was not called inside this session"),
        (lambda: five(X), "no value of that name came while it ran; its variables are q"),
    ],
)
def test_why_a_variable_of_a_function_did_not_come(run, words):
    with capture(five, "nothing") as seen:
        run()
    with pytest.raises(NotSeenError, match=words):
        seen["nothing"]


def test_packages_in_the_folder_of_the_standard_library_are_followed():
    folder = Path(os.__file__).parent
    assert is_followed(f"{folder}/site-packages/a/model.py") and is_followed(f"{folder}/dist-packages/model.py")
    assert not is_followed(f"{folder}/functools.py") and is_followed("model.py")
