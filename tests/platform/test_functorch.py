"""What platform/functorch.py relies on."""

import torch

from tenterhook.platform import functorch


def test_the_tensors_of_transforms():
    seen = []

    def look(x):
        seen.append((functorch.in_transform(), functorch.is_of_vmap(x), len(functorch.layers(x))))
        return x.sum()

    x = torch.ones(2, 3)
    look(x)
    torch.vmap(look)(x)
    torch.func.grad(look)(x)
    torch.vmap(torch.func.grad(look))(x)
    assert seen == [(False, False, 1), (True, True, 2), (True, False, 2), (True, False, 3)]
    assert functorch.layers(x) == [x] and not functorch.is_of_transform(x)
