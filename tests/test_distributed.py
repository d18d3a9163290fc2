"""DDP, FSDP2 and tensor parallelism on gloo, with one and with two real processes.

The body of a test runs on every rank. The ranks serve all tests, and new ones are started only after a failure.
"""

import faulthandler
import multiprocessing
import shutil
import tempfile
import traceback
import warnings
from collections import OrderedDict
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tenterhook import EditError, NonFiniteError, capture, edit, find_nonfinite, sites, watch
from tenterhook.changes import at, clip_norm, scale, zero
from tenterhook.hooks import scope
from tenterhook.platform import compiler

LIMIT = 60  # seconds for one test
DDP = ["ddp", "ddp, gradient_as_bucket_view", "ddp, static_graph"]
FSDP = ["fsdp", "fsdp, layers"]
COMPILED = ["ddp, compiled", "fsdp, compiled"]


def join(path, world, rank):
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    options = {"store": dist.FileStore(str(path), world), "world_size": world, "rank": rank}
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT / 2), **options)


def perform(name, kind):
    """Run the body of a test on this rank: gives the traceback if it fails, and ends the process if it hangs."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    try:
        globals()[name].body(kind)
        assert scope.here() == () and not compiler._holders, "something is still open"
    except BaseException:
        return f"rank {dist.get_rank()} of {dist.get_world_size()}: {traceback.format_exc()}"
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def run(request, tmp_path_factory):
    """Runs the body of a test on every rank, and fails with the traceback of the first rank that does."""
    pools = []

    def run(name, kind):
        if not pools:
            path, spawn = tmp_path_factory.mktemp("ranks") / "store", multiprocessing.get_context("spawn")
            ranks = [(path, request.param, rank) for rank in range(request.param)]
            pools.extend(ProcessPoolExecutor(1, spawn, join, args) for args in ranks)
        try:
            for job in as_completed([pool.submit(perform, name, kind) for pool in pools], LIMIT + 10):
                if failure := job.result():
                    pytest.fail(failure, pytrace=False)
        except BaseException:
            stop()
            raise

    def stop():
        while pools:
            pools.pop().shutdown(wait=False)

    yield run
    stop()


def on_every_rank(*kinds):
    """Make a function of a kind of model into a test, once per kind, that every rank runs."""

    def decorate(body):
        @pytest.mark.parametrize("kind", kinds)
        def test(run, kind):
            run(body.__name__, kind)

        test.body = body
        return test

    return decorate


def build(kind):
    """The same model on every rank, distributed in one of the ways."""
    torch.manual_seed(0)
    name, _, option = kind.partition(", ")
    if option == "compiled":
        torch.compiler.reset()
        model = torch.compile(build(name), backend="eager")
        model(batch(kind)).sum().backward()  # compile it now
        return model
    head = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    net = nn.Sequential(OrderedDict(layer=nn.Linear(8, 16), act=nn.ReLU(inplace=True), head=head))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if name == "ddp":
        return DistributedDataParallel(net, **({option: True} if option else {}))
    if name == "fsdp":
        for part in (net.layer, net.head, net) if option == "layers" else (net,):
            fully_shard(part, mesh=mesh)
    if option == "after validation":
        torch.no_grad()(net)(batch(kind))  # leaves the parameters unsharded
    if name == "tensor parallel":
        net.act = nn.ReLU()  # torch itself refuses the one that works in place
        parallelize_module(net, mesh, {"layer": ColwiseParallel(use_local_output=False), "head.0": RowwiseParallel()})
    return net


def batch(kind, step=0):
    """Data of this rank alone, but for tensor parallelism, where all work on the same."""
    rank = 0 if kind == "tensor parallel" else dist.get_rank()
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mean_over_ranks(tensor):
    dist.all_reduce(total := tensor.clone())
    return total / dist.get_world_size()


def by_hand(x):
    """What an undistributed twin computes, kept by PyTorch's own hooks."""
    twin, want = build("plain"), {}

    def keep(name, module, args, output):
        want[name] = output.detach().clone()
        output.register_hook(lambda grad: want.update({f"grad({name})": grad.clone()}))

    for name, module in twin.named_modules():
        module.register_forward_hook(partial(keep, name or "."))
    twin(x).square().sum().backward()
    return want | {f"grad({name})": parameter.grad for name, parameter in twin.named_parameters()}


