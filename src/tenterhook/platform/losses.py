"""torch's loss functions: their calls are told of, and which of their results a loss is made of.

The function stays the same object and only runs other code, so whoever has it under another name is heard, too.

Relies on: they are plain functions in `torch.nn.functional`, whose `__code__` can be exchanged; torch.compile calls
them as they are while it traces, with `torch.compiler.is_compiling()` true, and has guards on their `__code__` as it is
when it is done; `torch.jit.script` and `inspect` find a source by the file and the line that the code names, and
`inspect.signature` asks for `__signature__`; nodes of a graph have `metadata` and a name such as `SigmoidBackward0`,
and those of leaves a `variable`.
"""

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from tenterhook.platform.engine import node_of

# By what their targets are: classes, numbers from 0 to 1, values, or something else.
FAMILIES = {
    **dict.fromkeys(("cross_entropy", "nll_loss"), "classes"),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits"), "binary"),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), "values"),
    **dict.fromkeys(("kl_div", "ctc_loss", "gaussian_nll_loss", "poisson_nll_loss", "multi_margin_loss"), "other"),
    **dict.fromkeys(("triplet_margin_loss", "cosine_embedding_loss", "multilabel_soft_margin_loss"), "other"),
    **dict.fromkeys(("margin_ranking_loss", "hinge_embedding_loss", "soft_margin_loss"), "other"),
}
_MOST = 2000  # nodes to look at
_SHAPES = ("View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Select", "Slice", "Transpose", "Permute", "ToCopy")


def _stub(*args: Any, _told: Any, **kwargs: Any) -> Any:
    return _told(*args, **kwargs)


class ObservedLoss:
    """A loss function that is called by way of `around(function, *args, **kwargs)`, until it is removed.

    Where torch.compile traces it, it is removed at once: later, what was compiled would have to be made again.
    """

    def __init__(self, name: str, around: Callable[..., Any]) -> None:
        self._function = function = getattr(torch.nn.functional, name)
        self._before = own, defaults = function.__code__, function.__kwdefaults__
        inner = FunctionType(own, function.__globals__, name, function.__defaults__)
        inner.__kwdefaults__ = defaults

        def told(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                self.remove()
                return inner(*args, **kwargs)
            return around(inner, *args, **kwargs)

        function.__signature__ = inspect.signature(function)
        function.__kwdefaults__ = {"_told": told}
        where = {"co_filename": own.co_filename, "co_firstlineno": own.co_firstlineno}
        named = {"co_name": own.co_name, "co_qualname": own.co_qualname}
        self._code = function.__code__ = _stub.__code__.replace(**where, **named)

    def remove(self) -> None:
        """Have it run its own code, unless somebody else has exchanged that since."""
        function = self._function
        if function.__code__ is self._code:
            function.__code__, function.__kwdefaults__ = self._before
            del function.__signature__


def can_be_observed(name: str) -> bool:
    """Whether a loss function is torch's own still."""
    function = getattr(torch.nn.functional, name, None)
    return isinstance(function, FunctionType) and not function.__closure__ and function.__code__.co_name == name


def note_term(output: Tensor, key: str, term: object) -> bool:
    """Have the graph know that this is a term of a loss; False where it knew, or there is none."""
    node: Any = output.grad_fn
    if node is None or key in node.metadata:
        return False
    node.metadata[key] = term
    return True


def made_by(tensor: Tensor) -> str:
    """The name of the operation that gave a tensor, whatever was done to its shape since; empty for a leaf."""
    node: Any = tensor.grad_fn
    while node is not None and node.name().startswith(_SHAPES) and node.next_functions:
        node = node.next_functions[0][0]
    return "" if node is None else node.name()


def terms_of(outputs: Sequence[Any], key: str) -> tuple[list[Any], bool]:
    """The terms that a loss is made of, and whether anything else that is trained is in it."""
    nodes: list[Any] = [node for one in outputs if (node := node_of(one)) is not None]
    seen, found, more = set(nodes), [], False
    for node in nodes:  # which grows meanwhile
        if key in node.metadata:
            found.append(node.metadata[key])
            continue
        more = more or hasattr(node, "variable") or len(nodes) > _MOST
        for one, _ in node.next_functions if len(nodes) <= _MOST else ():
            if one is not None and one not in seen:
                seen.add(one)
                nodes.append(one)
    return found, more
