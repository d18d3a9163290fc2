"""Gradients that are clipped in every step, to a small part of what they were."""

from collections.abc import Iterator

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules.thresholds import CLIP_NOTE, CLIP_SHARE, CLIP_TIMES, CLIP_WARN
from tenterhook.record.step import Step


class ClippedAlways(Checked):
    """In 16 samples in a row the norm is 100 times the limit, or half of the values are beyond theirs.

    That it is above the limit at all in 48 samples is a note.
    """

    name = "clipped always"
    needs = "clip_grad_norm_ and clip_grad_value_ were not called"

    def __init__(self) -> None:
        self._above: dict[tuple[str, float], list[float]] = {}  # in all of the last samples
        self._told: set[tuple[str, float, str]] = set()

    def look(self, step: Step) -> Iterator[Finding]:
        """Each limit once."""
        for (how, limit), much in step.clips.items():
            self.has_looked = True
            above = self._above.setdefault((how, limit), [])
            above.append(much)
            least = 1.0 if how == "norm" else 0.0
            if not much > least:
                above.clear()
            severity = _severity(how, above)
            if severity and (how, limit, severity) not in self._told:
                self._told.add((how, limit, severity))
                moves = severity == "warn" and bool(step.target.moves)
                yield self._finding(step, "note" if moves else severity, how, limit, above)

    def _finding(self, step: Step, severity: str, how: str, limit: float, above: list[float]) -> Finding:
        middle = sorted(above)[len(above) // 2]
        if how == "norm":
            text = f"the norm of the gradients was {middle:.3g} times its limit of {limit:g} in the middle of "
        else:
            text = f"{middle:.0%} of the gradients were beyond the limit of {limit:g} in the middle of "
        why = "it is the limit that makes the size of a step, and not the gradient"
        then = "raise the limit to what gradients usually are; or a higher learning rate will do, if that is meant"
        return Finding(self.name, severity, step.number, f"{text}{len(above)} samples", None, why, then)


def _severity(how: str, above: list[float]) -> str:
    """A warning where all of the last samples were far above the limit, a note if more of them were above it."""
    far = CLIP_TIMES if how == "norm" else CLIP_SHARE
    if len(above) >= CLIP_WARN and min(above[-CLIP_WARN:]) >= far:
        return "warn"
    return "note" if len(above) >= CLIP_NOTE and how == "norm" else ""
