"""The examples run, are short, write what they say, and show a real effect."""

import gc
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from torch import Tensor

from tenterhook.record.watch import Options, Recording
from tenterhook.view.pictures import listed
from tests.notebook import NOTEBOOK, code_of, run, shown

EXAMPLES = Path(__file__).parents[1] / "examples"
Figures = dict[str, float]


def shows_digits(figures: Figures) -> bool:
    return figures["accuracy"] > 0.9


def shows_heat(figures: Figures) -> bool:
    return figures["coolest"] == 1.0 and figures["on ink"] > figures["ink"] + 0.1


def shows_less_noise(figures: Figures) -> bool:
    cleaner = figures["guided negative"] < figures["gradient negative"] - 0.1
    return cleaner and figures["guided on ink"] > figures["gradient on ink"] + 0.1


def shows_completeness(figures: Figures) -> bool:
    return figures["error"] < 1e-2 and figures["difference"] > 1


def shows_attacks(figures: Figures) -> bool:
    pairs = [(figures[f"FGSM {epsilon}"], figures[f"PGD {epsilon}"]) for epsilon in ("0.05", "0.10", "0.15", "0.20")]
    stronger = all(pgd <= fgsm for fgsm, pgd in pairs)
    return stronger and figures["FGSM 0.00"] > 0.9 and figures["FGSM 0.15"] < 0.3 and figures["PGD 0.15"] < 0.15


def shows_transfer(figures: Figures) -> bool:
    pixels, random, learnt = "raw pixels", "features of a random network", "features learnt from 0 to 4"
    return all(
        figures[f"{learnt}, {few}"] - 0.1 > figures[f"{random}, {few}"] > figures[f"{pixels}, {few}"]
        for few in (2, 5, 20)
    )


def shows_where(figures: Figures) -> bool:
    return figures["all"] >= 0.99 and figures["first"] >= 0.99 and figures["last"] < 0.6 and figures["other"] > 0.2


def shows_moods(figures: Figures) -> bool:
    moods = [figures[f"mood {times:+d}"] for times in (-4, -2, -1, 0, 1, 2, 4)]
    steers = moods == sorted(moods) and moods[0] < -0.3 and moods[-1] > 0.3
    return steers and figures["loaded"] == 1.0 and figures["closer"] > 0.02


def shows_hidden_domain(figures: Figures) -> bool:
    hidden = figures["domain with"] < figures["domain without"] - 0.2
    return hidden and figures["grey with"] > figures["grey without"] + 0.03 and figures["white with"] > 0.9


def shows_a_good_teacher(figures: Figures) -> bool:
    own, taught = "labels alone", "labels and the teacher's features"
    return all(figures[f"{taught}, {few}"] > figures[f"{own}, {few}"] + 0.05 for few in (1, 2, 5))


def shows_positions(figures: Figures) -> bool:
    plain = figures["same output"] == 1.0 and figures["rows"] < 1e-4
    return plain and all(figures[f"word {side}"] > 0.5 for side in ("before", "after"))


SHOWN: dict[str, tuple[str | None, Callable[[Figures], bool]]] = {
    "digits": ("feature_maps.png", shows_digits),
    "grad_cam": ("grad_cam.png", shows_heat),
    "guided_backprop": ("guided_backprop.png", shows_less_noise),
    "integrated_gradients": ("integrated_gradients.png", shows_completeness),
    "adversarial": ("adversarial.png", shows_attacks),
    "transfer": (None, shows_transfer),
    "patching": ("patching.png", shows_where),
    "steering": (None, shows_moods),
    "gradient_reversal": (None, shows_hidden_domain),
    "distillation": (None, shows_a_good_teacher),
    "attention": ("attention.png", shows_positions),
}


@pytest.fixture(scope="module", autouse=True)
def same_threads():
    """The examples use one thread; other tests go on with as many as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def example(monkeypatch, tmp_path) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_every_example_is_tested():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*SHOWN, "common", "faulty", "vgg16"}


def test_the_notebook_runs_and_its_page_shows_what_it_does(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    content = json.loads(NOTEBOOK.read_text())
    page = (EXAMPLES.parent / "docs" / "notebook.md").read_text()
    outputs = []
    for cell, printed, value in run(content):
        assert code_of(cell) in page
        if value is not None:
            outputs.append(set(shown(value)))
        assert "False" not in printed
        known = {mime for output in cell.get("outputs", ()) for mime in output.get("data", ())}
        assert known == (set() if value is None else outputs[-1])  # what is in the file was made by this notebook
    assert {"text/plain", "text/html"} in outputs and {"text/plain", "image/png"} in outputs


def test_the_verdict_names_every_planted_fault(example, tmp_path):
    """What `make demo` shows; test_run_styles.py has the same script style in processes of its own."""
    faulty = example("faulty")
    assert len((EXAMPLES / "faulty.py").read_text().splitlines()) < 80
    recording = Recording(tmp_path, Options(), None, [])
    recording.recorder.install(discover=True)
    faulty.main(epochs=2)
    recording.close("finished")
    found = {(f.rule, f.place.model, f.place.site) for f in recording.judge.findings if f.severity != "note"}
    assert found == {
        ("wrong initial loss", "net", "head"),
        ("dead ReLU", "net", "act"),
        ("parameter never trained", "net", "stem.0.weight"),
        ("BatchNorm mode", "net", "stem.1"),
    }


def test_feature_maps_of_vgg16_are_kept(example, tmp_path):
    gc.collect()  # optimizers of the tests before, which would be waited for
    recording = Recording(tmp_path, Options(every=1, snapshots=2), None, [])
    recording.recorder.install(discover=True)
    losses = example("vgg16").main(steps=2)
    recording.close("finished")
    pictures = listed(tmp_path / "rank-0")
    assert all(math.isfinite(loss) for loss in losses.values())
    assert {0} <= {one["step"] for one in pictures} <= {0, 1} and len({one["site"] for one in pictures}) == 12
    assert pictures[0]["site"] == "features.0" and pictures[0]["shape"] == [16, 64, 64]


@pytest.mark.parametrize("name", SHOWN)
def test_example(name, example, capsys):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80
    picture, shows = SHOWN[name]
    figures = example(name).main()
    printed = capsys.readouterr().out
    assert all(math.isfinite(figure) for figure in figures.values())
    assert shows(figures), figures
    assert "──" in printed and "nan" not in printed
    assert max(map(len, printed.splitlines())) <= 120
    if picture:
        assert f"out/{picture}" in printed
        with Image.open(Path("out") / picture) as page:
            page.load()
            assert min(page.size) > 100 and len(page.getcolors(1 << 24)) > 20


class GuidedReLU(torch.autograd.Function):
    """Guided backpropagation as it is written by hand."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0) * (gradient > 0)


def test_guided_backprop_is_what_an_own_relu_gives(example):
    guided_backprop, common = example("guided_backprop"), example("common")
    model, (images, digits) = common.build(), common.one_of_each()
    x = images.clone().requires_grad_()
    value = x
    for module in model:
        value = GuidedReLU.apply(value) if isinstance(module, torch.nn.ReLU) else module(value)
    (wanted,) = torch.autograd.grad(value.gather(1, digits.unsqueeze(1)).sum(), x)
    assert not torch.equal(wanted, guided_backprop.saliency(model, images, digits))
    assert torch.equal(wanted, guided_backprop.guided(model, images, digits))
