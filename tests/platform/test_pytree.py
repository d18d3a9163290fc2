"""What platform/pytree.py relies on."""

from collections import OrderedDict

from torch.utils import _pytree

from tenterhook.platform import pytree


class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b


class Keyed(Pair):
    pass


_pytree.register_pytree_node(Pair, lambda p: ([p.a, p.b], None), lambda parts, _: Pair(*parts))
_pytree.register_pytree_node(
    Keyed,
    lambda p: ([p.a, p.b], None),
    lambda parts, _: Keyed(*parts),
    flatten_with_keys_fn=lambda p: ([(_pytree.GetAttrKey("a"), p.a), (_pytree.SequenceKey(1), p.b)], None),
)


def test_registered_types_are_taken_apart_and_made_anew():
    assert Pair in pytree.registered and object not in pytree.registered
    assert pytree.parts_of(Pair(5, 6)) == [(0, 5), (1, 6)]
    assert pytree.parts_of(Keyed(5, 6)) == [("a", 5), (1, 6)]
    assert pytree.parts_of(OrderedDict(x=5)) == [("x", 5)]
    made = pytree.made_of([7, 8], Keyed(5, 6))
    assert type(made) is Keyed and (made.a, made.b) == (7, 8)
    assert pytree.made_of([7], OrderedDict(x=5)) == OrderedDict(x=7)
