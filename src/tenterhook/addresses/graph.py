"""What has addresses and is no module: the nodes of an autograd graph, the variables of a function.

    capture(loss, "grad(0.1)", "grad(**<AddmmBackward0>:in)")

`.` is the node that made the tensor, `0.1` the second of what made its first input, and so on, as in
`next_functions`. A node has gradients only: of its outputs (`grad(0)`), as they come to it, and of its inputs
(`grad(0:in)`), as they leave it.
"""

import functools
from collections.abc import Iterator
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from tenterhook.addresses.grammar import parse
from tenterhook.addresses.sites import Site, check_inner, check_model
from tenterhook.errors import AddressError, close_matches
from tenterhook.platform.frames import all_variables, first_argument


class Step:
    """A node that can be referred to weakly, as torch's own cannot."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.name = node.name().rpartition("::")[2]  # torch::autograd::AccumulateGrad


class Graph:
    """The nodes behind a tensor, by name; of several ways to a node the first counts."""

    def __init__(self, tensor: Tensor | Node) -> None:
        root = tensor.grad_fn if isinstance(tensor, Tensor) else tensor
        if root is None:
            raise TypeError("this tensor was not computed from others (its grad_fn is None), so it has no graph")
        self.steps = {name: Step(node) for name, node in _walk(root)}

    def modules(self) -> Iterator[Any]:
        """For a session, which looks through a model's modules: a graph has none."""
        return iter(())

    def resolve(self, text: Any) -> list[Site]:
        """The sites that an address means, or an AddressError that helps."""
        if not isinstance(text, str):
            raise TypeError(f"in a graph a selector is an address such as 'grad(.)' or 'grad(0.1:in)', got {text!r}")
        address = parse(text)
        if not address.grad:
            raise AddressError(f"{text}: a graph node has no value, only gradients; ask for grad({text})")
        if address.tail:
            raise AddressError(f"{text}: a graph node has no parts, so nothing comes after its class")
        is_named = address.path_filter()
        found = [
            Site(address.with_name(name), step, "node", address.is_glob)
            for name, step in self.steps.items()
            if is_named(name) and address.cls in (None, step.name)
        ]
        if not found:
            near = close_matches(address.cls or address.name, [step.name for step in self.steps.values()])
            have = ", ".join(near or self._some())
            raise AddressError(f"nothing in this graph answers to {text!r}; its nodes are {have}")
        return found

    def _some(self) -> list[str]:
        names = [f"{name} ({step.name})" for name, step in self.steps.items()]
        return names[:8] + ["…"] * (len(names) > 8)


def searchable(model: Any, verb: str) -> Any:
    """What addresses are looked up in: a model itself, a function, or the graph behind a tensor."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, (Tensor, Node)):
        return Graph(model)
    if (inner := innermost_function(model)) is not None:
        return Code(model, inner)
    check_model(model, verb)
    return model


class Code:
    """A function that is no module: its variables are addresses, as in `capture(function, "y", "grad(y)")`."""

    def __init__(self, function: Any, inner: FunctionType) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self.function, self._inner = function, inner
        self.codes = [inner.__code__]
        while isinstance(function, functools.partial):
            function = function.func
        self._self = getattr(function, "__self__", None)  # of a method

    def is_run_by(self, frame: Any) -> bool:
        """Whether a frame with its code, or equal code, has begun to run this very function, and no sibling of it."""
        if self._self is not None and first_argument(frame) is not self._self:
            return False
        return frame.f_globals is self._inner.__globals__ and self._has_closure_of(frame)

    def _has_closure_of(self, frame: Any) -> bool:
        """Functions that one function made share their code, and may differ in what they enclose."""
        cells = self._inner.__closure__
        if not cells:
            return True
        names, values = self._inner.__code__.co_freevars, all_variables(frame)
        return all(values.get(name) is content_of(cell) for name, cell in zip(names, cells, strict=True))

    def modules(self) -> Iterator[Any]:
        """As a graph, it has none."""
        return iter(())

    def resolve(self, text: Any) -> list[Site]:
        """The site that a name means; whether there is such a value is known when the function has run."""
        return [variable(text, self)]


def variable(text: Any, function: Any) -> Site:
    """The site of a variable of a function, by its name."""
    if not isinstance(text, str):
        raise TypeError(f"in a function a selector is the name of a variable, such as 'y' or 'grad(y)', got {text!r}")
    is_grad = text.startswith("grad(") and text.endswith(")")
    place = text[5:-1] if is_grad else text
    try:
        address = parse(f"./{place}")
    except AddressError:
        what = "in a function a value is written name, helper/name, name#1 or grad(name)"
        raise AddressError(f"cannot read the address {text!r}: {what}") from None
    check_inner(text, address)
    return Site(address._replace(path="", grad=is_grad), function, "inner", "*" in address.inner)


def content_of(cell: CellType) -> Any:
    """What an enclosed variable is; None where it has not been assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def innermost_function(function: Any) -> FunctionType | None:
    """A function or method without what is wrapped around it; None for a class."""
    if isinstance(function, (type, str)):
        return None
    found = None
    for _ in range(20):
        if isinstance(function, functools.partial):
            function = function.func
            continue
        plain = getattr(function, "__func__", function)
        if isinstance(plain, FunctionType):
            found = plain
        elif isinstance(call := vars(type(plain)).get("__call__"), FunctionType):
            found = call
        if not hasattr(plain, "__wrapped__"):
            break
        function = plain.__wrapped__
    return found


def _walk(root: Node) -> Iterator[tuple[str, Node]]:
    """Breadth first, so that the shortest name of a node is the one that counts."""
    visited = {root}
    todo: list[tuple[str, Node]] = [(".", root)]
    for name, node in todo:
        yield name, node
        prefix = "" if name == "." else f"{name}."
        for i, (following, _) in enumerate(node.next_functions):
            if following is not None and following not in visited:
                visited.add(following)
                todo.append((f"{prefix}{i}", following))
