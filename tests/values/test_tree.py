import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

from tenterhook.values.tree import Omitted, describe, leaves, paths_of, pick, put, rebuild, rebuild_live

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    note: str


@dataclasses.dataclass
class Checked:
    x: torch.Tensor
    size: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.size = self.x.numel()


class Box:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Keyed(Box):
    pass


pytree.register_pytree_node(Box, lambda b: ([b.inside], None), lambda c, _: Box(*c))
pytree.register_pytree_node(
    Keyed,
    lambda b: ([b.inside], None),
    lambda c, _: Keyed(*c),
    flatten_with_keys_fn=lambda b: ([(pytree.GetAttrKey("inside"), b.inside)], None),
)


class AttrDict(dict):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Boxes(list):
    def __init__(self, items: Any, mode: str) -> None:
        super().__init__(items)
        self.mode = mode


class Fixed(tuple):
    def __new__(cls, items: Any, mode: str = "xyxy") -> "Fixed":
        made = super().__new__(cls, items)
        made.mode = mode  # type: ignore[attr-defined]
        return made


a, b = torch.arange(3.0), torch.ones(2)
CASES = [
    (a, [()]),
    ((a, b), [(0,), (1,)]),
    ([a, {"k": b}], [(0,), (1, "k")]),
    (Pair(a, (b,)), [("left",), ("right", 0)]),
    (OrderedDict(p=a, q=b), [("p",), ("q",)]),
    (UserDict(p=a), [("p",)]),
    (Frozen(a, "n"), [("x",)]),
    (Checked(a), [("x",)]),
    (
        BaseModelOutput(last_hidden_state=a, hidden_states=(a, b)),
        [("last_hidden_state",), ("hidden_states", 0), ("hidden_states", 1)],
    ),
    (Box((a, b)), [(0, 0), (0, 1)]),
    (Keyed(a), [("inside",)]),
    (AttrDict(h=a, k=[b]), [("h",), ("k", 0)]),
    (Boxes([a, b], "xywh"), [(0,), (1,)]),
    (Fixed([a, b], "xywh"), [(0,), (1,)]),
    ({0: a, "1": b}, [(0,), ("1",)]),
    ((), []),
    (None, []),
    ("text", []),
]


@pytest.mark.parametrize(("value", "paths"), CASES, ids=lambda x: type(x).__name__)
def test_leaves_pick_and_rebuild_agree(value, paths):
    found = list(leaves(value))
    assert [path for path, _ in found] == paths
    for path, tensor in found:
        assert pick(value, path) is tensor
    doubled = rebuild(value, lambda path, tensor: tensor * 2)
    assert type(doubled) is type(value)
    assert [path for path, _ in leaves(doubled)] == paths
    for path, tensor in found:
        assert torch.equal(pick(doubled, path), tensor * 2)


def test_attributes_of_containers_stay():
    for boxes in (Boxes([a], "xywh"), Fixed([a], "xywh")):
        for other in (rebuild(boxes, lambda _, tensor: tensor * 2), put(boxes, (0,), a * 2)):
            assert other.mode == "xywh" and torch.equal(other[0], a * 2) and boxes[0] is a
    value = AttrDict(h=a)
    other = put(value, ("h",), b)
    assert other.h is other["h"] is b and value.h is a
    other["h"] = a
    assert other.h is a


def test_rebuild_leaves_the_original_alone():
    inner = {"k": a}
    value = Frozen(a, "n"), [inner]
    rebuild(value, lambda path, tensor: tensor + 1)
    assert value[0].x is a
    assert inner["k"] is a


def test_what_is_no_tensor_is_not_kept_unless_it_is_a_constant():
    cache = object()
    kept = rebuild((a, cache, None, 3, "s", torch.float16), lambda _, t: t)
    assert isinstance(kept[1], Omitted)
    assert repr(kept[1]) == "<object: not a tensor, not kept>"
    assert kept[2:] == (None, 3, "s", torch.float16)
    assert rebuild((a, cache), lambda _, t: t, opaque=lambda x: x)[1] is cache


def test_positions_reach_named_children_and_names_reach_integer_keys():
    assert pick(Pair(a, b), (1,)) is b
    assert pick(BaseModelOutput(last_hidden_state=a), (0,)) is a
    assert pick({0: a}, (0,)) is a
    assert pick({5: a}, ("5",)) is a
    assert pick((a, b), (-1,)) is b


@pytest.mark.parametrize(
    ("value", "path"), [((a,), (1,)), ({"k": a}, ("j",)), ({7: a}, (0,)), (a, (0,)), (None, ("x",))]
)
def test_a_path_that_is_not_there(value, path):
    with pytest.raises(LookupError):
        pick(value, path)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")  # torch calls them a prototype
