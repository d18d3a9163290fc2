"""Gradient flow over depth, as bars: how large the gradients are from the first layer to the last."""

from typing import NamedTuple

import numpy as np

from tenterhook.report.box import MARKS
from tenterhook.store.levels import NOT_FINITE, PER_DECADE, ZERO, Levels
from tenterhook.store.run import Run
from tenterhook.store.schemas import SEVERITIES

_MOST, _LAST, _BAR = 16, 20, 32  # layers, samples, and characters
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_TITLES = {"output_grad": "gradients at outputs", "parameter_grad": "gradients of parameters"}
Site = tuple[str, str]  # model and site


class _Layer(NamedTuple):
    at: Site
    code: float  # a level


def flow(run: Run, width: int = 100) -> list[str]:
    """A line for each layer, or for some of many, those with findings among them; none without gradients."""
    levels = Levels(*(run.stream(name, 0) for name in ("places", "levels", "stats")))
    levels.update()
    what = next((kind for kind in _TITLES if kind in levels.grids), None)
    layers = [] if what is None else _layers(levels, what)
    severities = _severities(run)
    shown = _some(layers, severities)
    finite = [one.code for one in shown if ZERO < one.code < NOT_FINITE]
    if what is None or len(shown) < 2 or not finite:
        return []
    low, high = min(finite) - PER_DECADE / 2, max(finite)
    several = len({one.at[0] for one in layers}) > 1
    names = [(": ".join(one.at) if several else one.at[1])[-32:] for one in shown]
    wide = max(map(len, names))
    left_out = len(layers) - len(shown)
    rest = f" ({left_out} layers between them left out)" if left_out else ""
    lines = [f"{_TITLES[what]}, first layer to last, rms of the last samples{rest}"]
    for name, one in zip(names, shown, strict=True):
        mark = MARKS.get(severities.get(one.at, ""), " ")
        lines.append(f"  {mark} {name:<{wide}}  {_bar(one.code, low, high)}"[:width])
    return lines


def _layers(levels: Levels, what: str) -> list[_Layer]:
    """What has gradients, in the order of the forward, without the modules around it."""
    grid = levels.grids[what]
    codes = np.median(grid.codes[max(0, levels.many - _LAST) : levels.many, : len(grid.places)], axis=0)
    found = [
        _Layer(levels.places[place][:2], code) for place, code in sorted(zip(grid.places, codes.tolist(), strict=True))
    ]
    around = {(model, part) for (model, site), _ in found for part in _around(site)}
    return [one for one in found if one.at not in around]


def _around(site: str) -> list[str]:
    """The sites of the modules that one is in; the model itself is in none."""
    parts = site.split(".")
    return [".", *(".".join(parts[:i]) for i in range(1, len(parts)))]


def _severities(run: Run) -> dict[Site, str]:
    """That of the worst finding of each site that has some."""
    found: dict[Site, str] = {}
    for row in run.findings().to_pylist():
        if row["site"] and row["until"] is None:
            at = row["model"], row["site"]
            found[at] = max(found.get(at, ""), row["severity"], key=["", *SEVERITIES].index)
    return found


def _some(layers: list[_Layer], marked: dict[Site, str]) -> list[_Layer]:
    """Those that are marked, the first, the last, and as many between them as there is room for."""
    chosen = [one for one in layers if one.at in marked][:_MOST] + layers[:1] + layers[-1:]
    for i in np.linspace(0, len(layers) - 1, min(_MOST, len(layers))).round().astype(int).tolist():
        if len(set(chosen)) < _MOST:
            chosen.append(layers[i])
    return [one for one in layers if one in chosen]


def _bar(code: float, low: float, high: float) -> str:
    if code >= NOT_FINITE:
        return f"{'!' * _BAR} NaN or infinite"
    if code <= ZERO:
        return f"{'·' * _BAR} all zero" if code > ZERO - 1 else f"{' ' * _BAR} not sampled"
    eighths = round((code - low) / max(1, high - low) * _BAR * 8)
    bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
    return f"{bar:<{_BAR}} {10 ** (code / PER_DECADE):.1e}"
