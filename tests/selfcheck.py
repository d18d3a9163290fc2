"""Checks of the assembler and of instrumented copies that need neither torch nor pytest, for every Python.

python tests/selfcheck.py roundtrip                  every code object of the standard library, taken apart and back
python tests/selfcheck.py programs 1000              random programs against calls written into their source
python tests/selfcheck.py suite test.test_generators CPython's own tests, every function instrumented everywhere
"""

import importlib.abc
import importlib.machinery
import io
import os
import random
import sys
import unittest
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "platform"), str(ROOT / "tests" / "inside")]

from tenterhook.inside import dispatch  # noqa: E402
from tenterhook.inside.instrument import CALLED, HERE, Want, instrument  # noqa: E402
from tenterhook.platform.assembler import Assembly  # noqa: E402

EVERYTHING = Want(None, True, True)
SUITE = "grammar generators named_expressions listcomps with patma scope coroutines super functools contextlib"
SUITE += " asyncgen enum unpack unpack_ex fstring dict list set iter copy exceptions dataclasses collections"
# They look at the variables or the names of a function, or at how deep the stack is.
BY_NATURE = {"test_funcdef", "test_recursion_in_except_handler", "test_type_params"}


def keep(place, value, here, extra):
    """What is done at most places: nothing."""
    return value


def looked(place, value, here, extra):
    """Hides our variables."""
    if isinstance(value, dict):
        for name in (HERE, CALLED):
            value.pop(name, None)
    elif isinstance(value, list):
        value[:] = [name for name in value if name not in (HERE, CALLED)]
    return value


def act(**others):
    """What is done at each kind of place."""
    dispatch.acts.update(dict.fromkeys(("begin", "stored", "wrote", "made", "called", "follow"), keep), looked=looked)
    dispatch.acts.update(others)
    dispatch.install()


def roundtrip():
    """Counts the code objects that do not come back as they were."""
    from code_objects import codes

    os.environ["SELFCHECK"] = "1"
    count = bad = 0
    for code in codes():
        again = Assembly(code).assemble()
        count += 1
        bad += (again.co_code, again.co_exceptiontable) != (code.co_code, code.co_exceptiontable)
        bad += list(again.co_positions()) != list(code.co_positions())
    print(f"{sys.version.split()[0]}: {count} code objects, {bad} differ")
    return bad


def programs(count):
    """Counts the random programs that compute something else, or whose assignments are told of differently."""
    bad = 0
    for seed in range(count):
        edits = ()
        for _ in range(3):
            truth, ours = (_run(seed, edits, is_copy) for is_copy in (False, True))
            bad += truth != ours
            edits = random.Random(seed).sample(truth[1], min(1, len(truth[1])))
    print(f"{sys.version.split()[0]}: {count} programs, {bad} differ")
    return bad


def _run(seed, edits, is_copy):
    from programs import Closing, program, told

    counts, log = Counter(), []

    def tell(path, name, value):
        if not isinstance(value, float):
            return value
        key = (path, name, counts[path, name])
        counts[path, name] += 1
        log.append((*key, value))
        return value * 7 if any(key == edit[:3] for edit in edits) else value

    source, known = program(random.Random(seed)), {"Closing": Closing, "tell": tell}
    if is_copy:
        act(
            begin=lambda place, me, here, extra: place.code.co_qualname.replace(".<locals>.", "/"),
            stored=lambda place, value, here, extra: tell(here, place.name, value),
        )
        code = compile(source, "program", "exec")
        exec(instrument(code, lambda code: EVERYTHING, dispatch.register), known)
    else:
        exec(compile(told(source), "program", "exec"), known)
    try:
        out = known["forward"](None, 1.25)
    except (UnboundLocalError, NameError, ValueError, KeyError) as error:
        out = type(error)
    return out, sorted(log)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        code = compile(self.get_data(self.path), self.path, "exec", dont_inherit=True)
        return instrument(code, lambda code: EVERYTHING, dispatch.register)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in self.names else None
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def suite(names):
    """Counts CPython's own tests that fail where every function is instrumented at every place."""
    act(begin=lambda place, me, here, extra: place)
    sys.meta_path.insert(0, _Finder(names))
    warnings.simplefilter("ignore")
    count, bad = 0, []
    for name in names:
        tests = unittest.defaultTestLoader.loadTestsFromName(name)
        result = unittest.TextTestRunner(stream=io.StringIO(), verbosity=0).run(tests)
        count += result.testsRun
        bad += [str(test) for test, _ in result.failures + result.errors if str(test).split()[0] not in BY_NATURE]
    print(f"{sys.version.split()[0]}: {count} tests of CPython's, {len(bad)} fail", *bad, sep="\n  ")
    return len(bad)


def main(what="", *rest):
    """One check, or all of them."""
    if what == "roundtrip":
        return roundtrip()
    if what == "programs":
        return programs(int(rest[0]) if rest else 1000)
    names = [f"test.test_{name}" for name in SUITE.split()]
    names = [name for name in names if importlib.machinery.PathFinder.find_spec(name, _tests())]
    if what == "suite":
        return suite(list(rest) or names)
    return roundtrip() + programs(1000) + suite(names)


def _tests():
    import test

    return test.__path__


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
