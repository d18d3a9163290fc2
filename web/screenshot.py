"""The pictures of the page in the README and in docs/viewing.md: python web/screenshot.py [run].

`make screenshot` makes the run, too. The two that are compared are trained here: one changes its learning rate at step
60.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import Browser, sync_playwright
from torch import nn

from tenterhook import watch
from tenterhook.store import open_run
from tenterhook.view.serve import Server

OUT = Path(__file__).parent.parent / "docs" / "img"


def train(folder: Path, rate: float) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())]
    net = nn.Sequential(nn.Linear(16, 32), *layers, nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with watch(net, to=folder, every=2):
        for step in range(200):
            if step == 60:
                optimizer.param_groups[0]["lr"] = rate
            images = torch.randn(32, 16)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), images[:, :4].argmax(1)).backward()
            optimizer.step()


def picture(browser: Browser, server: Server, hash_: str, keys: str, file: Path) -> None:
    tab = browser.new_page(viewport={"width": 1280, "height": 760}, color_scheme="light")
    tab.goto(server.address.partition("#")[0] + hash_)
    tab.wait_for_selector(".row")
    for key in keys:
        tab.keyboard.press(key)
    tab.wait_for_selector(".inspector .kindbox")
    tab.wait_for_timeout(500)
    tab.screenshot(path=file)
    print(file)


def main(run: str = ".tenterhook/latest") -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with Server(open_run(run)).beside() as server:
            picture(browser, server, "#site=net/act", "", OUT / "view.png")
        runs = [Path(folder) / "baseline", Path(folder) / "higher-rate"]
        for path, rate in zip(runs, (1e-3, 3e-3), strict=True):
            train(path, rate)
        with Server([open_run(path) for path in runs]).beside() as server:
            picture(browser, server, "#with=higher-rate", "c", OUT / "differences.png")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
