"""capture and observe in compiled code: it stays compiled, and gives what eager code gives."""

import threading
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import capture, observe
from tests.compiled.models import BACKENDS, CAN_WRITE, DEVICE, Net, batch, by_hand, close, graphs, net, note_of

# Dynamo looks at the .grad of what flows into a graph. It hides the warning, but only after it was made an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


WAYS = {
    "module": lambda m, **o: torch.compile(m, **o),
    "full graph": lambda m, **o: torch.compile(m, fullgraph=True, **o),
    "in place": lambda m, **o: m.compile(**o) or m,
    "forward method": lambda m, **o: setattr(m, "forward", torch.compile(m.forward, **o)) or m,
    "function": lambda m, **o: torch.compile(lambda x: m(x), **o),
    "submodule": lambda m, **o: setattr(m, "body", torch.compile(m.body, **o)) or m,
    "submodule in place": lambda m, **o: m.body.compile(**o) or m,
    "second instance": lambda m, **o: [torch.compile(net(), **o)(batch()), torch.compile(m, **o)][1],
}


def step(run, x):
    run(x).square().sum().backward()


def captured(model, run, x, *selectors):
    model.zero_grad()
    with capture(model, *(selectors or ("**", "grad(body.layer.weight)")), grad=not selectors) as seen:
        step(run, x)
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_eager_code(way, backend):
    model, x = net(), batch()
    want = by_hand(model, x)
    run = WAYS[way](model, backend=backend)
    step(run, x)
    before = graphs()
    seen = captured(model, run, x)
    assert {address: True for address in seen} == {address: close(seen[address], want[address]) for address in seen}
    assert len(seen) == 15 and not seen.report().silent and "had the taps in it" in note_of(seen)
    made = graphs()
    assert made > before, "nothing was compiled: then it ran eagerly"

    again = captured(model, run, x)
    assert all(close(again[address], seen[address]) for address in seen) and len(again) == len(seen)
    assert graphs() == made, "entering again compiled"
    model.zero_grad()
    step(run, x)
    assert graphs() == made, "leaving compiled"
    assert all(close(p.grad, want[f"grad({name.replace('_orig_mod.', '')})"]) for name, p in model.named_parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_twelve_steps_of_a_training_are_as_without_it(backend):
    models = [net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
    compiled = torch.compile(models[1], backend=backend)
    for i in range(12):
        x = batch(seed=i)
        for optimizer in optimizers:
            optimizer.zero_grad()
        want = by_hand(models[0], x)
        step(models[0], x)
        with capture(compiled, "body.layer", "layer", grad=True) as seen:
            step(compiled, x)
        assert all(close(seen[address], want[address]) for address in seen) and len(seen) == 4
        assert all(close(a.grad, b.grad) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
        for optimizer in optimizers:
            optimizer.step()
    assert graphs() == 1 and "had the taps" in note_of(seen)


Pair = namedtuple("Pair", "a b")


@dataclass
class Data:
    a: torch.Tensor
    n: int


class Structured(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x.sin(), x * 2)


class Around(nn.Module):
    def __init__(self, make, use):
        super().__init__()
        self.layer, self.inner, self.use = nn.Linear(4, 4), Structured(make), use

    def forward(self, x):
        return self.use(self.inner(self.layer(x)))


STRUCTURES = {
    "tuple": (lambda a, b: (a, b, 3, None, "s"), lambda out: out[0] + out[1]),
    "list": (lambda a, b: [a, [b]], lambda out: out[0] + out[1][0]),
    "dict": (lambda a, b: {"a": a, "more": (b, 1.5)}, lambda out: out["a"] + out["more"][0]),
    "namedtuple": (Pair, lambda out: out.a + out.b),
    "dataclass": (lambda a, b: Data(a, 2), lambda out: out.a * out.n),
    "twice": (lambda a, b: (a, a), lambda out: out[0] + out[1]),
    "unused": (lambda a, b: (a, b), lambda out: out[0]),
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return close(a, b)
    if isinstance(a, Data):
        return isinstance(b, Data) and same((a.a, a.n), (b.a, b.n))
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", STRUCTURES)
def test_structured_values_keep_their_structure(kind, backend):
    model, x = Around(*STRUCTURES[kind]).to(DEVICE), batch()
    with capture(model, "inner", grad=True) as want:
        step(model, x)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with capture(compiled, "inner", grad=True) as seen:
        step(compiled, x)
    assert set(seen) == set(want) and all(same(seen[address], want[address]) for address in want), seen
    assert "had the taps" in note_of(seen)


def test_a_part_of_a_structure():
    model, x = Around(*STRUCTURES["tuple"]).to(DEVICE), batch()
    asked = "inner:out[1]", "grad(inner:out[0])", "inner:in", "layer:in[0]", "inner:out[x]"
    with capture(model, *asked) as want:
        step(model, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with capture(compiled, *asked) as seen:
        step(compiled, x)
    assert set(seen) == set(want) == set(map(str, asked[:4])) and all(same(seen[a], want[a]) for a in want)
    assert list(seen.report()) == list(want.report())


class Takes(nn.Module):
    """A model whose part takes arguments of all kinds, and one tensor twice, which others use as well."""

    def __init__(self):
        super().__init__()
        self.layer, self.part = nn.Linear(4, 4), Part()

    def forward(self, x):
        h = self.layer(x)
        return self.part(h, h * 2, more={"a": h.sin(), "n": 3}, flag=True) + h


class Part(nn.Module):
    def forward(self, x, y, more, flag=False):
        return x * y + more["a"].view(-1, 4) * more["n"] if flag else x


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_and_the_share_of_a_module_in_their_gradients(backend):
    model, x = Takes().to(DEVICE), batch()
    asked = "part:in", "grad(part:in)", "part:in[more]", "grad(part:in[y])", "grad(layer)", "grad(part:in[more][a])"
    with capture(model, *asked) as want:
        step(model, x)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        with capture(compiled, *asked) as seen:
            step(compiled, x)
        assert set(seen) == set(want) == set(asked) and "had the taps" in note_of(seen)
        assert {a: same(seen[a], want[a]) for a in asked} == dict.fromkeys(asked, True)
    assert graphs() == 1


@pytest.mark.parametrize("name", ["act", "on"])
def test_the_gradient_of_an_input_that_is_written_into_or_handed_on(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.act, self.on = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Identity()

        def forward(self, x):
            h = self.layer(x)
            return self.on(self.act(h)) * h

    model, x = Model().to(DEVICE), batch()
    with capture(model, f"{name}:in", grad=True) as want:
        step(model, x)
    compiled = torch.compile(model, fullgraph=True)
    with capture(compiled, f"{name}:in", grad=True) as seen:
        step(compiled, x)
    assert set(seen) == set(want) and all(same(seen[a], want[a]) for a in want) and "ran eagerly" in note_of(seen)


class Opaque:
    def __init__(self, x):
        self.x = x


def test_an_observer_of_what_cannot_be_handed_over_has_the_code_run_eagerly():
    model = Around(lambda a, b: (a, Opaque(b)), lambda out: out[0] * out[1].x).to(DEVICE)
    compiled, kinds = torch.compile(model, fullgraph=True), []
    with observe(compiled, {"inner": lambda value: kinds.append(type(value[1]))}) as one:
        step(compiled, batch())
    assert kinds == [Opaque] and "Opaque" in note_of(one)
    with capture(compiled, "inner") as seen:
        step(compiled, batch())
    assert isinstance(seen["inner"][0], torch.Tensor) and "had the taps" in note_of(seen)


def test_the_gradient_of_what_is_written_into_later():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)).to(DEVICE), batch()
    want = by_hand(model, x)
    compiled = torch.compile(model, fullgraph=True)
    with capture(compiled, "0", "1", grad=True) as seen:
        step(compiled, x)
    assert len(seen) == 4 and all(close(seen[a], want[a]) for a in seen)
    assert "had the taps" in note_of(seen) or not CAN_WRITE


def test_what_is_written_into_later_was_copied():
    model, x = net(), batch()
    want = by_hand(model, x)
    compiled = torch.compile(model)
    seen = captured(model, compiled, x, "layer", "body.layer")
    with capture(model, "layer", copy=False) as raw:
        step(compiled, x)
    assert close(seen["layer"], want["layer"]) and close(raw["layer"], want["layer"])


def test_options_are_as_in_eager_code():
    model, x = net(), batch()
    compiled = torch.compile(model, fullgraph=True)
    options = {
        "reduce": {"reduce": torch.norm},
        "last": {"keep": "last"},
        "every": {"every": 2},
        "dtype": {"dtype": torch.float64, "device": "cpu"},
    }
    for some in options.values():
        values = []
        for run in (model, compiled):
            with capture(run, "layer", "body.act@1", "grad(body)", **some) as seen:
                for i in range(4):
                    step(run, x + i)
            values.append(seen)
        want, got = values
        assert want.keys() == got.keys() and "had the taps" in note_of(got), some
        for address in want:
            pairs = list(zip(want.calls(address), got.calls(address), strict=True))
            assert pairs and all(close(a, b) and a.dtype == b.dtype for a, b in pairs), (some, address)


def test_an_observer_runs_as_plain_python():
    model, x = net(), batch()
    want = by_hand(model, x)
    told = []
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(3):
        with observe(
            compiled, {"**<Linear>": lambda value, site: told.append((str(site), float(value.norm())))}
        ) as one:
            compiled(x)
    assert [name for name, _ in told] == ["layer@0", "body.layer@0"] * 3 and "had the taps" in str(one.report())
    assert all(abs(norm - float(want[name[:-2]].norm())) < 1e-3 for name, norm in told)
    assert graphs() == 1, "an observer with side effects is compiled again at each call"


def test_an_exception_in_an_observer_comes_out():
    model, x = net(), batch()
    compiled = torch.compile(model)

    def look(value):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), observe(compiled, {"layer": look}):
        compiled(x)
    seen = captured(model, compiled, x, "layer")
    assert close(seen["layer"], by_hand(model, x)["layer"])


def test_calls_are_told_apart_and_so_are_their_gradients():
    model, x = net(), batch()
    compiled = torch.compile(model, fullgraph=True)
    values = []
    for run in (model, compiled):
        with capture(run, "layer", "grad(layer)") as seen:
            first, second, third = (run(x * k) for k in (1, 2, 3))
            (first.sum() + 5 * third.square().sum()).backward()
            second.sum().backward()
        values.append([*seen.calls("layer"), *seen.calls("grad(layer)")])
    assert len(values[1]) == 6 and all(map(close, *values))


def test_a_backward_pass_after_the_session_hands_over_nothing():
    model, x = net(), batch()
    compiled = torch.compile(model, fullgraph=True)
    with capture(compiled, "layer", grad=True) as seen:
        early = compiled(x)
    with capture(compiled, "layer", grad=True) as later:
        compiled(2 * x)
        early.sum().backward()
    assert set(seen) == {"layer"} and later.report().silent == ["grad(layer)"]


def test_sessions_within_each_other_and_in_any_order():
    model, x = net(), batch()
    want = by_hand(model, x)
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(2):
        outer, inner = capture(compiled, "layer", grad=True), capture(compiled, "layer", "body")
        one, two = outer.__enter__(), inner.__enter__()
        step(compiled, x)
        outer.__exit__(None, None, None)
        step(compiled, x)
        inner.__exit__(None, None, None)
        assert len(one.calls("layer")) == len(one.calls("grad(layer)")) == 1 and len(two.calls("layer")) == 2
        assert all(
            close(seen[a], want[a.partition("@")[0]])
            for seen in (one, two)
            for a in ("layer@0", "body@-1")
            if a != "body@-1" or seen is two
        )
    assert graphs() == 2, "the same sessions were compiled again"


def test_a_thread_without_a_session_runs_as_it_did():
    model, x = net(), batch()
    compiled = torch.compile(model, fullgraph=True)
    compiled(x)
    with capture(compiled, "layer") as seen:
        compiled(x)
        thread = threading.Thread(target=compiled, args=(x,))
        thread.start()
        thread.join()
    assert len(seen.calls("layer")) == 1
    before = graphs()
    compiled(x)
    assert graphs() == before


def test_many_different_sessions_leave_the_users_code_its_compilations():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))).to(DEVICE)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    compiled(batch(1))
    for i in range(20):
        for _ in range(2):
            with capture(compiled, str(i)) as seen:
                compiled(batch(1))
            assert "had the taps" in note_of(seen)
    before = graphs()
    assert before == 21
    for rows in range(1, 9):  # torch.compile makes 8 of one function
        compiled(batch(rows))
    assert graphs() == before + 7, "our compilations were counted as the user's"
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(batch(1))


