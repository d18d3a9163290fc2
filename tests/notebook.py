"""Runs a notebook without Jupyter: its code cells in order, in one namespace, and what each would show.

    python -m tests.notebook    writes what it shows into examples/results.ipynb, docs/notebook.md and out/notebook.html

nbclient would bring a kernel, a message queue and twenty more packages for what is forty lines here.
"""

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "results.ipynb"


def code_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def run(notebook: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Each cell, what it printed, and the value of its last expression."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        printed, value = io.StringIO(), None
        if cell["cell_type"] == "code":
            tree = ast.parse(code_of(cell))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            with contextlib.redirect_stdout(printed):
                exec(compile(tree, "cell", "exec"), namespace)
                if last is not None:
                    value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
        yield cell, printed.getvalue(), value


def shown(value: Any) -> dict[str, Any]:
    """What a notebook shows of a value, by mime type."""
    found: dict[str, Any] = {"text/plain": repr(value)}
    if hasattr(value, "_repr_html_") and (page := value._repr_html_()):
        found["text/html"] = page
    if hasattr(value, "_repr_png_"):
        found["image/png"] = base64.b64encode(value._repr_png_()).decode()
    return found


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    text, pages, pictures = [], [], 0
    os.chdir(tempfile.mkdtemp())
    for number, (cell, printed, value) in enumerate(run(notebook)):
        source = code_of(cell)
        cell["id"] = f"cell-{number}"
        if cell["cell_type"] == "markdown":
            text.append(source)
            continue
        text.append(f"```python\n{source}\n```")
        data = shown(value) if value is not None else {}
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": printed}] if printed else []
        if data:
            cell["outputs"].append({"output_type": "display_data", "data": data, "metadata": {}})
        if "image/png" in data:
            pictures += 1
            name = f"img/notebook-{pictures}.png"
            (ROOT / "docs" / name).write_bytes(base64.b64decode(data["image/png"]))
            text.append(f"![What `{source.splitlines()[-1]}` draws]({name})")
        elif data or printed:
            output = (printed + data.get("text/plain", "")).rstrip()
            text.append(f"```\n{output}\n```")
        if "text/html" in data:
            pages.append(data["text/html"])
    text.insert(1, "![What a notebook shows, on a light and on a dark page](img/notebook-pages.png)")
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    (ROOT / "docs" / "notebook.md").write_text("\n\n".join(text) + "\n")
    (ROOT / "out").mkdir(exist_ok=True)
    themes = (("#fff", "#111"), ("#111", "#ddd"))
    body = "".join(
        f"<div style='background:{ground};color:{ink};padding:16px;font-family:system-ui;width:660px'>"
        f"{'<br>'.join(pages)}</div>"
        for ground, ink in themes
    )
    page = f"<!doctype html><meta charset=utf8><body style='margin:0;display:flex'>{body}"
    (ROOT / "out" / "notebook.html").write_text(page)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
