"""Entries of ours in the hook tables of modules, and how a model is pickled or copied without them.

    hooks[new_id()] = hook                               the fast way, for hooks that need no options
    handle = register(table, hook, with_kwargs=flags)    the same with torch's handle

The key of every entry of ours is a `HookId`. While anything of ours is in a model (`begin_hiding` … `end_hiding`), a
reducer for OrderedDict, which these tables are, leaves such entries out. Pickle, torch.save and copy.deepcopy all ask
`copyreg.dispatch_table` for it, so that what they make of a model has no trace of us.

Relies on: the tables of `nn.Module` are OrderedDicts, run in their order, and any int may be a key; those with keyword
arguments have it in a second table; `RemovableHandle(table, extra_dict=…)` has the key as `id`, and removes it from
both.
"""

import copyreg
import functools
import itertools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

_lock = threading.RLock()  # a session may be closed by garbage collection while another is being opened
_hiding = 0
_reducer_before: Any = None


class HookId(int):
    """The key of an entry of ours."""

    __slots__ = ()


class Hook:
    """The base of our hooks on modules."""

    changes: bool = True  # whether the model may go on with something else because of it

    def __reduce__(self) -> Any:
        """For picklers that do not ask copyreg: a call without effect that needs nothing but Python."""
        return functools.partial, (sys.audit, "tenterhook.leftover")


# A key for one more entry. torch's own count up from 0, and without a lock.
new_id: Callable[[], HookId] = map(HookId, itertools.count(-1, -1)).__next__


def register(table: Any, hook: Any, *, with_kwargs: Any = None, first: bool = False) -> RemovableHandle:
    """Put a hook into a table, as `register_forward_hook` does; `with_kwargs` is the table of those that get them."""
    handle = RemovableHandle(table, extra_dict=with_kwargs)
    handle.id = new_id()
    table[handle.id] = hook
    if with_kwargs is not None:
        with_kwargs[handle.id] = True
    if first:
        table.move_to_end(handle.id, last=False)
    return handle


def begin_hiding() -> None:
    """From here on, copies and pickles of models are made without our entries."""
    global _hiding, _reducer_before
    with _lock:
        _hiding += 1
        if _hiding == 1:
            _reducer_before = copyreg.dispatch_table.get(OrderedDict)
            copyreg.dispatch_table[OrderedDict] = _without_ours


def end_hiding() -> None:
    """Undo one `begin_hiding`."""
    global _hiding
    with _lock:
        _hiding -= 1
        if _hiding or copyreg.dispatch_table.get(OrderedDict) is not _without_ours:
            return
        if _reducer_before is None:
            del copyreg.dispatch_table[OrderedDict]
        else:
            copyreg.dispatch_table[OrderedDict] = _reducer_before


def _without_ours(table: OrderedDict[Any, Any]) -> Any:
    if any(type(key) is HookId for key in table):
        kept = OrderedDict((key, value) for key, value in table.items() if type(key) is not HookId)
        vars(kept).update(vars(table))
        table = kept
    return table.__reduce__() if _reducer_before is None else _reducer_before(table)
