import threading

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tenterhook.platform.modes import (
    any_mode,
    dispatch_modes,
    function_mode_is_on,
    function_modes,
    push_function_mode,
    remove_function_mode,
    unrecorded,
    without_dispatch_modes,
    without_function_modes,
    without_modes,
    without_subclasses,
)


class Functions(TorchFunctionMode):
    def __init__(self, name="", log=None):
        super().__init__()
        self.name, self.log = name, [] if log is None else log

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.log.append(self.name)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self, name="", log=None):
        super().__init__()
        self.name, self.log = name, [] if log is None else log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.log.append(self.name)
        return func(*args, **(kwargs or {}))


def test_function_modes_go_on_and_off_in_any_order():
    log = []
    one, two, three = (Functions(name, log) for name in "123")
    for mode in (one, two, three):
        push_function_mode(mode)
    assert function_modes() == 3, "torch no longer counts the function modes that are on"
    remove_function_mode(two)
    assert [function_mode_is_on(mode) for mode in (one, two, three)] == [True, False, True]
    torch.ones(2).add(1)
    remove_function_mode(one)
    remove_function_mode(three)
    assert function_modes() == 0
    assert log[-2:] == ["3", "1"] and "2" not in log, "torch no longer asks the function modes from the innermost on"


def test_function_modes_belong_to_a_thread():
    mode = Functions()
    seen = []
    with mode:
        thread = threading.Thread(target=lambda: seen.append(function_mode_is_on(mode)))
        thread.start()
        thread.join()
    assert seen == [False], "function modes of torch now reach into other threads"


def test_modes_are_told_and_kept_away():
    function, operation = Functions(), Operations()
    assert not any_mode()
    with function:
        assert any_mode() and not dispatch_modes()
    with operation:
        assert any_mode() and dispatch_modes() == 1, "torch no longer counts the dispatch modes that are on"
    x = torch.ones(2)
    with function, operation:
        with without_modes():
            x + 1
        with unrecorded(), without_function_modes():
            x + 1
    assert not function.log and not operation.log, "modes of torch now see what is done within `without_modes`"


def test_some_dispatch_modes_are_taken_out_and_put_back_in_their_order():
    log = []
    modes = [Operations(name, log) for name in "1234"]
    x = torch.ones(2)
    with modes[0], modes[1], modes[2], modes[3]:
        with without_dispatch_modes(lambda mode: mode.name in "24"):
            x + 1
        x + 1
    assert log[:2] == ["3", "1"], "torch no longer lets dispatch modes be taken out of the middle"
    assert log[2:] == ["4", "3", "2", "1"], "torch no longer takes dispatch modes back as they were"
    with without_dispatch_modes(lambda mode: True):
        pass


def test_what_a_subclass_does_to_operations_can_be_left_out():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("asked")

    loud = torch.ones(2).as_subclass(Loud)
    with without_subclasses():
        total = torch.sum(loud)
    assert float(total) == 2, "torch now asks a subclass within DisableTorchFunctionSubclass"
