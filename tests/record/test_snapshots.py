"""Pictures of layers: they are what the layers gave, there are as many as asked for, and nothing else changes."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from tenterhook import open_run, watch
from tenterhook.view.answers import Answers
from tenterhook.view.pictures import NoPicture


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.qk, self.soft, self.head = nn.Conv2d(1, 20, 3), nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(4, 2)

    def forward(self, x):
        maps = self.conv(x)
        q, k = self.qk(maps.mean(1)[:, :6, :4]).chunk(2, -1)
        return self.head((self.soft(q @ k.transpose(1, 2)) @ q).mean(1))


def train(steps, to=None, **options):
    torch.manual_seed(0)
    model, seen = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.conv.register_forward_hook(lambda _, args, output: seen.append(output.detach().clone()))

    def loop():
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(2, 1, 12, 100)).square().sum().backward()
            optimizer.step()

    if to is None:
        loop()
    else:
        with watch(model, to=to, every=1, **options):
            loop()
    return model, seen


def test_pictures_are_what_the_layers_gave(tmp_path):
    _, seen = train(9, tmp_path / "run", snapshots=3)
    answers = Answers(open_run(tmp_path / "run"))
    told = json.loads(answers.answer("run", {}))["pictures"]
    assert {(one["site"], one["what"]) for one in told} == {("conv", "feature maps"), ("soft", "attention")}
    steps = sorted({one["step"] for one in told})
    assert len(steps) <= 3 and steps[0] == 0 and steps[-1] >= 4
    for one in (one for one in told if one["site"] == "conv"):
        wanted = nn.functional.adaptive_avg_pool2d(seen[one["step"]][0, :16], (10, 64)).numpy()
        head, _, body = answers.answer(f"picture/{one['file']}", {}).partition(b"\n")
        low, high = (json.loads(head)[k] for k in ("low", "high"))
        found = np.frombuffer(body, np.uint8).reshape(one["shape"]) / 254 * (high - low) + low
        assert one["shape"] == [16, 10, 64] and np.abs(found - wanted).max() <= (high - low) / 400
    assert len(list((tmp_path / "run" / "rank-0" / "snapshots").glob("*.safetensors"))) == len(steps)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_there_are_never_more_than_asked_for(tmp_path, most):
    train(40, tmp_path / "run", snapshots=most)
    files = list((tmp_path / "run" / "rank-0" / "snapshots").glob("*.safetensors"))
    assert 1 <= len(files) <= most


def test_the_training_is_the_same(tmp_path):
    plain, _ = train(12)
    watched, _ = train(12, tmp_path / "run", snapshots=4)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))


def test_none_unless_asked_for(tmp_path):
    train(3, tmp_path / "run")
    assert not (tmp_path / "run" / "rank-0" / "snapshots").exists()
    with pytest.raises(ValueError, match="snapshots=-1"):
        watch(Net(), to=tmp_path / "x", snapshots=-1)


@pytest.mark.parametrize("file", ["0/99", "../run.json", "1/0/../..", "", "0", "²/0"])
def test_a_picture_that_is_not_there(tmp_path, file):
    train(2, tmp_path / "run", snapshots=2)
    with pytest.raises(NoPicture, match="there is no picture"):
        Answers(open_run(tmp_path / "run")).answer(f"picture/{file}", {})


@pytest.mark.parametrize("text", ["", "{", "[1, {}]", '[{"file": "../../x", "step": 1}]', "[" * 100_000])
def test_a_damaged_list_has_no_pictures(tmp_path, text):
    train(2, tmp_path / "run", snapshots=2)
    (tmp_path / "run" / "rank-0" / "snapshots" / "pictures.json").write_text(text)
    assert json.loads(Answers(open_run(tmp_path / "run")).answer("run", {}))["pictures"] == []


def test_a_damaged_picture_says_so(tmp_path):
    train(2, tmp_path / "run", snapshots=2)
    (tmp_path / "run" / "rank-0" / "snapshots" / "0.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(NoPicture, match="cannot be read"):
        Answers(open_run(tmp_path / "run")).answer("picture/0/0", {})
