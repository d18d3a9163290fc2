"""The package as a whole: its names, what importing does, and that the documents tell the truth."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tenterhook
from tests import api_page

ROOT = Path(__file__).parent.parent


def test_every_public_name_resolves_and_is_documented():
    assert tenterhook.__all__ == sorted(tenterhook.__all__)
    for name in tenterhook.__all__:
        assert inspect.getdoc(getattr(tenterhook, name)), name
        assert name in dir(tenterhook)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        tenterhook.nonsense


def test_importing_does_nothing():
    code = """
import sys, torch
from torch.nn.modules import module
before = dict(vars(torch.Tensor)), dict(vars(torch.nn.Module)), set(sys.modules), sys.excepthook
import tenterhook
assert before[3] is sys.excepthook
assert (dict(vars(torch.Tensor)), dict(vars(torch.nn.Module))) == before[:2]
print(sorted(set(sys.modules) - before[2]))
from tenterhook import capture, observe, sites
assert (dict(vars(torch.Tensor)), dict(vars(torch.nn.Module))) == before[:2]
assert not module._has_any_global_hook()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["['tenterhook']", "False"], done.stderr


def test_the_import_alone_needs_no_torch():
    code = "import sys, tenterhook; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_version_and_changelog_agree():
    assert f'version = "{tenterhook.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert tenterhook.__version__ in (ROOT / "CHANGELOG.md").read_text()


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def one_thread():
    """The models of the documents are small: more threads would wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_code_in_the_documents_runs(path, tmp_path, monkeypatch, capsys):
    """Python blocks of one document run in order in one namespace; a following ```text block is their output."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    blocks = re.findall(r"```(python|text)\n(.*?)```", path.read_text(), flags=re.DOTALL)
    printed = None
    for kind, code in blocks:
        if kind == "python":
            capsys.readouterr()
            exec(compile(code, f"{path.name}", "exec"), namespace)
            printed = capsys.readouterr().out
        elif printed is not None:
            assert printed.rstrip() == code.rstrip()
            printed = None


def test_the_page_of_the_api_says_what_the_docstrings_say():
    page = api_page.PAGE.read_text()
    assert page == api_page.page(), "run python -m tests.api_page"
    for name in [*tenterhook.__all__, *tenterhook.changes.__all__]:
        assert f"\n### {name}\n" in page, name


@pytest.mark.parametrize(
    "path", [*DOCUMENTS, *sorted((ROOT / "docs" / "dev").glob("*.md"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_between_documents_lead_somewhere(path):
    for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", path.read_text()):
        there = path.parent / target if target else path
        assert there.exists(), target
        assert not heading or heading in headings(there), f"{target}#{heading}"


def headings(path):
    """Those of a page, as links name them."""
    lines = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}
