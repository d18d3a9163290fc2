"""Edits in files: what goes in comes out, functions stay out, and a file never runs code."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tenterhook import EditError, edit, load_edits
from tenterhook.changes import (
    add,
    any_shape,
    at,
    clamp,
    clip_norm,
    mean,
    noise,
    project_out,
    resample,
    reverse,
    scale,
    zero,
)
from tenterhook.changes.change import KINDS

X = torch.randn(3, 4)


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


EVERY = {
    "0": [
        scale(0.5),
        add(torch.arange(4.0), times=2),
        at((..., slice(1, None, 2)), zero()),
        at([0, 2], clamp(min=-1)),
        at(torch.tensor([True, False, True]), at((slice(None), -1), 3)),
        noise(0.1, seed=4),
        mean((0,)),
        project_out(torch.tensor([1.0, 2.0, 0.0, 0.0])),
        clip_norm(2.0, dim=-1),
        any_shape(reverse(2)),
        resample(torch.randn(5, 4), seed=1),
    ],
    "grad(**<Linear>)": clip_norm(1.0),
    "2:in[0]@1": torch.ones(4),
    "2.weight": KINDS["ones"](),
    "1": 0.25,
}


def test_every_kind_of_change_comes_back_as_it_was(model, tmp_path):
    file = tmp_path / "x.safetensors"
    edits = edit(model, EVERY)
    edits.save(file)
    loaded = load_edits(file)
    assert list(loaded) == list(EVERY)
    again = edit(model, loaded)
    assert [repr(tap.action.change) for tap in again._session.taps] == [
        repr(tap.action.change) for tap in edits._session.taps
    ]
    outputs = []
    for changes in (EVERY, loaded):
        model.zero_grad()
        with edit(model, changes):
            model(X).sum().backward()
            outputs.append((model(X).detach(), model[0].weight.grad))
    torch.testing.assert_close(outputs[0], outputs[1])
    again.save(tmp_path / "y.safetensors")
    assert (tmp_path / "y.safetensors").read_bytes() == file.read_bytes()


def test_selectors_that_are_no_text_become_addresses(model, tmp_path):
    file = str(tmp_path / "x.safetensors")
    edit(model, {model[0]: scale(2.0), nn.Tanh: zero(), (lambda name, m: name == "2"): 1.0}).save(file)
    assert {address: repr(change) for address, change in load_edits(file).items()} == {
        "0": "scale(2.0)",
        "1": "zero()",
        "2": "replace(1.0)",
    }


@pytest.mark.parametrize("change", [lambda v: v, at(0, lambda v: v), [zero(), torch.relu], any_shape(nn.ReLU())])
def test_functions_are_refused_and_nothing_is_written(model, tmp_path, change):
    file = tmp_path / "x.safetensors"
    with pytest.raises(EditError, match=r"1 cannot be saved: its change is a function \(.*no code; use one of"):
        edit(model, {"0": zero(), "1": change}).save(file)
    assert not file.exists()


def test_strange_arguments_are_refused(model, tmp_path):
    with pytest.raises(EditError, match="0 cannot be saved: a object has no place in a file"):
        edit(model, {"0": at(object(), zero())}).save(tmp_path / "x")


def test_files_of_other_people(tmp_path):
    file = tmp_path / "weights.safetensors"
    save_file({"w": torch.ones(2)}, file)
    with pytest.raises(EditError, match=r"weights.safetensors holds no edits; write them with `edits.save"):
        load_edits(file)
    cases = {
        '{"version": 99, "edits": []}': "is of version 99",
        '{"version": 1, "edits": [["a", {"change": "eval", "arguments": {}}]]}': "there is no change called 'eval'",
        '{"version": 1, "edits": [["a", {"change": "__import__", "arguments": {"name": "os"}}]]}': "no change called",
        '{"version": 1, "edits": [["a", {"change": "scale", "arguments": {"by": {"tensor": "gone"}}}]]}': "gone",
        '{"version": 1, "edits": [["a", {"change": "scale", "arguments": {"sideways": 1}}]]}': "sideways|missing",
        '{"version": 1, "edits": [["a", {"lambda": ["x"]}]]}': "cannot be read as edits",
        '{"version": 1, "edits": [["a", 3]]}': "cannot be read as edits",
        '{"version": 1, "edits": [["a", {}]]}': "cannot be read as edits",
        "[]": "cannot be read as edits",
        "not json": "cannot be read as edits",
    }
    for header, words in cases.items():
        save_file({"w": torch.ones(2)}, file, metadata={"tenterhook.edits": header})
        with pytest.raises(EditError, match=words):
            load_edits(file)


def test_the_file_is_plain_safetensors_with_json(model, tmp_path):
    file = tmp_path / "x.safetensors"
    edit(model, {"0": add(torch.ones(4))}).save(file)
    assert torch.equal(load_file(file)["t0"], torch.ones(4))
    size = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + size])
    assert json.loads(header["__metadata__"]["tenterhook.edits"])["version"] == 1


def test_without_safetensors_the_error_names_the_line_to_install_it():
    code = """
