"""`tenterhook run`: signals, other processes and threads, errors of ours, and disks and streams that fail."""

import re
import resource
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.processes import ENV, RUN, SCRIPTS, latest, losses, python, recorded, start, without_ours


def endless(folder, *words, until, run=RUN):
    """Start a training without end, and give it back once it has done so many steps."""
    process = start(*run, SCRIPTS / "endless.py", *words, cwd=folder)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (folder / "done").exists() and int((folder / "done").read_text().split()[0]) >= until:
            return process
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise TimeoutError


def stopped(process, number):
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out.decode(), err


@pytest.mark.parametrize(
    ("number", "words", "code", "out", "ended"),
    [
        (signal.SIGINT, (), -signal.SIGINT, "atexit\n", "KeyboardInterrupt"),
        (signal.SIGINT, ("saves",), 7, "saved\natexit\n", "exit 7"),
        (signal.SIGTERM, (), -signal.SIGTERM, "", "SIGTERM"),
        (signal.SIGTERM, ("handler",), 0, "handled SIGTERM\nleft the loop\natexit\n", "exit 0"),
    ],
)
def test_signals(tmp_path, number, words, code, out, ended):
    process = endless(tmp_path, *words, until=50)
    returned, said, err = stopped(process, number)
    assert (returned, said) == (code, out)
    assert err.count("┌".encode()) == (ended is not None)
    own = without_ours(err)
    if ended == "KeyboardInterrupt":
        assert (
            own.startswith('Traceback (most recent call last):\n  File "' + str(SCRIPTS))
            and "tenterhook/cli" not in own
        )
        assert own.endswith("KeyboardInterrupt\n")
    else:
        assert own == ""
    run = latest(tmp_path)
    assert run.rank_info().get("ended") == ended
    if ended is not None:
        assert len(run.steps()) >= 50 and run.models[0]["name"] == "model"


def test_killed(tmp_path):
    process = endless(tmp_path, until=30)
    for _ in range(100):
        time.sleep(0.1)
        if len(latest(tmp_path).steps()) > 20:
            break
    returned, out, err = stopped(process, signal.SIGKILL)
    assert (returned, out, without_ours(err)) == (-signal.SIGKILL, "", "")
    run = latest(tmp_path)
    steps, stats = run.steps().to_pandas(), run.stats().to_pandas()
    assert len(steps) > 20 and list(steps["step"]) == list(range(len(steps)))
    assert set(stats[stats["step"] == 0]["what"]) == {
        *("input", "output", "output_grad", "parameter", "parameter_grad", "update")
    }
    done = python("-m", "tenterhook", "summary", cwd=tmp_path)
    assert done.returncode == 0 and b"has not ended, or was killed" in done.stdout
    assert f"{len(steps):,} steps" in done.stdout.decode()


@pytest.mark.parametrize("words", [("workers",), ("fork",), ("raise",), ("spawn",)], ids=" ".join)
def test_other_processes_and_errors(zygote, tmp_path, words):
    # What is spawned imports torch once more: without us only where that takes no time.
    start = zygote.alike if "spawn" not in words else lambda *given, cwd: zygote(*RUN, *given, cwd=cwd)
    done = start(SCRIPTS / "small.py", *words, cwd=tmp_path)
    run = latest(tmp_path)
    assert recorded(run) == losses(done) and run.ranks == [0]
    assert done.stderr.count("┌".encode()) == 1
    assert run.rank_info()["ended"] == ("RuntimeError" if "raise" in words else "exit 0")
    assert run.rank_info()["failed"] is None
    assert len([path for path in (tmp_path / ".tenterhook").iterdir() if path.is_dir() and not path.is_symlink()]) == 1


THREAD = f"""
import runpy, sys, threading, time
from concurrent.futures import ThreadPoolExecutor

def late():
    time.sleep(0.5)
    runpy.run_path({str(SCRIPTS / "small.py")!r}, run_name="__main__")

threading.Thread(target=late).start()
ThreadPoolExecutor().submit(time.sleep, 0.1)
"""


def test_a_training_in_a_thread(zygote, tmp_path):
    done = zygote(*RUN, "-c", THREAD, cwd=tmp_path)
    assert done.returncode == 0 and len(losses(done)) == 30
    assert recorded(latest(tmp_path)) == losses(done) and latest(tmp_path).rank_info()["failed"] is None


MOVES = f"import os, runpy; os.chdir('elsewhere'); runpy.run_path({str(SCRIPTS / 'small.py')!r}, run_name='__main__')"


def test_a_program_that_changes_its_directory(zygote, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    done = zygote(*RUN, "-c", MOVES, cwd=tmp_path)
    assert recorded(latest(tmp_path)) == losses(done) and not list((tmp_path / "elsewhere").iterdir())
    assert "└ tenterhook summary .tenterhook/" in done.stderr.decode()


@pytest.mark.parametrize("word", ["break", "break-writing"])
def test_an_error_of_ours_is_said_once(zygote, tmp_path, word):
    plain = zygote(SCRIPTS / "small.py", cwd=tmp_path)
    done = zygote(*RUN, SCRIPTS / "small.py", word, cwd=tmp_path)
    assert done.stdout == plain.stdout and done.returncode == 0
    said = done.stderr.decode()
    assert said.count("recording stopped (") == 1 and "Traceback" not in said and said.count("┌") == 1
    run = latest(tmp_path)
    if word == "break":
        assert recorded(run) == losses(done)[: len(run.steps())] and len(run.steps()) >= 10
        assert "recording stopped early: TypeError" in said
    again = zygote("-m", "tenterhook", "summary", cwd=tmp_path)
    assert again.returncode == 0


@pytest.mark.parametrize("size", [100, 9_000])
def test_a_full_disk(zygote, tmp_path, size):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    env = {"STEPS": "60"}
    plain = zygote(SCRIPTS / "small.py", cwd=tmp_path, env=env)
    done = python(*RUN, "--every", "1", SCRIPTS / "small.py", cwd=tmp_path, env=env, preexec_fn=limit)
    assert done.stdout == plain.stdout and done.returncode == 0
    said = done.stderr.decode()
    assert "File too large" in said and "Traceback" not in said
    assert len(re.findall("^tenterhook: (recording stopped|nothing is recorded)", said, re.M)) == 1
    if size > 100:
        assert len(latest(tmp_path).steps()) < 60


@pytest.mark.parametrize("kind", ["read-only", "file", "missing parent"])
def test_an_output_folder_that_cannot_be_written(zygote, tmp_path, kind):
    place = {"read-only": "/proc/here", "file": str(tmp_path / "file"), "missing parent": str(tmp_path / "file" / "x")}
    (tmp_path / "file").write_text("")
    done = zygote(*RUN, "--out", place[kind], SCRIPTS / "small.py", cwd=tmp_path)
    assert done.returncode == 0 and len(losses(done)) == 30
    said = done.stderr.decode()
    assert said.startswith("tenterhook: nothing is recorded: ") and said.count("\n") == 1


def test_a_stderr_that_is_closed_or_full(zygote, tmp_path):
    env = ENV | {"STEPS": "5"}
    plain = zygote(SCRIPTS / "small.py", cwd=tmp_path, env=env)
    command = f"{sys.executable} -m tenterhook run {SCRIPTS / 'small.py'} 2>"
    for where in ("/dev/full", "&-"):
        done = subprocess.run(command + where, shell=True, cwd=tmp_path, env=env, stdout=subprocess.PIPE, timeout=60)
        assert (done.stdout, done.returncode) == (plain.stdout, 0)
    assert recorded(latest(tmp_path)) == losses(plain)
