"""sweep: many counterfactuals in one batched forward, each edit acting on its own rows."""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.addresses.grammar import known_when_made, may_cover
from tenterhook.addresses.modules import walk
from tenterhook.addresses.sites import Site, check_model, resolve
from tenterhook.changes.change import Change, as_change, ready
from tenterhook.changes.function import Function
from tenterhook.errors import AddressError, EditError, TenterhookError, TenterhookWarning
from tenterhook.platform.layers import BatchNorm, Dropout
from tenterhook.values.inputs import call_with
from tenterhook.values.tree import Omitted, Path, describe, leaves, noted, rebuild
from tenterhook.verbs.edit import Changes, edit
from tenterhook.verbs.observe import observe
from tenterhook.verbs.replace import check_alike
from tenterhook.verbs.rows import Outputs, are_close, block_of, close, farthest, is_repeated, row_dim, tells_order
from tenterhook.verbs.swept import Swept

Seen = dict[str, list[Tensor]]  # by address: what came there in the run alone
Edits = list[tuple[Site, Change | Function]]  # those of one of the user's dicts
_OTHER_NUMBERS = (
    "the model's output has numbers that are no tensors, and are others with more rows or another edit,"
    " so they cannot be told apart by edit; run these edits one by one"
)


def sweep(model: nn.Module, inputs: Any, edits: Iterable[Changes], *, at_once: int | None = None) -> list[Any]:
    """What the model makes of the inputs under each of many edits, in one batched forward for all of them.

        heads = [{"attn": at((..., slice(64 * h, 64 * h + 64)), zero())} for h in range(12)]
        for output in sweep(model, x, [{}, *heads]): ...            # {} changes nothing: the clean run

    The inputs (an argument, a tuple of them, or a mapping of keyword arguments) are repeated once for each edit, and
    each acts on its own rows only: tensors with as many rows as the first one are repeated. `at_once` limits how many
    edits go into one forward. It is an error where rows depend on one another, as under BatchNorm in training mode: the
    inputs run once alone, and must come out alike before and after the edited rows; and two of the edits run alone.
    """
    check_model(model, "sweep")
    edits = _checked(edits, at_once)
    _check_rows_are_independent(model)
    sites = {selector: resolve(model, selector) for one in edits for selector in one}
    every = [site for found in sites.values() for site in found]
    _check_can_sweep(every)
    batch = _Batch(model, inputs, list(map(_place, every)))
    made = [[(site, as_change(change)) for s, change in one.items() for site in sites[s]] for one in edits]
    size = at_once or max(len(made), 1)
    results = [result for k in range(0, len(made), size) for result in batch.run(made[k : k + size])]
    batch.check_two(edits, results)
    return Swept(results, edits, batch.alone)


def _checked(edits: Any, at_once: int | None) -> list[Changes]:
    listed = [edits] if isinstance(edits, Mapping) else list(edits)
    if isinstance(edits, Mapping) or not all(isinstance(one, Mapping) for one in listed):
        raise TypeError("sweep needs a list of edits, each a dict of selector: change")
    if at_once is not None and at_once < 1:
        raise ValueError(f"at_once is how many edits go into one forward, got {at_once}")
    return listed


class _Quietly(observe):
    """Whatever stays silent here will be warned of where it should have been edited."""

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._session.__exit__(kind, *rest)


class _Alone(edit):
    """Whatever stays silent here was warned of before."""

    def _complain(self) -> None:
        pass


