"""Every kind of container through all that is done to values, and a kind that is made up here."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping, MutableMapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

from tenterhook import capture, edit
from tenterhook.changes import scale
from tenterhook.values import containers
from tenterhook.values.containers import KINDS, Kind, children, kind_of
from tenterhook.values.inputs import Inputs
from tenterhook.values.standins import Standins
from tenterhook.values.tree import Omitted, leaves, pick, put, rebuild, rebuild_live

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class State:
    x: torch.Tensor
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor


class OwnList(list):
    pass


class OwnTuple(tuple):
    __slots__ = ()


class OwnDeque(deque):
    pass


class Held:
    """What torch knows by its only attribute."""

    def __init__(self, x):
        self.x = x


class HeldMapping(Mapping):
    """A mapping that cannot be written into, and whose copy would share what it holds."""

    def __init__(self, **held):
        self._held = held

    def __getitem__(self, key):
        return self._held[key]

    def __iter__(self):
        return iter(self._held)

    def __len__(self):
        return len(self._held)


class HeldMutableMapping(HeldMapping, MutableMapping):
    def __setitem__(self, key, value):
        self._held[key] = value

    def __delitem__(self, key):
        del self._held[key]


class RegisteredMapping(HeldMutableMapping):
    pass


pytree.register_pytree_node(Held, lambda h: ([h.x], None), lambda parts, _: Held(*parts))
pytree.register_pytree_node(
    RegisteredMapping,
    lambda m: (list(m.values()), list(m)),
    lambda parts, keys: RegisteredMapping(**dict(zip(keys, parts, strict=True))),
)

a, b = torch.arange(3.0), torch.ones(2)
EXAMPLES = [  # a value, and its kind
    ((a, b), "Tuple"),
    ([a, b], "List"),
    ({"x": a, "y": b}, "Dict"),
    (Inputs((a,), {"y": b}, ("x",)), "Inputs"),
    (OrderedDict(x=a, y=b), "CopiedMapping"),
    (defaultdict(list, x=a), "CopiedMapping"),
    (UserDict(x=a), "CopiedMapping"),
    (BaseModelOutput(last_hidden_state=a, hidden_states=(b,)), "CopiedMapping"),
    (HeldMutableMapping(x=a), "MutableMapping"),
    (RegisteredMapping(x=a, y=b), "MutableMapping"),
    (HeldMapping(x=a), "Mapping"),
    (Pair(a, b), "NamedTuple"),
    (deque([a, b], maxlen=2), "Deque"),
    (OwnDeque([a, b]), "Deque"),
    (Held(a), "Registered"),
    (State(a), "Dataclass"),
    (Frozen(a), "Dataclass"),
    (OwnList([a, b]), "OwnList"),
    (OwnTuple([a, b]), "OwnTuple"),
    (torch.return_types.max((a, b)), "OwnTuple"),
]
every_kind = pytest.mark.parametrize(
    ("value", "kind"), EXAMPLES, ids=lambda x: type(x).__name__ if not isinstance(x, str) else x
)


def name(kind: Kind | None) -> str:
    return type(kind).__name__.removeprefix("_")


def can_be_made_anew(value: Any) -> bool:
    return not isinstance(value, HeldMapping) or isinstance(value, RegisteredMapping)


def test_every_kind_has_an_example():
    assert [name(kind) for kind in KINDS] == list(dict.fromkeys(kind for _, kind in EXAMPLES))


@every_kind
def test_taken_apart_and_made_anew(value, kind):
    assert name(kind_of(value)) == kind
    found = list(leaves(value))
    assert found and all(pick(value, path) is tensor for path, tensor in found)
    doubled = rebuild(value, lambda _, tensor: tensor * 2)
    assert [path for path, _ in leaves(doubled)] == [path for path, _ in found]
    assert all(torch.equal(new, old * 2) for (_, new), (_, old) in zip(leaves(doubled), found, strict=True))
    assert type(doubled) is (type(value) if can_be_made_anew(value) else dict)
    assert all(pick(value, path) is tensor for path, tensor in found)  # as it was
    assert getattr(doubled, "maxlen", None) == getattr(value, "maxlen", None)


@every_kind
def test_put(value, kind):
    (path, old), *others = leaves(value)
    if not can_be_made_anew(value):
        assert rebuild_live(value, lambda _, tensor: tensor * 2) is value
        with pytest.raises(TypeError, match="cannot be made anew"):
            put(value, path, b)
        return
    new = put(value, path, b)
    assert type(new) is type(value) and pick(new, path) is b and pick(value, path) is old
    assert all(pick(new, path) is tensor for path, tensor in others)


@every_kind
def test_a_part_is_written_where_that_can_be(value, kind):
    twin = rebuild(value, lambda _, tensor: tensor) if can_be_made_anew(value) else value
    entry, ((key, old), *_) = kind_of(value), children(value)
    if kind == "Mapping":
        return
    new = entry.with_part(twin, key, b)
    assert children(new)[0] == (key, b)
    assert (new is twin) == entry.can_change or kind == "Registered"  # whose part has no name
    if new is twin:
        entry.with_part(twin, key, old)


def does_to(value):
    """What a module may do to an argument of its."""
    if isinstance(value, (list, deque)):
        value.append(value.popleft() if isinstance(value, deque) else value.pop(0))
    elif isinstance(value, dict | HeldMutableMapping | UserDict):
        value["new"] = 3
    elif isinstance(value, State | Held | Frozen):
        object.__setattr__(value, "x", 3)


@every_kind
def test_what_is_done_to_a_standin_is_carried_back(value, kind):
    if not can_be_made_anew(value) or isinstance(value, (BaseModelOutput, Inputs)):
        return
    own, truth = (rebuild(value, lambda _, tensor: tensor.clone()) for _ in range(2))
    does_to(truth)
    tensors = [tensor for _, tensor in leaves(own)]
    standin = rebuild(own, lambda _, tensor: tensor * 2)
    standins = Standins((own, 1), (standin, 1))
    pick(standin, next(iter(leaves(standin)))[0]).zero_()
    does_to(standin)
    assert standins.carry_back(standin) is (own if kind_of(value).can_change else None)
    assert not tensors[0].any()
    assert all(any(tensor is one for one in tensors) for _, tensor in leaves(own))
    assert [key for key, _ in children(own)] == [key for key, _ in children(truth)]
    assert getattr(own, "x", 3) == 3 or not isinstance(own, State | Held | Frozen)


def test_a_class_that_is_registered_late_is_a_container_from_then_on():
    class Late(Held):
        pass

    assert list(leaves([Late(a)])) == []
    pytree.register_pytree_node(Late, lambda h: ([h.x], None), lambda parts, _: Late(*parts))
    assert [path for path, _ in leaves([Late(a)])] == [(0, 0)]


class Boxed:
    """Somebody's class of which nobody knows."""

    __slots__ = ("_inside",)

    def __init__(self, inside):
        self._inside = inside


