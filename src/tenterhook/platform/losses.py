"""torch's loss functions, and which of their results a loss is made of.

Relies on: nodes of a graph have `metadata` and a name such as `SigmoidBackward0`,
and those of leaves a `variable`.
"""

from collections.abc import Sequence
from typing import Any

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
