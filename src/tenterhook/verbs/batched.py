"""Many edits in one forward: the inputs many times over, and for each edit a block of rows of its own."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.addresses.grammar import may_cover
from tenterhook.addresses.sites import Site
from tenterhook.changes.change import Change, as_change, ready
from tenterhook.changes.function import Function
from tenterhook.errors import EditError, TenterhookError
from tenterhook.values.inputs import call_with
from tenterhook.values.tree import Omitted, Path, describe, leaves, noted, rebuild
from tenterhook.verbs.edit import Changes, edit
from tenterhook.verbs.observe import observe
from tenterhook.verbs.replace import check_alike
from tenterhook.verbs.rows import Outputs, are_close, block_of, close, distances, is_repeated, row_dim, tells_order

Seen = dict[str, list[Tensor]]  # by address: what came there in the run alone
Edits = list[tuple[Site, Change | Function]]  # those of one of the user's dicts
Silent = tuple[int, Any, str]  # which edit of a batch, the selector of what never came, and why it did not
OTHER_NUMBERS = (
    "the model's output has numbers that are no tensors, and are others with more rows or another edit,"
    " so they cannot be told apart by edit; run these edits one by one"
)


class CannotTell(EditError):
    """Rows that are alike, so that the values themselves do not show which belong to which edit."""


class _Quietly(observe):
    """Whatever stays silent here will be told of where it should have been edited."""

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._session.__exit__(kind, *rest)


class _Edit(edit):
    """Says itself what stayed silent, since whose edit that is only the batch knows."""

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._session.__exit__(kind, *rest)

    def silent(self) -> Iterator[tuple[Any, str]]:
        """The selectors that were never edited, and why."""
        for selector, taps in self._groups:
            if not any(one.fired for tap in taps for one in tap.each()):
                yield selector, self._session.why_silent(taps[0].each()[0])


class Batch:
    """The inputs many times over; the first and last block of rows are clean, and must come out as they did alone."""

    def __init__(self, model: nn.Module, inputs: Any, sites: Mapping[Any, list[Site]]) -> None:
        self.model = model
        self.inputs = inputs
        self.silent: list[Silent] = []  # of the last run
        self._sites = sites  # by selector
        self._rows = _rows(inputs)
        self._seen: Seen = {}
        places = [_place(site) for found in sites.values() for site in found]
        with _Quietly(model, dict.fromkeys(places, _note(self._seen))):
            alone = call_with(model, own(inputs))
        self.alone = dict(leaves(alone))
        self._constants = constants(alone)

    def run(self, edits: list[Changes]) -> list[Any]:
        """The outputs under some edits, from one forward."""
        n = len(edits) + 2
        made = [
            [(site, as_change(change)) for selector, change in one.items() for site in self._sites[selector]]
            for one in edits
        ]
        places = self._places(made, n)
        sessions = [_Edit(self.model, one) for one in _each_once(places)]
        with ExitStack() as stack:
            for session in sessions:
                stack.enter_context(session)
            output = self._call(n, [blocks for _, blocks in places])
        for place, blocks in places:
            if blocks.is_busy:
                raise EditError(f"{place}: a change failed there, and the model caught the exception")
        self.silent = list(self._silent(edits, places, dict(one for session in sessions for one in session.silent())))
        clean = [0, n - 1, *(i for i, one in enumerate(edits, start=1) if not one)]
        return self._taken_apart(output, n, clean)[1:-1]

    def run_alone(self, changes: Changes) -> Any:
        """The output under one edit, in a run of its own."""
        session = _Edit(self.model, changes)
        with session:
            output = call_with(self.model, own(self.inputs))
        self.silent = [(0, selector, why) for selector, why in session.silent()]
        return rebuild(output, lambda _, tensor: tensor)

    def _silent(
        self, edits: list[Changes], places: "list[tuple[str, _Blocks]]", reasons: dict[str, str]
    ) -> Iterator[Silent]:
        made = {one for _, blocks in places for one in blocks.made}
        for i, one in enumerate(edits):
            for selector in one:
                sites = self._sites[selector]
                if not any((i + 1, site) in made for site in sites):
                    yield i, selector, reasons.get(_place(sites[0]), "that call never came")

    def _taken_apart(self, output: Any, n: int, clean: list[int]) -> list[Any]:
        """The output of each block; the clean ones must be as they were alone."""
        if constants(output) != self._constants:
            raise EditError(OTHER_NUMBERS)
        dims = {path: self._row_dim(path, tensor, n) for path, tensor in leaves(output)}
        parts = [rebuild(output, _cut(dims, i, n)) for i in range(n)]
        if not all(are_close(dict(leaves(parts[i])), self.alone) for i in clean):
            raise mixed("the same inputs come out different when edited rows are beside them")
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
        return _Blocks(n, self._rows, self._seen)

    def _call(self, n: int, places: "list[_Blocks]") -> Any:
        repeated = []

        def repeat(path: Path, tensor: Tensor) -> Tensor:
            if not tensor.dim() or len(tensor) != self._rows:
                return tensor.clone()
            repeated.append(f"{_name('input', path)} ({describe(tensor)})")
            return torch.cat([tensor] * n)

        inputs = own(self.inputs, repeat)
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
        what = f"the model's {_name('output', path)} ({describe(tensor)})"
        if alone is None or (dim := row_dim(tensor, alone, n)) is None:
            raise EditError(f"{what} is not per row, so it cannot be told apart by edit; run these edits one by one")
        if tells_order(alone, dim, self._rows) or is_repeated(tensor, alone, dim, n):
            return dim
        raise CannotTell(f"{what} has parts that are alike")


class _Blocks(Change):
    """The changes of several edits at one place, each for its own block of rows."""

    is_busy = is_measured = False

    def __init__(self, n: int, rows: int, seen: Seen) -> None:
        super().__init__("rows", torch.clone, {}, ready(random=True), takes_site=True)
        self.n = n
        self.rows = rows
        self.seen = seen
        self.edits: dict[int, Edits] = {}
        self.made: set[tuple[int, Site]] = set()

    def add(self, i: int, site: Site, change: Change | Function) -> None:
        """One more change for the i-th block; those of one block are made in the order written."""
        self.edits.setdefault(i, []).append((site, change))

    def __call__(self, value: Tensor, site: Site | None = None) -> Tensor:
        assert site is not None and isinstance(site.address.call, int)
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
            raise CannotTell(f"its rows ({describe(value)}) are alike")
        elif alone.shape[dim] != self.rows and not close(block_of(value, dim, 0, self.n), alone):
            why = f"its rows ({describe(value)}) are not in the order of the inputs', or depend on one another"
        else:
            return dim
        raise EditError(f"{why}; edit it in a run of its own")


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


def constants(value: Any) -> list[str]:
    """What is in a structure beside tensors, but for objects that nobody can compare."""
    found: list[Any] = []
    rebuild(value, lambda _, tensor: tensor, opaque=lambda x: found.append(noted(x)))
    return [repr(x) for x in found if not isinstance(x, Omitted)]


def mixed(what: str) -> EditError:
    """The error that rows are not independent."""
    return EditError(f"rows are not independent in this model: {what}; run these edits one by one")


def _name(what: str, path: Path) -> str:
    return what + "".join(f"[{key}]" for key in path)


def _note(seen: Seen) -> Callable[[Any, Site], None]:
    def look(value: Any, site: Site) -> None:
        seen[str(site)] = [tensor.clone() for _, tensor in leaves(value)]

    return look


def own(inputs: Any, change: Callable[[Path, Tensor], Tensor] = lambda _, tensor: tensor.clone()) -> Any:
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


class Sample:
    """Of all outputs of a sweep the few that are farthest apart, to be compared with runs of their own."""

    def __init__(self, batch: Batch, most: int, keeps: bool) -> None:
        self._batch, self._most = batch, most
        self._keeps = keeps  # whether the outputs are kept in any case, so that no copies are needed
        self._edits: dict[int, Changes] = {}
        self._made: dict[int, Outputs] = {}
        self._numbers: dict[int, list[str]] = {}

    def add(self, first: int, edits: list[Changes], outputs: list[Any]) -> None:
        """Some edits, the first of which has this number, and what came out."""
        new = {i: (one, out) for i, (one, out) in enumerate(zip(edits, outputs, strict=True), first) if one}
        made = {**self._made, **{i: dict(leaves(out)) for i, (_, out) in new.items()}}
        self._edits.update((i, one) for i, (one, _) in new.items())
        self._numbers.update((i, constants(out)) for i, (_, out) in new.items())
        chosen = self._chosen(made)
        self._edits = {i: self._edits[i] for i in chosen}
        self._numbers = {i: self._numbers[i] for i in chosen}
        self._made = {i: made[i] if i in self._made or self._keeps else _copied(made[i]) for i in chosen}

    def _chosen(self, made: dict[int, Outputs]) -> list[int]:
        """The one that is farthest from the clean one, then each time the one that is farthest from these."""
        if len(made) <= self._most:
            return list(made)
        numbers, chosen = list(made), list[int]()
        apart = distances(made, self._batch.alone)
        while len(chosen) < self._most:
            chosen.append(numbers[int(apart.argmax())])
            nearer = distances(made, made[chosen[-1]])
            apart = nearer if len(chosen) == 1 else torch.minimum(apart, nearer)
            apart[[numbers.index(i) for i in chosen]] = -1.0
        return chosen

    def check(self) -> None:
        """Run them alone."""
        for i in sorted(self._edits):
            again = self._batch.run_alone(self._edits[i])
            if constants(again) != self._numbers[i]:
                raise EditError(OTHER_NUMBERS)
            got = dict(leaves(again))
            if are_close(self._made[i], got):
                continue
            if are_close(dict(leaves(self._batch.run_alone(self._edits[i]))), got):  # else it is random
                raise mixed(f"edit {i} of the list comes out different when other rows are beside its own")


def _copied(outputs: Outputs) -> Outputs:
    """Without the graph, and without the memory of the whole batch."""
    return {path: tensor.detach().clone() for path, tensor in outputs.items()}
