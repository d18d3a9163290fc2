"""Autograd's bookkeeping: which backward pass runs, and in which order nodes were made.

Relies on: `torch._C._current_graph_task_id` (-1 outside of a backward pass); `torch._C._autograd._get_sequence_nr`, one
count per thread that every new node advances, and `Node._sequence_nr`; callbacks that the engine runs at the end of a
pass (`Variable._execution_engine.queue_callback`).
"""

from collections.abc import Callable

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node

graph_task = torch._C._current_graph_task_id
next_sequence_number = torch._C._autograd._get_sequence_nr


def sequence_number(node: Node) -> int:
    """When a node was made, by the count of its thread."""
    return node._sequence_nr()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs now is over."""
    Variable._execution_engine.queue_callback(function)
