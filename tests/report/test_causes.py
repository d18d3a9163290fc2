"""Which findings are told as one: what the zoo's trainings gave, and what they must not do."""

import pytest

from tenterhook.record.rules import all_rules
from tenterhook.report.causes import CAUSES, ORDER, told_together
from tests.report.rows import row

ONE_CAUSE = {
    "a NaN in the data": [
        row("bad batch", 10, "error", "mse_loss: target"),
        row("non-finite values", 10, "error", "net: ."),
        row("loss is NaN", 10, "error"),
        row("early blow-up", 10),
    ],
    "a NaN in the model": [row("non-finite values", 3, "error", "net: 0"), row("loss is NaN", 3, "error")],
    "a NaN between two samples": [row("loss is NaN", 31, "error"), row("non-finite values", 40, "error", "net: 0")],
    "a NaN that kills units": [row("non-finite values", 2, "error", "net: ."), row("dead ReLU", 30, "error", "net: 1")],
    "a NaN in the loss, sampled in each step": [
        row("non-finite values", 40, "error"),
        row("loss is NaN", 40, "error"),
        row("dead ReLU", 56, "error", "net: 1"),
    ],
    "a learning rate too high": [
        row("learning rate too high", 20, "error"),
        row("early blow-up", 1),
        row("exploding gradients", 8, place="net: 2.weight"),
        row("update-to-weight ratio", 40, place="net: 2.weight"),
        row("loss spike", 90),
    ],
    "a learning rate that kills": [
        row("early blow-up", 1),
        row("dead ReLU", 220, "error", "net: 1"),
        row("all-zero gradients", 247, place="net: 2.weight"),
        row("no better than chance", 320),
    ],
    "a learning rate that diverges": [
        row("early blow-up", 1),
        row("saturated sigmoid or tanh", 7, place="net: 1"),
        row("loss is NaN", 11, "error"),
        row("non-finite values", 13, "error", "net: 1"),
    ],
    "shuffled labels": [row("no better than chance", 320), row("loss not falling", 199)],
    "dead units": [
        row("dead ReLU", 15, "error", "net: 1"),
        row("all-zero gradients", 7, place="net: 0.weight"),
        row("loss not falling", 199),
    ],
    "not trained": [
        row("parameter never trained", 11, place="net: 0.weight"),
        row("cut off from the loss", 12, place="net: 0"),
        row("all-zero gradients", 30, place="net: 0.weight"),
    ],
    "a rate too low": [row("update-to-weight ratio", 211, place="net: 0.weight"), row("loss not falling", 199)],
    "one rule at many places": [row("dead ReLU", 15 + i, place=f"net: {i}") for i in range(40)],
}


@pytest.mark.parametrize("name", ONE_CAUSE)
def test_what_one_fault_sets_off_is_one_and_its_cause_leads(name):
    findings = ONE_CAUSE[name]
    (group,) = told_together(reversed(findings))
    assert group[0] == findings[0] and len(group) == len(findings)


TWO_CAUSES = {
    "in different models": [row("dead ReLU", 15, place="g: 1"), row("all-zero gradients", 16, place="d: 1")],
    "one rule in different models": [row("dead ReLU", 15, place="g: 1"), row("dead ReLU", 15, place="d: 1")],
    "long after": [row("loss spike", 100), row("gradient spike", 5000, place="net: 1")],
    "unrelated": [row("BatchNorm mode", 24, place="net: 1"), row("dead ReLU", 15, place="net: 2")],
    "rules of one's own": [row("cold layer", 0), row("warm layer", 0)],
    "a note first": [row("early blow-up", 1, "note"), row("dead ReLU", 220, place="net: 1")],
    "a bad batch after a rise": [row("early blow-up", 1), row("bad batch", 900, "error", "net: .:in[0]")],
}


@pytest.mark.parametrize("name", TWO_CAUSES)
def test_what_has_two_causes_is_two(name):
    assert len(told_together(TWO_CAUSES[name])) == 2


def test_the_nearest_of_two_causes_takes_it():
    findings = [row("early blow-up", 1), row("bad batch", 900, "error"), row("loss is NaN", 900, "error")]
    assert [[one["rule"] for one in group] for group in told_together(findings)] == [
        ["early blow-up"],
        ["bad batch", "loss is NaN"],
    ]


def test_nothing_is_lost():
    findings = [one for some in (ONE_CAUSE | TWO_CAUSES).values() for one in some]
    told = [one for group in told_together(findings) for one in group]
    assert sorted(map(str, told)) == sorted(map(str, findings))


def test_the_tables_know_every_rule_and_no_other_words():
    assert {rule.name for rule in all_rules()} <= ORDER.keys()
    assert {rule for cause in CAUSES for rule in (*cause.rules, *cause.sets_off)} <= ORDER.keys()
