"""compare: what it says, of what, and that it leaves nothing behind."""

import copy
import gc
import random
import threading
import weakref

import pytest
import torch
from torch import nn

from tenterhook import AddressError, compare
from tenterhook.comparing import (
    attention,
    autocast,
    batch_of,
    deterministic,
    in_dtype,
    matmul_precision,
    on_device,
    seed,
    threads,
    training,
)

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


def stack(depth=3):
    return nn.Sequential(*[Block() for _ in range(depth)]).eval()


def with_a_change(model, address="1.up"):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter(f"{address}.weight")[0, 0] += 0.5
    return other


class Calls(nn.Module):
    """Runs a function of its own after a layer."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x))


def two(f, g):
    a, b = Calls(f), Calls(g)
    b.load_state_dict(a.state_dict())
    return a, b


def test_figures_are_those_by_hand():
    a = stack()
    b = with_a_change(a)
    found = compare(a, b, X)
    one, other = a(X).detach(), b(X).detach()
    assert found["."].max == (one - other).abs().max().item()
    scale = one.abs().max().item() * torch.finfo(torch.float32).eps
    assert found["."].units == pytest.approx(found["."].max / scale)
    cosine = torch.cosine_similarity(one.flatten().double(), other.flatten().double(), dim=0)
    assert found["."].cosine == pytest.approx(cosine.item(), abs=1e-6)


def test_verdicts_tell_what_is_made_from_what_is_passed_on():
    a = stack()
    b = with_a_change(with_a_change(a), "2.down")
    verdicts = {row.address: row.verdict for row in compare(a, b, X)}
    assert verdicts["1.norm"] == verdicts["0"] == "equal"
    assert verdicts["1.up"] == "first" and verdicts["2.down"] == "differs"
    assert verdicts["1.act"] == verdicts["2.up"] == verdicts["."] == "grown"


def test_large_values_are_compared_in_chunks(monkeypatch):
    from tenterhook.comparing import apart

    a, b = torch.randn(7, 3, 5), torch.randn(7, 3, 5)
    whole = apart.apart(a, b)
    monkeypatch.setattr(apart, "CHUNK", 4)
    assert apart.apart(a, b) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("f", "g", "what"),
    [
        (lambda h: h, lambda h: h.index_fill(0, torch.tensor(1), torch.nan), "not finite"),
        (lambda h: h, lambda h: h.index_fill(0, torch.tensor(1), torch.inf), "not finite"),
        (lambda h: h, lambda h: h[:3], "5×8 against 3×8"),
        (lambda h: h > 0, lambda h: h > 0.3, "max |Δ| 1"),
        (lambda h: h.argmax(-1), lambda h: h.argmin(-1), "max |Δ|"),
        (lambda h: {"x": h, "y": h + 1}, lambda h: {"x": h, "y": h + 2}, "max |Δ|"),
        (lambda h: torch.complex(h, h), lambda h: torch.complex(h, -h), "max |Δ|"),
        (lambda h: h.to(torch.float16), lambda h: h.to(torch.float16) * 2, "max |Δ|"),
    ],
    ids=["nan", "inf", "shape", "bool", "integer", "dict", "complex", "half"],
)
def test_values_of_every_kind_that_differ(f, g, what):
    found = compare(*two(f, g), X)
    assert found.first.address == "." and what in str(found.first)
    assert compare(*two(f, f), X).equal


@pytest.mark.parametrize(
    ("f", "g"),
    [
        (lambda h: h.index_fill(0, torch.tensor(1), torch.nan), lambda h: h.index_fill(0, torch.tensor(1), torch.nan)),
        (lambda h: h / 0, lambda h: h / 0),
        (lambda h: (h, None, "text"), lambda h: [h, None, "text"]),
        (lambda h: {"x": h}, lambda h: h),
        (lambda h: h[:0], lambda h: h[:0]),
        (lambda h: h.to_sparse(), lambda h: h),
    ],
    ids=["nan on both sides", "inf on both sides", "list for tuple", "a dict around it", "empty", "sparse"],
)
def test_values_that_are_the_same(f, g):
    assert compare(*two(f, g), X).equal


def test_a_leaf_that_one_side_alone_has_is_told():
    found = compare(*two(lambda h: (h, h + 1), lambda h: (h,)), X)
    assert "[1] in a alone" in str(found)


def test_rounding_of_another_order_is_rounding():
    found = compare(*two(lambda h: h.sum(-1), lambda h: h.flip(-1).cumsum(-1)[:, -1]), X)
    assert found.agree and found.first is None


def test_a_shared_module_is_named_with_its_call():
    class Twice(nn.Module):
        def __init__(self, second):
            super().__init__()
            self.layer, self.second = nn.Linear(8, 8), second

        def forward(self, x):
            return self.layer(self.layer(x) * self.second)

    a, b = Twice(1.0), Twice(1.1)
    b.load_state_dict(a.state_dict())
    found = compare(a, b, X)
    assert [row.address for row in found] == ["layer", "layer@1", "."]
    assert found.first.address == "." and found.first.seen_at.startswith("layer:in")
    assert "self.layer(x) * self.second" in found.first.line


@pytest.mark.parametrize("who", ["a", "b", "both"])
def test_what_agreed_is_shown_where_one_raises(who):
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError("boom")

    models = {name: stack() for name in "ab"}
    models["b"].load_state_dict(models["a"].state_dict())
    for name in "ab" if who == "both" else who:
        models[name][1].act = Raises()
    found = compare(models["a"], models["b"], X)
    assert not found.agree and not found.equal
    assert f"{'a' if who == 'both' else who} raised ValueError in 1.act: boom" in found.verdict
    assert "8 of the 8 values until then agree" in found.verdict
    assert found["1.up"].verdict == "equal"


def test_inputs_that_b_does_not_take():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, *, hidden):
            return self.layer(hidden)

    class Plain(Named):
        def forward(self, x):
            return self.layer(x)

    a, b = Plain(), Named()
    b.load_state_dict(a.state_dict())
    assert "b raised TypeError" in compare(a, b, X).verdict
    assert compare(a, b, X, b_inputs={"hidden": X}).equal


def test_nothing_of_the_models_changes():
    a, b = stack().train(), stack().train()
    a.append(nn.BatchNorm1d(8))
    b.append(nn.BatchNorm1d(8))
    for model in (a, b):
        model(X).sum().backward()
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in (a, b)]
    grads = [[p.grad.clone() for p in m.parameters()] for m in (a, b)]
    state, python = torch.get_rng_state(), random.getstate()
    given = X.clone()
    compare(a, b, given, grad=True, loss=lambda out: out.square().sum())
    compare(a, given, under=training(False))
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python and torch.equal(given, X)
    for model, was, grad in zip((a, b), before, grads, strict=True):
        assert model.training and all(torch.equal(v, was[k]) for k, v in model.state_dict().items())
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grad, strict=True))


def test_values_are_let_go_at_once():
    alive, most = weakref.WeakSet(), []

    class Counted(nn.Module):
        def forward(self, x):
            y = x * 2
            alive.add(y.untyped_storage())
            gc.collect(0)
            most.append(len(alive))
            return y

    a = nn.Sequential(*[Counted() for _ in range(40)])
    b = nn.Sequential(*[Counted() for _ in range(40)])
    assert compare(a, b, torch.randn(100)).equal
    assert max(most) < 12


def test_dropout_draws_the_same_on_both_sides():
    a = stack().train()
    b = copy.deepcopy(a)
    b.insert(1, nn.Dropout(0.5).train())  # draws more, and changes what comes after
    found = compare(a, b, X, rename={"1": "2", "2": "3"})
    assert found["0"].verdict == "equal" and found.only_b == ["1"]
    assert found.first.address == "."
    assert found["1.drop"].own.is_equal  # with the inputs of a: the same mask


def test_random_states_of_python_are_the_same_too():
    found = compare(*(m.train() for m in two(lambda h: h * random.random(), lambda h: h * random.random())), X)
    assert found.equal


def test_gradients_are_compared_in_the_order_of_the_backward():
    a = stack()
    b = copy.deepcopy(a)
    b[1].act = WrongBackward()
    found = compare(a, b, X, grad=True, loss=lambda out: out.square().sum())
    assert found.first.address == "1.act" and found.first.seen_at.startswith("grad(1.act:in")
    assert found["."].verdict == found["grad(2)"].verdict == found["grad(1.act)"].verdict == "equal"
    assert found["grad(1.up)"].verdict == found["grad(1.up.weight)"].verdict == "grown"
    by_hand = torch.autograd.grad(a(X).square().sum(), a[1].up.weight)[0]
    wrong = torch.autograd.grad(b(X).square().sum(), b[1].up.weight)[0]
    assert found["grad(1.up.weight)"].max == (by_hand - wrong).abs().max().item()
    assert compare(a, copy.deepcopy(a), X, grad=True, loss=lambda out: out.sum()).equal


class Scaled(torch.autograd.Function):
    """x, and a gradient that is not its own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.1


