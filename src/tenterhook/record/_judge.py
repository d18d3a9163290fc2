"""Runs the rules over the steps as they come. A rule that raises is left out, and said to be unchecked."""

from collections.abc import Iterable
from dataclasses import dataclass

from tenterhook.record._rule import Finding, Rule
from tenterhook.record._step import Step


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
        self.findings: list[Finding] = []
        self._broken: dict[int, str] = {}

    def look(self, step: Step) -> list[Finding]:
        """What the rules say to a step."""
        found: list[Finding] = []
        for i, rule in enumerate(self.rules):
            if i not in self._broken:
                try:
                    found += rule.look(step) or ()
                except Exception as error:
                    self._broken[i] = f"the rule raised {type(error).__name__}: {error}"
        self.findings += found
        return found

    def states(self) -> list[State]:
        """Each rule with its state."""
        found = {finding.rule for finding in self.findings}
        return [self._state(i, rule, rule.name in found) for i, rule in enumerate(self.rules)]

    def _state(self, i: int, rule: Rule, found: bool) -> State:
        if found:
            return State(rule.name, "found")
        why = self._broken.get(i) or getattr(rule, "unchecked", None)
        return State(rule.name, "not checked", why) if why else State(rule.name, "clean")
