# ruff: noqa: F841
"""Reports and errors: why a value did not come, and addresses that cannot be."""

import threading

import pytest
import torch
from torch import nn

from tenterhook import AddressError, EditError, TenterhookWarning, capture, sweep
from tenterhook.changes import zero
from tests.inside.models import Residual, X, module_of


def test_the_report_says_where_torch_takes_another_path():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad(), capture(model, "./_ff_block/x") as seen:
        model(torch.randn(1, 3, 8))
    assert "turn off PyTorch's fused transformer kernel" in str(seen.report())


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("./y:in", "':in' belongs to modules"),
        ("./helped#1/scaled", "a number belongs to the last name"),
        ("fcc/y", "did you mean fc"),
        ("fc.weight/y", "is a parameter, which has no forward"),
    ],
)
def test_addresses_that_cannot_be(address, words):
    with pytest.raises(AddressError, match=words):
        capture(Residual(), address)


def test_why_a_variable_did_not_come():
    def forward(self, x, skip=True):
        size = len(x)
        if not skip:
            y = x + size
        return x * 1

    model = module_of(forward)
    with capture(model, "./y", "./size") as seen:
        model(X)
    assert ["that line did not run, or it holds something else" in row[2] for row in seen.report()] == [True, True]
    with capture(model, "./y") as seen:
        thread = threading.Thread(target=model, args=(X,), kwargs={"skip": False})
        thread.start()
        thread.join()
    assert "it ran in another thread" in str(seen.report())
    with pytest.raises(AddressError, match=r"did you mean \./y"):
        capture(model, "y")
    with pytest.raises(AddressError, match="written module/name"):
        capture(model, "a//y")
    with pytest.raises(EditError, match="was never edited"):
        with pytest.warns(TenterhookWarning):
            sweep(model, X, [{"./nothing": zero()}])


def middle(x):
    return inner(x) + 1


def inner(x):
    y = x * 2
    return y


def test_a_path_with_a_part_missing_is_told_in_full():
    def forward(self, x):
        return middle(x)

    with capture(model := module_of(forward), "./inner/y", "./mid*/y") as seen:
        model(X)
    assert [row[2] for row in seen.report()] == ["it came as middle/inner/y"] * 2


def test_a_forward_that_is_replaced_inside_the_block_is_told_of():
    def forward(self, x):
        y = x + 1
        return y

    model = module_of(forward)
    with capture(model, "./y") as seen:
        model.forward = lambda x: x * 2
        model(X)
    assert "its forward was replaced after the block was entered" in str(seen.report())


def test_code_that_cannot_be_copied_is_told_of_and_runs_as_ever(monkeypatch):
    def forward(self, x):
        y = x + 1
        return y

    def fails(*args):
        raise ValueError("no such instruction")

    monkeypatch.setattr("tenterhook.inside.copies.instrument", fails)
    model = module_of(forward)
    with capture(model, "./y") as seen:
        assert torch.equal(model(X), X + 1)
    assert "forward was not looked into: its code cannot be copied (ValueError: no such" in str(seen.report())