class WrongBackward(nn.GELU):
    def forward(self, x):
        return Scaled.apply(super().forward(x))


def squares(out):
    return out.square().sum()


def verdicts(found):
    return {row.address: row.verdict for row in found if row.verdict in ("first", "differs")}


def test_every_fault_of_a_backward_is_told():
    a = stack()
    b = copy.deepcopy(a)
    b[0].act, b[2].act = WrongBackward(), WrongBackward()
    found = compare(a, b, X, grad=True, loss=squares)
    assert verdicts(found) == {"grad(2.act:in[0])": "first", "grad(0.act:in[0])": "differs"}
    assert found["grad(1)"].own.is_equal and found["grad(1)"].verdict == "grown"


def test_faults_of_the_forward_and_of_the_backward_are_told_apart():
    a = stack()
    b = copy.deepcopy(a)
    b[0].act, b[1].act = WrongBackward(), nn.GELU(approximate="tanh")
    found = compare(a, b, X, grad=True, loss=squares)
    assert found.first.address == "1.act"
    assert verdicts(found) == {"1.act": "first", "grad(1.act:in[0])": "differs", "grad(0.act:in[0])": "differs"}


def test_a_wrong_gradient_of_a_weight_alone():
    class Wrong(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, Scaled.apply(self.weight), self.bias)

    a = stack()
    b = copy.deepcopy(a)
    b[1].up = Wrong(8, 16)
    b[1].up.load_state_dict(a[1].up.state_dict())
    found = compare(a, b, X, grad=True, loss=squares)
    assert verdicts(found) == {"grad(1.up.weight)": "first"} and found.first.address == "1.up"


