"""Tables of events and the steps that they make, without torch: in each step, the losses by part and micro-batch."""

import subprocess
import sys

import pytest

from tenterhook.record.assemble import MOST_MICROS, Assembler, MicroBatch, Part, first_that_count
from tenterhook.record.events import (
    Backward,
    ByHand,
    Called,
    Finished,
    Joined,
    PartCalled,
    Raised,
    Ready,
    Skipped,
    Stepped,
    Stepping,
)

BY_HAND = ByHand()
CALL, CHECK, INNER, END = Called(), Called(trains=False), PartCalled(), Finished()
A, B, C = 1, 2, 3  # optimizers


def back(loss, **options):
    """A pass whose number is that of its loss."""
    return Backward(loss, loss, **options)


def step(optimizer, *inside, joins=False, others=(), replaces=()):
    """A whole step; `inside` happens between its beginning and its end."""
    joined = [Joined(optimizer, frozenset(others), replaces)] if joins else []
    return [Stepping(optimizer), *joined, Ready(optimizer), *inside, Stepped(optimizer)]


def first(optimizer, others=(), replaces=()):
    return step(optimizer, joins=True, others=others, replaces=replaces)


def closure(optimizer, *inside):
    """A step whose closure is called several times: the gradients are ready after the first."""
    later = [event for some in inside[1:] for event in some]
    return [Stepping(optimizer), *inside[0], Ready(optimizer), *later, Stepped(optimizer)]


def assembler_for(events):
    there_are = any(isinstance(event, Joined) for event in events)  # optimizers
    return Assembler(lambda trains: there_are)


def steps_of(events):
    assembler = assembler_for(events)
    whole = [one for event in events for one in assembler.feed(event)]
    assert [one.number for one in whole] == list(range(len(whole))) and assembler.number == len(whole)
    return [[[micro.losses for micro in part.micros] for part in one.parts] for one in whole]


def flat(*some):
    return [event for one in some for event in (one if isinstance(one, list) else [one])]


