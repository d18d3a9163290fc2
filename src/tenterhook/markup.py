"""What we show in a notebook, as HTML: the one place that writes it. All text is escaped here.

page(title, table(...), notes(...))     what a `_repr_html_` returns

Styles are inline, as notebooks and web sites strip others; the text has the colour of the page, light or dark. What a
colour says, a mark says as well.
"""

from collections.abc import Container, Iterable, Sequence
from html import escape

SHOWN = 24  # rows of a table, before the others are folded
COLOURS = {"error": "#d55e00", "warn": "#e69f00", "note": "#56b4e9", "clean": "#009e73"}  # Okabe and Ito's
_MONO = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:0.95em;"
_WIDEST = 60  # characters of a column that are kept on one line


def page(*parts: str) -> str:
    """Some parts one below the other."""
    return f"<div style='font-size:13px;line-height:1.45;overflow-x:auto'>{''.join(parts)}</div>"


def title(text: str) -> str:
    """What it is, in a line."""
    return f"<div style='margin:2px 0 4px;font-weight:600'>{escape(text)}</div>"


def notes(texts: Iterable[str]) -> str:
    """Lines below a table."""
    return "".join(f"<div style='margin:4px 0;opacity:.75'>{escape(text)}</div>" for text in texts)


def lines(texts: Iterable[str], severity: str = "") -> str:
    """Lines of a finding or the like, with a bar at their left whose colour says how severe it is."""
    bar = f"border-left:4px solid {COLOURS.get(severity, 'currentColor')};padding-left:10px;"
    first, *rest = [escape(text) for text in texts]
    inside = f"<div style='font-weight:600'>{first}</div>" + "".join(f"<div>{text}</div>" for text in rest)
    return f"<div style='margin:8px 0;{bar}'>{inside}</div>"


def folded(summary: str, inside: str) -> str:
    """Something that is seen when its summary is clicked at."""
    style = "cursor:pointer;margin:4px 0;opacity:.75"
    return f"<details><summary style='{style}'>{escape(summary)}</summary>{inside}</details>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """A table under a header; `right`: the columns that line up at the right. What is over SHOWN rows is folded."""
    if len(rows) <= SHOWN + 4:  # nobody is helped by three rows less
        return _table(header, rows, [_column(i, i in right) for i in range(len(header))])
    widths = [min(_WIDEST, max(len(row[i]) for row in (header, *rows))) for i in range(len(header))]
    columns = [f"{_column(i, i in right)}min-width:{width}ch;" for i, width in enumerate(widths)]
    rest = _table((), rows[SHOWN:], columns)
    return _table(header, rows[:SHOWN], columns) + folded(f"{len(rows) - SHOWN:,} more rows", rest)


def _column(i: int, is_right: bool) -> str:
    """The style of its cells; with a width, the columns of two tables line up."""
    font = _MONO if i == 0 else ""
    align = "right" if is_right else "left"
    return f"text-align:{align};vertical-align:top;padding:2px 16px 2px 0;border:0;{font}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[str]) -> str:
    rule = "border-bottom:1px solid currentColor;font-weight:600"
    head = "".join(
        f"<th style='{style}{rule}'>{escape(text)}</th>" for style, text in zip(columns, header, strict=False)
    )
    body = "".join(
        "<tr style='background:none'>"
        + "".join(f"<td style='{style}'>{escape(text)}</td>" for style, text in zip(columns, row, strict=True))
        + "</tr>"
        for row in rows
    )
    style = "border-collapse:collapse;font-variant-numeric:tabular-nums;margin:0;color:inherit;font-size:inherit"
    return f"<table style='{style}'>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"
