"""Statistics against float64 computed directly, and their sums against measuring at once."""

import math
import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenterhook.record.gather import Gather
from tenterhook.record.parts import divided
from tenterhook.record.step import Histograms, Rows
from tenterhook.stats import BINS, NUMBERS, Stats, native
from tenterhook.stats.cpu import SMALL
from tenterhook.stats.plain import plain
from tenterhook.values.tree import version_of


def measured(*tensors):
    """The statistics of each tensor, as a recorded step would have them."""
    gather = Gather(set())
    for i, tensor in enumerate(tensors):
        gather.add([i], tensor, version_of(tensor))
    gather.settle()
    found = {}
    for block in gather.blocks:
        numbers, bins = block.arrays()
        rows = Rows([None] * len(numbers), numbers, Histograms.of(bins))
        for k, places in enumerate(block.places):
            found[places[0]] = rows.stats(k)
    return [found.get(i) for i in range(len(tensors))]


def check(stats, values):
    """Against NumPy in float64."""
    values = np.asarray(values, np.float64).ravel()
    finite = values[np.isfinite(values)]
    assert stats.count == values.size
    assert stats.nan == np.isnan(values).sum()
    assert stats.pos_inf == (values == np.inf).sum()
    assert stats.neg_inf == (values == -np.inf).sum()
    assert stats.zeros == (values == 0).sum()
    assert sum(stats.histogram.values()) == stats.sampled <= values.size
    if not finite.size:
        assert math.isnan(stats.mean) and math.isnan(stats.rms) and math.isnan(stats.std) and math.isnan(stats.absmax)
        return
    scale = np.abs(finite).max()
    assert stats.min == finite.min() and stats.max == finite.max()
    assert stats.absmax == scale
    assert stats.mean == pytest.approx(finite.mean(), rel=1e-6, abs=1e-6 * scale)
    with np.errstate(over="ignore", under="ignore"):
        assert stats.rms == pytest.approx(np.sqrt((finite**2).mean()), rel=1e-5)
        assert stats.std == pytest.approx(finite.std(), rel=1e-3, abs=1e-7 * scale)


CASES = {
    "normal": torch.randn(10_000),
    "small": torch.randn(7, 3),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "constant": torch.full((5_000,), 3.3),
    "an outlier first": torch.randn(50_000).index_fill_(0, torch.arange(0, 50_000, 4096), 1e6),
    "large mean with NaN": (1e4 + 1e-2 * torch.randn(1 << 18)).index_fill_(0, torch.arange(0, 1 << 18, 4096), math.nan),
    "an outlier that is near": torch.full((4096,), 259371.1875).index_fill_(0, torch.tensor([0]), 293904.8125),
    "equal ones, then zeros": torch.cat([torch.full((16,), 3.3), torch.zeros(8_000)]),
    "mostly equal ones, then zeros": torch.cat([torch.full((30,), 3.3), torch.zeros(8_000)]),
    "large mean": 1e4 + 1e-2 * torch.randn(20_000),
    "huge": torch.tensor([3e38, -3e38, 1.0]).repeat(3_000),
    "tiny": torch.full((6_000,), 1e-40),
    "zeros": torch.zeros(5_000),
    "negative zero": torch.tensor([-0.0, 0.0, 1.0]),
    "NaN": torch.tensor([math.nan, 1.0, 2.0]).repeat(2_000),
    "all NaN": torch.full((5_000,), math.nan),
    "infinite": torch.tensor([math.inf, -math.inf, 1.0, -2.0]),
    "one NaN among many": torch.randn(100_000).index_fill_(0, torch.tensor([99_999]), math.nan),
    "float64": torch.randn(6_000, dtype=torch.float64) * 1e100,
    "bfloat16": torch.randn(6_000).bfloat16(),
    "float16": torch.randn(5).half(),
    "float8": torch.randn(300).to(torch.float8_e4m3fn),
    "integer": torch.arange(-5, 10_000),
    "bool": torch.tensor([True, False, True]),
    "transposed": torch.randn(80, 90).t(),
    "channels last": torch.randn(2, 3, 20, 50).contiguous(memory_format=torch.channels_last),
    "strided": torch.randn(100, 100)[:, ::2],
    "expanded": torch.randn(1, 70).expand(90, 70),
    "with a graph": torch.randn(5_000, requires_grad=True) * 2,
}


@pytest.fixture(params=["compiled", "NumPy"])
def way(request, monkeypatch):
    """Each way of measuring on a CPU; the first where there is a C compiler."""
    if request.param == "NumPy":
        monkeypatch.setattr(native, "_compiled", lambda: None)
    elif native._compiled() is None:
        pytest.skip("there is no C compiler here, so NumPy measures")


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, way):
    tensor = CASES[name]
    check(measured(tensor)[0], tensor.detach().double().numpy())
    check(measured(tensor.detach().reshape(-1)[1:])[0], tensor.detach().double().reshape(-1)[1:].numpy())


