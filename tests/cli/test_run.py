"""`tenterhook run` with real scripts in real processes. Those under `scripts/` are written as people write them."""

import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_module

from tenterhook import TenterhookWarning, open_run, watch
from tenterhook.cli._folder import folder_for_run, tidy
from tenterhook.report.verdict import Verdict
from tests.conftest import ours

SCRIPTS = Path(__file__).parent / "scripts"
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


def alike(*words, cwd, ours=None, env=(), signed=None):
    """Run a program with and without us, and compare all that can be seen; the result with us."""
    plain = python(*words, cwd=cwd, env=env)
    with_us = python(*RUN, *(words if ours is None else ours), cwd=cwd, env=env)
    assert with_us.stdout == plain.stdout
    assert without_ours(with_us.stderr) == plain.stderr.decode()
    assert with_us.returncode == plain.returncode
    return with_us


def latest(folder):
    return open_run(folder / ".tenterhook")


# The same program.


def test_a_program_sees_what_it_would_see(tmp_path):
    words = ("--every", "3", "-q", "-m", "--", "-c", "x", "--fail-on", "--out=/nowhere")
    done = alike(SCRIPTS / "same.py", *words, cwd=tmp_path)
    facts = json.loads(done.stdout[: done.stdout.index(b"\n}\n") + 2])
    assert facts["argv"] == [str(SCRIPTS / "same.py"), *words] and facts["pickled"] and facts["main"]
    assert done.stdout.endswith("\x00éthread ended\natexit ran\n".encode())
    assert [path.name for path in tmp_path.iterdir()] == [".tenterhook"]


@pytest.mark.parametrize("file", ["./same.py", "../scripts/same.py", "link.py", "sub/../same.py"])
def test_a_program_is_found_as_python_finds_it(tmp_path, file):
    for name in ("same.py", "beside.py"):
        (tmp_path / "scripts" / "sub").mkdir(parents=True, exist_ok=True)
        (tmp_path / "scripts" / name).write_bytes((SCRIPTS / name).read_bytes())
    (tmp_path / "scripts" / "link.py").symlink_to(tmp_path / "scripts" / "same.py")
    alike(file, "-m", cwd=tmp_path / "scripts", env=OFF)


def test_the_console_script_is_the_same(tmp_path):
    plain = python(SCRIPTS / "same.py", cwd=tmp_path)
    command = [Path(sys.executable).parent / "tenterhook", "run", SCRIPTS / "same.py"]
    done = subprocess.run(command, cwd=tmp_path, env=ENV | OFF, capture_output=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == (plain.stdout, b"", 0)


@pytest.fixture
def package(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "pack/__init__.py").write_text("")
    (tmp_path / "bad/__init__.py").write_text("import nothing_like_this")
    (tmp_path / "bad/mod.py").write_text("")
    (tmp_path / "pack/__main__.py").write_text("import sys; print(__name__, __spec__.name, __package__, sys.argv[1:])")
    text = (
        "import sys; from . import __path__; print(__name__, __spec__.name, __package__, __file__, sys.argv, sys.path)"
    )
    (tmp_path / "pack/mod.py").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "pack.mod", "--every", "3", "-q", "--", "-m", "x"),
        ("-mpack.mod", "-q"),
        ("-m", "pack", "a"),
        ("-m", "pack.absent"),
        ("-m", "absent"),
        (
            "-c",
            "import sys; print(sys.argv, sys.path, sorted({*globals()} - {'__annotations__'}), __loader__)",
            "-q",
            "--",
            "x",
        ),
        ("-cprint(1)", "--every"),
        ("-c", "1 +"),
    ],
)
def test_modules_and_code(package, words):
    alike(*words, cwd=package, env=OFF)


def test_an_import_error_inside_a_package_is_the_program_s(package):
    done = python(*RUN, "-m", "bad.mod", cwd=package, env=OFF)
    assert done.returncode == 1 and done.stderr.endswith(b"No module named 'nothing_like_this'\n")
    assert b"bad/__init__.py" in done.stderr and b"tenterhook" not in done.stderr.replace(bytes(package), b"")


