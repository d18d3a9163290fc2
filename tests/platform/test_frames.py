import sys
import threading
import weakref

import torch
from torch import nn

from tenterhook.platform.frames import (
    CALLS,
    PerCall,
    all_variables,
    caller_of_module,
    first_argument,
    frame_here,
    frames_from,
    frames_of_threads,
    read_variable,
)


class Thing:
    pass


def test_the_frame_of_a_running_function_tells_its_variables():
    frames = []

    def inner(first, second):
        third = first + second
        frames.append(sys._getframe())
        found = all_variables(frames[0]), first_argument(frames[0]), read_variable(frames[0], "third")
        return found, third

    (found, first, third), _ = inner(1, 2)
    assert {**found, "third": 3} == found and (first, third) == (1, 3), "Python no longer shows a function's variables"
    assert frames[0] in list(frames_from(frames[0]))


def test_to_read_a_variable_does_not_keep_it_alive():
    def function():
        thing = Thing()
        known = weakref.ref(thing)
        frame = sys._getframe()
        read_variable(frame, "thing")
        all_variables(frame)

        del thing
        return known()

    what = "Python now keeps a variable alive that was read by way of its frame; see `empty_snapshot`"
    assert function() is None, what


def test_both_hooks_of_a_call_are_called_from_one_frame_and_nested_calls_from_others():
    remembered, got = PerCall(), []

    class Before:
        def __call__(self, module, args):
            remembered.put(module)

    class After:
        def __call__(self, module, args, output):
            got.append(remembered.take() is module)

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for module in model.modules():
        module.register_forward_pre_hook(Before())
        module.register_forward_hook(After())
    model(torch.ones(1, 2))
    assert got == [True, True, True], "torch no longer calls the hooks before and after a module from one frame"


def test_a_module_calls_its_forward_from_the_file_of_nn_module():
    files = []

    class Model(nn.Module):
        def forward(self, x):
            files.append(sys._getframe(1).f_code.co_filename)
            return x

    Model()(torch.ones(1))
    model = Model()
    model.register_forward_hook(lambda *_: None)
    model(torch.ones(1))
    assert files == [CALLS, CALLS], "torch no longer calls a module's forward from the file of nn.Module"


def test_the_frames_of_all_threads_are_found():
    started, done, found = threading.Event(), threading.Event(), []

    def wait():
        found.append(frame_here())
        started.set()
        done.wait(10)

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait(10)
    inmost = frames_of_threads()[thread.ident]
    what = "Python no longer gives the innermost frame of each thread"
    assert found[0] in list(frames_from(inmost)) and frame_here(0).f_code.co_name.startswith("test_"), what
    done.set()
    thread.join()


def test_a_hook_finds_the_function_that_called_its_module():
    found = []
    inner = nn.Linear(2, 2)
    inner.register_forward_pre_hook(lambda *_: found.append(caller_of_module(frame_here()).f_code.co_name))

    class Outer(nn.Module):
        def forward(self, x):
            return inner(x)

    def by_itself():
        inner(torch.ones(2))

    Outer()(torch.ones(2))
    by_itself()
    assert found == ["forward", "by_itself"], "torch now calls modules by way of another file"
    assert caller_of_module(frame_here()) is None
