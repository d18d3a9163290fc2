"""Parameters that nothing trains."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules._depth import place_of
from tenterhook.record.step import Parameter, Step
from tenterhook.say import counted

Key = tuple[str, str]  # model and site
_SAMPLES = 12
_PATIENT = 30  # of those without a gradient, where layers take turns: an expert may wait long for a token
_LATE = 30  # steps after which an optimizer should have stepped, that may do so seldom
_OUTSIDE, _IDLE = "not in any optimizer", "its optimizer never steps"
_UNUSED, _RATE = "never got a gradient", "its learning rate is 0"
_THEN = {
    _OUTSIDE: "pass it to the optimizer, or freeze it with requires_grad_(False)",
    _IDLE: "call step() of the optimizer that has it, too",
    _UNUSED: "look for a detach() or no_grad() behind it, or a zero_grad() too early; freeze it if it is not needed",
    _RATE: "give its group a learning rate, or freeze it with requires_grad_(False)",
}


@dataclass
class _Life:
    """What was seen of a parameter, in all samples while it was trainable."""

    begun: int  # at which step it was seen first
    identity: int
    samples: int = 0
    gradients: int = 0  # in how many of them it had one
    held: bool = False  # by an optimizer
    steps: bool = False  # whether that has stepped
    moves: bool = False  # whether that had a learning rate
    mark: float | None = None  # the first one
    changed: bool = False

    def add(self, one: Parameter, graded: bool, mark: float | None) -> None:
        """One more sample."""
        self.samples += one.trainable
        self.gradients += graded
        self.held |= one.rate is not None
        self.steps |= one.steps
        self.moves |= bool(one.rate)
        self.mark = mark if self.mark is None else self.mark
        self.changed |= mark is not None and mark != self.mark

    @property
    def reason(self) -> str:
        """Why nothing trains it; empty where something does, or writes into it as into a target network."""
        cases = ((_UNUSED, self.gradients), (_OUTSIDE, self.held), (_IDLE, self.steps), (_RATE, self.moves))
        return "" if self.changed else next((reason for reason, seen in cases if not seen), "")


class NeverTrained(Checked):
    """Trainable, but in no optimizer that steps, or in all of the first samples without a gradient or a learning rate.

    What is written into by hand, such as a target network, is trained. Spare heads have no gradient and are noted.
    """

    name = "parameter never trained"
    needs = (
        f"fewer than {_SAMPLES} sampled steps of an optimizer, or of some parameters since they are trainable"
        f" ({_PATIENT} where layers take turns)"
    )

    def __init__(self) -> None:
        self._lives: dict[Key, _Life] = {}
        self._told: dict[Finding, tuple[str, list[Key]]] = {}  # those that hold, with the reason
        self._seen: object = None  # the parameters of a step after which there was no more to look for

    def look(self, step: Step) -> Iterator[Finding]:
        """One finding for each model and reason, with the first of the parameters; and those that hold no longer."""
        if not step.parameters or step.parameters == self._seen:
            return
        present = self._note(step)
        trained = [key for key, one in present.items() if one.trainable]
        ripe = self._ripe(trained)
        self.has_looked = 0 < len(ripe) == len(trained)  # those that came later may not be ripe yet
        all_trained = self.has_looked and not any(self._lives[key].reason for key in trained)
        self._seen = step.parameters if all_trained else None
        yield from self._over(step)
        yield from self._new(step, ripe, present)

    def _note(self, step: Step) -> dict[Key, Parameter]:
        """Add what is known of each to its life; there may be facts for each optimizer that has stepped."""
        present = {(one.model, one.site): one for one in step.parameters}
        graded = {(one.model, one.site) for one in step.parameters if one.has_gradient}
        for key, one in present.items():
            if key not in self._lives or self._lives[key].identity != one.identity:
                self._lives[key] = _Life(step.number, one.identity)
            self._lives[key].add(one, key in graded, step.marks.get(key))
        return present

    def _ripe(self, trained: list[Key]) -> list[Key]:
        """Those that were seen for long enough."""
        lives = [self._lives[key] for key in trained]
        patience = _PATIENT if any(0 < life.gradients < life.samples for life in lives) else _SAMPLES
        needed = [_SAMPLES if life.gradients else patience for life in lives]
        return [key for key, life, many in zip(trained, lives, needed, strict=True) if life.samples >= many]

    def _over(self, step: Step) -> Iterator[Finding]:
        """What is refuted by now; those of its parameters for which it still holds are told of again."""
        for finding, (reason, keys) in [*self._told.items()]:
            if any(self._lives[key].reason != reason for key in keys):
                del self._told[finding]
                why = "it is trained since, or written into"
                yield replace(finding, severity="note", why=why, until=max(finding.step, step.number - 1))

    def _new(self, step: Step, ripe: list[Key], present: dict[Key, Parameter]) -> Iterator[Finding]:
        """Those that are not trained and were not told of yet."""
        for (model, reason), keys in self._untold(step, ripe).items():
            found = [present[key] for key in keys]
            whole = [one for one in present.values() if one.model == model and one.trainable]
            finding = _finding(step, reason, found, self._severity(reason, found, whole))
            self._told[finding] = reason, keys
            yield finding

    def _untold(self, step: Step, ripe: list[Key]) -> dict[tuple[str, str], list[Key]]:
        """By model and reason."""
        told = {key for _, keys in self._told.values() for key in keys}
        groups: dict[tuple[str, str], list[Key]] = {}
        for key in ripe:
            reason = self._lives[key].reason
            early = reason == _IDLE and step.number < self._lives[key].begun + _LATE
            if reason and not early and key not in told:
                groups.setdefault((key[0], reason), []).append(key)
        return groups

    def _severity(self, reason: str, found: list[Parameter], model: list[Parameter]) -> str:
        if reason == _RATE:
            return "note" if any(self._lives[one.model, one.site].moves for one in model) else "warn"
        if reason == _UNUSED:
            return "warn" if 2 * sum(one.size for one in found) > sum(one.size for one in model) else "note"
        return "warn" if any(one.is_training for one in found) else "note"  # a loss by features of another model


def _finding(step: Step, reason: str, found: list[Parameter], severity: str) -> Finding:
    place = place_of(found[0].model, found[0].site, step)
    names = ", ".join(one.site for one in found[:4]) + (" …" if len(found) > 4 else "")
    text = f"{reason}: {names} ({counted(sum(one.size for one in found), 'value')})"
    why = "it is not trained: it keeps its initial values"
    return Finding(NeverTrained.name, severity, step.number, text, place, why, _THEN[reason])
