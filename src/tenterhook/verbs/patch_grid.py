"""patch_grid: activation patching, layers × positions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.addresses.sites import Selector, check_model, resolve_all
from tenterhook.errors import AddressError, EditError
from tenterhook.tables import Table
from tenterhook.values.inputs import call_with
from tenterhook.values.tree import leaves, paths_of
from tenterhook.verbs.batched import own
from tenterhook.verbs.capture import capture
from tenterhook.verbs.captured import Captured
from tenterhook.verbs.observe import observe
from tenterhook.verbs.scores import as_value, figure, metric_name
from tenterhook.verbs.sweep import sweep
from tenterhook.verbs.undisturbed import as_before


def patch_grid(
    model: nn.Module,
    clean: Any,
    corrupt: Any,
    sites: Selector | Iterable[Selector],
    positions: Iterable[Any] | Mapping[str, Any],
    metric: Callable[[Any], Any],
    *,
    dim: int = 1,
    at_once: int | None = None,
) -> "PatchGrid":
    """What a metric makes of the corrupted run with one value of the clean run in it, for each site and position.

        grid = patch_grid(model, clean, corrupt, "h.*", range(7), lambda out: out.logits[0, -1, 42])
        grid.values              # sites × positions
        grid.show()              # a heat map; white is the corrupted run as it was

    `sites` are selectors whose value is one tensor; `positions` are indices along its dimension `dim` (a token, a list
    of them, a slice), or a dict that gives them names. Both inputs have one length, so that a position means the same
    in both. All runs are one sweep.
    """
    check_model(model, "patch_grid")
    selectors = [sites] if isinstance(sites, (str, nn.Module, type)) or callable(sites) else list(sites)
    names = [str(site) for site in resolve_all(model, selectors)]
    named = dict(positions) if isinstance(positions, Mapping) else {_label(p): p for p in positions}
    if not names or not named:
        raise AddressError(f"patch_grid needs sites and positions, got {len(names)} and {len(named)} of them")
    with capture(model, *names) as seen:
        target = as_value(metric(call_with(model, own(clean))))
    _check_are_tensors(seen, names)
    _check_fit(seen, names, model, corrupt, dim)
    places = [(*[slice(None)] * dim, position) for position in named.values()]
    edits = [seen.patch(name, at=place) for name in names for place in places]
    scores = sweep(model, corrupt, [{}, *edits], metric=metric, at_once=at_once)
    values = scores.values[1:].unflatten(0, (len(names), len(places)))
    return PatchGrid(names, list(named), values, target, scores.values[0], metric_name(metric))


class PatchGrid:
    """A metric for each site and position; `clean` and `corrupt` are its values of the two runs themselves."""

    def __init__(
        self, sites: list[str], positions: list[str], values: Tensor, clean: Tensor, corrupt: Tensor, metric: str
    ) -> None:
        self.sites, self.positions = sites, positions
        self.values = values
        self.clean, self.corrupt = clean, corrupt
        self._metric = metric

    def show(self, ax: Any = None) -> Any:
        """Draw it as a heat map with matplotlib, and return the axes."""
        if self.values.dim() > 2:
            what = f"the metric has {self.values[0, 0].numel()} numbers for each run"
            raise ValueError(f"{what}, and a heat map shows one; draw one of grid.values[..., k]")
        pyplot = _pyplot()
        if ax is None:
            size = (2 + 0.5 * len(self.positions), 1.5 + 0.35 * len(self.sites))
            ax = pyplot.subplots(figsize=size, layout="constrained")[1]
        shown, middle = self.values.double().cpu(), float(self.corrupt)
        most = max([abs(x - middle) for x in shown[shown.isfinite()].tolist()], default=0.0) or 1.0
        picture = ax.imshow(shown.numpy(), cmap="RdBu", vmin=middle - most, vmax=middle + most, aspect="auto")
        ax.set_xticks(range(len(self.positions)), self.positions, rotation=45, ha="right")
        ax.set_yticks(range(len(self.sites)), self.sites)
        ax.figure.colorbar(picture, ax=ax, label=self._metric)
        return ax

    def __repr__(self) -> str:
        return f"{self._table()}\n{self._metric}: clean {figure(self.clean)}, corrupt {figure(self.corrupt)}"

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        rows: Sequence[Sequence[str]] = [
            (site, *map(figure, line)) for site, line in zip(self.sites, self.values, strict=True)
        ]
        return Table(("", *self.positions), rows, right=self.positions)


def _label(position: Any) -> str:
    if isinstance(position, slice):
        return ":".join("" if end is None else str(end) for end in (position.start, position.stop))
    return "all" if position is Ellipsis else str(position)


def _check_are_tensors(seen: Captured, names: list[str]) -> None:
    for name in names:
        for value in seen.calls(name):
            if len(list(leaves(value))) != 1:
                raise EditError(f"{name} has several tensors, {paths_of(value)}; name the one to patch: {name}[0]")


def _check_fit(seen: Captured, names: list[str], model: nn.Module, corrupt: Any, dim: int) -> None:
    """Raise where a position of the clean run is not the same one in the corrupted run."""
    shapes: dict[str, list[torch.Size]] = {name: [] for name in names}

    def note(found: list[torch.Size], value: Any) -> None:
        found += [tensor.shape for _, tensor in leaves(value)]

    looks: dict[Selector, Any] = {name: partial(note, found) for name, found in shapes.items()}
    with as_before(model), torch.no_grad(), observe(model, looks):
        call_with(model, own(corrupt))
    for name in names:
        for value, other in zip(seen.calls(name), shapes[name], strict=False):
            ((_, tensor),) = leaves(value)
            if tensor.shape[min(dim, 1) :] != other[min(dim, 1) :]:  # a batch may be of another size
                what = f"{_times(tensor.shape)} in the clean run and {_times(other)} in the corrupted one"
                raise EditError(f"{name} is {what}: a position would mean another one there; make both of one length")


def _times(shape: torch.Size) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        what = "show() draws with matplotlib, which is not installed: pip install matplotlib"
        raise ImportError(f"{what}; without it, print the grid, or take grid.values") from None
    return pyplot
