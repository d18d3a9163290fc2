"""What the page is told about a run: against the tables of that run."""

import json
import math
import shutil

import numpy as np
import pytest

from tenterhook import open_run
from tenterhook.store.batches import Stream
from tenterhook.store.levels import NOT_FINITE
from tenterhook.view.answers import Answers, NoAnswer
from tenterhook.view.parts import Parts
from tenterhook.view.sources import calls_of
from tests.view.made import FORWARD, SOURCE, Made, describe, finding


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = Made(tmp_path_factory.mktemp("runs") / "one")
    made.add(20, findings=[finding(30), finding(10, "loss is NaN", None, None), finding(50, severity="warn", site="b")])
    for _ in range(9):
        made.add(20, broken=[(3, 0)])
    return open_run(made.end())


@pytest.fixture(scope="module")
def answers(run):
    return Answers(run)


def told(answers, name, **window):
    return json.loads(answers.answer(name, window))


def matrix(answers, what, **window):
    head, _, body = answers.answer(f"matrix/{what}", window).partition(b"\n")
    assert (len(head) + 1) % 2 == 0
    head = json.loads(head)
    return head, np.frombuffer(body, "<i2").reshape(len(head["places"]), len(head["steps"]))


def test_a_run_is_described(answers):
    run = told(answers, "run")
    assert (run["name"], run["steps"], run["last"], run["sampled"], run["ended"]) == ("one", 2000, 1999, 200, "exit 0")
    assert [m["site"] for m in run["models"][0]["modules"]][:4] == [".", "a", "blocks", "blocks.0"]
    assert ["net", "a", "output", "float32"] in run["places"]
    assert [row["step"] for row in run["findings"]] == [10, 30, 50] and run["worst"] == "error"
    assert sorted(i for group in run["groups"] for i in group) == [0, 1, 2]
    assert run["sources"] == [["net", "Net"]]


def test_a_matrix_has_every_column_that_is_asked_for(answers):
    head, codes = matrix(answers, "output", columns="50")
    assert head["steps"] == list(range(0, 2000, 40)) and head["end"] == 1991
    assert (codes[0] == NOT_FINITE).sum() == 9  # a NaN in one sample of each later batch
    inside, _ = matrix(answers, "output", **{"from": "100", "to": "149"})
    assert inside["steps"] == [100, 110, 120, 130, 140]
    assert matrix(answers, "input")[0]["places"] == []


def test_losses_keep_their_extremes(run, answers):
    loss = run.steps()["loss"].to_numpy()
    table = told(answers, "steps", columns="40")
    assert len(table["step"]) == 40
    for i, begin in enumerate(table["step"]):
        end = table["step"][i + 1] if i < 39 else 2000
        part = loss[begin:end]
        assert [table[k][i] for k in ("low", "high", "loss")] == pytest.approx([part.min(), part.max(), part.mean()])
    assert set(table["rate"]) == {0.01}
    assert told(answers, "steps", **{"from": "10", "to": "12"})["step"] == [10, 11, 12]


@pytest.mark.parametrize("rates", [[[0.1]] * 4, [[0.1, 0.3], None, [], [0.2]], [None] * 4])
def test_the_rate_of_a_step_is_its_largest(tmp_path, rates):
    made = Made(tmp_path / "run")
    made.writer.write("steps", {"step": [0, 1, 2, 3], "loss": [1.0] * 4, "rates": rates})
    made.writer.write("steps", {"step": [4], "loss": [1.0], "rates": [[0.5, 0.4]]})
    wanted = [max(one) if one else None for one in rates]
    assert told(Answers(open_run(made.end())), "steps")["rate"] == [*wanted, 0.5]


def test_a_site_is_told_as_its_rows_say(run, answers):
    site = told(answers, "site/net/b", columns="20")
    rows = [row for row in run.stats().to_pylist() if row["site"] == "b" and row["what"] == "output"]
    values = site["kinds"]["output"]
    assert site["share"] == 1 and values["step"] == [row["step"] for row in rows[::10]]
    for i in range(20):
        part = rows[10 * i : 10 * i + 10]
        rms = math.sqrt(sum(row["sumsq"] for row in part) / sum(row["count"] for row in part))
        assert values["rms"][i] == pytest.approx(rms, rel=1e-3)
        assert values["max"][i] == pytest.approx(max(row["max"] for row in part), rel=1e-3)
    assert sum(told(answers, "site/net/a")["kinds"]["output"]["nan"]) == 9
    assert told(answers, "site/net/nowhere")["kinds"] == {}


def test_histograms_are_those_of_the_rows(run, answers):
    values = told(answers, "site/net/b", **{"from": "0", "to": "9", "columns": "1"})["kinds"]["output"]
    row = next(row for row in run.stats().to_pylist() if row["site"] == "b" and row["what"] == "output")
    known = dict(zip(row["bins"], row["counts"], strict=True))
    exponents = range(values["low"] + 127, values["high"] + 128)
    wanted = [*(known.get(256 + e, 0) for e in reversed(exponents)), 0, *(known.get(e, 0) for e in exponents)]
    assert values["shares"][0] == [math.ceil(255 * count / sum(known.values())) for count in wanted]


