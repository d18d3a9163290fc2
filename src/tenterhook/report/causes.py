"""Which findings one fault sets off, so that a person reads them as one: two tables and a function."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tenterhook.store.schemas import SEVERITIES

Finding = dict[str, Any]  # a row of findings.arrows

# The rules in the order in which a training computes what they look at: of those that begin at the same step the first
# leads. The numbers: for how many steps a fault is there, at least, before its rule can tell. That nothing is learnt
# comes of something else, which may be found later: a number below zero.
ORDER = {
    "bad batch": 0,
    "inputs not normalised": 10,
    "targets in the inputs": 0,
    "batches of one class": 10,
    "dropout near 1": 0,
    "batch too small for BatchNorm": 0,
    "activation variance drifts with depth": 0,
    "low-precision headroom": 0,
    "non-finite values": 0,
    "dead ReLU": 16,
    "saturated sigmoid or tanh": 5,
    "softmax twice": 0,
    "scores are no log-probabilities": 0,
    "wrong initial loss": 0,
    "loss without a floor": 0,
    "loss is NaN": 0,
    "nothing is trained": 30,
    "parameter never trained": 12,
    "cut off from the loss": 12,
    "all-zero gradients": 8,
    "gradients not zeroed": 10,
    "vanishing gradients": 5,
    "learning rate too high": 30,
    "early blow-up": 0,
    "loss spike": 0,
    "exploding gradients": 0,
    "gradient spike": 0,
    "clipped always": 10,
    "two steps a batch": 10,
    "updated twice": 10,
    "update-to-weight ratio": 26,
    "learning rate gone": 50,
    "identical batches": 6,
    "BatchNorm mode": 0,
    "no better than chance": -200,
    "loss not falling": -400,
}

RISING = (
    *("learning rate too high", "early blow-up", "loss spike", "exploding gradients", "gradient spike"),
    *("update-to-weight ratio", "clipped always"),
)
NOT_FINITE = ("low-precision headroom", "non-finite values", "loss is NaN")
DEAD = ("dead ReLU", "saturated sigmoid or tanh", "all-zero gradients", "vanishing gradients")
STUCK = ("no better than chance", "loss not falling")
UNTRAINED = ("nothing is trained", "parameter never trained", "cut off from the loss", "all-zero gradients")
WRONG_LOSS = ("softmax twice", "scores are no log-probabilities", "loss without a floor")


@dataclass(frozen=True)
class Cause:
    """What comes of a fault that one of some rules has found, in the same model or where a finding names none."""

    rules: tuple[str, ...]
    sets_off: tuple[str, ...]
    within: float = float("inf")  # steps
    anywhere: bool = False  # in other models, too


CAUSES = (
    Cause(("bad batch", *NOT_FINITE), (*NOT_FINITE, *RISING, *DEAD, *STUCK), anywhere=True),
    Cause(("bad batch",), RISING, within=5, anywhere=True),
    Cause(RISING, RISING, within=100),
    Cause(RISING, (*DEAD, *NOT_FINITE), within=500),
    Cause(("learning rate too high", "early blow-up", "exploding gradients"), (*DEAD, *NOT_FINITE, *STUCK)),
    Cause(("update-to-weight ratio", "clipped always", "learning rate gone", "loss spike"), STUCK),
    Cause(("learning rate gone",), ("update-to-weight ratio",)),
    Cause(("gradients not zeroed", "two steps a batch", "updated twice"), (*RISING, *DEAD, *NOT_FINITE, *STUCK)),
    Cause(WRONG_LOSS, (*WRONG_LOSS, *RISING, *DEAD, *NOT_FINITE, *STUCK)),
    Cause(DEAD, (*DEAD, *STUCK)),
    Cause(UNTRAINED, UNTRAINED, within=60),
    Cause(("nothing is trained",), (*UNTRAINED, "update-to-weight ratio", *STUCK)),
    Cause(("inputs not normalised",), ("wrong initial loss", "activation variance drifts with depth")),
    Cause(("inputs not normalised",), (*RISING, *DEAD, *NOT_FINITE, *STUCK), within=500),
    Cause(("activation variance drifts with depth",), ("wrong initial loss", *RISING, *DEAD), within=100),
    Cause(("dropout near 1", "batches of one class", *STUCK), STUCK),
)


def told_together(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Those that have one cause, each beginning with the first in time and order of computation.

    A finding goes to the nearest group before it of which one sets it off.
    """
    groups: list[list[Finding]] = []
    for finding in sorted(findings, key=_began):
        before = (group for group in reversed(groups) if any(_sets_off(one, finding) for one in group))
        group = next(before, None)
        if group is None:
            groups.append([finding])
        else:
            group.append(finding)
    return groups


def _began(finding: Finding) -> tuple[int, int, int]:
    rule = finding["rule"]
    order = [*ORDER].index(rule) if rule in ORDER else len(ORDER)
    return max(0, finding["step"] - ORDER.get(rule, 0)), order, finding["step"]


def _sets_off(first: Finding, second: Finding) -> bool:
    if first["severity"] == "note" and second["severity"] != "note":
        return False
    near = None in (first["model"], second["model"]) or first["model"] == second["model"]
    if first["rule"] == second["rule"]:
        return near
    later = second["step"] - first["step"]
    return any(
        first["rule"] in cause.rules and second["rule"] in cause.sets_off and later <= cause.within
        for cause in CAUSES
        if near or cause.anywhere
    )


def worst_of(findings: Iterable[Finding]) -> str:
    """The highest of their severities."""
    return max((row["severity"] for row in findings), key=_level)


def by_severity(groups: Iterable[list[Finding]]) -> list[list[Finding]]:
    """The worst first, then the earliest."""
    return sorted(groups, key=lambda group: (-_level(worst_of(group)), group[0]["step"]))


def _level(severity: Any) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else -1