def test_code_of_its_own_that_writes_in_place_goes_on_from_the_values_of_a():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.act, self.down = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)

        def forward(self, x):
            h = self.act(self.up(x))
            y = self.down(h)
            y += h
            return y

    a = nn.Sequential(InPlace(), InPlace())
    b = with_a_change(a, "0.up")
    found = compare(a, b, X, grad=True, loss=squares)
    assert not any(found.failed) and found.first.address == "0.up" and "grad(1.up.weight)" not in verdicts(found)
    assert set(verdicts(found)) <= {"0.up", "grad(0.up:in[0])"}


def test_gradients_of_some_modules_alone():
    a = stack()
    b = copy.deepcopy(a)
    b[1].act = WrongBackward()
    found = compare(a, b, X, match="*", grad=True, loss=squares)
    assert verdicts(found) == {"grad(1:in[0])": "first"} and found.first.address == "1"


def test_gradients_of_a_model_that_is_frozen():
    a = stack().requires_grad_(False)
    b = copy.deepcopy(a)
    b[1].act = WrongBackward()
    found = compare(a, b, X.clone().requires_grad_(), grad=True, loss=squares)
    assert verdicts(found) == {"grad(1.act:in[0])": "first"} and "grad(1.up)" in {row.address for row in found}


def test_gradients_that_do_not_come_are_told():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x)

    a = Spare()
    found = compare(a, copy.deepcopy(a), X, grad=True, loss=squares)
    assert found.equal and "without a gradient in both: spare.weight, spare.bias" in str(found)

    class Checkpointed(Spare):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.used, x, use_reentrant=True)

    a = Checkpointed()
    found = compare(a, copy.deepcopy(a), X.clone().requires_grad_(), grad=True, loss=squares)
    assert not found.agree and "use_reentrant" in found.verdict


