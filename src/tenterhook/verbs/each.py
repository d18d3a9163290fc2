"""capture.each: a forward for each batch of a loader, with the hooks placed once for all of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.addresses.sites import Selector, check_model
from tenterhook.addresses.why import is_container
from tenterhook.errors import AddressError
from tenterhook.hooks.session import Session
from tenterhook.say import Progress
from tenterhook.values.tree import leaves, shape_of
from tenterhook.verbs.captured import Captured
from tenterhook.verbs.keep import Log
from tenterhook.verbs.once import OwnCall, values_in_named_calls

_FIXED = ("grad", "detach", "frozen", "every")  # options that make no sense here
_WITHOUT_GRADIENTS = "for gradients, call capture.once(model, x, ..., loss=...) for each batch"


class Seen(Captured):
    """What was captured in one batch, until the next one begins; `batch` is what the loader gave."""

    def __init__(self, session: Session, log: Log, batch: Any) -> None:
        super().__init__(session, log)
        self.batch = batch

    def end(self) -> None:
        """Let go of everything."""
        names = frozenset(vars(self))
        vars(self).clear()
        vars(self)["_ended"] = names

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("_ended", ()):
            what = "the next batch has begun, or the loop is over, and one batch is held at a time"
            raise RuntimeError(f"{what}; take what you need in the loop, as in features.append(seen['layer4'])")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return "<captured: this batch is over>" if "_ended" in vars(self) else super().__repr__()


class _Capture(OwnCall):
    _verb = "capture.each"


class Batches:
    """What `capture.each` gives: iterate for one `Seen` a batch. It may be iterated again, as its loader may."""

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        selectors: tuple[Selector, ...],
        inputs: Callable[[Any], Any] | None,
        progress: bool,
        options: dict[str, Any],
    ) -> None:
        check_model(model, "capture.each")
        if isinstance(loader, (str, Tensor, Mapping)) or not isinstance(loader, Iterable):
            hint = "give an iterable of batches, such as a DataLoader or x.split(32); capture.once takes one batch"
            raise TypeError(f"capture.each(model, loader, *addresses) got {type(loader).__name__} for a loader: {hint}")
        if fixed := [name for name in _FIXED if name in options]:
            what = f"capture.each runs without gradients and looks at every batch, so it has no {fixed[0]}="
            raise TypeError(f"{what}; {_WITHOUT_GRADIENTS}")
        self._model = model
        self._loader = loader
        self._inputs = inputs or inputs_of
        self._progress = progress
        self._make = partial(_Capture, model, *selectors, **options)
        _check(self._make())

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"a {type(self._loader).__name__} does not say how many batches it has")
        return len(self._loader)

    def __iter__(self) -> Iterator[Seen]:
        kept = self._make()
        ends = _Ends(kept)
        many = len(self._loader) if isinstance(self._loader, Sized) else None
        with Progress("capture.each", "batches", many, shown=self._progress) as progress, kept:
            kept._session.rest()
            for batch in self._loader:  # not enumerate, which holds on to the one before
                try:
                    seen = self._run(kept, ends, batch)
                except Exception as error:
                    what = f"in batch {progress.done} of capture.each"
                    error.add_note(f"{what}; inputs=lambda batch: ... says what the model is called with")
                    raise
                progress.one_more()
                del batch
                yield seen
                seen.end()

    def _run(self, kept: OwnCall, ends: "_Ends", batch: Any) -> Seen:
        """One forward."""
        inputs = self._inputs(batch)
        log = Log()
        for how in kept._hows:
            how.log = log
        seen = Seen(kept._session, log, batch)
        with torch.no_grad(), kept._session.batch():
            ends.before(inputs, self._model.training)
            kept.call(self._model, inputs)
            ends.after()
        return seen


class _Ends:
    """When a forward may end: with as many values as came in a whole one that had inputs of the same shapes.

    Only where each of the sites had one, else the next batch may have others.
    """

    def __init__(self, kept: OwnCall) -> None:
        self._kept = kept
        self._known: dict[Any, int | None] = {}
        self._key: Any = None

    def before(self, inputs: Any, is_training: bool) -> None:
        shapes = [(path, shape_of(tensor)) for path, tensor in leaves(inputs)]
        self._key = (is_training, *shapes)
        countdown = self._kept.countdown
        countdown.came = 0
        countdown.awaited = self._known.get(self._key, values_in_named_calls(self._kept.sites))

    def after(self) -> None:
        countdown, taps = self._kept.countdown, self._kept._session.taps
        if self._key not in self._known and countdown.awaited is None:
            all_came = all(any(one.calls for one in tap.each()) or _never_comes(tap.site) for tap in taps)
            self._known[self._key] = countdown.came if all_came and countdown.came else None


def _never_comes(site: Any) -> bool:
    return site.wide and is_container(site.module)


def _check(kept: OwnCall) -> None:
    for site in kept.sites:
        if site.address.grad:
            raise AddressError(f"{site}: capture.each runs without gradients; {_WITHOUT_GRADIENTS}")
        if site.kind not in ("module", "inner"):
            raise AddressError(f"{site}: a {site.kind} is the same in every batch; read it from the model")


def inputs_of(batch: Any) -> Any:
    """What a model is called with: the batch, the first of a tuple or list, or a mapping as keyword arguments."""
    if isinstance(batch, Mapping):
        return batch
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    return (first,)
