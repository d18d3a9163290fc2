"""What the instructions of a function do with the values on its stack."""

import pytest

from tenterhook.platform.assembler import Assembly
from tenterhook.platform.bytecode import Flow, effect, loads

WHAT = "the instructions of this Python are others than those that are known; see platform/bytecode.py"


def a_name(f):
    a = f()
    return a


def unpacked(f):
    a, (b, *c) = f()
    return [a, b, c]


def an_attribute(f):
    f.h = f()


def handed_on(f):
    return f()


def a_branch(f):
    return f() if f else 1


def a_loop(f):
    return [x for x in f() if x]


def written_into(f):
    f.a.add_(1)


def flow_and_first_call(function):
    flow = Flow(Assembly(function.__code__, split=True))
    return flow, next(i for i, one in enumerate(flow.code) if one.name.startswith("CALL"))


@pytest.mark.parametrize(
    ("function", "expected"), [(a_name, True), (unpacked, True), (an_attribute, True), (handed_on, False)]
)
def test_whether_a_variable_takes_what_a_call_returns(function, expected):
    flow, call = flow_and_first_call(function)
    assert (call in flow.stored) == expected, WHAT


def test_what_is_called_stored_and_written_into_is_known_by_its_name():
    flow, call = flow_and_first_call(an_attribute)
    assert flow.path(flow.callee(call)) == "f", WHAT
    store = next(i for i, one in enumerate(flow.code) if one.name == "STORE_ATTR")
    assert flow.attribute(store) == "f.h" and flow.operands[store][0] == {call}, WHAT
    flow, call = flow_and_first_call(written_into)
    assert flow.method(call) == "add_" and flow.written(call) == ["f.a"], WHAT


@pytest.mark.parametrize("function", [a_name, unpacked, an_attribute, handed_on, a_branch, a_loop, written_into])
def test_every_value_on_the_stack_has_a_maker(function):
    flow, _ = flow_and_first_call(function)
    returns = [i for i, one in enumerate(flow.code) if one.name == "RETURN_VALUE"]
    assert all(len(flow.operands[i]) == effect(flow.code[i])[0] for i in range(len(flow.code))), WHAT
    assert all(flow.operands[i][0] for i in returns), WHAT


def test_loads_are_told_in_words():
    assert ("LOAD_FAST", "f") in list(loads(Assembly(a_name.__code__, split=True))), WHAT
