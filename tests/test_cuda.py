"""What only a GPU shows: backward in another thread, no synchronisation, and speed's temptations."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import capture
from tests.test_checkpoint import ADDRESSES, Net

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 4)).cuda()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_in_the_device_thread_and_is_matched(reentrant):
    plain = Net().cuda()
    wrapped = Net(reentrant).cuda()
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
