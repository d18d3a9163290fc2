"""sweep: many counterfactuals in one batched forward, each edit acting on its own rows."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

from torch import nn

from tenterhook.addresses.grammar import known_when_made
from tenterhook.addresses.modules import walk
from tenterhook.addresses.sites import Site, check_model, resolve
from tenterhook.changes.change import as_change
from tenterhook.errors import AddressError, EditError, TenterhookWarning
from tenterhook.platform.layers import BatchNorm, Dropout
from tenterhook.verbs.batched import Batch, CannotTell, Sample, Silent
from tenterhook.verbs.edit import Changes
from tenterhook.verbs.scores import Scores, measured
from tenterhook.verbs.swept import Swept

_WITH_METRIC = 32  # edits in one forward, where outputs are not kept
Metric = Callable[[Any], Any]


@overload
def sweep(
    model: nn.Module,
    inputs: Any,
    edits: Iterable[Changes],
    *,
    metric: Metric,
    at_once: int | None = None,
    strict: bool = True,
    checks: int = 2,
) -> Scores: ...


@overload
def sweep(
    model: nn.Module,
    inputs: Any,
    edits: Iterable[Changes],
    *,
    metric: None = None,
    at_once: int | None = None,
    strict: bool = True,
    checks: int = 2,
) -> list[Any]: ...


def sweep(
    model: nn.Module,
    inputs: Any,
    edits: Iterable[Changes],
    *,
    metric: Metric | None = None,
    at_once: int | None = None,
    strict: bool = True,
    checks: int = 2,
) -> list[Any] | Scores:
    """What the model makes of the inputs under each of many edits, in one batched forward for all of them.

        heads = [{"attn": at(head(h, of=12), zero())} for h in range(12)]
        for output in sweep(model, x, [{}, *heads]): ...            # {} changes nothing: the clean run
        sweep(model, x, heads, metric=lambda out: out[:, 3].mean()).values          # 12 numbers, and nothing else kept

    The inputs (an argument, a tuple of them, or a mapping of keyword arguments) are repeated once for each edit, and
    each acts on its own rows only: tensors with as many rows as the first one are repeated. `metric` makes a number or
    a small tensor of each output as it comes, in forwards of 32 edits; `at_once` says how many go into one forward.
    An edit whose address was never reached is an EditError, with `strict=False` a warning. It is an error where rows
    depend on one another, as under BatchNorm in training mode: the inputs run once alone, and must come out alike
    before and after the edited rows; and `checks` of the edits, those whose results are farthest apart, run alone.
    """
    check_model(model, "sweep")
    given = _checked(edits, at_once, metric)
    listed: list[Changes] = [{selector: as_change(change) for selector, change in one.items()} for one in given]
    _check_rows_are_independent(model)
    sites = {selector: resolve(model, selector) for one in listed for selector in one}
    _check_can_sweep([site for found in sites.values() for site in found])
    size = at_once or (max(len(listed), 1) if metric is None else _WITH_METRIC)
    batch = Batch(model, inputs, sites)
    sample = Sample(batch, checks, keeps=metric is None)
    results: list[Any] = []
    for first in range(0, len(listed), size):
        some = listed[first : first + size]
        outputs, silent = _outputs(batch, some, first, sample)
        _tell(silent, first, strict)
        results += outputs if metric is None else measured(metric, outputs, some, first)
        del outputs
    sample.check()
    return Swept(results, given, batch.alone) if metric is None else Scores(listed, results, metric)


def _outputs(batch: Batch, edits: list[Changes], first: int, sample: Sample) -> tuple[list[Any], list[Silent]]:
    """The outputs under some edits, and which of these stayed silent."""
    try:
        outputs = batch.run(edits)
    except CannotTell:  # that lies in these inputs, not in the model: they run one by one, as all of them could
        outputs, silent = [], []
        for i, one in enumerate(edits):
            outputs.append(batch.run_alone(one))
            silent += [(i, selector, why) for _, selector, why in batch.silent]
        return outputs, silent
    silent = batch.silent
    sample.add(first, edits, outputs)
    return outputs, silent


def _tell(silent: list[Silent], first: int, strict: bool) -> None:
    """Raise or warn, if an address was never edited."""
    lines: dict[tuple[str, str], list[str]] = {}
    for i, selector, why in silent:
        lines.setdefault((str(selector), why), []).append(str(first + i))
    if not lines:
        return
    told = [
        f"{selector} was never edited: {why} (edit{'s' * (len(which) > 1)} {', '.join(which)} of the list)"
        for (selector, why), which in lines.items()
    ]
    if strict:
        raise EditError("\n  ".join([*told, "strict=False makes this a warning"]))
    for line in told:
        warnings.warn(line, TenterhookWarning, stacklevel=3)


def _checked(edits: Any, at_once: int | None, metric: Any) -> list[Changes]:
    listed = [edits] if isinstance(edits, Mapping) else list(edits)
    if isinstance(edits, Mapping) or not all(isinstance(one, Mapping) for one in listed):
        raise TypeError("sweep needs a list of edits, each a dict of selector: change")
    if at_once is not None and at_once < 1:
        raise ValueError(f"at_once is how many edits go into one forward, got {at_once}")
    if metric is not None and not callable(metric):
        raise TypeError(f"metric is a function of the model's output, got {metric!r}")
    return listed


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
