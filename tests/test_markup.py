"""What a notebook shows: well-formed, escaped, and folded where it is long."""

import re
import warnings
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from tenterhook import capture, edit, observe, sites, sweep, watch
from tenterhook.changes import zero
from tenterhook.markup import SHOWN
from tenterhook.tables import Table

EVIL = "<script>alert('1')</script>"
x = torch.randn(3, 4)


class Page(HTMLParser):
    """The tags of a page, which must be closed in order, and its texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.texts, self._open = [], [], []
        self.feed(html)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attributes):
        assert all(name == "style" for name, _ in attributes), attributes
        self.tags.append(tag)
        self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


class Evil(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module(EVIL, nn.Linear(4, 4))
        self.gone = nn.Linear(1, 1)

    def forward(self, x):
        return self._modules[EVIL](x)


def results(folder):
    model = Evil()
    with warnings.catch_warnings(), capture(model, "**", "gone") as seen:
        model(x)
    yield seen
    yield seen.stats()
    yield seen.report()
    yield sites(model)
    yield sites(model, x)
    with edit(model, {model._modules[EVIL]: zero()}) as edits:
        model(x)
    yield edits
    with observe(model, {nn.Linear: lambda value: None}) as watching:
        model(x)
    yield watching
    yield sweep(model, x, [{}, {sites(model)[1].module: 0.0}, {str(sites(model)[1]): zero()}])
    with watch(model, to=folder / "run") as run:
        optimizer = torch.optim.SGD(model._modules[EVIL].parameters(), lr=0.0)
        for _ in range(30):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
    yield run
    yield run.verdict()
    yield run.verdict(everything=True)


def test_every_result_has_a_page_in_which_all_text_is_escaped(tmp_path):
    evil = 0
    for result in results(tmp_path):
        page = Page(result._repr_html_())
        assert not {"script", "img", "iframe", "style"} & set(page.tags), result
        text = "".join(page.texts)
        evil += "script" in text
        assert repr(result) and "object at 0x" not in repr(result)
    assert evil >= 7


@pytest.mark.parametrize(("many", "folds"), [(SHOWN, False), (SHOWN + 4, False), (SHOWN + 5, True), (500, True)])
def test_long_tables_fold(many, folds):
    page = Page(Table(("a", "b"), [(str(i), "x") for i in range(many)])._repr_html_())
    assert ("details" in page.tags) is folds
    assert [text for text in page.texts if text.isdigit()] == [str(i) for i in range(many)]
    if folds:
        assert f"{many - SHOWN} more rows" in page.texts


def test_an_empty_table_is_one():
    assert Page(Table(("a", "b"), [])._repr_html_()).texts == ["a", "b"]
    assert str(Table(("a", "b"), [])).splitlines() == ["a  b", "─  ─"]


def test_a_text_can_be_cut():
    table = Table(("a",), [(str(i),) for i in range(30)])
    assert table.text(2).splitlines() == ["a", "─", "0", "1", "… 28 more"]
    assert str(table).count("\n") == 31


def test_the_run_says_where_it_is(tmp_path):
    model = nn.Linear(4, 4)
    run = watch(model, to=tmp_path / "run")
    assert repr(run).startswith("<watch of Linear, to be recorded in ") and run._repr_html_() is None
    with run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x).pow(2).mean().backward()
            optimizer.step()
        assert re.fullmatch(r"<watch of Linear in .*/run: \d steps? so far, 0 findings>", repr(run))
    assert repr(run) == str(run.verdict()) == repr(run.verdict()) and repr(run).startswith("┌ tenterhook ─")
    assert "Linear" in run._repr_html_()


def test_a_verdict_has_the_worst_first_and_folds_what_is_long():
    from tenterhook.report.page import page
    from tests.report.rows import row
    from tests.report.test_box import verdict

    assert "nothing found" in page(verdict(), False)
    assert "nothing was trained" in page(verdict(clean=[], nothing="nothing was trained"), False)
    many = [row(f"rule {i}", i, "warn", f"m: {i}") for i in range(20)]
    html = page(verdict(*many, row("dead ReLU", 30, "error", "m: x")), False)
    Page(html)
    assert html.index("dead ReLU") < html.index("rule 1") and "13 more findings" in html
