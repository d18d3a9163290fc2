"""Pictures of captured values: which one a shape gets, and that it shows the numbers."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")

from tenterhook import capture
from tenterhook.verbs.show import suggested
from tests.verbs.models import mlp


def shown(*values, **options):
    """The figure of some values that a model returned, one after the other."""
    model = nn.Identity()
    with capture(model, ".") as seen:
        for value in values:
            model(value)
    return seen.show(*(["."] if not options.pop("everything", False) else []), **options)


def panels(figure):
    return [axes for axes in figure.axes if axes.axison and axes.get_label() != "<colorbar>"]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.randn(2, 16, 8, 8), "maps"),
        (torch.randn(2, 4, 6, 6).softmax(-1), "attention"),
        (torch.randn(4, 6, 6).softmax(-1), "attention"),
        (torch.randn(2, 5, 8), "image"),
        (torch.randn(5, 8), "image"),
        (torch.randn(8), "vector"),
        (torch.randn(1, 200), "vector"),
        (torch.tensor(3.0), "vector"),
        (torch.randn(2, 3, 4, 5, 6), "histogram"),
    ],
)
def test_the_shape_suggests_the_picture(value, kind):
    assert suggested(value) == kind
    assert len(shown(value)._repr_png_()) > 1000


def test_feature_maps_lie_side_by_side():
    maps = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    (panel,) = panels(shown(maps))
    page = panel.images[0].get_array()
    assert page.shape == (2 * 4 + 1, 3 * 5 + 2, 4)
    solid = page[..., 3] > 0
    assert solid.sum() == maps.numel() and not solid[4].any() and not solid[:, 5].any()
    dark, bright = page[0, 0, :3].sum(), page[-1, -1, :3].sum()
    assert dark < bright
    assert panel.get_xlabel() == "channels 0 to 2" and panel.get_ylabel() == "samples 0 to 1"
    (panel,) = panels(shown(torch.randn(9, 64, 4, 4)))
    assert panel.get_xlabel() == "channels 0 to 7 of 64" and panel.get_ylabel() == "samples 0 to 3 of 9"


def test_zero_is_white_among_signed_values_and_what_is_not_finite_has_a_colour():
    values = torch.tensor([[-1.0, 0.0, 3.0], [torch.nan, torch.inf, -torch.inf]])
    (panel,) = panels(shown(values))
    page = panel.images[0].get_array()
    assert page[0, 1, :3].min() > 0.95
    assert np.allclose(page[1, 0], page[1, 1]) and np.allclose(page[1, 1], page[1, 2])
    assert not np.allclose(page[1, 0, :3], page[0, 1, :3])
    assert panel.get_title("right") == "3 not finite"


def test_vectors_and_histograms_show_the_numbers():
    (panel,) = panels(shown(torch.tensor([1.0, -2.0, 3.0])))
    assert [bar.get_height() for bar in panel.patches] == [1.0, -2.0, 3.0]
    (panel,) = panels(shown(torch.arange(100.0)))
    assert panel.lines[0].get_ydata()[7] == 7
    (panel,) = panels(shown(torch.randn(1000), kind="histogram"))
    assert sum(panel.patches[0].get_data().values) == 1000


def test_odd_values_are_drawn_or_say_that_they_cannot_be():
    odd = [
        torch.empty(0, 3), torch.full((4,), torch.nan), torch.randn(3).bfloat16(), torch.tensor(True),
        torch.randn(4, dtype=torch.cfloat), torch.zeros(2, 3), torch.randn(3, 8, 1, 1), torch.randn(3, 3).to_sparse(),
    ]  # fmt: skip
    figure = shown(*odd)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts == ["no values", "its values cannot be drawn"]
    assert len(figure._repr_png_()) > 1000


def test_several_values_have_a_panel_each_up_to_a_dozen():
    model = mlp()
    with capture(model, "**", "0.weight") as seen:
        model(torch.randn(3, 4))
    figure = seen.show()
    assert [axes.get_title("left").split("  ")[0] for axes in panels(figure)] == list(seen)
    assert len(panels(seen.show("0", "1"))) == 2
    many = shown(*torch.randn(15, 2, 2), everything=True)
    assert len(panels(many)) == 12 and "the first 12 of 15 tensors" in many._suptitle.get_text()


def test_a_figure_can_be_saved(tmp_path):
    shown(torch.randn(4, 4)).savefig(tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_wrong_uses_are_told():
    with pytest.raises(ValueError, match="no kind 'pie' of picture; there are 'maps', 'attention'"):
        shown(torch.randn(3), kind="pie")
    with pytest.raises(TypeError, match=r"there is no tensor to show in \."):
        shown(None)


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "tenterhook.verbs.show")
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    with pytest.raises(ImportError, match=r'draws with matplotlib: pip install "tenterhook\[show\]"'):
        shown(torch.randn(3))
