"""A small part of the zoo, and that it is whole; all of it runs with `make zoo`."""

from pathlib import Path

import pytest

from tenterhook.record.rules import all_rules
from tests.zoo.check import check
from tests.zoo.registry import trainings

ZOO = trainings()
QUICK = (
    *("a_nan_in_the_data", "begins_high", "deep_sigmoids", "dead_from_the_start", "modules_in_a_plain_list"),
    *("mlp_adam", "gradient_accumulation", "log_softmax_and_nll", "gan"),
)


@pytest.mark.parametrize("name", QUICK)
def test_what_is_found(name):
    result = check(ZOO[name], [])
    assert result.verdict in ("named", "clean"), [result.detail, *result.texts]


def test_the_zoo_is_large_enough():
    faults = [one for one in ZOO.values() if one.rules]
    assert len(faults) >= 60
    assert len(ZOO) - len(faults) >= 50


def test_every_rule_has_a_fault():
    named = {rule for one in ZOO.values() for rule in one.rules}
    assert [rule.name for rule in all_rules() if rule.name not in named] == []


def test_every_training_says_what_it_is():
    assert [one.name for one in ZOO.values() if not one.about or "\n" in one.about] == []


def test_no_training_knows_of_us():
    for file in (Path(__file__).parent / "trainings").glob("*.py"):
        assert "import tenterhook" not in file.read_text()
        assert "from tenterhook" not in file.read_text()


def test_the_page_has_them_all():
    page = (Path(__file__).parents[2] / "docs/zoo.md").read_text()
    assert [name for name in ZOO if f"| {name} |" not in page] == []