class BoxedKind(Kind):
    """The whole of what has to be written for a new kind."""

    can_change = True

    def fits(self, cls):
        return cls is Boxed

    def parts(self, value):
        return [("inside", value._inside)]

    def like(self, value, parts):
        return Boxed(*parts)

    def with_part(self, value, key, part):
        value._inside = part
        return value


@pytest.fixture
def boxed_kind(monkeypatch):
    monkeypatch.setattr(containers, "KINDS", (BoxedKind(), *KINDS))
    containers._kind_of.cache_clear()
    yield
    containers._kind_of.cache_clear()


class Doubles(nn.Module):
    def forward(self, given):
        return Boxed(given._inside * 2)


class Refills(nn.Module):
    def forward(self, given):
        out = given._inside + 1
        given._inside = out
        return out


def test_without_an_entry_a_class_is_not_looked_into():
    assert isinstance(rebuild([Boxed(a)], lambda _, tensor: tensor)[0], Omitted)


@pytest.mark.usefixtures("boxed_kind")
def test_a_kind_with_an_entry_is_captured_edited_and_carried_back():
    model, x = nn.Sequential(Doubles()), torch.ones(2, requires_grad=True)
    with capture(model, "0", "0[inside]", "grad(0)", "0:in[0][inside]") as seen:
        model(Boxed(x))._inside.sum().backward()
    assert type(seen["0"]) is Boxed and seen["0"]._inside.tolist() == seen["0[inside]"].tolist() == [2, 2]
    assert seen["0:in[0][inside]"].tolist() == [1, 1] and seen["grad(0[inside])"].tolist() == [1, 1]
    for change in ({"0": scale(3.0)}, {"0[inside]": scale(3.0)}, {"0": lambda v: Boxed(v._inside * 3)}):
        with edit(model, change):
            assert model(Boxed(x))._inside.tolist() == [6, 6]
    given = Boxed(x.detach())
    model = nn.Sequential(Refills())
    with edit(model, {"0:in[0][inside]": scale(10.0)}):
        out = model(given)
    assert out.tolist() == [11, 11] and given._inside is out
