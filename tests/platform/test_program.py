import subprocess
import sys

import pytest

from tenterhook.platform.program import NoSuchModule, find_module


def test_a_module_is_found_as_python_finds_it():
    spec, code = find_module("timeit")
    assert (spec.name, code.co_filename) == ("timeit", spec.origin), "runpy no longer finds modules for `python -m`"
    spec, _ = find_module("unittest")
    assert spec.name == "unittest.__main__", "runpy no longer finds the __main__ of a package"


def test_a_module_that_is_not_there_is_told_in_the_words_of_python():
    with pytest.raises(NoSuchModule, match="No module named there_is_none"):
        find_module("there_is_none")


def test_all_threads_are_waited_for_and_may_be_again():
    script = """
import threading, time
from tenterhook.platform.program import join_threads
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", flush=True))).start()
join_threads()
print("main", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), "threading._shutdown may no longer be called before the end"
    assert done.stdout.split() == ["thread", "main"], "threading._shutdown no longer waits for all threads"
