import copy
import io
import pickle

import torch
from torch import nn

from tenterhook.platform.hook_tables import Hook, begin_hiding, end_hiding, is_ours, new_id, register


class Noting(Hook):
    def __init__(self, log):
        self.log = log

    def __call__(self, *args):
        self.log.append(len(args))


def test_ids_of_ours_never_meet_those_of_torch():
    module = nn.Identity()
    handle = module.register_forward_hook(lambda *_: None)
    ours = new_id()
    assert is_ours(ours) and not is_ours(handle.id), "torch no longer counts the ids of hooks up from 0"


def test_a_handle_takes_a_hook_out_of_both_tables():
    module, log = nn.Identity(), []
    before = module.register_forward_hook(lambda *_: None)
    handle = register(module._forward_hooks, Noting(log), with_kwargs=module._forward_hooks_with_kwargs, first=True)
    assert next(iter(module._forward_hooks)) == handle.id
    module(torch.ones(1))
    assert log == [4], "torch no longer gives keyword arguments to hooks that ask for them"
    handle.remove()
    left = list(module._forward_hooks), list(module._forward_hooks_with_kwargs)
    assert left == ([before.id], []), "torch's RemovableHandle no longer takes a hook out of both tables"


def test_copies_and_pickles_of_a_model_leave_our_entries_out():
    module = nn.Linear(2, 2)
    theirs = module.register_forward_hook(print)
    register(module._forward_hooks, Noting([]))
    begin_hiding("test")
    try:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        made = [
            copy.deepcopy(module),
            pickle.loads(pickle.dumps(module)),
            torch.load(file, weights_only=False),
        ]
    finally:
        end_hiding("test")
    for one in made:
        what = "pickle, torch.save or copy.deepcopy no longer asks copyreg for how to reduce an OrderedDict"
        assert list(one._forward_hooks) == [theirs.id], what
    assert len(module._forward_hooks) == 2
