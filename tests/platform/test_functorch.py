import torch
from torch.func import grad, jvp, vmap

from tenterhook.platform.functorch import (
    in_transform,
    in_transform_without_gradients,
    is_of_transform,
    is_of_vmap,
    is_within_vmap,
    layers,
    values_of,
)


def test_tensors_of_a_transform_are_known():
    seen = []

    def note(x):
        seen.append((is_of_transform(x), is_of_vmap(x), is_within_vmap(x)))
        return x.sum()

    x = torch.ones(3, 2)
    note(x)
    vmap(note)(x)
    grad(note)(x)
    vmap(grad(note))(x)
    expected = [(False, False, False), (True, True, True), (True, False, False), (True, False, True)]
    assert seen == expected, "torch.func no longer wraps tensors, each transform around those before"


def test_what_is_inside_comes_out():
    x = torch.arange(6.0).reshape(2, 3)
    kept = []
    vmap(lambda row: kept.append(row) or row.sum(), in_dims=1)(x)
    assert torch.equal(values_of(kept[0]), x.T), "torch.func no longer tells over which dimension vmap runs"
    vmap(grad(lambda row: kept.append(row) or row.sum()))(x)
    assert len(layers(kept[1])) == 3, "torch.func no longer has one wrapper for each transform"
    assert torch.equal(values_of(kept[1]), x)
    assert values_of(x) is x


def test_transforms_that_run_are_known():
    seen = []

    def note(x):
        seen.append((in_transform(), in_transform_without_gradients()))
        return x.sum()

    x = torch.ones(3, 2)
    note(x)
    vmap(note)(x)
    grad(note)(x)
    vmap(grad(note))(x)
    jvp(note, (x,), (x,))
    expected = [(False, False), (True, True), (True, False), (True, False), (True, True)]
    assert seen == expected, "torch.func no longer tells which transforms run"
