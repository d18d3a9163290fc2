"""What platform/slots.py relies on."""

from tenterhook.platform.slots import slots_of


class Base:
    __slots__ = ("__private", "x")


class Derived(Base):
    __slots__ = ("y", "z")


def test_the_slots_of_a_class_and_of_its_bases():
    one = Derived()
    one.x, one.y = 1, 2
    one._Base__private = 3
    assert slots_of(one) == {"x": 1, "y": 2, "_Base__private": 3}
    assert slots_of(object()) == {}
