"""The source of forward(), as the run has it, and which modules each of its lines calls.

It is read from the run alone, never from the files that it names: a run may come from anywhere.
"""

import ast
import textwrap
from typing import Any

_MOST_LINES = 2000


def classes(info: dict[str, Any]) -> list[tuple[str, str]]:
    """The classes of each model whose source the run has."""
    sources = _sources(info)
    found: dict[tuple[str, str], None] = {}
    for model in info.get("models") or []:
        for module in model.get("modules") or [] if isinstance(model, dict) else []:
            if isinstance(module, dict) and module.get("source") in sources:
                found[str(model.get("name")), str(module.get("class"))] = None
    return list(found)


def of_class(info: dict[str, Any], model: str, name: str = "") -> dict[str, Any]:
    """The lines of a class's forward, each with the submodules that it calls, and where the class is used."""
    modules = [
        one
        for known in info.get("models") or []
        if isinstance(known, dict) and known.get("name") == model
        for one in known.get("modules") or []
        if isinstance(one, dict) and one.get("class") == name
    ]
    where = next((str(one["source"]) for one in modules if one.get("source")), "")
    source = _sources(info).get(where, {})
    text = str(source.get("text", ""))
    lines = text.split("\n")[:_MOST_LINES]
    first = source.get("line", 1)
    called = calls_of(text)
    return {
        "class": name,
        "file": where.rpartition(":")[0],
        "line": first if isinstance(first, int) else 1,
        "sites": [str(one.get("site")) for one in modules],
        "lines": [[line, called.get(number, [])] for number, line in enumerate(lines, 1)] if text else [],
    }


def calls_of(text: str) -> dict[int, list[str]]:
    """By line: the submodules of `self` that are named there, such as `stem`, `layers.*` and `blocks.0.attn`."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    loops = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and (path := _path(node.iter, {})) is not None:
            loops[_loop_name(node.target)] = f"{path}.*"
    found: dict[int, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (path := _path(node.func, loops)) is not None:
            paths = found.setdefault(node.lineno, [])
            if path not in paths:
                paths.append(path)
    return found


def _loop_name(target: ast.expr) -> str:
    """Of `for block in …` and `for i, block in enumerate(…)`."""
    last = target.elts[-1] if isinstance(target, ast.Tuple) and target.elts else target
    return last.id if isinstance(last, ast.Name) else ""


def _path(node: ast.expr, loops: dict[str, str]) -> str | None:
    """What `self.a.b[0]` means as an address, or a variable that goes through one."""
    if isinstance(node, ast.Call):
        passes_on = isinstance(node.func, ast.Name) and node.func.id in ("enumerate", "reversed", "zip", "list")
        return _path(node.args[-1], loops) if passes_on and node.args else None
    if isinstance(node, ast.Name):
        return loops.get(node.id) if node.id != "self" else None
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return node.attr
        before = _path(node.value, loops)
        return None if before is None else f"{before}.{node.attr}"
    if isinstance(node, ast.Subscript) and (before := _path(node.value, loops)) is not None:
        key = node.slice
        return f"{before}.{key.value!s}" if isinstance(key, ast.Constant) else f"{before}.*"
    return None


def _sources(info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = info.get("sources")
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}
