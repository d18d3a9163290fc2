"""sweep(metric=...): numbers only; and edits that never acted."""

import math
import weakref

import pytest
import torch
from torch import nn

from tenterhook import EditError, TenterhookWarning, edit, sweep
from tenterhook.changes import add, at, scale, zero


class Big(nn.Module):
    """A small body with a large output."""

    def __init__(self, words=500):
        super().__init__()
        self.a, self.b, self.spare = nn.Linear(4, 4), nn.Linear(4, words), nn.Linear(4, 4)

    def forward(self, x):
        return {"logits": self.b(self.a(x).tanh())}


def last(out):
    return out["logits"][0, -1]


def one_by_one(model, x, edits, metric):
    found = []
    for one in edits:
        with edit(model, one):
            found.append(torch.as_tensor(metric(model(x))))
    return torch.stack(found)


def edits_of(many):
    return [{"a": at((..., i % 4), add(i / 3))} for i in range(many)]


@pytest.mark.parametrize("at_once", [None, 1, 3, 100])
def test_numbers_are_those_of_one_run_each(at_once):
    model, x, edits = Big(), torch.randn(2, 3, 4), [{}, *edits_of(50)]
    found = sweep(model, x, iter(edits), metric=last, at_once=at_once)
    torch.testing.assert_close(found.values, one_by_one(model, x, edits, last), atol=2e-5, rtol=1e-4)
    found = sweep(model, x, (one for one in edits), metric=lambda out: out["logits"].max().item(), at_once=at_once)
    assert found.values.shape == (51,) and found.values.dtype == torch.float64 and len(found) == 51
    assert not found.values.requires_grad and list(found) == list(found.values) and found[3] == found.values[3]


def test_outputs_are_gone_when_their_numbers_are_there():
    """At no time are more of them alive than one forward has made, and those few that are checked."""
    model, x, alive, most = Big(), torch.randn(1, 3, 4), weakref.WeakValueDictionary(), 0

    def metric(out):
        nonlocal most
        storage = out["logits"].untyped_storage()
        alive[storage.data_ptr()] = out["logits"]
        most = max(most, sum(t.untyped_storage().nbytes() for t in list(alive.values())))
        return out["logits"][0, 0, :2]  # a window on all of it

    with torch.no_grad():
        found = sweep(model, x, edits_of(200), metric=metric)
    assert found.values.shape == (200, 2) and found.values.untyped_storage().nbytes() == 200 * 2 * 4
    assert len(alive) == 0 and most <= 34 * 3 * 500 * 4


def test_folded_rows_are_unfolded_before_the_metric():
    class Folds(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x).flatten(0, 1)

    model, x, shapes = Folds(), torch.randn(2, 3, 4), []
    edits = [{"fc": scale(float(i))} for i in range(5)]

    def metric(out):
        shapes.append(out.shape)
        return out[4].sum()  # of the second row

    found = sweep(model, x, edits, metric=metric)
    assert set(shapes) == {(6, 4)}
    torch.testing.assert_close(found.values, one_by_one(model, x, edits, metric))


