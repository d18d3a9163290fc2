"""What was captured, on another machine perhaps, against a model or against other values."""

import pytest
import torch
from safetensors.torch import save_file

from tenterhook import capture, compare, load_capture
from tenterhook.cli import main
from tests.comparing.test_compare import X, stack, with_a_change


def captured(model, *selectors):
    with torch.no_grad(), capture(model, *selectors) as seen:
        model(X)
    return seen


def test_a_model_is_compared_with_what_was_captured():
    a = stack()
    b = with_a_change(a)
    seen = captured(a)
    assert compare(seen, a, X).equal
    found = compare(seen, b, X)
    assert found.first.address == "1.up"
    assert {row.address: row.verdict for row in found}["."] == "grown"
    assert len(found) == len(seen)


def test_outputs_of_blocks_are_enough_to_tell_which_differs():
    a = stack()
    b = with_a_change(with_a_change(a), "2.down")
    found = compare(captured(a, "0", "1", "2"), b, X)
    assert [row.verdict for row in found if row.address in "012"] == ["equal", "first", "differs"]


def test_a_mapping_of_tensors_is_as_good():
    a = stack()
    seen = captured(a, "0", "2")
    found = compare({name: seen[name] for name in seen} | {"grad(0)": X}, with_a_change(a), X)
    assert found.first.address == "2" and "grad(0): only whole" in str(found)


def test_two_sets_of_values():
    a = stack()
    mine, theirs = captured(a), captured(with_a_change(a))
    found = compare(mine, theirs)
    assert found.first.address == "1.up" and found["1.norm"].verdict == "equal" and found["."].verdict == "grown"
    assert compare(mine, mine).equal
    some = compare({"a": X, "b": X}, {"b": X, "c": X})
    assert some.only_a == ["a"] and some.only_b == ["c"] and len(some) == 1


def test_nothing_in_common():
    with pytest.raises(TypeError, match="nothing that was saved has a place in b"):
        compare({"nowhere": X}, stack(), X)


def test_files_on_the_command_line(tmp_path, capsys):
    a = stack()
    for name, model in (("a", a), ("b", with_a_change(a))):
        seen = captured(model)
        save_file({address: seen[address].contiguous() for address in seen}, tmp_path / f"{name}.safetensors")
    a, b = (str(tmp_path / f"{name}.safetensors") for name in "ab")
    assert main(["compare", a, a]) == 0
    assert "equal: 19 values" in capsys.readouterr().out
    assert main(["compare", a, b]) == 1
    assert "1.up" in capsys.readouterr().out
    (tmp_path / "c.txt").write_text("")
    assert main(["compare", a, str(tmp_path / "c.txt")]) == 2
    (tmp_path / "d.safetensors").write_bytes(b"nothing")
    assert main(["compare", a, str(tmp_path / "d.safetensors")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_saved_capture_is_compared_on_another_machine(tmp_path):
    a = stack()
    b = with_a_change(a)
    captured(a).save(tmp_path / "a.safetensors")
    captured(b).save(tmp_path / "b.safetensors")
    assert compare(load_capture(tmp_path / "a.safetensors"), b, X).first.address == "1.up"
    assert main(["compare", str(tmp_path / "a.safetensors"), str(tmp_path / "a.safetensors")]) == 0
    assert main(["compare", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]) == 1
