"""What only a GPU shows: backward in another thread, no synchronisation, and speed's temptations."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import capture, edit, sweep
from tenterhook.changes import add, at, clip_norm, noise, reverse, scale, zero
from tests.hooks.models import ADDRESSES, Segments
from tests.inside.models import Checkpointed, Steps
from tests.verbs.checkpointed import EDITS, Net

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 4)).cuda()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_in_the_device_thread_and_is_matched(reentrant):
    plain = Segments().cuda()
    wrapped = Segments(reentrant).cuda()
    wrapped.load_state_dict(plain.state_dict())
    x = torch.randn(3, 4, device="cuda")

    def run(model):
        leaf = x.clone().requires_grad_()
        with capture(model, *ADDRESSES, grad=True) as seen:
            first, second = model(leaf).pow(2).sum(), model(leaf * 2).sum()
            second.backward()
            first.backward()
        return seen

    truth, seen = run(plain), run(wrapped)
    for address in ADDRESSES:
        for kind in (address, f"grad({address})"):
            mine, theirs = seen.calls(kind), truth.calls(kind)
            assert len(mine) == len(theirs) > 0
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), kind
    assert "other threads" not in str(seen.report())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # a prototype, says torch
def test_observing_waits_for_nothing():
    model, x = mlp(), torch.randn(8, 16, device="cuda", requires_grad=True)
    model(x).sum().backward()  # start whatever waits the first time
    model.zero_grad()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        with capture(model, "**", "**:in", "**.weight", grad=True) as seen, capture(model, "0", copy=False):
            model(x).pow(2).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen["0"].device.type == "cuda"
    assert torch.equal(seen["grad(2.weight)"], model[2].weight.grad)


def test_kept_elsewhere():
    model, x = mlp(), torch.randn(8, 16, device="cuda")
    with capture(model, "0", "grad(0)", device="cpu", dtype=torch.float64) as seen:
        model(x).sum().backward()
    assert seen["0"].device.type == seen["grad(0)"].device.type == "cpu"
    assert torch.equal(seen["0"].float(), model[0](x).cpu())


def test_bit_identical_under_autocast_and_a_scaler():
    def train(watch):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.ReLU(inplace=True), nn.Linear(64, 4)).cuda()
        optimizer, scaler = torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cuda")
        x, y = torch.randn(32, 16, device="cuda"), torch.randint(0, 4, (32,), device="cuda")
        with capture(model, *(("**", "**:in") if watch else ()), grad=True) if watch else torch.enable_grad():
            for _ in range(4):
                optimizer.zero_grad()
                with torch.autocast("cuda", torch.float16):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return [loss.detach(), *model.state_dict().values(), *(p.grad for p in model.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def test_data_parallel_on_one_device_and_memory():
    model = nn.DataParallel(mlp(), device_ids=[0])
    x = torch.randn(8, 16, device="cuda")
    with capture(model, "0", "2", grad=True) as seen:
        model(x).sum().backward()
    assert torch.equal(seen["0"], copy.deepcopy(model.module[0])(x))
    del seen
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with capture(model, "0") as seen, torch.no_grad():
        model(x)
    assert torch.cuda.memory_allocated() - before == 8 * 32 * 4
    assert seen["0"].shape == (8, 32)


def test_non_reentrant_checkpoint_of_a_plain_function():
    model, x = mlp(), torch.randn(4, 16, device="cuda", requires_grad=True)
    with capture(model, "grad(0)", "0") as seen:
        checkpoint(lambda t: model(t) * 2, x, use_reentrant=False).sum().backward()
    assert len(seen.calls("0")) == len(seen.calls("grad(0)")) == 1


def test_shares_and_frozen_checkpoints_in_the_device_thread():
    model, x = mlp(), torch.randn(4, 16, device="cuda", requires_grad=True)
    with capture(model, "grad(.:in)", "grad(1:in)", "grad(0)") as seen:
        (g,) = torch.autograd.grad(model(x).pow(2).sum(), x)
        model(x).pow(2).sum().backward()
    assert all(torch.equal(share, g) for share in seen.calls("grad(.:in)"))
    assert torch.equal(seen.calls("grad(1:in)")[0], seen.calls("grad(0)")[0])
    block = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).cuda()
    block[0].requires_grad_(False)
    with capture(block, "grad(0)", frozen=True) as seen:
        checkpoint(block, x.detach(), use_reentrant=False).sum().backward()
    assert seen["grad(0)"].shape == (4, 16)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_edits_are_made_again_in_the_device_thread(reentrant, edits, inside):
    if not inside and any(address.startswith("grad") or address.endswith("weight") for address in edits):
        pytest.skip("ends with the block")
    plain, wrapped = Net().cuda(), Net(reentrant).cuda()
    wrapped.load_state_dict(plain.state_dict())

    def go(model):
        torch.manual_seed(1)
        leaf = torch.linspace(-1, 1, 12, device="cuda").view(3, 4).requires_grad_()
        with edit(model, edits):
            loss = model(leaf).pow(2).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return loss.detach(), leaf.grad, [p.grad for p in model.parameters()]

    truth, mine = go(plain), go(wrapped)
    torch.testing.assert_close(mine, truth)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_editing_waits_for_nothing_until_the_report_is_read():
    model, x = mlp(), torch.randn(8, 16, device="cuda", requires_grad=True)
    vector = torch.ones(32)  # on the CPU: moved once
    edits = {"0": [scale(2.0), at((..., slice(0, 4)), zero())], "2:in": lambda v: v.mul_(2), "grad(0)": clip_norm(0.1)}
    edits |= {"grad(2.weight)": reverse(), "1": add(vector.cuda())}
    with edit(model, edits):
        model(x).sum().backward()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        with edit(model, edits) as session:
            for _ in range(3):
                model(x).pow(2).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert session.report().silent == [] and "changed nothing" not in str(session.report())
    truth = model[2](model[1](model[0](x)) + 1)
    with edit(model, {"1": add(vector)}):
        torch.testing.assert_close(model(x), truth)


def test_a_sweep_on_the_gpu_equals_single_runs():
    model, x = mlp().eval(), torch.randn(5, 16, device="cuda")
    edits = [{"0": at((..., k), zero())} for k in range(32)] + [{"1": noise(0.1, seed=k)} for k in range(4)]
    with torch.no_grad():
        for changes, out in zip(edits, sweep(model, x, edits), strict=True):
            with edit(model, changes):
                torch.testing.assert_close(out, model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("where", ["y", "z", "w", "tanh", "grad(y)", "grad(w)"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_edits_inside_a_forward_are_made_again_in_the_device_thread(reentrant, where, inside):
    results = []
    for model in (Checkpointed(reentrant).cuda(), Checkpointed(None).cuda()):
        leaf = torch.linspace(-1, 1, 12, device="cuda").view(3, 4).requires_grad_()
        address = where.replace("(", "(./segment/") if "(" in where else f"./segment/{where}"
        at_once = inside or "(" in where or model.reentrant is None
        with edit(model, {address: lambda v: v * 2 + 0.1}) as edits:
            loss = model(leaf).sum()
            if at_once:
                loss.backward()
        if not at_once:
            loss.backward()
        assert edits.report().silent == []
        results.append((loss.detach(), leaf.grad, model.fc.weight.grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_inside_a_checkpoint_come_from_the_device_thread(reentrant):
    wanted, found = ("./segment/y", "./segment/z", "./segment/w"), []
    for model in (Checkpointed(reentrant).cuda(), Checkpointed(None).cuda()):
        with capture(model, *wanted, grad=True) as seen:
            for k in range(2):
                model(torch.full((3, 4), k + 0.5, device="cuda", requires_grad=True)).sum().backward()
        found.append([seen.calls(address) for name in wanted for address in (name, f"grad({name})")])
    assert all(len(values) == 2 for values in found[0])
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_looking_inside_waits_for_nothing():
    model, x = Steps().cuda(), torch.randn(3, 4, device="cuda", requires_grad=True)
    model(x).sum().backward()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        with (
            capture(model, "**/**", grad=True) as seen,
            edit(model, {"./h#1": scale(2.0), "grad(./y)": clip_norm(0.1)}),
        ):
            for _ in range(3):
                model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen.calls("./y")) == len(seen.calls("grad(./y)")) == 3
