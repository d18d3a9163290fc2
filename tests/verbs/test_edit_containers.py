"""edit: lists, dicts and other containers of the caller's, to which a module does something."""

from collections import OrderedDict, deque
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tenterhook import capture, edit
from tenterhook.changes import any_shape, scale


class Collects(nn.Module):
    """Takes the last of what it is given, in a list and in other containers, and puts its own there."""

    def forward(self, x, skips, cache, state):
        h = x * 2 + skips.pop() + cache["h"] + state.h
        skips.insert(0, h)
        cache["n"] = cache.pop("n") + 1
        cache["h"] = h * 3
        cache["new"] = [h]
        cache["inner"].append(h)
        state.h = h * 5
        return h


@dataclass
class State:
    h: torch.Tensor


class Caller(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = Collects()

    def forward(self, x):
        skips, inner = [x * 7, x], [x]
        cache, state = {"h": x, "n": 1, "inner": inner}, State(x)
        h = self.b(x, skips, cache, state=state)
        first = [h, *skips, cache["h"], *cache["new"], *inner, state.h]
        assert len(skips) == 2 and cache["n"] == 2 and list(cache) == ["h", "inner", "n", "new"]
        h = self.b(x, skips, cache, state=state)
        return torch.stack([*first, h, *skips, cache["h"], *cache["new"], *inner, state.h])


@pytest.mark.parametrize(
    "changes",
    [
        {"grad(b:in)": scale(1.0)},
        {"grad(b:in[skips][-1])": scale(1.0)},
        {"b:in[skips][0]": scale(1.0)},
        {"b:in[cache][h]": scale(1.0)},
        {"b:in[cache][inner]": lambda v: None},
        {"b:in[state]": lambda v: None},
        {"b:in": lambda v: None},
        {"b:in": lambda v: None, "grad(b:in)": scale(1.0)},
    ],
    ids=", ".join,
)
def test_what_a_module_puts_into_a_container_reaches_the_caller(changes):
    model, x = Caller(), torch.ones(2, requires_grad=True)
    truth = model(x)
    (grad,) = torch.autograd.grad(truth.sum(), x)
    with edit(model, changes), edit(model, {"b:in[state][h]": scale(1.0)}):
        out = model(x)
        assert torch.equal(out, truth)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], grad)
    with capture(model, "grad(b:in)", frozen=True):
        assert torch.equal(model(x.detach()), truth)


def test_what_stays_in_an_edited_list_is_the_callers_own():
    class Pops(nn.Module):
        def forward(self, skips):
            return skips.pop(0) * 1

    model, a, b = Pops(), torch.ones(2), torch.ones(2)
    skips = [a, b]
    with edit(model, {".:in": lambda v: [x * 10 for x in v]}):
        assert model(skips).tolist() == [10, 10]
    assert len(skips) == 1 and skips[0] is b


class Log(list):
    """A list that counts, and that nobody can make with its items."""

    def __init__(self):
        super().__init__()
        self.appended = 0

    def append(self, x):
        self.appended += 1
        super().append(x)


@dataclass
class Counted:
    h: torch.Tensor
    steps: int = 0


def append(given):
    given.append(given[0] + 1)


def count(given):
    given["count"] = 2


def use(given):
    given["a"] = given.pop("a")


def empty_second(given):
    given.pop(0)
    given[0].clear()


def step(given):
    given.steps += 1
    given.more = 3


def counting_log():
    log = Log()
    log.append(torch.ones(2))
    return log


def without_debug(given):
    given["flag"] = True
    del given["debug"]
    return given