def test_source_has_its_calls(answers):
    source = told(answers, "source/net/Net")
    assert (source["class"], source["file"], source["line"], source["sites"]) == ("Net", SOURCE[:-2], 10, ["."])
    assert [calls for _, calls in source["lines"][:5]] == [[], ["a"], [], ["blocks.*"], ["b"]]
    assert "\n".join(text for text, _ in source["lines"]) == FORWARD


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("y = self.a(self.b(x))", ["a", "b"]),
        ("y = self.layers[0](x)", ["layers.0"]),
        ("y = self.layers[i].attn(x)", ["layers.*.attn"]),
        ("for i, block in enumerate(self.blocks): x = block(x)", ["blocks.*"]),
        ("x = [head(x) for head in self.heads]", ["heads.*"]),
        ("x = f(x).g(self)", []),
        ("this is not Python", []),
        ("x = " + "(" * 500, []),
    ],
)
def test_calls(text, calls):
    assert sorted(calls_of(text).get(1, [])) == calls


@pytest.mark.parametrize("name", ["", "runs", "run/x", "matrix", "matrix/x", "../run", "site", "nothing/at/all", "\0"])
def test_what_is_not_there_has_no_answer(answers, name):
    if name == "site":
        assert told(answers, name)["kinds"] == {}
    else:
        with pytest.raises(NoAnswer):
            answers.answer(name, {})


@pytest.mark.parametrize(
    "window", [{"from": "x"}, {"columns": "-5"}, {"columns": "1e99"}, {"from": "nan"}, {"to": "-inf"}]
)
def test_a_window_that_makes_no_sense_is_the_whole_or_nothing(answers, window):
    for name in ("steps", "matrix/output", "site/net/a"):
        answers.answer(name, window)


def test_a_run_that_grows(tmp_path):
    made = Made(tmp_path / "run")
    answers = Answers(open_run(made.folder))
    assert (told(answers, "run")["sampled"], told(answers, "run")["ended"]) == (0, None)
    for many in (5, 12):
        made.add(many - made.samples)
        assert told(answers, "run")["sampled"] == many
        assert len(matrix(answers, "output")[0]["steps"]) == many
        assert len(told(answers, "steps")["step"]) == 10 * many
    made.end()


def test_ranks_have_their_own(tmp_path):
    Made(tmp_path / "run").add(3).end()
    Made(tmp_path / "run", rank=1).add(5).end()
    run = open_run(tmp_path / "run")
    assert [told(Answers(run, rank), "run")["sampled"] for rank in (0, 1)] == [3, 5]
    assert told(Answers(run, 1), "run")["ranks"] == [0, 1]
    with pytest.raises(NoAnswer, match="no rank 2"):
        Answers(run, 2)


def test_the_first_rank_may_be_another_than_0(tmp_path):
    Made(tmp_path / "run", rank=3).add(5).end()
    assert told(Answers(open_run(tmp_path / "run")), "run")["sampled"] == 5


def test_ranks_are_compared_once_the_run_has_ended(tmp_path):
    made = [Made(tmp_path / "run", rank=rank).add(3 + rank) for rank in (0, 1)]
    answers = Answers(open_run(tmp_path / "run"))
    assert ["ranks that disagree", "ranks are compared once the run has ended"] in told(answers, "run")["unchecked"]
    for one in made:
        one.end()
    assert "ranks that disagree" in told(answers, "run")["clean"]


def test_a_damaged_rank_json_leaves_the_matrix(run, tmp_path):
    folder = shutil.copytree(run.folder, tmp_path / "run")
    (folder / "rank-0" / "rank.json").write_text("{")
    answers = Answers(open_run(folder))
    described = told(answers, "run")
    assert described["models"] == [] and len(described["findings"]) == 3
    assert any("rank.json is damaged" in remark for remark in described["remarks"])
    assert matrix(answers, "output")[1].shape[1] == 200


def test_facts_that_are_no_numbers_are_told_as_text(tmp_path):
    made = Made(tmp_path / "run").add(3)
    made.end()
    describe(
        made.folder, made.sites, overhead=math.inf, models=[{"name": 3}, "junk", {"name": "x", "modules": ["junk"]}]
    )
    run = told(Answers(open_run(made.folder)), "run")
    assert run["overhead"] == "Infinity" and [model["name"] for model in run["models"]] == ["x"]


def test_all_sites_at_once_are_told_as_each_by_itself(answers):
    at_once = {name: json.loads(data) for name, data in answers.everything(1000, 20) if name.startswith("site/")}
    assert {"site/net/a", "site/net/a.weight", "site/net/blocks"} <= at_once.keys()
    assert at_once["site/net/blocks"]["kinds"] == {}
    for name, one in at_once.items():
        assert one == told(answers, name, columns="20")


def test_a_report_reads_each_batch_once(run, monkeypatch):
    read, plain = [], Stream.read

    def noted(self, batch, *rest):
        if self.path.stem == "stats":
            read.append(batch.offset)
        return plain(self, batch, *rest)

    monkeypatch.setattr(Stream, "read", noted)
    assert len(list(Answers(run).everything(1000, 20))) > 20
    assert len(read) == 10 == len(set(read))


def test_of_a_long_run_some_batches_are_read(answers):
    site = next(json.loads(data) for name, data in answers.everything(100, 5) if name == "site/net/b")
    assert site["share"] == 0.5 and site["kinds"]["output"]["step"] == [0, 400, 800, 1200, 1800]


def test_what_a_report_keeps_does_not_grow_with_the_run(tmp_path, monkeypatch):
    kept, plain = [], Parts.joined
    monkeypatch.setattr(Parts, "joined", lambda parts: kept.append(sum(len(one.step) for one in parts)) or plain(parts))
    for batches in (5, 50):
        made = Made(tmp_path / f"{batches}")
        for _ in range(batches):
            made.add(20)
        list(Answers(open_run(made.end())).everything(100, 10))
    assert kept == [10 * 25, 10 * 25]  # of each of 25 places as many as a histogram has stretches
