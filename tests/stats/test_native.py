"""What only compiled code does: many tensors by two cores, copies and differences, firing units."""

import os
import threading

import numpy as np
import pytest
import torch

from tenterhook.stats import INDEX, native
from tests.stats.measuring import check, measured


@pytest.fixture(params=[False, True], ids=["alone", "two cores"])
def cores(request, monkeypatch):
    """Whether there is a core that torch does not use."""
    monkeypatch.setattr(native, "idle_core", lambda: request.param)


def test_many_together_as_one_by_one(sheet, cores):
    values = [torch.randn(1 + 37 * k % 9_000) for k in range(5_500)]
    sheet.add_all([[k] for k in range(len(values))], values)
    alone = native.Sheet(len(values))
    for k, value in enumerate(values):
        alone.add([k], value)
    many = len(values)
    assert np.array_equal(sheet.numbers[:many], alone.numbers) and np.array_equal(sheet.bins[:many], alone.bins)
    assert sheet.places == alone.places and sheet.room == 500 and not alone.room


@pytest.mark.parametrize("size", [0, 1, 31, 4095, 4096, 5_000])
def test_copies_and_differences(sheet, size, cores):
    before, copy = torch.randn(size), torch.empty(size)
    sheet.add_all([[1]], [before], copies=[copy])
    assert torch.equal(copy, before)
    after = before + torch.randn(size)
    sheet.add_all([[2]], [after], minus=[before])
    sheet.add([3], after - before)
    assert np.array_equal(sheet.numbers[1], sheet.numbers[2]) and np.array_equal(sheet.bins[1], sheet.bins[2])


def test_threads_share_the_other_core(sheet, cores):
    sheets = [native.Sheet(400) for _ in range(4)]

    def work(mine):
        for k in range(0, 400, 8):
            mine.add_all([[]] * 8, [torch.full((3_000,), float(k + i)) for i in range(8)])

    threads = [threading.Thread(target=work, args=(mine,)) for mine in sheets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine in sheets:
        assert np.array_equal(mine.numbers[:, INDEX["max"]], np.arange(400.0))


def test_a_forked_process_can_measure_too(sheet, cores):
    values = [torch.ones(20_000)] * 4
    sheet.add_all([[]] * 4, values)
    child = os.fork()
    if child == 0:
        own = native.Sheet(4)
        own.add_all([[]] * 4, values)
        os._exit(0 if own.numbers[3, INDEX["sum"]] == 20_000 else 1)
    assert os.waitpid(child, 0)[1] == 0
    sheet.add_all([[]] * 4, values)
    assert sheet.numbers[7, INDEX["sum"]] == 20_000


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (4, 7, 3, 5), (1, 1), (2, 1, 1, 1)])
def test_which_units_fire(sheet, shape):
    units = shape[1] if len(shape) > 3 else shape[-1]
    known, truth = torch.zeros(units, dtype=torch.bool), torch.zeros(units, dtype=torch.bool)
    for seed in range(4):
        value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) - 1.5
        outer = shape[0] if len(shape) > 3 else value.numel() // units
        native.mark_firing(value, outer, value.numel() // outer // units, known)
        truth |= (value.movedim(1 if len(shape) > 3 else -1, 0).flatten(1) > 0).any(1)
        assert torch.equal(known, truth)


def test_without_a_compiler_nothing_is_missing(monkeypatch):
    native._compiled.cache_clear()
    monkeypatch.setenv("TENTERHOOK_CC", "/no/such/compiler")
    assert native.measure_native([torch.ones(3)]) is None
    check(measured(torch.ones(3))[0], np.ones(3))
    monkeypatch.undo()
    native._compiled.cache_clear()
    native._helper.cache_clear()  # a thread of the old code