@pytest.mark.parametrize(
    ("make", "does", "change"),
    [
        (counting_log, append, lambda v: None),
        (lambda: deque([torch.ones(2)]), append, lambda v: None),
        (lambda: [torch.ones(2), torch.zeros(2)], append, any_shape(lambda v: v[:1])),
        (lambda: {"h": torch.ones(2), "debug": 1}, count, without_debug),
        (lambda: {"a": torch.ones(1), "b": torch.zeros(1)}, use, lambda v: None),
        (lambda: [{"t": torch.ones(1)}, {"t": torch.zeros(1)}, {}], empty_second, lambda v: None),
        (lambda: Counted(torch.ones(2)), step, lambda v: None),
    ],
    ids=["list of a kind", "deque", "shortened list", "other keys", "order", "emptied", "attributes"],
)
def test_what_a_module_does_to_a_container_is_done_to_the_callers_own_and_nothing_else(make, does, change):
    class Doing(nn.Module):
        def forward(self, given):
            does(given)
            return torch.zeros(1)

    def parts_of(x):
        attributes = vars(x).items() if hasattr(x, "__dict__") and not isinstance(x, torch.Tensor) else ()
        return [
            *attributes,
            *(x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, (list, deque)) else ()),
        ]

    def things_in(x):
        return [x, *(thing for _, part in parts_of(x) for thing in things_in(part))]

    def told(x, known):
        which = next((i for i, thing in enumerate(known) if thing is x), "new")
        return x if isinstance(x, int) else (which, [(key, told(part, known)) for key, part in parts_of(x)])

    model, given, twin = nn.Sequential(Doing()), make(), make()
    known, known_to_twin = things_in(given), things_in(twin)
    does(twin)
    with edit(model, {"0:in": change}):
        model(given)
    assert told(given, known) == told(twin, known_to_twin)


def test_a_container_that_is_handed_on_is_the_callers():
    class Block(nn.Module):
        def forward(self, x, kept):
            kept.append(x * 2)
            return x + 1, kept

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, x, kept):
            x, kept = self.a(x, kept)
            return self.b(x, kept)[0]

    net, kept = Net(), [first := torch.zeros(1)]
    with edit(net, {"a:in": lambda v: None}):
        net(torch.ones(1), kept)
    assert kept[0] is first and torch.cat(kept).tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    "changes",
    [{"0:in": lambda v: None}, {"0:in[0][now][0][0]": scale(1.0)}, {"grad(0:in)": scale(1.0)}],
    ids=["all", "a leaf", "gradient"],
)
@pytest.mark.parametrize(
    "again",
    [lambda x: x, lambda x: [x], lambda x: (1, x[0]), lambda x: {"k": deque([x])}],
    ids=["moved", "in a list", "unpacked", "deeper"],
)
def test_a_container_that_a_module_stores_inside_another_is_the_callers(again, changes):
    class Stores(nn.Module):
        def forward(self, state):
            state["before"] = again(state["now"])
            return state["now"][0][0] * 2

    def found(x):
        while not (isinstance(x, list) and isinstance(x[0], torch.Tensor)):
            x = x["k"] if isinstance(x, dict) else x[-1]
        return x

    model, h = nn.Sequential(Stores()), torch.ones(2, requires_grad=True)
    state = {"now": (own := [h],)}
    with edit(model, changes):
        model[0](state).sum().backward()
    assert found(state["before"]) is own and state["now"][0] is own and len(own) == 1 and own[0] is h
    assert type(state["before"]) is type(again(state["now"]))


@pytest.mark.parametrize("change", [{"0:in[0][h]": scale(1.0)}, {"0:in": lambda v: None}], ids=["a leaf", "all"])
def test_a_container_that_a_module_stores_in_another_argument_is_the_callers(change):
    class Stores(nn.Module):
        def forward(self, state, history):
            history["all"].append((state, state["h"]))
            return state["h"] * 2

    model, state, every = nn.Sequential(Stores()), {"h": torch.ones(2)}, []
    with edit(model, change):
        model[0](state, {"all": every})
    assert len(every) == 1 and every[0][0] is state


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,)])
def test_an_output_that_refuses_writes_stays_as_it_is(wrap):
    class Locked(dict):
        def __setitem__(self, key, value):
            raise RuntimeError("locked")

    class HandsOn(nn.Module):
        def forward(self, kept):
            kept.append(kept[0] * 2)
            self.out = wrap(Locked(kept=kept))
            return self.out

    model, kept = nn.Sequential(HandsOn()), [torch.ones(1)]
    with edit(model, {"0:in": lambda v: None}):
        assert model(kept) is model[0].out
    assert torch.cat(kept).tolist() == [1, 2]


