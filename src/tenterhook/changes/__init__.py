"""Ready-made changes for `edit`: data, not code, so that they can be printed, compared and saved.

    from tenterhook.changes import add, at, clip_norm, head, scale, token, zero

    edit(model, {"layer3": scale(0.5), "h.5": add(vector), "grad(layer2)": clip_norm(1.0)})
    edit(model, {"attn": at(head(3, of=12), zero), "h.2": at(token(5), zero)})          # of some positions only

Each is a function of one tensor that returns a new one of the same shape and dtype. What they replace stays in
the graph with a gradient of zero, so that a backward pass finds every parameter that it would find otherwise.
"""

from tenterhook.changes import ready_made
from tenterhook.changes.change import Change as Change
from tenterhook.changes.places import head as head
from tenterhook.changes.places import token as token
from tenterhook.changes.ready_made import *  # noqa: F403

__all__ = ["Change", *ready_made.__all__, "head", "token"]
