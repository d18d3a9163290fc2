"""Data that is far larger than what layers are initialised for."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding, Persistent
from tenterhook.record.rules._depth import place_of
from tenterhook.record.rules.thresholds import INPUT_OF, INPUT_OFTEN, INPUT_RMS
from tenterhook.record.step import Step


class InputsNotNormalised(Checked):
    """A feature of what the first layer gets has an RMS above 30, and no norm comes right behind that layer."""

    name = "inputs not normalised"
    needs = "no linear layer, convolution or RNN was seen that gets data"

    def __init__(self) -> None:
        self._often = Persistent(INPUT_OFTEN, INPUT_OF)

    def look(self, step: Step) -> Iterator[Finding]:
        """Each layer once."""
        for (model, site), size in step.input_sizes.items():
            self.has_looked = True
            if self._often.so((model, site), size > INPUT_RMS) and not _is_normalised(step, model, site):
                text = f"the rms of a feature of its inputs is {size:.3g}, and layers are initialised for about 1"
                why = "that feature drowns the others, activations saturate, and gradients are as large"
                then = "subtract the mean and divide by the standard deviation, each feature for itself"
                yield Finding(self.name, "warn", step.number, text, place_of(model, site, step), why, then)


def _is_normalised(step: Step, model: str, site: str) -> bool:
    """Whether the module that is called next is a norm."""
    places = [place for place in step.of("output").places if place.model == model]
    at = next((i for i, place in enumerate(places) if place.site.partition("[")[0] == site), -1)
    return 0 <= at < len(places) - 1 and "Norm" in places[at + 1].kind
