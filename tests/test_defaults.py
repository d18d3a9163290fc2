"""Programs that have set a default device or dtype: none of what we make may land there."""

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import changes, sweep, watch

SOURCES = sorted((Path(__file__).parent.parent / "src" / "tenterhook").rglob("*.py"))
NUMBERS = {"empty", "zeros", "ones", "full", "tensor", "as_tensor", "eye", "rand", "randn", "linspace", "scalar_tensor"}
PLACED = NUMBERS | {"arange", "randint", "randperm", "Generator"}


@pytest.fixture
def elsewhere():
    """A default device that has no values."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.fixture(params=[torch.float64, torch.float16])
def other_numbers(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def made_in(path):
    """The calls in a file that make a tensor or a generator: a line, what is called, and what is said of it."""
    for node in ast.walk(ast.parse(path.read_text())):
        words = ast.unparse(node.func).split(".") if isinstance(node, ast.Call) else []
        if len(words) == 2 and words[0] == "torch" and words[1] in PLACED:
            said = {keyword.arg for keyword in node.keywords}
            if words[1] == "Generator" and node.args:
                said.add("device")
            yield node.lineno, words[1], said


def test_what_we_make_says_where_it_is_and_of_which_numbers():
    found = [(path.name, *call) for path in SOURCES for call in made_in(path)]
    assert len(found) > 10
    for name, line, function, said in found:
        where = f"{name}:{line}: torch.{function}"
        assert "device" in said, f"{where} lands on the user's default device"
        assert "dtype" in said or function not in NUMBERS, f"{where} has the user's default dtype"


def test_changes_where_values_are(elsewhere):
    value = torch.arange(12.0, device="cpu").view(4, 3)
    drawn = changes.resample(value + 20, seed=3)(value)
    assert drawn.is_cpu and all(any(torch.equal(one, row) for row in value + 20) for one in drawn)
    directions = torch.tensor([[1.0, 0, 0], [1, 1, 0]], device="cpu")
    assert torch.allclose(changes.project_out(directions)(value)[:, 2], value[:, 2])
    assert not changes.project_out(directions)(value)[:, :2].abs().gt(1e-5).any()


def test_a_sweep_where_values_are(elsewhere):
    model, x = nn.Linear(3, 2, device="cpu"), torch.ones(1, 3, device="cpu")
    out = sweep(model, x, [{".": changes.scale(2.0)}, {".": changes.scale(3.0)}])
    assert torch.allclose(out[1].detach(), 3 * model(x).detach())


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda out, y: F.mse_loss(out[:, 0], y.to(out.dtype))])
def test_a_recording_with_other_numbers(tmp_path, other_numbers, loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(32, 8, dtype=torch.float32), torch.randint(0, 4, (32,))
    with watch(model, to=tmp_path / "run") as run:
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    assert run._recording.recorder.failed is None and run.open().steps().num_rows == 3


def test_a_recording_where_values_are(tmp_path, elsewhere):
    model = nn.Sequential(nn.Linear(8, 16, device="cpu"), nn.ReLU(), nn.Linear(16, 4, device="cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.ones(32, 8, device="cpu"), torch.arange(32, device="cpu") % 4
    with watch(model, to=tmp_path / "run") as run:
        for k in range(23):
            F.cross_entropy(model(x), y).backward()  # the last of which is measured at the end
            if k < 22:
                optimizer.step()
    assert run._recording.recorder.failed is None
    assert all(loss is not None for loss in run.open().steps().to_pydict()["loss"])
