"""capture.each: a forward for each batch of a loader."""

import gc
import io
import sys
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tenterhook import AddressError, AmbiguousError, NotSeenError, TenterhookError, capture, edit, sessions
from tenterhook.changes import zero
from tests.conftest import ours
from tests.verbs.models import mlp

X = torch.randn(10, 4)


def counted(model):
    ran = []
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda *_, name=name: ran.append(name))
    return ran


def deep():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def test_a_batch_at_a_time_with_what_the_loader_gave():
    model, labels = mlp(), torch.arange(10)
    found, batches = [], []
    for seen in capture.each(model, DataLoader(TensorDataset(X, labels), batch_size=4), "0", "2"):
        found.append(seen["0"])
        batches.append(seen.batch[1])
        assert torch.equal(seen["2"], model(seen.batch[0])) and len(seen.calls("0")) == 1
        assert not seen["2"].requires_grad and not seen["2"].is_inference()
    torch.testing.assert_close(torch.cat(found), model[0](X))
    assert torch.equal(torch.cat(batches), labels)


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return self.fc(x) * scale


@pytest.mark.parametrize(
    ("batch", "inputs", "scale"),
    [
        (X, None, 1),
        ((X, "label"), None, 1),
        ([X, 5], None, 1),
        ({"x": X, "scale": 3}, None, 3),
        ({"image": X, "label": 1}, lambda batch: batch["image"], 1),
        ((X, 2), lambda batch: batch, 2),
        ([5, X], lambda batch: {"x": batch[1], "scale": 2}, 2),
    ],
)
def test_what_the_model_is_called_with(batch, inputs, scale):
    model = Keywords()
    (out,) = (seen["."] for seen in capture.each(model, [batch], ".", inputs=inputs))
    assert torch.equal(out, model.fc(X) * scale)


def test_the_hooks_are_placed_once_and_see_only_their_own_forwards():
    model = mlp()
    keys = []
    model[0].register_forward_hook(lambda module, *_: keys.append(tuple(module._forward_hooks)))
    loop = capture.each(model, X.split(5), "0", progress=False)
    for seen in loop:
        assert [one.verb for one in sessions(model)] == ["capture.each"]
        model(X)  # the user's own
        assert len(seen.calls("0")) == 1 and len(seen["0"]) == 5
        assert not seen.report().notes
    assert len(keys) == 4 and len(set(keys)) == 1
    assert sessions(model) == [] and ours(model) == [] and len(loop) == 2
    assert [len(seen["0"]) for seen in loop] == [5, 5]


def test_a_forward_ends_early_once_one_like_it_has_been_whole():
    model = deep()
    ran = counted(model)
    for _ in capture.each(model, [X, X, X[:3], X[:3]], "0"):
        pass
    assert ran == [*"012", "0", *"012", "0"]
    ran.clear()
    values = [seen["1"] for seen in capture.each(model, [X, X], "1@0")]
    assert ran == ["0", "1"] * 2
    assert all(torch.equal(value, model[:2](X)) for value in values)


def test_what_runs_twice_runs_twice_in_every_batch():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh())
    for seen in capture.each(model, X.split(5), "0"):
        with pytest.raises(AmbiguousError, match="0 means 2 values"):
            seen["0"]
        assert torch.equal(seen.calls("0")[1], layer(layer(seen.batch).tanh()))


