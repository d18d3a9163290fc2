"""Types that somebody has registered with torch's pytree, taken apart and made anew as it was told to.

Relies on: the private module `torch.utils._pytree`: the dict `SUPPORTED_NODES` from types to entries with
`flatten_fn`, `unflatten_fn` and `flatten_with_keys_fn`, whose keys have an `idx`, a `key` or a `name`; and
`tree_leaves`.
"""

from typing import Any

from torch.utils import _pytree

registered = _pytree.SUPPORTED_NODES  # by type


def flat(value: Any) -> list[Any]:
    """All that is in nested containers, as torch's operations are given them."""
    return list(_pytree.tree_leaves(value))


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    """The parts of a value of a registered type, by name or key where it gives them, else by position."""
    node = registered[type(value)]
    if node.flatten_with_keys_fn is None:
        return list(enumerate(node.flatten_fn(value)[0]))
    keyed, _ = node.flatten_with_keys_fn(value)
    return [(_plain_key(key), part) for key, part in keyed]


def made_of(parts: list[Any], like: Any) -> Any:
    """A value of a registered type with other parts."""
    node = registered[type(like)]
    return node.unflatten_fn(parts, node.flatten_fn(like)[1])


def _plain_key(key: Any) -> Any:
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)
