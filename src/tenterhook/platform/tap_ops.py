"""Operations by which compiled code hands values and gradients to Python while it runs.

    value(leaves, tap, outline)                   a value comes
    token(tap, outline, graded, grads) -> call    a value comes whose gradient is waited for; `call` tells which it is
    gradient(grad, call, tap, outline, leaf)      its gradient comes
    new_gradient(grad, call, tap, outline, leaf)  the same, and the model goes on with what is returned
    edit(leaves, tap, outline, graded)            a value comes, and the model goes on with others of the same shapes
    inside(leaves, call, tap, site, outline, …)   a variable is assigned in a forward, whose call began with `token`
    own(tensor)                                   a copy of an input, which nobody may write into

`graded` are the leaves that have a gradient; `grads` is whether gradients are on.

Compiled code holds only numbers: which tap it is, how its value is made of tensors (the outline), which leaf of it
comes. Who receives them is looked up when it runs, so that the code can be used again by later sessions.

Relies on: `_register_effectful_op` and `_EffectType` of `torch._higher_order_ops.effects`, by which such an operation
is neither left out as dead code nor moved past another one; `_ForceDispatchKeyGuard` and the key sets of this thread,
without which nothing that an operation computes would have a graph.
"""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.multiprocessing.reductions import StorageWeakRef


class Receiver(Protocol):
    """Who is told of what comes."""

    def value(self, leaves: Sequence[Tensor], tap: int, outline: int) -> None: ...

    def token(self, tap: int, outline: int, graded: Sequence[int], grads: bool) -> int: ...

    def gradient(self, grad: Tensor, call: int, tap: int, outline: int, leaf: int) -> None: ...

    def new_gradient(self, grad: Tensor, call: int, tap: int, outline: int, leaf: int) -> Tensor | None: ...

    def inside(
        self,
        leaves: Sequence[Tensor],
        call: int,
        tap: int,
        site: int,
        outline: int,
        graded: Sequence[int],
        grads: bool,
    ) -> None: ...

    def edit(self, leaves: Sequence[Tensor], tap: int, outline: int) -> Sequence[Tensor] | None: ...


receiver: Receiver = None  # type: ignore[assignment]  # set by who imports this


def _value(leaves: list[Tensor], tap: int, outline: int) -> None:
    receiver.value(leaves, tap, outline)


def _inside(leaves: list[Tensor], call: Tensor, *which: Any) -> None:
    receiver.inside(leaves, int(call), *which)


def _token(tap: int, outline: int, graded: list[int], grads: bool) -> Tensor:
    return torch.tensor(receiver.token(tap, outline, graded, grads), dtype=torch.int64, device="cpu")


def _gradient(grad: Tensor, call: Tensor, tap: int, outline: int, leaf: int) -> None:
    receiver.gradient(grad, int(call), tap, outline, leaf)


def _new_gradient(grad: Tensor, call: Tensor, tap: int, outline: int, leaf: int) -> Tensor:
    return _own(receiver.new_gradient(grad, int(call), tap, outline, leaf), grad)


def _own(new: Tensor | None, old: Tensor) -> Tensor:
    """A new tensor, with the layout that the compiler expects."""
    return torch.empty_like(old).copy_(old if new is None else new.detach())


def _edit(leaves: list[Tensor], tap: int, outline: int, graded: list[int]) -> list[Tensor]:
    with _with_autograd(), torch.set_grad_enabled(bool(graded)):
        inner = [leaf.detach().requires_grad_(i in graded) for i, leaf in enumerate(leaves)]
        new = receiver.edit(inner, tap, outline)
    token = torch.tensor(next(_edits), dtype=torch.int64, device="cpu")
    if new is not None and graded:
        _keep_graph(token, [inner[i] for i in graded], [new[i] for i in graded])
    return [*(_own(None if new is None else new[i], leaf) for i, leaf in enumerate(leaves)), token]


def _edited_like(leaves: list[Tensor], tap: int, outline: int, graded: list[int]) -> list[Tensor]:
    return [*map(torch.empty_like, leaves), _no_token()]


