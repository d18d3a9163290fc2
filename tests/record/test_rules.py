"""Each rule on a training that has its fault, and on one near it that has not. The trainings are in trainings.py."""

import gc
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tenterhook import Finding, all_rules, watch
from tenterhook.record.judge import Judge, State
from tenterhook.record.rule import Persistent, PersistentRows
from tenterhook.record.step import Step
from tenterhook.record.terms import Term
from tenterhook.report.ranks import RANKS
from tests.record import trainings as t

pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")


@pytest.fixture(autouse=True, scope="module")
def quick():
    """One thread, and a short search for optimizers, which goes through all objects that are not frozen."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(before)


@dataclass
class Seen:
    findings: list[Finding]
    states: dict[str, State] = field(default_factory=dict)

    def of(self, rule: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.rule == rule]


def record(training, folder, **options) -> Seen:
    torch.manual_seed(0)
    model, train = training()
    with watch(model, to=folder / "run", **options) as run:
        train()
    assert run._recording.recorder.failed is None
    states = run._recording.judge.states()
    assert [state.__dict__ for state in states] == run.open().rank_info()["rules"]
    return Seen(run.findings, {state.rule: state for state in states})


def name(value) -> str | None:
    """For pytest: how a training is called."""
    if isinstance(value, partial):
        return "-".join([value.func.__name__, *value.keywords])
    return getattr(value, "__name__", None)


@pytest.fixture(scope="module")
def seen_in(tmp_path_factory):
    """Every step of a training; each is run once for all tests."""
    kept = {}

    def look(training) -> Seen:
        key = name(training)
        if key not in kept:
            kept[key] = record(training, tmp_path_factory.mktemp(key), every=1)
        return kept[key]

    return look


def later(rate: float = 0.0, weights: float = 1.0) -> t.Training:
    """A fault that begins at the 61st step, when facts about parameters are looked at in every tenth sample only."""
    model = t.mlp(64, 32, 32, 10, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train() -> None:
        t.fit(model, optimizer, 60)
        optimizer.param_groups[0]["lr"] = rate
        with torch.no_grad():
            model[2].weight *= weights
        t.fit(model, optimizer, 10)

    return model, train


def waiting() -> t.Training:
    """A LoRA with a rate of 0 for a long time: the gradient of A is zero for as long."""
    model = nn.Sequential(nn.Linear(64, 4, bias=False), nn.Linear(4, 10))
    nn.init.zeros_(model[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, lambda: t.fit(model, optimizer, 60)


def slow_warm_up() -> t.Training:
    """The rate rises with every step, and is far too small for long."""
    model = t.mlp(64, 32, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-10)

    def train() -> None:
        for _ in range(80):
            t.fit(model, optimizer, 1)
            optimizer.param_groups[0]["lr"] *= 1.02

    return model, train


# Rule, training, severity, site, what, first and last step at which it may be found.
FAULTS = [
    ("non-finite values", t.nan_in_forward, "error", "norm", "output", 12, 12),
    ("non-finite values", t.nan_in_backward, "error", "relu", "output_grad", 0, 0),
    ("non-finite values", t.nan_in_loss_gradient, "error", None, None, 6, 6),
    ("non-finite values", t.nan_in_data, "error", ".:in[0]", "input", 7, 7),
    ("non-finite values", t.log_of_zero, "error", "log", "output", 8, 8),
    ("non-finite values", partial(t.amp, broken=True), "error", None, None, 0, 29),
    ("loss is NaN", t.entropy_by_hand, "error", None, None, 15, 15),
    ("loss is NaN", partial(t.amp, broken=True), "error", None, None, 0, 29),
    ("loss spike", t.bad_batch, "warn", None, None, 90, 90),
    ("loss not falling", t.shuffled_labels, "warn", None, None, 199, 199),
    ("loss not falling", t.uphill, "warn", None, None, 199, 199),
    ("wrong initial loss", t.confident_start, "warn", "head", "output", 0, 0),
    ("wrong initial loss", t.raw_pixels, "warn", ".:in[0]", "input", 0, 0),
    ("dead ReLU", t.dead_relu, "error", "3", "output", 15, 15),
    ("saturated sigmoid or tanh", t.saturated_tanh, "warn", "3", "output", 4, 7),
    ("saturated sigmoid or tanh", t.sigmoid_in_the_middle, "warn", "3", "output", 4, 7),
    ("BatchNorm mode", t.train_forgotten, "warn", "bn", "output", 13, 13),
    ("BatchNorm mode", partial(t.frozen_norms, weights_too=False), "note", "bn", "output", 7, 7),
    ("identical batches", t.first_batch_only, "note", ".:in[0]", "input", 5, 5),
    ("gradient spike", t.gradient_spike, "warn", "0.weight", "parameter_grad", 40, 40),
    ("gradient spike", t.bad_batch, "warn", "2.weight", "parameter_grad", 90, 90),
    ("vanishing gradients", t.deep_sigmoids, "warn", "12.weight", "parameter_grad", 4, 7),
    ("vanishing gradients", t.sigmoid_in_the_middle, "warn", "2.weight", "parameter_grad", 4, 7),
    ("exploding gradients", t.exploding_with_depth, "warn", None, "parameter_grad", 4, 9),
    ("exploding gradients", t.diverging, "warn", "fc.weight", "parameter_grad", 8, 30),
    ("all-zero gradients", t.rounded, "warn", "b.weight", "parameter_grad", 7, 7),
    ("all-zero gradients", t.dead_relu, "warn", "2.weight", "parameter_grad", 7, 7),
    ("all-zero gradients", t.idle_head, "note", "spare.weight", "parameter_grad", 23, 23),
    ("parameter never trained", t.head_forgotten, "warn", "head.weight", "parameter", 11, 11),
    ("parameter never trained", t.unfrozen_later, "warn", "0.weight", "parameter", 31, 31),
    ("parameter never trained", partial(t.idle_head, in_loss=False), "note", "spare.weight", "parameter", 11, 11),
    ("parameter never trained", partial(t.in_turn, late=99), "note", "heads.2.weight", "parameter", 29, 29),
    ("update-to-weight ratio", t.too_fast, "warn", "2.weight", "update", 25, 35),
    ("update-to-weight ratio", partial(later, rate=20.0), "warn", None, "update", 65, 69),
    ("saturated sigmoid or tanh", partial(later, weights=1e3), "warn", "3", "output", 64, 69),
    ("update-to-weight ratio", t.too_slow, "warn", "0.weight", "update", 25, 30),
    ("update-to-weight ratio", t.swallowed, "warn", "0.weight", "update", 25, 30),
    ("activation variance drifts with depth", t.wild_start, "warn", None, "output", 0, 0),
    ("activation variance drifts with depth", partial(t.wild_start, gain=0.1), "warn", None, "output", 0, 0),
    ("low-precision headroom", t.near_overflow, "warn", "large", "output", 2, 2),
    ("low-precision headroom", t.underflow, "note", "0", "output_grad", 2, 2),
]

CLEAN = [
    ("non-finite values", t.masked_attention),
    ("non-finite values", t.amp),
    ("non-finite values", partial(t.amp, fused=True)),
    ("loss is NaN", t.amp),
    ("loss is NaN", partial(t.amp, fused=True)),
    ("loss spike", t.small_loss),
    ("loss not falling", t.resumed),
    ("wrong initial loss", t.weighted_classes),
    ("wrong initial loss", t.resumed),
    ("dead ReLU", t.sparse_relu),
    ("saturated sigmoid or tanh", t.sure_classifier),
    ("saturated sigmoid or tanh", t.gan),
    ("BatchNorm mode", t.frozen_norms),
    ("BatchNorm mode", t.validated),
    ("BatchNorm mode", t.own_teacher),
    ("BatchNorm mode", t.own_critic),
    ("identical batches", t.same_mask),
    ("gradient spike", t.small_loss),
    ("vanishing gradients", t.lora),
    ("vanishing gradients", t.rezero),
    ("exploding gradients", t.idle_head),
    ("exploding gradients", t.gan),
    ("all-zero gradients", t.experts),
    ("all-zero gradients", t.lora),
    ("all-zero gradients", waiting),
    ("all-zero gradients", t.wasserstein),
    ("parameter never trained", t.distilled),
    ("parameter never trained", partial(t.distilled, frozen=False)),  # which is written into
    ("parameter never trained", t.gan),
    ("parameter never trained", t.in_turn),
    ("parameter never trained", partial(t.unfrozen_later, forgotten=False)),
    ("update-to-weight ratio", t.lora),
    ("update-to-weight ratio", slow_warm_up),
    ("update-to-weight ratio", t.rezero),
    ("update-to-weight ratio", t.converged),
    ("activation variance drifts with depth", t.raw_input_before_norm),
    ("activation variance drifts with depth", t.lora),
    ("low-precision headroom", t.lowest_mask),
    ("low-precision headroom", partial(t.underflow, scaled=True)),
]


@pytest.mark.parametrize(("rule", "training", "severity", "site", "what", "first", "last"), FAULTS, ids=name)
def test_a_fault_is_found(rule, training, severity, site, what, first, last, seen_in):
    seen = seen_in(training)
    found = seen.of(rule)
    assert found, f"nothing found; {seen.states[rule]}"
    assert seen.states[rule].state == "found"
    one = found[0]
    assert one.severity == severity
    assert first <= one.step <= last
    if what is not None:
        assert one.place is not None and one.place.what == what
    if site is not None:
        assert one.place.site == site, one.text
    assert one.text and one.why and one.then


@pytest.mark.parametrize(("rule", "training"), CLEAN, ids=name)
def test_one_that_is_near_it_is_clean(rule, training, seen_in):
    seen = seen_in(training)
    assert not seen.of(rule)
    assert seen.states[rule] == State(rule, "clean")


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("training", [t.healthy_cnn, t.healthy_resnet, t.healthy_gpt], ids=name)
def test_a_healthy_training_gets_no_warning(training, every, tmp_path):
    seen = record(training, tmp_path, every=every)
    assert not [finding for finding in seen.findings if finding.severity != "note"]
    clean = {rule for rule, state in seen.states.items() if state.state == "clean"}
    assert {"non-finite values", "loss spike", "loss not falling", "gradient spike", "update-to-weight ratio"} <= clean


# What the parametrised ones cannot say.


def test_what_follows_from_a_dead_layer_is_not_blamed(seen_in):
    assert [finding.place.site for finding in seen_in(t.dead_relu).of("dead ReLU")] == ["3"]


def test_a_gradient_that_is_not_finite_names_what_comes_next(seen_in):
    (found,) = seen_in(t.nan_in_backward).of("non-finite values")
    assert "The gradient of length" in found.text


def test_a_loss_that_a_finite_model_made_nan_sends_to_the_loss(seen_in):
    (found,) = seen_in(t.entropy_by_hand).of("loss is NaN")
    assert "in the loss" in found.then


def test_a_loss_that_is_not_sampled_asks_for_every_step(tmp_path):
    (found,) = record(t.nan_late, tmp_path, every=10).of("loss is NaN")
    assert found.step == 25 and "every=1" in found.then


def test_full_batches_are_no_more_than_a_note(seen_in):
    assert {finding.severity for finding in seen_in(t.converged).findings} == {"note"}


def test_one_hot_inputs_cannot_be_compared(seen_in):
    assert seen_in(t.one_hot).states["identical batches"].state == "not checked"


def test_parameters_that_were_trainable_for_too_short_were_not_checked(tmp_path):
    seen = record(partial(t.unfrozen_later, at=30), tmp_path, every=1)
    assert seen.states["parameter never trained"].state == "not checked"


def test_a_gan_has_no_one_loss_to_fall(seen_in):
    state = seen_in(t.gan).states["loss not falling"]
    assert state.state == "not checked" and "several optimizers" in state.why


def test_a_long_warm_up_is_waited_for(seen_in):
    assert seen_in(t.long_warm_up).states["loss not falling"].state == "not checked"


def test_a_regression_with_nothing_to_learn_is_a_note(seen_in):
    assert [f.severity for f in seen_in(t.noisy_regression).of("loss not falling")] == ["note"]


def test_a_group_with_rate_zero_is_a_note(seen_in):
    (found,) = seen_in(t.rate_zero).of("parameter never trained")
    assert (found.severity, found.place.site) == ("note", "0.weight")


# Rules of one's own, and states.


class Cold:
    name = "cold layer"

    def look(self, step):
        outputs = step.of("output")
        for place, rms in zip(outputs.places, outputs.rms, strict=True):
            if rms < 1e-3:
                yield Finding(self.name, "warn", step.number, f"rms {rms:.1e}", place)


class Raises:
    name = "raises"

    def look(self, step):
        yield Finding(self.name, "note", step.number, "so far so good")
        raise RuntimeError("no more")


class YieldsWords:
    name = "yields words"

    def look(self, step):
        return ["it is cold"]


class Unsure:
    name = "unsure"

    @property
    def unchecked(self):
        raise KeyError("lost")

    def look(self, step):
        return None


def cold_model() -> t.Training:
    model = nn.Sequential(nn.Linear(64, 32), t.Scale(1e-6), nn.Linear(32, 10))
    return model, lambda: t.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), 4)


def test_a_rule_of_ones_own(tmp_path):
    seen = record(cold_model, tmp_path, every=1, rules=[*all_rules(), Cold()])
    assert [(f.place.site, f.step) for f in seen.of("cold layer")] == [("1", i) for i in range(4)]
    assert seen.states["cold layer"].state == "found"


def test_a_rule_that_raises_disturbs_nobody(tmp_path):
    rules = [Raises(), YieldsWords(), Unsure(), Cold()]
    seen = record(cold_model, tmp_path, every=1, rules=rules)
    assert [f.step for f in seen.of("raises")] == [0]  # and it is not asked again
    assert seen.states["raises"] == State("raises", "not checked", "the rule raised RuntimeError at step 0: no more")
    assert "yields Findings, not str" in seen.states["yields words"].why
    assert seen.states["unsure"].state == "not checked"
    assert len(seen.of("cold layer")) == 4


def test_a_severity_that_does_not_exist_is_refused():
    class Loud(Cold):
        def look(self, step):
            yield Finding("cold layer", "panic", step.number, "!")

    judge = Judge([Loud()])
    assert judge.look(Step(0)) == []
    assert "no severity 'panic'" in judge.states()[0].why


def test_three_states(seen_in):
    states = seen_in(t.nan_in_data).states
    assert states["non-finite values"] == State("non-finite values", "found")
    assert states["identical batches"] == State("identical batches", "clean")
    assert states["BatchNorm mode"] == State("BatchNorm mode", "not checked", "no BatchNorm was called")


def test_the_docs_list_every_rule():
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    rows = page.partition("| rule | found when |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert {row.split("|")[1].strip() for row in rows} == {rule.name for rule in all_rules()} | {RANKS}


def test_without_a_step_nothing_was_checked():
    judge = Judge(all_rules())
    assert {state.state for state in judge.states()} == {"not checked"}
    assert all(state.why for state in judge.states())


@pytest.mark.parametrize("rule", ["loss spike", "loss is NaN"])
def test_losses_that_were_not_seen_are_not_clean(rule):
    judge = Judge([one for one in all_rules() if one.name == rule])
    for number in range(200):
        judge.look(Step(number, loss=1.0 if number % 2 else None, optimizers=frozenset((1,))))
    assert judge.states() == [State(rule, "not checked", "the loss of 100 of 200 steps was not seen")]


def cross_entropy(classes, mean):
    looks = dict.fromkeys(("least", "most", "off_one", "off_log", "leak"), math.nan)
    labels = np.full(classes, 3.2)
    return Term("cross_entropy", "classes", classes, True, 0.0, "", mean=mean, many=32, labels=labels, **looks)


def not_falling(*trainings):
    """What is said of losses: where each training begins and ends, of how many classes it is, how long it is."""
    judge = Judge([one for one in all_rules() if one.name == "loss not falling"])
    for serial, (first, last, classes, *steps) in enumerate(trainings, 1):
        for k in range(*steps or (300,)):
            loss = first + (last - first) * min(k, 100) / 100
            terms = [cross_entropy(classes, loss)] if classes and k == 1 else []
            judge.look(Step(300 * serial + k, loss, optimizers=frozenset((serial,)), terms=terms))
    return [(finding.step, finding.severity) for finding in judge.findings]


def test_each_training_has_to_make_its_loss_fall():
    assert not_falling((2.3, 0.1, 10), (2.3, 2.3, 10)) == [(799, "warn")]
    assert not_falling((2.3, 0.1, 10), (9.0, 9.0, None)) == [(799, "note")]  # another kind of loss
    assert not_falling((2.3, 0.1, 10), (2.3, 0.1, 10), (2.3, 2.5, 10)) == [(1099, "warn")]
    assert not_falling((2.3, 0.5, 10), (0.5, 0.5, 10), (0.5, 0.6, None)) == []  # it goes on with another optimizer


@pytest.mark.parametrize("steps", [150, 300])
def test_stages_with_an_optimizer_each_are_one_training(steps):
    assert not_falling((2.3, 2.12, 10, steps), (2.12, 2.115, 10), (2.115, 2.114, 10)) == []
    assert not_falling((2.3, 2.12, 10, steps), (2.3, 2.29, 10)) == [(799, "warn")]
    assert not_falling((2.3, 2.29, 10, steps), (2.29, 2.28, 10))[-1] == (799, "warn")  # none of it learns


def test_a_loss_that_begins_below_zero_may_rise():
    assert not_falling((-0.3, 0.1, None)) == [(499, "note")]
    assert not_falling((0.3, 0.5, None)) == [(499, "warn")]


def test_persistent_is_told_once():
    often = Persistent(2, 3)
    assert [often.so("a", holds) for holds in (True, False, False, True, True, True)] == [False] * 4 + [True, False]


def test_persistent_rows_are_the_same_for_many():
    import numpy as np

    often, one = PersistentRows(2, 3), {i: Persistent(2, 3) for i in range(5)}
    generator = np.random.default_rng(0)
    for _ in range(40):
        which = np.sort(generator.choice(5, generator.integers(0, 6), replace=False))
        holds = generator.random(len(which)) < 0.3
        expected = [i for i, (k, h) in enumerate(zip(which.tolist(), holds.tolist(), strict=True)) if one[k].so(k, h)]
        assert often.so(which, holds).tolist() == expected
