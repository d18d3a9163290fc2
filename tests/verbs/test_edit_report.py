"""edit: the report, with its figures, and the warnings of edits that never fired or failed."""

import contextlib

import pytest
import torch
from torch import nn

from tenterhook import EditError, TenterhookWarning, edit
from tenterhook.changes import add, at, mean, scale, zero
from tests.verbs.models import X, raises


def test_an_edit_that_never_fired_is_an_error_and_says_why(net):
    with pytest.raises(EditError, match="a was never edited: not reached"):
        with edit(net, {"a": zero()}):
            pass
    with pytest.raises(EditError, match=r"grad\(a\) was never edited: no backward inside"):
        with edit(net, {"grad(a)": zero()}) as edits:
            net(X)
    assert edits.report().silent == ["grad(a)"]
    with pytest.raises(EditError, match="but not the call"), edit(net, {"a@3": zero()}):
        net(X)
    with edit(net, {"**": scale(1.0)}):  # of a wide selector, some may stay silent
        net.c(X)


@pytest.mark.parametrize(
    ("address", "why"),
    [("./nothing", "no value of that name"), ("a[0]", r"no leaf \[0\]"), ("blocks", "container that is never called")],
)
def test_each_that_was_never_edited_is_named(address, why):
    model = nn.Module()
    model.a, model.blocks = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])
    model.forward = lambda x: model.blocks[0](model.a(x))
    with pytest.raises(EditError, match=f"{why}.*\n.*a@1 was never edited.*\n.*strict=False"):
        with edit(model, {address: zero(), "a@1": zero(), "a": zero()}) as edits:
            model(X)
    assert len(edits.report().silent) == 2
    with pytest.warns(TenterhookWarning) as told, edit(model, {address: zero(), "a@1": zero()}, strict=False):
        model(X)
    assert len(told) == 2 and all(one.filename == __file__ for one in told)


def test_an_exception_of_the_block_is_not_hidden_by_one_of_ours(net):
    with pytest.raises(ZeroDivisionError), edit(net, {"a": zero()}):
        1 / 0


def test_the_edits_of_a_generator_that_is_not_exhausted(net):
    def generate():
        with edit(net, {"a": zero(), "b@7": zero()}):
            yield net(X)
            yield net(X)

    edited = generate()
    first = next(edited)
    edited.close()  # no error: the block was left by an exception, GeneratorExit
    assert not torch.equal(first, net(X))


def test_the_report_says_how_much_changed(net):
    with edit(net, {"a": add(0.5), "b": lambda v: v - 2, "c": scale(1.0)}) as edits:
        net(X)
        net(X)
    assert list(edits.report()) == [
        ("a", "2×", "add(0.5)", "0.5", "0.5"),
        ("b", "2×", "<lambda>", "2", "2"),
        ("c", "2×", "scale(1.0)", "0", "0"),
    ]
    assert edits.report().notes == ["c: this edit changed nothing"]


def test_the_difference_is_right_although_the_value_is_overwritten_later():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    for change in (lambda v: v + 1, add(1.0), noise_like):
        with edit(model, {"0": change}) as edits:
            model(X)
        assert [row[3:] for row in edits.report()] == [("1", "1")]


def noise_like(value, site):
    return value + torch.ones_like(value)


def test_long_sessions_measure_now_and_then(net):
    with edit(net, {"a": add(1.0)}) as edits, torch.no_grad():
        for _ in range(100):
            net(X)
    assert "in the 11 of 100 calls that were measured" in str(edits.report())  # the first 8, and 16, 32, 64


def test_differences_of_infinities_integers_and_nothing():
    class Model(nn.Module):
        def forward(self, x):
            return x

    model = Model()
    cases = [
        (torch.tensor([-torch.inf, 1.0]), at(1, 3.0), ("2", "1")),
        (torch.tensor([1, 2]), add(3), ("3", "3")),
        (torch.tensor([True, False]), lambda v: ~v, ("1", "1")),
        (torch.zeros(0), scale(2.0), ("–", "–")),
        (torch.tensor([3 + 4j]), zero(), ("5", "5")),
    ]
    for value, change, figures in cases:
        with edit(model, {".": change}) as edits:
            model(value)
        assert [row[3:] for row in edits.report()] == [figures]


def test_the_report_tells_no_lies():
    model, x = nn.Identity(), torch.ones(2)
    with edit(model, {".": lambda v, site: v * 1000 if site.address.call == 9 else None}) as edits:
        for _ in range(12):
            model(x)
    assert edits.report().notes == [".: this edit changed nothing in the 8 of 12 calls that were measured"]
    vector = torch.ones(2)
    with edit(model, {".": add(vector)}) as edits:
        model(x)
    vector.mul_(100)
    assert next(iter(edits.report()))[3:] == ("–", "–") and "overwritten before they could be compared" in str(
        edits.report()
    )
    with edit(model, {".": scale(-1.0)}) as edits:
        model(torch.tensor([4e4], dtype=torch.float16))
    assert next(iter(edits.report()))[3:] == ("8e+04", "8e+04")
    with edit(model, {".": lambda v, site: v * (torch.nan if site.address.call else 2)}) as edits:
        model(x)
        model(x)
    assert next(iter(edits.report()))[3:] == ("nan", "nan")


