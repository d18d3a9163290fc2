"""`tenterhook run --capsule`, and `tenterhook replay`."""

import re
import shlex

import pytest

from tests.cli.processes import OFF, RUN, latest

SCRIPT = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(8, width)

    def forward(self, x, scale):
        return torch.exp(self.layer(x) * scale).mean()

def build():
    return Net(int(sys.argv[1]))




if __name__ == "__main__":
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(30):
        loss = model(torch.randn(4, 8), 1e4 if step == 25 else 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def capsule(zygote, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = zygote(*RUN, "--capsule", "train.py", "16", cwd=tmp_path)
    assert done.returncode == 0 and b"tenterhook replay" in done.stderr, done.stderr
    return latest(tmp_path).folder / "rank-0" / "capsule.safetensors"


def test_a_saved_step_is_run_again(zygote, tmp_path, capsule):
    words = ("-m", "tenterhook", "replay", capsule)
    done = zygote(*words, "train.py:build", "16", cwd=tmp_path)
    said = done.stdout.decode()
    assert done.returncode == 0 and said.startswith("+inf was made by exp in ., at train.py:"), said
    assert "return torch.exp(self.layer(x) * scale).mean()" in said
    done = zygote(*words, "train.py:build", "17", cwd=tmp_path)
    assert done.returncode == 2 and b"[16, 8] in the capsule and [17, 8]" in done.stderr
    for other in (("train.py:nothing",), ("train.py",), ("no.py:build",)):
        done = zygote(*words, *other, "16", cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith(b"tenterhook replay: "), done.stderr
    done = zygote("-m", "tenterhook", "replay", "train.py", "train.py:build", "16", cwd=tmp_path)
    assert done.returncode == 2 and b"no safetensors file" in done.stderr


def said_in(done):
    return " ".join(done.stderr.decode().replace("│", "").split())


def test_the_advised_command_is_complete(zygote, tmp_path):
    (tmp_path / "my train.py").write_text(SCRIPT)
    said = said_in(zygote(*RUN, "--capsule", "my train.py", "16", cwd=tmp_path))
    command = re.search("`tenterhook (replay [^`]*)` runs it again", said)[1]
    words = shlex.split(command.replace("FACTORY", "build"))
    done = zygote("-m", "tenterhook", *words, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(b"+inf was made by exp"), done.stderr


def test_a_replay_is_not_advised_where_the_loss_is_the_cause(zygote, tmp_path):
    script = SCRIPT.replace("1e4 if step == 25 else 1.0)", "1.0)")
    script = script.replace(
        "optimizer.zero_grad()", "loss = loss * torch.log(torch.tensor(25.0 - step)); optimizer.zero_grad()"
    )
    (tmp_path / "train.py").write_text(script)
    said = said_in(zygote(*RUN, "--capsule", "train.py", "16", cwd=tmp_path))
    assert "made by log" in said and "but not the loss, which made it" in said and "tenterhook replay" not in said


def test_a_run_stands_for_the_capsule_in_it(zygote, tmp_path, capsule):
    words = ("-m", "tenterhook", "replay")
    for run in (capsule.parents[1], ".tenterhook/latest", ".tenterhook"):
        done = zygote(*words, run, "train.py:build", "16", cwd=tmp_path)
        assert done.returncode == 0 and done.stdout.startswith(b"+inf was made by exp"), done.stderr
    capsule.unlink()
    done = zygote(*words, ".tenterhook/latest", "train.py:build", "16", cwd=tmp_path)
    assert done.returncode == 2 and b"no step was saved in" in done.stderr and b"--capsule" in done.stderr
    done = zygote(*words, tmp_path, "train.py:build", "16", cwd=tmp_path)
    assert done.returncode == 2 and b"is not a run" in done.stderr


def test_without_the_option_nothing_is_saved(zygote, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    zygote(*RUN, "train.py", "16", cwd=tmp_path, env=OFF)
    zygote(*RUN, "train.py", "16", cwd=tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))
    zygote(*RUN, "train.py", "16", cwd=tmp_path, env={"TENTERHOOK_CAPSULE": "1"})
    assert len(list((tmp_path / ".tenterhook").rglob("[0-9]*/rank-0/*.safetensors"))) == 1
