"""Why a gradient is missing: each reason against what really happened: lines marked `# cut`, and autograd itself."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import EditError, capture, edit
from tenterhook.changes import scale
from tenterhook.platform import engine

HERE = Path(__file__).relative_to(Path.cwd())  # a reason names a file from the current directory
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Three layers and a body that says how they are used."""

    def __init__(self, body=None):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.blocks = nn.ModuleList([nn.Tanh(), Cutting(), nn.Tanh()])
        self.body = body or plain

    def forward(self, x):
        return self.body(self, x)


class Cutting(nn.Module):
    def forward(self, x):
        return torch.tanh(x).detach()  # cut


def plain(net, x):
    return net.c(net.b(net.a(x)))


def detached(net, x):
    h = net.a(x)
    net.log = h.detach().mean()  # for a log: cuts nothing
    h = h.relu()
    h = h.detach()  # cut
    return net.c(net.b(h))


def without_gradients(net, x):
    h = net.b(net.a(x))
    with torch.no_grad():  # cut
        h = net.c(h)
    return net.b(h)


def as_integers(net, x):
    return net.c(net.a(x).long().float())  # cut


def as_class(net, x):
    best = net.a(x).argmax(-1)  # cut
    return net.c(F.one_hot(best, 3).float())


def as_number(net, x):
    size = net.a(x).norm().item()  # cut
    return net.c(x * size)


def data(net, x):
    h = net.a(x)
    return net.c(h.data)  # cut


def numpy(net, x):
    h = net.a(x)
    values = torch.from_numpy(h.detach().numpy())  # cut
    return net.c(values)


def in_place(net, x):
    h = net.a(x)
    h = h.detach_()  # cut
    return net.c(h)


def in_a_child(net, x):
    h = net.a(x)
    for i, block in enumerate(net.blocks):
        h = block(h) * (i + 1)
    return net.c(h)


def in_a_lambda_under_a_checkpoint(net, x):
    return net.c(checkpoint(lambda h: net.b(h.detach()), net.a(x), use_reentrant=False))  # cut


@torch.no_grad()  # cut
def helper(h):
    return h * 2


def in_a_helper(net, x):
    return net.c(helper(net.a(x)))


def in_a_container(net, x):
    kept = []
    for part in (1.0, 2.0):
        kept.append(net.a(x) * part)
    return net.c(torch.stack(kept).sum(0).detach())  # cut


def line_of_cut(function):
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if line.rstrip().endswith("# cut"))


def reasons(model, addresses, run, **options):
    with capture(model, *addresses, **options) as seen:
        run(model)
    return {address: why for address, fired, why in seen.report() if fired == "never"}


def backward(model):
    model(X).sum().backward()


CUTS = [
    (detached, detached, "h.detach()", "b"),
    (without_gradients, without_gradients, "torch.no_grad()", "b"),
    (as_integers, as_integers, ".long()", "c"),
    (as_class, as_class, ".argmax(-1)", "c"),
    (as_number, as_number, ".item()", "c"),
    (data, data, "h.data", "c"),
    (numpy, numpy, "h.detach()", "c"),
    (in_place, in_place, "h.detach_()", "c"),
    (in_a_child, Cutting.forward, "torch.tanh(x).detach()", "c"),
    (in_a_lambda_under_a_checkpoint, in_a_lambda_under_a_checkpoint, "h.detach()", "b"),
    (in_a_helper, helper, "torch.no_grad()", "c"),
    (in_a_container, in_a_container, ".detach()", "c"),
]


@pytest.mark.parametrize(("body", "where", "what", "after"), CUTS, ids=lambda one: getattr(one, "__qualname__", one))
def test_the_place_where_the_graph_is_cut(body, where, what, after):
    net = Net(body)
    told = reasons(net, ["grad(a)", "grad(a.weight)"], backward)
    assert net.a.weight.grad is None and getattr(net, after).weight.grad is not None  # autograd's own word
    for why in told.values():
        assert f"{what}`" in why and f"({HERE}:{line_of_cut(inspect.unwrap(where))})" in why
    assert f"begins after it with {after}" in told["grad(a)"] and "frozen" not in str(told)


def criterion(out, target):
    return F.mse_loss(out.detach(), target)  # cut


