"""Values inside a forward, in compiled code."""

import builtins

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import capture, edit, observe
from tenterhook.changes import scale
from tenterhook.inside import dispatch
from tests.compiled.models import BACKENDS, DEVICE, batch, close, graphs, note_of
from tests.compiled.test_capture import step

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    assert getattr(builtins, dispatch.NAME, dispatch.tell) is dispatch.tell


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        h = self.fc(x)
        y = torch.relu(h)
        y = y * 2
        pair = (y, h)
        self.kept = len(pair)
        return x + pair[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        total = x.sin()
        return total


def both(model, run, x, *asked, **options):
    """What is captured in two calls and one backward pass."""
    model.zero_grad()
    with capture(model, *asked, **options) as seen:
        (run(x).square().sum() + 3 * run(2 * x).sum()).backward()
    return seen


def are_alike(seen, want):
    return list(seen) == list(want) and all(
        same(a, b) for k in want for a, b in zip(want.calls(k), seen.calls(k), strict=True)
    )


def same(a, b):
    if isinstance(a, torch.Tensor):
        return close(a, b)
    return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))


ASKED = "blocks.1/y", "blocks.2/h", "blocks.2/y#1", "./total", "./x", "blocks.0", "blocks.1/pair", "blocks.0/x"
GRADIENTS = "grad(blocks.0/y)", "grad(blocks.2/h)", "grad(./total)", "grad(blocks.1/pair)"


@pytest.mark.parametrize("backend", BACKENDS)
def test_variables_and_their_gradients_are_those_of_eager_code(backend):
    model, x = Model().to(DEVICE), batch()
    want = both(model, model, x, *ASKED, *GRADIENTS)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    step(compiled, x)
    made = None
    for _ in range(3):
        seen = both(model, compiled, x, *ASKED, *GRADIENTS)
        assert are_alike(seen, want) and "had the taps" in note_of(seen)
        assert [tuple(row) for row in seen.report()] == [tuple(row) for row in want.report()]
        assert made in (None, graphs())
        made = graphs()
    step(compiled, x)
    assert graphs() == made


@pytest.mark.parametrize("asked", [("blocks.1/y#0@1",), ("blocks.*/h",), ("blocks.0/y#-1", "blocks.0/nothing")])
def test_calls_counts_and_wildcards(asked):
    model, x = Model().to(DEVICE), batch()
    want = both(model, model, x, *asked)
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(2):
        seen = both(model, compiled, x, *asked)
        assert are_alike(seen, want) and "had the taps" in note_of(seen)
        assert [tuple(row) for row in seen.report()] == [tuple(row) for row in want.report()]


def test_an_observer_and_a_reduce():
    model, x, told = Model().to(DEVICE), batch(), []
    compiled = torch.compile(model, fullgraph=True)
    for run in (model, compiled, compiled):
        with observe(model, {"blocks.1/y": lambda value, site: told.append((str(site), float(value.sum())))}) as one:
            run(x)
    assert (
        len(told) == 6 and [name for name, _ in told[:2]] == [name for name, _ in told[2:4]] and told[2:4] == told[4:]
    )
    assert all(abs(a - b) < 1e-4 for (_, a), (_, b) in zip(told[:2], told[2:4], strict=True))
    assert "had the taps" in note_of(one)
    want, seen = (both(model, run, x, "blocks.1/y", grad=True, reduce=torch.norm) for run in (model, compiled))
    assert are_alike(seen, want)


def test_each_batch_and_every_other_call():
    model, x = Model().to(DEVICE), batch()
    compiled = torch.compile(model, fullgraph=True)
    want, got = (
        [seen["blocks.1/h"] for seen in capture.each(run, [x, 2 * x, 3 * x], "blocks.1/h", progress=False)]
        for run in (model, compiled)
    )
    assert len(want) == 3 and all(map(close, want, got))
    kept = []
    for run in (model, compiled):
        with capture(run, "blocks.1/h", "grad(blocks.1/h)", every=2) as seen:
            for k in range(4):
                step(run, k * x)
        kept.append(seen)
    assert are_alike(*reversed(kept)) and len(seen.calls("blocks.1/h")) == 2
    assert close(capture.once(compiled, x, "blocks.1/h"), want[0])


class Odd(nn.Module):
    """A forward with what compiled code cannot tell."""

    def __init__(self, way):
        super().__init__()
        self.fc, self.way = nn.Linear(4, 4), way

    def forward(self, x):
        y = self.fc(x)
        if self.way == "item":
            y = y.clone()
            y[0] = 1.0
        elif self.way == "statement":
            y = y.clone()
            y.add_(1)
        elif self.way == "parts":
            torch._dynamo.graph_break()
        elif self.way == "list":
            z = []
            z.append(y)
            y = z[0] * 2
        elif self.way == "comprehension":
            y = sum([part for part in (y, x)])
        elif self.way == "helper":
            y = helper(y)
        return y * 2


def helper(y):
    z = y.sin()
    return z


class Child(Odd):
    def forward(self, x):
        y = super().forward(x)
        return y + 1


@pytest.mark.parametrize("cls", [Odd, Child])
@pytest.mark.parametrize("way", ["item", "statement", "parts", "list", "comprehension", "helper"])
def test_whatever_the_forward_is_like_the_values_are_right(way, cls):
    model, x = nn.Sequential(cls(way)).to(DEVICE), batch()
    asked = "0/y", "grad(0/y)", "0/mul"
    compiled = torch.compile(model, backend="aot_eager")
    for some in (asked[:2], asked, ("0/helper/z",) if way == "helper" else asked):
        want = both(model, model, x, *some)
        for _ in range(2):
            assert are_alike(both(model, compiled, x, *some), want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_compiled_code(reentrant):
    model, values = Model().to(DEVICE), []
    compiled = torch.compile(model, fullgraph=True)
    for run in (model, compiled):
        x = batch().requires_grad_()
        with capture(model, "blocks.1/y", "grad(blocks.1/y)") as seen:
            for k in (1, 2):
                checkpoint(run, k * x, use_reentrant=reentrant).square().sum().backward()
        values.append(seen)
    assert are_alike(*reversed(values))


def test_what_cannot_be_had_has_the_code_run_eagerly():
    model, x = Model().to(DEVICE), batch()
    compiled = torch.compile(model, fullgraph=True)
    results = []
    for run in (model, compiled):
        with edit(model, {"blocks.1/y#0": scale(2.0)}) as edits:
            results.append(run(x))
    assert close(*results) and "edited inside a forward" in note_of(edits)
    with capture(model, "blocks.1/y"), capture(compiled, "blocks.0/y") as seen:
        compiled(x)
    assert "ran eagerly" in note_of(seen) and len(seen) == 2


def test_other_instances_of_the_class_are_not_looked_into():
    models, x = [Model().to(DEVICE) for _ in range(2)], batch()
    runs = [torch.compile(model, fullgraph=True) for model in models]
    want = both(models[1], models[1], x, "blocks.1/y")
    with capture(models[1], "blocks.1/y") as seen:
        runs[0](x)
        runs[1](x), runs[1](2 * x)
        runs[0](x)
    assert are_alike(seen, want)
