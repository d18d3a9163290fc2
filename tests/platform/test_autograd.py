import threading

import torch

from tenterhook.platform.autograd import (
    at_end_of_backward,
    graph_task,
    jvp_enabled,
    next_sequence_number,
    saves_hooked,
    sequence_number,
)


def test_a_backward_pass_has_a_number_of_its_own_and_outside_there_is_none():
    assert graph_task() == -1, "torch no longer gives -1 as the graph task outside of a backward pass"
    x = torch.ones(2, requires_grad=True)
    tasks = []
    y = x * 2
    y.register_hook(lambda grad: tasks.append(graph_task()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert -1 not in tasks, "torch no longer has a graph task within a backward pass"
    assert len(set(tasks)) == 2, "two backward passes of torch now have one graph task"


def test_each_new_node_takes_the_next_number_of_its_thread():
    x = torch.ones(2, requires_grad=True)
    before = next_sequence_number()
    one = x * 2
    two = one * 2
    numbers = [sequence_number(one.grad_fn), sequence_number(two.grad_fn)]
    assert numbers == [before, before + 1], "torch no longer counts the nodes of a graph one by one"
    with torch.no_grad():
        x * 2
    assert next_sequence_number() == before + 2, "torch now counts operations that make no node"
    other = []
    thread = threading.Thread(target=lambda: other.append(next_sequence_number()))
    thread.start()
    thread.join()
    assert other[0] < before + 2, "torch no longer counts the nodes of each thread apart"


def test_a_callback_runs_at_the_end_of_a_backward_pass_and_one_of_its_own_after_it():
    x = torch.ones(2, requires_grad=True)
    order = []

    def at_end():
        order.append(f"end, .grad {'is' if x.grad is not None else 'is not'} there")
        at_end_of_backward(lambda: order.append("after the end"))

    def hook(grad):
        at_end_of_backward(at_end)
        order.append("hook")

    (x * 2).register_hook(hook)
    y = x * 3
    y.register_hook(hook)
    y.sum().backward()
    expected = ["hook", "end, .grad is there", "after the end"]
    assert order == expected, "torch no longer runs queued callbacks at the end of a backward pass, in turn"


def test_hooks_on_saved_tensors_are_found():
    assert saves_hooked(False) is None, "torch no longer says None where saved tensors are not hooked"

    def pack(tensor):
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert saves_hooked(False)[0] is pack, "torch no longer gives the hooks on saved tensors as they were put"


def test_the_inside_of_an_autograd_function_is_told_from_no_grad():
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(jvp_enabled())
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    Double.apply(torch.ones(2, requires_grad=True))
    with torch.no_grad():
        seen.append(jvp_enabled())
    assert seen == [False, True], "torch no longer turns forward derivatives off within a Function and only there"
