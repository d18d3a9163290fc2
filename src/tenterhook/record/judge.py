"""Runs the rules over the steps as they come. A rule that raises is left out, and said to be unchecked."""

from collections.abc import Iterable
from dataclasses import dataclass

from tenterhook.record.rule import Finding, Rule
from tenterhook.record.rules._loss import Target
from tenterhook.record.step import Step
from tenterhook.store.schemas import RAISED, SEVERITIES


@dataclass(frozen=True)
class State:
    """What became of a rule: found, clean, or not checked and why."""

    rule: str
    state: str
    why: str = ""


class Judge:
    """Some rules, and what they have found."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = list(rules)
        self._all = list(enumerate(self.rules))
        self._always = [(i, rule) for i, rule in self._all if not getattr(rule, "only_sampled", False)]
        self.findings: list[Finding] = []
        self._found: set[int] = set()
        self._broken: dict[int, str] = {}
        self._target = Target()

    def look(self, step: Step) -> list[Finding]:
        """What the rules say to a step."""
        found: list[Finding] = []
        self._target.see(step)
        step.target = self._target
        for i, rule in self._all if step.sampled else self._always:
            if i not in self._broken:
                try:
                    for finding in rule.look(step) or ():
                        found.append(_valid(finding))
                        self._found.add(i)
                except Exception as error:
                    self._broken[i] = f"{RAISED} {type(error).__name__} at step {step.number}: {error}"
        for finding in found:
            if finding.until is not None:
                self.findings = [one for one in self.findings if not one.is_of(finding)]
            self.findings.append(finding)
        return found

    def states(self) -> list[State]:
        """Each rule with its state. One that broke has not checked the rest, whatever it found before."""
        return [self._state(i, rule) for i, rule in self._all]

    def _state(self, i: int, rule: Rule) -> State:
        name = str(getattr(rule, "name", type(rule).__name__))
        why = self._broken.get(i)
        if why is None and i in self._found:
            return State(name, "found")
        try:
            why = why or getattr(rule, "unchecked", None)
        except Exception as error:
            why = f"{RAISED} {type(error).__name__} at the end: {error}"
        return State(name, "not checked", str(why)) if why else State(name, "clean")


def _valid(finding: Finding) -> Finding:
    if not isinstance(finding, Finding):
        raise TypeError(f"a rule yields Findings, not {type(finding).__name__}")
    if finding.severity not in SEVERITIES:
        raise ValueError(f"there is no severity {finding.severity!r}; there are {', '.join(SEVERITIES)}")
    return finding
