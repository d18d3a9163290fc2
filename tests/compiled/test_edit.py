"""edit in compiled code: it stays compiled, and gives what eager code gives."""

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import EditError, capture, edit
from tenterhook.changes import add, clip_norm, noise, scale, zero
from tests.compiled.models import BACKENDS, DEVICE, batch, close, graphs, net, note_of
from tests.compiled.test_capture import STRUCTURES, WAYS, Around, step

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def gradients(model, run, x, changes, **options):
    """The output and the gradients of a step under some edits, and their report."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with edit(model, changes, **options) as edits:
        out = run(x)
        out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())], edits


CHANGES = {
    "ready-made": {"layer": scale(2.0), "body.act": zero()},
    "function": {"layer": lambda v: v.sin() + v.mean(), "body": lambda v, site: v * len(str(site))},
    "in place": {"body.layer": lambda v: [v.mul_(3), None][1]},
    "number and list": {"layer": 0.5, "body": [scale(2.0), add(torch.ones(4, device=DEVICE))]},
    "gradient": {"grad(layer)": scale(3.0), "grad(body.act)": clip_norm(0.1), "grad(body)": lambda g: g + 1},
    "both": {"layer": scale(0.5), "grad(layer)": lambda g: g * 2, "grad(.)": scale(2.0)},
    "input": {"body": lambda v: v, "body.layer:in": scale(2.0), "body:in[x]": lambda v: v + 1, "layer:in[0]": 0.5},
    "gradient of an input": {"grad(body:in)": scale(3.0), "grad(body.body:in[0])": lambda g: g + 1},
    "one call": {"layer@0": scale(5.0), "grad(body@0)": zero()},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", CHANGES)
def test_edits_are_those_of_eager_code(kind, backend):
    model, x = net(), batch()
    run = torch.compile(model, backend=backend, fullgraph=True)
    bare, _ = gradients(model, run, x, {}, strict=False)
    want, told = gradients(model, model, x, CHANGES[kind])
    assert not all(map(close, want, bare)), "the edits change nothing: then this shows nothing"
    made = None
    for _ in range(3):
        got, edits = gradients(model, run, x, CHANGES[kind])
        assert [close(a, b) for a, b in zip(got, want, strict=True)] == [True] * len(want)
        assert "had the taps" in note_of(edits) and made in (None, graphs())
        assert [row[:3] for row in edits.report()] == [row[:3] for row in told.report()]
        made = graphs()
    after, _ = gradients(model, run, x, {}, strict=False)
    assert all(map(close, after, bare)) and graphs() == made


@pytest.mark.parametrize("way", WAYS)
def test_edits_whatever_is_compiled(way):
    model, x = net(), batch()
    changes = {"body.layer": lambda v: v + 1, "grad(body.layer)": scale(3.0), "body": scale(2.0)}
    want, _ = gradients(model, model, x, changes)
    run = WAYS[way](model, backend="inductor")
    run(x)
    for _ in range(2):
        got, _ = gradients(model, run, x, changes)
        assert all(map(close, got, want))


def test_a_function_runs_as_plain_python_and_is_another_each_time():
    model, x = net(), batch()
    run = torch.compile(model, fullgraph=True)
    seen = []

    def by(k):
        return lambda v: seen.append(float(v.detach().sum())) or v * k

    for k in range(1, 13):
        want, _ = gradients(model, model, x, {"layer": by(k)})
        got, edits = gradients(model, run, x, {"layer": by(k)})
        assert all(map(close, got, want)) and "had the taps" in note_of(edits)
    assert len(seen) == 24 and graphs() == 1


@pytest.mark.parametrize("kind", [k for k in STRUCTURES if k != "dataclass"])
def test_structures_are_edited(kind):
    model, x = Around(*STRUCTURES[kind]).to(DEVICE), batch()
    part = {"dict": "inner:out[a]", "list": "inner:out[1][0]"}.get(kind, "inner:out[0]")
    changes = {part: scale(2.0), f"grad({part})": scale(5.0)}
    want, _ = gradients(model, model, x, changes)
    run = torch.compile(model, fullgraph=True)
    got, edits = gradients(model, run, x, changes)
    assert all(map(close, got, want)) and "had the taps" in note_of(edits)


def test_what_cannot_be_made_anew_has_the_code_run_eagerly():
    model, x = Around(*STRUCTURES["dataclass"]).to(DEVICE), batch()
    want, _ = gradients(model, model, x, {"inner:out[a]": scale(2.0)})
    run = torch.compile(model, fullgraph=True)
    got, edits = gradients(model, run, x, {"inner:out[a]": scale(2.0)})
    assert all(map(close, got, want)) and "made anew" in note_of(edits)


class HandsOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.on, self.end = nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4)

    def forward(self, x):
        x = self.layer(x)
        return self.end(self.on(x).view(-1, 4)) + x


def test_the_gradient_of_a_tensor_that_others_use_is_edited_on_its_own_way():
    model, x = HandsOn().to(DEVICE).eval(), batch()
    want, _ = gradients(model, model, x, {"grad(on)": scale(3.0)})
    run = torch.compile(model, fullgraph=True)
    got, edits = gradients(model, run, x, {"grad(on)": scale(3.0)})
    assert all(map(close, got, want)) and "had the taps" in note_of(edits)


class Writes(nn.Module):
    """A model in which a module writes into its input, which is used afterwards."""

    def __init__(self):
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.layer(x)
        return self.act(h) + h


@pytest.mark.parametrize("changes", [{"act:in": lambda v: v - 0.5}, {"grad(act:in)": scale(3.0)}])
def test_an_input_that_is_written_into_has_the_code_run_eagerly(changes):
    model, x = Writes().to(DEVICE), batch()
    want, _ = gradients(model, model, x, changes)
    run = torch.compile(model, fullgraph=True)
    got, edits = gradients(model, run, x, changes)
    assert all(map(close, got, want)) and "writes into an input" in note_of(edits)


def test_sessions_within_each_other_edit_in_turn():
    model, x = net(), batch()
    run, results = torch.compile(model, fullgraph=True), []
    changes = [{"layer": scale(2.0), "grad(layer)": scale(3.0)}, {"layer": add(1.0), "grad(layer)": add(1.0)}]
    for order in (changes, changes[::-1]):
        for one in (model, run, run):
            with edit(one, order[0]), capture(one, "layer", grad=True) as between:
                got, edits = gradients(model, one, x, order[1])
            results.append([*got, between["layer"], between["grad(layer)"]])
    first, second = results[:3], results[3:]
    assert (
        all(map(close, first[0], first[1])) and all(map(close, first[0], first[2])) and "had the taps" in note_of(edits)
    )
    assert all(map(close, second[0], second[1])) and not all(map(close, first[0], second[0])) and graphs() == 1


def test_a_change_that_learns_gets_its_gradient():
    model, x = net(), batch()
    vector = torch.ones(4, device=DEVICE, requires_grad=True)
    run = torch.compile(model, fullgraph=True)
    for change in (add(vector), lambda v: v + vector):
        found = []
        for one in (model, run):
            vector.grad = None
            got, edits = gradients(model, one, x, {"layer": change})
            found.append([*got, vector.grad])
        assert all(map(close, *found)) and "require a gradient" in note_of(edits)


def test_a_change_that_learns_unseen_is_refused():
    model, x = net(), batch()
    held = {"vector": torch.ones(4, device=DEVICE, requires_grad=True)}
    run = torch.compile(model, fullgraph=True)
    with pytest.raises(EditError, match="eager=True"):
        gradients(model, run, x, {"layer": lambda v: v + held["vector"]})
    want, _ = gradients(model, model, x, {"layer": lambda v: v + held["vector"]})
    got, _ = gradients(model, run, x, {"layer": lambda v: v + held["vector"]}, eager=True)
    assert all(map(close, got, want))


def test_an_edit_that_fails_says_where():
    model, x = net(), batch()
    run = torch.compile(model, fullgraph=True)
    with pytest.raises(EditError, match="layer"), edit(model, {"layer": lambda v: v[:1]}):
        run(x)
    with pytest.raises(ValueError, match=r"mine \(in the change at layer"), edit(model, {"layer": raises}):
        run(x)
    with pytest.raises(EditError, match="never edited"), edit(model, {"layer@3": zero()}):
        run(x)
    with pytest.raises(EditError, match="no_grad"), torch.no_grad(), edit(model, {"grad(layer)": zero()}):
        run(x)


def raises(value):
    raise ValueError("mine")


def test_random_changes_and_dropout_have_the_same_random_state():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE)
    x, results = batch(), []
    run = torch.compile(model, fullgraph=True)
    for one in (model, run):
        torch.manual_seed(1)
        got, _ = gradients(model, one, x, {"0": noise(0.1)})
        results.append(got)
    assert all(map(close, *results))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_compiled_code(reentrant, inside):
    model, results = net(), []
    run = torch.compile(model, fullgraph=True)
    for one in (model, run):
        x = batch().requires_grad_()
        with edit(one, {"layer": scale(2.0), "body.act": lambda v: v + 1}):
            out = checkpoint(one, x, use_reentrant=reentrant).square().sum()
            if inside:
                out.backward()
        if not inside:
            out.backward()
        results.append([out.detach(), x.grad])
    assert all(map(close, *results))


def test_a_backward_pass_after_the_session():
    model, x, results = net(), batch(), []
    run = torch.compile(model, fullgraph=True)
    for one in (model, run):
        model.zero_grad()
        with edit(one, {"layer": scale(2.0)}):
            first = one(x).square().sum()
        with edit(one, {"layer": scale(3.0)}):
            second = one(x).square().sum()
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        results.append([p.grad for p in model.parameters()])
    assert all(map(close, *results))


def test_graphs_of_edits_are_let_go():
    from tenterhook.platform import tap_ops

    model = net()
    run = torch.compile(model, fullgraph=True)
    with edit(run, {"layer": scale(2.0)}):
        for i in range(20):
            step(run, batch(seed=i))
        assert len(tap_ops._graphs) < 5


def test_shapes_may_change():
    model = net()
    run = torch.compile(model, fullgraph=True, dynamic=True)
    for rows in (2, 3, 7):
        want, _ = gradients(model, model, batch(rows), CHANGES["both"])
        got, _ = gradients(model, run, batch(rows), CHANGES["both"])
        assert all(map(close, got, want))
    assert graphs() == 1