class _Batch:
    """The inputs many times over; the first and last block of rows are clean, and must come out as they did alone."""

    def __init__(self, model: nn.Module, inputs: Any, places: list[str]) -> None:
        self.model = model
        self.inputs = inputs
        self.rows = _rows(inputs)
        self.seen: Seen = {}
        with _Quietly(model, dict.fromkeys(places, _note(self.seen))):
            alone = call_with(model, _own(inputs))
        self.alone = dict(leaves(alone))
        self.constants = _constants(alone)

    def run(self, edits: list[Edits]) -> list[Any]:
        """The outputs under some edits, from one forward."""
        n = len(edits) + 2
        places = self._places(edits, n)
        with ExitStack() as stack:
            for one in _each_once(places):
                stack.enter_context(edit(self.model, one))
            output = self._call(n, [blocks for _, blocks in places])
        for place, blocks in places:
            if not blocks.calls and "/" in place:
                raise EditError(f"{place} was never edited: no such value came in that forward")
            blocks.complain()
        clean = [0, n - 1, *(i for i, one in enumerate(edits, start=1) if not one)]
        return self._taken_apart(output, n, clean)[1:-1]

    def _taken_apart(self, output: Any, n: int, clean: list[int]) -> list[Any]:
        """The output of each block; the clean ones must be as they were alone."""
        if _constants(output) != self.constants:
            raise EditError(_OTHER_NUMBERS)
        dims = {path: self._row_dim(path, tensor, n) for path, tensor in leaves(output)}
        parts = [rebuild(output, _cut(dims, i, n)) for i in range(n)]
        if not all(are_close(dict(leaves(parts[i])), self.alone) for i in clean):
            raise _mixed("the same inputs come out different when edited rows are beside them")
        return parts

    def _places(self, edits: list[Edits], n: int) -> "list[tuple[str, _Blocks]]":
        """Places, some more than once: where two are one value, each edit finds its own one after the other.

        Those inside a forward are there once, at the end: they have the order of the program.
        """
        places: list[tuple[str, _Blocks]] = []
        inside: dict[str, _Blocks] = {}
        for i, one in enumerate(edits, start=1):
            reached: dict[Any, int] = {}  # by module and role
            for site, change in one:
                place, value = _place(site), (id(site.module), site.address.role)
                if site.kind == "inner":
                    inside.setdefault(place, self._blocks(n)).add(i, site, change)
                    continue
                later = range(reached.get(value, 0), len(places))
                k = reached[value] = next((k for k in later if places[k][0] == place), len(places))
                if k == len(places):
                    places.append((place, self._blocks(n)))
                places[k][1].add(i, site, change)
        return [*places, *inside.items()]

    def _blocks(self, n: int) -> "_Blocks":
        return _Blocks(n, self.rows, self.seen)

    def check_two(self, edits: list[Changes], results: list[Any]) -> None:
        """Run alone the edit whose result is farthest from the clean one, and the one whose is farthest from that."""
        made = {i: dict(leaves(results[i])) for i, one in enumerate(edits) if one}
        if not made:
            return
        most = farthest(made, self.alone)
        for i in {most, farthest(made, made[most])}:
            got, numbers = self._run_alone(edits[i])
            if numbers != _constants(results[i]):
                raise EditError(_OTHER_NUMBERS)
            if not are_close(made[i], got) and are_close(self._run_alone(edits[i])[0], got):  # else it is random
                raise _mixed(f"edit {i} of the list comes out different when other rows are beside its own")

    def _run_alone(self, changes: Changes) -> tuple[Outputs, list[str]]:
        with _Alone(self.model, changes):
            output = call_with(self.model, _own(self.inputs))
        return dict(leaves(output)), _constants(output)

    def _call(self, n: int, places: "list[_Blocks]") -> Any:
        repeated = []

        def repeat(path: Path, tensor: Tensor) -> Tensor:
            if not tensor.dim() or len(tensor) != self.rows:
                return tensor.clone()
            repeated.append(f"{_name('input', path)} ({describe(tensor)})")
            return torch.cat([tensor] * n)

        inputs = _own(self.inputs, repeat)
        try:
            return call_with(self.model, inputs)
        except (TenterhookError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if any(blocks.is_busy for blocks in places):
                raise
            what = f"the model fails with {n} times the rows, for which the first dimension was taken of"
            hint = "give inputs that begin with a batch dimension, or run these edits one by one"
            raise EditError(f"{what} {', '.join(repeated)}: {error}; {hint}") from error

    def _row_dim(self, path: Path, tensor: Tensor, n: int) -> int:
        alone = self.alone.get(path)
        if alone is None or (dim := row_dim(tensor, alone, n)) is None:
            why = "is not per row"
        elif tells_order(alone, dim, self.rows) or is_repeated(tensor, alone, dim, n):
            return dim
        else:
            why = "has parts that are alike"
        what = f"the model's {_name('output', path)} ({describe(tensor)}) {why}"
        raise EditError(f"{what}, so it cannot be told apart by edit; run these edits one by one")


class _Blocks(Change):
    """The changes of several edits at one place, each for its own block of rows."""

    is_busy = is_measured = False

    def __init__(self, n: int, rows: int, seen: Seen) -> None:
        super().__init__("rows", torch.clone, {}, ready(random=True), takes_site=True)
        self.n = n
        self.rows = rows
        self.seen = seen
        self.edits: dict[int, Edits] = {}
        self.calls = 0
        self.made: set[tuple[int, Site]] = set()

    def add(self, i: int, site: Site, change: Change | Function) -> None:
        """One more change for the i-th block; those of one block are made in the order written."""
        self.edits.setdefault(i, []).append((site, change))

    def __call__(self, value: Tensor, site: Site | None = None) -> Tensor:
        assert site is not None and isinstance(site.address.call, int)
        self.calls += 1
        self.is_busy = True  # until it is left without an exception
        dim = self._row_dim(value, self.seen.get(str(site), []))
        out = value.clone()
        for i, changes in self.edits.items():
            block = block_of(value, dim, i, self.n)
            for asked, change in changes:
                if may_cover(asked.address.call, site.address.call):
                    self.made.add((i, asked))
                    new = change(block, site)
                    check_alike(block, new, site)
                    block = new
            block_of(out, dim, i, self.n).copy_(block)
        self.is_busy = False
        return out

    def _row_dim(self, value: Tensor, seen: list[Tensor]) -> int:
        alone = seen[0] if len(seen) == 1 else None
        if alone is None or (dim := row_dim(value, alone, self.n)) is None:
            why = f"its value is not per row ({describe(value)}): it is the same for all edits"
        elif not tells_order(alone, dim, self.rows):
            why = f"its rows ({describe(value)}) are alike, so it cannot be told which belong to which edit"
        elif alone.shape[dim] != self.rows and not close(block_of(value, dim, 0, self.n), alone):
            why = f"its rows ({describe(value)}) are not in the order of the inputs', or depend on one another"
        else:
            return dim
        raise EditError(f"{why}; edit it in a run of its own")

    def complain(self) -> None:
        """Warn of edits for a call that never came."""
        for i, changes in self.edits.items():
            for site, _ in changes:
                if self.calls and (i, site) not in self.made:
                    warnings.warn(f"{site} was never edited: that call never came", TenterhookWarning, stacklevel=4)


def _each_once(places: list[tuple[str, _Blocks]]) -> list[dict[str, _Blocks]]:
    """Dicts for sessions within each other, none with a place twice."""
    sessions: list[dict[str, _Blocks]] = [{}]
    for place, blocks in places:
        if place in sessions[-1]:
            sessions.append({})
        sessions[-1][place] = blocks
    return sessions


def _place(site: Site) -> str:
    """Its address for all calls."""
    return str(site.address._replace(call=None))


def _cut(dims: dict[Path, int], i: int, n: int) -> Callable[[Path, Tensor], Tensor]:
    return lambda path, tensor: block_of(tensor, dims[path], i, n)


def _constants(value: Any) -> list[str]:
    """What is in a structure beside tensors, but for objects that nobody can compare."""
    found: list[Any] = []
    rebuild(value, lambda _, tensor: tensor, opaque=lambda x: found.append(noted(x)))
    return [repr(x) for x in found if not isinstance(x, Omitted)]


def _mixed(what: str) -> EditError:
    return EditError(f"rows are not independent in this model: {what}; run these edits one by one")


def _name(what: str, path: Path) -> str:
    return what + "".join(f"[{key}]" for key in path)


def _note(seen: Seen) -> Callable[[Site, Any], None]:
    def look(value: Any, site: Site) -> None:
        seen[str(site)] = [tensor.clone() for _, tensor in leaves(value)]

    return look


def _own(inputs: Any, change: Callable[[Path, Tensor], Tensor] = lambda _, tensor: tensor.clone()) -> Any:
    """The inputs for one run, which may write into them."""
    known = {id(tensor): change(path, tensor) for path, tensor in leaves(inputs)}
    copied: dict[int, Any] = dict(known)
    try:
        own = copy.deepcopy(inputs, copied)
    except Exception as error:
        what = f"no copy of the inputs can be made for each run: {error}"
        raise EditError(f"{what}; run these edits one by one") from error
    if any(isinstance(part, Tensor) for key, part in copied.items() if key not in known):
        what = "an object among the inputs, such as a cache, holds tensors, whose rows sweep cannot repeat"
        raise EditError(f"{what}; run these edits one by one, each with a copy of it")
    return own


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
        if isinstance(module, BatchNorm) and (module.training or module.running_mean is None):
            what = "normalises over the rows of the batch, so edited rows would change the others"
            raise EditError(f"{name} ({type(module).__name__}) {what}; use model.eval()")
        if isinstance(module, Dropout) and module.training and module.p > 0:
            raise EditError(f"{name} (Dropout) is in training mode, so no two runs are alike; use model.eval()")
