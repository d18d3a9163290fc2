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