class Keeps(nn.Module):
    """Puts what it is given into containers that it is given, in other places and beside itself."""

    def forward(self, k, pair, past, s):
        past.append(k)
        past.append(pair)
        s["prev"], s["t"], s["h"] = s["h"], (s["h"],), s["h"] + 1
        return k + past[0]


@pytest.mark.parametrize("verb", ["in", "grad"])
def test_an_input_that_a_module_puts_in_another_place_is_the_edited_one(verb):
    model, x = nn.Sequential(Keeps()), torch.ones(2, requires_grad=True)

    def given():
        return x * 1, (x * 2,), [x * 3], {"h": x * 4}

    def run(call, times):
        k, pair, past, s = call
        out = model[0](k, pair, past, s)
        return [times(t) for t in (out, past[1], past[2][0], s["prev"], s["t"][0], s["h"])], past[0]

    k, (p,), (q,), s = given()
    twin = model[0](k * 2, (p * 2,), past := [q * 2], t := {"h": s["h"] * 2})
    truth = [twin, past[1], past[2][0], t["prev"], t["t"][0], t["h"]]
    call = given()
    if verb == "in":
        with edit(model, {"0:in": lambda v: (v[0] * 2, (v[1][0] * 2,), [v[2][0] * 2], {"h": v[3]["h"] * 2})}):
            out, first = run(call, lambda t: t)
        assert all(map(torch.equal, out, truth)) and torch.equal(first, x * 3)
        return
    with edit(model, {"grad(0:in)": scale(2.0)}):
        out, first = run(call, lambda t: t)
        (grad,) = torch.autograd.grad(sum(t.sum() for t in out), x)
    assert torch.equal(grad, torch.autograd.grad(sum(t.sum() for t in truth), x)[0])


@pytest.mark.parametrize(
    ("does", "left"),
    [
        (lambda v: v.reverse(), [3, 2, 1]),
        (lambda v: v.append(v.pop(0)), [2, 3, 1]),
        (lambda v: v.append(v[0]), [1, 2, 3, 10]),
        (lambda v: v.__setitem__(0, v[1]), [20, 2, 3]),
        (lambda v: v.insert(1, v[0] * 1), [1, 10, 2, 3]),
    ],
    ids=["reversed", "rotated", "appended", "doubled", "inserted"],
)
def test_what_moves_in_a_list_is_the_callers_and_what_is_doubled_is_edited(does, left):
    class Doing(nn.Module):
        def forward(self, v):
            does(v)
            return v[0]

    model, v = nn.Sequential(Doing()), [torch.tensor(i) for i in (1, 2, 3)]
    with edit(model, {"0:in": lambda v: [x * 10 for x in v]}):
        model(v)
    assert [x.item() for x in v] == left


class Registered:
    """A class that torch.utils._pytree knows: its part is an attribute, in one, or in an object of its own."""

    def __init__(self, h):
        self.h, self.steps = h, 0


class RegisteredList:
    def __init__(self, layers=()):
        self.layers = list(layers)


class RegisteredCache(RegisteredList):
    pass


class Unknown:
    def __init__(self, h):
        self.h = h


class InSlot:
    __slots__ = ("h",)


class RegisteredSlot(InSlot):
    def __init__(self, h, note=None):
        self.h = h
        if note:
            self.note = note


pytree.register_pytree_node(Registered, lambda r: ([r.h], None), lambda parts, _: Registered(*parts))
pytree.register_pytree_node(RegisteredList, lambda r: (list(r.layers), None), lambda parts, _: RegisteredList(parts))
pytree.register_pytree_node(
    RegisteredCache,
    lambda r: ([layer.h for layer in r.layers], None),
    lambda parts, _: RegisteredCache(map(Unknown, parts)),
)
pytree.register_pytree_node(
    RegisteredSlot, lambda r: ([r.h], vars(r).get("note")), lambda parts, note: RegisteredSlot(*parts, note)
)


