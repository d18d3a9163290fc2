"""Says all that a program can see of how it was started; twice the same output is wanted."""

import atexit
import json
import multiprocessing
import pickle
import sys
import threading
import time
from pathlib import Path

import beside


class Thing:
    pass


def child(queue):
    queue.put([__name__, Path(sys.modules["__main__"].__file__).name, beside.HERE])


def late():
    time.sleep(0.3)
    print("thread ended")


if __name__ == "__main__":
    main = sys.modules["__main__"]
    facts = {
        "argv": sys.argv,
        "path": sys.path,
        "name": __name__,
        "file": __file__,
        "doc": __doc__,
        "package": __package__,
        "spec": getattr(__spec__, "name", None),
        "cached": __cached__,
        "loader": type(__loader__).__name__,
        "main": main.Thing is Thing and main.__dict__ is globals(),
        "names": sorted(n for n in globals() if n != "__annotations__"),
        "pickled": pickle.loads(pickle.dumps(Thing())).__class__ is Thing,
        "flags": list(sys.flags),
        "hook": sys.excepthook is sys.__excepthook__,
        "threads": threading.active_count(),
    }
    print(json.dumps(facts, indent=1))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=60))
    process.join()
    atexit.register(print, "atexit ran")
    threading.Thread(target=late).start()
    sys.stdout.write("no newline at the end \x00\xe9")
