"""Where hooks put what they measure: the part and the micro-batch of a training that run now."""

from collections.abc import Iterable

from tenterhook.record import assemble
from tenterhook.record.parts import Micro, Part
from tenterhook.record.places import Places


class Measuring:
    """Read by the hooks, and moved on by the recorder whenever the assembler begins a part or a micro-batch."""

    def __init__(self, what: Iterable[str], part: assemble.Part) -> None:
        self.what = frozenset(what)
        self.outputs = "output" in self.what
        self.gradients = "output_grad" in self.what
        self.places = Places()
        self.step = 0
        self.sampled = False  # whether the step is, so that the hooks are there
        self.without_gradients = False  # whether calls under no_grad are measured
        self._at_once: set[int] = set()  # places that are measured without waiting
        self._parts: dict[assemble.Part, Part] = {}  # of the step that is not whole yet
        self.begin_part(part, 0, sampled=True)
        self.sampled = False

    def begin_part(self, part: assemble.Part, step: int, *, sampled: bool) -> None:
        """What comes now belongs to a new part."""
        self.step, self.sampled = step, sampled
        self.part = self._parts[part] = Part(part, sampled)
        self.begin_micro(part.micros[-1])

    def begin_micro(self, micro: assemble.MicroBatch) -> None:
        """What comes now belongs to a new micro-batch of the part."""
        self.micro = Micro(micro, self._at_once, self.part.sampled)
        self.part.of[micro] = self.micro

    def take(self, parts: Iterable[assemble.Part]) -> list[Part]:
        """What was measured in these parts, which are over."""
        return [self._parts.pop(part) for part in parts]
