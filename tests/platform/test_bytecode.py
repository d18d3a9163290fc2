import dis

import pytest

from tenterhook.platform.bytecode import Exit, Parts, Steps

WHAT = "the instructions of this Python are others than those that are known; see platform/bytecode.py"


def a_name(f):
    a = f()
    return a


def two_names(f):
    a, b = f(), 1
    return [a, b]


def unpacked(f):
    a, (b, *c) = f()
    return [a, b, c]


def an_attribute(f):
    f.h = f()


def handed_on(f):
    return f()


def one_of_two(f):
    return f(), 1


def steps_after_first_call(function):
    steps = Steps(function.__code__)
    i = next(i for i, step in enumerate(steps) if step.op.startswith("CALL"))
    return steps, i + 1


@pytest.mark.parametrize(
    ("function", "expected"),
    [(a_name, "a"), (two_names, "a"), (unpacked, ("a", ("b", "c"))), (an_attribute, "f.h"), (handed_on, None)],
)
def test_which_variable_takes_what_a_call_returns(function, expected):
    steps, i = steps_after_first_call(function)
    taker = steps.taker(i, 0)
    assert taker == expected, WHAT
    if isinstance(taker, Parts):
        assert taker[1].rest == 1, WHAT


@pytest.mark.parametrize(
    ("function", "expected"),
    [(handed_on, Exit()), (a_name, Exit()), (one_of_two, Exit(0, 2)), (an_attribute, None)],
)
def test_what_goes_to_the_caller(function, expected):
    steps, i = steps_after_first_call(function)
    assert steps.exit(i) == expected, WHAT


@pytest.mark.parametrize("function", [a_name, two_names, unpacked, an_attribute, handed_on, one_of_two])
def test_the_stack_is_empty_where_a_function_ends(function):
    steps = Steps(function.__code__)
    offsets = {one.offset for one in dis.get_instructions(function)}
    assert {step.offset for step in steps} <= offsets, WHAT
    depth = 0
    for step in steps:
        depth += step.gives - step.takes
        assert depth >= 0, f"{WHAT}: {step}"
    assert depth == 0, WHAT