class Attention(nn.Module):
    """The gradient of the bias of its keys is 0: softmax takes no notice of what all scores have."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return (self.query(x) @ self.key(x).mT).softmax(-1) @ self.value(x)


@pytest.mark.parametrize("under", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [5, 2000])
def test_rounding_of_gradients_that_are_added_up_is_rounding(under, rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), Attention())
    found = compare(model, torch.randn(rows, 4, 8), under=under, grad=True, loss=lambda out: out.square().mean())
    assert found.agree and not found.equal, found


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (None, "the output has none, it is 5×8 float32; pass loss="),
        (lambda out: out.logits.sum(), "loss= raised AttributeError for an output that is 5×8 float32"),
        (lambda out: out.square(), "a tensor with one number; it gave 5×8 float32"),
        (lambda out: out.sum().item(), "a tensor with one number; it gave"),
        (lambda out: out.detach().sum(), "depends on nothing that requires a gradient"),
    ],
    ids=["none", "raises", "many numbers", "no tensor", "detached"],
)
def test_a_loss_that_makes_no_sense(loss, what):
    with pytest.raises(TypeError, match=what):
        compare(stack(), stack(), X, grad=True, loss=loss)


def test_a_loss_that_one_output_alone_has_makes_no_sense():
    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = stack()

        def forward(self, x):
            out = self.body(x)
            return {"loss": out.sum(), "out": out}

    with pytest.raises(TypeError, match="pass loss="):
        compare(Scored(), stack(), X, grad=True)
    with pytest.raises(TypeError, match="pass loss="):
        compare(stack(), Scored(), X, grad=True)


@pytest.mark.parametrize(
    "inputs", [None, "text", X[:, :3], (), {"y": X}], ids=["none", "text", "shape", "too few", "name"]
)
def test_inputs_that_neither_takes(inputs):
    a = stack()
    with pytest.raises(TypeError, match=r"neither model runs with these inputs.*: a raised .*; b raised "):
        compare(a, with_a_change(a), inputs)


def test_options_that_are_for_two_models():
    a = stack()
    with pytest.raises(TypeError, match="grad=True"):
        compare(a, a, X, loss=lambda out: out.sum())
    for options in ({"grad": True}, {"reference": True}):
        with pytest.raises(TypeError, match="captured"):
            compare({".": X}, a, X, **options)
        with pytest.raises(TypeError, match="compile"):
            compare(a, X, under=torch.compile, **options)


def test_reference_says_which_is_right():
    model = stack()
    found = compare(model, X, under=torch.bfloat16, reference=True)
    exact = copy.deepcopy(model).double()(X.double())
    mine, theirs = found["."].wrong
    assert mine == pytest.approx((model(X) - exact).abs().max().item())
    assert mine < 1e-5 < theirs < 0.1 and found.first is None
    exact = compare(*two(lambda h: h.sum(-1), lambda h: h.flip(-1).cumsum(-1)[:, -1]), X, reference=True)
    assert exact.first is None


def test_the_lowest_number_of_each_dtype_is_the_same():
    """As in a mask."""

    def masked(h):
        return h.masked_fill(h > 0, torch.finfo(h.dtype).min)

    model = Calls(masked)
    for under in (torch.bfloat16, torch.float64):
        assert compare(model, X, under=under).agree


def test_a_small_but_systematic_difference_is_no_rounding():
    a, b = two(lambda h: h, lambda h: h * (1 + 3e-6))
    assert compare(a, b, X).first.address == "."
    assert compare(a, b, X, reference=True).first.address == "."


@pytest.mark.parametrize(
    "under",
    [
        torch.bfloat16,
        in_dtype(torch.float64),
        autocast(),
        threads(1),
        deterministic(),
        matmul_precision("medium"),
        batch_of(2),
        seed(3),
        training(False),
        torch.device("cpu"),
    ],
    ids=str,
)
def test_conditions_under_which_a_model_agrees(under):
    settings = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    found = compare(stack(), X, under=under)
    assert found.agree, found
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == settings
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("mode", "under"), [(False, training()), (True, seed(3))], ids=str)
def test_conditions_under_which_dropout_differs(mode, under):
    found = compare(stack().train(mode), X, under=under)
    assert found.first.address == "0.drop" and found.condition in str(found)


def test_another_function_is_a_condition():
    def tanh(model):
        model[1].act = nn.Tanh()
        return model

    model = stack()
    assert compare(model, X, under=tanh).first.address == "1.act"
    assert isinstance(model[1].act, nn.GELU)


def test_on_the_meta_device_shapes_are_compared():
    found = compare(stack(), X, under=on_device("meta"))
    assert not found.equal and "shapes of 19 values agree" in found.verdict


def test_conditions_that_make_no_sense():
    with pytest.raises(TypeError, match="under is a condition"):
        compare(stack(), X, under=3)
    with pytest.raises(TypeError, match="no model of transformers"):
        compare(stack(), X, under=attention("eager"))
    with pytest.raises(ValueError, match="more than 9 rows"):
        compare(stack(), X, under=batch_of(9))
    with pytest.raises(TypeError, match="two models and inputs"):
        compare(stack(), stack())


def test_compiled_parts_are_taken_apart():
    def wrong(graph, example):
        def run(*given):
            made = graph(*given)
            gelu = any("gelu" in str(node.target) for node in graph.graph.nodes)
            return tuple(x * 1.01 for x in made) if gelu else made

        return run

    a = stack(2)
    torch._dynamo.reset()
    found = compare(a, X, under=lambda m: m)
    assert found.equal
    from functools import partial

    found = compare(a, X, under=partial(torch.compile, backend=wrong))
    assert found.first.address == "0.act", found
    torch._dynamo.reset()
    assert compare(a, X, under=partial(torch.compile, backend="eager")).agree
    assert compare(a, torch.compile(a, backend="eager"), X).agree
    torch._dynamo.reset()


def test_a_table_cuts_what_says_the_same():
    model = stack(6)
    found = compare(model, model, X)
    assert "more" in str(found) and len(found.table(everything=True).rows) == len(found)
    assert "<table" in found._repr_html_()


def test_inner_values_may_be_compared_all():
    a = stack()
    found = compare(a, with_a_change(a), X, match="**/**")
    assert found.first.address == "1.up" and found.first.inner == "1.up/linear"
    assert found["1.norm/layer_norm"].verdict == "equal"
    assert len(found) > 1.5 * len(compare(a, with_a_change(a), X))


def test_some_modules_alone():
    a = stack()
    found = compare(a, with_a_change(a), X, match="*")
    assert [row.address for row in found] == ["0", "1", "2", "."]
    assert found.first.address == "1" and "up" in found.first.line


def test_names_that_are_not_there():
    with pytest.raises(AddressError, match="nothing"):
        compare(stack(), stack(), X, match="nowhere")
    with pytest.raises(AddressError, match="rename"):
        compare(stack(), stack(), X, rename={"nowhere": "0"})


def test_ctrl_c_ends_both():
    class Interrupted(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    ran = []

    class Late(nn.Module):
        def forward(self, x):
            ran.append(1)
            return x

    a = nn.Sequential(nn.Identity(), nn.Identity(), Late())
    b = nn.Sequential(nn.Identity(), Interrupted(), nn.Identity())
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        compare(a, b, X)
    assert not ran and threading.active_count() == threads