def test_a_cut_in_the_loss_function():
    def run(model):
        out = model(X)
        loss = criterion(out, X) + 0.1 * model.c.weight.norm()
        loss.backward()

    told = reasons(net := Net(), ["grad(a)", "grad(c)"], run)
    assert net.a.weight.grad is None and net.c.weight.grad is not None
    assert len(told) == 2
    assert all("out.detach()` in criterion" in why and f":{line_of_cut(criterion)})" in why for why in told.values())


def test_what_the_loss_does_not_use_is_not_said_to_be_cut():
    def run(model):
        model(X)
        model.b(X).sum().backward()

    told = reasons(Net(), ["grad(a)"], run)
    assert "not used for the loss, or cut off before that, where is unknown" in told["grad(a)"]

    def beside(net, x):
        h = net.a(x)
        net.log = h.detach()
        return net.c(x)

    told = reasons(Net(beside), ["grad(a)"], backward)
    assert "detach" not in told["grad(a)"] and "where is unknown" in told["grad(a)"]


def test_an_output_that_is_not_used_is_not_said_to_be_cut():
    def body(net, x):
        h = net.a(x)
        return {"out": net.c(x), "beside": h.detach()}

    told = reasons(Net(body), ["grad(a)"], lambda model: model(X)["out"].sum().backward())
    assert "detach" not in told["grad(a)"] and "where is unknown" in told["grad(a)"]

    def pair(net, x):
        h = net.a(x)
        return net.c(x), h.detach()

    def run(model):
        out, _ = model(X)
        out.sum().backward()

    told = reasons(Net(pair), ["grad(a)"], run)
    assert "detach" not in told["grad(a)"] and "where is unknown" in told["grad(a)"]


def start(loss):
    loss.backward()


def test_a_backward_that_another_function_starts():
    def run(model):
        out = model(X)
        loss = out.detach().sum() + model.c.weight.sum()  # cut
        start(loss)

    why = reasons(Net(), ["grad(a)"], run)["grad(a)"]
    assert "out.detach()" in why and f":{line_of_cut(run)})" in why


def test_the_last_call_without_gradients_does_not_hide_the_others():
    def run(model):
        model(X)
        with torch.no_grad():
            model(X)

    assert "none ran" in reasons(Net(), ["grad(a)"], run)["grad(a)"]


def test_a_source_that_is_not_at_hand_is_unknown():
    names = {}
    exec("def body(net, x):\n    return net.c(net.a(x).detach())\n", names)
    told = reasons(Net(names["body"]), ["grad(a)"], backward)
    assert "begins after it with c" in told["grad(a)"] and "where is unknown" in told["grad(a)"]


def test_a_branch_that_may_not_have_run_is_a_perhaps():
    def body(net, x):
        h = net.a(x)
        if x.sum() < 1e9:
            h = h.detach()  # cut
        return net.c(h)

    why = reasons(Net(body), ["grad(a)"], backward)["grad(a)"]
    assert "perhaps cut by `h.detach()`" in why and "the graph is cut by" not in why


def test_which_backward_ran():
    def early(model):
        model.b(X).sum().backward()
        model(X)

    def others(model):
        torch.autograd.grad(model(X).sum(), model.c.weight)

    def twice(model):
        loss = model(X).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    assert "none ran" in reasons(Net(), ["grad(a)"], lambda model: model(X))["grad(a)"]
    assert "those that ran came before it" in reasons(Net(), ["grad(a)"], early)["grad(a)"]
    assert "the pass was for other gradients" in reasons(Net(), ["grad(a)"], others)["grad(a)"]
    assert reasons(Net(), ["grad(a)"], twice) == {}

    def only_freed(model):
        loss = model(X).sum()
        with capture(model):  # elsewhere
            loss.backward()

    assert reasons(Net(), ["grad(a)"], only_freed) == {}


def test_a_backward_that_failed_on_a_loss_without_a_graph():
    def run(model):
        with pytest.raises(RuntimeError, match="does not require grad"):
            model(X).detach().sum().backward()  # cut

    why = reasons(Net(), ["grad(a)"], run)["grad(a)"]
    assert "model(X).detach()" in why and "leads to no parameter of the model" in why


