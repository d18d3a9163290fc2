"""The built page: one file with its script and its styles in it. `make web` builds it; a wheel has it."""

import base64
import hashlib
import re
from pathlib import Path

from tenterhook.errors import TenterhookError

FILE = Path(__file__).parent / "page.html"


class NotBuilt(TenterhookError, FileNotFoundError):
    """A checkout in which the page was not built yet."""


def page() -> str:
    """The page as it is built."""
    try:
        return FILE.read_text(encoding="utf-8")
    except FileNotFoundError:
        what = f"the page is not built: there is no {FILE.name} in {FILE.parent}"
        raise NotBuilt(f"{what}; in a checkout, run `make web` (it needs no Node of yours)") from None


def policy(html: str, connect: str) -> str:
    """The Content-Security-Policy of the page: its own script runs, and nothing else, wherever it is from."""
    scripts = re.findall(r"<script(?: type=\"module\")?>(.*?)</script>", html, re.S)
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    kinds = f"script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; connect-src {connect}"
    return f"default-src 'none'; {kinds}; base-uri 'none'; form-action 'none'"
