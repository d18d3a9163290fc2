"""Statistics and watching on a GPU."""

import copy
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import watch
from tenterhook.record.gather import Gather
from tenterhook.stats import NUMBERS
from tests.stats.measuring import CASES, check, measured

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    tensor = CASES[name].detach().cuda()
    values = tensor.float() if tensor.dtype == torch.float64 else tensor  # on a GPU float64 is measured as float32
    if name == "float64":
        values = (CASES[name] / 1e80).float()
        tensor = values.cuda()
    check(measured(tensor)[0], values.double().cpu().numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 4095, 4097, 65535, 65536, 65537, 200_001])
def test_around_the_borders_of_chunks(dtype, size):
    value = torch.randn(size, device="cuda").to(dtype)
    check(measured(value)[0], value.double().cpu().numpy())
    value[0], value[-1] = math.nan, math.inf
    check(measured(value)[0], value.double().cpu().numpy())


def test_misaligned_and_many_at_once():
    whole = torch.randn(300_000, device="cuda").bfloat16()
    parts = [whole[k : k + 100 * k + 1] for k in range(200)]
    for part, stats in zip(parts, measured(*parts), strict=True):
        check(stats, part.double().cpu().numpy())


def test_with_gaps():
    value = torch.randn(100, 2_000, device="cuda")[:, ::2]
    check(measured(value)[0], value.double().cpu().numpy())
    value = torch.randn(64, 1_000, device="cuda").t()
    check(measured(value)[0], value.double().cpu().numpy())


def net():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(512, 5)).cuda()


def train(model, steps=12, scaler=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator("cuda").manual_seed(0)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 1, 8, 8, device="cuda", generator=generator)
        y = torch.randint(0, 5, (16,), device="cuda", generator=generator)
        with torch.autocast("cuda", torch.float16, enabled=scaler is not None):
            loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return losses


def test_training_is_bit_identical_and_in_place_values_are_learnt(tmp_path):
    torch.backends.cudnn.deterministic = True
    model = net()
    twin = copy.deepcopy(model)
    plain = train(twin)
    with watch(model, to=tmp_path / "run", every=1) as run:
        assert train(model) == plain
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    rows = run.open().stats().to_pylist()
    assert [row["loss"] for row in run.open().steps().to_pylist()] == pytest.approx(plain)
    # The ReLU writes into the convolution's output: lost at the first step, measured at once from then on.
    before = [row for row in rows if (row["site"], row["what"]) == ("0", "output")]
    assert len(before) >= 11 and all(row["min"] < 0 for row in before)
    assert len([row for row in rows if (row["site"], row["what"]) == ("3.weight", "update")]) == 12


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_waiting_for_the_device(tmp_path):
    model = net()
    x, y = torch.randn(16, 1, 8, 8, device="cuda"), torch.randint(0, 5, (16,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, to=tmp_path / "run", every=1) as run:
        for k in range(12):
            torch.cuda.set_sync_debug_mode("error" if 3 <= k < 8 else "default")
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("default")
    assert run.open().rank_info()["failed"] is None
    assert len(run.open().steps()) == 12


def with_a_bad_gradient(model, bad=7, steps=12):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(steps):
        out = model(torch.randn(16, 1, 8, 8, device="cuda")) * (step != bad)
        loss = out.pow(2).sum(-1).sqrt().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def with_a_bad_loss(model, bad=7, steps=12):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(steps):
        out = model(torch.randn(16, 1, 8, 8, device="cuda")) * (1e5 if step == bad else 1.0)
        loss = -out.softmax(-1).log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("train", "operation", "line"),
    [
        (with_a_bad_gradient, "sqrt", "loss = out.pow(2).sum(-1).sqrt().mean()"),
        (with_a_bad_loss, "log", "loss = -out.softmax(-1).log().mean()"),
    ],
)
def test_where_a_step_is_wanted_every_one_is_looked_at(tmp_path, train, operation, line):
    """Also those that are not sampled: what computed there is waited for."""
    model = net()
    twin = copy.deepcopy(model)
    torch.manual_seed(0)
    train(twin)
    drawn = torch.rand(1, device="cuda")
    torch.manual_seed(0)
    with watch(model, to=tmp_path / "run", every=10**6, dense=0, capsule=True) as run:
        train(model)
    assert torch.equal(torch.rand(1, device="cuda"), drawn)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    found = next(one for one in run.open().findings().to_pylist() if one["rule"] == "non-finite values")
    assert found["step"] == 7 and operation in found["text"] and line in found["why"]


def test_true_gradients_under_a_scaler_with_skipped_steps(tmp_path):
    model = net()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    with watch(model, to=tmp_path / "run", every=1) as run:
        train(model, 20, scaler)
    rows = run.open().stats().to_pylist()
    assert sum(row["skipped"] for row in run.open().steps().to_pylist()) > 0
    grads = [row for row in rows if row["what"] in ("output_grad", "parameter_grad")]
    assert grads and all(row["nan"] == row["pos_inf"] == 0 and row["absmax"] < 1 for row in grads)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_written_into_before_it_is_measured_is_lost_and_told_of(layout, dtype):
    at_once: set[int] = set()
    for lost in (1, 0):
        gather = Gather(at_once)
        value = torch.ones(1, 4, 3, 3, device="cuda", dtype=dtype).to(memory_format=layout)
        gather.note([7], value)
        value += 100
        gather.settle()
        assert gather.lost == lost and [block.places for block in gather.blocks] == [[[7]]] * (1 - lost)
    numbers, _ = gather.blocks[0].arrays()
    assert numbers[0, NUMBERS.index("max")] == 1 and at_once == {7}


class Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = nn.Identity()
        Held.last = weakref.ref(ctx.kept)
        return x * 2


def test_values_are_measured_once_and_their_graphs_let_go():
    gather, x = Gather(set()), torch.ones(5, device="cuda", requires_grad=True)
    value = Held.apply(x)
    graph = Held.last
    gather.note([1], value)
    gather.note([2], value.view_as(value))
    gather.note([3], value[:3])
    del value
    assert graph() is None
    gather.settle()
    assert [block.places for block in gather.blocks] == [[[1, 2], [3]]]


def test_with_a_default_device(tmp_path):
    torch.set_default_device("cuda")
    try:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with watch(model, to=tmp_path / "run") as run:
            for k in range(5):
                F.cross_entropy(model(torch.randn(8, 8)), torch.arange(8) % 4).backward()
                if k < 4:
                    optimizer.step()  # what comes after the last is measured at the end, outside of any hook
    finally:
        torch.set_default_device(None)
    assert run._recording.recorder.failed is None
    assert all(loss is not None for loss in run.open().steps().to_pydict()["loss"])
