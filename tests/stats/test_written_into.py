"""Values that are written into, or freed, before or after they were measured."""

import pytest
import torch

from tenterhook.record.gather import Gather
from tenterhook.stats import INDEX, NUMBERS, native
from tenterhook.values.tree import version_of


def test_a_value_that_was_written_into_is_lost_once_and_measured_at_once_from_then_on(monkeypatch):
    monkeypatch.setattr(native, "_compiled", lambda: None)  # so that small values wait for others
    at_once = set()
    for expected in ([], [10.0], [10.0]):
        value, gather = torch.ones(10), Gather(at_once)
        gather.add([7], value, version_of(value))
        value.zero_()
        gather.settle()
        rows = [row for block in gather.blocks for its, row in zip(block.places, block.arrays()[0], strict=True) if its]
        assert [row[INDEX["sum"]] for row in rows] == expected and gather.lost == (not expected)


@pytest.mark.parametrize("write", ["zero_", "data", "numpy", "set_", "resize"])
def test_what_becomes_of_a_value_later_is_nothing_to_us(sheet, write):
    for _ in range(3):
        value, gather = torch.full((1_000_000,), 2.0), Gather(set())
        gather.add([7], value, version_of(value))
        if write == "zero_":
            value.zero_()
        elif write == "data":
            value.data = torch.zeros(1)
        elif write == "numpy":
            value.numpy()[:] = 0
        elif write == "set_":
            value.set_(torch.zeros(1))
        else:
            value.untyped_storage().resize_(0)
        gather.settle()
        (block,) = gather.blocks
        row = dict(zip(NUMBERS, block.arrays()[0][0], strict=True))
        assert (row["sum"], row["zeros"], gather.lost) == (2_000_000, 0, 0)


@pytest.mark.parametrize("way_of_freeing", ["freed", "freed, a view", "never there"])
def test_a_tensor_without_memory_is_counted_as_not_measured(way_of_freeing, way):
    value = torch.randn(100)
    shown = value[10:60] if "view" in way_of_freeing else value
    if way_of_freeing == "never there":
        shown = torch._efficientzerotensor(100)
    else:
        value.untyped_storage().resize_(0)
    gather = Gather(set())
    gather.add([0], shown, version_of(shown))
    gather.settle()
    assert gather.skipped + gather.lost == 1 and not any(any(block.places) for block in gather.blocks)
