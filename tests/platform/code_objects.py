"""Python source to take apart: our own and a part of the standard library, or all of it with SELFCHECK=1."""

import os
import sysconfig
import types
import warnings
from pathlib import Path

LIBRARY = Path(sysconfig.get_path("stdlib"))
SOME = [
    "asyncio",
    "dataclasses.py",
    "contextlib.py",
    "typing.py",
    "decimal.py",
    "_pydecimal.py",
    "enum.py",
    "inspect.py",
]


def files():
    """The source files."""
    if os.environ.get("SELFCHECK"):
        yield from (path for path in sorted(LIBRARY.rglob("*.py")) if "site-packages" not in path.parts)
        return
    for name in SOME:
        path = LIBRARY / name
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]
    yield from sorted(Path(__file__).parents[2].glob("src/**/*.py"))


def codes():
    """Every code object in them."""
    for path in files():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                waiting = [compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)]
        except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):  # the tests of Python have some
            continue
        while waiting:
            code = waiting.pop()
            waiting += [one for one in code.co_consts if isinstance(one, types.CodeType)]
            yield code
