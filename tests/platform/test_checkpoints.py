import functools

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tenterhook.platform.autograd import graph_task
from tenterhook.platform.checkpoints import (
    Enough,
    Replays,
    beside_checkpoints,
    checkpoints,
    may_be_checkpointed,
    run_again_under,
    runs_in_backward,
)
from tenterhook.platform.modes import dispatch_modes

KINDS = pytest.mark.parametrize("reentrant", [False, True])


def inputs():
    return torch.ones(2, requires_grad=True)


def run(function, *args, reentrant):
    checkpoint(function, *args, use_reentrant=reentrant).sum().backward()


@KINDS
def test_both_passes_of_a_checkpoint_have_one_object(reentrant):
    seen = []

    def function(x):
        seen.append([(one, again) for one, again in checkpoints()])
        return x.sin()

    run(function, inputs(), reentrant=reentrant)
    what = "torch's checkpoints no longer have an object that both passes of one share, or it is found elsewhere"
    assert [again for ((_, again),) in seen] == [False, True], what
    ((first, _),), ((second, _),) = seen
    assert first is second and runs_in_backward(first) is not reentrant, what


@KINDS
def test_a_first_pass_is_known_at_little_cost(reentrant):
    seen = []

    def function(x):
        if graph_task() == -1:
            seen.append(may_be_checkpointed())
        return x.sin()

    run(function, inputs(), reentrant=reentrant)
    function(inputs())
    with torch.no_grad():
        function(inputs())
    assert seen == [True, False, False], "torch's checkpoints can no longer be told from other code by a cheap test"


def test_nested_checkpoints_come_from_the_inside_out():
    seen = []

    def inner(x):
        seen.append(list(checkpoints()))
        return x.sin()

    def outer(x):
        return checkpoint(inner, x.cos(), use_reentrant=False).exp()

    run(outer, inputs(), reentrant=False)
    what = "torch's nested checkpoints are no longer found one within the other"
    (inmost, first), (outmost, second) = seen[0]
    assert inmost is not outmost and not first and not second, what
    assert (outmost, True) in seen[1], what


@KINDS
def test_the_calls_that_come_again_have_the_numbers_of_the_first_pass(reentrant):
    replays, calls, again = Replays(), iter(range(10)), []

    def function(x):
        for _ in range(2):
            if graph_task() == -1:
                replays.remember(next(calls))
            else:
                again.append(replays.next_call()[0])
            x = x.sin()
        return x

    run(function, inputs(), reentrant=reentrant)
    run(function, inputs(), reentrant=reentrant)
    assert again == [0, 1, 2, 3], "torch's checkpoints no longer run their function again in the same order"


@KINDS
def test_a_checkpoint_enters_a_session_when_it_runs_again(reentrant):
    entered = []

    class Session:
        def __enter__(self):
            entered.append("in")

        def __exit__(self, *_):
            entered.append("out")

    def function(x):
        if graph_task() == -1:
            for one, _ in checkpoints():
                run_again_under(one, 0, Session)
        else:
            entered.append("runs")
        return x.sin()

    run(function, inputs(), reentrant=reentrant)
    got = "".join(entered)
    assert got.startswith("inruns"), "torch's checkpoints no longer hold the function that they run again"


def test_a_recomputation_ends_early_once_it_has_all_that_it_wants():
    ended = []

    def function(x):
        y = x.sin()
        try:
            return y + y.detach().cos()
        except Exception as error:
            ended.append(type(error))
            raise

    def both(x):
        try:
            return function(x).exp().sin()
        except Exception as error:
            ended.append(type(error))
            raise

    run(both, inputs(), reentrant=False)
    assert set(ended) == {Enough}, "a checkpoint no longer ends its recomputation by an exception that is known"


def test_a_selective_checkpoint_does_not_see_what_is_done_beside_it():
    def policy(context, operation, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE

    def function(x):
        if graph_task() == -1:
            before = dispatch_modes()
            with beside_checkpoints():
                seen.append((before, dispatch_modes()))
                x.detach().cos()  # only in the first pass: a mode that saw it would expect it again
        return x.sin()

    seen = []
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    checkpoint(function, inputs(), use_reentrant=False, context_fn=contexts).sum().backward()
    assert seen == [(1, 0)], "torch's selective checkpoints are no longer dispatch modes of a known class"


def test_function_modes_are_not_touched_beside_a_checkpoint():
    class Mode(TorchFunctionMode):
        pass

    with Mode(), beside_checkpoints():
        assert torch._C._len_torch_function_stack() == 1
