"""The scope of a session: which calls are its own, and what its taps share.

The scopes of the sessions that are open in this thread or async task are in a context variable. A tap that fires
outside its scope only counts.
"""

import itertools
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from tenterhook.platform.autograd import graph_task
from tenterhook.platform.checkpoints import (
    beside_checkpoints,
    checkpoints,
    may_be_checkpointed,
    run_again_under,
    runs_in_backward,
)
from tenterhook.platform.tensors import Handle, viewed_by
from tenterhook.values.tree import can_have_gradient

_open_scopes: "ContextVar[tuple[Scope, ...]]" = ContextVar("tenterhook", default=())
here = _open_scopes.get
_numbers = itertools.count()


class Scope:
    """What the taps of one session share. Holds nothing that holds a tap, so that a session leaves no cycle."""

    _prune_at = 1024
    is_open = False
    rests = False  # whether what runs now is left out, though it is the session's
    task = -1  # the backward pass that the session was opened in, by code that a checkpoint runs again
    around: Collection[Any] = ()  # the checkpoints that it was opened in
    number = -1  # in the order of opening
    is_awaited = False  # whether a checkpoint may ask for its changes again
    moment: "Moment | None" = None  # where many values are kept inside a forward
    sources: list[GradientEdge] | None = None  # where gradients are waited for, if the session runs the backward itself
    session: Callable[[], Any] = staticmethod(lambda: None)  # a weak reference, where taps change something

    def __init__(self, frozen: bool) -> None:
        self.frozen = frozen
        self.handles: list[Handle] = []  # of hooks on tensors and graph nodes

    def open(self) -> None:
        """From here on, calls in this thread or async task belong to the session too."""
        self.is_open = True
        if (task := graph_task()) != -1:
            self.task = task
        if self.session() is not None:
            self.number = next(_numbers)
            if task != -1 or may_be_checkpointed():
                self.around = weakref.WeakSet(one for one, _ in checkpoints())
        _open_scopes.set((*here(), self))

    def is_recomputed(self) -> bool:
        """True if it was opened inside what a checkpoint of the non-reentrant kind runs again."""
        return any(map(runs_in_backward, self.around))

    def close(self) -> None:
        """Undo `open`; not by a token, for a session may be left in another context than it was entered in."""
        self.is_open = False
        scopes = here()
        _open_scopes.set(scopes[:-1] if scopes and scopes[-1] is self else _without(self))

    def add(self, handle: Handle) -> None:
        """Remember a tensor hook; those that were removed or died with their graph are let go now and then."""
        self.handles.append(handle)
        if len(self.handles) > self._prune_at:
            self.handles = [h for h in self.handles if h.id in (h.hooks_dict_ref() or ())]
            self._prune_at = max(1024, 2 * len(self.handles))

    def want(self, tensor: Tensor) -> None:
        """A tap waits for the gradient of a tensor as it is now: note where in the graph that is, if anybody asks."""
        if self.sources is not None:
            base = viewed_by(tensor)  # a write into a view leads the graph past it, to its base
            self.sources += [get_gradient_edge(t) for t in (tensor, base) if t is not None and t.requires_grad]

    def remove_hooks(self) -> None:
        """Remove what `add` was given."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def thaw(self, tensor: Tensor) -> Tensor:
        """With frozen=True: a tensor that autograd ignored, as one that it follows from here on."""
        if not self.frozen or tensor.requires_grad or not can_have_gradient(tensor):
            return tensor
        return tensor.detach().requires_grad_().clone() if torch.is_grad_enabled() else tensor

    def again_in(self, checkpoint: Any) -> None:
        """Have the session's changes made again when a checkpoint runs again, even if it is over by then."""
        session = self.session()
        if session is not None and checkpoint not in self.around:
            self.is_awaited = True
            run_again_under(checkpoint, self.number, session.again)


class Moment:
    """What was copied at one moment, for all the names that a tensor has then.

    Between two operations anybody may write into it, and PyTorch need not know: NumPy, a collective, an extension.
    """

    _tensor: Tensor | None = None
    _copy: Tensor | None = None

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy, without a graph."""
        if self._copy is None or self._tensor is not tensor:
            self._tensor, self._copy = tensor, tensor.detach().clone()
        return self._copy

    def over(self) -> None:
        """Something else runs: whatever comes after it is copied anew."""
        self._tensor = self._copy = None


def _without(scope: Scope) -> tuple[Scope, ...]:
    return tuple([other for other in here() if other is not scope])


def hide(scope: Scope) -> Any:
    """From here on the session does not see any calls, until `unhide`."""
    return _open_scopes.set(_without(scope))


unhide = _open_scopes.reset


@contextmanager
def hidden(scope: Scope) -> Iterator[None]:
    """Run a user's function so that the session does not see the calls that it makes."""
    token = hide(scope)
    try:
        yield
    finally:
        unhide(token)


@contextmanager
def not_watching(scope: Scope) -> Iterator[None]:
    """Run a user's function so that neither the session nor a checkpoint around it sees what it does."""
    with hidden(scope), beside_checkpoints(), saved_tensors_hooks(torch.detach, lambda tensor: tensor):
        yield
