"""Random programs: values, gradients and edits are those of the same program with calls written into its source."""

import os
import random
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from tenterhook import capture, edit
from tenterhook.changes import scale
from tests.inside.programs import Closing, program, told

COUNT = 200 if os.environ.get("SELFCHECK") else 40
FAILS = (UnboundLocalError, NameError, ValueError, KeyError)


class Twin:
    """The program with calls in its source: the truth."""

    def __init__(self, source, edits):
        self.values, self.gradients, self.counts, self.edits = {}, {}, Counter(), edits
        self.forward = made(told(source), tell=self.tell)

    def tell(self, path, name, value):
        if not isinstance(value, Tensor):
            return value
        base = "/".join([".", *path.split("/")[1:], name])
        key = base, self.counts[base]
        self.counts[base] += 1
        self.values[key] = value.detach().clone()
        if key in self.edits:
            return value * 7
        if value.requires_grad and not self.edits:
            value.register_hook(lambda grad: self.gradients.update({key: grad}))
        return value

    def address(self, key):
        base, number = key
        return f"{base}#{number}" if self.counts[base] > 1 else base


def made(source, **known):
    known["Closing"] = Closing
    exec(compile(source, "program", "exec"), known)
    return known["forward"]


def run(forward, model=None):
    x = torch.tensor([1.25, -0.5], requires_grad=True)
    try:
        out = forward(x) if model is None else forward(model, x)
    except FAILS as error:
        return type(error), None
    out.sum().backward()
    return out, x.grad


def same(one, other):
    return all(a is b or torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("start", range(0, COUNT, 10))
def test_a_random_program(start):
    for seed in range(start, start + 10):
        source = program(random.Random(seed))
        twin = Twin(source, ())
        truth = run(twin.forward, None if twin is None else twin)
        model = type("Model", (nn.Module,), {"forward": made(source)})()
        with capture(model, "./**", "grad(./**)") as seen:
            assert same(run(model), truth), source
        for key, value in twin.values.items():
            assert torch.equal(seen[twin.address(key)], value), (source, key)
        for key, gradient in twin.gradients.items():
            assert torch.equal(seen[f"grad({twin.address(key)})"], gradient), (source, key)
        assert same(run(model), truth)
        for key in random.Random(seed).sample(list(twin.values), min(2, len(twin.values))):
            changed = Twin(source, {key})
            with edit(model, {f"{key[0]}#{key[1]}": scale(7.0)}):
                assert same(run(model), run(changed.forward, changed)), (source, key)
