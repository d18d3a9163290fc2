"""A small table that reads well in a terminal, in a notebook and in a file."""

from collections.abc import Sequence

from tenterhook import markup


class Table:
    """Columns of text under a header; `right` names the columns that line up at the right."""

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
        self.header = list(header)
        self.rows = [list(row) for row in rows]
        self.right = {i for i, title in enumerate(header) if title in right}

    def __str__(self) -> str:
        return self.text()

    def text(self, most: int | None = None) -> str:
        """The table as text, in full or with so many rows at most."""
        rows = self.rows if most is None else self.rows[:most]
        lines = [self.header, *rows]
        widths = [max(len(row[i]) for row in lines) for i in range(len(self.header))]
        rule = ["─" * width for width in widths]
        more = [f"… {len(self.rows) - len(rows):,} more"] if len(rows) < len(self.rows) else []
        return "\n".join([*(self._line(row, widths) for row in (self.header, rule, *rows)), *more])

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = (
            cell.rjust(width) if i in self.right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    def html(self) -> str:
        """The table as a part of a page; a long one is folded."""
        return markup.table(self.header, self.rows, self.right)

    def _repr_html_(self) -> str:
        return markup.page(self.html())
