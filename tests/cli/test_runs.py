"""`tenterhook runs`, `report` and `view`: what they say, and what they leave alone."""

import base64
import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from tenterhook.cli import main
from tests.cli.processes import ENV
from tests.view.made import Made, describe, finding


@pytest.fixture
def folder(tmp_path):
    for name, many in (("1-old", 2), ("2-mid", 3), ("3-new", 4)):
        Made(tmp_path / "runs" / name).add(many, findings=[finding(1)] if many == 3 else ()).end()
    (tmp_path / "runs" / "latest").symlink_to("3-new")
    return tmp_path / "runs"


def test_runs_are_listed_newest_first(folder, capsys):
    assert main(["runs", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["3-new", "2-mid", "1-old"]
    assert "1, worst: error" in lines[1] and "exit 0" in lines[1] and "30" in lines[1]


def test_a_damaged_run_is_listed(folder, capsys):
    (folder / "2-mid" / "rank-0" / "rank.json").write_text("{")
    (folder / "1-old" / "run.json").write_text("[")
    assert main(["runs", str(folder)]) == 0
    assert capsys.readouterr().out.count("cannot be read") == 2


def test_old_runs_are_removed_only_on_request(folder, capsys, monkeypatch):
    assert main(["runs", str(folder), "--keep", "1"]) == 1  # there is nobody to ask
    assert "--yes" in capsys.readouterr().err and len(list(folder.glob("*-*"))) == 3
    assert main(["runs", str(folder), "--keep", "1", "--yes"]) == 0
    assert [path.name for path in folder.glob("*-*")] == ["3-new"]
    assert main(["runs", str(folder), "--keep", "0", "--yes"]) == 0
    assert list(folder.iterdir()) == []  # also the link to it


def test_a_run_that_is_being_recorded_stays(folder):
    describe(folder / "1-old", ["a"], ended=None, pid=os.getpid())
    assert main(["runs", str(folder), "--keep", "0", "--yes"]) == 0
    assert [path.name for path in folder.glob("*-*")] == ["1-old"]


def test_no_runs(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 2
    assert "tenterhook run train.py" in capsys.readouterr().err


def test_report(folder, tmp_path, capsys, built_page):
    assert main(["report", str(folder / "3-new"), "-o", str(tmp_path / "out.html")]) == 0
    assert "out.html" in capsys.readouterr().out and "<title>3-new · tenterhook" in (tmp_path / "out.html").read_text()
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "is not a run" in capsys.readouterr().err
    for out, file in (
        ("no/such/x.html", "no/such/x.html"),
        ("no", "no/report.html"),
    ):  # a folder is made, or written into
        assert main(["report", str(folder / "3-new"), "-o", str(tmp_path / out)]) == 0
        assert str(tmp_path / file) in capsys.readouterr().out and (tmp_path / file).is_file()
    assert main(["report", str(folder / "3-new"), "-o", str(tmp_path / "out.html" / "x.html")]) == 2
    assert "tenterhook report: " in capsys.readouterr().err and (tmp_path / "out.html").is_file()


def test_a_report_of_several_runs_and_ranks(folder, tmp_path, capsys, built_page):
    out = tmp_path / "out.html"
    for rank in range(10):
        found = [finding(1)] if rank == 9 else ()
        Made(folder / "many", rank=rank).add(2, findings=found).end()
    for words, wanted in (
        ([folder / "1-old", folder / "3-new"], {"1-old": [0], "3-new": [0]}),
        ([folder / "many"], {"many": [0, 1, 2, 3, 4, 5, 6, 9]}),  # of many ranks those with findings, and the first
        ([folder / "many", "--ranks", "7,2"], {"many": [2, 7]}),
    ):
        assert main(["report", *map(str, words), "-o", str(out)]) == 0
        assert inside(out, "runs")["ranks"] == wanted
        said = capsys.readouterr().out
        assert ("2 of its 10 ranks" in said, "8 of its 10 ranks" in said) == (
            words[1:] == ["--ranks", "7,2"],
            words == [folder / "many"],
        )
    assert inside(out, "many/7/run")["ranks"] == [2, 7]
    assert inside(out, "many/2/many/7/differences")["kinds"]["output"]["differ"] == 0
    assert main(["report", str(folder / "many"), "--ranks", "3,12", "-o", str(out)]) == 2
    assert "there is no rank 12 in many; it has 0, 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", "--ranks", "x"])
    assert "'x' are no ranks" in capsys.readouterr().err


def inside(report, name):
    """An answer that a report has in it."""
    packed = re.search(r'id="answers">([^<]*)<', report.read_text())[1]
    head, _, data = gzip.decompress(base64.b64decode(packed)).partition(b"\n")
    sizes = json.loads(head)
    begin = sum(size for _, size in itertools.takewhile(lambda item: item[0] != name, sizes.items()))
    return json.loads(data[begin : begin + sizes[name]])


def test_a_page_that_is_not_built_is_said(folder, tmp_path, capsys, monkeypatch):
    from tenterhook.view import page

    monkeypatch.setattr(page, "FILE", tmp_path / "page.html")
    for words in (["report", str(folder), "-o", str(tmp_path / "x.html")], ["view", str(folder)]):
        assert main(words) == 2
        assert "make web" in capsys.readouterr().err


def test_view_until_it_is_interrupted(folder, built_page):
    command = [sys.executable, "-m", "tenterhook", "view", str(folder)]
    env = {**ENV, "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{20,}", line)[0]
        assert "ssh -L" in process.stdout.readline()
        with urllib.request.urlopen(address) as reply:
            assert b"tenterhook" in reply.read()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0 and err == ""


def test_run_with_view_serves_until_the_training_ends(tmp_path, built_page):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, time, torch\n"
        "model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(5):\n"
        "    model(torch.ones(1, 2)).sum().backward(); optimizer.step()\n"
        "sys.stdin.readline()\n"
    )
    command = [sys.executable, "-m", "tenterhook", "run", "--view", "train.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=ENV, **pipes) as process:
        address = None
        while address is None:
            line = process.stderr.readline()
            assert line, "it has not said where"
            address = re.search(r"http://\S+", line)
        with urllib.request.urlopen(address[0].replace("/?", "/api/runs?")) as reply:
            assert b"-train" in reply.read()
        process.stdin.write("\n")
        process.stdin.flush()
        _, err = process.communicate(timeout=60)  # which ends once the server has let go of stderr, too
        assert process.returncode == 0 and "┌ tenterhook" in err
