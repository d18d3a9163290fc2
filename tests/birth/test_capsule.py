"""A bad step in a file: it comes back as it was, and what is no capsule is refused kindly."""

import json
import sys
from dataclasses import dataclass

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import nn

from tenterhook import CaptureError
from tenterhook.birth.capsule import Capsule, save
from tenterhook.birth.replay import RootCall

VERSIONS = {"tenterhook": "0", "torch": "0", "python": "0"}


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 4))
        self.seen = []

    def forward(self, x, *, parts=None, at=0):
        self.seen.append((x.detach().clone(), torch.rand(2), self.body(x).detach()))
        value = self.body(x).exp() if parts is None else parts["first"][at] * self.body(x)
        return {"value": value.log()}


def called(model, *args, **kwargs):
    """A call, noted as a recording does it."""
    noted = []
    handle = model.register_forward_pre_hook(
        lambda m, a, k: noted.append(RootCall.now(m, a, k, sys._getframe(1))), with_kwargs=True
    )
    model(*args, **kwargs)
    handle.remove()
    return noted


def written(tmp_path, calls, *models):
    file = tmp_path / "step.safetensors"
    names = [(f"m{i}", model) for i, model in enumerate(models)]
    save(file, calls, names, "as it was told", VERSIONS)
    return file


def test_a_step_comes_back(tmp_path):
    torch.manual_seed(0)
    model = Net()
    model.body[3].eval()
    model(torch.randn(6, 4))  # the statistics of BatchNorm
    parts = {"first": [torch.zeros(6, 4, requires_grad=True)]}
    calls = called(model, torch.randn(6, 4), parts=parts, at=0)
    truth = model.seen[-1]
    file = written(tmp_path, calls, model)
    twin, state = Net(), torch.get_rng_state()
    birth = Capsule.read(file).replay(twin)
    assert birth.operation == "log" and birth.line.file == __file__ and "log of 0" in birth.why
    for a, b in zip(truth, twin.seen[-1], strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in twin.modules()] == [m.training for m in model.modules()]
    for (name, a), (_, b) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_autocast_is_as_it_was(tmp_path):
    model = nn.Linear(4, 2)
    nn.init.constant_(model.weight, 100.0)
    with torch.autocast("cpu", torch.float16):
        calls = called(model, torch.full((3, 4), 6e4))
    birth = Capsule.read(written(tmp_path, calls, model)).replay(nn.Linear(4, 2))
    assert "float16" in birth.why


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


def test_the_gradient_of_an_input_that_asks_for_one(tmp_path):
    model = Root()
    calls = called(model, torch.zeros(3, requires_grad=True))
    birth = Capsule.read(written(tmp_path, calls, model)).replay(Root())
    assert birth.operation == "sqrt" and birth.backward


def test_several_models_come_as_a_tuple_or_a_dict(tmp_path):
    a, b = nn.Linear(4, 4), Root()
    calls = [*called(a, torch.randn(2, 4)), *called(b, -torch.ones(3))]
    capsule = Capsule.read(written(tmp_path, calls, a, b))
    for made in ((nn.Linear(4, 4), Root()), {"m1": Root(), "m0": nn.Linear(4, 4), "other": 1}):
        birth = capsule.replay(made)
        assert birth.operation == "sqrt" and birth.address == "m1:."
    with pytest.raises(CaptureError, match=r"m0 \(a Linear\), m1 \(a Root\).*it returned Linear"):
        capsule.replay(nn.Linear(4, 4))


def test_wrappers_do_not_matter(tmp_path):
    model = torch.compile(nn.Linear(4, 4), backend="eager")
    calls = called(model, torch.full((2, 4), torch.inf))
    assert Capsule.read(written(tmp_path, calls, model)).replay(nn.Linear(4, 4)).received


def test_another_model_is_refused(tmp_path):
    model = Net()
    file = written(tmp_path, called(model, torch.randn(6, 4)), model)
    with pytest.raises(CaptureError, match=r"parameter body.0.weight is \[8, 4\] in the capsule and \[9, 4\]"):
        Capsule.read(file).replay(Net(9))
    with pytest.raises(CaptureError, match="factory"):
        Capsule.read(file).replay(None)


@dataclass
class Batch:
    x: object


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch):
        return self.layer(batch.x)


def test_a_dataclass_comes_back_as_a_namedtuple_and_that_is_said(tmp_path):
    model = Takes()
    calls = called(model, Batch(torch.full((2, 4), torch.nan)))
    capsule = Capsule.read(written(tmp_path, calls, model))
    assert capsule.replay(Takes()).received and "Batch" in capsule.left_out[0]


def test_what_cannot_be_written_is_said(tmp_path):
    model = Takes()
    batch = type("Own", (), {"x": torch.ones(2, 4)})()
    with pytest.raises(CaptureError, match=r"call 0 args.* cannot be saved: it holds a Own"):
        written(tmp_path, called(model, batch), model)
    x = torch.ones(2, 4)
    calls = [*called(model, Batch(x)), *called(model, batch)]
    assert "Own" in Capsule.read(written(tmp_path, calls, model)).left_out[0]
    x.zero_()
    with pytest.raises(CaptureError, match="written into"):
        written(tmp_path, calls[:1], model)


CHANGES = {
    "no version": lambda content: content.pop("version"),
    "another version": lambda content: content.update(version=2),
    "no models": lambda content: content.pop("models"),
    "a model that is a number": lambda content: content.update(models=[1]),
    "a parameter that is text": lambda content: content["models"][0]["parameter"][0].__setitem__(1, "x"),
    "an unknown tensor": lambda content: content["models"][0]["parameter"][0].__setitem__(1, {"tensor": "/etc"}),
    "a call of no model": lambda content: content["calls"][0].update(model=7),
    "a call of a negative model": lambda content: content["calls"][0].update(model=-1),
    "arguments that are none": lambda content: content["calls"][0].update(args=3),
    "random numbers that are none": lambda content: content["calls"][0].update(random=[]),
    "autocast that is none": lambda content: content["calls"][0].update(autocast={"list": [{"list": ["cpu", 1, 2]}]}),
    "a class": lambda content: content["calls"][0].update(args={"class": "os.system"}),
    "a gradient of nothing": lambda content: content.update(with_gradient=["x"]),
    "text in place of all": lambda content: content.update(calls="abc"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_hostile_file_is_refused_kindly(tmp_path, change):
    model = nn.Linear(4, 4)
    file = written(tmp_path, called(model, torch.ones(2, 4)), model)
    with safetensors.safe_open(file, "pt") as opened:
        content = json.loads(opened.metadata()["tenterhook.capsule"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    Capsule.read(file)
    change(content)
    save_file(tensors, file, {"tenterhook.capsule": json.dumps(content)})
    with pytest.raises(CaptureError, match=f"{file}"):
        Capsule.read(file)


def test_what_is_no_capsule(tmp_path):
    (tmp_path / "x").write_bytes(b"\x80\x04K\x01.")
    save_file({"a": torch.ones(1)}, tmp_path / "y")
    for name in "xy":
        with pytest.raises(CaptureError, match=r"no a step|holds no"):
            Capsule.read(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Capsule.read(tmp_path / "z")


def test_what_is_said_in_a_file_does_not_reach_the_terminal_as_it_is(tmp_path):
    model = nn.Linear(4, 4)
    file = tmp_path / "step"
    save(file, called(model, torch.ones(2, 4)), [("m", model)], "one\n\x1b[2Jtwo", VERSIONS)
    assert Capsule.read(file).birth == "one\n�[2Jtwo"
