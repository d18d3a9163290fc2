"""The checks on every Python that inner addresses are accepted for: python tests/selfcheck [VERSION...]

Prints a line for each Python, and what is unexpected; ends with 1 if anything is.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "src"), str(HERE)]

from expected import EXPECTED, MODULES  # noqa: E402

from tenterhook.platform.assembler import VERSIONS  # noqa: E402

CHECKS = HERE / "checks.py"
PYODIDE_VERSION = "314.0.7"
PYODIDE = ROOT / "out" / f"pyodide-{PYODIDE_VERSION}"
PROGRAMS = 150
AT_MOST = 600  # seconds for one test module: then it is stopped
FOUND = "FOUND "
Command = list[str]


def interpreter(version: str) -> Command | None:
    """How to run a script with a Python, if it is there."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    known = [sys.executable, f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    for command in known:
        asks = "import sys; print('%d.%d' % sys.version_info[:2])"
        if shutil.which(command) and _output([command, "-c", asks]).strip() == version:
            return [command, str(CHECKS)]
    return None


def pyodide(version: str) -> Command | str:
    """How to run a script with the CPython of npm's pyodide; or why that cannot be."""
    if not (shutil.which("node") and shutil.which("npm")):
        return f"neither python{version}, nor node and npm for pyodide"
    if version.replace(".", "") != PYODIDE_VERSION.split(".")[0]:
        return f"no python{version}"
    if (PYODIDE / "node_modules" / "pyodide" / "pyodide.mjs").exists():
        return _in_node()
    install = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(PYODIDE), f"pyodide@{PYODIDE_VERSION}"]
    PYODIDE.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        return f"no python{version}, and npm could not install pyodide: {done.stderr.strip()[-300:]}"
    return _in_node()


def _in_node() -> Command:
    """With the tests of the newest Python that is there, since pyodide has none."""
    newest = next(filter(None, (interpreter(f"{a}.{b}") for a, b in reversed(VERSIONS))))
    tests = _output([newest[0], "-c", "import test; print(*test.__path__)"]).strip()
    return ["node", str(HERE / "pyodide.mjs"), str(PYODIDE), str(ROOT), tests, str(CHECKS.relative_to(ROOT))]


def _output(command: Command) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def check(command: Command, what: str, *rest: str) -> dict:
    """Runs a check; returns what it found."""
    lines = _run([*command, what, *rest])
    found = [json.loads(line.removeprefix(FOUND)) for line in lines if line.startswith(FOUND)]
    return found[0] if found else {"bad": {what: "".join(lines[-30:])}}


def suite(command: Command, what: str, names: list[str]) -> dict:
    """Runs CPython's own tests; where one stops the process, those that follow run in another one."""
    total: dict = {"tests": 0, "instrumented": 0, "bad": {}}
    while names:
        lines = _run([*command, what, *names])
        for line in lines:
            if line.startswith(FOUND):
                found = json.loads(line.removeprefix(FOUND))
                total["tests"] += found["tests"]
                total["instrumented"] += found.get("functions", 0)
                total["bad"] |= found["bad"]
                names = names[names.index(found["name"]) + 1 :]
        if names:
            total["bad"][f"{names[0]}:stops"] = "".join(lines[-30:])
            names = names[1:]
    return total


def _run(command: Command) -> list[str]:
    """The lines that a process prints, until it ends or says nothing for long."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
    )
    lines: list[str] = []
    assert process.stdout is not None
    timer = threading.Timer(AT_MOST, process.kill)
    timer.start()
    for line in process.stdout:
        lines.append(line)
        if line.startswith(FOUND):
            timer.cancel()
            timer = threading.Timer(AT_MOST, process.kill)
            timer.start()
    process.wait()
    timer.cancel()
    return lines


def why_expected(test: str) -> str | None:
    """Why a test of CPython's fails by nature: see expected.py."""
    return next((why for why, tests in EXPECTED.items() if any(fnmatch(test, one) for one in tests)), None)


def tests_of(command: Command) -> dict:
    """CPython's own tests, without those that fail by nature or without us, too."""
    found = suite(command, "suite", [f"test.test_{name}" for name in MODULES.split()])
    bad = {test: text for test, text in found["bad"].items() if not why_expected(test)}
    expected = len(found["bad"]) - len(bad)
    modules = sorted({test.split(":")[0] for test in bad})
    alone = set().union(*(suite(command, "suite", [module])["bad"] for module in modules))
    plain = suite(command, "bare", modules)["bad"].keys() & alone
    bad = {test: text for test, text in bad.items() if test in alone - plain}  # others come of the tests before
    return {**found, "expected": expected, "without us": len(plain & found["bad"].keys()), "bad": bad}


def summary(trip: dict, programs: dict, tests: dict) -> int:
    """Prints the line of one Python, and what is unexpected."""
    bad = trip["bad"] | programs["bad"] | tests["bad"]
    print(
        f"{trip.get('python', 'stopped')}: {trip.get('files', 0)} files, {trip.get('codes', 0)} code objects;"
        f" {programs.get('programs', 0)} programs; {tests['tests']} tests of CPython's,"
        f" {tests['instrumented']} functions instrumented; {tests['expected']} expected failures,"
        f" {tests['without us']} that fail without us, too; {len(bad)} unexpected",
        flush=True,
    )
    for test, text in bad.items():
        print(f"  {test}", *text.strip().splitlines(), sep="\n    ", flush=True)
    return len(bad)


def main(versions: list[str]) -> int:
    """Every check on every version, two at a time."""
    commands = {version: interpreter(version) or pyodide(version) for version in versions}
    runnable = [command for command in commands.values() if isinstance(command, list)]
    with ThreadPoolExecutor(2) as pool:
        started = [
            (
                pool.submit(check, command, "roundtrip"),
                pool.submit(check, command, "programs", str(PROGRAMS)),
                pool.submit(tests_of, command),
            )
            for command in runnable
        ]
        bad = sum(summary(*(one.result() for one in parts)) for parts in started)
    for version, why in commands.items():
        if isinstance(why, str):
            print(f"{version}: NOT CHECKED, since there is {why}")
    return bad


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:] or [f"{a}.{b}" for a, b in VERSIONS])))
