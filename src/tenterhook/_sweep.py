"""sweep: many counterfactuals in one batched forward, each edit acting on its own rows."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from tenterhook._address import known_when_made, may_cover
from tenterhook._edit import Changes, edit
from tenterhook._errors import AddressError, EditError, TenterhookWarning
from tenterhook._inputs import call_with
from tenterhook._observe import observe
from tenterhook._replace import check_alike
from tenterhook._sites import Site, check_model, resolve, walk
from tenterhook._tree import Path, can_have_gradient, describe, itself, leaves, rebuild
from tenterhook.changes import Change, Function, as_change

Shapes = dict[str, list[torch.Size]]


def sweep(model: nn.Module, inputs: Any, edits: Iterable[Changes], *, at_once: int | None = None) -> list[Any]:
    """What the model makes of the inputs under each of many edits, in one batched forward for all of them.

        heads = [{"attn": at((..., slice(64 * h, 64 * h + 64)), zero())} for h in range(12)]
        for output in sweep(model, x, [{}, *heads]): ...            # {} changes nothing: the clean run

    The inputs (an argument, a tuple of them, or a mapping of keyword arguments) are repeated once for each edit, and
    each acts on its own rows only: tensors with as many rows as the first one are repeated. `at_once` limits how many
    edits go into one forward. It is an error where rows depend on one another, as under BatchNorm in training mode: the
    inputs run once alone, and must come out alike before and after the edited rows.
    """
    check_model(model, "sweep")
    edits = edits if isinstance(edits, Mapping) else list(edits)
    if isinstance(edits, Mapping) or not all(isinstance(one, Mapping) for one in edits):
        raise TypeError("sweep needs a list of edits, each a dict of selector: change")
    if at_once is not None and at_once < 1:
        raise ValueError(f"at_once is how many edits go into one forward, got {at_once}")
    _check_rows_are_independent(model)
    sites = {selector: resolve(model, selector) for one in edits for selector in one}
    for found in sites.values():
        _check_can_sweep(found)
    shapes: Shapes = {}
    with _Quietly(model, {_place(site): _note_shapes(shapes) for found in sites.values() for site in found}):
        alone = call_with(model, inputs)
    batch = _Batch(model, inputs, _rows(inputs), alone, shapes)
    results: list[Any] = []
    size = at_once or max(len(edits), 1)
    for start in range(0, len(edits), size):
        chosen = edits[start : start + size]
        results += batch.run([[(site, as_change(c)) for s, c in one.items() for site in sites[s]] for one in chosen])
    return results


class _Quietly(observe):
    """Whatever stays silent here will be warned of where it should have been edited."""

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._session.__exit__(kind, *rest)


class _Batch:
    """The inputs many times over; the first and last block of rows are clean, and must come out as they did alone."""

    def __init__(self, model: nn.Module, inputs: Any, rows: int, alone: Any, shapes: Shapes) -> None:
        self.model = model
        self.inputs = inputs
        self.rows = rows
        self.alone = dict(leaves(alone))
        self.shapes = shapes

    def run(self, edits: list[list[tuple[Site, Change | Function]]]) -> list[Any]:
        """The outputs under some edits, from one forward."""
        n = len(edits) + 2
        places: dict[str, _Blocks] = {}
        for i, one in enumerate(edits, start=1):
            for site, change in one:
                places.setdefault(_place(site), _Blocks(n, self.shapes)).add(i, site, change)

        def repeat(path: Path, tensor: Tensor) -> Tensor:
            return torch.cat([tensor] * n) if tensor.dim() and len(tensor) == self.rows else tensor

        with edit(self.model, places):
            output = call_with(self.model, rebuild(self.inputs, repeat, opaque=itself))
        for place, blocks in places.items():
            if not blocks.calls and "/" in place:
                raise EditError(f"{place} was never edited: no such value came in that forward")
            blocks.complain()
        dims = {path: self._row_dim(path, tensor, n) for path, tensor in leaves(output)}
        parts = [rebuild(output, _cut(dims, i, n)) for i in range(n)]
        clean = [0, n - 1, *(i for i, one in enumerate(edits, start=1) if not one)]
        for path, tensor in (found for i in clean for found in leaves(parts[i])):
            if not _close(tensor, self.alone[path]):
                what = "the same inputs come out different when edited rows are beside them"
                raise EditError(f"rows are not independent in this model: {what}; run these edits one by one")
        return parts[1:-1]

    def _row_dim(self, path: Path, tensor: Tensor, n: int) -> int:
        alone = self.alone.get(path)
        dim = _row_dim(tensor.shape, None if alone is None else alone.shape, n)
        if dim is None:
            where = "".join(f"[{key}]" for key in path)
            what = f"the model's output{where} ({describe(tensor)}) is not per row, so it cannot be told apart by edit"
            raise EditError(f"{what}; run these edits one by one")
        return dim


class _Blocks(Change):
    """The changes of several edits at one place, each for its own block of rows."""

    def __init__(self, n: int, shapes: Shapes) -> None:
        super().__init__("rows", torch.clone, {})
        self.n = n
        self.shapes = shapes
        self.edits: dict[int, list[tuple[Site, Change | Function]]] = {}
        self.calls = 0
        self.made: set[tuple[int, Site]] = set()
        self.takes_site, self.is_plain = True, False

    def add(self, i: int, site: Site, change: Change | Function) -> None:
        """One more change for the i-th block; those of one block are made in the order written."""
        self.edits.setdefault(i, []).append((site, change))

    def __call__(self, value: Tensor, site: Site | None = None) -> Tensor:
        assert site is not None and isinstance(site.address.call, int)
        self.calls += 1
        alone = self.shapes.get(str(site), [])
        dim = _row_dim(value.shape, alone[0] if len(alone) == 1 else None, self.n)
        if dim is None:
            what = f"its value is not per row ({describe(value)}): it is the same for all edits"
            raise EditError(f"{what}; edit it in a run of its own")
        out = value.clone()
        for i, changes in self.edits.items():
            block = _block(value, dim, i, self.n)
            for asked, change in changes:
                if may_cover(asked.address.call, site.address.call):
                    self.made.add((i, asked))
                    new = change(block, site)
                    check_alike(block, new, site)
                    block = new
            _block(out, dim, i, self.n).copy_(block)
        return out

    def complain(self) -> None:
        """Warn of edits for a call that never came."""
        for i, changes in self.edits.items():
            for site, _ in changes:
                if self.calls and (i, site) not in self.made:
                    warnings.warn(f"{site} was never edited: that call never came", TenterhookWarning, stacklevel=4)


def _place(site: Site) -> str:
    """Its address for all calls."""
    return str(site.address._replace(call=None))


def _row_dim(together: torch.Size, alone: torch.Size | None, n: int) -> int | None:
    """The dimension that is n times as large with n times the rows, if just one is."""
    if alone is None or len(together) != len(alone):
        return None
    grown = [d for d, (many, few) in enumerate(zip(together, alone, strict=True)) if many != few]
    return grown[0] if len(grown) == 1 and together[grown[0]] == n * alone[grown[0]] else None


def _block(tensor: Tensor, dim: int, i: int, n: int) -> Tensor:
    size = tensor.shape[dim] // n
    return tensor.narrow(dim, i * size, size)


def _cut(dims: dict[Path, int], i: int, n: int) -> Callable[[Path, Tensor], Tensor]:
    return lambda path, tensor: _block(tensor, dims[path], i, n)


def _close(a: Tensor, b: Tensor) -> bool:
    if not can_have_gradient(a):
        return bool(torch.equal(a, b))
    tolerance = {8: 1e-9, 4: 1e-4}.get(torch.finfo(b.dtype).bits // 8, 2e-2)
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = a.detach().to(wide), b.detach().to(wide)
    most = float(b.abs().nan_to_num(0, 0, 0).amax()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=max(most, 1e-6) * tolerance, equal_nan=True)


def _note_shapes(shapes: Shapes) -> Callable[[Site, Any], None]:
    def look(site: Site, value: Any) -> None:
        shapes[str(site)] = [tensor.shape for _, tensor in leaves(value)]

    return look


def _rows(inputs: Any) -> int:
    for _, tensor in leaves(inputs):
        if tensor.dim():
            return len(tensor)
    raise TypeError("sweep repeats the rows of the inputs, and there is no tensor among them")


def _check_can_sweep(sites: list[Site]) -> None:
    for site in sites:
        if site.address.grad:
            raise EditError(f"{site}: a sweep is a forward pass; edit gradients in a run of their own")
        if not known_when_made(site.address):
            raise AddressError(f"{site}: which one is the last is known only afterwards; an edit counts from 0")
        if site.kind not in ("module", "inner"):
            raise EditError(f"{site}: a {site.kind} is shared by all rows; edit it in a run of its own")


def _check_rows_are_independent(model: nn.Module) -> None:
    for name, module in walk(model):
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            what = "normalises over the rows of the batch, so edited rows would change the others"
            raise EditError(f"{name} ({type(module).__name__}) {what}; use model.eval()")
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            raise EditError(f"{name} (Dropout) is in training mode, so no two runs are alike; use model.eval()")
