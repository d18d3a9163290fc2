"""What was captured, as changes that put it into another run."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tenterhook.addresses.grammar import Address
from tenterhook.addresses.sites import Site
from tenterhook.changes.change import Change
from tenterhook.changes.function import Function
from tenterhook.changes.places import index_in
from tenterhook.changes.ready_made import at as at_index
from tenterhook.changes.ready_made import replace
from tenterhook.errors import AddressError, EditError
from tenterhook.platform.autograd import graph_task
from tenterhook.platform.functorch import usable
from tenterhook.values.inputs import argument_names
from tenterhook.values.tree import Path, describe, leaves


def put_back(address: Address, value: Any, at: Any) -> Iterator[tuple[str, Change | Function]]:
    """The changes that put one value where it came from, each with its address; `at` limits them to an index."""
    found = list(leaves(value))
    made = {path: _replacement(tensor, at, str(_below(address, path))) for path, tensor in found}
    tensors = {path: id(tensor) for path, tensor in found}
    if address.grad and len(set(tensors.values())) < len(found):
        yield str(address), _by_leaf(made, tensors, len(address.leaf))
        return
    for path, change in made.items():
        key = str(_below(address, path))
        if any(not str(part) or {"[", "]"} & set(str(part)) for part in path):
            raise AddressError(f"{key} cannot be patched: a key of a dict in it cannot be written in an address")
        yield key, change


def _below(address: Address, path: Path) -> Address:
    return address._replace(leaf=(*address.leaf, *path))


def _replacement(tensor: Tensor, at: Any, address: str) -> Change:
    tensor = usable(tensor)
    try:
        return replace(tensor) if at is None else at_index(at, replace(tensor[index_in(tensor, at)]))
    except IndexError as error:
        raise IndexError(f"{address}: {error}; it is {describe(tensor)}") from None


def _by_leaf(changes: dict[Path, Any], tensors: dict[Path, int], depth: int) -> Function:
    """One change of a whole value whose leaves share a gradient, where they are one tensor: it must go in once."""
    came: dict[tuple[int, Any, int], tuple[int, Path]] = {}  # by call and tensor: in which backward, and at which leaf

    def patch(grad: Tensor, site: Site) -> Tensor:
        leaf = site.address.leaf[depth:]
        if leaf not in changes and not depth and site.address.role == "in":
            leaf = _given_otherwise(leaf, site)
        if leaf not in changes:
            return grad
        key, now = (id(site.module), site.address.call, tensors[leaf]), (graph_task(), leaf)
        before, came[key] = came.get(key, now), now
        if before[0] == now[0] and before != now:
            what = "several leaves were one tensor where this was captured, with one gradient, and here they are not"
            raise EditError(f"{what}; name the one that it shall go into, as in seen.patch('grad(attn:in[0])')")
        return changes[leaf](grad)

    return Function(patch)


def _given_otherwise(leaf: Path, site: Site) -> Path:
    """The leaf of an argument that was given by position, as if by name, or the other way round."""
    names = argument_names(site.module)
    other: dict[Any, Any] = {**dict(enumerate(names)), **{name: i for i, name in enumerate(names)}}
    return (other.get(leaf[0], leaf[0]), *leaf[1:]) if leaf else leaf
