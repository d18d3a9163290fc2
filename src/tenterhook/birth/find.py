"""`find_nonfinite` and `find_first`: the birth of a value in code of the user's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from tenterhook.birth.birth import Birth, birth_of
from tenterhook.birth.made import FINITE, Kinds, Made
from tenterhook.birth.trace import Trace
from tenterhook.errors import NonFiniteError
from tenterhook.platform.compiler import allow_compiled, force_eager
from tenterhook.values.tree import leaves


@contextmanager
def find_nonfinite(model: nn.Module) -> Iterator[None]:
    """Run a block slowly, and raise `NonFiniteError` if a gradient, the loss or an output in it is not finite.

        with find_nonfinite(model):
            loss(model(x), y).backward()

    The error names the operation that made the first such value, its line, and why, as far as its inputs tell.
    Infinities that never reach these, such as those of a mask before a softmax, raise nothing.
    """
    before = {id(p): (p.grad, None if p.grad is None else p.grad._version) for p in model.parameters()}
    outputs: list[Any] = []
    trace = Trace([("", model)])
    with tracing(trace, model, outputs):
        yield
    grads = [
        p.grad for p in model.parameters() if p.grad is not None and before.get(id(p)) != (p.grad, p.grad._version)
    ]
    found = worst_of(trace, grads, outputs)
    if found is not None:
        raise NonFiniteError(birth_of(found))


def find_first(model: nn.Module, inputs: Any, condition: Callable[[Tensor], Any]) -> Birth | None:
    """The first operation of a forward that makes a value for which `condition` is true; None where there is none.

        find_first(model, x, lambda v: v.abs().max() > 1e4)

    `inputs` is a tensor, a tuple of arguments or a dict of them. Floating-point values are looked at, those that are
    given before those that are made.
    """
    args, kwargs = (
        ((), inputs) if isinstance(inputs, dict) else (inputs if isinstance(inputs, tuple) else (inputs,), {})
    )
    trace = Trace([("", model)], lambda value: Kinds(nan=True) if condition(value) else FINITE)
    with tracing(trace, model, []):
        model(*args, **kwargs)
    return None if trace.first is None else birth_of(trace.first, "the first such value")


@contextmanager
def tracing(trace: Trace, model: nn.Module, outputs: list[Any]) -> Iterator[None]:
    """Trace what runs, eagerly; inputs of the model get names, and its outputs are noted."""

    def name_inputs(module: nn.Module, args: Any, kwargs: Any) -> None:
        for i, one in enumerate(args):
            for _, value in leaves(one):
                trace.name(value, f"input {i}")
        for name, one in kwargs.items():
            for _, value in leaves(one):
                trace.name(value, f"input {name}")

    def note_output(module: nn.Module, args: Any, output: Any) -> None:
        outputs[:] = [one for _, one in leaves(output)]

    handles = [
        model.register_forward_pre_hook(name_inputs, with_kwargs=True, prepend=True),
        model.register_forward_hook(note_output),
    ]
    force_eager(trace)
    try:
        with trace:
            yield
    finally:
        allow_compiled(trace)
        for handle in handles:
            handle.remove()


def worst_of(trace: Trace, gradients: list[Tensor], outputs: list[Any]) -> Made | None:
    """What made the earliest of what is bad at the end: gradients, the last value of the forward, and outputs."""
    found = [trace.made(one) for one in (*gradients, *outputs)]
    bad = [made for made in (*found, trace.last) if made is not None and not made.origin().on_purpose]
    return min(bad, key=lambda made: made.origin().number, default=None)
