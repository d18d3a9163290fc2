"""Programs in processes of their own, with and without us, and what they said and recorded."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tenterhook import open_run

SCRIPTS = Path(__file__).parent / "scripts"  # written as people write them
ENV = {name: value for name, value in os.environ.items() if not name.startswith(("TENTERHOOK", "PYTHON", "COV_"))}
ENV |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "100"}
OFF = {"TENTERHOOK": "0"}  # the same way into the program, and torch is not imported: much faster
RUN = ("-m", "tenterhook", "run")


def python(*words, cwd, env=(), timeout=60, **options):
    """Run `python words` to its end, in a process that starts from nothing."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=ENV | dict(env), timeout=timeout, capture_output=True, **options)


def start(*words, cwd, env=()):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=cwd, env=ENV | dict(env), **pipes)


def without_ours(stderr):
    """What the program itself has said."""
    kept = [line for line in stderr.decode().splitlines(True) if not re.match(r"tenterhook |[┌│└]", line)]
    return "".join(kept)


def latest(folder):
    return open_run(folder / ".tenterhook")


class Zygote:
    """Runs programs in processes that have torch imported already; otherwise as `python` above."""

    def __init__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, Path(__file__).parent / "_zygote.py"], env=ENV, **pipes)

    def __call__(self, *words, cwd, env=()):
        out = cwd.parent / f"{cwd.name}-{time.monotonic_ns()}"
        task = {"words": [*map(str, words)], "cwd": str(cwd), "env": ENV | dict(env), "out": str(out)}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        self.process.stdout.readline()
        code = int(self.process.stdout.readline())
        said = [out.with_name(f"{out.name}.{name}").read_bytes() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(words, code, *said)

    def alike(self, *words, cwd, env=(), options=()):
        """Run it with us and without us; what it says is to be the same."""
        plain = self(*words, cwd=cwd, env=env)
        ours = self(*RUN, *options, *words, cwd=cwd, env=env)
        assert ours.stdout == plain.stdout
        own = [without_ours(one.stderr).partition("in run\n")[2] or without_ours(one.stderr) for one in (plain, ours)]
        assert own[0].endswith(own[1].removeprefix("Traceback (most recent call last):\n"))
        assert ours.returncode == plain.returncode
        return ours


def losses(done):
    return [float.fromhex(line.split()[1]) for line in done.stdout.decode().splitlines() if line.startswith("loss ")]


def recorded(run):
    return run.steps().to_pandas()["loss"].tolist()
