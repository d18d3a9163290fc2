"""`tenterhook run`: trainings as people write them; their losses are the same to the last bit."""

import pytest

from tests.cli.processes import RUN, SCRIPTS, latest, losses, recorded

LATER = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(512, 8)
y = x[:, :3].argmax(1)

def make():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3))

def train(model, parameters, steps, y, rate):
    optimizer = torch.optim.SGD(parameters, lr=rate)
    for k in range(steps):
        rows = torch.randint(512, (32,))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = rate if k > 14 else 3.0
        optimizer.step()

first, second, third = make(), make(), make()
train(first, [*first.parameters()], 210, y, 0.05)
train(second, [*second[4].parameters()], 210, y[torch.randperm(512)], 0.05)
train(third, [*third.parameters()], 30, y, 5.0)
"""


def test_a_later_model_is_judged_as_the_first_one_is(zygote, tmp_path):
    zygote(*RUN, "--every", "1", "-c", LATER, cwd=tmp_path)
    found = latest(tmp_path).findings().to_pylist()
    told = {(one["rule"], one["model"]) for one in found if one["severity"] == "warn"}
    shuffled = ("no better than chance", None)  # the labels of the second
    assert told == {shuffled, ("parameter never trained", "second"), ("update-to-weight ratio", "third")}
    assert min(one["step"] for one in found if one["model"] == "third") >= 440  # not in its first 20 steps


MANY = """
import torch
for _ in range(60):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
"""


def test_one_model_after_the_other(zygote, tmp_path):
    done = zygote(*RUN, "--every", "2", "--dense", "4", "-c", MANY, cwd=tmp_path)
    run = latest(tmp_path)
    assert [model["name"] for model in run.models] == ["model", *(f"model-{k}" for k in range(2, 33))]
    assert run.rank_info()["steps"] == 180 and run.rank_info()["sampled"] < 150
    assert "models after the first 32 were not recorded" in done.stderr.decode()


STEPS = {"cnn": 40, "accumulation": 25, "gan": 30, "bfloat16": 30, "lbfgs": 8, "checkpointed": 30, "averaged": 30}
STEPS |= {"saved": 30, "listed": 30, "by_hand": 30, "inference": 25, "compiled": 40, "compiled_in_place": 40}
STEPS |= {"compiled_part": 40, "scaler": None, "sliced": 30, "made_anew": 30, "folds": 90, "exported": 30}
MODELS = {
    "cnn": ["net"],
    "gan": ["generator", "critic"],
    "checkpointed": ["model", "head"],
    "listed": ["layer", "layer-2"],
}
MODELS |= {"folds": ["model", "model-2", "model-3"], "exported": ["features", "model", "made", "made-2"]}
MODELS |= {"averaged": ["model", "ema", "other", "other-2"], "saved": ["model", "model-2", "model-3"]}


@pytest.mark.parametrize("style", STEPS)
def test_losses_are_the_same_to_the_last_bit(zygote, tmp_path, style):
    done = zygote.alike(SCRIPTS / "styles.py", style, cwd=tmp_path)
    run = latest(tmp_path)
    assert run.rank_info()["failed"] is None and run.rank_info()["ended"] == "exit 0"
    assert [model["name"] for model in run.models] == MODELS.get(style, ["model"])
    if style == "scaler":
        check_unscaled(run, done)
        return
    assert len(run.steps()) == STEPS[style]
    if style not in ("inference", "averaged"):
        assert recorded(run) == pytest.approx(losses(done), rel=1e-6)
    stats = run.stats().to_pandas()
    kinds = set(stats["what"])
    if style.startswith("compiled"):
        assert {"parameter", "parameter_grad", "update"} <= kinds <= {"input", "parameter", "parameter_grad", "update"}
        assert set(stats["model"]) == {"model"}
    elif style == "inference":
        assert kinds == {"input", "output"}
    else:
        assert kinds == {"input", "output", "output_grad", "parameter", "parameter_grad", "update"}
    if style == "gan":
        graded = stats[(stats["what"] == "output_grad") & (stats["step"] == 3)]
        assert {*graded["model"]} == {"generator", "critic"}


def check_unscaled(run, done):
    """The gradients are those that the optimizer saw, and those of outputs are divided by the scale."""
    rows = [line.split() for line in done.stdout.decode().splitlines() if line.startswith(("grads", "skipped"))]
    taken = [row for row in rows if row[0] == "grads"]
    assert 3 <= len(rows) - len(taken) <= 15
    steps = run.steps().to_pandas()
    assert len(steps) == len(taken)
    assert steps["skipped"].sum() == len(rows) - len(taken) and steps["backwards"].sum() == len(rows)
    stats = run.stats().to_pandas()
    assert steps["scale"].nunique() > 1
    for number in sorted(set(stats["step"])):
        one = stats[stats["step"] == number].set_index(["what", "site"])["sumsq"]
        scale, logits, *parameters = (float(taken[number][1]), *(float.fromhex(word) for word in taken[number][2:]))
        assert steps["scale"][number] == scale
        assert one["output_grad", "."] == pytest.approx(logits, rel=1e-5)
        names = ("1.weight", "1.bias", "4.weight", "4.bias")
        assert [one["parameter_grad", name] for name in names] == pytest.approx(parameters, rel=1e-5)


LASTING = {  # the models, and how they are called
    "a slice in a variable": (["full"], "full(x()); m = full[:2]; train(lambda: m(x()), m)"),
    "a slice whose whole is gone": (["full", "m"], "full(x()); m = full[:2]; del full; train(lambda: m(x()), m)"),
    "an attribute": (["full"], "box.m = nn.ReLU(); train(lambda: full(box.m(x())), full)"),
    "a list": (["full"], "a = [nn.ReLU()]; train(lambda: full(a[0](x())), full)"),
    "a tuple": (["full"], "a = (nn.ReLU(),); train(lambda: full(a[0](x())), full)"),
    "a larger one": (["Sequential"], "box.m = nn.Sequential(full, nn.ReLU()); train(lambda: box.m(x()), full)"),
    "weights alone": (["Tied"], "one = full[0]; box.m = Tied(one); train(lambda: box.m(x()), full)"),
    "for a call": (["full"], "train(lambda: nn.ReLU()(full[1:](full[:1](x()))), full)"),
    "a slice in a list": (["full"], "full(x()); a = [full[:2]]; train(lambda: a[0](x()), full)"),
    "a slice in a checkpoint": (
        ["full"],
        "full(x()); train(lambda: full[1:](checkpoint(full[:1], x(), use_reentrant=False)), full, torch.optim.SGD)",
    ),
    "around a call": (["full"], "train(lambda: nn.Sequential(full, nn.Tanh())(x()), full)"),
}
LAST = """
import gc
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Tied(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return nn.functional.linear(x, self.part.weight, self.part.bias)

class Box:
    pass

def x():
    return torch.randn(16, 4)

def train(call, model, kind=None):
    optimizer = kind(model.parameters(), lr=0.01) if kind else None
    for _ in range(25):
        call().square().mean().backward()
        if optimizer:
            optimizer.step()
        model.zero_grad()

def main():
    box, full = Box(), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    {}

gc.unfreeze()  # as in styles.py
main()
"""


@pytest.mark.parametrize("case", LASTING)
def test_what_lasts_is_a_model_and_what_is_made_for_a_call_is_none(zygote, tmp_path, case):
    models, lines = LASTING[case]
    done = zygote(*RUN, "-c", LAST.format(lines), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = latest(tmp_path)
    assert [model["name"] for model in run.models] == models
    assert len(run.steps()) == 25


@pytest.mark.parametrize(
    ("script", "steps", "model", "words"),
    [
        ("lightning_digits", 30, "LitDigits", ()),
        ("hf_trainer", 14, "model", ()),
        ("accelerated", 12, "classifier", ("--every", "1", "-q", "24")),
        ("notebook", 30, "net", ()),
    ],
)
def test_frameworks(zygote, tmp_path, script, steps, model, words):
    done = zygote(*RUN, SCRIPTS / f"{script}.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    run = latest(tmp_path)
    assert run.rank_info()["failed"] is None and run.models[0]["name"] == model and len(run.steps()) == steps
    printed, mine = (
        [line.split() for line in done.stdout.decode().splitlines() if line.startswith("loss ")],
        recorded(run),
    )
    if script == "hf_trainer":  # it says the sum over the micro-batches, in four digits
        assert [float(words[2]) for words in printed] == pytest.approx(mine, rel=1e-3)
        assert set(run.steps().to_pandas()["backwards"]) == {2}
    elif script == "accelerated":  # it divides by the number of micro-batches
        two = losses(done)
        assert mine == pytest.approx([(a + b) / 2 for a, b in zip(two[::2], two[1::2], strict=True)], rel=1e-5)
    else:
        assert mine == losses(done)
    kinds = {"input", "output", "output_grad", "parameter", "parameter_grad", "update"}
    assert set(run.stats().to_pandas()["what"]) == kinds
