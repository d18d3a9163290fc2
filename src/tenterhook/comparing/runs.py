"""Two recorded runs: which kind of thing parts first, at which step and site. torch is not needed.

Step by step, in the order in which one thing follows from another: weights at the start, data, what the model makes of
it, the loss, gradients, learning rate, updates. Each is "the same" where all its statistics are equal; it is beyond
rounding where one differs by more than a share of its size, and beyond its spread where that is more than such a
statistic changes from step to step, or between two runs that differ by their seed alone (`spread=`).
"""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from tenterhook.store.run import Run, open_run
from tenterhook.tables import Table

_ROUNDING = 1e-4  # of the size of a statistic
_SPREADS = 3.0
_STATISTICS = ("nan", "pos_inf", "neg_inf", "zeros", "mean", "rms", "min", "max")
_KINDS = {  # in the order in which one follows from the other
    "data": ("input",),
    "outputs": ("output",),
    "loss": ("loss",),
    "gradients": ("output_grad", "parameter_grad"),
    "learning rate": ("rate",),
    "updates": ("update",),
    "weights": ("parameter",),
}
Place = tuple[str, str, str, str]  # model, site, kind of value, statistic
Values = dict[int, dict[Place, float]]  # by step


class Parting(NamedTuple):
    """The first difference of a kind."""

    step: int
    model: str
    site: str
    what: str
    statistic: str
    a: float
    b: float

    def __str__(self) -> str:
        return f"step {self.step}, {self.site or self.what} {self.what if self.site else ''} {self.statistic}".strip()


class Kind(NamedTuple):
    """What became of one kind of thing."""

    name: str
    steps: int  # in which both have it
    first: Parting | None  # that is not equal
    rounding: Parting | None  # the first that is more than rounding
    spread: Parting | None  # the first that is more than its spread


class RunComparison:
    """Two runs, kind by kind. Print it."""

    def __init__(self, a: Run, b: Run, kinds: list[Kind], notes: list[str]) -> None:
        self.a, self.b = a, b
        self.kinds = kinds
        self.notes = notes

    @property
    def equal(self) -> bool:
        """True if all that was recorded of both is the same."""
        return all(kind.first is None for kind in self.kinds)

    @property
    def first(self) -> Parting | None:
        """What parts first by more than rounding: by step, then by what follows from what."""
        found = [(kind.rounding.step, i, kind.rounding) for i, kind in enumerate(self.kinds) if kind.rounding]
        return min(found, key=lambda one: one[:2])[2] if found else None

    @property
    def verdict(self) -> str:
        """In one sentence."""
        if not any(kind.steps for kind in self.kinds):
            return "the two runs have no step in common"
        if self.equal:
            return f"equal in all {max(kind.steps for kind in self.kinds)} steps that both have"
        first = self.first
        if first is None:
            early = min((kind.first for kind in self.kinds if kind.first), key=lambda one: one.step)
            return f"within rounding; not equal from {early} on"
        names = {what: name for name, whats in _KINDS.items() for what in whats}
        kind = names[first.what]
        known = [one for one in self.kinds if one.steps and one.name not in (kind, "updates")]
        kept = [one.name for one in known if one.rounding is None or one.rounding.step > first.step]
        head = f"same {_listed(kept)} until step {first.step}, then " if kept and first.step else ""
        return f"{head}{kind}: {first}: {first.a:.6g} against {first.b:.6g}"

    def __str__(self) -> str:
        header = ("kind", "steps", "not equal from", "more than rounding from", "more than its spread from")
        rows = [(k.name, str(k.steps), *(_step(one) for one in k[2:])) for k in self.kinds]
        lines = [self.verdict, "", str(Table(header, rows, right=("steps",)))]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__


def compare_runs(a: Any, b: Any, spread: Any = None) -> RunComparison:
    """Where two recorded runs part; `spread` is a third one, like a but for its seed."""
    a, b = (one if isinstance(one, Run) else open_run(one) for one in (a, b))
    notes: list[str] = []
    mine, theirs = _values(a, b), _values(b, a)
    natural = None
    if spread is not None:
        natural = _values(spread if isinstance(spread, Run) else open_run(spread), a)
    kinds = [_kind(name, whats, mine, theirs, natural) for name, whats in _KINDS.items()]
    first_step = min(mine.keys() & theirs.keys(), default=0)
    start = _kind("weights at the start", ("parameter",), _only(mine, first_step), _only(theirs, first_step), None)
    if len(a.ranks) != len(b.ranks):
        notes.append(
            f"{len(a.ranks)} and {len(b.ranks)} processes: what all ranks have is read once, the rest is added up; "
            "losses and gradients are of one rank's part of the batch, and are left out"
        )
        kinds = [kind for kind in kinds if kind.name not in ("loss", "gradients")]
    return RunComparison(a, b, [start, *kinds], notes)