def test_more_different_sessions_than_torch_keeps_compiled_code_for():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12))).to(DEVICE)
    want = by_hand(model, batch())
    compiled = torch.compile(model, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(accumulated_recompile_limit=10):
        compiled(batch())
        for i in range(12):
            with capture(compiled, str(i)) as seen:
                compiled(batch())
            assert close(seen[str(i)], want[str(i)])
            assert ("had the taps" if i < 4 else "compiled too often") in note_of(seen)
        assert graphs() == 5
        compiled(batch(3))
        assert graphs() == 6, "our compilations were counted as the user's"
        with capture(compiled, "1") as seen:
            compiled(batch())
        assert "had the taps" in note_of(seen) and graphs() == 6


def test_code_that_has_to_be_compiled_again_and_again_runs_eagerly_in_the_end():
    model = nn.Sequential(nn.Linear(4, 4)).to(DEVICE)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    with capture(compiled, "0") as seen:
        for rows in range(1, 12):
            compiled(batch(rows))
    assert [len(value) for value in seen.calls("0")] == list(range(1, 12))
    assert graphs() == 8 and "ran eagerly" in note_of(seen) and "the limit of torch.compile" in note_of(seen)


def test_shapes_may_change():
    model = net()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    want = [by_hand(model, batch(rows)) for rows in (2, 3, 7)]
    with capture(compiled, "layer", "body", grad=True) as seen:
        for rows in (2, 3, 7):
            step(compiled, batch(rows))
    for address in ("layer", "body", "grad(layer)", "grad(body)"):
        assert all(close(got, truth[address]) for got, truth in zip(seen.calls(address), want, strict=True))
    assert graphs() == 1


class Breaks(nn.Module):
    """A model with Python that cannot be compiled in the middle."""

    def __init__(self):
        super().__init__()
        self.first, self.body = nn.Linear(4, 4), Net()

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.body(x).sin()


@pytest.mark.parametrize("backend", BACKENDS)
def test_code_that_is_compiled_in_parts(backend):
    model, x = Breaks().to(DEVICE), batch()
    want = by_hand(model, x)
    compiled = torch.compile(model, backend=backend)
    step(compiled, x)
    for _ in range(2):
        seen = captured(model, compiled, x, "**", "grad(**)")
        assert set(seen) == {a for a in want if "weight" not in a and "bias" not in a}
        assert all(close(seen[a], want[a]) for a in seen)
    made = graphs()
    captured(model, compiled, x, "**", "grad(**)")
    step(compiled, x)
    assert graphs() == made


class Parts(nn.Module):
    """Several modules of one class, which are compiled one by one and share their code."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Net() for _ in range(4))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
            torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("backend", BACKENDS)
def test_modules_that_share_their_code_are_told_apart(backend):
    model, x = Parts().to(DEVICE), batch()
    want = by_hand(model, x)
    for part in model.parts:
        part.compile(backend=backend, fullgraph=True)
    step(model, x)
    asked = "parts.2.layer", "grad(parts.2.layer)", "parts.1.layer", "grad(parts.1.layer)", "grad(parts.3.act)"
    made = 6  # two for the first part and the others, then one for each of the four
    for _ in range(3):
        seen = captured(model, model, x, *asked)
        assert set(seen) == set(asked) and all(close(seen[a], want[a]) for a in seen), note_of(seen)
        assert "had the taps" in note_of(seen) and graphs() == made
    step(model, x)
    assert graphs() == made


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.end = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)

    def forward(self, x):
        return self.end(checkpoint(self.body, x, use_reentrant=False))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tap_in_a_checkpoint_has_the_code_run_eagerly(backend):
    model, x = Checkpointed().to(DEVICE), batch()
    with capture(model, "body.0", "end", grad=True) as want:
        step(model, x)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    step(compiled, x)
    for _ in range(2):
        with capture(compiled, "body.0", "end", grad=True) as seen:
            step(compiled, x)
        assert set(seen) == set(want) and all(close(seen[a], want[a]) for a in want)
        assert "ran eagerly" in note_of(seen) and "checkpoint" in note_of(seen)
    with capture(compiled, "end", grad=True) as seen:
        step(compiled, x)
    assert all(close(seen[a], want[a]) for a in seen) and "had the taps" in note_of(seen)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_compiled_code(reentrant):
    model, x = net(), batch().requires_grad_()
    compiled = torch.compile(model, fullgraph=True)
    values = []
    for run in (model, compiled):
        with capture(run, "layer", "body", grad=True) as seen:
            checkpoint(run, x, use_reentrant=reentrant).square().sum().backward()
        values.append(seen)
    assert values[0].keys() == values[1].keys()
    for a in values[0]:
        pairs = zip(values[0].calls(a), values[1].calls(a), strict=True)
        assert all(close(one, other) for one, other in pairs), a


class HandsOn(nn.Module):
    def forward(self, x):
        return x


def test_the_gradient_of_an_input_that_is_handed_on_has_the_code_run_eagerly():
    model, x = nn.Sequential(HandsOn(), nn.Linear(4, 4)).to(DEVICE), batch().requires_grad_()
    compiled = torch.compile(model, fullgraph=True)
    with capture(compiled, "0", grad=True) as seen:
        step(compiled, x)
    assert torch.equal(seen["grad(0)"], x.grad) and "handed on" in note_of(seen)
    assert not x._backward_hooks


def test_what_cannot_be_had_compiled_runs_eagerly_and_says_why():
    model, x = net(), batch()
    compiled = torch.compile(model, fullgraph=True)
    step(compiled, x)
    ways = {
        "eager=True": {"eager": True},
        "frozen=True": {"frozen": True},
        "layer keeps the graph": {"detach": False},
    }
    for why, options in ways.items():
        with capture(compiled, "layer", **options) as seen:
            compiled(x)
        assert close(seen["layer"], by_hand(model, x)["layer"]) and why in note_of(seen)
    assert graphs() == 1


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        logits = self.layer(x).sin()
        return {"loss": logits.square().sum(), "logits": logits}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_an_output_that_makes_another(backend):
    model, x = WithLoss().to(DEVICE), batch()
    compiled = torch.compile(model, backend=backend)
    for asked, note in (((".", "layer"), "ran eagerly"), (("layer",), "had the taps")):
        with capture(model, *asked, grad=True) as want:
            model(x)["loss"].backward()
        with capture(compiled, *asked, grad=True) as seen:
            compiled(x)["loss"].backward()
        assert set(seen) == set(want) and all(same(seen[a], want[a]) for a in want) and note in note_of(seen)


def test_two_models_of_one_class_are_told_apart():
    models, x = [net(), net()], batch()
    compiled = [torch.compile(m, fullgraph=True) for m in models]
    with capture(models[1], "layer", grad=True) as seen:
        for run in compiled:
            step(run, x)
    want = by_hand(models[1], x)
    assert len(seen.calls("layer")) == 1 and all(close(seen[a], want[a]) for a in seen)


def test_without_gradients():
    model, x = net(), batch()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad(), capture(compiled, "layer", grad=True) as seen:
        compiled(x)
    assert set(seen) == {"layer"} and "torch.no_grad()" in str(seen.report())


def test_autocast():
    model, x = net(), batch()
    compiled = torch.compile(model, fullgraph=True)
    values = []
    for run in (model, compiled):
        with torch.autocast(DEVICE, dtype=torch.bfloat16), capture(run, "layer", "body", grad=True) as seen:
            step(run, x)
        values.append(seen)
    for a in values[0]:
        assert values[0][a].dtype == values[1][a].dtype and torch.allclose(*(v[a] for v in values), atol=0.05), a


def test_one_forward_that_ends_early():
    model, x = net(), batch()
    compiled = torch.compile(model, fullgraph=True)
    want = by_hand(model, x)
    for _ in range(2):
        assert close(capture.once(compiled, x, "layer@0"), want["layer"])
        assert close(capture.once(compiled, x, "body"), want["body"])
    features = [seen["body.layer"] for seen in capture.each(compiled, [x, x], "body.layer", progress=False)]
    assert all(close(one, want["body.layer"]) for one in features)
    assert close(compiled(x), want["."])
