"""Entries of ours in the hook tables of modules, and how a model is pickled or copied without them.

    hooks[new_id()] = hook                               the fast way, for hooks that need no options
    handle = register(table, hook, with_kwargs=flags)    the same with torch's handle

The keys of our entries are numbers that nobody else uses (`is_ours`). While anything of ours is in a model
(`begin_hiding` … `end_hiding`), a reducer for OrderedDict, which these tables are, leaves such entries out. Pickle,
torch.save and copy.deepcopy all ask `copyreg.dispatch_table` for it, so that what they make of a model has no trace
of us.

Relies on: hook tables of nn.Module are OrderedDicts by number, which torch counts up from 0; whatever pickles or copies
asks `copyreg.dispatch_table`. Keys are plain integers, since torch.compile (2.11) can trace no others.
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

_FIRST = -(1 << 60)
_lock = threading.RLock()  # a session may be closed by garbage collection while another is being opened
_holders: set[int] = set()  # ids of what has entries in a model
_reducer_before: Any = None


class Hook:
    """The base of our hooks on modules."""

    changes: bool = True  # whether the model may go on with something else because of it

    def __reduce__(self) -> Any:
        """For picklers that do not ask copyreg: a call without effect that needs nothing but Python."""
        return functools.partial, (sys.audit, "tenterhook.leftover")


new_id: Callable[[], int] = itertools.count(_FIRST, -1).__next__  # a key for one more entry


def is_ours(key: object) -> bool:
    """True for the key of an entry of ours."""
    return type(key) is int and key <= _FIRST


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


def begin_hiding(holder: object) -> None:
    """From here on, copies and pickles of models are made without our entries."""
    global _reducer_before
    with _lock:
        if not _holders:
            _reducer_before = copyreg.dispatch_table.get(OrderedDict)
            copyreg.dispatch_table[OrderedDict] = _without_ours
        _holders.add(id(holder))


def end_hiding(holder: object) -> None:
    """Undo its `begin_hiding`; may be done again, after Ctrl-C in between."""
    with _lock:
        if _holders <= {id(holder)} and copyreg.dispatch_table.get(OrderedDict) is _without_ours:
            if _reducer_before is None:
                del copyreg.dispatch_table[OrderedDict]
            else:
                copyreg.dispatch_table[OrderedDict] = _reducer_before
        _holders.discard(id(holder))


def _without_ours(table: OrderedDict[Any, Any]) -> Any:
    if any(map(is_ours, table)):
        kept = OrderedDict((key, value) for key, value in table.items() if not is_ours(key))
        vars(kept).update(vars(table))
        table = kept
    return table.__reduce__() if _reducer_before is None else _reducer_before(table)