def _kind(name: str, whats: tuple[str, ...], a: Values, b: Values, natural: Values | None) -> Kind:
    steps = 0
    found: list[Parting | None] = [None, None, None]
    for step in sorted(a.keys() & b.keys()):
        places = [place for place in a[step] if place[2] in whats and place in b[step]]
        steps += bool(places)
        for place in places:
            one, other = a[step][place], b[step][place]
            if one == other or (math.isnan(one) and math.isnan(other)):
                continue
            parting = Parting(step, *place, one, other)
            found[0] = found[0] or parting
            if (found[1] is None and abs(one - other) > _ROUNDING * _size(a[step], place)) or _odd(one, other):
                found[1] = found[1] or parting
            if found[2] is None and (_odd(one, other) or abs(one - other) > _SPREADS * _spread(a, natural, place)):
                found[2] = parting
    return Kind(name, steps, *found)


def _odd(a: float, b: float) -> bool:
    return math.isfinite(a) != math.isfinite(b)


def _size(values: Mapping[Place, float], place: Place) -> float:
    """How large the values behind a statistic are: a mean near zero is compared with the root mean square."""
    if place[3] in ("nan", "pos_inf", "neg_inf"):
        return 0.0
    if place[3] == "zeros":
        return 1.0 / _ROUNDING
    around = values.get((*place[:3], "rms"), 0.0)
    return max(abs(values[place]), around)


def _spread(a: Values, natural: Values | None, place: Place) -> float:
    """How much a statistic changes by itself: between two seeds, or from one step to the next."""
    steps = sorted(step for step in a if place in a[step])
    if natural is not None:
        changes = [abs(a[s][place] - natural[s][place]) for s in steps if s in natural and place in natural[s]]
    else:
        changes = [abs(a[s][place] - a[t][place]) for s, t in pairwise(steps)]
    changes = [change for change in changes if math.isfinite(change)]
    return median(changes) if changes else 0.0


def _only(values: Values, step: int) -> Values:
    return {step: values[step]} if step in values else {}


def _values(run: Run, other: Run) -> Values:
    """All statistics of a run, by step and place."""
    found: Values = {}
    several = len(run.ranks) > 1
    for row in _rows(run, other) if several else run.stats().to_pylist():
        values = found.setdefault(row["step"], {})
        for name in _STATISTICS:
            if row.get(name) is not None:
                values[row["model"], row["site"], row["what"], name] = float(row[name])
    for row in run.steps(0).to_pylist():
        values = found.setdefault(row["step"], {})
        if row.get("loss") is not None:
            values["", "", "loss", "value"] = row["loss"]
        for i, rate in enumerate(row.get("rates") or ()):
            values["", "", "rate", f"of group {i}"] = rate
    return found


def _rows(run: Run, other: Run) -> Iterable[dict[str, Any]]:
    """The rows of several ranks as those of one: what all of them have is read once, the rest is added up."""
    counts = {(r["model"], r["site"], r["what"]): r["count"] for r in other.stats(0).to_pylist()}
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in run.stats().to_pylist():
        groups.setdefault((row["step"], row["model"], row["site"], row["what"]), []).append(row)
    for key, rows in groups.items():
        yield rows[0] if rows[0]["count"] == counts.get(key[1:]) else _added(rows)


def _added(rows: list[dict[str, Any]]) -> dict[str, Any]:
    total = dict(rows[0])
    for name in ("count", "nan", "pos_inf", "neg_inf", "zeros", "sum", "sumsq"):
        total[name] = sum(row[name] for row in rows)
    for name, pick in (("min", min), ("max", max)):
        total[name] = pick((row[name] for row in rows if row[name] is not None), default=None)
    finite = total["count"] - total["nan"] - total["pos_inf"] - total["neg_inf"]
    total["mean"] = total["sum"] / finite if finite else None
    total["rms"] = math.sqrt(total["sumsq"] / finite) if finite else None
    return total


def _step(parting: Parting | None) -> str:
    return "–" if parting is None else str(parting)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