def step(kind, *selectors, **options):
    """A model, and what is captured in a training step of it."""
    model = build(kind)
    with capture(model, *selectors, **options) as seen:
        model(batch(kind)).square().sum().backward()
    return model, seen


@on_every_rank("ddp", "fsdp", *COMPILED)
def test_names_are_those_of_the_plain_model(kind):
    model, seen = step(kind, "module.layer", "head.0", "grad(module.layer)", "grad(module.head.0.weight)")
    assert [str(site) for site in sites(model)] == [str(site) for site in sites(build("plain"))]
    assert set(seen) == {"layer", "head.0", "grad(layer)", "grad(head.0.weight)"}
    assert seen["layer"] is seen["module.layer"] and "module." not in str(seen.report())


@on_every_rank(*DDP, *FSDP, *COMPILED)
def test_values_and_gradients_of_modules_are_those_of_an_undistributed_twin(kind):
    want, (_, seen) = by_hand(batch(kind)), step(kind, grad=True)
    assert len(seen) == 14 and not seen.report().silent
    for address in seen:
        assert torch.equal(seen[address], want[address]), address


@on_every_rank(*DDP, *FSDP, "tensor parallel")
def test_training_is_bit_identical_with_and_without_capture(kind):
    def train(watched):
        model, kept = build(kind), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            everything = capture(model, "**", "**:in", "layer.weight", "grad(layer.weight)", grad=True)
            with everything if watched and step else nullcontext() as seen:
                output = model(batch(kind, step))
                output.square().sum().backward()
            assert seen is None or {"layer", "grad(head:in)", "layer.weight", "grad(layer.weight)"} < set(seen)
            kept += [output, *(full(p.grad).clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return kept + [full(p) for p in model.parameters()]

    bare, watched = train(False), train(True)
    assert len(bare) == 27 and all(map(torch.equal, bare, watched))


@on_every_rank("ddp", *FSDP, "tensor parallel")
def test_no_hook_is_left(kind):
    def hooks():
        tables = [t for m in model.modules() for name, t in sorted(vars(m).items()) if "_hooks" in name]
        tables += [t for p in model.parameters() for t in (p._backward_hooks, p._post_accumulate_grad_hooks)]
        return [list(table or ()) for table in tables]

    model = build(kind)
    model(batch(kind)).sum().backward()
    before = hooks()
    with pytest.raises(ZeroDivisionError), capture(model, "**", "**:in", "layer.weight", grad=True) as seen:
        assert hooks() != before
        loss = model(batch(kind)).sum()
        1 / 0  # with hooks on the graph too
    loss.backward()
    assert hooks() == before
    assert "layer" in seen and not any(address.startswith("grad") for address in seen)


@on_every_rank(*DDP)
def test_under_ddp_a_parameter_has_the_gradient_of_its_own_rank(kind):
    model, seen = step(kind, "grad(layer.weight)")
    local, averaged = seen["grad(layer.weight)"], model.module.layer.weight.grad
    assert torch.equal(local, by_hand(batch(kind))["grad(layer.weight)"])
    torch.testing.assert_close(mean_over_ranks(local), averaged)
    assert torch.equal(local, averaged) == (dist.get_world_size() == 1)


@on_every_rank(*FSDP, "fsdp, after validation")
def test_under_fsdp_a_parameter_has_the_gradient_that_the_optimizer_gets(kind):
    model, seen = step(kind, "layer.weight", "grad(layer.weight)")
    grad, got = seen["grad(layer.weight)"], model.layer.weight.grad
    assert isinstance(grad, DTensor) and torch.equal(grad.full_tensor(), got.full_tensor())
    torch.testing.assert_close(grad.full_tensor(), mean_over_ranks(by_hand(batch(kind))["grad(layer.weight)"]))
    assert torch.equal(full(seen["layer.weight"]), build("plain").layer.weight)


@on_every_rank("ddp", *FSDP, "tensor parallel")
def test_each_backward_has_its_own_gradient_when_gradients_accumulate(kind):
    want = [by_hand(batch(kind, step))["grad(layer.weight)"] for step in range(2)]
    if kind in FSDP:  # it shows nothing but .grad, which accumulates
        want[1] = want[0] + want[1]
    model = build(kind)
    with capture(model, "grad(layer.weight)") as seen:
        for step in range(2):
            with model.no_sync() if kind == "ddp" and step == 0 else nullcontext():
                model(batch(kind, step)).square().sum().backward()
    for got, local in zip(seen.calls("grad(layer.weight)"), want, strict=True):
        torch.testing.assert_close(full(got), local if kind == "ddp" else mean_over_ranks(local))


@on_every_rank("tensor parallel")
def test_values_that_are_dtensors(kind):
    want = by_hand(batch(kind))
    _, seen = step(kind, "**", "grad(**)", "grad(layer.weight)", "grad(head.0.weight)")
    sharded = {address for address in seen if isinstance(seen[address], DTensor)}
    assert {"layer", "grad(layer)", "act", "grad(act)", "grad(head.0.weight)"} < sharded and len(seen) == 16
    for address in seen:
        torch.testing.assert_close(full(seen[address]), want[address], msg=address)


@on_every_rank(*DDP)
def test_under_ddp_a_gradient_edit_acts_before_the_reduction_or_after_it(kind):
    """Each rank clips its own gradient, or all the averaged one; clipping does not commute with averaging."""
    local = by_hand(batch(kind))["grad(layer.weight)"]
    limit = 0.5 * float(local.norm())
    clip = lambda grad: grad * min(1.0, limit / float(grad.norm()))  # noqa: E731
    before, after = mean_over_ranks(clip(local)), clip(mean_over_ranks(local))
    for reduced, want in ((False, before), (True, after)):
        model = build(kind)
        for step in range(2):  # with static_graph the first pass is different
            model.zero_grad()
            with edit(model, {"grad(layer.weight)": clip_norm(limit)}, reduced=reduced) as edits:
                model(batch(kind)).square().sum().backward()
            torch.testing.assert_close(model.module.layer.weight.grad, want)
            assert not edits.report().silent and step in (0, 1)
    if dist.get_world_size() > 1:
        assert not torch.allclose(before, after)


@on_every_rank("ddp", *FSDP, *COMPILED)
def test_edits_of_values_and_activation_gradients_act_on_every_rank(kind):
    twin = build("plain")
    edits = {"layer": scale(2.0), "head:in": at((..., 0), zero()), "grad(head.0)": scale(0.5)}
    with edit(twin, edits):
        want = twin(batch(kind))
        want.square().sum().backward()
    model = build(kind)
    model.zero_grad()
    with edit(model, edits) as session:
        out = model(batch(kind))
        out.square().sum().backward()
    assert torch.equal(out, want) and not session.report().silent
    grads = {name.removeprefix("_orig_mod.").removeprefix("module."): p.grad for name, p in model.named_parameters()}
    for name, p in twin.named_parameters():
        torch.testing.assert_close(full(grads[name]), mean_over_ranks(p.grad), msg=name)


@on_every_rank(*FSDP)
def test_under_fsdp_a_parameters_gradient_is_edited_after_the_reduction(kind):
    want = mean_over_ranks(by_hand(batch(kind))["grad(layer.weight)"])
    for reduced in (False, True):
        model = build(kind)
        with edit(model, {"grad(layer.weight)": scale(2.0)}, reduced=reduced) as edits:
            model(batch(kind)).square().sum().backward()
        torch.testing.assert_close(full(model.layer.weight.grad), 2 * want)
        assert not edits.report().silent


@on_every_rank("ddp", "fsdp")
def test_a_parameter_is_changed_on_every_rank_and_restored(kind):
    twin, model = build("plain"), build(kind)
    if kind == "fsdp":
        with pytest.raises(EditError, match=r"layer.weight cannot be edited: FSDP2 has sharded it"):
            edit(model, {"layer.weight": scale(2.0)}).__enter__()
        return
    before = [full(p).clone() for p in model.parameters()]
    with torch.no_grad():
        twin.layer.weight.mul_(2)
    with edit(model, {"layer.weight": scale(2.0)}):
        assert torch.equal(model(batch(kind)), twin(batch(kind)))
    assert all(torch.equal(full(p), old) for p, old in zip(model.parameters(), before, strict=True))


def with_a_bad_loss(model, kind, watched):
    """A training; in its fourth step the last rank divides zero by zero. What was found, and the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    folder = tempfile.mkdtemp()
    with watch(model, to=f"{folder}/run", every=100, dense=1) if watched else nullcontext() as run:
        for number in range(6):
            bad = number == 3 and dist.get_rank() == dist.get_world_size() - 1
            x = batch(kind, number)
            distance = (model(x) * float(not bad)).pow(2).sum(-1)
            optimizer.zero_grad()
            distance.sqrt().mean().backward()
            optimizer.step()
    found = run.open().findings().to_pylist() if watched else []
    shutil.rmtree(folder)
    return [row for row in found if row["rule"] == "non-finite values"], [full(p) for p in model.parameters()]


@on_every_rank("ddp", "ddp, compiled")
def test_the_birth_of_a_nan_on_one_rank(kind):
    _, bare = with_a_bad_loss(build(kind), kind, watched=False)
    found, watched = with_a_bad_loss(build(kind), kind, watched=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(bare, watched, strict=True))
    rank, several = dist.get_rank(), dist.get_world_size() > 1
    assert len(found) == 1 and found[0]["step"] == 3
    assert found[0]["text"].startswith(f"on rank {rank}: ") == several
    if rank == dist.get_world_size() - 1:
        assert "the gradient of sqrt" in found[0]["text"] and found[0]["severity"] == "error"
        assert "eagerly" in found[0]["why"] or "compiled" not in kind
    else:
        assert "because of another rank" in found[0]["text"] and found[0]["severity"] == "note"


class Sums(nn.Module):
    """Waits for all ranks in its forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        value = self.layer(x)
        dist.all_reduce(total := value.detach().mean(0))
        return value - total / dist.get_world_size()


@on_every_rank("fsdp", "fsdp, layers", "sums")
def test_what_waits_for_other_ranks_is_not_run_again(kind):
    model = Sums() if kind == "sums" else build(kind)
    found, _ = with_a_bad_loss(model, kind, watched=True)
    if kind == "sums":
        (one,) = [row for row in found if row["step"] == 3] if dist.get_rank() == dist.get_world_size() - 1 else [None]
        assert one is None or "waits for other processes" in one["text"], one
    else:
        assert found and found[0]["step"] == 3 and "all processes" in found[0]["text"], found
    dist.all_reduce(torch.ones(1))  # all are here


@on_every_rank("ddp")
def test_find_nonfinite_with_the_ranks_together(kind):
    model = build(kind)
    bad = dist.get_rank() == dist.get_world_size() - 1
    try:
        with find_nonfinite(model):
            (model(batch(kind)) * float(not bad)).pow(2).sum(-1).sqrt().mean().backward()
    except NonFiniteError as error:
        assert error.birth.operation == "sqrt" or not bad
    else:
        raise AssertionError("nothing was found")
