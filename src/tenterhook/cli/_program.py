"""The user's program, run as Python itself would run it: argv, __main__, sys.path, and tracebacks without us."""

import builtins
import importlib.machinery
import io
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any


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
        if self._path0 is not None:
            if sys.flags.safe_path:
                pass
            elif sys.path:
                sys.path[0] = self._path0
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        try:
            code, names = self._load()
            main.__dict__.update({"__builtins__": builtins, **names})
            exec(code, main.__dict__)
        except SystemExit:
            raise
        except BaseException as error:
            _print_without_us(error)
            raise


def find_program(script: list[str], module: list[str] | None, code: list[str] | None) -> Program:
    """The program that a command line means."""
    if module:
        name, *args = module
        command = ["-m", name, *args]
        return Program(name.rpartition(".")[2], ["-m", *args], command, str(Path.cwd()), lambda: _module(name))
    if code:
        text, *args = code
        return Program(
            "command", ["-c", *args], ["-c", text, *args], "", lambda: (compile(text, "<string>", "exec"), {})
        )
    if script[:1] == ["--"]:
        script = script[1:]
    if not script:
        raise ValueError("no script was given: tenterhook run [options] script.py [args…]")
    file, *args = script
    path = Path(file)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {file}")
    if path.is_dir():
        raise IsADirectoryError(f"{file} is a folder; for a package use: tenterhook run -m {path.name}")
    folder = os.path.dirname(os.path.realpath(file))  # noqa: PTH120  # as Python works it out
    return Program(path.stem, [file, *args], [file, *args], folder, lambda: _script(os.path.abspath(file)))  # noqa: PTH100


def _script(file: str) -> tuple[types.CodeType, dict[str, Any]]:
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    return code, {"__file__": file, "__cached__": None, "__doc__": None, "__loader__": loader, "__spec__": None}


def _module(name: str) -> tuple[types.CodeType, dict[str, Any]]:
    try:
        _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]
    except ImportError as error:
        print(f"{sys.executable}: {error}", file=sys.stderr)
        sys.exit(1)
    sys.argv[0] = spec.origin
    names = {"__file__": spec.origin, "__cached__": spec.cached, "__loader__": spec.loader, "__spec__": spec}
    return code, {**names, "__package__": spec.parent, "__doc__": None}


def _print_without_us(error: BaseException) -> None:
    """Print the traceback from the user's first frame on, by whatever hook the program has set; Python prints no more.

    The exception goes on, so that Python ends as it always does: exit code 1, or by the signal for Ctrl-C.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.excepthook(type(error), error, trace)
    sys.excepthook = lambda *_: None
