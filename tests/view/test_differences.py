"""Where two runs are apart: against what was planted, and against `tenterhook compare`."""

import json

import numpy as np
import pytest

from tenterhook import open_run
from tenterhook.comparing.runs import compare_runs
from tenterhook.stats.columns import INDEX
from tenterhook.store.levels import NOT_FINITE
from tenterhook.view import differences
from tenterhook.view.answers import Answers, NoAnswer
from tests.view.made import KINDS, Made
from tests.view.test_answers import matrix as plain_matrix

SITES = ("a", "b", "c")
FIRST = dict(zip(KINDS, range(len(KINDS)), strict=True))  # of site a; those of b come after it


def made(folder, change=None, samples=40, **more):
    run = Made(folder, SITES, change=change, **more)
    for _ in range(samples // 10):
        run.add(10)
    return Answers(open_run(run.end()))


def from_step(step, place, name, how):
    """A change of one statistic at one place, from one step on."""

    def change(steps, numbers):
        rows = steps >= step
        numbers[rows, place, INDEX[name]] = how(numbers[rows, place, INDEX[name]])

    return change


def told(a, b):
    return json.loads(a.answer("differences", {}, b))


def matrix(a, b, what, **window):
    head, _, body = a.answer(f"differences/{what}", window, b).partition(b"\n")
    head = json.loads(head)
    return head, np.frombuffer(body, "<i2").reshape(len(head["places"]), len(head["steps"]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return made(tmp_path_factory.mktemp("runs") / "plain")


def test_what_is_the_same_is_said_so(plain, tmp_path):
    found = told(plain, made(tmp_path / "run"))
    assert [found["kinds"][kind] for kind in KINDS] == [{"compared": 3, "differ": 0, "steps": 40}] * 5
    assert found["share"] == 1 and found["loss"] == {"steps": 400}
    assert (matrix(plain, made(tmp_path / "again"), "output")[1] == 0).all()


def test_a_size_from_a_step_on(plain, tmp_path):
    other = made(tmp_path / "run", from_step(130, 5 + FIRST["output"], "sumsq", lambda v: v * 9))
    kinds = told(plain, other)["kinds"]
    assert {kind: one["differ"] for kind, one in kinds.items()} == {kind: kind == "output" for kind in KINDS}
    step, statistic, a, b = kinds["output"]["first"]["at"]
    assert (kinds["output"]["first"]["model"], kinds["output"]["first"]["site"]) == ("net", "b")
    assert (step, statistic) == (130, "rms") and b == pytest.approx(3 * a)
    head, codes = matrix(plain, other, "output")
    assert head["first"][0] is None and head["first"][1] == [step, statistic, a, b] and head["steps"][13] == 130
    assert (codes[1, :13] == 0).all() and np.abs(codes[1, 13:] - 200 * np.log10(3)).max() <= 1
    pooled = matrix(plain, other, "output", columns="4", **{"from": "100", "to": "199"})
    assert pooled[0]["steps"] == [100, 130, 150, 170] and (pooled[1][1] > 0).tolist() == [False, True, True, True]


def test_values_of_the_same_size_are_not_the_same(plain, tmp_path):
    other = made(tmp_path / "run", from_step(50, FIRST["parameter"], "sum", lambda v: v + 20))
    first = told(plain, other)["kinds"]["parameter"]["first"]
    assert (
        first["site"] == "a.weight" and first["at"][:3] == [50, "mean", 0.0] and first["at"][3] == pytest.approx(0.02)
    )
    head, codes = matrix(plain, other, "parameter")
    assert head["first"][0][0] == 50 and (codes == 0).all()


def test_rounding_is_no_difference(plain, tmp_path):
    assert not told(plain, made(tmp_path / "run", from_step(0, 0, "sumsq", lambda v: v * (1 + 1e-6))))["kinds"][
        "output"
    ]["differ"]


@pytest.mark.parametrize(("name", "value", "code"), [("nan", 3, NOT_FINITE), ("sumsq", 0, 32000)])
def test_nan_or_zero_in_one_of_them(plain, tmp_path, name, value, code):
    other = made(tmp_path / "run", from_step(70, 0, name, lambda v: v * 0 + value))
    for a, b in ((plain, other), (other, plain)):
        assert told(a, b)["kinds"]["output"]["first"]["at"][0] == 70
        assert (matrix(a, b, "output")[1][0] == ([0] * 7 + [code] * 33)).all()
    assert not told(other, made(tmp_path / "same", other_change(name, value)))["kinds"]["output"]["differ"]


def other_change(name, value):
    return from_step(70, 0, name, lambda v: v * 0 + value)


def test_only_steps_that_both_have_are_compared(plain, tmp_path):
    other = made(tmp_path / "run", every=15)
    found = told(plain, other)
    assert found["kinds"]["output"] == {"compared": 3, "differ": 0, "steps": 14}  # every thirtieth
    assert matrix(plain, other, "output")[0]["steps"] == list(range(0, 400, 30))
    late = Answers(open_run(Made(tmp_path / "none", SITES).end()))
    assert told(plain, late)["kinds"] == {} and told(late, plain)["kinds"] == {}
    assert matrix(plain, late, "output")[0]["places"] == []


def test_a_model_may_have_another_name(plain, tmp_path):
    other = made(tmp_path / "run", from_step(20, FIRST["update"], "sumsq", lambda v: v * 4), model="model")
    assert told(plain, other)["kinds"]["update"]["first"]["model"] == "net"
    assert told(other, plain)["kinds"]["update"]["first"]["model"] == "model"
    assert matrix(plain, other, "update")[0]["first"][0][0] == 20


def test_losses_are_compared(plain, tmp_path):
    other = Made(tmp_path / "run", SITES)
    for many in (10, 20, 10):  # its loss falls over the length of a batch
        other.add(many)
    mine, theirs = (one.run.steps()["loss"].to_numpy() for one in (plain, Answers(open_run(other.end()))))
    step = int(np.flatnonzero(~np.isclose(mine, theirs, rtol=1e-4))[0])
    found = told(plain, Answers(open_run(other.folder)))["loss"]
    assert found == {"steps": 400, "first": {"step": step, "a": mine[step], "b": theirs[step]}} and step == 100


def test_as_compare_says(plain, tmp_path):
    def change(steps, numbers):
        numbers[steps >= 60, FIRST["output_grad"], INDEX["max"]] *= 1.01
        numbers[steps >= 90, 5 + FIRST["parameter"], INDEX["sum"]] += 7
        numbers[steps >= 200, 10 + FIRST["update"], INDEX["pos_inf"]] = 1

    other = made(tmp_path / "run", change)
    kinds = {kind: one.get("first") for kind, one in told(plain, other)["kinds"].items()}
    for name, whats in {
        "outputs": ("output",),
        "gradients": ("output_grad", "parameter_grad"),
        "updates": ("update",),
    }.items():
        wanted = next(one.rounding for one in compare_runs(plain.run, other.run).kinds if one.name == name)
        found = [kinds[what] for what in whats if kinds[what]]
        assert bool(found) == (wanted is not None)
        for one in found:
            assert (one["at"][0], one["site"], one["at"][1]) == (wanted.step, wanted.site, wanted.statistic)
    assert kinds["parameter"]["at"][:2] == [90, "mean"]


def test_of_a_long_run_levels_tell_the_rest(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(differences, "_MOST_BATCHES", 2)
    large = made(tmp_path / "large", from_step(130, 0, "sumsq", lambda v: v * 9))
    small = made(tmp_path / "small", from_step(130, 0, "sum", lambda v: v + 50))
    found = told(made(tmp_path / "a"), large)
    assert found["share"] == 0.5 and found["kinds"]["output"]["first"]["at"][:2] == [130, "rms"]
    assert told(made(tmp_path / "b"), small)["kinds"]["output"]["first"]["at"][:2] == [300, "mean"]  # in the last batch


def test_it_is_worked_out_again_when_a_run_has_grown(plain, tmp_path):
    run = Made(tmp_path / "run", SITES, change=from_step(130, 0, "sumsq", lambda v: v * 9)).add(10)
    other = Answers(open_run(run.folder))
    assert told(plain, other)["kinds"]["output"]["differ"] == 0
    assert told(other, plain)["kinds"]["output"]["differ"] == 0
    for change in (from_step(150, 0, "sum", lambda v: v + 50), from_step(0, 5, "max", lambda v: v * 2)):
        run.change = change
        run.add(10)
        assert told(plain, other)["kinds"]["output"]["differ"] == told(other, plain)["kinds"]["output"]["differ"]
    run.end()
    found = told(plain, other)["kinds"]["output"]
    assert found["differ"] == 2 and found["first"]["at"][:2] == [150, "mean"]


def test_without_another_there_is_no_answer(plain):
    for name in ("differences", "differences/output", "differences/x"):
        with pytest.raises(NoAnswer):
            plain.answer(name, {})
    assert plain_matrix(plain, "output")[0]["places"]
