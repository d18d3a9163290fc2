"""Both models run in turn, once: the values of both, compared in the order in which b makes them."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.comparing.conditions import Condition
from tenterhook.comparing.following import Following, Found, Layout
from tenterhook.comparing.side import Side
from tenterhook.comparing.source import Event, Kept, Key, Live, Source, Stopped
from tenterhook.comparing.states import put, random_cells, taken
from tenterhook.values.inputs import call_with
from tenterhook.values.tree import leaves, rebuild_live
from tenterhook.verbs.undisturbed import as_before

Modules = Mapping[str, nn.Module]  # by their name in a
Loss = Callable[[Any], Tensor]
Parameter = tuple[str, Tensor, Tensor]  # the name, that of a and that of b


@dataclass
class Two:
    """The two, and what they are given."""

    a: Modules | None  # None: a is values from a file
    b: Modules
    inputs_a: Any
    inputs_b: Any
    condition: Condition
    layouts: Mapping[tuple[str, str], Layout] = field(default_factory=dict)
    kept: Mapping[Key, Any] = field(default_factory=dict)
    parameters: Sequence[Parameter] = ()  # whose gradients are compared


@dataclass
class Outcome:
    """What came of one run."""

    found: list[Found]
    only_a: list[Key]
    only_b: list[Key]
    failed: tuple[BaseException | None, BaseException | None]
    went: tuple[list[str], list[str]]  # the calls that the failures ended, the innermost first


def run(
    two: Two,
    *,
    force: bool = False,
    inner: Sequence[str] = (),
    loss: Loss | None = None,
    listener: Callable[..., Following] = Following,
) -> Outcome:
    """Run both. `force`: b goes on with the values of a. `inner`: the modules inside whose forwards to look."""
    models = [modules["."] for modules in (two.a, two.b) if modules is not None]
    condition, is_graded = two.condition, loss is not None
    random = random_cells(any(m.training for model in models for m in model.modules()))
    cells = [*random, *(cell for cell, _ in condition.cells)]
    with as_before(*models), torch.set_grad_enabled(is_graded), _one_thread(is_graded):
        start = taken(cells)
        sides: list[Side] = []
        source: Source
        if two.a is None:
            source = Kept(two.kept)
        else:
            changes = force and is_graded  # what is the gradient of a place is then the same for both
            source = Live(lambda live: _run_a(two, live, sides, inner, loss, changes), cells, start)
        following = listener(
            source,
            force=force,
            layouts=two.layouts,
            cells=random if condition.same_random else (),
            view=condition.view,
            coarse=condition.eps,
        )
        side = Side(two.b, following.came, changes=force)
        failed: BaseException | None = None
        only_a: list[Key] = []
        try:
            for cell, value in condition.cells:
                cell.set(value)
            with condition.around():
                side.run(lambda: _call(two.b["."], two.inputs_b, loss, 1, two, side), inner, is_graded)
            only_a = list(source.left())
        except Stopped as error:
            failed = error
        except Exception as error:
            failed = error
            source.left()  # whether a fails, too
        finally:
            source.close()
            put(cells, start)
        went = sides[0].went if sides else []
        return Outcome(following.found, only_a, following.only_b, (source.error, failed), (went, side.went))


def _run_a(two: Two, live: Live, sides: list[Side], inner: Sequence[str], loss: Loss | None, changes: bool) -> None:
    assert two.a is not None
    side = Side(two.a, live.tell, changes=changes)
    sides.append(side)
    with _one_thread(loss is not None):
        side.run(lambda: _call(two.a["."], two.inputs_a, loss, 0, two, side), inner, loss is not None)  # type: ignore[index]


def _call(model: nn.Module, inputs: Any, loss: Loss | None, which: int, two: Two, side: Side) -> None:
    given = rebuild_live(inputs, lambda _, tensor: tensor.clone())
    made = call_with(model, given)
    if loss is None:
        return
    all_of_it = [*model.parameters(), *(tensor for _, tensor in leaves(given))]  # a pass goes only where it is asked to
    wanted = {id(tensor): tensor for tensor in all_of_it if tensor.requires_grad}
    grads = dict(zip(wanted, torch.autograd.grad(loss(made), [*wanted.values()], allow_unused=True), strict=True))
    for name, *pair in two.parameters:
        if (grad := grads.get(id(pair[which]))) is not None:
            side.tell(Event(Key(name, "grad"), grad.detach(), owner=name.rpartition(".")[0] or "."))


def _one_thread(is_graded: bool) -> Any:
    """Have a backward run in the thread that calls it, also on a GPU: the thread of autograd would wait for itself."""
    return torch.autograd.set_multithreading_enabled(False) if is_graded else contextlib.nullcontext()
