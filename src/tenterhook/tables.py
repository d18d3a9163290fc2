"""A small table that reads well in a terminal, in a notebook and in a file."""

from collections.abc import Sequence


class Table:
    """Columns of text under a header; `right` names the columns that line up at the right."""

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
        self.header = list(header)
        self.rows = [list(row) for row in rows]
        self.right = {i for i, title in enumerate(header) if title in right}

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(row[i]) for row in lines) for i in range(len(self.header))]
        rule = ["─" * width for width in widths]
        return "\n".join(self._line(row, widths) for row in (self.header, rule, *self.rows))

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = (
            cell.rjust(width) if i in self.right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    def _repr_html_(self) -> str:
        from html import escape  # for notebooks only

        def cell(tag: str, i: int, text: str) -> str:
            align = "right" if i in self.right else "left"
            font = "font-family:ui-monospace,monospace;" if i == 0 and tag == "td" else ""
            rule = "border-bottom:1px solid currentColor;font-weight:600;" if tag == "th" else ""
            style = f"text-align:{align};padding:3px 20px 3px 0;border:0;{rule}{font}"
            return f"<{tag} style='{style}'>{escape(text)}</{tag}>"

        def line(tag: str, row: Sequence[str]) -> str:
            return "<tr>" + "".join(cell(tag, i, text) for i, text in enumerate(row)) + "</tr>"

        body = "".join(line("td", row) for row in self.rows)
        style = "border-collapse:collapse;font-variant-numeric:tabular-nums"
        return f"<table style='{style}'><thead>{line('th', self.header)}</thead><tbody>{body}</tbody></table>"
