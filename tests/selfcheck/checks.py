"""The checks that one Python runs of itself. They need neither torch nor pytest.

python tests/selfcheck/checks.py roundtrip             every code object of the standard library, taken apart and back
python tests/selfcheck/checks.py programs 300          random programs against calls written into their source
python tests/selfcheck/checks.py suite test.test_with  CPython's own tests, every function instrumented at every place
python tests/selfcheck/checks.py bare test.test_with   the same tests as they are

What is found is printed as lines of JSON that begin with `FOUND`.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import random
import sys
import tempfile
import traceback
import unittest
import warnings
from collections import Counter
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "platform"), str(ROOT / "tests" / "inside")]

from code_objects import codes  # noqa: E402
from programs import Closing, program, told  # noqa: E402

from tenterhook.inside import dispatch  # noqa: E402
from tenterhook.inside.instrument import CALLED, HERE, Want, instrument  # noqa: E402
from tenterhook.platform.assembler import Assembly  # noqa: E402

FOUND = "FOUND "
EVERYTHING, NOTHING = Want(every=True, operations=True, follow=True), Want()
done = Counter()  # how many functions were instrumented, and how often they called us


def keep(place, value, here, extra):
    """What is done at most places: nothing."""
    done["calls"] += 1
    return value


def looked(place, value, here, extra):
    """Hides our variables."""
    if type(value) is dict:
        for name in (HERE, CALLED):
            value.pop(name, None)
    elif type(value) is list:
        value[:] = [name for name in value if not (type(name) is str and name in (HERE, CALLED))]
    return value


def act(**others):
    """What is done at each kind of place."""
    dispatch.acts.update(dict.fromkeys(("begin", "stored", "wrote", "made", "called", "follow"), keep), looked=looked)
    dispatch.acts.update(others)
    dispatch.install()


def everywhere(code):
    """A copy of code with every function in it instrumented at every place."""
    copy = instrument(code, lambda one: EVERYTHING if one is code else NOTHING, dispatch.register)
    done["functions"] += copy.co_code != code.co_code
    return copy.replace(
        co_consts=tuple(everywhere(one) if isinstance(one, CodeType) else one for one in copy.co_consts)
    )


def tell_found(**what):
    """A line for those who started us."""
    print(f"\n{FOUND}{json.dumps(what)}", file=sys.__stdout__, flush=True)


def roundtrip():
    """Code objects that do not come back as they were, and those that cannot be instrumented."""
    os.environ["SELFCHECK"] = "1"
    act()
    files, count, bad = set(), 0, {}
    for code in codes():
        files.add(code.co_filename)
        count += 1
        try:
            if not is_same(Assembly(code).assemble(), code):
                bad[f"{code}"] = "comes back changed"
            if count % 10 == 0:
                instrument(code, lambda one: EVERYTHING, lambda place: 0)
        except Exception:
            bad[f"{code}"] = traceback.format_exc()
    tell_found(python=sys.version.split()[0], files=len(files), codes=count, bad=bad)


def is_same(one, other):
    """Whether two code objects are the same to the last byte."""
    names = "co_code", "co_exceptiontable", "co_names", "co_varnames", "co_stacksize", "co_flags"
    return (
        all(getattr(one, name) == getattr(other, name) for name in names)
        and list(map(id, one.co_consts)) == list(map(id, other.co_consts))
        and list(one.co_positions()) == list(other.co_positions())
    )


def programs(count):
    """Random programs that compute something else, or whose assignments are told of differently."""
    bad = {}
    for seed in range(count):
        source, edits = program(random.Random(seed)), []
        plain = compile(told(source), "program", "exec")
        act(begin=lambda place, *_: place.code.co_qualname.replace(".<locals>.", "/"), stored=stored)
        copy = everywhere(compile(source, "program", "exec"))
        for _ in range(3):
            truth, ours = Told(edits).run(plain), Told(edits).run(copy)
            if truth != ours:
                bad[f"program {seed}"] = f"edits {edits}: {truth} became {ours}"
            edits = random.Random(seed).sample(truth[1], min(1, len(truth[1])))
    tell_found(programs=count, bad=bad)


class Told:
    """One run of a program, some of whose assignments are edited: what it returns, and what it assigns."""

    now: "Told"

    def __init__(self, edits):
        self.edits, self.counts, self.log = {edit[:3] for edit in edits}, Counter(), []

    def tell(self, path, name, value):
        if not isinstance(value, float):
            return value
        key = (path, name, self.counts[path, name])
        self.counts[path, name] += 1
        self.log.append((*key, value))
        return value * 7 if key in self.edits else value

    def run(self, code):
        Told.now, known = self, {"Closing": Closing, "tell": self.tell}
        exec(code, known)
        try:
            out = known["forward"](None, 1.25)
        except (UnboundLocalError, NameError, ValueError, KeyError) as error:
            out = repr(type(error))
        return out, sorted(self.log)


def stored(place, value, here, extra):
    code = place.code
    is_argument = place.name in code.co_varnames[: code.co_argcount]  # the source has no assignment of them
    return value if is_argument else Told.now.tell(here, place.name, value)


OURS = {dispatch.__file__, __file__}


def hide(name):
    """Has `sys.settrace` or `sys.setprofile` pass over our functions, as if they were of C."""
    set_hook, get_hook = getattr(sys, f"set{name}"), getattr(sys, f"get{name}")

    def set_other(hook):
        def others(frame, event, argument):
            return None if frame.f_code.co_filename in OURS else hook(frame, event, argument)

        others.hook = hook
        set_hook(None if hook is None else others)

    def get_other():
        found = get_hook()
        return getattr(found, "hook", found)

    setattr(sys, f"set{name}", set_other)
    setattr(sys, f"get{name}", get_other)


def hide_from_monitoring():
    """Has `sys.monitoring` pass over our functions, and over the calls of them."""
    register = sys.monitoring.register_callback

    def register_other(tool, event, callback):
        def others(code, *arguments):
            if getattr(code, "co_filename", "") not in OURS and not any(one is dispatch.tell for one in arguments):
                return callback(code, *arguments)
            return None

        others.hook = callback
        found = register(tool, event, None if callback is None else others)
        return getattr(found, "hook", found)

    sys.monitoring.register_callback = register_other


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        return everywhere(compile(self.get_data(self.path), self.path, "exec", dont_inherit=True))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def suite(names, is_bare=False):
    """CPython's own tests, where every function that is imported from here on is instrumented at every place."""
    from test import support

    support.use_resources, support.verbose = [], 0
    act(begin=lambda place, *_: place)
    if not is_bare:
        sys.meta_path.insert(0, _Finder())
        hide("trace")
        hide("profile")
        if sys.version_info >= (3, 12):
            hide_from_monitoring()
    for name in names:
        done.clear()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            count, bad = run_tests(name)
        tell_found(name=name, tests=count, bad=bad, **done)


def run_tests(name):
    """How many tests a module has, and those that fail."""
    if importlib.util.find_spec(name) is None:  # this Python has none
        return 0, {}
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            found = unittest.defaultTestLoader.loadTestsFromName(name)
        except unittest.SkipTest:  # it needs what is not there, as threads
            return 0, {}
        except Exception:
            return 0, {f"{name}:import": traceback.format_exc()}
        result = unittest.TextTestRunner(stream=io.StringIO(), verbosity=0).run(found)
    return result.testsRun, {f"{name}:{test}": text for test, text in result.failures + result.errors}


def main(what, *rest):
    if what == "roundtrip":
        roundtrip()
    elif what == "programs":
        programs(int(rest[0]))
    else:
        suite(rest, is_bare=what == "bare")


if __name__ == "__main__":
    main(*sys.argv[1:])
