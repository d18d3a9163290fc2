"""Steps that are whole, until they are handed on: their numbers may still be on their way from a device."""

import time
from collections.abc import Callable

from tenterhook.record.assemble import MOST_BEFORE
from tenterhook.record.guard import uninterrupted
from tenterhook.record.parts import Pending
from tenterhook.record.places import Places
from tenterhook.record.step import Layout, Step

# Steps that are handed on together, those of them that were sampled, and seconds after which they are in any case.
# One by one, they take thrice as long as several together, by all that is no longer in the caches.
_TOGETHER, _SAMPLES, _WAIT = 32, 4, 0.25
_MOST = 8  # that wait for a device


class Outbox:
    """Hands steps on in their order, to `take`."""

    def __init__(self, take: Callable[[Step], None], places: Places) -> None:
        self._take, self._places = take, places
        self._pending: list[Pending] = []
        self._before: list[Pending] = []  # steps that are none if a training begins
        self._samples = 0  # those of them that were sampled
        self._handed_on = time.perf_counter()
        self._layouts: dict[bytes, Layout] = {}
        self._rates: dict[tuple[str, str], float | None] = {}  # the last ones that are known

    def add(self, step: Pending) -> None:
        """A step is whole."""
        if not step.trains and step.number < MOST_BEFORE:
            self._before.append(step)
            return
        if not step.trains:
            self._pending += self._before
        self._before = []
        self._pending.append(step)
        self._samples += step.sampled
        late = time.perf_counter() - self._handed_on > _WAIT
        if self._samples >= _SAMPLES or len(self._pending) >= _TOGETHER or late:
            self.hand_on()

    def hand_on(self, wait: bool = False) -> None:
        """Hand on those whose numbers are there, or all."""
        if wait:
            self._pending, self._before = [*self._before, *self._pending], []
        self._handed_on, self._samples = time.perf_counter(), 0
        with uninterrupted():
            while self._pending and (wait or len(self._pending) > _MOST or self._pending[0].ready()):
                step = self._pending.pop(0).make(self._places.all, self._layouts)
                if step.parameters:
                    self._rates = {**self._rates, **{one[:2]: one.rate for one in step.parameters}}
                step.rate = self._rates
                self._take(step)
