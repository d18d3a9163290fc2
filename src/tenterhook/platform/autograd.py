"""Autograd's bookkeeping: which backward pass runs, and in which order nodes were made.

Relies on: `torch._C._current_graph_task_id` (-1 outside of a backward pass); `torch._C._autograd._get_sequence_nr`, one
count per thread that every new node advances, and `Node._sequence_nr`; callbacks that the engine runs at the end of a
pass (`Variable._execution_engine.queue_callback`), those that were queued by one of them after it;
`_top_saved_tensors_default_hooks(False)`, None where nobody hooks what is saved; `_is_fwd_grad_enabled`, which the
inside of an autograd Function turns off and `no_grad()` does not; `torch._C._current_autograd_node`, the node that a
backward pass runs now, None outside of one.
"""

from collections.abc import Callable

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node

graph_task = torch._C._current_graph_task_id
node_that_runs = torch._C._current_autograd_node
next_sequence_number = torch._C._autograd._get_sequence_nr
saves_hooked = torch._C._autograd._top_saved_tensors_default_hooks
jvp_enabled = torch._C._is_fwd_grad_enabled


def sequence_number(node: Node) -> int:
    """When a node was made, by the count of its thread."""
    return node._sequence_nr()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs now is over."""
    Variable._execution_engine.queue_callback(function)
