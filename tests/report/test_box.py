"""The verdict as a person reads it."""

import re

import pytest

from tenterhook.report.remarks import broken
from tenterhook.report.verdict import Verdict
from tests.report.rows import row

LONG = "encoder.layers.11.attention.output.dense.lora_A.default.weight_of_a_module_with_a_very_long_name"
HEALTHY = {"clean": ["a", "b"], "unchecked": [("c", "there was no c")], "remarks": ["watching took 1 s"]}


def lines(verdict, width=100, **options):
    """What is inside the frame."""
    return [line[2:-2].rstrip() for line in verdict.box(width, **options).splitlines()[1:-1]]


def verdict(*findings, **more):
    return Verdict("runs/x", "net (Net, 9 parameters)", "330 steps, 26 sampled", [*findings], **{**HEALTHY, **more})


def test_a_healthy_run_is_three_lines():
    assert lines(verdict()) == ["✔ nothing found", "✔ 2 rules clean, 1 not checked", "· watching took 1 s"]
    assert verdict().box().splitlines()[-1].startswith("└ tenterhook summary runs/x --all ─")


def test_everything_has_the_reasons():
    assert lines(verdict(), everything=True) == [
        "✔ nothing found",
        "✔ 2 clean: a, b",
        "○ 1 not checked:",
        "  · c: there was no c",
    ]


def test_a_run_in_which_nothing_was_checked():
    assert lines(verdict(clean=[], nothing="nothing was trained"))[:2] == [
        "○ nothing to check: nothing was trained",
        "○ 1 not checked",
    ]


def test_findings_of_one_cause_are_one():
    nan = [row("loss is NaN", 10, "error"), row("bad batch", 10, "error", "m: .:in[0]", text="row 3")]
    some = [*nan, row("non-finite values", 12, "error", "m: 0"), row("non-finite values", 13, "error", "m: 2")]
    told = lines(verdict(*some))
    assert re.fullmatch(r"✖ bad batch +m: \.:in\[0\] · since step 10", told[0])
    assert told[1:7] == [
        "  row 3",
        "  why   why of bad batch",
        "  next  next of bad batch",
        "  also  loss is NaN, step 10 · text of loss is NaN",
        "        non-finite values, step 12 · m: 0, and 1 more",
        "",
    ]
    assert "nothing found" not in " ".join(told)
    everything = " ".join(lines(verdict(*some), everything=True))
    assert everything.count("✖") == 4 and "next of loss is NaN" in everything


def test_the_worst_of_a_cause_marks_it():
    told = lines(verdict(row("dead ReLU", 220, "error", "m: 1"), row("early blow-up", 1), row("BatchNorm mode", 0)))
    assert [line.split("  ")[0] for line in told if line[:1] in ("✖", "▲")] == ["✖ early blow-up", "▲ BatchNorm mode"]


@pytest.mark.parametrize("width", [60, 80, 100, 110])
@pytest.mark.parametrize("severity", ["warn", "note"])
def test_long_names_never_push_out_the_step(width, severity):
    found = row("a rule of one's own that has a long name", 12345, severity, f"{LONG}: {LONG}")
    many = verdict(found, row("dead ReLU", 9, place=f"{LONG}: {LONG}"), row("dead ReLU", 8, place=f"{LONG}: 1"))
    many.models = f"net ({LONG}, 9 parameters)"
    for everything in (False, True):
        text = many.box(width, everything=everything)
        assert {len(line) for line in text.splitlines()} == {width}
        assert text.count("since step 12,345") == 1 and "330 steps, 26 sampled" in text.replace("│", "")
        if severity == "warn":  # the name is there in full, on lines of its own
            assert f"{LONG}:{LONG}" in re.sub(r"[│\s]", "", text)


def test_notes_are_a_line_each_and_many_are_counted():
    notes = [row(f"rule {i}", i, "note", "m: 0", text="long " * 40) for i in range(3)]
    told = lines(verdict(*notes))
    assert told[0] == "✔ nothing found but 3 notes"
    assert [line[:24] for line in told[1:4]] == [f"● rule {i} · m: 0 · long l" for i in range(3)]
    assert told[1].endswith("since step 0") and len(told) == 6
    told = lines(verdict(*notes, row("rule 4", 1, "note", "m: 0"), row("rule 4", 1, "note", "n: 0")))
    assert told[:2] == ["✔ nothing found but 5 notes", "● 5 notes: rule 0, rule 1, rule 4 (2), rule 2"]


def test_findings_of_several_models_stand_under_their_names():
    found = [row("dead ReLU", 15, "error", "netG: 1"), row("all-zero gradients", 9, place="netD: 1")]
    about = {"netG": "(Generator, 27 k parameters)", "netD": "(Critic)"}
    told = lines(verdict(*found, row("wrong initial loss", 0), row("BatchNorm mode", 24, place="netG: 2"), about=about))
    heads = [line for line in told if re.match(r"net|the |[✖▲]", line)]
    assert [re.sub("  .*", "", head) for head in heads] == [
        *("netG (Generator, 27 k parameters)", "✖ dead ReLU", "▲ BatchNorm mode"),
        *("the training as a whole", "▲ wrong initial loss", "netD (Critic)", "▲ all-zero gradients"),
    ]
    assert "netG (" not in " ".join(lines(verdict(found[0], about=about)))


def test_very_many_findings_are_counted():
    told = lines(verdict(*(row("dead ReLU", i, place=f"model-{i}: 1") for i in range(20))))
    assert sum(line.startswith("▲ dead ReLU") for line in told) == 8
    assert "▲ 12 more findings: dead ReLU (12)" in told


def test_colours_add_no_width():
    found = verdict(row("dead ReLU", 1, "error", "m: 1"), row("x", 1, "note"))
    assert re.sub(r"\x1b\[[0-9;]*m", "", found.box(80, colour=True)) == found.box(80)
    assert "\x1b[31;1m✖ dead ReLU\x1b[0m" in found.box(80, colour=True)


def test_the_worst_finding_is_that_of_all():
    assert verdict(row("dead ReLU", 220, "error", "m: 1"), row("early blow-up", 1)).worst == "error"
    assert verdict().worst is None


def test_a_long_folder_can_still_be_copied():
    found = verdict()
    found.folder = "/scratch/" + "x" * 120
    assert found.box(80).splitlines()[-1].strip() == f"└ tenterhook summary {found.folder} --all"


def test_a_rule_that_broke_is_named():
    why = "the rule raised ValueError at step 3: no"
    assert [*broken([("mine", why), ("other", "no ReLU")])] == [f"mine was not checked to the end: {why}"]
