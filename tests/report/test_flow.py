"""The bars of gradient flow: as long as the gradients are large, and of which layers."""

import torch
from torch import nn

from tenterhook import Finding, open_run
from tenterhook.record.watch import Options, Recording
from tenterhook.report.flow import flow
from tests.view.made import Made, finding


def bars(lines):
    return {line[4:].split()[0]: line.count("█") for line in lines[1:]}


def test_bars_are_as_long_as_gradients_are_large(tmp_path):
    run = open_run(Made(tmp_path / "run", [f"l{i}" for i in range(6)]).add(5, findings=[finding(0, site="l2")]).end())
    lines = flow(run)
    last = {
        row["site"]: row["rms"] for row in run.stats().to_pylist() if row["what"] == "output_grad" and row["step"] == 20
    }
    found = bars(lines)
    assert list(found) == [f"l{i}" for i in range(6)] and max(found.values()) == 32
    assert max(found, key=found.get) == max(last, key=last.get)
    assert [line[2] for line in lines[1:]] == [" ", " ", "✖", " ", " ", " "]


def test_of_many_layers_some_are_shown_and_those_with_findings(tmp_path):
    sites = [f"blocks.{i}.x" for i in range(100)]
    lines = flow(open_run(Made(tmp_path / "run", sites).add(3, findings=[finding(0, site="blocks.37.x")]).end()))
    assert 12 <= len(lines) - 1 <= 16 and "84 layers" in lines[0]
    assert any("blocks.37.x" in line and "✖" in line for line in lines)
    assert "blocks.0.x" in lines[1] and "blocks.99.x" in lines[-1]


def test_zeros_and_nan_are_said(tmp_path):
    made = Made(tmp_path / "run", ("a", "b", "c"), kinds=("output_grad",))
    lines = flow(open_run(made.add(4, zero=[(k, 0) for k in range(4)], broken=[(k, 1) for k in range(4)]).end()))
    assert "all zero" in lines[1] and "NaN or infinite" in lines[2]


def test_nothing_without_gradients(tmp_path):
    assert flow(open_run(Made(tmp_path / "run", kinds=("output",)).add(2).end())) == []
    assert flow(open_run(Made(tmp_path / "none").end())) == []


class Says:
    """A rule with one finding, in one of two models that have the same addresses."""

    name = "cold layer"

    def look(self, step):
        place = next(place for place in step.of("output").places if (place.model, place.site) == ("second", "0"))
        if step.number == 0:
            yield Finding(self.name, "warn", 0, "it is cold", place)


def test_a_mark_is_of_one_model_and_so_is_what_is_inside_of_what(tmp_path):
    first, second = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Tanh())
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    recording = Recording(tmp_path / "run", Options(every=1), [Says()], [])
    recording.recorder.install(discover=True)
    for _ in range(3):
        second(first(torch.ones(2, 4))).sum().backward()
        optimizer.step()
    recording.close("finished")
    shown = [(line[2], f"{line[4:].split()[0]} {line[4:].split()[1]}") for line in flow(open_run(tmp_path / "run"))[1:]]
    assert shown == [(" ", "first: 0"), (" ", "first: 1"), (" ", "second: 0.0"), (" ", "second: 1")]
