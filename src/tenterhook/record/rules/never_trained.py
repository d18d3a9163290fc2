"""Parameters that nothing trains."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tenterhook.record.places import Place
from tenterhook.record.rule import Checked, Finding
from tenterhook.record.step import Parameter, Step

Key = tuple[str, str]  # model and site
_SAMPLES = 12
_PATIENT = 30  # of those without a gradient, where layers take turns: an expert may wait long for a token
_MANY = 10  # backward passes without a step
_OUTSIDE, _UNUSED, _RATE = "not in any optimizer", "never got a gradient", "its learning rate is 0"
_THEN = {
    _OUTSIDE: "pass it to the optimizer, or freeze it with requires_grad_(False)",
    _UNUSED: "look for a detach() or no_grad() behind it, or a zero_grad() too early; freeze it if it is not needed",
    _RATE: "give its group a learning rate, or freeze it with requires_grad_(False)",
}


@dataclass
class _Life:
    """What was seen of a parameter."""

    samples: int = 0  # while it was trainable
    held: bool = False  # by an optimizer
    gradients: int = 0  # in how many of them it had one
    moving: bool = False

    @property
    def reason(self) -> str:
        if not self.gradients:
            return _UNUSED
        if not self.held:
            return _OUTSIDE
        return "" if self.moving else _RATE


class NeverTrained(Checked):
    """Trainable, but in no optimizer; or without a gradient, or with learning rate 0, in all of the first samples.

    That weights move is no proof: weight decay moves them too. Copies and spare heads have no gradient and are noted.
    """

    name = "parameter never trained"
    needs = (
        f"fewer than {_SAMPLES} sampled steps of an optimizer, or of some parameters since they are trainable"
        f" ({_PATIENT} where layers take turns)"
    )

    def __init__(self) -> None:
        self._lives: dict[Key, _Life] = {}
        self._told: set[Key] = set()
        self._known: list[tuple[str, str, bool]] = []  # and whether trainable, in a step that needed no more looking

    def look(self, step: Step) -> Iterator[Finding]:
        """One finding for each reason, with the first of the parameters it holds for."""
        if step.backwards - step.skipped >= _MANY and not step.optimizers:
            text = f"{step.backwards:,} backward passes, and no step of an optimizer"
            then = "call optimizer.step() after backward()"
            self.has_looked = True
            yield Finding(self.name, "error", step.number, text, None, "nothing is trained", then)
        trainable = [one[:3] for one in step.parameters]
        if not trainable or trainable == self._known:
            return
        present = self._note(step.parameters)
        trained = [key for key, one in present.items() if one.trainable]
        ripe = self._ripe(trained)
        self.has_looked = 0 < len(ripe) == len(trained)  # those that came later may not be ripe yet
        if self.has_looked:
            self._known = trainable
        for reason, found in self._new(ripe, present).items():
            yield self._finding(step, reason, found, self._severity(reason, found, present))

    def _note(self, parameters: Iterable[Parameter]) -> dict[Key, Parameter]:
        """Add what is known of each to its life."""
        present: dict[Key, Parameter] = {}
        graded: set[Key] = set()
        for one in parameters:  # once for each optimizer that has some of the model
            key = (one.model, one.site)
            life = self._lives.setdefault(key, _Life())
            life.samples += one.trainable and key not in present
            life.held |= one.rate is not None
            life.gradients += one.has_gradient and key not in graded
            life.moving |= bool(one.rate)
            present[key] = one
            if one.has_gradient:
                graded.add(key)
        return present

    def _ripe(self, trained: list[Key]) -> list[Key]:
        """Those that were seen for long enough."""
        lives = [self._lives[key] for key in trained]
        patience = _PATIENT if any(0 < life.gradients < life.samples for life in lives) else _SAMPLES
        needed = [_SAMPLES if life.gradients else patience for life in lives]
        return [key for key, life, many in zip(trained, lives, needed, strict=True) if life.samples >= many]

    def _new(self, ripe: list[Key], present: dict[Key, Parameter]) -> dict[str, list[Parameter]]:
        """By reason, those that are not trained and were not told of yet."""
        found: dict[str, list[Parameter]] = {}
        for key in ripe:
            reason = self._lives[key].reason
            if reason and key not in self._told:
                self._told.add(key)
                found.setdefault(reason, []).append(present[key])
        return found

    def _severity(self, reason: str, found: list[Parameter], present: dict[Key, Parameter]) -> str:
        size = sum(one.size for one in present.values() if one.trainable)
        whole = reason == _RATE and not any(self._lives[key].moving for key in present)
        half = reason == _UNUSED and 2 * sum(one.size for one in found) > size
        return "warn" if reason == _OUTSIDE or whole or half else "note"

    def _finding(self, step: Step, reason: str, found: list[Parameter], severity: str) -> Finding:
        first = found[0]
        place = next((p for p in step.rows.places if (p.model, p.site) == (first.model, first.site)), None)
        place = place or Place(-1, first.model, first.site, "parameter", "")
        size = sum(one.size for one in found)
        names = ", ".join(one.site for one in found[:4]) + (" …" if len(found) > 4 else "")
        why = "it is not trained: it keeps its initial values"
        return Finding(
            self.name, severity, step.number, f"{reason}: {names} ({size:,} values)", place, why, _THEN[reason]
        )