import sys
sys.modules["safetensors"] = None
import torch
from tenterhook import edit, load_edits
edit(torch.nn.Linear(1, 1), {".": 0.0}).save("x")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'pip install "tenterhook[safetensors]"' in done.stderr


def test_two_selectors_for_one_address_are_both_kept(model, tmp_path):
    file = tmp_path / "x.safetensors"
    edit(model, {model[0]: scale(2.0), (lambda name, m: name == "0"): add(1.0)}).save(file)
    assert repr(load_edits(file)) == "{'0': in_turn((scale(2.0), add(1.0)))}"


def test_kinds_of_tuples_as_an_index(model, tmp_path):
    file = tmp_path / "x.safetensors"
    edit(model, {"0": at(torch.Size([0, 1]), zero())}).save(file)
    assert load_edits(file)["0"].arguments["index"] == (0, 1)


def test_what_cannot_be_stored_says_where(model, tmp_path):
    with pytest.raises(EditError, match="saved"):
        edit(model, {"0": add(torch.ones(2, 2).to_sparse())}).save(tmp_path / "x")
    with pytest.raises(EditError, match="there is no folder"):
        edit(model, {"0": zero()}).save(tmp_path / "no" / "such" / "x.safetensors")


def test_a_file_that_is_nested_without_end(tmp_path):
    file = tmp_path / "x.safetensors"
    deep = '{"list": [' * 5000 + "1" + "]}" * 5000
    start, end = '{"version": 1, "edits": [["a", {"change": "at", "arguments": {"index": ', ', "change": 1}}]]}'
    header = start + deep + end
    save_file({"w": torch.ones(2)}, file, metadata={"tenterhook.edits": header})
    with pytest.raises(EditError, match="cannot be read as edits"):
        load_edits(file)
    text = '{"version": 1, "edits": [["a", {"change": "scale", "arguments": {"by": "os"}}]]}'
    save_file({"w": torch.ones(2)}, file, metadata={"tenterhook.edits": text})
    with pytest.raises(EditError, match="'os' has no place in it"):
        load_edits(file)


def test_files_that_are_none(tmp_path):
    (tmp_path / "m.pt").write_bytes(b"PK" + bytes(100))
    with pytest.raises(EditError, match=r"m.pt is no safetensors file, so it holds no edits"):
        load_edits(tmp_path / "m.pt")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_edits(tmp_path / "gone")


def test_an_order_that_a_file_cannot_keep_is_refused(model, tmp_path):
    file = tmp_path / "x.safetensors"
    for between in ("**<Linear>", "0@0", "0[0]"):
        with pytest.raises(EditError, match=r"^0 cannot be saved: it is changed before and after .*one list"):
            edit(model, {model[0]: add(1.0), between: scale(2.0), "0": add(5.0)}).save(file)
    edit(model, {model[0]: add(1.0), "2": zero(), "grad(**)": scale(2.0), "**:in": 1.0, "0": add(5.0)}).save(file)
    assert repr(load_edits(file)["0"]) == "in_turn((add(1.0), add(5.0)))"
    edit(model, {nn.Linear: add(1.0), (lambda name, m: name in ("0", "2")): scale(2.0)}).save(file)
    assert {repr(change) for change in load_edits(file).values()} == {"in_turn((add(1.0), scale(2.0)))"}


@pytest.mark.parametrize("shape", [(0, 4), (4,), (2, 4), (3, 700), (9, 4)])
def test_directions_come_back_bit_for_bit(model, tmp_path, shape):
    for direction in (torch.randn(shape), torch.zeros(shape)):
        change = project_out(direction)
        edit(model, {"0": change}).save(tmp_path / "x")
        assert torch.equal(load_edits(tmp_path / "x")["0"].arguments["direction"], change.arguments["direction"])


def test_two_names_of_one_module_in_another_order(tmp_path):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x)

    model, file = Shared(), tmp_path / "edits.safetensors"
    with pytest.raises(EditError, match=r"^a cannot be saved: it is changed before and after b"):
        edit(model, {"a": scale(2.0), "b": add(1.0), model.a: scale(3.0)}).save(file)
    edit(model, {"a": scale(2.0), "b:in": add(1.0), model.a: scale(3.0)}).save(file)
    edits = edit(model, {"a": scale(2.0), "b": add(1.0)})
    edits.save(file)
    with edits:
        truth = model(X)
    with edit(model, load_edits(file)):
        assert torch.equal(model(X), truth)
