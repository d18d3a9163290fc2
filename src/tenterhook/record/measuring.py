"""Where hooks put what they measure: the part and the micro-batch of a training that run now."""

from collections.abc import Iterable

from tenterhook.record.parts import Micro, Part, Sample
from tenterhook.record.places import Places


class Measuring:
    """Read by the hooks. The assembler has it make parts and micro-batches, and the recorder says which are sampled."""

    part: Part  # as soon as there is an assembler
    micro: Micro

    def __init__(self, what: Iterable[str]) -> None:
        self.what = frozenset(what)
        self.outputs = "output" in self.what
        self.gradients = "output_grad" in self.what
        self.places = Places()
        self.step = 0
        self.sampled = False  # whether the step is, so that the hooks are there
        self.without_gradients = False  # whether calls under no_grad are measured
        self._at_once: set[int] = set()  # places that are measured without waiting

    def new_part(self, is_first: bool) -> Part:
        """What comes now belongs to a new part, of which `begin` says whether it is sampled."""
        self.micro = Micro()
        self.part = Part(is_first, [self.micro])
        return self.part

    def new_micro(self) -> Micro:
        """What comes now belongs to a new micro-batch of the part."""
        self.micro = Micro()
        if self.sampled:
            self.micro.sample = Sample(self._at_once)
        return self.micro

    def begin(self, step: int, *, sampled: bool) -> None:
        """The new part is one of this step."""
        self.step, self.sampled = step, sampled
        self.part.sampled = sampled
        if sampled:
            self.micro.sample = Sample(self._at_once)
