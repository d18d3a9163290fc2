"""Training frameworks as their own first pages show them: bare and under `tenterhook run` they do the same.

`make frameworks` installs all of them, and then each must be there. Elsewhere those that are not installed are skipped.
"""

import importlib.util
import math
import os
import re
from pathlib import Path

import pytest

from tests.cli.processes import RUN, latest, python

SCRIPTS = Path(__file__).parent / "scripts"
OFFLINE = {"HF_HUB_OFFLINE": "1"}
TIMES = re.compile(r"'\w*(runtime|per_second|step_time)': '?[^,'}]*")  # that a framework prints
KINDS = {"input", "output", "output_grad", "parameter", "parameter_grad", "update"}

QUICK_STARTS = {  # by script: the package, and the models
    "lightning_autoencoder": ("pytorch_lightning", ["autoencoder"]),
    "hf_trainer": ("transformers", ["model"]),
    "accelerate_loop": ("accelerate", ["model"]),
    "trl_sft": ("trl", ["model"]),
    "trl_dpo": ("trl", ["model", "reference"]),
    "trl_grpo": ("trl", ["model"]),
    "fastai_tabular": ("fastai", ["TabularModel"]),
    "skorch_classifier": ("skorch", ["MyModule"]),
    "ignite_trainer": ("ignite", ["model"]),
    "sb3_ppo": ("stable_baselines3", ["ActorCriticPolicy"]),
    "sb3_sac": ("stable_baselines3", ["SACPolicy"]),
    "gpytorch_regression": ("gpytorch", ["mll"]),
    "pyro_svi": ("pyro", ["guide"]),
    "pyg_gcn": ("torch_geometric", ["model"]),
    "opacus_dp": ("opacus", ["model"]),
    "diffusers_ddpm": ("diffusers", ["model"]),
}
NO_INPUTS = ("sb3_ppo", "sb3_sac", "pyg_gcn")  # their models are called by another method, or with an object


# Pyro makes an optimizer for each parameter during the first step, which ends when the first of these has stepped.
ONE_MORE = ("pyro_svi",)


def quick_start(script):
    package, models = QUICK_STARTS[script]
    missing = not os.environ.get("FRAMEWORKS") and importlib.util.find_spec(package) is None
    skip = pytest.mark.skipif(missing, reason=f"{package} is not installed here; `make frameworks` runs this")
    return pytest.param(script, models, marks=skip, id=script)


@pytest.mark.parametrize(("script", "models"), [*map(quick_start, QUICK_STARTS)])
def test_a_quick_start_is_the_same_and_nothing_is_found(tmp_path, script, models):
    bare, watched = (in_folder(tmp_path / name, *words, SCRIPTS / f"{script}.py") for name, words in WAYS.items())
    assert bare.returncode == 0, bare.stderr.decode()
    assert watched.returncode == 0, watched.stderr.decode()
    printed = said(bare)
    assert printed[-1].startswith("weights ")
    assert said(watched) == printed

    run = latest(tmp_path / "watched")
    info, steps = run.rank_info(), run.steps().to_pandas()
    assert info["failed"] is None and info["ended"] == "exit 0"
    assert [model["name"] for model in run.models] == models
    taken = int(printed[-2].removeprefix("steps "))
    assert len(steps) == taken + (script in ONE_MORE)
    assert all(map(math.isfinite, steps["loss"][:taken]))
    assert set(run.stats().to_pandas()["what"]) == KINDS - ({"input"} if script in NO_INPUTS else set())
    assert [finding for finding in run.findings().to_pylist() if finding["severity"] != "note"] == []
    assert [state for state in info["rules"] if "the rule raised" in (state.get("why") or "")] == []


WAYS = {"bare": (), "watched": (*RUN, "--every", "1")}  # every step, so that no clock has a say in what is seen


def in_folder(folder, *words):
    folder.mkdir()
    return python(*words, cwd=folder, env=OFFLINE, timeout=300)


def said(done):
    """The lines that a script has printed, less the times that its framework says it took."""
    return TIMES.sub("", done.stdout.decode()).splitlines()