ENDS = {
    "text": "import sys; sys.exit('the end')",
    "three": "import sys; sys.exit(3)",
    "none": "import sys; sys.exit(None)",
    "false": "import sys; sys.exit(False)",
    "raises": "def f():\n    raise ValueError('no')\n\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    f()",
    "missing": "open('/nowhere/x')",
    "pipe": "raise BrokenPipeError('mine')",
    "import": "import nothing_like_this",
    "syntax": "x = 1\ny = = 2\n",
    "assert": "assert 1 == 2, 'wrong'",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno, sys.exc_info())\nint('x')",
    "bad hook": "import sys\ndef hook(*a):\n    raise KeyError('hook')\nsys.excepthook = hook\nint('x')",
    "group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "abort": "import os; os.abort()",
    "exits at once": "import os; os._exit(5)",
    "null": "x = '\\0'\nraise RuntimeError(x)",
    "interrupts": "raise KeyboardInterrupt",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_program_ends_as_it_would(tmp_path, name):
    (tmp_path / "end.py").write_text("print('out')\n" + ENDS[name])
    alike("end.py", cwd=tmp_path, env=OFF)


@pytest.mark.parametrize("name", ["text", "raises"])
def test_a_recorded_program_ends_as_it_would(tmp_path, name):
    (tmp_path / "end.py").write_text("print('out')\n" + ENDS[name])
    done = alike("end.py", cwd=tmp_path)
    assert done.stderr.count("┌".encode()) == 1
    assert latest(tmp_path).rank_info()["ended"] == {"text": "exit 1", "raises": "ValueError"}[name]


# What may happen to it.


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
        (signal.SIGTERM, (), -signal.SIGTERM, "", None),
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


@pytest.fixture(scope="module")
def zygote():
    made = Zygote()
    yield made
    made.process.stdin.close()
    made.process.wait(10)
    made.process.stdout.close()


def losses(done):
    return [float.fromhex(line.split()[1]) for line in done.stdout.decode().splitlines() if line.startswith("loss ")]


def recorded(run):
    return run.steps().to_pandas()["loss"].tolist()


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


LATER = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(512, 8)
y = x[:, :3].argmax(1)

def make():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3))

def train(model, parameters, steps, y, rate):
    optimizer = torch.optim.SGD(parameters, lr=rate)
    for k in range(steps):
        rows = torch.randint(512, (32,))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = rate if k > 14 else 3.0
        optimizer.step()

