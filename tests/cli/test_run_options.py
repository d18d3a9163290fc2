"""`tenterhook run`: options by flag, environment and file, and ranks."""

import os

import pytest

from tenterhook import open_run
from tenterhook.cli._folder import folder_for_run, tidy
from tests.cli.processes import OFF, RUN, SCRIPTS, latest, losses, python


def test_options_by_flag_environment_and_file(zygote, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.tenterhook]\nevery = 7\nout = "runs"\nwhat = ["output", "parameter"]\nfail-on = "error"\nquiet = true\n'
    )
    words = (SCRIPTS / "small.py",)
    done = zygote(*RUN, *words, cwd=tmp_path)
    assert done.stderr == b"" and done.returncode == 0
    run = open_run(tmp_path / "runs")
    assert run.info["schedule"] == {
        "every": 7,
        "dense": 20,
        "budget": None,
        "what": ["output", "parameter"],
        "sites": [],
    }
    steps = run.steps().to_pandas()
    assert steps[steps["sampled"]]["step"].tolist() == [*range(20), 21, 28]
    assert set(run.stats().to_pandas()["what"]) == {"output", "parameter"}

    env = {"TENTERHOOK_EVERY": "5", "TENTERHOOK_DENSE": "3", "TENTERHOOK_QUIET": "0", "TENTERHOOK_WHAT": "update"}
    done = zygote(
        *RUN, "--every=4", "--what", "parameter_grad,output", "--sites", "last, act", *words, cwd=tmp_path, env=env
    )
    assert "one in 4" in done.stderr.decode()
    run = open_run(tmp_path / "runs")
    steps, stats = run.steps().to_pandas(), run.stats().to_pandas()
    assert steps[steps["sampled"]]["step"].tolist() == [0, 1, 2, *range(4, 30, 4)]
    assert set(zip(stats["site"], stats["what"], strict=True)) == {
        *(("last", "output"), ("act", "output"), ("last.weight", "parameter_grad"), ("last.bias", "parameter_grad")),
    }
    (tmp_path / "sub").mkdir()
    done = zygote(*RUN, "--budget", "3%", "--out", "here", *words, cwd=tmp_path / "sub", env={"TENTERHOOK_EVERY": "2"})
    made = open_run(tmp_path / "sub" / "here").info["schedule"]
    assert (made["every"], made["budget"]) == (2, 0.03)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--every", "0", "x.py"), "every=0: sample every N-th step"),
        (("--every", "often", "x.py"), "--every often: a whole number is needed"),
        (("--dense", "-1", "x.py"), "dense"),
        (("--budget", "much", "x.py"), "--budget much: a share such as 3% or 0.03 is needed"),
        (("--budget", "300%", "x.py"), "between 0 and 1"),
        (("--what", "outptu", "x.py"), "there is nothing called outptu to record; there are input, output,"),
        (("--fail-on", "all", "x.py"), "--fail-on all: it is note, warn or error"),
        (("--rules", "absent.py:Rule", "x.py"), "absent.py"),
        (("absent.py",), "there is no file absent.py"),
        ((".",), "is a folder"),
        ((), "no script was given"),
        (("-m",), "-m needs a module"),
        (("--evry", "3", "x.py"), "--evry"),
    ],
)
def test_wrong_words(zygote, tmp_path, words, said):
    (tmp_path / "x.py").write_text("print('ran')")
    done = zygote(*RUN, *words, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == b"" and not (tmp_path / ".tenterhook").exists()
    assert said in done.stderr.decode() and "Traceback" not in done.stderr.decode()


@pytest.mark.parametrize("text", ["[tool.tenterhook]\nevrey = 3\n", "[tool.tenterhook]\nevery = 'x'\n", "[tool.tent"])
def test_a_wrong_file(zygote, tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(text)
    done = zygote(*RUN, "-c", "print('ran')", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == b"" and done.stderr.count(b"\n") == 1


def test_switched_off_and_help(zygote, tmp_path):
    done = zygote(*RUN, "--every", "x", SCRIPTS / "small.py", cwd=tmp_path, env=OFF)
    assert done.returncode == 0 and len(losses(done)) == 30 and done.stderr == b""
    assert not any(tmp_path.iterdir())
    done = zygote(*RUN, "--help", cwd=tmp_path)
    assert done.returncode == 0 and b"script.py [args" in done.stdout and b"--fail-on" in done.stdout


def test_fail_on_and_summary(zygote, tmp_path):
    bad = "import sys, torch; m = torch.nn.Linear(2, 2); o = torch.optim.SGD(m.parameters(), 0.1)\n"
    bad += "for _ in range(3):\n  m(torch.ones(1, 2)).sum().mul(float('nan')).backward(); o.step()\n"
    done = zygote(*RUN, "--fail-on", "error", "-q", "-c", bad, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"", b"")
    first = latest(tmp_path).folder
    assert first.name.endswith("-command") and (tmp_path / ".tenterhook" / ".gitignore").read_text() == "*\n"
    assert (tmp_path / ".tenterhook" / "latest").resolve() == first
    done = zygote(*RUN, "--fail-on", "error", "-c", bad + "sys.exit(0)", cwd=tmp_path)
    assert done.returncode == 3 and "✖" in done.stderr.decode()
    done = zygote(*RUN, "--fail-on", "note", "-c", bad + "sys.exit(9)", cwd=tmp_path)
    assert done.returncode == 9
    done = zygote(*RUN, "-c", bad, cwd=tmp_path)
    assert done.returncode == 0
    assert len({path for path in (tmp_path / ".tenterhook").iterdir() if not path.is_symlink() and path.is_dir()}) == 4

    summary = ("-m", "tenterhook", "summary")
    printed = done.stderr.decode().partition("┌")[2].splitlines()
    done = zygote(*summary, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.decode().partition("┌")[2].splitlines()[1:-1] == printed[1:-1]
    assert "✖ loss is NaN" not in "\n".join(printed) and "dead ReLU: no ReLU" not in "\n".join(printed)
    done = zygote(*summary, "--all", cwd=tmp_path)
    assert "✖ loss is NaN" in done.stdout.decode() and "dead ReLU: no ReLU" in done.stdout.decode()
    done = zygote(*summary, first, "--fail-on", "warn", cwd=tmp_path)
    assert done.returncode == 3 and str(first) in done.stdout.decode()
    (empty := tmp_path / "empty").mkdir()
    for missing, said in (("nowhere", "it is not there"), (".", "there is no run.json in it")):
        done = zygote(*summary, missing, cwd=empty)
        assert done.returncode == 2 and said in done.stderr.decode() and done.stdout == b""
    (first / "run.json").write_text("{")
    assert zygote(*summary, first, cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("words", [("alone",), ()], ids=["alone", "ddp"])
def test_ranks(tmp_path, words):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = python(*launcher, *RUN, SCRIPTS / "ranks.py", *words, cwd=tmp_path)
    said = done.stderr.decode()
    assert done.returncode == 0, said
    assert sorted(line.split(",")[0] for line in done.stdout.decode().splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    folders = [path for path in (tmp_path / ".tenterhook").iterdir() if path.is_dir() and not path.is_symlink()]
    run = latest(tmp_path)
    assert folders == [run.folder] and run.ranks == [0, 1] and run.info["world_size"] == 2
    assert {path.name for path in (tmp_path / ".tenterhook").iterdir()} == {".gitignore", "latest", run.folder.name}
    assert said.count("recording to") == 1 and said.count("┌") == 1
    assert run.steps().to_pandas().groupby("rank")["step"].count().tolist() == [25, 25]
    assert [run.rank_info(rank)["ended"] for rank in (0, 1)] == ["exit 0", "exit 0"]
    assert ("✖ ranks that disagree" in said) == bool(words), said
    assert ("ranks 0 and 1 have different values" in said) == bool(words)


def test_the_folder_that_ranks_share(tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    first = folder_for_run(tmp_path, "train")
    assert folder_for_run(tmp_path, "train") == first
    (note,) = tmp_path.glob(".group*")
    os.utime(note, (1, 1))  # of a job that was killed
    second = folder_for_run(tmp_path, "train")
    assert second != first and folder_for_run(tmp_path, "train") == second
    tidy(tmp_path)
    assert not list(tmp_path.glob(".group*"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len({folder_for_run(tmp_path, "train"), folder_for_run(tmp_path, "train"), first, second}) == 4
