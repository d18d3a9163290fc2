"""What is known of a loss: the calls of torch's loss functions in it, and whether its target moves."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import watch
from tenterhook.record.rules._loss import Target
from tenterhook.record.sources.given import bad_row
from tenterhook.record.sources.losses import _measured
from tenterhook.record.terms import best_guess

pytest.importorskip("pyarrow")


class Spy:
    """A rule that keeps all steps."""

    name = "spy"

    def __init__(self):
        self.steps, self.target = [], Target()

    def look(self, step):
        self.steps.append(step)
        self.target.see(step)
        return ()


def record(folder, loss_of, classes=10, steps=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spy = Spy()
    with watch(model, to=folder / "run", rules=[spy], **options) as run:
        for _ in range(steps):
            x, y = torch.randn(32, 8), torch.randint(0, classes, (32,))
            optimizer.zero_grad()
            loss_of(model(x), y, model).backward()
            optimizer.step()
    assert run._recording.recorder.failed is None
    return spy


ALIKE = {
    "mean": lambda o, y, m: F.cross_entropy(o, y),
    "module": lambda o, y, m: nn.CrossEntropyLoss()(o, y),
    "sum and n": lambda o, y, m: F.cross_entropy(o, y, reduction="sum") / len(y),
    "none and mean": lambda o, y, m: F.cross_entropy(o, y, reduction="none").mean(),
    "one-hot": lambda o, y, m: F.cross_entropy(o, F.one_hot(y, 10).float()),
    "log_softmax": lambda o, y, m: F.nll_loss(o.log_softmax(1), y),
    "scaled": lambda o, y, m: 7 * F.cross_entropy(input=o, target=y),
    "with another": lambda o, y, m: F.cross_entropy(o, y) + 0.1 * m[0].weight.square().sum(),
    "in pieces": lambda o, y, m: (F.cross_entropy(o[:16], y[:16]) + F.cross_entropy(o[16:], y[16:])) / 2,
}


@pytest.mark.parametrize("loss_of", ALIKE.values(), ids=ALIKE)
def test_a_cross_entropy_is_known_in_whatever_way_it_is_written(tmp_path, loss_of):
    plain = record(tmp_path / "plain", ALIKE["mean"]).steps[0].terms[0]
    step = record(tmp_path / "this", loss_of).steps[0]
    terms = step.terms
    assert sum(term.many for term in terms) == 32 and {term.classes for term in terms} == {10}
    assert sum(term.mean * term.many for term in terms) / 32 == pytest.approx(plain.mean, rel=1e-5)
    assert sum(term.labels for term in terms).tolist() == plain.labels.tolist()
    assert all(term.chance == math.log(10) for term in terms)
    assert step.has_more == (loss_of is ALIKE["with another"])


def test_a_loss_that_is_not_in_the_one_that_is_trained_is_none(tmp_path):
    def loss_of(output, y, model):
        F.mse_loss(output[:, 0], y.float())  # for a log
        with torch.no_grad():
            F.cross_entropy(output, y)
        return F.cross_entropy(output, y)

    assert [[term.function for term in step.terms] for step in record(tmp_path, loss_of).steps] == [
        ["cross_entropy"]
    ] * 3


def test_ignored_labels_and_weights_of_classes_count_as_they_do_in_the_loss(tmp_path):
    weight = torch.arange(1.0, 11.0)
    step = record(tmp_path, lambda o, y, m: F.cross_entropy(o, y, weight=weight, ignore_index=3)).steps[0]
    (term,) = step.terms
    assert term.labels[3] == 0 and term.mean == pytest.approx(step.loss)
    assert term.many == pytest.approx(sum(term.labels))


def test_label_smoothing_is_in_the_best_guess(tmp_path):
    (term,) = record(tmp_path, lambda o, y, m: F.cross_entropy(o, y, label_smoothing=0.5)).steps[0].terms
    shares = torch.tensor(term.labels) / 32 * 0.5 + 0.05
    assert best_guess(term, term.labels) == pytest.approx(-(shares * shares.log()).sum().item())


def test_binary_labels_and_values(tmp_path):
    ways = {
        "binary": lambda o, y, m: F.binary_cross_entropy_with_logits(o[:, 0], y % 2.0),
        "values": lambda o, y, m: F.mse_loss(o[:, 0], y.float()),
        "weighted": lambda o, y, m: F.binary_cross_entropy_with_logits(o[:, 0], y % 2.0, torch.rand(32)),
    }
    terms = {name: record(tmp_path / name, loss_of).steps[0].terms[0] for name, loss_of in ways.items()}
    assert terms["binary"].classes == 2 and sum(terms["binary"].labels) == 32
    assert terms["binary"].chance == pytest.approx(math.log(2))
    assert terms["values"].chance is None and 4 < best_guess(terms["values"], terms["values"].labels) < 13
    assert not terms["weighted"].plain


def test_of_steps_that_are_not_sampled_nothing_is_measured(tmp_path):
    steps = record(tmp_path, ALIKE["mean"], steps=25).steps
    assert [bool(step.terms) for step in steps] == [step.sampled for step in steps] and not steps[-1].terms


def test_subclasses_and_functions_of_torch_func_disturb_nobody(tmp_path):
    class Named(torch.Tensor):
        pass

    def loss_of(output, y, model):
        torch.func.vmap(lambda o: F.mse_loss(o, torch.zeros(10)))(output)
        torch.func.grad(lambda o: F.mse_loss(o, torch.zeros(32, 10)))(output.detach())
        return F.cross_entropy(output.as_subclass(Named), y)

    steps = record(tmp_path, loss_of).steps
    assert [len(step.terms) for step in steps] == [1] * 3


def test_a_loss_that_is_computed_and_dropped_keeps_no_graph(tmp_path):
    import weakref

    kept = []

    def loss_of(output, y, model):
        for _ in range(3):
            other = model(torch.randn(4, 8))
            kept.append(weakref.ref(other))
            F.cross_entropy(other, y[:4])
        del other
        assert not any(one() is not None for one in kept)
        return F.cross_entropy(output, y)

    record(tmp_path, loss_of)


def test_the_loss_within_a_model_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    optimizer, spy = torch.optim.AdamW(model.parameters()), Spy()
    with watch(model, to=tmp_path / "run", rules=[spy]):
        for _ in range(2):
            ids = torch.randint(0, 64, (4, 12))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (term,) = spy.steps[0].terms
    assert term.function == "cross_entropy" and term.classes == 64 and term.many == 44
    assert term.mean == pytest.approx(spy.steps[0].loss) and not term.leak > 0.5


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
def test_what_torch_compile_has_compiled_before_is_not_compiled_again(tmp_path):
    torch._dynamo.reset()
    model = nn.Linear(8, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.compile(lambda o, y: F.cross_entropy(o, y), backend="eager")
    x, y = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    try:
        loss(model(x), y)
        with torch._dynamo.config.patch(error_on_recompile=True):
            with watch(model, to=tmp_path / "run"):
                for _ in range(3):
                    loss(model(x), y).backward()
                    optimizer.step()
            loss(model(x), y)
    finally:
        torch._dynamo.reset()


# Whether the target moves.


def stationary(output, y, model):
    return F.mse_loss(output[:, 0], y.float())


def test_labels_stay_as_they_are(tmp_path):
    for k, loss_of in enumerate((*ALIKE.values(), stationary, lambda o, y, m: o.square().mean())):
        assert not record(tmp_path / str(k), loss_of, steps=8).target.moves


def test_a_target_that_a_network_gives_without_gradients_moves(tmp_path):
    def loss_of(output, y, model):
        with torch.no_grad():
            goal = 1 + 0.9 * model(torch.randn(32, 8)).amax(1)
        return F.smooth_l1_loss(output[:, 0], goal)

    assert "without gradients" in record(tmp_path, loss_of).target.moves


def test_classes_stay_as_they_are_though_the_model_is_validated_at_each_step(tmp_path):
    def loss_of(output, y, model):
        with torch.no_grad():
            model(torch.randn(32, 8))
        return F.cross_entropy(output, y)

    assert not record(tmp_path, loss_of).target.moves


def test_the_losses_of_a_policy_and_of_values_move(tmp_path):
    def loss_of(output, y, model):
        policy = -(output.log_softmax(1)[range(32), y] * torch.randn(32)).mean()
        return policy + F.mse_loss(output[:, 0], torch.randn(32))

    assert "several losses" in record(tmp_path, loss_of).target.moves


def test_a_policy_that_plays_moves(tmp_path):
    def loss_of(output, y, model):
        actions = [model(torch.randn(1, 8)).log_softmax(1)[0, 1] for _ in range(10)]
        return -torch.stack(actions).mul(torch.randn(10)).sum()

    assert "many times" in record(tmp_path, loss_of).target.moves


def test_two_networks_against_each_other_move(tmp_path):
    model, other = nn.Linear(4, 1), copy.deepcopy(nn.Linear(4, 1))
    whole = nn.ModuleList([model, other])
    optimizers, spy = [torch.optim.SGD(one.parameters(), lr=0.1) for one in whole], Spy()
    with watch(whole, to=tmp_path / "run", rules=[spy]):
        for _ in range(6):
            for one, optimizer in zip(whole, optimizers, strict=True):
                optimizer.zero_grad()
                F.binary_cross_entropy_with_logits(one(torch.randn(8, 4)), torch.ones(8, 1)).backward()
                optimizer.step()
    assert "several optimizers" in spy.target.moves


@pytest.mark.parametrize("family", ["classes", "soft", "images", "binary", "values", "words"])
def test_no_number_is_read_while_a_call_is_measured(family):
    """Tensors on the meta device have no numbers: to wait for one, as on a GPU, would be an error."""
    shapes = {"images": (16, 10, 4, 4), "binary": (16,), "values": (16, 1)}
    x = torch.empty(shapes.get(family, (16, 10)), device="meta", requires_grad=True)
    y = torch.empty(16, dtype=torch.long, device="meta")
    if family in ("binary", "values", "soft"):
        y = torch.empty(x.shape, device="meta")
    elif family == "images":
        y = torch.empty(16, 4, 4, dtype=torch.long, device="meta")
    names = {"binary": "binary_cross_entropy_with_logits", "values": "mse_loss"}
    function = names.get(family, "cross_entropy")
    inputs = [
        torch.empty(16, dtype=torch.long, device="meta") if family == "words" else torch.empty(16, 8, device="meta")
    ]
    given = {"input": x, "target": y, "reduction": "sum", "weight": None}
    call = _measured(function, given, getattr(F, function)(x, y, reduction="sum"), inputs)
    assert call.plain and call.classes == {"binary": 2, "values": 0}.get(family, 10)
    assert all(one.is_meta for one in bad_row(inputs[0].float()))
