"""The tables of a run. Columns are only ever added, and `VERSION` says when."""

from typing import Any

from tenterhook.stats.columns import TABLE

VERSION = 1
FILES = ("stats", "steps", "findings", "places", "levels")
SEVERITIES = ("note", "warn", "error")  # of findings
RAISED = "the rule raised"  # begins the reason why a rule that broke was not checked


def schemas() -> dict[str, Any]:
    """The schema of each table; pyarrow is imported here, once a run is written or read."""
    pa = arrow()
    stats = [
        *(("step", pa.int64()), ("model", pa.string()), ("site", pa.string()), ("what", pa.string())),
        *(("calls", pa.int32()), *((column.name, pa.type_for_alias(column.dtype)) for column in TABLE)),
        *(("bins", pa.list_(pa.int16())), ("counts", pa.list_(pa.int32()))),
        *(("dead", pa.float32()), ("saturated", pa.float32())),
    ]
    steps = [
        *(("step", pa.int64()), ("time", pa.float64()), ("seconds", pa.float64()), ("loss", pa.float64())),
        *(("losses", pa.list_(pa.float64())),),
        *(("backwards", pa.int32()), ("skipped", pa.int32()), ("scale", pa.float64())),
        *(("rates", pa.list_(pa.float64())), ("sampled", pa.bool_()), ("spent", pa.float64())),
    ]
    findings = [
        *(("step", pa.int64()), ("rule", pa.string()), ("severity", pa.string()), ("model", pa.string())),
        *(("site", pa.string()), ("what", pa.string()), ("text", pa.string()), ("why", pa.string())),
        *(("then", pa.string()), ("until", pa.int64())),
    ]
    places = [("place", pa.int32()), *((name, pa.string()) for name in ("model", "site", "what", "dtype"))]
    levels = [("step", pa.int64()), ("places", pa.list_(pa.int32())), ("levels", pa.list_(pa.int16()))]
    tables = {"stats": stats, "steps": steps, "findings": findings, "places": places, "levels": levels}
    return {name: pa.schema(columns) for name, columns in tables.items()}


def arrow() -> Any:
    """pyarrow, or an error that says how to get it."""
    try:
        import pyarrow as pa
    except ImportError as error:
        what = "recording and reading runs needs pyarrow, which is not installed"
        raise ImportError(f'{what}; pip install "tenterhook[watch]"') from error
    return pa