class Skips(nn.Module):
    """Leaves one of its layers out, another time another."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.times = 0

    def forward(self, x):
        self.times += 1
        for i, layer in enumerate(self.layers):
            if i != self.times % 4:
                x = layer(x)
        return x


def test_a_forward_does_not_end_early_while_a_site_has_not_come():
    came = [list(seen) for seen in capture.each(Skips(), [X] * 3, "layers.*")]
    assert came == [["layers.0", "layers.2"], ["layers.0", "layers.1"], ["layers.0", "layers.1", "layers.2"]]


def test_values_inside_a_forward():
    class Steps(nn.Module):
        def forward(self, x):
            for _ in range(len(x)):
                x = x * 2
            return x

    model = Steps()
    for seen in capture.each(model, [X[:3], X[:3], X[:2], X[:3]], "./x#-1", "./x"):
        assert torch.equal(seen["./x#-1"], model(seen.batch))
        assert len(seen.calls("./x")) == len(seen.batch)
        assert len(seen.report().rows) == len(seen.batch)


@pytest.mark.parametrize("keep", ["all", "last"])
def test_options(keep):
    model = mlp()
    for seen in capture.each(model, X.split(5), "0", keep=keep, reduce=lambda t: t.mean(0), dtype=torch.float64):
        torch.testing.assert_close(seen["0"], model[0](seen.batch).mean(0).double())
        assert [fired for _, fired, _ in seen.report()] == ["1×"]


def test_one_batch_is_held_at_a_time():
    model, alive = nn.Identity(), []

    def load():
        for _ in range(4):
            assert [ref() for ref in alive] == [None] * len(alive)
            batch = torch.randn(3)
            alive.append(weakref.ref(batch))
            yield batch
            del batch

    gc.disable()
    try:
        loop = capture.each(model, load(), ".", copy=False)
        every = []
        for seen in loop:
            assert seen["."] is not None
            every.append(seen)
    finally:
        gc.enable()
    assert len(alive) == 4
    for gone in (lambda: every[0]["."], lambda: every[-1].batch, lambda: list(every[1]), lambda: every[2].report()):
        with pytest.raises(RuntimeError, match="one batch is held at a time; take what you need in the loop"):
            gone()
    assert "over" in repr(every[0])
    first = next(iter(capture.each(model, [X], ".")))
    assert torch.equal(first["."], X)


def test_the_model_stays_in_its_mode_and_the_world_as_it_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    for seen in capture.each(model, [X], "1"):
        assert torch.is_grad_enabled() and model.training
        assert (seen["1"] == 0).any()


def test_an_exception_half_way_leaves_nothing():
    model = mlp()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        for _ in capture.each(model, [X, X[:, :2]], "0"):
            pass
    assert "in batch 1 of capture.each; inputs=lambda batch" in error.value.__notes__[0]
    assert ours(model) == []
    with pytest.raises(KeyError):
        for _ in capture.each(model, [X], "0"):
            raise KeyError
    for _ in capture.each(model, [X, X], "0"):
        break
    assert ours(model) == [] and sessions(model) == []
    assert list(capture.each(model, [], "0")) == []


def test_loops_within_loops_edits_and_other_threads():
    model, others = mlp(), []
    with edit(model, {"1": zero()}):
        for outer in capture.each(model, [X], "2"):
            for inner in capture.each(model, X.split(5), "2"):
                assert torch.equal(inner["2"], outer["2"][:5])
            thread = threading.Thread(target=lambda: others.append(model(X)))
            thread.start()
            thread.join()
            assert len(outer.calls("2")) == 1 and torch.equal(outer["2"], model[2].bias.expand(10, 2))


def test_what_cannot_be_asked_for():
    model = mlp()
    for wrong, hint in (({"grad": True}, "no grad=.*once"), ({"every": 2}, "no every="), ({"stop": True}, "no stop=")):
        with pytest.raises(TypeError, match=hint):
            capture.each(model, [X], "0", **wrong)
    with pytest.raises(AddressError, match=r"without gradients.*loss="):
        capture.each(model, [X], "grad(0)")
    with pytest.raises(AddressError, match="the same in every batch"):
        capture.each(model, [X], "0.weight")
    with pytest.raises(AddressError, match="answers to 'layer'"):
        capture.each(model, [X], "layer")
    with pytest.raises(TypeError, match=r"got Tensor for a loader.*capture\.once"):
        capture.each(model, X, "0")
    with pytest.raises(TypeError, match="how many batches"):
        len(capture.each(model, iter([X]), "0"))
    assert issubclass(AddressError, TenterhookError)
    model.unused = nn.Linear(1, 1)
    model.forward = lambda x: model[0](x)
    for seen in capture.each(model, [X], "unused", "0"):
        with pytest.raises(NotSeenError, match="unused never came"):
            seen["unused"]


def test_progress_on_a_terminal_only(monkeypatch, capfd):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    now = iter(range(100))
    monkeypatch.setattr("tenterhook.say.time.monotonic", lambda: next(now))
    list(capture.each(mlp(), X.split(5), "0"))
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    list(capture.each(mlp(), X.split(5), "0", progress=False))
    assert terminal.getvalue() == ""
    list(capture.each(mlp(), X.split(5), "0"))
    assert "capture.each: 1 of 2 batches, 1 a second" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K") and "\n" not in terminal.getvalue()