def test_a_metric_that_gives_nan_raises_or_makes_something_else():
    model, x, edits = Big(), torch.randn(1, 3, 4), edits_of(3)
    found = sweep(model, x, [*edits, {"a": scale(math.nan)}], metric=lambda out: last(out).sum())
    assert found.values.isfinite().tolist() == [True, True, True, False] and "nan" in repr(found)
    with pytest.raises(ZeroDivisionError) as raised:
        sweep(model, x, edits, metric=lambda out: 1 // 0)
    assert raised.value.__notes__ == ["in the metric, at edit 0 of the list: a: at((..., 0), add(0.0))"]
    with pytest.raises(TypeError, match="a metric returns a number or a small tensor, got dict"):
        sweep(model, x, edits, metric=lambda out: out)
    with pytest.raises(TypeError, match="got NoneType"):
        sweep(model, x, edits, metric=lambda out: None)
    sizes = iter([1, 2, 3])
    with pytest.raises(ValueError, match="2 float32 of another; a metric has one shape"):
        sweep(model, x, edits, metric=lambda out: last(out)[: next(sizes)])
    with pytest.raises(TypeError, match="metric is a function of the model's output, got 'loss'"):
        sweep(model, x, edits, metric="loss")
    with pytest.raises(RuntimeError, match="mine"):
        sweep(model, x, (_ for _ in map(lambda i: (_ for _ in ()).throw(RuntimeError("mine")), range(3))), metric=last)


def test_a_metric_may_write_into_its_output_and_run_the_model():
    model, x, edits = Big(), torch.randn(1, 3, 4), edits_of(5)

    def metric(out):
        with torch.no_grad():
            value = (last(out) - last(model(x))).norm()
            out["logits"].zero_()
        return value

    with torch.no_grad():
        found = sweep(model, x, edits, metric=metric)
    truth = one_by_one(model, x, edits, lambda out: last(out).detach())
    torch.testing.assert_close(found.values, (truth - last(model(x)).detach()).norm(dim=-1), atol=1e-5, rtol=1e-4)


def test_no_edits_and_the_table():
    model, x = Big(), torch.randn(1, 3, 4)
    assert sweep(model, x, [], metric=last).values.shape == (0,)

    def logit(out):
        return last(out)[0]

    shown = repr(sweep(model, x, [{}, {"a": zero()}], metric=logit)).splitlines()
    assert shown[0].split() == ["edit", "logit"] and shown[2].split()[:2] == ["0", "–"] and "a: zero()" in shown[3]
    assert len(repr(sweep(model, x, edits_of(60), metric=logit)).splitlines()) == 42
    assert "<table" in sweep(model, x, [{}], metric=last)._repr_html_()


def test_under_autocast():
    model, x, edits = Big(20), torch.randn(2, 3, 4), edits_of(6)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = sweep(model, x, edits, metric=last)
        assert found.values.dtype == torch.bfloat16
        torch.testing.assert_close(found.values, one_by_one(model, x, edits, last), atol=0.05, rtol=0.05)


def test_checks_says_how_many_run_alone():
    model, x = Big(20), torch.randn(1, 3, 4)
    for checks, metric in ((0, None), (1, None), (3, last), (6, last), (99, None)):
        calls = [0] * 6

        def change(i, calls=calls):
            def counted(v):
                calls[i] += 1
                return v + i / 7

            return {"a": counted}

        sweep(model, x, [change(i) for i in range(6)], checks=checks, metric=metric, at_once=2)
        assert sum(calls) == 6 + min(checks, 6) and max(calls) <= 2


def test_all_edits_can_be_checked():
    class Largest(nn.Module):
        """Divides by the largest of the batch: only an edit of that one shows it."""

        def __init__(self):
            super().__init__()
            self.a = nn.Identity()

        def forward(self, x):
            h = self.a(x)
            return torch.cat([h / h.abs().max(), h[:, :1] * 100], 1)

    x = torch.tensor([[1.0, 2.0, 9.0]])
    edits = [{"a": at((..., 0), add(1.0))}, {"a": at((..., 0), add(-1.0))}, {"a": at((..., 2), add(-4.0))}]
    sweep(Largest(), x, edits)  # the first two are farthest apart, and right
    with pytest.raises(EditError, match="edit 2 of the list comes out different"):
        sweep(Largest(), x, edits, checks=3)


def test_edits_that_never_acted_are_an_error_that_names_each():
    model, x = Big(), torch.randn(1, 3, 4)
    edits = [{}, {"spare": zero()}, {"a": zero(), "./nothing": zero()}, {"a@3": zero()}, {"spare": scale(2.0)}]
    for metric in (None, last):
        with pytest.raises(EditError) as raised:
            sweep(model, x, edits, metric=metric)
        told = str(raised.value).splitlines()
        assert told[0].startswith("spare was never edited: ") and told[0].endswith("(edits 1, 4 of the list)")
        assert told[1].strip().startswith("./nothing was never edited: ") and "(edit 2 of the list)" in told[1]
        assert told[2].strip().startswith("a@3 was never edited: ") and len(told) == 4
        with pytest.warns(TenterhookWarning) as warned:
            results = sweep(model, x, edits, metric=metric, strict=False)
        assert len(warned) == 3 and len(results) == 5
    torch.testing.assert_close(results[1], last(model(x)))
    sweep(model, x, [{"*": zero()}])  # some of a glob's are enough


def test_edits_that_never_acted_where_rows_are_alike():
    class Folds(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    x = torch.zeros(2, 3, 4)
    with pytest.raises(EditError, match=r"spare was never edited: .*\(edit 1 of the list\)"):
        sweep(Folds(), x, [{"fc": zero()}, {"spare": zero()}])
    assert torch.equal(sweep(Folds(), x, [{"fc": zero()}])[0], x)


def test_a_change_that_fails_where_the_model_catches_it():
    class Catches(Big):
        def forward(self, x):
            try:
                return self.a(x)
            except ZeroDivisionError:
                return x

    with pytest.raises(EditError, match="a: a change failed there, and the model caught the exception"):
        sweep(Catches(), torch.randn(2, 4), [{"a": lambda v: 1 // 0}])
