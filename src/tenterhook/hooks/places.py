"""Where the hooks of a session are: entries in the hook tables of modules, and handles of other hooks.

A checkpoint may run again after the session is over, and then needs the changes that were made the first time, in
the order in which they were made. So the entries that change something are remembered with the keys of those that
followed them, and put back in front of the first of these that is still there. All others keep their order.
"""

from collections.abc import Callable
from itertools import dropwhile
from typing import Any, NamedTuple

from torch.utils.hooks import RemovableHandle

from tenterhook.platform.hook_tables import Hook, new_id


class _Entry(NamedTuple):
    table: Any
    key: int
    hook: Hook
    with_kwargs: Any = None  # the table of the hooks that get keyword arguments, if it is one
    is_first: bool = False

    def put(self) -> None:
        self.table[self.key] = self.hook
        if self.with_kwargs is not None:
            self.with_kwargs[self.key] = True
        if self.is_first:
            self.table.move_to_end(self.key, last=False)

    def remove(self) -> None:
        self.table.pop(self.key, None)
        if self.with_kwargs is not None:
            self.with_kwargs.pop(self.key, None)

    def followers(self) -> frozenset[int]:
        """The keys after its own, as far as they matter."""
        after = dropwhile(lambda key: key != self.key, list(self.table))
        return frozenset() if self.is_first else frozenset(after) - {self.key}

    def put_before(self, followers: frozenset[int]) -> None:
        """Put it in front of the first of these that is there."""
        others = list(self.table)
        self.put()
        for key in dropwhile(lambda key: key not in followers, others):
            self.table.move_to_end(key)


class Places:
    """What a session has placed."""

    def __init__(self) -> None:
        self._plain: list[tuple[Any, int, Hook]] = []  # entries without options
        self._entries: list[_Entry] = []
        self._remembered: list[tuple[_Entry, frozenset[int]]] = []
        self._handles: list[RemovableHandle] = []
        self._at_end: list[Callable[[], None]] = []

    def put_plainly(self, table: Any, hook: Hook) -> None:
        """Put a hook into a table: `register_forward_hook` without its handle and options, in a quarter of the time."""
        key = new_id()
        self._plain.append((table, key, hook))
        table[key] = hook

    def put(self, table: Any, hook: Hook, *, with_kwargs: Any = None, first: bool = False) -> None:
        """Put a hook into a table, first of all or with keyword arguments."""
        self._entries.append(_Entry(table, new_id(), hook, with_kwargs, first))
        self._entries[-1].put()

    def exchange(self, make: Callable[[Hook], Hook]) -> None:
        """Put another hook into the place of each that is in a table now; `put_back` puts in the first one again."""
        for table, key, hook in [*self._plain, *((one.table, one.key, one.hook) for one in self._entries)]:
            if key in table:
                table[key] = make(hook)

    def keep(self, handle: RemovableHandle) -> None:
        """A hook of another kind, to be removed with the rest."""
        self._handles.append(handle)

    def at_end(self, function: Callable[[], None]) -> None:
        """Call a function when all is removed."""
        self._at_end.append(function)

    def remove(self, remember: bool = False) -> None:
        """Take everything out; `remember`: a checkpoint may ask for it."""
        if remember:
            entries = [*(_Entry(*plain) for plain in self._plain), *self._entries]
            self._remembered = [(entry, entry.followers()) for entry in entries if entry.hook.changes]
        for table, key, _ in self._plain:
            table.pop(key, None)
        self._plain.clear()
        for entry in self._entries:
            entry.remove()
        self._entries.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for function in self._at_end:
            function()

    def put_back(self) -> None:
        """Put in again what was remembered, where it was."""
        for entry, followers in self._remembered:
            entry.put_before(followers)
            self._entries.append(entry)
