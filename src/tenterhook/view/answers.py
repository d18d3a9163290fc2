"""What the page asks for, as bytes: the server sends it, and a report file holds it ready.

Each answer has a name: `run`, `steps`, `matrix/output`, `site/net/conv`, `source/net/Net`; beside another run or rank
also `differences` and `differences/output`. JSON has only finite numbers in it; a matrix is a line of JSON and then its
levels, as little-endian 16 bit numbers.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tenterhook.errors import RunError, TenterhookError
from tenterhook.report.verdict import Verdict
from tenterhook.store.levels import Codes, Levels
from tenterhook.store.run import Run
from tenterhook.view import details, differences, losses, pictures, sources

_KINDS = ("input", "output", "output_grad", "parameter", "parameter_grad", "update")
MOST_COLUMNS = 2000
_MOST_FINDINGS = 2000


class NoAnswer(TenterhookError, LookupError):
    """Something was asked for that is not in the run."""


class Answers:
    """The answers of one rank of a run, the first if none is given, also while that is being recorded.

    `name` is what the page calls the run; `ranks` are those that it offers, all unless they are given.
    """

    def __init__(self, run: Run, rank: int | None = None, name: str = "", ranks: tuple[int, ...] | None = None) -> None:
        rank = min(run.ranks, default=0) if rank is None else rank
        if run.ranks and rank not in run.ranks:
            raise NoAnswer(f"there is no rank {rank} in {run.folder.name}; there are {', '.join(map(str, run.ranks))}")
        self.run, self.rank, self._ranks = run, rank, ranks
        self.name = name or run.folder.resolve().name
        self.levels = Levels(*(run.stream(name, rank) for name in ("places", "levels", "stats")))
        self.steps = losses.Steps(run.stream("steps", rank))
        self._last_word: Verdict | None = None
        self._apart: tuple[Answers, tuple[int, int], differences.Partings] | None = None

    def answer(self, name: str, window: Mapping[str, str], other: "Answers | None" = None) -> bytes:
        """The answer with this name; `window` may say `from`, `to` and `columns`. Differences are those to `other`."""
        kind, _, rest = name.partition("/")
        first, last = _number(window, "from", -math.inf), _number(window, "to", math.inf)
        columns = int(min(max(_number(window, "columns", 1000), 1), MOST_COLUMNS))
        if kind == "run" and not rest:
            return _json(self._describe())
        if kind == "steps" and not rest:
            return _json(self.steps.table(first, last, columns))
        if kind == "matrix" and rest in _KINDS:
            return self._matrix(rest, first, last, columns)
        if kind == "differences" and other is not None and (not rest or rest in _KINDS):
            return self._differences(rest, other, first, last, columns)
        if kind == "site":
            model, _, site = rest.partition("/")
            return _json(details.of_site(self, model, site, first, last, min(columns, 120)))
        if kind == "source":
            return _json(sources.of_class(self._info(), *rest.split("/", 1)))
        if kind == "picture":
            return pictures.pixels(self._folder, rest)
        raise NoAnswer(f"there is no answer called {name!r}")

    def everything(self, columns: int, stretches: int) -> Iterator[tuple[str, bytes]]:
        """The answers that make up the whole page: matrices of so many columns, histograms of so many stretches."""
        shown = [f"picture/{one['file']}" for one in pictures.listed(self._folder)]
        own = [f"source/{model}/{name}" for model, name in sources.classes(self._info())]
        for name in ("run", "steps", *(f"matrix/{kind}" for kind in _KINDS), *shown, *own):
            yield name, self.answer(name, {"columns": str(columns)})
        modules = [(model["name"], one["site"]) for model in _models(self._info()) for one in model["modules"]]
        rest = dict.fromkeys(modules)
        for site in details.of_sites(self, stretches):
            rest.pop((site["model"], site["site"]), None)
            yield f"site/{site['model']}/{site['site']}", _json(site)
        for model, name in rest:
            yield f"site/{model}/{name}", _json({"model": model, "site": name, "share": 1, "kinds": {}})

    def all_differences(self, other: "Answers", columns: int) -> Iterator[tuple[str, bytes]]:
        """The answers about what differs from another run or rank."""
        for name in ("differences", *(f"differences/{kind}" for kind in _KINDS)):
            yield name, self.answer(name, {"columns": str(columns)}, other)

    @property
    def _folder(self) -> Path:
        return self.run.folder / f"rank-{self.rank}"

    def _info(self) -> dict[str, Any]:
        return self.run.rank_info(self.rank)

    def _describe(self) -> dict[str, Any]:
        self.levels.update()
        trouble: list[str] = []
        try:
            info = self._info()
        except RunError as error:
            info = {}
            trouble.append(str(error))
        verdict = self._verdict("ended" in info)
        findings = sorted(verdict.findings, key=lambda row: (row["step"], -_level(row["severity"])))[:_MOST_FINDINGS]
        numbers = {id(row): i for i, row in enumerate(findings)}
        groups = [[numbers[id(row)] for row in group if id(row) in numbers] for group in verdict.groups]
        places = [[*place, dtype] for place, dtype in zip(self.levels.places, self.levels.dtypes, strict=True)]
        schedule = self.run.info.get("schedule", {})
        return {
            "name": self.name,
            "info": {k: self.run.info.get(k) for k in ("command", "started", "versions", "host", "devices", "git")},
            "schedule": schedule if isinstance(schedule, dict) else {},
            "rank": self.rank,
            "ranks": self.run.ranks if self._ranks is None else list(self._ranks),
            "models": _models(info),
            "ended": info.get("ended"),
            "overhead": info.get("overhead"),
            "steps": self.steps.many,
            "last": self.steps.last,
            "sampled": self.levels.many,
            "places": places,
            "findings": findings,
            "groups": [group for group in groups if group],
            "worst": verdict.worst,
            "clean": verdict.clean,
            "unchecked": verdict.unchecked,
            "remarks": [*trouble, *map(str, self.run.dropped.values()), *verdict.remarks],
            "pictures": pictures.listed(self._folder),
            "sources": [list(pair) for pair in sources.classes(info)],
        }

    def _verdict(self, has_ended: bool) -> Verdict:
        """Of a run that has ended it is worked out once."""
        if self._last_word is None:
            try:
                verdict = Verdict.of(self.run, compare=has_ended)
            except Exception:  # whatever is in the files: what can be read is shown
                return Verdict(str(self.run.folder), findings=self.run.findings().to_pylist())
            self._last_word = verdict if has_ended else None
            return verdict
        return self._last_word

    def _matrix(self, what: str, first: float, last: float, columns: int) -> bytes:
        self.levels.update()
        codes, steps, places = self.levels.pooled(what, first, last, columns)
        end = self.levels.steps[-1] + 1 if self.levels.many else 0
        return _packed({"what": what, "places": places, "steps": steps.tolist(), "end": min(end, last + 1)}, codes)

    def _differences(self, what: str, other: "Answers", first: float, last: float, columns: int) -> bytes:
        """Of one kind of value as a matrix; without a kind, the first of each."""
        for one in (self, other):
            one.levels.update()
        known = self._partings(other)
        if not what:
            return _json(differences.told(self, other, known, _KINDS))
        found = differences.Differences.of(self.levels, other.levels, what)
        codes, steps = found.pooled(first, last, columns)
        end = int(found.steps[-1]) + 1 if len(found.steps) else 0
        head = {"what": what, "places": found.places, "steps": steps.tolist(), "end": min(end, last + 1)}
        return _packed({**head, "first": [known.first.get((*name, what)) for name in found.names]}, codes)

    def _partings(self, other: "Answers") -> differences.Partings:
        """Those to this other one, as far as both have grown; one pair is kept."""
        grown = self.levels.many, other.levels.many
        if self._apart is None or self._apart[0] is not other:
            self._apart = other, (-1, -1), differences.Partings(self, other)
        if self._apart[1] != grown:
            self._apart[2].update()
            self._apart = other, grown, self._apart[2]
        return self._apart[2]


def _packed(head: dict[str, Any], codes: Codes) -> bytes:
    text = _json(head)
    text += b" " * (-(len(text) + 1) % 2) + b"\n"  # the numbers begin at an even byte
    return text + np.ascontiguousarray(codes.T, "<i2").tobytes()


def _json(value: Any) -> bytes:
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=_plain)
    except (ValueError, TypeError):
        text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False, default=_plain)
    return text.encode()


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def _finite(value: Any) -> Any:
    """Numbers that JSON does not know become texts: `NaN`, `Infinity`, `-Infinity`."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _number(window: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(window[name])
    except (KeyError, ValueError):
        return default
    return default if value != value else value


def _level(severity: Any) -> int:
    return {"note": 0, "warn": 1, "error": 2}.get(severity, -1)


def _models(info: dict[str, Any]) -> list[dict[str, Any]]:
    """The models as the page needs them, whatever a damaged file says."""
    found = []
    for model in info.get("models") or []:
        if isinstance(model, dict) and isinstance(model.get("name"), str):
            modules = [one for one in model.get("modules") or [] if isinstance(one, dict) and "site" in one]
            kept = [{k: one.get(k) for k in ("site", "class", "shapes")} for one in modules]
            facts = {k: model.get(k) for k in ("name", "class", "parameters", "compiled")}
            found.append({**facts, "modules": [one for one in kept if isinstance(one["site"], str)]})
    return found
