"""How long a large run takes to be looked at: python benchmarks/view.py [--sites 1000] [--samples 10000] [--kinds 1]

The run is made up: no training has so many samples in a minute. "Cold" is the first answer of a new server.
"""

import argparse
import gzip
import http.client
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests.view.made

from tests.view.made import KINDS, Made

from tenterhook.store import open_run
from tenterhook.view.page import page
from tenterhook.view.report import report_of
from tenterhook.view.serve import Server

BATCH = 16  # samples; as the recorder writes them, by its 16,384 rows


def made(folder: Path, sites: int, samples: int, kinds: int) -> Path:
    blocks = [f"layers.{i // 8}.{'qkvofgnd'[i % 8]}" for i in range(sites)]
    run = Made(folder, blocks, kinds=KINDS[:kinds])
    for begin in range(0, samples, BATCH):
        run.add(min(BATCH, samples - begin), broken=[(3, kinds * (sites // 2))] if begin == BATCH * 100 else ())
    return run.end()


def ask(server: Server, name: str, **window: int | str) -> tuple[float, int]:
    """Seconds and bytes of an answer."""
    words = "&".join(f"{k}={v}" for k, v in {**window, "token": server.token}.items())
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", f"/api/answer/{name}?{words}")
    data = connection.getresponse().read()
    return time.perf_counter() - begin, len(data)


def chromium(server: Server) -> list[tuple[str, float]]:
    """Seconds in a browser, or nothing where there is none."""
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium")
    if found is None:
        return []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 800}, bypass_csp=True)
        tab.goto("about:blank")
        begin = time.perf_counter()
        tab.goto(f"{server.address}#fit=1&find=layers")  # which opens all blocks
        tab.wait_for_function(PAINTED)
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        tab.keyboard.press("+")
        tab.wait_for_function("document.querySelector('.window')")
        tab.wait_for_function(PAINTED)
        zoomed = time.perf_counter() - begin
        browser.close()
    return [("page: opened until the matrix is painted", first), ("page: zoomed in", zoomed)]


PAINTED = """() => {
  const canvas = document.querySelector('.matrix canvas');
  if (!canvas || !canvas.width) return false;
  const { data } = canvas.getContext('2d').getImageData(canvas.width >> 1, 0, 1, canvas.height);
  return data.some((v, i) => i % 4 === 3 && v > 0);
}"""


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--sites", type=int, default=1000)
    options.add_argument("--samples", type=int, default=10000)
    options.add_argument("--kinds", type=int, default=1, help="of value at each site, 1 to 5")
    given = options.parse_args()
    root = Path(tempfile.mkdtemp())
    try:
        begin = time.perf_counter()
        folder = made(root / "large", given.sites, given.samples, given.kinds)
        size = sum(file.stat().st_size for file in folder.glob("rank-0/*"))
        took = time.perf_counter() - begin
        what = f"{given.sites:,} sites × {given.samples:,} samples × {given.kinds}"
        print(f"{what}, {size / 1e9:.2f} GB, made in {took:.0f} s")
        for name, window in (("matrix/output", {"columns": 1200}), ("run", {}), ("steps", {"columns": 1200})):
            with Server(open_run(folder)).beside() as server:
                time.sleep(0.3)
                ask(server, "nothing")  # what is imported is imported
                cpu = time.process_time()  # the server is in this process; other processes may be on the cores, too
                seconds, many = ask(server, name, **window)
                cpu = time.process_time() - cpu
                again, _ = ask(server, name, **window)
                cold = f"{seconds * 1e3:,.0f} ms cold ({cpu * 1e3:,.0f} of CPU)"
                print(f"{name}: {cold}, {again * 1e3:,.0f} ms again, {many / 1e3:,.0f} kB")
        begin = time.perf_counter()
        command = [sys.executable, "-m", "tenterhook", "report", str(folder), "-o", str(root / "report.html")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        took, size = time.perf_counter() - begin, (root / "report.html").stat().st_size
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6  # of the only child so far
        print(f"report of it: {took:,.1f} s, {size / 1e6:.1f} MB, at most {memory:.2f} GB of memory")
        with Server(open_run(folder)).beside() as server:
            time.sleep(0.3)
            seconds, _ = ask(server, "site/net/layers.7.q", columns=80)
            print(f"site: {seconds * 1e3:,.0f} ms")
            begin = time.perf_counter()
            ask(server, "differences", **{"with": folder.name})
            print(f"differences from itself: {time.perf_counter() - begin:,.1f} s")
        with Server(open_run(folder)).beside() as server:
            time.sleep(0.3)
            for name, seconds in chromium(server):
                print(f"{name}: {seconds * 1e3:,.0f} ms")
        print(f"page: {len(gzip.compress(page().encode())) / 1e3:.0f} kB gzip")
        small = Made(root / "small", [f"blocks.{i // 5}.{'abcde'[i % 5]}" for i in range(100)])
        for _ in range(20):
            small.add(50)
        print(f"report of 100 sites × 1,000 samples: {len(report_of(open_run(small.end()))) / 1e6:.2f} MB")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
