"""The collection of small faulty models: the line, the operation and the cause of each are found."""

from pathlib import Path

import pytest
import torch

from tenterhook import NonFiniteError, find_nonfinite
from tests.birth.collection import CASES, CLEAN


@pytest.mark.filterwarnings("ignore:std\\(\\). degrees of freedom")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_birth_is_found(case):
    torch.manual_seed(0)
    model = case.make()
    with pytest.raises(NonFiniteError) as caught, find_nonfinite(model):
        case.run(model)
    birth = caught.value.birth
    assert birth.operation == case.operation
    assert case.why in birth.why
    assert birth.line.text.endswith("# graph" if birth.backward else "# born") or "Bad" in birth.line.function
    assert birth.backward == birth.line.text.endswith("# graph") or case.name == "own_function"


@pytest.mark.parametrize("case", CLEAN, ids=lambda case: case.name)
def test_what_is_legitimate_raises_nothing(case):
    torch.manual_seed(0)
    model = case.make()
    with find_nonfinite(model):
        case.run(model)


def test_the_page_has_them_all():
    page = (Path(__file__).parents[2] / "docs/births.md").read_text()
    assert [case.name for case in (*CASES, *CLEAN) if f"| {case.about} |" not in page] == []
    assert len(CASES) >= 30