def test_all_together_as_each_alone(way):
    together = measured(*CASES.values())
    for tensor, stats in zip(CASES.values(), together, strict=True):
        alone = measured(tensor)[0]
        assert stats == alone


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1023, 4095, 4096, 4097, 8191, 8192, 8193, 70_001])
def test_around_the_borders_of_blocks(size, way):
    value = torch.randn(size) + 100
    check(measured(value)[0], value.double().numpy())
    for at in {0, size // 2, size - 1}:
        for bad in (math.nan, math.inf, -math.inf, 0.0, 3e38, 1e-42):
            changed = value.clone()
            changed[at] = bad
            check(measured(changed)[0], changed.double().numpy())


@pytest.fixture
def sheet():
    if not native.is_native():
        pytest.skip("there is no C compiler here, so no other core takes part")
    return native.Sheet(6_000)


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
        assert np.array_equal(mine.numbers[:, NUMBERS.index("max")], np.arange(400.0))


def test_a_forked_process_can_measure_too(sheet, cores):
    values = [torch.ones(20_000)] * 4
    sheet.add_all([[]] * 4, values)
    child = os.fork()
    if child == 0:
        own = native.Sheet(4)
        own.add_all([[]] * 4, values)
        os._exit(0 if own.numbers[3, NUMBERS.index("sum")] == 20_000 else 1)
    assert os.waitpid(child, 0)[1] == 0
    sheet.add_all([[]] * 4, values)
    assert sheet.numbers[7, NUMBERS.index("sum")] == 20_000


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


def test_complex_counts_its_parts():
    value = torch.randn(50, dtype=torch.complex64)
    check(measured(value)[0], torch.view_as_real(value).numpy())
    check(measured(value.conj())[0], torch.view_as_real(value.conj().resolve_conj()).numpy())


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


def test_a_value_that_was_written_into_is_lost_once_and_measured_at_once_from_then_on(monkeypatch):
    monkeypatch.setattr(native, "_compiled", lambda: None)  # so that small values wait for others
    at_once = set()
    for expected in ([], [10.0], [10.0]):
        value, gather = torch.ones(10), Gather(at_once)
        gather.add([7], value, version_of(value))
        value.zero_()
        gather.settle()
        rows = [row for block in gather.blocks for its, row in zip(block.places, block.arrays()[0], strict=True) if its]
        assert [row[NUMBERS.index("sum")] for row in rows] == expected and gather.lost == (not expected)


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


def test_plain_does_not_copy_what_lies_densely():
    value = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert plain(value).data_ptr() == value.data_ptr()


floats = st.floats(width=32) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(floats, max_size=40), min_size=2, max_size=5))
def test_merging_equals_measuring_at_once(parts):
    tensors = [torch.tensor(part, dtype=torch.float32) for part in parts]
    total, *rest = measured(*tensors)
    for stats in rest:
        total = total + stats
    whole = measured(torch.cat(tensors))[0]
    for name in ("count", "nan", "pos_inf", "neg_inf", "zeros", "min", "max", "sampled", "histogram"):
        assert getattr(total, name) == getattr(whole, name), name
    assert total.sum == pytest.approx(whole.sum, rel=1e-9, abs=1e-9 * (whole.absmax if whole.finite else 0) + 1e-300)
    assert total.sumsq == pytest.approx(whole.sumsq, rel=1e-9)


def test_the_bin_of_a_value():
    values = torch.tensor([1.0, 1.99, 2.0, -0.5, 0.0, math.inf, 1e-45])
    found = measured(values)[0].histogram
    assert found == {127: 2, 128: 1, 256 + 126: 1, 0: 2, 255: 1}


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3", "float8_e5m2"])
def test_shares_against_the_format_itself(name):
    dtype = {"float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}.get(name) or getattr(torch, name)
    # Powers of two and values just beside them, away from the halves that a format rounds to even.
    exponents = torch.arange(-40, 30, dtype=torch.float64)
    values = torch.cat([2**exponents * 1.01]).float()
    stats = measured(values)[0]
    cast = values.to(dtype).float()
    assert stats.underflow(name) == pytest.approx((cast == 0).float().mean().item(), abs=1e-6)
    info = torch.finfo(dtype)
    certain = values >= 2.0 ** math.ceil(math.log2(info.max))
    assert stats.overflow(name) == pytest.approx(certain.float().mean().item(), abs=1e-6)


@pytest.mark.parametrize("scale", [1.0, 2.0, 1024.0, 65536.0])
def test_divided_as_if_the_values_had_been(scale):
    values = torch.randn(200) * torch.logspace(-30, 30, 200)
    (scaled,), (true,) = measured(values * scale), measured(values)
    numbers = np.array([[getattr(scaled, name) for name in NUMBERS]], float)
    bins = np.zeros((1, BINS), np.int32)
    for key, many in scaled.histogram.items():
        bins[0, key] = many
    moved, shifted = divided(numbers, bins, scale)
    for name, value in zip(NUMBERS, moved[0], strict=True):
        assert value == pytest.approx(getattr(true, name), rel=1e-6), name
    assert {int(k): int(shifted[0, k]) for k in np.flatnonzero(shifted[0])} == true.histogram


def test_stats_of_nothing():
    nothing = Stats()
    assert nothing + nothing == nothing
    assert math.isnan(nothing.mean) and math.isnan(nothing.overflow("float16"))


def test_the_limit_between_small_and_large_makes_no_difference():
    for size in (SMALL - 1, SMALL, SMALL + 1):
        value = torch.randn(size)
        check(measured(value)[0], value.double().numpy())
