"""See and change any value or gradient inside any PyTorch model, without touching its code.

    from tenterhook import capture, edit

    with capture(model, "layer1", "grad(layer1)") as seen:
        model(x).sum().backward()
    seen["layer1"], seen["grad(layer1)"]

    with edit(model, {"layer3": lambda v: v * 0}):
        model(x)

Names are resolved on first use, so that importing the package costs nothing and does nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenterhook.addresses.sites import Site as Site
    from tenterhook.birth.birth import Birth as Birth
    from tenterhook.birth.find import find_first as find_first
    from tenterhook.birth.find import find_nonfinite as find_nonfinite
    from tenterhook.comparing.compare import compare as compare
    from tenterhook.comparing.comparison import Comparison as Comparison
    from tenterhook.comparing.runs import RunComparison as RunComparison
    from tenterhook.comparing.runs import compare_runs as compare_runs
    from tenterhook.errors import AddressError as AddressError
    from tenterhook.errors import AmbiguousError as AmbiguousError
    from tenterhook.errors import CaptureError as CaptureError
    from tenterhook.errors import EditError as EditError
    from tenterhook.errors import NonFiniteError as NonFiniteError
    from tenterhook.errors import NotSeenError as NotSeenError
    from tenterhook.errors import OverwrittenError as OverwrittenError
    from tenterhook.errors import RunError as RunError
    from tenterhook.errors import TenterhookError as TenterhookError
    from tenterhook.errors import TenterhookWarning as TenterhookWarning
    from tenterhook.hooks.report import Report as Report
    from tenterhook.record.rule import Finding as Finding
    from tenterhook.record.rules import all_rules as all_rules
    from tenterhook.record.watch import watch as watch
    from tenterhook.store.run import Run as Run
    from tenterhook.store.run import open_run as open_run
    from tenterhook.verbs.capture import capture as capture
    from tenterhook.verbs.capture_file import load_capture as load_capture
    from tenterhook.verbs.captured import Captured as Captured
    from tenterhook.verbs.edit import edit as edit
    from tenterhook.verbs.edit_file import load_edits as load_edits
    from tenterhook.verbs.observe import observe as observe
    from tenterhook.verbs.patch_grid import patch_grid as patch_grid
    from tenterhook.verbs.sessions import sessions as sessions
    from tenterhook.verbs.sites import sites as sites
    from tenterhook.verbs.sweep import sweep as sweep

__version__ = "0.1.0"

_HOMES = {
    "capture": "verbs.capture",
    "Captured": "verbs.captured",
    "load_capture": "verbs.capture_file",
    "observe": "verbs.observe",
    "edit": "verbs.edit",
    "load_edits": "verbs.edit_file",
    "sweep": "verbs.sweep",
    "patch_grid": "verbs.patch_grid",
    "sites": "verbs.sites",
    "find_nonfinite": "birth.find",
    "find_first": "birth.find",
    "Birth": "birth.birth",
    "sessions": "verbs.sessions",
    "compare": "comparing.compare",
    "Comparison": "comparing.comparison",
    "compare_runs": "comparing.runs",
    "RunComparison": "comparing.runs",
    "watch": "record.watch",
    "Finding": "record.rule",
    "all_rules": "record.rules",
    "open_run": "store.run",
    "Run": "store.run",
    "Site": "addresses.sites",
    "Report": "hooks.report",
    "TenterhookError": "errors",
    "TenterhookWarning": "errors",
    "AddressError": "errors",
    "AmbiguousError": "errors",
    "CaptureError": "errors",
    "EditError": "errors",
    "NonFiniteError": "errors",
    "NotSeenError": "errors",
    "OverwrittenError": "errors",
    "RunError": "errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tenterhook' has no attribute {name!r}")
    value = getattr(import_module(f"tenterhook.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