def _edit_gradient(grads: list[Tensor], edit: Tensor) -> list[Tensor]:
    graph = _graphs.get(int(edit))
    if graph is None:  # nothing was edited
        return [grad.clone() for grad in grads]
    with _with_autograd():
        pairs = [(new, grad) for new, grad in zip(graph.new, grads, strict=True) if new.requires_grad]
        outputs = [new for new, _ in pairs]
        given = [grad for _, grad in pairs]
        found: Sequence[Any] = [None] * len(grads)
        if outputs:
            found = torch.autograd.grad(outputs, graph.given, given, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(grad) if own is None else _own(own, grad) for own, grad in zip(found, grads, strict=True)]


class _Graph(NamedTuple):
    """What an edit computed, for its backward pass."""

    token: StorageWeakRef  # which the compiled code keeps until nobody can ask for that any more
    given: list[Tensor]
    new: list[Tensor]


_KINDS = ("AutogradCPU", "AutogradCUDA", "AutogradXPU", "AutogradMPS", "AutogradOther", "ADInplaceOrView")
_AUTOGRAD = [getattr(torch._C.DispatchKey, kind) for kind in _KINDS]
_edits = itertools.count()
_graphs: dict[int, _Graph] = {}


def _keep_graph(token: Tensor, given: list[Tensor], new: list[Tensor]) -> None:
    for number in [number for number, graph in list(_graphs.items()) if graph.token.expired()]:
        _graphs.pop(number, None)
    _graphs[int(token)] = _Graph(StorageWeakRef(token.untyped_storage()), given, new)


def _with_autograd() -> AbstractContextManager[Any]:
    """Within it, what is computed in an operation has a graph."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _no_token(*_: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _nothing(*_: Any) -> None:
    return None


def _like(grad: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(grad)


def _each_like(grads: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(grad) for grad in grads]


_OPERATIONS = {
    "value(Tensor[] leaves, int tap, int outline) -> ()": (_value, _nothing),
    "token(int tap, int outline, int[] graded, bool grads) -> Tensor": (_token, _no_token),
    "inside(Tensor[] leaves, Tensor call, int tap, int site, int outline, int[] graded, bool grads) -> ()": (
        _inside,
        _nothing,
    ),
    "gradient(Tensor grad, Tensor call, int tap, int outline, int leaf) -> ()": (_gradient, _nothing),
    "new_gradient(Tensor grad, Tensor call, int tap, int outline, int leaf) -> Tensor": (_new_gradient, _like),
    "edit(Tensor[] leaves, int tap, int outline, int[] graded) -> Tensor[]": (_edit, _edited_like),
    "edit_gradient(Tensor[] grads, Tensor edit) -> Tensor[]": (_edit_gradient, _each_like),
}
# CUDA graphs would replay the kernels around such an operation, and not the Python in it.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
_library = torch.library.Library("tenterhook", "FRAGMENT")


def _define(schema: str, real: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    _library.impl(name, real, "CompositeExplicitAutograd")
    _library._register_fake(name, fake)
    _register_effectful_op(getattr(torch.ops.tenterhook, name).default, _EffectType.ORDERED)


_library.define("own(Tensor tensor) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("own", torch.clone, "CompositeImplicitAutograd")
for _schema, _kernels in _OPERATIONS.items():
    _define(_schema, *_kernels)


def _note_edit(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    leaves, _, _, ctx.graded = inputs
    ctx.leaves = len(leaves)
    ctx.likes = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
    ctx.save_for_backward(output[-1])


def _gradient_of_edit(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    def given(i: int) -> Tensor:
        shape, dtype, device = ctx.likes[i]
        grad = grads[i]
        return torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad

    (token,) = ctx.saved_tensors
    made = torch.ops.tenterhook.edit_gradient([given(i) for i in ctx.graded], token)
    of_leaf = dict(zip(ctx.graded, made, strict=True))
    return [of_leaf.get(i) for i in range(ctx.leaves)], None, None, None


torch.library.register_autograd("tenterhook::edit", _gradient_of_edit, setup_context=_note_edit, lib=_library)
