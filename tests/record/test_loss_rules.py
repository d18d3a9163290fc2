"""The rules about losses: each on a training with its fault, and on a twin without."""

import math
import tempfile
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import watch
from tenterhook.record.sources.given import Given
from tests.record.trainings import GPT, batches, digits, mlp, step, text_batches

pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")

RULES = {
    *("no better than chance", "softmax twice", "loss without a floor", "scores are no log-probabilities"),
    *("learning rate gone", "early blow-up", "batches of one class", "bad batch", "targets in the inputs"),
    *("wrong initial loss", "loss spike", "loss not falling", "loss is NaN"),
}


def always(k):
    return 1.0


def classify(loss_of=F.cross_entropy, steps=60, lr=3e-3, size=32, change=None, model=None, schedule=always):
    """Digits with Adam; `change` may change a batch, by its number, and `schedule` the learning rate."""
    model = model or mlp(64, 32, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    def train():
        for k, (x, y) in enumerate(batches(steps, size)):
            x, y = change(k, x, y) if change else (x, y)
            step(optimizer, loss_of(model(x), y))
            schedule.step()

    return model, train


def shuffled(k, x, y):
    return x, y[torch.randperm(len(y))]


def misfiled(k, x, y):
    """Each image has the label of another one, for good: these can be learnt by heart, in time."""
    return x, (x * torch.arange(64) * 16).sum(1).long() * 7919 % 1009 % 10


def in_order(k, x, y):
    images, labels = digits()
    order = labels.argsort(stable=True)
    chosen = order[k * 32 % 1760 :][:32]
    return images[chosen], labels[chosen]


def with_label(k, x, y):
    return torch.cat([x[:, :20], F.one_hot(y, 10), x[:, 20:]], 1), y


def with_number(k, x, y):
    return torch.cat([x, y[:, None] / 10], 1), y


def bad(k, x, y, value=math.nan, at=7):
    if k == at:
        x = x.clone()
        x[11, 5] = value
    return x, y


def binary(output, y):
    return F.binary_cross_entropy_with_logits(output[:, 0], (y > 4).float())


def twice_binary(output, y):
    return binary(output.sigmoid(), y)


def regress(loss_of=F.mse_loss, optimizer=torch.optim.SGD, lr=0.01, steps=120, bad_at=-1, value=math.nan):
    model, way = mlp(8, 32, 1), torch.randn(8, 1)
    optimizer = optimizer(model.parameters(), lr=lr)

    def train():
        for k in range(steps):
            x = torch.randn(32, 8)
            y = x @ way + 0.1 * torch.randn(32, 1)
            if k == bad_at:
                y[3] = value
            step(optimizer, loss_of(model(x), y))

    return model, train


def with_target(fault: bool):
    """A value is among the inputs of its own prediction."""
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train():
        for _ in range(30):
            x = torch.randn(32, 4)
            y = x.sum(1, keepdim=True) + torch.randn(32, 1)
            step(optimizer, F.mse_loss(model(torch.cat([x, y if fault else torch.randn(32, 1)], 1)), y))

    return model, train


def language(fault: bool, steps: int = 40):
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train():
        for ids, following in text_batches(steps):
            step(optimizer, F.cross_entropy(model(ids).flatten(0, 1), (ids if fault else following).flatten()))

    return model, train


def attack():
    """Only the input is trained, and its loss is to rise."""
    model, noise = mlp(64, 32, 10), torch.zeros(32, 64, requires_grad=True)
    optimizer = torch.optim.SGD([noise], lr=1.0)

    def train():
        x, y = next(batches(1))
        for _ in range(40):
            step(optimizer, -F.cross_entropy(model(x + noise), y))

    return model, train


def gan():
    models = maker, judge = mlp(8, 32, 64), mlp(64, 32, 1)
    optimizers = [torch.optim.Adam(one.parameters(), lr=2e-3) for one in models]

    def train():
        for x, _ in batches(330):
            made = maker(torch.randn(len(x), 8))
            real, false = judge(x), judge(made.detach())
            loss = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
            step(optimizers[1], loss + F.binary_cross_entropy_with_logits(false, torch.zeros_like(false)))
            step(optimizers[0], F.binary_cross_entropy_with_logits(judge(made), torch.ones_like(real)))

    return nn.ModuleList(models), train


def q_learning(steps: int = 400):
    """Values that grow, and jump whenever the target network is replaced."""
    model, target = mlp(4, 32, 2), mlp(4, 32, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train():
        for k in range(steps):
            if k % 80 == 0:
                target.load_state_dict(model.state_dict())
            now, then = torch.randn(32, 4), torch.randn(32, 4)
            with torch.no_grad():
                best = model(then).argmax(1, keepdim=True)
                goal = 5 + 0.99 * target(then).gather(1, best)[:, 0]
            step(optimizer, F.mse_loss(model(now)[:, 0], goal))

    return model, train


def wrong_start(loss_of):
    model = mlp(64, 32, 10)
    with torch.no_grad():
        model[-1].weight.mul_(40)
    return classify(loss_of, 3, model=model)


def smooth(output, y):
    return F.cross_entropy(output, y, label_smoothing=0.1)


def summed(output, y):
    return F.cross_entropy(output, y, reduction="sum") / len(y)


def each(output, y):
    return F.cross_entropy(output, y, reduction="none").mean()


def unsigned(output, y):
    return F.binary_cross_entropy_with_logits(output[:, 0], y * 1.0)


def cosine(k):
    return (1 + math.cos(math.pi * k / 400)) / 2


def one_hot(output, y):
    return F.cross_entropy(output, F.one_hot(y, 10).float())


def with_another(output, y):
    return F.cross_entropy(output, y) + 3 * output.square().mean()


def log_softmax(output, y):
    return F.nll_loss(output.log_softmax(1), y)


def record(training):
    torch.manual_seed(0)
    model, train = training()
    with tempfile.TemporaryDirectory() as folder, watch(model, to=folder + "/run") as run:
        train()
    assert run._recording.recorder.failed is None
    return run


# Rule, training with the fault, severity, first and last step at which it may be found.
FAULTS = [
    *(("wrong initial loss", partial(wrong_start, way), "warn", 0, 0) for way in (smooth, summed, each, one_hot)),
    ("wrong initial loss", partial(wrong_start, with_another), "warn", 0, 0),
    ("no better than chance", partial(classify, steps=420, change=shuffled, lr=1e-3), "warn", 299, 420),
    ("no better than chance", partial(classify, steps=420, change=misfiled), "warn", 299, 420),
    ("softmax twice", partial(classify, lambda o, y: F.cross_entropy(o.softmax(1), y)), "warn", 3, 3),
    ("softmax twice", partial(classify, twice_binary), "warn", 3, 3),
    ("loss without a floor", partial(classify, lambda o, y: -F.cross_entropy(o, y)), "warn", 4, 6),
    ("loss without a floor", partial(classify, lambda o, y: log_softmax(-o, y) * -3), "warn", 4, 6),
    ("loss without a floor", partial(classify, unsigned), "warn", 2, 59),
    ("loss without a floor", partial(regress, lambda o, y: -F.mse_loss(o, y)), "warn", 4, 6),
    ("loss without a floor", partial(regress, lambda o, y: -(o - y).abs().mean(), lr=0.05), "warn", 60, 119),
    (
        "loss without a floor",
        partial(regress, lambda o, y: F.mse_loss(o, y) - 10 * o.var(), torch.optim.Adam, steps=200),
        "warn",
        60,
        199,
    ),
    ("scores are no log-probabilities", partial(classify, F.nll_loss), "warn", 3, 3),
    ("scores are no log-probabilities", partial(classify, lambda o, y: F.nll_loss(o.softmax(1), y)), "warn", 3, 3),
    ("learning rate gone", partial(classify, steps=300, schedule=lambda k: 0.9**k), "warn", 80, 100),
    ("early blow-up", partial(classify, lr=3.0, steps=25), "warn", 1, 10),
    ("early blow-up", partial(regress, lr=3.0, steps=25), "warn", 1, 10),
    ("batches of one class", partial(classify, change=in_order, steps=200), "warn", 9, 60),
    ("bad batch", partial(classify, change=bad), "error", 7, 7),
    ("bad batch", partial(classify, change=partial(bad, at=33)), "error", 33, 33),
    ("bad batch", partial(regress, bad_at=41, value=1e30), "error", 41, 41),
    ("bad batch", partial(regress, bad_at=41), "error", 41, 41),
    ("targets in the inputs", partial(classify, change=with_label, model=mlp(74, 32, 10)), "warn", 4, 12),
    ("targets in the inputs", partial(classify, change=with_number, model=mlp(65, 32, 10)), "warn", 4, 12),
    ("targets in the inputs", partial(with_target, True), "warn", 4, 4),
    ("targets in the inputs", partial(language, True), "warn", 4, 4),
]
# For each, one that is near it.
HEALTHY = {
    "plain": partial(classify, steps=420),
    "small batches": partial(classify, steps=200, size=4, lr=1e-3),
    "slow": partial(classify, steps=420, lr=2e-4),
    "log_softmax": partial(classify, log_softmax),
    "smoothed": partial(classify, smooth, steps=320),
    "binary": partial(classify, binary, steps=320),
    "to the end of a cosine": partial(classify, steps=400, schedule=cosine),
    "one large number": partial(classify, change=partial(bad, value=20.0)),
    "regression": regress,
    "momentum": partial(regress, optimizer=partial(torch.optim.SGD, momentum=0.9)),
    "a column of noise": partial(with_target, False),
    "language": partial(language, False, 320),
    "attack": attack,
    "gan": gan,
    "values": q_learning,
}


def name(value):
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("rule", "training", "severity", "first", "last"), FAULTS, ids=name)
def test_a_fault_is_found(rule, training, severity, first, last):
    found = [one for one in record(training).findings if one.rule == rule]
    assert found
    one = found[0]
    assert one.severity == severity and first <= one.step <= last and one.text and one.why and one.then


@pytest.mark.parametrize("training", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_training_is_accused_of_nothing(training):
    assert not [one for one in record(training).findings if one.rule in RULES]


def test_a_bad_batch_says_which_input_and_which_row():
    (one,) = (one for one in record(partial(classify, change=bad)).findings if one.rule == "bad batch")
    assert "row 11" in one.text and "not finite" in one.text and str(one.place) == "model: .:in[0]"
    (one,) = (one for one in record(partial(regress, bad_at=41)).findings if one.rule == "bad batch")
    assert "row 3" in one.text and str(one.place) == "mse_loss: target"
    (one,) = (one for one in record(partial(regress, bad_at=41, value=1e30)).findings if one.rule == "bad batch")
    assert "row 3" in one.text and "10,000 times" in one.text


def test_a_bad_batch_at_the_start_is_no_blow_up():
    assert not [one for one in record(partial(classify, change=bad)).findings if one.rule == "early blow-up"]


def test_an_early_blow_up_is_a_note_where_the_target_moves():
    def training():
        model, optimizer = mlp(4, 32, 2), None
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def train():
            for _ in range(15):
                with torch.no_grad():
                    goal = 3 * model(torch.randn(32, 4)).amax(1)
                step(optimizer, F.mse_loss(model(torch.randn(32, 4))[:, 0], goal + 1))

        return model, train

    assert {one.severity for one in record(training).findings if one.rule == "early blow-up"} == {"note"}


def test_a_moving_target_is_the_reason_not_to_check():
    states = {state.rule: state for state in record(q_learning)._recording.judge.states()}
    for rule in ("loss spike", "loss not falling"):
        assert states[rule].state == "not checked" and "target seems to move" in states[rule].why


def test_what_a_model_made_is_no_batch():
    given, x = Given(), torch.ones(4, 2)
    made = nn.Linear(2, 2)(x)
    given.add(("body", "x"), x)
    given.add(("head", "x"), made)
    assert [where for where, _ in given.all()] == [("body", "x")]