def test_what_a_module_does_to_a_registered_class_is_done_to_the_callers():
    class Steps(nn.Module):
        def forward(self, x, state, cache, slot, some):
            cache.layers.append(Unknown(x))
            some.layers.append(x)
            state.h, state.steps, slot.h = state.h + x, state.steps + 1, slot.h * 3
            return state.h * len(cache.layers) * len(some.layers)

    model, x = nn.Sequential(Steps()), torch.ones(2, requires_grad=True)
    grad, part = {"grad(0:in)": scale(1.0)}, {"0:in[1][0]": scale(1.0), "0:in[3][0]": scale(1.0)}
    for changes in ({"0:in": lambda v: None}, part, {"0:in[0]": scale(1.0)}, grad):
        state, cache, some = Registered(x * 2), RegisteredCache(), RegisteredList([x])
        layers, slot = some.layers, RegisteredSlot(x * 1, "a note")
        with edit(model, changes):
            outs = [model[0](x, state, cache, slot, some) for _ in range(2)]
            sum(outs).sum().backward()
        assert [out.tolist() for out in outs] == [[6, 6], [24, 24]] and state.steps == 2 and len(cache.layers) == 2
        assert state.h.tolist() == [4, 4] and slot.h.tolist() == [9, 9] and slot.note == "a note"
        assert some.layers is layers and len(layers) == 3 and layers[0] is x


@pytest.mark.parametrize(
    "made", [lambda h: RegisteredList([h]), lambda h: RegisteredSlot(h), lambda h: RegisteredSlot(h, "a note")]
)
def test_a_write_into_a_registered_class_reaches_nobody_else(made):
    class Makes(nn.Module):
        def forward(self, x):
            self.h = x * 2
            return made(self.h)

    def write(value):
        pytree.tree_leaves(value)[0].mul_(10)

    model, x = nn.Sequential(Makes()), torch.ones(2)
    with edit(model, {"0": write}), capture(model, "0") as seen:
        (out,) = pytree.tree_leaves(model(x))
    assert out.tolist() == [20, 20] and model[0].h.tolist() == [2, 2]
    assert pytree.tree_leaves(seen["0"])[0].tolist() == [20, 20]


def test_the_order_of_a_mapping_is_the_one_that_the_module_made():
    class Uses(nn.Module):
        def forward(self, x, cache):
            cache["new"] = x
            cache.move_to_end("b")
            return x

    model, x = nn.Sequential(Uses()), torch.ones(2)
    cache = OrderedDict(a=x, b=x * 2)
    with edit(model, {"0:in": lambda v: None}):
        model[0](x, cache)
    assert list(cache) == ["a", "new", "b"]


@pytest.mark.parametrize(
    "wrap", [lambda s: {"s": s}, lambda s: [s], lambda s: (1, [s]), Counted, lambda s: {"deep": (s,)}], ids=range(5)
)
def test_a_container_that_is_handed_on_inside_another_is_the_callers(wrap):
    class HandsOn(nn.Module):
        def forward(self, x, state):
            state["h"] = x * 2
            return wrap(state)

    def unwrapped(x):
        while not (isinstance(x, dict) and "h" in x):
            x = x.h if isinstance(x, Counted) else next(iter(x.values())) if isinstance(x, dict) else x[-1]
        return x

    model, x, state = nn.Sequential(HandsOn()), torch.ones(2), {"h": torch.zeros(2)}
    with edit(model, {"0:in": lambda v: None}), edit(model, {"0:in[1][h]": scale(1.0)}):
        assert unwrapped(model[0](x, state)) is state
    assert state["h"].tolist() == [2, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"0:in[0]": scale(2.0)},
        {"0:in": lambda v: (v[0] * 2, v[1])},
        {"0:in": lambda v: v[0].mul_(2)[:0].tolist() or None},
    ],
    ids=["beside", "all", "in place"],
)
def test_an_input_that_refers_to_itself(changes):
    class Takes(nn.Module):
        def forward(self, x, loop):
            loop.append(x)
            return x * loop[1][0] * loop[1][1][0]

    loop = [torch.tensor([3.0])]
    loop += [loop, (loop,)]
    model, x = nn.Sequential(Takes()), torch.ones(1, requires_grad=True)
    with edit(model, {"grad(0:in)": scale(5.0)}), edit(model, changes):
        out = model[0](x * 1, loop)
        (grad,) = torch.autograd.grad(out, x)
    assert out.item() == 18 and grad.item() == 90
    assert loop[1] is loop and loop[2][0] is loop and loop[0].item() == 3 and loop[3].item() == 2
