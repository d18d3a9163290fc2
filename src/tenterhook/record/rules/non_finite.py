"""NaN or infinite values: where they first come up."""

from collections.abc import Iterator

import numpy as np

from tenterhook.birth.birth import Birth
from tenterhook.birth.replay import Replayed
from tenterhook.record.places import Place
from tenterhook.record.rule import Checked, Finding
from tenterhook.record.step import Rows, Step
from tenterhook.say import counted

# In the order in which they are made: what is bad first is the cause of the rest.
_ORDER = ("input", "parameter", "output", "output_grad", "parameter_grad", "update")
_SCALED = ("output_grad", "parameter_grad", "update")
_ON_A_GPU = "; on a GPU --capsule has the operation named"  # on a CPU every bad step is run again
_THEN = {
    "input": "look at the data: this batch has them before the model sees it",
    "parameter": f"an update put them there, or whoever made them; a run with --every 1 shows which step{_ON_A_GPU}",
    "output": f"look for a division, a log, a square root or an overflow in its forward{_ON_A_GPU}",
    "output_grad": f"look in the forward for a square root, a norm or a log at 0, or an overflow{_ON_A_GPU}",
    "parameter_grad": f"look for a sum over the batch that overflowed{_ON_A_GPU}",
    "update": "look at the optimizer's eps, betas and state",
}
_BEFORE = {  # what is made before, and is said to be finite where it was measured
    "output": ("output", "what the modules before it gave was finite"),
    "output_grad": ("output", "what the modules gave was finite"),
    "parameter_grad": ("output_grad", "the gradients of what the modules gave were finite"),
    "update": ("parameter_grad", "the gradients were finite"),
}
_TRAINS_ON_NOTHING = "every step after this one trains on nothing"
_SKIPS = 16  # from 65536, where a GradScaler starts, so many halvings lead to 1


class NonFinite(Checked):
    """NaN anywhere, +Inf anywhere, and -Inf in all but inputs and outputs, where masks have it on purpose.

    Gradients of a step that a GradScaler leaves out are to be infinite; only many of those in a row are a fault.
    """

    name = "non-finite values"
    only_sampled = False

    def __init__(self) -> None:
        self._found = False
        self._unknown = False  # whether a bad step was told of, and where it began is not known
        self._skips = 0
        self._masks: set[int] | None = None  # places that had -Inf while all was well

    def look(self, step: Step) -> Iterator[Finding]:
        """The first place in the order of computation, once."""
        if self._found:
            return
        self._skips = self._skips + step.skipped if step.skipped else 0
        self.has_looked |= step.sampled or step.replayed is not None
        found = None if not step.sampled or self._is_well(step) else self._first(step)
        if step.replayed is not None:
            found = _born(step, step.replayed, found)
        if self._unknown and (step.replayed is None or step.replayed.birth is None):
            return  # it comes of the bad step that has been told of
        if found is None and self._skips > _SKIPS:
            found = self._skipping(step)
        if found is not None:
            self._unknown = step.replayed is not None and not (step.replayed.birth or step.replayed.elsewhere)
            self._found = not self._unknown
            yield found

    def _is_well(self, step: Step) -> bool:
        """Quickly: nothing but -Inf where it was before."""
        rows = step.rows
        if not rows.infinite.any():
            self._masks = self._masks or set()
            return True
        if self._masks is None or rows.nan.any() or rows.pos_inf.any():
            return False
        if step.loss is not None and not np.isfinite(step.loss):
            return False
        return self._masks.issuperset(rows.which[rows.neg_inf > 0].tolist())

    def _first(self, step: Step) -> Finding | None:
        lost = None if step.loss is None or step.skipped else not np.isfinite(step.loss)
        for what in _ORDER:
            if step.skipped and what in _SCALED:
                continue
            rows = step.of(what)
            masked = what in ("output", "input")
            bad = (rows.nan + rows.pos_inf + (0 if masked else rows.neg_inf)) > 0
            if what == "output" and (bad.any() or lost or _any_bad(step)):
                bad |= self._new_negative(rows)
            if bad.any():
                found = rows.where(bad)
                return self._finding(step, what, found, len(found) - 1 if what == "output_grad" else 0)
        outputs = step.of("output")
        self._masks = (self._masks or set()) | set(outputs.which[outputs.neg_inf > 0].tolist())
        return None

    def _new_negative(self, outputs: Rows) -> np.ndarray:
        """Outputs that are -Inf, where they were not before: no mask, but the log of 0 that the rest comes from."""
        if self._masks is None:
            return np.zeros(len(outputs), bool)
        return (outputs.neg_inf > 0) & ~np.isin(outputs.which, list(self._masks))

    def _finding(self, step: Step, what: str, found: Rows, i: int) -> Finding:
        parts = [(found.nan[i], "NaN"), (found.pos_inf[i], "+Inf"), (found.neg_inf[i], "-Inf")]
        counts = ", ".join(f"{int(many):,} {name}" for many, name in parts if many)
        more = len(found) - 1
        others = f"; {more:,} more {'place has' if more == 1 else 'places have'} some" if more else ""
        text = f"{counts} of {counted(int(found.count[i]), 'value')}{others}"
        if what == "output_grad":
            text += f". {self._made_by(step, found.places[i].number)}"
        why = _TRAINS_ON_NOTHING
        then = _finite_before(step, what, found.places[i]) + _THEN[what]
        return Finding(self.name, "error", step.number, text, found.places[i], why, then)

    def _made_by(self, step: Step, number: int) -> str:
        """Gradients come from behind: what made this one is what the forward did next."""
        rows = step.of("output_grad")
        after = [place.site for place in rows.places if place.number > number]
        if not after:
            return "No gradient before it: the loss made it"
        return f"The gradient of {after[0]}, which comes next in the forward, was finite: it was made in between"

    def _skipping(self, step: Step) -> Finding:
        scale = "" if step.scale is None else f"; the loss scale is now {step.scale:.3g}"
        text = f"a GradScaler left out {self._skips} steps in a row, for their gradients were not finite{scale}"
        then = "a smaller scale does not help: look for a NaN in the forward or the loss, first without autocast"
        return Finding(self.name, "error", step.number, text, None, "no weight has changed in these", then)


