"""Every private name of torch and CPython that we rely on, one file per subject, with a test for each.

A few names are used inline elsewhere, since a function around them would cost a call where speed is felt. They are
old, and half of torch's users rely on them; `tests/platform/test_inline_names.py` guards what we assume of them:

    module._forward_hooks, module._forward_pre_hooks      the hook tables, ordered dicts from ids to hooks
    …_hooks_with_kwargs                                   the ids of the hooks that get keyword arguments
    module._parameters, module._buffers, module._modules  dicts by name; None for one that is not there
    tensor._version                                       grows with each write into the tensor's memory
    tensor._backward_hooks                                None, or an ordered dict from ids to hooks, run in this order
"""
