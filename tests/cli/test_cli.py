"""The command line without `run`: the list of sites, what is said when something is wrong, and the version."""

import subprocess
import sys

import pytest

import tenterhook.verbs.sites  # with torch, which must not be imported anew when `sys.modules` is put back  # noqa: F401
from tenterhook.cli import main

SOURCE = """
import torch
from torch import nn
from helper_for_tests import width

def build():
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

ready = build()
number = 3

def example():
    return torch.ones(1, 4)

def by_name():
    return {"input": torch.ones(1, 4)}

def wrong():
    return torch.ones(1, 5)

def broken():
    raise ValueError("no weights here")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "helper_for_tests.py").write_text("width = 8")
    (tmp_path / "net_for_tests.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return str(tmp_path / "net_for_tests.py")


@pytest.mark.parametrize("name", ["build", "ready"])
def test_sites_prints_the_table(file, name, capsys):
    assert main(["sites", f"{file}:{name}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "address  class       parameters  shapes",
        "───────  ──────────  ──────────  ──────────────────",
        ".        Sequential          58",
        "0        Linear              40  weight 8×4, bias 8",
        "1        ReLU",
        "2        Linear              18  weight 2×8, bias 2",
    ]


def test_sites_match(file, capsys):
    assert main(["sites", f"{file}:build", "--match", "**.bias"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "0.bias   Parameter           8  8",
        "2.bias   Parameter           2  2",
    ]


@pytest.mark.parametrize("inputs", ["example", "by_name"])
def test_sites_with_inputs(file, inputs, capsys):
    assert main(["sites", f"{file}:build", "--inputs", f"{file}:{inputs}", "--match", "*/**"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["address", "value", "source", "line"]
    assert [row.split()[:3] for row in rows[2:]] == [
        ["0/linear", "1×8", "float32"],
        ["1/relu", "1×8", "float32"],
        ["2/linear", "1×2", "float32"],
    ]
    assert "return F.linear(input, self.weight, self.bias)" in rows[2]


def test_sites_with_inputs_that_do_not_fit(file, capsys):
    assert main(["sites", f"{file}:build", "--inputs", f"{file}:wrong"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tenterhook sites: the model raised RuntimeError on these inputs: mat1 and mat2")


@pytest.mark.parametrize(
    ("spec", "match", "message"),
    [
        ("net_for_tests.py", "**", "is not FILE.py:FACTORY"),
        ("nowhere.py:build", "**", "there is no file nowhere.py"),
        ("{file}:biuld", "**", "has no 'biuld'; did you mean build"),
        ("{file}:broken", "**", "broken() in {file} raised ValueError: no weights here"),
        ("{file}:number", "**", "needs a model (torch.nn.Module), got int"),
        ("{file}:build", "conv*", "nothing in Sequential answers to 'conv*'"),
    ],
)
def test_what_goes_wrong_is_said_in_one_message(file, spec, match, message, capsys):
    assert main(["sites", spec.format(file=file), "--match", match]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tenterhook sites: ")
    assert message.format(file=file) in err


def test_python_dash_m_and_the_script_are_the_same(file):
    for command in ([sys.executable, "-m", "tenterhook"], [sys.executable.replace("python", "tenterhook")]):
        done = subprocess.run([*command, "sites", f"{file}:build"], capture_output=True, text=True, check=True)
        assert "weight 8×4" in done.stdout


WITH_ARGUMENTS = """
import argparse, sys
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--width", type=int, default=3)
parser.add_argument("--match", default="none")
options = parser.parse_args()

def build():
    print(sys.argv[1:], options.match)
    return nn.Linear(4, options.width)
"""


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ("{file} images --width 7", ["images", "--width", "7"]),
        ("--match * {file} images --width=7", ["images", "--width=7"]),
        ("{file} --width 7 images --match **", ["--width", "7", "images"]),
        ("{file} --match=** -- images --match mine --width 7", ["images", "--match", "mine", "--width", "7"]),
        ("--match . {file} -- --width 7 -- images", ["--width", "7", "--", "images"]),
    ],
)
def test_a_script_with_arguments_of_its_own(file, words, argv, tmp_path, capsys):
    (tmp_path / "args_for_tests.py").write_text(WITH_ARGUMENTS)
    before = list(sys.argv)
    target = f"{tmp_path / 'args_for_tests.py'}:build"
    assert main(["sites", *(word.format(file=target) for word in words.split())]) == 0
    first, *table = capsys.readouterr().out.splitlines()
    assert first == f"{argv} {'mine' if 'mine' in argv else 'none'}"
    assert any("7×4" in line for line in table) and sys.argv == before


def test_a_script_that_wants_other_arguments(file, tmp_path, capsys):
    (tmp_path / "args_for_tests.py").write_text(WITH_ARGUMENTS)
    assert main(["sites", f"{tmp_path / 'args_for_tests.py'}:build"]) == 2
    error = capsys.readouterr().err
    assert "the following arguments are required: data" in error and "raised SystemExit on import: 2" in error
    with pytest.raises(SystemExit):
        main(["sites"])
    assert "FILE.py:FACTORY [args…]" in capsys.readouterr().err


def test_a_reader_that_leaves_early(file):
    command = f"{sys.executable} -m tenterhook sites {file}:build | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("address")
    assert done.stderr == ""


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("tenterhook 0.")
