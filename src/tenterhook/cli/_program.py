"""The user's program, run as Python itself would run it: argv, __main__, sys.path, and tracebacks without us."""

import builtins
import importlib.machinery
import io
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

from tenterhook.platform import program as finding
from tenterhook.platform.program import NoSuchModule, find_module, join_threads
from tenterhook.say import say

_OURS = (__file__, finding.__file__)  # what stands before the user's first frame


class Program:
    """Code that is to be __main__."""

    def __init__(self, name: str, argv: list[str], command: list[str], path0: str | None, load: Any) -> None:
        self.name = name  # for the folder of the run
        self.command = command
        self._argv = argv
        self._path0 = path0
        self._load = load  # gives the code and what __main__ has beside it

    def run(self) -> None:
        """Run it here. An exception comes out with a traceback that starts in the user's code, already printed."""
        sys.argv[:] = self._argv
        if self._path0 is not None and sys.path and not sys.flags.safe_path:
            sys.path[0] = self._path0
        error = self._run()
        if isinstance(error, SystemExit) and not isinstance(error.code, int | None):
            say(str(error.code))  # here, as Python would say it after our verdict
            raise SystemExit(1)
        if error is not None:
            if not isinstance(error, SystemExit):
                _print_without_us(error)
            raise error

    def _run(self) -> BaseException | None:
        """What it raises is returned, so that the program's own excepthook sees no exception being handled."""
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        try:
            code, names = self._load()
            main.__dict__.update({"__builtins__": builtins, **names})
            exec(code, main.__dict__)
        except BaseException as error:
            return error
        return None


def find_program(words: list[str]) -> Program:
    """The program that a command line means."""
    if not words:
        raise ValueError("no script was given: tenterhook run [options] script.py [args…]")
    first, *args = words
    if first[:2] in ("-m", "-c"):
        kind = first[:2]
        args = [first[2:], *args] if first[2:] else args
        if not args:
            raise ValueError(f"{kind} needs a {'module' if kind == '-m' else 'piece of code'} after it")
        what, *args = args
        if kind == "-m":
            return Program(
                what.rpartition(".")[2], ["-m", *args], ["-m", what, *args], str(Path.cwd()), lambda: _module(what)
            )
        return Program("command", ["-c", *args], ["-c", what, *args], "", lambda: _code(what))
    path = Path(first)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {first}")
    if path.is_dir():
        raise IsADirectoryError(f"{first} is a folder; for a package use: tenterhook run -m {path.name}")
    folder = os.path.dirname(os.path.realpath(first))  # noqa: PTH120  # as Python works it out
    file = os.path.join(os.getcwd(), first)  # noqa: PTH109, PTH118  # which leaves . and .. as they are
    return Program(path.stem, words, words, folder, lambda: _script(file))


def _code(text: str) -> tuple[types.CodeType, dict[str, Any]]:
    return compile(text, "<string>", "exec", dont_inherit=True), {"__loader__": importlib.machinery.BuiltinImporter}


def _script(file: str) -> tuple[types.CodeType, dict[str, Any]]:
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    return code, {"__file__": file, "__cached__": None, "__doc__": None, "__loader__": loader, "__spec__": None}


def _module(name: str) -> tuple[types.CodeType, dict[str, Any]]:
    try:
        spec, code = find_module(name)
    except NoSuchModule as error:
        sys.exit(f"{sys.executable}: {error}")
    sys.argv[0] = spec.origin
    names = {"__file__": spec.origin, "__cached__": spec.cached, "__loader__": spec.loader, "__spec__": spec}
    return code, {**names, "__package__": spec.parent, "__doc__": None}


def _print_without_us(error: BaseException) -> None:
    """Print the traceback from the user's first frame on, by whatever hook the program has set; Python prints no more.

    The exception goes on, so that Python ends as it always does: exit code 1, or by the signal for Ctrl-C.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    error.__traceback__ = trace
    try:
        sys.excepthook(type(error), error, trace)
    except Exception as another:
        another.__traceback__ = another.__traceback__ and another.__traceback__.tb_next
        say("Error in sys.excepthook:")
        sys.__excepthook__(type(another), another, another.__traceback__)
        say("\nOriginal exception was:")
        sys.__excepthook__(type(error), error, trace)
    sys.excepthook = lambda *_: None


def wait_for_threads() -> None:
    """As Python does once __main__ is through: other threads may still train. Its own wait then has nothing to do."""
    main = threading.main_thread()
    if threading.current_thread() is main and any(not t.daemon for t in threading.enumerate() if t is not main):
        try:
            join_threads()
        except BaseException as error:  # Ctrl-C, which ends the wait and no more
            facts = {"exc_type": type(error), "exc_value": error, "exc_traceback": error.__traceback__}
            sys.unraisablehook(types.SimpleNamespace(**facts, err_msg=None, object=threading))
