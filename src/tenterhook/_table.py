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

        def cell(i: int, text: str) -> str:
            return f"<td style='text-align:{'right' if i in self.right else 'left'}'>{escape(text)}</td>"

        head = "".join(f"<th style='text-align:left'>{escape(title)}</th>" for title in self.header)
        body = "".join("<tr>" + "".join(map(cell, range(len(row)), row)) + "</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