TABLES = {
    "one optimizer": (
        flat(CALL, back(1), first(A), CALL, back(2), step(A)),
        [[[[1]]], [[[2]]]],
    ),
    "what is not stepped is not lost": (
        flat(CALL, back(1), first(A), CALL, back(2), END),
        [[[[1]]], [[[2]]]],
    ),
    "nothing is left": (
        flat(CALL, back(1), first(A), CALL, END),
        [[[[1]]]],
    ),
    "micro-batches": (
        flat(CALL, back(1), CALL, back(2), first(A), CALL, back(3), CALL, back(4), step(A)),
        [[[[1], [2]]], [[[3], [4]]]],
    ),
    "several losses of one forward": (
        flat(CALL, back(1), back(2), first(A)),
        [[[[1, 2]]]],
    ),
    "one loss with several passes": (
        flat(CALL, back(1), Backward(2, 1), first(A)),
        [[[[1]]]],
    ),
    "a pass without a loss": (
        flat(CALL, Backward(1), CALL, back(2), first(A)),
        [[[[], [2]]]],
    ),
    "a module that is called after a pass": (
        flat(CALL, INNER, back(1), INNER, INNER, back(2), first(A)),
        [[[[1], [2]]]],
    ),
    "two optimizers in turn": (
        flat(CALL, back(1), first(A, others=(A, B)), CALL, back(2), first(B))
        + flat(CALL, back(3), step(A), CALL, back(4), step(B)),
        [[[[1]], [[2]]], [[[3]], [[4]]]],
    ),
    "two optimizers after one pass": (
        flat(CALL, back(1), first(A, others=(A, B)), first(B), CALL, back(2), step(A), step(B)),
        [[[[1]], [[]]], [[[2]], [[]]]],
    ),
    "one that turns out not to take turns": (
        flat(CALL, back(1), first(A, others=(A, B)), CALL, back(2), step(A), CALL, back(3), step(A), END),
        [[[[1]]], [[[2]]], [[[3]]]],
    ),
    "one that comes late": (
        flat(CALL, back(1), first(A), CALL, back(2), step(A), CALL, back(3), first(B))
        + flat(CALL, back(4), step(A), CALL, back(5), step(B), CALL, back(6), step(A), END),
        [[[[1]]], [[[2]]], [[[3]], [[4]]], [[[5]], [[6]]]],
    ),
    "several turns of one": (
        flat(CALL, back(1), first(A, others=(A, B)), CALL, back(2), first(B))
        + flat(CALL, back(3), step(A), CALL, back(4), step(A), CALL, back(5), step(B), END),
        [[[[1]], [[2]]], [[[3]]], [[[4]]], [[[5]]]],
    ),
    "a new optimizer for every step": (
        flat(CALL, back(1), first(A), CALL, back(2), first(B, replaces=(A,)), CALL, back(3), first(C, replaces=(B,))),
        [[[[1]]], [[[2]]], [[[3]]]],
    ),
    "one that is replaced after its turn": (
        flat(CALL, back(1), first(A, others=(A, B)), CALL, back(2), first(C, replaces=(A,)), CALL, back(3), step(C)),
        [[[[1]]], [[[2]]], [[[3]]]],
    ),
    "a wrapper around another": (
        flat(
            CALL, back(1), Stepping(A), Joined(A), Ready(A), first(B, replaces=(A,)), Stepped(A), CALL, back(2), step(B)
        ),
        [[[[1]]], [[[2]]]],
    ),
    "a closure that is called several times": (
        flat(
            CALL, back(1), first(A), closure(A, [CALL, back(2)], [CALL, back(3, in_step=True)]), CALL, back(4), step(A)
        ),
        [[[[1]]], [[[2], []]], [[[4]]]],
    ),
    "a step that raised, and a pass that is not in it": (
        flat(CALL, back(1), first(A), CALL, back(2), Stepping(A), Ready(A), CALL, back(3), step(A)),
        [[[[1]]], [[[3]]]],
    ),
    "a step that raised and is tried again": (
        flat(CALL, back(1), first(A), CALL, back(2), Stepping(A), Ready(A), step(A)),
        [[[[1]]], [[[2]]]],
    ),
    "a closure that raised": (
        flat(CALL, back(1), first(A), Stepping(A), CALL, back(2), closure(A, [CALL, back(3)])),
        [[[[1]]], [[[2], [3]]]],
    ),
    "steps inside of a pass": (
        flat(CALL, back(1), first(A, others=(A, B)), first(B), CALL, back(2), step(A), step(B), CALL, END),
        [[[[1]], [[]]], [[[2]], [[]]]],
    ),
    "validation between steps": (
        flat(CALL, back(1), first(A), CHECK, CHECK, CALL, back(2), CHECK, step(A)),
        [[[[1]]], [[[2]]]],
    ),
    "parameters that change by hand, beside an optimizer": (
        flat(CALL, back(1), CALL, BY_HAND, back(2), CALL, back(3), CALL, back(4), CALL, back(5), first(A))
        + flat(CALL, back(6), CALL, back(7), step(A)),
        [[[[1], [2]]], [[[3]]], [[[4]]], [[[5]]], [[[6], [7]]]],
    ),
    "no optimizer": (
        flat(CALL, back(1), CALL, back(2), CALL, back(3), END),
        [[[[1]]], [[[2]]], [[[3]]]],
    ),
    "calls without a pass, and no optimizer": (
        flat(CALL, CALL, CALL, back(1), END),
        [[[[1]]]],
    ),
    "an optimizer that has not stepped yet is waited for": (
        flat(CHECK, CALL, back(1), CALL, back(2), first(A)),
        [[[[1], [2]]]],
    ),
    "nothing but calls under no_grad": (
        flat(CHECK, CHECK, CHECK, END),
        [[[[]]], [[[]]], [[[]]]],
    ),
    "a training after calls under no_grad": (
        flat(CHECK, CHECK, CALL, back(1), first(A), CHECK, CALL, back(2), step(A)),
        [[[[1]]], [[[2]]]],
    ),
    "a step that a scaler leaves out": (
        flat(CALL, back(1), first(A), CALL, back(2), Skipped(A), CALL, back(3), step(A)),
        [[[[1]]], [[[2], [3]]]],
    ),
    "a step of a wrapper that a scaler leaves out": (
        flat(CALL, back(1), first(A), CALL, back(2), Skipped(None), CALL, back(3), step(A)),
        [[[[1]]], [[[2], [3]]]],
    ),
    "one of two that a scaler leaves out": (
        flat(CALL, back(1), first(A, others=(A, B)), first(B), CALL, back(2), Skipped(A), step(B))
        + flat(CALL, back(3), step(A), Skipped(B), CALL, back(4), step(A), step(B)),
        [[[[1]], [[]]], [[[2]]], [[[3]], [[]]], [[[4]], [[]]]],
    ),
    "both of two that a scaler leaves out": (
        flat(CALL, back(1), first(A, others=(A, B)), first(B), CALL, back(2), Skipped(A), Skipped(B))
        + flat(CALL, back(3), step(A), step(B)),
        [[[[1]], [[]]], [[[2], [3]], [[]]]],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_steps(name):
    events, expected = TABLES[name]
    assert steps_of(events) == expected


def test_what_is_measured_belongs_to_the_micro_batch_that_runs():
    events, notes, found = flat(CALL, back(1), CALL, back(2), first(A), CALL, back(3), step(A)), {}, []
    assembler = assembler_for(events)
    for k, event in enumerate(events):
        whole = assembler.feed(event)
        found += [notes[micro] for one in whole for part in one.parts for micro in part.micros]
        notes.setdefault(assembler.micro, []).append(k)
    assert found == [[0, 1], [2, 3, 4, 5, 6], [7, 8, 9, 10, 11]]


def test_under_no_grad_calls_count_where_nothing_is_trained():
    assembler = Assembler()
    assembler.feed(CHECK)
    assert assembler.without_gradients
    for event in flat(CALL, back(1), first(A)):
        assembler.feed(event)
    assert not assembler.without_gradients


def part(*passes, keeps_last=False):
    return Part(micros=[MicroBatch(passes=[1] * many) for many in passes], keeps_last=keeps_last)


@pytest.mark.parametrize(
    ("one", "skips", "expected"),
    [
        (part(1), [False], (0, 0)),
        (part(1, 1, 1), [False, True, False], (2, 2)),
        (part(1, 1, 1), [True, True, False], (2, 2)),
        (part(1, 1), [False, True], (2, 2)),
        (part(1, 1, keeps_last=True), [False, True], (2, 0)),  # another optimizer has stepped after it
        (part(1, 1, 0, keeps_last=True), [True, True, False], (2, 1)),
        (part(1, 1, 1, keeps_last=True), [False, True, False], (2, 2)),  # there is a later one that counts
    ],
)
def test_what_counts_of_a_part_with_steps_that_were_left_out(one, skips, expected):
    assert first_that_count(one, skips) == expected


def test_the_assembler_needs_no_torch():
    code = "import sys, tenterhook.record.assemble; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_backward_pass_that_raises_does_not_count():
    again = Backward(12, 1)  # of the same loss, whose graph is gone
    events = flat(CALL, back(1), again, Raised(12), first(A), CALL, back(2), Raised(2), CALL, back(3), step(A), END)
    assert steps_of(events) == [[[[1]]], [[[3]]]]


def test_an_optimizer_that_never_steps_does_not_keep_every_micro_batch():
    assembler, losses, many = Assembler(lambda trains: True), [], 0
    for k in range(2 * MOST_MICROS + 10):
        whole = [one for event in (CALL, back(k)) for one in assembler.feed(event)]
        losses += [loss for one in whole for part in one.parts for micro in part.micros for loss in micro.losses]
        many = max(many, len(assembler.part.micros))
    assert many == MOST_MICROS and assembler.number == 2
    (last,) = assembler.feed(END)
    losses += [loss for micro in last.parts[0].micros for loss in micro.losses]
    assert losses == list(range(2 * MOST_MICROS + 10))


def test_a_step_that_was_cut_is_followed_by_those_of_the_optimizer():
    assembler = Assembler(lambda trains: True)
    for k in range(MOST_MICROS):
        assert not [one for event in (CALL, back(k)) for one in assembler.feed(event)]
    (cut,) = assembler.feed(CALL)
    whole = [one for event in (back(-1), *first(A), CALL, back(-2), *step(A)) for one in assembler.feed(event)]
    assert len(cut.parts[0].micros) == MOST_MICROS
    assert [[micro.losses for micro in one.parts[0].micros] for one in whole] == [[[-1]], [[-2]]]
    assert [one.number for one in (cut, *whole)] == [0, 1, 2]
