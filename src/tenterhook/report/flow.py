"""Gradient flow over depth, as bars: how large the gradients are from the first layer to the last."""

import numpy as np

from tenterhook.store.levels import NOT_FINITE, PER_DECADE, ZERO, Levels
from tenterhook.store.run import Run
from tenterhook.store.schemas import SEVERITIES

_MOST, _LAST, _BAR = 16, 20, 32  # layers, samples, and characters
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MARKS = {"error": "✖", "warn": "▲", "note": "●"}


def flow(run: Run, width: int = 100) -> list[str]:
    """A line for each layer, or for some of many, those with findings among them; none without gradients."""
    levels = Levels(*(run.stream(name, 0) for name in ("places", "levels", "stats")))
    levels.update()
    what = next((kind for kind in ("output_grad", "parameter_grad") if kind in levels.grids), None)
    if what is None:
        return []
    grid = levels.grids[what]
    codes = np.median(grid.codes[max(0, levels.many - _LAST) : levels.many, : len(grid.places)], axis=0)
    sites = [levels.places[place][1] for place in grid.places]
    several = len({levels.places[place][0] for place in grid.places}) > 1
    marks: dict[str, str] = {}
    for row in run.findings().to_pylist():
        if row["site"] and row["until"] is None:
            marks[row["site"]] = max(marks.get(row["site"], ""), row["severity"], key=["", *SEVERITIES].index)
    order = sorted(range(len(sites)), key=lambda i: grid.places[i])
    inner = [i for i in order if not any(other.startswith(f"{sites[i]}.") for other in sites) and sites[i] != "."]
    shown = _some(inner, [i for i in inner if sites[i] in marks])
    if len(shown) < 2:
        return []
    finite = [codes[i] for i in shown if ZERO < codes[i] < NOT_FINITE]
    if not finite:
        return []
    low, high = min(finite) - PER_DECADE / 2, max(finite)
    names = {i: (f"{levels.places[grid.places[i]][0]}: " * several + sites[i])[-32:] for i in shown}
    wide = max(map(len, names.values()))
    title = "gradients at outputs" if what == "output_grad" else "gradients of parameters"
    left_out = len(inner) - len(shown)
    rest = f" ({left_out} layers between them left out)" if left_out else ""
    lines = [f"{title}, first layer to last, rms of the last samples{rest}"]
    for i in shown:
        mark = _MARKS.get(marks.get(sites[i], ""), " ")
        lines.append(f"  {mark} {names[i]:<{wide}}  {_told(float(codes[i]), low, high)}"[:width])
    return lines


def _some(inner: list[int], marked: list[int]) -> list[int]:
    """Those that are marked, the first, the last, and as many between them as there is room for."""
    chosen = {*marked[:_MOST], *inner[:1], *inner[-1:]}
    for i in np.linspace(0, len(inner) - 1, min(_MOST, len(inner))).round().astype(int).tolist() if inner else ():
        if len(chosen) < _MOST:
            chosen.add(inner[i])
    return [i for i in inner if i in chosen]


def _told(code: float, low: float, high: float) -> str:
    if code >= NOT_FINITE:
        return f"{'!' * _BAR} NaN or infinite"
    if code <= ZERO:
        return f"{'·' * _BAR} all zero" if code > ZERO - 1 else f"{' ' * _BAR} not sampled"
    eighths = round((code - low) / max(1, high - low) * _BAR * 8)
    bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
    return f"{bar:<{_BAR}} {10 ** (code / PER_DECADE):.1e}"
