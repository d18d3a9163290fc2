"""`python -m tests.birth` prints docs/births.md: what is found for each of the collection."""

import sys
import warnings
from collections.abc import Iterator

import torch

from tenterhook import NonFiniteError, find_nonfinite
from tests.birth.collection import CASES, CLEAN, Case

HEAD = """# Births of NaN: what is found

Small faulty models and losses. Each is run in `find_nonfinite(model)`, which names the operation that made the first
value that is not finite, its line and the reason. `python -m tests.birth > docs/births.md` runs them and writes this
page; their code is in `tests/birth/collection.py`, and `tests/birth/test_collection.py` checks each."""


def page() -> Iterator[str]:
    """The page, line by line."""
    yield HEAD
    yield f"\n## Faulty\n\n{len(CASES)}, each found.\n"
    yield "| what is wrong | made by | line | why |\n|---|---|---|---|"
    for case in CASES:
        yield _row(case)
    yield f"\n## Legitimate\n\n{len(CLEAN)} with infinities on purpose, or NaN that does not matter, raise nothing.\n"
    yield "| what it does |\n|---|"
    for case in CLEAN:
        yield f"| {case.about} |"


def _row(case: Case) -> str:
    torch.manual_seed(0)
    model = case.make()
    try:
        with find_nonfinite(model):
            case.run(model)
    except NonFiniteError as error:
        birth = error.birth
        line = birth.line.text.removesuffix("# born").removesuffix("# graph").strip()
        operation = f"the gradient of {birth.operation}" if birth.backward else birth.operation
        return f"| {case.about} | {operation} | `{line}` | {birth.why} |"
    raise AssertionError(f"{case.name}: nothing was found")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write("\n".join(page()) + "\n")
