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
    from tenterhook._capture import capture as capture
    from tenterhook._captured import Captured as Captured
    from tenterhook._edit import edit as edit
    from tenterhook._edit_file import load_edits as load_edits
    from tenterhook._errors import AddressError as AddressError
    from tenterhook._errors import AmbiguousError as AmbiguousError
    from tenterhook._errors import EditError as EditError
    from tenterhook._errors import NotSeenError as NotSeenError
    from tenterhook._errors import OverwrittenError as OverwrittenError
    from tenterhook._errors import RunError as RunError
    from tenterhook._errors import TenterhookError as TenterhookError
    from tenterhook._errors import TenterhookWarning as TenterhookWarning
    from tenterhook._listing import sites as sites
    from tenterhook._observe import observe as observe
    from tenterhook._session import Report as Report
    from tenterhook._sites import Site as Site
    from tenterhook._sweep import sweep as sweep
    from tenterhook.record._rule import Finding as Finding
    from tenterhook.record._watch import watch as watch
    from tenterhook.record.rules import all_rules as all_rules
    from tenterhook.store._run import Run as Run
    from tenterhook.store._run import open_run as open_run

__version__ = "0.1.0"

_HOMES = {
    "capture": "_capture",
    "Captured": "_captured",
    "observe": "_observe",
    "edit": "_edit",
    "load_edits": "_edit_file",
    "sweep": "_sweep",
    "sites": "_listing",
    "watch": "record._watch",
    "Finding": "record._rule",
    "all_rules": "record.rules",
    "open_run": "store._run",
    "Run": "store._run",
    "Site": "_sites",
    "Report": "_session",
    "TenterhookError": "_errors",
    "TenterhookWarning": "_errors",
    "AddressError": "_errors",
    "AmbiguousError": "_errors",
    "EditError": "_errors",
    "NotSeenError": "_errors",
    "OverwrittenError": "_errors",
    "RunError": "_errors",
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
