"""Captured values as pictures: feature maps, attention, images, vectors or histograms, as their shapes suggest."""

import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tenterhook.stats.plain import plain
from tenterhook.values.tree import describe, leaves

try:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize, to_rgba
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError:
    raise ImportError('seen.show() draws with matplotlib: pip install "tenterhook[show]"') from None

_VALUES = 12  # that are drawn
_ROWS, _COLUMNS = 4, 8  # of samples, of channels or heads
_BARS = 64


class _Picture(Figure):
    """A figure that a notebook shows without matplotlib's own set-up; it has no window."""

    def _repr_png_(self) -> bytes:
        page = io.BytesIO()
        self.savefig(page, format="png", bbox_inches="tight", dpi=100)
        return page.getvalue()


def show(values: Mapping[str, Any], kind: str | None) -> Figure:
    """A figure with a picture of each tensor."""
    if kind is not None and kind not in _KINDS:
        raise ValueError(f"there is no kind {kind!r} of picture; there are {', '.join(map(repr, _KINDS))}")
    named = _tensors(values)
    if not named:
        raise TypeError(f"there is no tensor to show in {', '.join(values) or 'what was captured'}")
    drawn = named[:_VALUES]
    columns = 1 if len(drawn) == 1 else 2
    rows = math.ceil(len(drawn) / columns)
    figure = _Picture(figsize=(8 if columns == 1 else 11, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for panel, (name, tensor) in zip(axes, drawn, strict=False):
        _draw(panel, name, tensor, kind)
    for panel in axes[len(drawn) :]:
        panel.set_axis_off()
    if len(drawn) < len(named):
        figure.suptitle(f"the first {_VALUES} of {len(named)} tensors; name those that you want", fontsize=10)
    return figure


def _tensors(values: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    found = []
    for name, value in values.items():
        if isinstance(value, bool | int | float):
            value = torch.tensor(value, dtype=torch.float64, device="cpu")
        found += [(name + "".join(f"[{key}]" for key in path), tensor) for path, tensor in leaves(value)]
    return found


def _draw(panel: Axes, name: str, tensor: Tensor, kind: str | None) -> None:
    values = _dense(tensor)
    panel.set_title(f"{name}  {describe(tensor)}", fontsize=10, loc="left")
    if values is None or not values.numel():
        why = "no values" if values is not None else "its values cannot be drawn"
        panel.text(0.5, 0.5, why, ha="center", va="center", transform=panel.transAxes)
        panel.set_axis_off()
        return
    others = int((~values.isfinite()).sum())
    if others:
        panel.set_title(f"{others:,} not finite", fontsize=9, loc="right", color=_BAD)
    _KINDS[kind or suggested(values)](panel, values)
    panel.tick_params(labelsize=8)


def _dense(tensor: Tensor) -> Tensor | None:
    """Its values in float64 on the CPU, without what torch.plain cannot give; complex ones by their magnitude."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = tensor.abs()
    if plain(tensor) is None or tensor.is_nested:
        return None
    values = tensor.double().cpu()
    while values.dim() > 2 and values.shape[-1] == 1:  # pooled feature maps
        values = values.squeeze(-1)
    return values


def suggested(values: Tensor) -> str:
    """Which kind of picture the shape suggests."""
    shape = values.shape
    if values.dim() in (3, 4) and shape[-1] == shape[-2] > 1 and _are_probabilities(values):
        return "attention"
    if values.dim() == 4:
        return "maps"
    if values.dim() in (2, 3) and min(shape[-2:]) > 1:
        return "image"
    return "vector" if values.numel() == max(shape, default=1) else "histogram"


def _are_probabilities(values: Tensor) -> bool:
    return bool((values >= 0).all() and (values.sum(-1) - 1).abs().max() < 2e-2)


_BAD = "#cc79a7"  # of what is not finite, in Okabe and Ito's colours


def _maps(panel: Axes, values: Tensor) -> None:
    """Samples downwards, channels to the right."""
    values = _as_4d(values)
    grid = values[:_ROWS, :_COLUMNS]
    _image(panel, grid, square=True)
    _label(panel, values, grid, "sample", "channel")


def _attention(panel: Axes, values: Tensor) -> None:
    """Samples downwards, heads to the right; in each, queries downwards and keys to the right."""
    values = _as_4d(values)
    grid = values[:_ROWS, :_COLUMNS]
    _image(panel, grid, square=True)
    _label(panel, values, grid, "sample", "head")


def _as_4d(values: Tensor) -> Tensor:
    while values.dim() < 4:
        values = values.unsqueeze(0)
    return values.flatten(0, -4) if values.dim() > 4 else values


def _mosaic(grid: Any) -> Any:
    """Images side by side, as red, green, blue and alpha; the gaps between them are transparent."""
    samples, channels, height, width, _ = grid.shape
    gap = max(1, max(height, width) // 16)
    page = np.zeros((samples * (height + gap) - gap, channels * (width + gap) - gap, 4))
    for i in range(samples):
        for k in range(channels):
            top, left = i * (height + gap), k * (width + gap)
            page[top : top + height, left : left + width] = grid[i, k]
    return page


def _label(panel: Axes, values: Tensor, grid: Tensor, row: str, column: str) -> None:
    panel.set_xticks([])
    panel.set_yticks([])
    for many, drawn, what, write in (
        (values.shape[1], grid.shape[1], column, panel.set_xlabel),
        (values.shape[0], grid.shape[0], row, panel.set_ylabel),
    ):
        write(f"{what}s 0 to {drawn - 1}" + (f" of {many}" if many > drawn else "") if many > 1 else "", fontsize=8)


def _picture(panel: Axes, values: Tensor) -> None:
    """A matrix; of several, one below the other."""
    matrices = values.flatten(0, -3) if values.dim() > 2 else values.unsqueeze(0)
    grid = matrices[:_ROWS].unsqueeze(1)
    _image(panel, grid, square=False)
    if len(matrices) > 1:
        _label(panel, matrices.unsqueeze(1), grid, "sample", "")


def _image(panel: Axes, grid: Tensor, square: bool) -> None:
    finite = grid[grid.isfinite()]
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 1.0)
    is_signed = low < 0 < high
    if is_signed:  # zero is white
        low, high = -max(-low, high), max(-low, high)
    scale = ScalarMappable(Normalize(low, high), "RdBu_r" if is_signed else "cividis")
    colours: Any = scale.get_cmap()(scale.norm(grid.numpy()))
    colours[~grid.isfinite().numpy()] = to_rgba(_BAD)
    panel.imshow(_mosaic(colours), interpolation="nearest", aspect="equal" if square else "auto")
    panel.figure.colorbar(scale, ax=panel, shrink=0.9).ax.tick_params(labelsize=8)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    for side in panel.spines.values():
        side.set_visible(False)


def _vector(panel: Axes, values: Tensor) -> None:
    values = values.flatten()
    if len(values) <= _BARS:
        panel.bar(range(len(values)), values.tolist(), color="#0072b2")
    else:
        panel.plot(values.tolist(), color="#0072b2", linewidth=0.8)
    panel.axhline(0, color="0.6", linewidth=0.6)


def _histogram(panel: Axes, values: Tensor) -> None:
    finite = values[values.isfinite()]
    if not finite.numel():
        return
    low, high = finite.min().item(), finite.max().item()
    if low == high:
        low, high = low - 0.5, high + 0.5
    heights = torch.histc(finite, 60, low, high)
    edges = torch.linspace(low, high, 61, dtype=torch.float64, device="cpu")
    panel.stairs(heights.tolist(), edges.tolist(), fill=True, color="#0072b2")
    panel.set_ylabel("values", fontsize=8)


_KINDS: dict[str, Callable[[Axes, Tensor], None]] = {
    "maps": _maps,
    "attention": _attention,
    "image": _picture,
    "vector": _vector,
    "histogram": _histogram,
}