def test_words_for_values():
    assert describe(torch.zeros(2, 3)) == "2×3 float32"
    assert describe(torch.tensor(1)) == "scalar int64"
    assert describe(Pair(a, b)) == "Pair(left, right)"
    assert describe(None) == "None"
    assert paths_of((a, {"k": b})) == "[0], [1][k]"
    assert "one tensor" in paths_of(a)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert describe(nested) == "nested float32"


class Wrapping(Mapping):
    """A mapping whose shallow copy shares what it holds."""

    def __init__(self, held):
        self.held = held

    def __getitem__(self, key):
        return self.held[key]

    def __setitem__(self, key, value):
        self.held[key] = value

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


class Picky(tuple):
    def __new__(cls, left, right):
        return super().__new__(cls, (left, right))


@dataclasses.dataclass
class Unset:
    x: torch.Tensor
    later: torch.Tensor = dataclasses.field(init=False)


@dataclasses.dataclass
class Uncopied:
    x: torch.Tensor

    def __copy__(self):
        raise RuntimeError("not this one")


@pytest.mark.parametrize(
    "value",
    [Wrapping({"x": a}), MappingProxyType({"x": a}), Picky(a, b), Unset(a), Uncopied(a)],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_be_made_again_becomes_a_dict_and_stays_itself_where_it_is_live(value):
    kept = rebuild(value, lambda _, tensor: tensor * 2)
    assert torch.equal(next(iter(leaves(kept)))[1], a * 2)
    assert next(iter(leaves(value)))[1] is a
    if not isinstance(value, Unset):
        assert type(kept) is dict
        assert rebuild_live(value, lambda _, tensor: tensor * 2) is value


def test_a_structure_that_contains_itself_ends():
    loop: list = [a]
    loop.append(loop)
    assert len(list(leaves(loop))) == 1
    assert torch.equal(rebuild(loop, lambda _, tensor: tensor + 1)[0], a + 1)
    assert len(list(leaves([shared := {"h": a}, shared, (shared,)]))) == 3


@dataclasses.dataclass(eq=False)
class Node:
    h: torch.Tensor
    others: list[Any]


def test_nodes_that_refer_to_each_other_are_walked_once_on_each_way():
    x, y, z = nodes = [Node(a + i, []) for i in range(3)]
    x.others, y.others, z.others = [y, z], [z, x], [x, y]
    ways = [path for path, _ in leaves(x)]
    y_and_z = [("others", 0, "h"), ("others", 0, "others", 0, "h"), ("others", 1, "h"), ("others", 1, "others", 1, "h")]
    assert ways == [("h",), *y_and_z]
    twin = rebuild_live(nodes, lambda _, tensor: tensor * 2)
    assert torch.equal(twin[0].others[0].others[0].h, z.h * 2)
    assert twin[0].others[0].others[1] is twin[0]
    assert [x.others, y.others, z.others] == [[y, z], [z, x], [x, y]]
    assert [path for path, _ in leaves(twin[0])] == ways


class Held:
    """Holds its tensors in one of many ways, and is known to torch.utils._pytree by its tensors alone."""

    __slots__ = ("__dict__", "slot")


def held(*, slot=None, **attributes):
    made = Held()
    vars(made).update(attributes)
    made.slot = slot
    return made


class Layer:
    def __init__(self, h):
        self.h = h


def _flat(one):
    everything = (one.slot, *vars(one).values())
    lists = [x if isinstance(x, list) else list(x.values()) if isinstance(x, dict) else [x] for x in everything]
    return [x.h if isinstance(x, Layer) else x for part in lists for x in part if isinstance(x, (Layer, torch.Tensor))]


pytree.register_pytree_node(Held, lambda one: (_flat(one), None), lambda parts, _: held(ts=list(parts)))


def test_a_class_whose_parts_are_in_its_attributes_is_a_container():
    for one in (held(x=a, y=b), held(ts=[a, b], of=print), held(ts={"a": a, "b": b}), held(slot=a, ts=[b], of=print)):
        assert [id(tensor) for _, tensor in leaves((one, 1))] == [id(a), id(b)]
    cycle = held(ts=[a])
    cycle.ts.append(cycle.ts)
    assert [id(tensor) for _, tensor in leaves(cycle)] == [id(a)]
    twin = rebuild([held(ts=[a, b], n=3)], lambda _, tensor: tensor * 2)[0]
    assert type(twin) is Held and twin.n == 3 and torch.equal(twin.ts[1], b * 2)


def test_a_class_whose_parts_are_in_objects_of_its_own_is_no_container():
    cache = held(layers=[Layer(a), Layer(b)])
    assert not list(leaves((cache, 1)))
    assert isinstance(rebuild([cache], lambda _, tensor: tensor)[0], Omitted)
    assert rebuild_live([cache], lambda _, tensor: tensor)[0] is cache
