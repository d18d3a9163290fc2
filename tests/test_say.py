"""How things are said."""

from pathlib import Path

from tenterhook.say import file_here


def test_a_file_is_named_from_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = Path.cwd()
    assert file_here(str(here / "models" / "net.py")) == str(Path("models") / "net.py")
    for elsewhere in (str(here.parent / "net.py"), "net.py", "<stdin>", "<ipython-input-1>"):
        assert file_here(elsewhere) == elsewhere
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert file_here(str(here / "net.py")) == str(here / "net.py")
