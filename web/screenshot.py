"""The picture of the page in the README: python web/screenshot.py [run]; `make screenshot` makes the run, too."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from tenterhook.store import open_run
from tenterhook.view.serve import Server

OUT = Path(__file__).parent.parent / "docs" / "img" / "view.png"


def main(run: str = ".tenterhook/latest") -> None:
    with Server(open_run(run)).beside() as server, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 760}, color_scheme="light")
        tab.goto(f"{server.address}#site=net/act")
        tab.wait_for_selector(".inspector .kindbox")
        tab.wait_for_timeout(500)
        tab.screenshot(path=OUT)
        browser.close()
    print(OUT)


if __name__ == "__main__":
    main(*sys.argv[1:])