def test_sparse_gradients():
    model = nn.Embedding(4, 3, sparse=True)
    with edit(model, {"grad(weight)": scale(2.0)}) as edits:
        model(torch.tensor([1, 1])).sum().backward()
    assert model.weight.grad.to_dense()[1].tolist() == [4.0, 4.0, 4.0]
    assert "grad(weight): a sparse tensor cannot be compared" in str(edits.report())


def test_what_is_no_tensor_is_not_said_to_be_unchanged():
    class Box:
        def __init__(self):
            self.t = torch.ones(2)

    class Model(nn.Module):
        def forward(self, box, x):
            return box.t + x

    def wipe(box):
        box.t.zero_()

    model, box = Model(), Box()
    with edit(model, {".:in[box]": wipe}) as edits:
        assert model(box, torch.ones(2)).tolist() == [1, 1]
    assert "what is no tensor in it was not compared" in str(edits.report())
    with edit(model, {".:in": lambda given: wipe(given[0])}) as edits:
        model(Box(), torch.ones(2))
    assert "what is no tensor in it was not compared" in str(edits.report())


def test_a_missing_return_is_guessed(net):
    def forgetful(value):
        value * 2

    with edit(net, {"a": forgetful}) as edits:
        net(X)
    assert edits.report().notes == ["a: this edit changed nothing: its function returned None and wrote nothing"]


def test_a_refused_change_is_not_counted():
    lstm = nn.LSTM(3, 3)
    edits = edit(lstm, {".": zero()})
    with pytest.raises(EditError, match="changes one tensor"), edits:
        lstm(torch.randn(2, 1, 3))
    assert edits.report().silent == ["."] and "its change failed" in str(edits.report())


def test_a_failed_change_is_not_counted(net):
    edits = edit(net, {"a": mean(7)})
    with pytest.raises(IndexError), edits:
        net(X)
    assert edits.report().silent == ["a"] and "its change failed" in str(edits.report())


@pytest.mark.parametrize("change", [raises, lambda v: v[:, :2], lambda v, site: v[:, :2]])
def test_a_failed_change_that_the_model_swallows_is_not_said_to_be_applied(change):
    model = Swallows()
    with pytest.raises(EditError, match="inner was never edited: its change failed, and the exception was caught"):
        with edit(model, {"inner": change}) as edits:
            model(X)
    assert edits.report().silent == ["inner"]


@pytest.mark.parametrize("takes_site", [False, True])
def test_a_change_that_failed_once_and_was_swallowed_is_told(takes_site):
    model, calls = Swallows(), []

    def change(v, *site):
        calls.append(v)
        return v * 2 if len(calls) != 2 else v[:, :2]

    with pytest.warns(TenterhookWarning, match="inner: its change failed in 1 of 3 calls, and the exception"):
        with edit(model, {"inner": change if takes_site else lambda v: change(v)}) as edits:
            for _ in range(3):
                model(X)
    assert "its change failed in 1 of 3 calls" in str(edits.report())


class Swallows(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        try:
            return self.inner(x)
        except (RuntimeError, ValueError):
            return x


def test_gradients_edited_after_the_reduction_have_figures():
    fc = nn.Linear(4, 4)
    with edit(fc, {"grad(weight)": scale(3.0)}, reduced=True) as edits:
        fc(X).sum().backward()
    (_, applied, _, largest, _) = next(iter(edits.report()))
    assert applied == "1×" and float(largest) == pytest.approx(float(fc.weight.grad.abs().max()) * 2 / 3, rel=1e-2)


def test_a_failure_at_one_of_many_sites_is_told():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(4, 3)

        def forward(self, x):
            with contextlib.suppress(RuntimeError):
                self.a(x)
            return self.b(x)

    model = Tries()
    with pytest.warns(TenterhookWarning, match="a: its change failed in 1 of 1 calls, and the exception"):
        with edit(model, {"*": add(torch.ones(3))}):
            model(X)


def test_a_tensor_of_inference_mode_outside_of_it_has_figures():
    with torch.inference_mode():
        x = torch.ones(2, 4)
    for change in (scale(3.0), lambda v: v * 3):
        with edit(nn.Identity(), {".": change}) as edits:
            edits._model(x)
        assert next(iter(edits.report()))[3:] == ("2", "2")


def test_reports_of_calls_under_vmap():
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(4, 3)
    for change in (scale(2.0), lambda v: v * 2):
        with edit(model, {"0": change}) as edits:
            for _ in range(3):
                torch.vmap(model)(x)
        assert next(iter(edits.report()))[1] == "3×" and "cannot be compared" in str(edits.report())
        with edit(model, {"0": change}) as edits:
            model(x)
            for _ in range(2):
                torch.vmap(torch.func.grad(lambda x: model(x).sum()))(x)
        assert float(next(iter(edits.report()))[3]) == pytest.approx(model(x).abs().max().item(), rel=0.01)


def test_reports_of_tensors_without_numbers():
    with edit(nn.Identity(), {".": scale(2.0)}) as edits:
        edits._model(torch.ones(2, device="meta"))
    assert next(iter(edits.report()))[1:] == ("1×", "scale(2.0)", "–", "–") and "cannot be compared" in str(
        edits.report()
    )
