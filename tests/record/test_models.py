"""Models that change, come and go while they are recorded."""

import gc
import inspect

import pytest
import torch
from torch import nn

from tenterhook import watch
from tests.record.small import batches, net, rows, train


@pytest.mark.parametrize("every", [1, 10])
def test_a_layer_that_is_exchanged_is_recorded(tmp_path, every):
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, to=tmp_path / "run", every=every) as run:
        losses = train(model, batches(25), optimizer=optimizer)
        model[1], model[2] = nn.ReLU(), nn.Linear(16, 3)
        nn.init.constant_(model[0].bias, -50.0)
        optimizer.add_param_group({"params": model[2].parameters()})
        losses += train(model, batches(300), optimizer=optimizer)
    found = run.open()
    assert found.steps()["loss"].to_pylist() == losses
    outputs = [row["step"] for row in rows(found, site="0", what="output")]
    for what in ("output", "output_grad", "parameter"):
        site = "2.weight" if what == "parameter" else "2"
        assert [row["step"] for row in rows(found, site=site, what=what)] == outputs
    assert ("dead ReLU", "1") in [(f.rule, f.place.site) for f in run.findings if f.place]


def test_models_are_let_go(tmp_path):
    import weakref

    def watched():
        model = net()
        with watch(model, to=tmp_path / "run", every=1):
            train(model, batches(2))
        return weakref.ref(model)

    gone = watched()
    gc.collect()
    assert gone() is None


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def made_here():
    class Doubled(nn.Linear):
        pass

    return Doubled(6, 6)


def test_the_tree_of_modules_says_where_their_classes_are_written(tmp_path):
    class Lone(nn.Linear):
        pass

    model = nn.Sequential(Lone(6, 6), Doubled(), made_here())
    with watch(model, to=tmp_path / "run") as run:
        train(model, batches(2))
    (described,) = run.open().models
    for one, module in zip(described["modules"][1:], model, strict=True):
        file, _, line = one["source"].rpartition(":")
        assert file == __file__
        assert int(line) == inspect.getsourcelines(type(module))[1]