first, second, third = make(), make(), make()
train(first, [*first.parameters()], 210, y, 0.05)
train(second, [*second[4].parameters()], 210, y[torch.randperm(512)], 0.05)
train(third, [*third.parameters()], 30, y, 5.0)
"""


def test_a_later_model_is_judged_as_the_first_one_is(zygote, tmp_path):
    zygote(*RUN, "--every", "1", "-c", LATER, cwd=tmp_path)
    found = latest(tmp_path).findings().to_pylist()
    told = {(one["rule"], one["model"]) for one in found if one["severity"] == "warn"}
    assert told == {("parameter never trained", "model-2"), ("update-to-weight ratio", "model-3")}
    assert min(one["step"] for one in found if one["model"] == "model-3") >= 440  # not in its first 20 steps


MANY = """
import torch
for _ in range(60):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
"""


def test_one_model_after_the_other(zygote, tmp_path):
    done = zygote(*RUN, "--every", "2", "--dense", "4", "-c", MANY, cwd=tmp_path)
    run = latest(tmp_path)
    assert [model["name"] for model in run.models] == ["model", *(f"model-{k}" for k in range(2, 33))]
    assert run.rank_info()["steps"] == 180 and run.rank_info()["sampled"] < 150
    assert "models after the first 32 were not recorded" in done.stderr.decode()


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


# The same losses, to the last bit.

STEPS = {"cnn": 40, "accumulation": 25, "gan": 30, "bfloat16": 30, "lbfgs": 8, "checkpointed": 30, "averaged": 30}
STEPS |= {"saved": 30, "listed": 30, "by_hand": 30, "inference": 25, "compiled": 40, "compiled_in_place": 40}
STEPS |= {"compiled_part": 40, "scaler": None, "sliced": 30, "made_anew": 30, "folds": 90, "exported": 30}
MODELS = {
    "cnn": ["net"],
    "gan": ["generator", "critic"],
    "checkpointed": ["model", "head"],
    "listed": ["layer", "layer-2"],
}
MODELS |= {"folds": ["model", "model-2", "model-3"], "exported": ["features", "model", "made", "made-2"]}
MODELS |= {"averaged": ["model", "ema", "other", "other-2"], "saved": ["model", "model-2", "model-3"]}


@pytest.mark.parametrize("style", STEPS)
def test_losses_are_the_same_to_the_last_bit(zygote, tmp_path, style):
    done = zygote.alike(SCRIPTS / "styles.py", style, cwd=tmp_path)
    run = latest(tmp_path)
    assert run.rank_info()["failed"] is None and run.rank_info()["ended"] == "exit 0"
    assert [model["name"] for model in run.models] == MODELS.get(style, ["model"])
    if style == "scaler":
        check_unscaled(run, done)
        return
    assert len(run.steps()) == STEPS[style]
    if style not in ("inference", "averaged"):
        assert recorded(run) == pytest.approx(losses(done), rel=1e-6)
    stats = run.stats().to_pandas()
    kinds = set(stats["what"])
    if style.startswith("compiled"):
        assert {"parameter", "parameter_grad", "update"} <= kinds <= {"input", "parameter", "parameter_grad", "update"}
        assert set(stats["model"]) == {"model"}
    elif style in ("by_hand", "inference"):
        assert kinds == {"input", "output"} | ({"output_grad"} if style == "by_hand" else set())
    else:
        assert kinds == {"input", "output", "output_grad", "parameter", "parameter_grad", "update"}
    if style == "gan":
        graded = stats[(stats["what"] == "output_grad") & (stats["step"] == 3)]
        assert {*graded["model"]} == {"generator", "critic"}


def check_unscaled(run, done):
    """The gradients are those that the optimizer saw, and those of outputs are divided by the scale."""
    rows = [line.split() for line in done.stdout.decode().splitlines() if line.startswith(("grads", "skipped"))]
    taken = [row for row in rows if row[0] == "grads"]
    assert 3 <= len(rows) - len(taken) <= 15
    steps = run.steps().to_pandas()
    assert len(steps) == len(taken)
    assert steps["skipped"].sum() == len(rows) - len(taken) and steps["backwards"].sum() == len(rows)
    stats = run.stats().to_pandas()
    assert steps["scale"].nunique() > 1
    for number in sorted(set(stats["step"])):
        one = stats[stats["step"] == number].set_index(["what", "site"])["sumsq"]
        scale, logits, *parameters = (float(taken[number][1]), *(float.fromhex(word) for word in taken[number][2:]))
        assert steps["scale"][number] == scale
        assert one["output_grad", "."] == pytest.approx(logits, rel=1e-5)
        names = ("1.weight", "1.bias", "4.weight", "4.bias")
        assert [one["parameter_grad", name] for name in names] == pytest.approx(parameters, rel=1e-5)


LASTING = {  # the models, and how they are called
    "a slice in a variable": (["full"], "full(x()); m = full[:2]; train(lambda: m(x()), m)"),
    "a slice whose whole is gone": (["full", "m"], "full(x()); m = full[:2]; del full; train(lambda: m(x()), m)"),
    "an attribute": (["ReLU", "full"], "box.m = nn.ReLU(); train(lambda: full(box.m(x())), full)"),
    "a list": (["ReLU", "full"], "a = [nn.ReLU()]; train(lambda: full(a[0](x())), full)"),
    "a tuple": (["ReLU", "full"], "a = (nn.ReLU(),); train(lambda: full(a[0](x())), full)"),
    "a larger one": (["Sequential"], "box.m = nn.Sequential(full, nn.ReLU()); train(lambda: box.m(x()), full)"),
    "weights alone": (["Tied"], "one = full[0]; box.m = Tied(one); train(lambda: box.m(x()), full)"),
    "for a call": (["full"], "train(lambda: nn.ReLU()(full[1:](full[:1](x()))), full)"),
    "a slice in a list": (["full"], "full(x()); a = [full[:2]]; train(lambda: a[0](x()), full)"),
    "a slice in a checkpoint": (
        ["full"],
        "full(x()); train(lambda: full[1:](checkpoint(full[:1], x(), use_reentrant=False)), full, torch.optim.SGD)",
    ),
    "around a call": (["full"], "train(lambda: nn.Sequential(full, nn.Tanh())(x()), full)"),
}
LAST = """
import gc
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Tied(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return nn.functional.linear(x, self.part.weight, self.part.bias)

class Box:
    pass

def x():
    return torch.randn(16, 4)

def train(call, model, kind=None):
    optimizer = kind(model.parameters(), lr=0.01) if kind else None
    for _ in range(25):
        call().square().mean().backward()
        if optimizer:
            optimizer.step()
        model.zero_grad()

def main():
    box, full = Box(), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    {}

gc.unfreeze()  # as in styles.py
main()
"""


@pytest.mark.parametrize("case", LASTING)
def test_what_lasts_is_a_model_and_what_is_made_for_a_call_is_none(zygote, tmp_path, case):
    models, lines = LASTING[case]
    done = zygote(*RUN, "-c", LAST.format(lines), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = latest(tmp_path)
    assert [model["name"] for model in run.models] == models
    assert len(run.steps()) == 25


# What others have written.


@pytest.mark.parametrize(
    ("script", "steps", "model", "words"),
    [
        ("lightning_digits", 30, "LitDigits", ()),
        ("hf_trainer", 14, "model", ()),
        ("accelerated", 12, "classifier", ("--every", "1", "-q", "24")),
        ("notebook", 30, "net", ()),
    ],
)
def test_frameworks(zygote, tmp_path, script, steps, model, words):
    done = zygote(*RUN, SCRIPTS / f"{script}.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    run = latest(tmp_path)
    assert run.rank_info()["failed"] is None and run.models[0]["name"] == model and len(run.steps()) == steps
    printed, mine = (
        [line.split() for line in done.stdout.decode().splitlines() if line.startswith("loss ")],
        recorded(run),
    )
    if script == "hf_trainer":  # it says the sum over the micro-batches, in four digits
        assert [float(words[2]) for words in printed] == pytest.approx(mine, rel=1e-3)
        assert set(run.steps().to_pandas()["backwards"]) == {2}
    elif script == "accelerated":  # it divides by the number of micro-batches
        two = losses(done)
        assert mine == pytest.approx([(a + b) / 2 for a, b in zip(two[::2], two[1::2], strict=True)], rel=1e-5)
    else:
        assert mine == losses(done)
    kinds = {"input", "output", "output_grad", "parameter", "parameter_grad", "update"}
    assert set(run.stats().to_pandas()["what"]) == kinds


# Options.


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
    done = zygote(*summary, first, "--fail-on", "warn", cwd=tmp_path)
    assert done.returncode == 3 and str(first) in done.stdout.decode()
    (empty := tmp_path / "empty").mkdir()
    for missing, said in (("nowhere", "it is not there"), (".", "there is no run.json in it")):
        done = zygote(*summary, missing, cwd=empty)
        assert done.returncode == 2 and said in done.stderr.decode() and done.stdout == b""
    (first / "run.json").write_text("{")
    assert zygote(*summary, first, cwd=tmp_path).returncode == 2


# Ranks.


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


# The files.


@pytest.fixture(scope="module")
def small(zygote, tmp_path_factory):
    """A run of 60 steps, in several batches."""
    folder = tmp_path_factory.mktemp("small")
    done = zygote(*RUN, "--every", "1", "-c", SEVERAL, cwd=folder, env={"STEPS": "60"})
    assert done.returncode == 0
    return latest(folder)


SEVERAL = f"""
import runpy, sys
import tenterhook.record.log as log
log._ROWS = 200
sys.argv = [{str(SCRIPTS / "small.py")!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_other_tools_open_the_files(small):
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    for name in ("stats", "steps"):
        path = small.folder / "rank-0" / f"{name}.arrows"
        with path.open("rb") as file:
            rows = pyarrow.ipc.open_stream(file).read_all()
        assert len(rows) > 20 and rows.to_pandas().equals(small.table(name, 0).drop(["rank"]).to_pandas())
        assert polars.read_ipc_stream(path).height == len(rows)
        assert duckdb.sql("select count(*), max(step) from rows").fetchall() == [(len(rows), 59)]


def test_a_file_that_was_cut_off(small, tmp_path):
    whole = {name: small.table(name) for name in ("stats", "steps")}
    (tmp_path / "rank-0").mkdir()
    for name in ("run.json", "rank-0/rank.json"):
        (tmp_path / name).write_bytes((small.folder / name).read_bytes())
    for name, table in whole.items():
        data = (small.folder / "rank-0" / f"{name}.arrows").read_bytes()
        with pyarrow.ipc.open_stream(data) as stream:
            ends = list(itertools.accumulate((len(batch) for batch in stream), initial=0))
        assert len(ends) > 3
        seen = set()
        for size in range(0, len(data) + 1, max(1, len(data) // 300)):
            (tmp_path / "rank-0" / f"{name}.arrows").write_bytes(data[:size])
            part = open_run(tmp_path).table(name)
            assert part.equals(table.slice(0, len(part)))
            seen.add(len(part))
        assert seen <= set(ends) and len(seen) >= len(ends) - 1
    (tmp_path / "rank-0/rank.json").unlink()
    assert open_run(tmp_path).models == [] and len(open_run(tmp_path).findings()) == 0
    assert "nothing" in str(Verdict.of(open_run(tmp_path)))


def test_reading_needs_no_torch(small):
    code = (
        "import sys; from tenterhook import open_run; run = open_run(sys.argv[1]); run.stats().to_pandas(); run.steps()"
    )
    done = python("-c", code + "; print('torch' in sys.modules, run)", small.folder, cwd=small.folder)
    assert done.stdout.decode().startswith("False Run("), done.stderr


# In code.


def hooks():
    module = torch.nn.modules.module
    tables = [getattr(module, name) for name in dir(module) if name.startswith("_global_") and "hooks" in name]
    tables += [optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks]
    return sum(len(table) for table in tables)


def fit(model, steps=12, **wrong):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if wrong.get("at") == step:
            raise KeyError("mine")


def build():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def test_watch_leaves_nothing_behind(tmp_path):
    before, model = hooks(), build()
    with watch(model, to=tmp_path / "a") as run:
        fit(model)
        assert hooks() > before
    assert hooks() == before and not ours(model)
    assert len(run.open().steps()) == 12 and run.open().rank_info()["ended"] == "finished"
    with pytest.raises(KeyError, match="mine"), watch(model, to=tmp_path / "b"):
        fit(model, at=5)
    assert hooks() == before and not ours(model)
    assert open_run(tmp_path / "b").rank_info()["ended"] == "KeyError" and len(open_run(tmp_path / "b").steps()) == 6
    with pytest.raises(FileExistsError, match="holds a run already"), watch(model, to=tmp_path / "a"):
        pass
    with pytest.raises(RuntimeError, match="entered once"), run:
        pass
    assert hooks() == before and not ours(model)


def test_watch_twice_at_once(tmp_path):
    before, model, other = hooks(), build(), build()
    with watch(model, to=tmp_path / "a"), watch(model, to=tmp_path / "b"), watch(other, to=tmp_path / "c"):
        fit(model)
        fit(other, 5)
    assert hooks() == before and not ours(model) and not ours(other)
    a, b, c = (open_run(tmp_path / name) for name in "abc")
    assert a.stats().to_pandas().equals(b.stats().to_pandas())
    assert [len(run.steps()) for run in (a, b, c)] == [12, 12, 5]


def test_watch_a_frozen_model_and_one_without_optimizer(tmp_path):
    model = build().requires_grad_(False)
    with watch(model, to=tmp_path / "a"), torch.no_grad():
        for _ in range(5):
            model(torch.randn(4, 8))
    assert len(open_run(tmp_path / "a").steps()) == 5
    assert set(open_run(tmp_path / "a").stats().to_pandas()["what"]) == {"input", "output"}
    model = build()
    with watch(model, to=tmp_path / "b"):
        for _ in range(5):
            model(torch.randn(4, 8)).sum().backward()
    assert len(open_run(tmp_path / "b").steps()) == 5
    with pytest.warns(TenterhookWarning, match="recorded nothing"), watch(model, to=tmp_path / "c"):
        pass