def test_what_has_no_graph_itself():
    told = reasons(Net(in_a_child), ["grad(blocks.1)", "grad(blocks.2)", "grad(blocks.2:in)"], backward)
    line = line_of_cut(Cutting.forward)
    assert "what it is given requires a gradient and its output does not" in told["grad(blocks.1)"]
    assert all("torch.tanh(x).detach()` in Cutting.forward" in why and f":{line})" in why for why in told.values())
    assert "frozen" not in str(told)
    net = Net()
    net.a.requires_grad_(False)
    told = reasons(net, ["grad(a)", "grad(a.weight)", "grad(a:in)"], backward)
    assert "neither do parameters of its own; frozen=True" in told["grad(a)"]
    assert told["grad(a.weight)"] == "frozen: its requires_grad is False"
    told = reasons(Net().requires_grad_(False), ["grad(a)", "grad(c)"], lambda model: model(X))
    assert all(why.startswith("frozen: nothing before it requires a gradient") for why in told.values())


def test_values_inside_a_function():
    def function(x):
        y = (x * 2).detach()  # cut
        return (y + 1).sum()

    cut = f"{HERE}:{line_of_cut(function)}"
    told = reasons(function, ["grad(y)"], lambda f: f(X.clone().requires_grad_()))
    assert "(x * 2).detach()` in" in told["grad(y)"] and cut in told["grad(y)"] and "frozen" not in told["grad(y)"]
    told = reasons(function, ["grad(y)"], lambda f: f(X))
    assert told["grad(y)"].startswith("frozen: nothing before it")


def under_no_grad(model):
    with torch.no_grad():  # cut
        model(X)


@torch.inference_mode()  # cut
def under_inference_mode(model):
    model(X)


@pytest.mark.parametrize("run", [under_no_grad, under_inference_mode])
def test_who_turned_gradients_off(run):
    why = reasons(Net(), ["grad(c)"], run)["grad(c)"]
    line = line_of_cut(inspect.unwrap(run))
    assert "torch.no_grad() or inference_mode()" in why and f"({HERE}:{line})" in why


def test_integers_and_embeddings():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3))
    told = reasons(model, ["grad(0:in)", "grad(0)"], lambda m: m(torch.tensor([1, 2])).sum().backward())
    assert told == {"grad(0:in)": "int64 values have no gradient"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_do_not_hide_what_comes(reentrant):
    def body(net, x):
        return net.c(checkpoint(net.b, net.a(x), use_reentrant=reentrant))

    assert reasons(Net(body), ["grad(a)", "grad(b)", "grad(c)"], backward) == {}


def test_an_edit_of_what_was_cut_off_says_where():
    net = Net(in_a_child)
    what = r"grad\(blocks.1@0\) cannot be edited: .*torch.tanh\(x\).detach\(\)"
    with pytest.raises(EditError, match=what), edit(net, {"grad(blocks.1)": scale(2.0)}):
        net(X)


def test_gradients_that_are_zero_are_told():
    with capture(Net(), "grad(a)", "grad(c)", "a") as seen:
        (seen._session.model()(X) * 0).sum().backward()
    rows = {address: what for address, _, what in seen.report()}
    assert rows["grad(a)"] == rows["grad(c)"] == "2×3 float32, all zeros"
    assert "zeros" not in rows["a"]


def test_torchs_own_function_is_there_again():
    before = [vars(owner)[engine.ENGINE] for owner in engine.ENGINE_IN]
    with capture(Net(), "grad(a)"), capture(Net(), "grad(a)"):
        assert vars(torch.autograd)[engine.ENGINE] is not before[0]
    assert [vars(owner)[engine.ENGINE] for owner in engine.ENGINE_IN] == before


class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def test_a_module_that_raised_is_told_with_what_it_was_given():
    model = Shapes()
    with pytest.raises(RuntimeError, match="mat1 and mat2"), capture(model, grad=True) as seen:
        model(X)
    told = {address: (fired, why) for address, fired, why in seen.report()}
    assert told["first"] == ("1×", "2×4 float32")
    for address in ("second", "grad(second)"):
        assert told[address][1].startswith("it was called with 2×4 float32 and did not return: RuntimeError: mat1 and")
    assert "called with 2×3 float32 and did not return" in told["."][1]
    assert "not reached before RuntimeError" in told["third"][1] and "in second, called with 2×4" in told["third"][1]
    assert "left by RuntimeError in second, called with 2×4 float32" in str(seen.report())
