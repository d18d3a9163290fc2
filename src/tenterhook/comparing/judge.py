"""From two runs to verdicts: what each value is, and which place is the first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from tenterhook.comparing.apart import NO_NUMBERS, Apart
from tenterhook.comparing.following import Found
from tenterhook.comparing.in_turn import Outcome
from tenterhook.comparing.source import Key
from tenterhook.comparing.tolerance import in_sum, is_rounding, length_of


class Truth(Protocol):
    """What float64 says."""

    def is_rounding(self, key: Key) -> bool | None:
        """Whether a difference is rounding alone; None where it does not know."""


@dataclass
class Judged:
    """Every value with its verdict and its own difference; and the first that makes one."""

    rows: list[tuple[Found, str, Apart | None]]
    first: Found | None = None
    owner: str = ""
    call: int = 0
    length: int = 1
    writes: bool = False  # whether the module is named because of what it writes into


def judge(free: Outcome, forced: Outcome | None, modules: Mapping[str, nn.Module], truth: Truth | None) -> Judged:
    """Verdicts on what came when both ran freely, from what came when b had the values of a."""
    lengths: dict[str, int] = {}

    def more_than_rounding(one: Found) -> bool:
        if one.apart.is_equal:
            return False
        known = None if truth is None else truth.is_rounding(one.key)
        if known is not None:
            return not known
        if one.owner not in lengths:
            lengths[one.owner] = length_of(modules.get(one.owner))
        if one.key.role != "grad" or one.key.name in modules:
            return not is_rounding(one.apart, lengths[one.owner])
        parameter = modules[one.owner].get_parameter(one.key.name.rpartition(".")[2])
        apart, rows = in_sum(one.apart, outer.get(one.owner, []), parameter)
        return not is_rounding(apart, max(rows, lengths[one.owner]))

    found = [] if forced is None else forced.found
    own = {one.key: one for one in found}
    outer: dict[str, list[Apart]] = {}  # the gradients of what each module gave
    for one in found:
        if one.key.role.startswith("grad") and not one.key.role.startswith("grad:in"):
            outer.setdefault(one.key.name, []).append(one.apart)
    makers = [one for one in found if more_than_rounding(one)]
    judged = Judged([])
    if makers:
        judged = _named(makers[0], found)
        judged.length = lengths.get(makers[0].owner, 1)
    making = {one.key for one in makers}
    owners = {(one.owner, _call_of(one)) for one in makers if not one.key.role.startswith("grad")}
    named = Key(judged.owner, "out", judged.call)
    for one in free.found:
        if one.key.role == "in" or (one.key.role.startswith("grad:in") and one.key not in making):
            continue
        alone = own.get(one.key)
        verdict = _verdict(one, judged, one.key in making or _is_maker(one, owners), named)
        judged.rows.append((one, verdict, None if alone is None else alone.apart))
    return judged


def _is_maker(one: Found, owners: set[tuple[str, int]]) -> bool:
    return one.key.role == "out" and (one.key.name, one.key.call) in owners


def _verdict(one: Found, judged: Judged, makes: bool, named: Key) -> str:
    if (not one.shape and one.apart.is_equal) or one.apart is NO_NUMBERS:
        return "not compared"
    if judged.first is not None and one.key == judged.first.key:
        return "first"
    if one.key == named and judged.first is not None and not judged.first.key.role.startswith("grad"):
        return "first"
    if one.apart.is_equal:
        return "equal"
    if makes:
        return "differs"
    return "within rounding" if judged.first is None else "grown"


def _named(first: Found, found: list[Found]) -> Judged:
    """Who makes it: the owner, or a module that it calls and that writes into what is not its own."""
    judged = Judged([], first, first.owner, _call_of(first))
    around = next((key for key in reversed(first.around) if key.name == first.owner), None)
    around = around or Key(first.owner, "out", judged.call)
    for one in found:
        if one.key == first.key:
            break
        if one.key.role == "out" and one.wrote[0] != one.wrote[1] and around in one.around[-1:]:
            judged.owner, judged.call, judged.writes = one.key.name, one.key.call, True
    return judged


def _call_of(one: Found) -> int:
    """The call of its owner that it is made in."""
    if one.key.role != "in":
        return one.key.call
    return one.around[-1].call if one.around else 0
