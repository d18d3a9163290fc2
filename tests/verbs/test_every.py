"""every=n: capture and observe look at every n-th call of the model."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenterhook import capture, observe
from tests.verbs.models import mlp

X = torch.randn(7, 3, 4)


def test_kept_calls_are_numbered_from_0():
    model = mlp()
    truth = [model[0](x) for x in X]
    with capture(model, "0", "0:in", "1", every=3) as seen:
        for x in X:
            model(x)
    assert [len(seen.calls(address)) for address in ("0", "0:in", "1")] == [3, 3, 3]
    for k, call in enumerate((0, 3, 6)):
        assert torch.equal(seen[f"0@{k}"], truth[call]) and torch.equal(seen[f"0:in@{k}"], X[call])
    assert "every=3: 3 of 7 calls of the model count here, from @0 to @2" in seen.report().notes
    assert [fired for _, fired, _ in seen.report()] == ["3×"] * 3


@pytest.mark.parametrize("late", [False, True], ids=["backward after each", "backward at the end"])
def test_gradients_belong_to_the_call_that_made_them(late):
    model, twin = mlp(), []
    with capture(model, "grad(0)", "grad(0:in)", "grad(2.weight)", every=2) as seen:
        losses = []
        for k, x in enumerate(X[:4]):
            losses.append(k * model(x.clone().requires_grad_()).sum())
            if not late:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
    for k in (0, 2):
        h = model[0](X[k])
        twin.append(torch.autograd.grad(k * model[2](h.relu()).sum(), h)[0])
    assert [torch.equal(a, b) for a, b in zip(seen.calls("grad(0)"), twin, strict=True)] == [True] * 2
    assert len(seen.calls("grad(0:in)")) == 2
    assert ("grad(2.weight)" in seen) is not late  # it belongs to the last call before the backward
    if not late:
        assert len(seen.calls("grad(2.weight)")) == 2


def test_values_inside_a_forward_and_submodules_that_run_often():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            y = self.fc(h)
            return y

    model = Model()
    with capture(model, "./y", "grad(./y)", "fc", every=2) as seen:
        for x in X[:4]:
            model(x).sum().backward()
    assert [torch.equal(y, model(x)) for y, x in zip(seen.calls("./y"), X[:4:2], strict=True)] == [True, True]
    assert len(seen.calls("grad(./y)")) == 2 and len(seen.calls("fc")) == 4


def test_observe():
    model, got = mlp(), []
    with observe(model, {"0": lambda value, site: got.append((str(site), value.clone()))}, every=5) as watched:
        for x in X:
            model(x)
    assert [site for site, _ in got] == ["0@0", "0@1"]
    assert torch.equal(got[1][1], model[0](X[5]))
    assert "every=5: 2 of 7 calls" in str(watched.report())


def test_other_threads_and_recomputations_are_not_counted():
    model, x = mlp(), X[0].clone().requires_grad_()
    with capture(model, "0", "grad(1)", every=2) as seen:
        for _ in range(2):
            thread = threading.Thread(target=model, args=(x,))
            thread.start()
            thread.join()
            checkpoint(model, x, use_reentrant=False).sum().backward()
            model(x)
    assert len(seen.calls("0")) == 2 and "2 of 4 calls" in str(seen.report())
    h = model[0](x)
    assert torch.equal(seen.calls("grad(1)")[0], torch.ones(3, 2) @ model[2].weight)
    assert h.shape == seen["0@0"].shape


def test_an_exception_half_way_counts():
    model = mlp()
    with capture(model, "0", every=2) as seen:
        for x in (X[0], X[1, :, :3], X[2], X[3]):
            try:
                model(x)
            except RuntimeError:
                continue
    assert torch.equal(torch.stack(seen.calls("0")), model[0](X[[0, 2]]))


def test_what_it_cannot_count_it_says():
    model = mlp()
    with capture(model, "0", every=2) as seen:
        model[0](X[0])
        model[0](X[1])
    assert len(seen.calls("0")) == 2
    assert "every=2 counts calls of the model itself, which was not called: nothing was left out" in str(seen.report())
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="every is a whole number from 1 on"):
            capture(model, "0", every=wrong)
    with pytest.raises(TypeError, match="every=2 counts the calls of a module"):
        capture(lambda x: x, "y", every=2)
