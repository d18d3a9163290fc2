"""`tenterhook run`: a program sees, says and returns what it would without us."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.processes import ENV, OFF, RUN, SCRIPTS, latest, python, without_ours


def alike(*words, cwd, ours=None, env=()):
    """Run a program with and without us, and compare all that can be seen; the result with us."""
    plain = python(*words, cwd=cwd, env=env)
    with_us = python(*RUN, *(words if ours is None else ours), cwd=cwd, env=env)
    assert with_us.stdout == plain.stdout
    assert without_ours(with_us.stderr) == plain.stderr.decode()
    assert with_us.returncode == plain.returncode
    return with_us


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