def _born(step: Step, replayed: Replayed, first: Finding | None) -> Finding:
    """What running the step again has shown; `first` is what was measured in it, if it was."""
    place = first.place if first else None
    birth = replayed.birth
    name, number = NonFinite.name, step.number
    rank = "" if replayed.rank is None else f"on rank {replayed.rank}: "
    then = f"; {replayed.capsule}" if replayed.capsule else ""
    if birth is None and replayed.elsewhere:
        text = f"{rank}a gradient is not finite because of another rank; {replayed.note}"
        return Finding(name, "note", number, text, None, _TRAINS_ON_NOTHING, "see what is found on the other ranks")
    if birth is None:
        text = f"{rank}the loss or a gradient is not finite; where that began is not known: {replayed.note}"
        text += f"; where it first shows: {first.text}" if first else ""
        then = f"`find_nonfinite(model)` around it tells{then}"
        return Finding(name, "error", number, text, place, _TRAINS_ON_NOTHING, then)
    text = rank + birth.sentence + (f": {birth.why}" if birth.why else "")
    source = f"`{birth.line.text}`; " if birth.line and birth.line.text else ""
    shown = "; ".join(birth.inputs[:3])
    why = f"{source}{'its inputs: ' + shown if shown else 'the value: ' + birth.output}"
    note = f"; {replayed.note}" if replayed.note else ""
    place = _place_of(step, birth) or place
    return Finding(name, "error", number, text, place, f"{why}{note}", f"{birth.remedy}{then}")


def _place_of(step: Step, birth: Birth) -> Place | None:
    """The module in which it was made, or the input that it came with, if it was measured in this step."""
    what = "input" if birth.received else "output_grad" if birth.backward else "output"
    model, _, site = birth.address.partition(":") if ":" in birth.address else ("", "", birth.address)
    site = site.partition("/")[0]
    for place in step.of(what).places:
        if birth.received and f"input {place.site.removeprefix('.:in[').partition(']')[0]}" == birth.operation:
            return place
        if not birth.received and place.site == site and model in ("", place.model):
            return place
    return None


def _finite_before(step: Step, what: str, place: Place) -> str:
    """That what is made before was finite, if it was measured."""
    kind, words = _BEFORE.get(what, ("", ""))
    before = step.of(kind).places
    if what == "output":  # the first that is not finite
        before = [one for one in before if one.model == place.model and one.number < place.number]
    return f"{words}: " if before else ""


def _any_bad(step: Step) -> bool:
    """Whether a gradient or an update is not finite."""
    return not step.skipped and any(step.of(what).infinite.any() for what in _SCALED)
