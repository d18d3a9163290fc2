"""The page in a real browser: the real server on runs on disk, and the report without a network."""

import contextlib
import re
import shutil

import pytest
import torch
from torch import nn

from tenterhook import open_run, watch
from tenterhook.stats.columns import INDEX
from tenterhook.view.report import write_report
from tenterhook.view.serve import Server
from tests.view.made import KINDS, Made, describe, finding

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SITES = ("a", *(f"blocks.{i}.{part}" for i in range(12) for part in ("attn", "mlp")), "b")


@pytest.fixture(scope="module")
def browser(built_page):
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made = Made(folder / "20260101T000000Z-one", SITES)
    found = [
        finding(40, "non-finite values", "blocks.3.attn", "output"),
        finding(50, "loss is NaN", None, None),
        finding(90, "update-to-weight ratio", "b.weight", "update", "warn"),
    ]
    made.add(30, broken=[(4, 5 * SITES.index("blocks.3.attn"))], zero=[(k, 0) for k in range(10, 20)], findings=found)
    made.end()
    Made(folder / "20260102T000000Z-two", SITES).add(30).end()
    return folder


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """Two runs that part at step 90; the second one is longer."""
    folder = tmp_path_factory.mktemp("apart")

    def change(steps, numbers):
        numbers[steps >= 90, len(KINDS) * SITES.index("blocks.3.attn"), INDEX["sumsq"]] *= 9
        numbers[steps >= 200, KINDS.index("parameter"), INDEX["sum"]] += 9

    Made(folder / "20260101T000000Z-one", SITES).add(30).end()
    Made(folder / "20260102T000000Z-two", SITES, change=change).add(30).add(10).end()
    return folder


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Three ranks of 10, 20 and 30 samples: all have one finding, the last has another."""
    folder = tmp_path_factory.mktemp("ranks") / "run"
    for rank in range(3):
        found = [finding(40, site="a"), *[finding(50, "dead unit", "b", severity="warn")] * (rank == 2)]
        Made(folder, SITES, rank=rank).add(10 * (rank + 1), findings=found).end()
    return folder


@pytest.fixture(scope="module")
def server(folder, built_page):
    with Server(open_run(folder / "20260101T000000Z-one")).beside() as server:
        yield server


class Tab:
    """A page that is open, and what went wrong in it."""

    def __init__(self, browser, address, may_fail, width=1280, height=800, offline=False, theme="light"):
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        self.context.set_offline(offline)
        self.page = self.context.new_page()
        self.wrong = []
        self.may_fail = may_fail  # whether requests may, in the test
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda said: said.type == "error" and self.note(said.text))
        self.page.on("dialog", lambda dialog: (self.wrong.append("dialog"), dialog.dismiss()))
        self.page.goto(address)

    def note(self, text):
        if not (self.may_fail and "Failed to load resource" in text):
            self.wrong.append(text)

    def hash(self):
        return self.page.evaluate("location.hash")

    def see(self, selector, **options):
        return self.page.wait_for_selector(selector, timeout=15000, **options)

    def count(self, selector):
        return self.page.locator(selector).count()

    def colours(self):
        """How often each colour is on the matrix."""
        return dict(
            self.page.evaluate("""() => {
              const board = document.querySelector('.matrix canvas');
              if (!board?.width || !board.height) return [];
              const { data } = board.getContext('2d').getImageData(0, 0, board.width, board.height);
              const found = new Map();
              for (let i = 0; i < data.length; i += 4) {
                const key = `${data[i]},${data[i + 1]},${data[i + 2]},${data[i + 3]}`;
                found.set(key, (found.get(key) ?? 0) + 1);
              }
              return [...found];
            }""")
        )

    def painted(self):
        for _ in range(100):
            found = self.colours()
            if len(found) > 3:
                return found
            self.page.wait_for_timeout(50)
        raise AssertionError("the matrix was not painted")

    def wait_for(self, condition):
        for _ in range(200):
            if condition():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError("it did not come")


@pytest.fixture
def serve(built_page):
    """Starts servers, which outlive the pages that look at them."""
    with contextlib.ExitStack() as stack:
        yield lambda run: stack.enter_context(Server(run).beside())


@pytest.fixture
def tab(browser, serve):
    tabs = []

    def open_tab(address, may_fail=False, **options):
        tabs.append(Tab(browser, address, may_fail, **options))
        return tabs[-1]

    yield open_tab
    for one in tabs:
        one.context.close()
        assert not one.wrong, one.wrong


def test_the_matrix_shows_what_is_in_the_run(tab, server):
    page = tab(f"{server.address}#fold=net/blocks.0%2B")
    page.see(".row")
    colours = page.painted()
    assert colours.get("255,0,200,255"), "the NaN is not magenta"
    assert colours.get("0,0,0,255"), "what is zero is not black"
    labels = page.page.locator(".row .name").all_inner_texts()
    assert labels[:4] == ["net", "a", "blocks", "0 … 11"] and page.count(".row") == 5 + 12
    assert "300 steps · 30 sampled" in page.page.inner_text(".bar")


def test_from_a_finding_to_its_line_in_two_clicks(tab, server):
    page = tab(server.address)
    page.see(".finding")
    texts = page.page.locator(".finding b").all_inner_texts()
    assert texts == ["non-finite values", "loss is NaN", "update-to-weight ratio"]
    page.page.click(".finding >> nth=0")
    page.see(".inspector .card")
    assert "text of non-finite values" in page.page.inner_text(".inspector")
    assert "blocks.3.attn" in page.page.inner_text(".row.selected >> nth=0") or page.count(".row.selected") == 1
    page.page.click(".inspector .link")
    page.see(".source tr.mine")
    assert "x = block(x)" in page.page.inner_text(".source tr.mine")
    assert "tab=source" in page.hash() and "blocks.3.attn" in page.hash().replace("%2F", "/")


def test_a_finding_about_updates_shows_updates(tab, server):
    page = tab(server.address)
    page.see(".finding")
    page.page.click(".finding >> nth=2")
    page.see("[aria-checked=true] >> text=updates")
    page.see(".kindbox[data-kind=update]")


def test_the_address_has_the_whole_state(tab, server):
    page = tab(server.address)
    page.see(".row")
    page.page.click("text=weight gradients")
    page.page.click(".row >> nth=1")
    page.page.keyboard.press("+")
    page.page.keyboard.press("t")
    page.see(".inspector")
    page.see("text=steps 75–224")
    again = tab(page.page.url)
    again.see(".inspector")
    again.see("text=steps 75–224")
    assert again.page.inner_text(".inspector h2") == page.page.inner_text(".inspector h2")
    assert again.page.get_attribute("html", "data-theme") == "dark"
    page.page.click(".close")
    page.see(".inspector", state="detached")


def test_everything_with_the_keyboard(tab, server):
    page = tab(server.address)
    page.see(".row")
    press = page.page.keyboard.press
    press("Home")
    for _ in range(3):
        press("ArrowDown")
    selected = lambda: page.page.inner_text(".row.selected .name")  # noqa: E731
    page.wait_for(lambda: selected() == "0 … 11")
    press("ArrowRight")
    page.wait_for(lambda: page.count(".row") == 17)
    press("ArrowRight")
    page.wait_for(lambda: selected() == "0")
    press("ArrowLeft")
    press("ArrowLeft")
    page.wait_for(lambda: page.count(".row") == 5)
    press("n")
    page.wait_for(lambda: "non-finite" in page.page.inner_text(".inspector"))
    press("d")
    page.see(".depth circle")
    press("2")
    page.wait_for(lambda: "show=output_grad" in page.hash())
    press("/")
    page.page.keyboard.type("b.")
    page.wait_for(lambda: "find=b." in page.hash())
    press("Escape")
    press("Escape")
    page.wait_for(lambda: "find" not in page.hash())
    press("?")
    page.see(".help")
    assert "MIT" in page.page.text_content(".help pre")  # the licences of what is in the page
    press("Escape")
    page.see(".help", state="detached")
    press("m")
    page.see(".matrix")


def test_a_window_by_dragging(tab, server):
    page = tab(server.address)
    page.see(".row")
    page.painted()
    for area in (".matrix canvas", ".losses .u-over"):
        box = page.page.locator(area).bounding_box()
        y = box["y"] + 20
        page.page.mouse.move(box["x"] + box["width"] * 0.25, y)
        page.page.mouse.down()
        page.page.mouse.move(box["x"] + box["width"] * 0.5, y, steps=5)
        page.page.mouse.up()
        page.wait_for(lambda: "from=" in page.hash())
        first, last = (int(re.search(rf"{name}=(\d+)", page.hash())[1]) for name in ("from", "to"))
        assert abs(first - 75) < 5 and abs(last - 150) < 5
        page.page.mouse.dblclick(box["x"] + 30, y)
        page.wait_for(lambda: "from=" not in page.hash())
        page.page.wait_for_timeout(200)


def test_two_runs_side_by_side(tab, server):
    page = tab(server.address)
    page.see(".row")
    page.page.select_option("[aria-label='compare with']", "20260102T000000Z-two")
    page.see(".two")
    assert page.page.locator(".two b").all_inner_texts() == ["20260101T000000Z-one", "20260102T000000Z-two"]
    assert "with=20260102T000000Z-two" in page.hash()
    page.painted()
    page.page.select_option("[aria-label='run']", "20260102T000000Z-two")
    page.wait_for(lambda: "Nothing found" in page.page.inner_text("aside"))


def test_what_differs_and_where_it_begins(serve, tab, apart):
    server = serve(open_run(apart / "20260101T000000Z-one"))
    page = tab(f"{server.address}#with=20260102T000000Z-two&from=0&to=50")
    page.see(".row")
    page.page.click("[role=tab] >> text=Differences")
    page.see(".apart li")
    said = page.page.locator(".apart li").all_inner_texts()
    assert [text.split(" from step ")[0] for text in said] == ["activations", "weights"]
    assert said[0].startswith("activations from step 90 at blocks.3.attn: rms")
    assert "(×3)" in said[0] and "1 of 26 sites differs" in said[0]
    page.page.keyboard.press("c")  # the first difference
    page.see(".inspector")
    page.wait_for(lambda: page.page.inner_text(".inspector h2 .site") == "blocks.3.attn")
    assert "from=" not in page.hash(), "the step is outside of the window"
    page.wait_for(lambda: page.page.inner_text(".row.selected .since") == "from 90")
    page.painted()
    box = page.page.locator(".matrix canvas").bounding_box()
    row = page.page.locator(".row.selected").bounding_box()
    for share, text in ((0.1, "same"), (0.9, "×3")):
        page.page.mouse.move(box["x"] + share * box["width"], row["y"] + row["height"] / 2)
        page.wait_for(lambda text=text: text in page.page.inner_text(".tip"))
    page.page.click(".apart li:nth-child(2) button")
    page.wait_for(lambda: "show=parameter" in page.hash() and "a.weight" in page.page.inner_text(".inspector h2"))
    page.page.select_option("[aria-label='compare with']", "-1")
    page.see(".apart", state="detached")
    assert page.count("[role=tab] >> text=Differences") == 0


def test_ranks_are_chosen_and_compared(serve, tab, ranks):
    server = serve(open_run(ranks))
    page = tab(server.address)
    page.see(".finding")
    labels = page.page.locator(".finding .ranks").all_inner_texts()
    assert labels == ["all ranks", "rank 2"]
    assert "10 sampled" in page.page.inner_text(".bar") and page.count(".row .badge.warn") == 0
    page.page.click(".finding >> nth=1")  # of another rank: it is shown
    page.see("text=30 sampled")
    page.see(".row .badge.warn")
    assert page.page.input_value("[aria-label=rank]") == "2" and "rank=2" in page.hash()
    page.page.select_option("[aria-label='compare with']", label="rank 1")
    page.wait_for(lambda: page.page.locator(".two b").all_inner_texts() == ["rank 2", "rank 1"])
    page.page.click("[role=tab] >> text=Differences")
    page.see(".apart li")
    assert page.page.inner_text(".apart ol").startswith("loss from step")  # nothing else differs
    page.page.select_option("[aria-label=rank]", "1")  # which is then alone
    page.see(".two", state="detached")
    page.see("text=20 sampled")


def test_a_report_of_two_runs_compares_them(tab, apart, tmp_path):
    one, two = (open_run(apart / f"2026010{k}T000000Z-{name}") for k, name in ((1, "one"), (2, "two")))
    path = write_report(one, tmp_path / "report.html", two)
    page = tab(path.as_uri(), offline=True)
    page.see(".two")
    page.page.keyboard.press("c")
    page.see(".apart li")
    page.wait_for(lambda: page.page.inner_text(".inspector h2 .site") == "blocks.3.attn")
    page.page.select_option("[aria-label=run]", "20260102T000000Z-two")
    page.see("text=40 sampled")
    page.page.click(".row >> nth=1")
    page.see(".inspector .kindbox")


def test_a_report_has_its_ranks(tab, ranks, tmp_path):
    page = tab(write_report(open_run(ranks), tmp_path / "report.html", ranks=[0, 2]).as_uri(), offline=True)
    page.see(".row")
    assert page.page.locator("[aria-label=rank] option").all_inner_texts() == ["rank 0", "rank 2"]
    page.page.select_option("[aria-label=rank]", "2")
    page.see("text=30 sampled")
    page.page.select_option("[aria-label=rank]", "0")
    page.page.select_option("[aria-label='compare with']", label="rank 2")
    page.page.keyboard.press("c")
    page.see(".apart li")
    page.wait_for(lambda: len(page.colours()) > 1)


def test_live(tab, tmp_path, built_page):
    made = Made(tmp_path / "run", ("a", "b"))
    with Server(open_run(made.folder)).beside() as server:
        page = tab(server.address, may_fail=True)
        page.see("text=Nothing is sampled so far")
        made.add(5)
        page.see("text=5 sampled")
        page.see(".live.on")
        page.painted()
        made.add(20, broken=[(0, 0)], findings=[finding(50)])
        page.see("text=25 sampled")
        page.see(".finding")
        page.wait_for(lambda: page.colours().get("255,0,200,255"))
        made.end()
        page.see("text=ended")
    page.see(".banner")  # the server is gone, and what was seen stays
    assert page.count(".row") == 3


def test_a_report_opens_from_disk_without_a_network(tab, folder, tmp_path):
    path = write_report(open_run(folder / "20260101T000000Z-one"), tmp_path / "a report.html")
    page = tab(f"{path.as_uri()}#site=net/a", offline=True)
    page.see(".inspector .kindbox")
    assert page.painted().get("0,0,0,255")
    for key, selector in (
        ("d", ".depth circle"),
        ("s", ".source tr.mine"),
        ("m", ".matrix"),
        ("+", "text=steps 75–224"),
    ):
        page.page.keyboard.press(key)
        page.see(selector)
    page.page.click(".finding >> nth=0")
    page.see(".inspector .card")
    assert "report" in page.page.inner_text(".live")


def test_names_from_a_model_are_never_run(serve, tab, tmp_path, built_page):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("<script>alert(1)</script>", nn.Linear(4, 4))
            self.add_module("<img src=x onerror=alert(2)>", nn.Linear(4, 2))
            self.add_module("</script><script>alert(3)</script>", nn.ReLU())

        def forward(self, x):
            for module in self._modules.values():
                x = module(x)
            return x

    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, to=tmp_path / "<b>run", every=1):
        for _ in range(25):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
    bad = "<script>alert(4)</script>"
    describe(tmp_path / "<b>run", ["a"], rules=[{"rule": bad, "state": "not checked", "why": bad}], ended=bad)
    run = open_run(tmp_path / "<b>run")
    report = write_report(run, tmp_path / "report.html")
    assert "<script>alert" not in report.read_text()
    server = serve(run)
    for address in (server.address, report.as_uri()):
        page = tab(address)
        page.see(".row")
        assert any("<script>alert(1)</script>" in name for name in page.page.locator(".row .name").all_inner_texts())
        page.page.locator(".row", has_text="<img").first.click()
        page.see(".inspector .kindbox")
        for key in "ds?":
            page.page.keyboard.press(key)
            page.page.wait_for_timeout(100)
        assert page.count("main script, main img, aside script") == 0


def test_pictures(serve, tab, tmp_path, built_page):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, to=tmp_path / "run", every=1, snapshots=3):
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(2, 1, 8, 8)).square().sum().backward()
            optimizer.step()
    run = open_run(tmp_path / "run")
    report = write_report(run, tmp_path / "report.html")
    server = serve(run)
    for address in (server.address, report.as_uri()):
        page = tab(address)
        page.see("[role=tab] >> text=Pictures")
        page.page.keyboard.press("p")
        page.see("figure canvas")
        page.wait_for(lambda page=page: "4 of 6×6" in page.page.inner_text("figcaption >> nth=0"))
        page.wait_for(lambda page=page: page.page.evaluate("document.querySelector('figure canvas').width") > 12)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(tab, server, width, theme):
    page = tab(f"{server.address}#site=net/a", width=width, theme=theme)
    page.see(".inspector .kindbox")
    page.painted()
    for key in "mds":
        page.page.keyboard.press(key)
        page.page.wait_for_timeout(100)
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.page.get_attribute("html", "data-theme") == theme


def test_errors_say_what_to_do(tab, server, folder):
    page = tab(f"{server.address}#run=nowhere", may_fail=True)
    page.see("text=there is no run 'nowhere'")
    page.see("text=tenterhook summary")
    wrong = tab(server.address.split("?")[0], may_fail=True)
    assert "the token is missing or wrong" in wrong.page.inner_text("body")
    none = tab(f"{server.address}#find=zzz")
    none.see("text=No layer matches")
