"""Parameters that nothing trains."""

from collections.abc import Iterator

from tenterhook.record._places import Place
from tenterhook.record._rule import Checked, Finding
from tenterhook.record._step import Parameter, Step

_SAMPLES = 8


class NeverTrained(Checked):
    """Trainable, but in no optimizer; or without a gradient, or with learning rate 0, in all of the first samples.

    That weights move is no proof: weight decay moves them too.
    """

    name = "parameter never trained"
    needs = f"fewer than {_SAMPLES} sampled steps of an optimizer"

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], int] = {}
        self._outside: dict[tuple[str, str], int] = {}
        self._graded: set[tuple[str, str]] = set()
        self._moving: set[tuple[str, str]] = set()
        self._told: set[tuple[str, str]] = set()

    def look(self, step: Step) -> Iterator[Finding]:
        """One finding for each reason, with the first of the parameters it holds for."""
        reasons: dict[str, list[Parameter]] = {}
        for one in step.parameters:
            key = (one.model, one.site)
            self._samples[key] = self._samples.get(key, 0) + 1
            self._outside[key] = self._outside.get(key, 0) + (one.rate is None)
            if one.has_gradient:
                self._graded.add(key)
            if one.rate:
                self._moving.add(key)
            if self._samples[key] >= _SAMPLES and one.trainable and key not in self._told:
                self.has_looked = True
                reason = self._reason(key)
                if reason:
                    self._told.add(key)
                    reasons.setdefault(reason, []).append(one)
        for reason, found in reasons.items():
            yield self._finding(step, reason, found)

    def _reason(self, key: tuple[str, str]) -> str:
        if self._outside[key] >= _SAMPLES:
            return "not in any optimizer"
        if key not in self._graded:
            return "never got a gradient"
        return "" if key in self._moving else "its learning rate is 0"

    def _finding(self, step: Step, reason: str, found: list[Parameter]) -> Finding:
        first = found[0]
        place = next((p for p in step.rows.places if (p.model, p.site) == (first.model, first.site)), None)
        place = place or Place(-1, first.model, first.site, "parameter", "")
        size = sum(one.size for one in found)
        text = f"{reason}: {', '.join(one.site for one in found[:4])}{' …' if len(found) > 4 else ''} ({size:,} values)"
        severity = "note" if reason == "never got a gradient" else "warn"  # an unused head is common, and harmless
        then = {
            "not in any optimizer": "pass it to the optimizer, or freeze it with requires_grad_(False)",
            "never got a gradient": "it is not used in the loss; remove it, or freeze it",
        }.get(reason, "set a learning rate for its group")
        return Finding(self.name, severity, step.number, text, place, "it keeps its initial values", then)
