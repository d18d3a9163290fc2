"""Starts programs in processes of their own, by fork, so that torch is imported once for all of them.

A line of JSON on stdin: words, cwd, env, out; `words` as after `python`. Then a line with the process id, and one with
the exit code as `subprocess` has it.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import sys
import threading

for name in ("torch", "pyarrow.compute", "numpy", "tenterhook.record.watch", "tenterhook.report.verdict"):
    importlib.import_module(name)
sys.modules["torch"].set_num_threads(1)
for name in (
    "torch._dynamo",
    "torch.utils.checkpoint",
    "torch.optim.swa_utils",
    "sklearn.datasets",
    "multiprocessing.reduction",
):
    importlib.import_module(name)


def run(task):
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["env"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{task['out']}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    words = task["words"]
    sys.argv[:] = words
    if words[:2] == ["-m", "tenterhook"]:
        from tenterhook.cli import main

        sys.argv[:] = ["tenterhook", *words[2:]]
        sys.exit(main(words[2:]))
    sys.path[0] = os.path.dirname(os.path.realpath(words[0]))  # noqa: PTH120
    runpy.run_path(words[0], run_name="__main__")


def end(code):
    """As Python ends, less the second in which it takes itself apart."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


gc.freeze()
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            run(json.loads(line))
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        end(code)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
