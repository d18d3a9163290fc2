"""Where numbers come from: a site of a model, and which of its values."""

from dataclasses import dataclass

KINDS = ("input", "output", "output_grad", "parameter", "parameter_grad", "update")


@dataclass(frozen=True, slots=True)
class Place:
    """One row of a step: `site` is an address in the model called `model`, `what` one of KINDS."""

    number: int
    model: str
    site: str
    what: str
    kind: str  # the class of the module; of a parameter, that of the module that holds it
    dtype: str = ""  # as it was the first time

    def __str__(self) -> str:
        return f"{self.model}: {self.site}"


class Places:
    """All places so far, numbered in the order in which they were first reached."""

    def __init__(self) -> None:
        self.all: list[Place] = []
        self._known: dict[tuple[str, str, str], int] = {}

    def number(self, model: str, site: str, what: str, kind: str, dtype: object = "") -> int:
        """The number of a place, a new one where it has none."""
        key = (model, site, what)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = len(self.all)
            self.all.append(Place(known, model, site, what, kind, str(dtype).removeprefix("torch.")))
        return known
