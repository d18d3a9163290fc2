"""NaN or infinite values: where they first come up."""

from collections.abc import Iterator

from tenterhook.record._rule import Checked, Finding
from tenterhook.record._step import Rows, Step

# In the order in which they are made: what is bad first is the cause of the rest.
_ORDER = ("input", "parameter", "output", "output_grad", "parameter_grad", "update")
_THEN = {
    "input": "look at the data: this batch has them before the model sees it",
    "parameter": "an update put them there; see the update and the gradients of the step before",
    "output": "its inputs were finite: look for a division, a log, a square root or an overflow in its forward",
    "output_grad": "the forward was finite: look for a square root or a norm at 0, or an overflow, in its backward",
    "parameter_grad": "what flows into it was finite: the sum over the batch overflowed",
    "update": "the gradient was finite: look at the optimizer's eps, betas and state",
}


class NonFinite(Checked):
    """NaN anywhere, +Inf anywhere, and -Inf in all but outputs, where masks have it on purpose."""

    name = "non-finite values"

    def __init__(self) -> None:
        self._found = False

    def look(self, step: Step) -> Iterator[Finding]:
        """The first place in the order of computation, once."""
        self.has_looked |= step.sampled
        if self._found or not step.sampled:
            return
        for what in _ORDER:
            rows = step.of(what)
            masked = what in ("output", "input")
            bad = (rows.nan + rows.pos_inf + (0 if masked else rows.neg_inf)) > 0
            if not bad.any():
                continue
            self._found = True
            found = rows.where(bad)
            first = len(found) - 1 if what == "output_grad" else 0  # gradients come from behind
            yield self._finding(step, what, found, first)
            return

    def _finding(self, step: Step, what: str, found: Rows, i: int) -> Finding:
        parts = [(found.nan[i], "NaN"), (found.pos_inf[i], "+Inf"), (found.neg_inf[i], "-Inf")]
        counts = ", ".join(f"{int(many):,} {name}" for many, name in parts if many)
        others = f"; {len(found) - 1} more places follow" if len(found) > 1 else ""
        text = f"{counts} of {int(found.count[i]):,} values{others}"
        why = "every step after this one trains on nothing"
        return Finding(self.name, "error", step.number, text, found.places[i], why, _THEN[what])
