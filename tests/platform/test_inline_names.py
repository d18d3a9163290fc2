"""The private names that are used all over the code, for speed: what the docstring of platform/ says of them."""

import torch
from torch import nn


def test_the_hook_tables_of_a_module_are_run_in_their_order():
    module, seen = nn.Linear(2, 2), []
    module._forward_hooks[-1] = lambda *_: seen.append("one")
    module._forward_hooks[-2] = lambda *_: seen.append("two")
    module._forward_pre_hooks[-3] = lambda *_: seen.append("before")
    module._forward_hooks.move_to_end(-1)
    module(torch.ones(1, 2))
    assert seen == ["before", "two", "one"], "torch no longer runs what is in the hook tables of a module, in order"
    del module._forward_hooks[-1], module._forward_hooks[-2], module._forward_pre_hooks[-3]
    module(torch.ones(1, 2))
    assert len(seen) == 3, "torch still runs a hook that was taken out of the table"


def test_what_a_hook_in_a_table_returns_takes_the_place():
    module = nn.Identity()
    module._forward_pre_hooks[-1] = lambda module, args: (args[0] + 1,)
    module._forward_hooks[-2] = lambda module, args, output: output * 10
    assert float(module(torch.ones(()))) == 20, "what a hook in a table returns no longer takes the place"


def test_ids_in_a_second_table_ask_for_keyword_arguments():
    class Double(nn.Module):
        def forward(self, x):
            return x * 2

    module, seen = Double(), []
    module._forward_pre_hooks[-1] = lambda module, args, kwargs: seen.append(sorted(kwargs))
    module._forward_pre_hooks_with_kwargs[-1] = True
    module._forward_hooks[-2] = lambda module, args, kwargs, output: seen.append(sorted(kwargs))
    module._forward_hooks_with_kwargs[-2] = True
    module(x=torch.ones(2))
    assert seen == [["x"], ["x"]], "torch no longer asks the tables `_with_kwargs` for who gets keyword arguments"


def test_an_exchanged_hook_table_entry_may_come_and_go_while_the_module_runs():
    module, seen = nn.Identity(), []

    def leave(*_):
        del module._forward_hooks[-2]
        seen.append("left")

    module._forward_hooks[-1] = leave
    module._forward_hooks[-2] = lambda *_: seen.append("still called")
    module(torch.ones(2))
    assert seen[0] == "left" and len(seen) <= 2, "torch no longer allows hooks to be removed by hooks"


def test_parameters_buffers_and_children_are_in_dicts():
    module = nn.Linear(2, 2, bias=False)
    module.child = nn.ReLU()
    module.register_buffer("scale", torch.ones(1))
    found = [dict(module._parameters), dict(module._buffers), dict(module._modules)]
    expected = [{"weight": module.weight, "bias": None}, {"scale": module.scale}, {"child": module.child}]
    assert found == expected, "torch no longer has the parts of a module in dicts by their names"
    module._parameters["weight"] = other = nn.Parameter(torch.ones(2, 2))
    assert module.weight is other, "torch no longer finds a parameter in the table of its module"


def test_the_version_of_a_tensor_grows_with_each_write():
    x = torch.ones(4)
    before, view = x._version, x[:2]
    x + 1
    assert x._version == before, "the version of a tensor now grows when it is read"
    view.add_(1)
    assert x._version > before, "the version of a tensor no longer grows when a view is written into"
    assert x.detach()._version == x._version, "a detached tensor no longer has the version of its memory"


def test_an_inference_tensor_has_no_version():
    with torch.inference_mode():
        x = torch.ones(2)
    try:
        x._version
    except RuntimeError:
        return
    raise AssertionError("an inference tensor now has a version; `version_of` says -1 for it")


def test_the_hooks_on_a_tensor_are_in_a_dict_and_run_in_its_order():
    y = torch.ones(2, requires_grad=True) * 2
    assert y._backward_hooks is None, "torch now has a table of hooks on every tensor"
    seen = []
    y.register_hook(lambda grad: seen.append("one"))
    y.register_hook(lambda grad: seen.append("two"))
    first = next(iter(y._backward_hooks))
    y._backward_hooks[first] = y._backward_hooks.pop(first)
    y.sum().backward()
    assert seen == ["two", "one"], "torch no longer runs the hooks on a tensor in the order of their table"
