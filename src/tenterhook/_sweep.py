"""sweep: many counterfactuals in one batched forward, each edit acting on its own rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from tenterhook._edit import Changes, check_alike, edit
from tenterhook._errors import EditError
from tenterhook._inputs import call_with
from tenterhook._observe import observe
from tenterhook._sites import Site, check_model, resolve, walk
from tenterhook._tree import Path, describe, itself, leaves, rebuild
from tenterhook.changes import Change, Function, as_change

Shapes = dict[str, list[torch.Size]]


def sweep(model: nn.Module, inputs: Any, edits: Sequence[Changes], *, at_once: int | None = None) -> list[Any]:
    """What the model makes of the inputs under each of many edits, in one forward for all of them.

        heads = [{"attn": at((..., slice(64 * h, 64 * h + 64)), zero())} for h in range(12)]
        for output in sweep(model, x, [{}, *heads]): ...            # {} changes nothing: the clean run

    The inputs (an argument, a tuple of them, or a mapping of keyword arguments) are repeated once for each edit, and
    each acts on its own rows only. `at_once` limits how many go into one forward. It is an error where rows depend on
    one another, as under BatchNorm in training mode: the inputs alone and beside the edited rows must come out alike.
    """
    check_model(model, "sweep")
    if isinstance(edits, Mapping) or not all(isinstance(one, Mapping) for one in edits):
        raise TypeError("sweep needs a list of edits, each a dict of selector: change")
    _check_rows_are_independent(model)
    for selector in dict.fromkeys(selector for one in edits for selector in one):
        _check_can_sweep(resolve(model, selector))
    rows = _rows(inputs)
    shapes: Shapes = {}
    with observe(model, {selector: _note_shapes(shapes) for one in edits for selector in one}):
        clean = call_with(model, inputs)
    results: list[Any] = []
    size = at_once or max(len(edits), 1)
    for start in range(0, len(edits), size):
        results += _together(model, inputs, rows, edits[start : start + size], clean, shapes)
    return results


def _together(
    model: nn.Module, inputs: Any, rows: int, edits: Sequence[Changes], clean: Any, shapes: Shapes
) -> list[Any]:
    """Some edits in one forward; the last block of rows is clean, and must come out as it did alone."""
    n = len(edits) + 1
    by_selector: dict[Any, _Blocks] = {}
    for i, one in enumerate(edits):
        for selector, change in one.items():
            by_selector.setdefault(selector, _Blocks(n, shapes)).edits.append((i, as_change(change)))
    repeated = rebuild(inputs, lambda _, t: torch.cat([t] * n) if t.dim() and len(t) == rows else t, opaque=itself)
    with edit(model, by_selector):
        output = call_with(model, repeated)
    alone = dict(leaves(clean))
    dims = {path: _row_dim(t.shape, alone[path].shape if path in alone else None, n) for path, t in leaves(output)}
    for path, tensor in leaves(output):
        if dims[path] is None:
            where = "".join(f"[{key}]" for key in path)
            what = f"the model's output{where} ({describe(tensor)}) is not per row, so it cannot be told apart by edit"
            raise EditError(f"{what}; run these edits one by one")
    blocks = [rebuild(output, _cut(dims, i, n), opaque=itself) for i in range(n)]
    for path, tensor in leaves(blocks.pop()):
        if not _close(tensor, alone[path]):
            what = "the same inputs come out different when edited rows are beside them"
            raise EditError(f"rows are not independent in this model: {what}; run these edits one by one")
    return blocks


class _Blocks(Change):
    """The changes of several edits at one site, each for its own block of rows."""

    def __init__(self, n: int, shapes: Shapes) -> None:
        super().__init__("rows", torch.clone, {})
        self.n = n
        self.shapes = shapes
        self.edits: list[tuple[int, Change | Function]] = []
        self.takes_site, self.is_plain = True, False

    def __call__(self, value: Tensor, site: Site | None = None) -> Tensor:
        assert site is not None
        alone = self.shapes.get(str(site), [])
        dim = _row_dim(value.shape, alone[0] if len(alone) == 1 else None, self.n)
        if dim is None:
            raise EditError(f"its value is not per row ({describe(value)}): it is the same for all edits")
        out = value.clone()
        for i, change in self.edits:
            block = _block(value, dim, i, self.n)
            new = change(block, site)
            check_alike(block, new, site)
            _block(out, dim, i, self.n).copy_(new)
        return out


def _row_dim(together: torch.Size, alone: torch.Size | None, n: int) -> int | None:
    """The dimension that is n times as large with n times the rows, if just one is."""
    if alone is None or len(together) != len(alone):
        return None
    grown = [d for d, (many, few) in enumerate(zip(together, alone, strict=True)) if many != few]
    return grown[0] if len(grown) == 1 and together[grown[0]] == n * alone[grown[0]] else None


def _block(tensor: Tensor, dim: int | None, i: int, n: int) -> Tensor:
    assert dim is not None
    size = tensor.shape[dim] // n
    return tensor.narrow(dim, i * size, size)


def _cut(dims: dict[Path, int | None], i: int, n: int) -> Callable[[Path, Tensor], Tensor]:
    return lambda path, tensor: _block(tensor, dims[path], i, n)


def _close(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    a, b = a.detach().to(torch.promote_types(a.dtype, torch.float32)), b.detach()
    precise = b.dtype.itemsize >= 4
    most = float(b.abs().nan_to_num(0, 0, 0).amax()) if b.numel() else 0.0
    return torch.allclose(a, b.to(a.dtype), rtol=0, atol=max(most, 1e-6) * (1e-3 if precise else 3e-2), equal_nan=True)


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
            raise EditError(f"{site}: a sweep is one forward, without gradients")
        if site.kind != "module":
            raise EditError(f"{site}: a {site.kind} is shared by all rows; edit it in a run of its own")


def _check_rows_are_independent(model: nn.Module) -> None:
    for name, module in walk(model):
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            what = "normalises over the rows of the batch, so edited rows would change the others"
            raise EditError(f"{name} ({type(module).__name__}) {what}; use model.eval()")
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            raise EditError(f"{name} (Dropout) is in training mode, so no two runs are alike; use model.eval()")
