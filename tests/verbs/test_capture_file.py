"""Captures in files: what goes in comes out, other tools can read it, and a file never runs code."""

import contextlib
import dataclasses
import json
import sys
from collections import OrderedDict, UserDict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from tenterhook import CaptureError, NotSeenError, capture, edit, load_capture
from tenterhook.values.tree import leaves
from tests.verbs.models import Host, mlp

x = torch.randn(3, 4)


class Returns(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value


def notes_of(seen):
    """Without the one that is there where another test has compiled something."""
    return [note for note in seen.report().notes if "compiled code" not in note]


def saved(value, file, **options):
    """A value that a model returned, captured, saved and loaded."""
    model = Returns(value)
    with capture(model, ".", **options) as seen:
        model(x)
    seen.save(file)
    loaded = load_capture(file)
    assert repr(loaded) == repr(seen) or notes_of(loaded)
    return loaded


@pytest.fixture
def file(tmp_path):
    return tmp_path / "seen.safetensors"


def test_a_loaded_capture_is_as_it_was(file):
    model = nn.Sequential(layer := nn.Linear(4, 4), nn.ReLU(), layer, nn.Linear(4, 2), nn.Identity())
    with capture(model, "0", "1:in", "3", "grad(0)", "grad(3.weight)", "**<Identity>:in") as seen:
        out = model[:4](x).sum()
        out.backward(retain_graph=True)
        out.backward()
    seen.save(file)
    loaded = load_capture(str(file))
    assert list(loaded) == list(seen) and len(loaded) == len(seen)
    assert all(torch.equal(loaded[name], value) for name, value in seen.items())
    assert {row for row in loaded.report()} == {row for row in seen.report()}
    assert notes_of(loaded) == notes_of(seen)
    assert torch.equal(loaded.cat("0"), seen.cat("0")) and torch.equal(loaded["grad(0@1)#1"], seen["grad(0@1)#1"])
    assert loaded.stats().rows == sorted(seen.stats().rows, key=lambda row: list(loaded).index(row["address"]))
    assert list(loaded["*"]) == ["0@0", "0@1", "3"] and list(loaded["grad(*)"]) == list(seen["grad(*)"])
    with pytest.raises(NotSeenError, match=r"4:in never came: .*Sequential did not call it"):
        loaded["4:in"]
    with pytest.raises(NotSeenError, match="'7' was not captured; captured: "):
        loaded["7"]
    with pytest.raises(NotSeenError, match="was not captured"):
        loaded[nn.Linear]
    with edit(model, loaded.patch("3")):
        assert torch.equal(model(-x), seen["3"])
    again = file.with_name("again.safetensors")
    loaded.save(again)
    assert list(load_capture(again)) == list(seen)


def test_other_tools_find_the_tensors_under_their_addresses(file):
    model = Host()
    with capture(model, "inner", "inner:in") as seen:
        model(x, "dict")
    with capture(model, ".") as twice:
        model(x, "tensor")
        model(x + 1, "tensor")
    seen.save(file)
    assert set(load_file(file)) == {"inner:out[a]", "inner:out[b]", "inner:in[0]"}
    twice.save(file)
    assert torch.equal(load_file(file)[".@1"], x + 1)


def test_variables_of_functions_and_of_forwards(file):
    def function(x):
        y = x + 1
        y = y * 2
        z = y
        return z.sum()

    ready = x.clone().requires_grad_()
    with capture(function, "*", "grad(y)") as seen:
        function(ready).backward()
    seen.save(file)
    loaded = load_capture(file)
    assert list(loaded) == list(seen)
    assert torch.equal(loaded["y#1"], (x + 1) * 2) and len(loaded.calls("y")) == 2
    assert list(loaded["*"]) == list(seen["*"]) and torch.equal(loaded["grad(y#0)"], torch.full_like(x, 2))
    with capture(function, "grad(*)") as seen:
        function(ready).backward()
    seen.save(file)
    assert {"grad(y#1)", "grad(z)"} <= set(seen) and len(load_file(file)) == len(seen) - 1  # two names of one tensor
    assert all(torch.equal(load_capture(file)[name], value) for name, value in seen.items())

    class Own(nn.Module):
        def forward(self, x):
            y = x + 1
            return y * 3

    model = nn.Sequential(Own(), Own())
    with capture(model, "*", "*/y", "0/mul") as seen:
        model(x)
    seen.save(file)
    loaded = load_capture(file)
    assert (
        torch.equal(loaded["0"], seen["0"])
        and list(loaded["*/y"]) == ["0/y", "1/y"]
        and list(loaded["*"]) == ["0", "1"]
    )
    assert torch.equal(loaded["0/mul"], seen["0/mul"])


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    extra: dict


@dataclasses.dataclass
class Hidden:
    _cache: torch.Tensor


class Own(UserDict):
    pass


PLAIN = [
    (x, x.bfloat16(), x.half(), x.double(), x.long(), x > 0, x.to(torch.uint8), x.to(torch.float8_e4m3fn)),
    [torch.empty(0), torch.empty(3, 0, 2), torch.tensor(2.5), torch.tensor(True)],
    {"a": x, 1: x + 1, None: None},
    (x, None, 3, 2.5, True, "text", b"\x00\xff", 1 + 2j, float("inf"), torch.float16, torch.device("cpu"), x.shape),
    OrderedDict(b=x, a=[(), {}]),
    [x.t(), x[:, 1], x[::2], x.expand(2, 3, 4), x.unsqueeze(0).expand(5, 3, 4)],
    [x.to(torch.complex64), x.to(torch.complex128).conj(), torch.view_as_complex(x.view(3, 2, 2)).imag],
]


@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
@pytest.mark.parametrize("copy", [True, False])
def test_plain_structures_come_back_as_they_were(value, copy, file):
    loaded = saved(value, file, copy=copy)
    (again,) = loaded.values()
    assert type(again) is type(value)
    constants = [[part for part in one if not isinstance(part, torch.Tensor)] for one in (again, value)]
    assert constants[0] == constants[1]
    for (path, mine), (other, theirs) in zip(leaves(again), leaves(value), strict=True):
        assert path == other and mine.dtype == theirs.dtype
        assert torch.equal(mine.to(torch.complex128), theirs.to(torch.complex128))
    assert not notes_of(loaded)


def test_nan_comes_back(file):
    (number,) = saved(x, file, reduce=lambda _: float("nan")).values()
    assert number != number
    (tensor,) = saved(torch.tensor([torch.nan, torch.inf]), file).values()
    assert tensor.isnan().tolist() == [True, False]


@pytest.mark.parametrize("number", [3, -2.5, True, 1 + 2j])
def test_numbers_of_reduce(number, file):
    (again,) = saved(x, file, reduce=lambda _: number).values()
    assert again == number and type(again) is type(number)


def test_memory_that_is_shared_is_written_where_it_is_needed(file):
    whole = torch.arange(6.0)
    (again,) = saved([whole[:4], whole[2:], whole.view(2, 3)], file, copy=False).values()
    assert [part.tolist() for part in again] == [[0, 1, 2, 3], [2, 3, 4, 5], [[0, 1, 2], [3, 4, 5]]]


def test_classes_come_back_as_their_parts_with_a_note(file):
    loaded = saved(Pair(x, Out(x + 1, {"b": x + 2})), file)
    (value,) = loaded.values()
    assert type(value).__name__ == "Pair" and value._fields == ("left", "right")
    assert torch.equal(value.right.logits, x + 1) and torch.equal(value.right.extra["b"], x + 2)
    assert torch.equal(loaded[".[right][logits]"], x + 1) and torch.equal(loaded[".[1][extra][b]"], x + 2)
    assert [note.split(" ")[3:] for note in notes_of(loaded)] == [
        ["tests.verbs.test_capture_file.Out", "is", "a", "namedtuple", "here:", "a", "file", "holds", "no", "classes"],
        ["tests.verbs.test_capture_file.Pair", "is", "a", "namedtuple", "here:", "a", "file", "holds", "no", "classes"],
    ]
    (value,) = saved(Hidden(x), file).values()
    assert type(value) is dict and torch.equal(value["_cache"], x)
    (value,) = saved(Own(a=x), file).values()
    assert type(value) is dict and torch.equal(value["a"], x)
    (value,) = saved(x.max(dim=1), file).values()
    assert type(value) is tuple and torch.equal(value[1], x.argmax(1))


def test_a_model_output_of_transformers_comes_back_as_a_dict(file):
    outputs = pytest.importorskip("transformers.modeling_outputs")
    loaded = saved(outputs.BaseModelOutput(last_hidden_state=x, hidden_states=(x, x + 1)), file)
    (value,) = loaded.values()
    assert list(value) == ["last_hidden_state", "hidden_states"] and torch.equal(loaded[".[hidden_states][1]"], x + 1)


def test_inputs_are_found_by_position_and_name(file):
    model = Host()
    with capture(model, "inner:in") as seen:
        model(x, scale=2.0)
    seen.save(file)
    loaded = load_capture(file)
    assert torch.equal(loaded["inner:in[0]"], x) and loaded["inner:in"]["scale"] == 2.0
    assert torch.equal(loaded["inner:in[x]"], x)


def test_what_is_no_tensor_is_still_said_to_be_left_out(file):
    loaded = saved([x, object()], file)
    with pytest.raises(NotSeenError, match=r"\.:out\[1\].* is a object: no tensor, so it was not kept"):
        loaded[".[1]"]


@pytest.mark.parametrize(
    ("value", "options", "said"),
    [
        (x.to_sparse(), {}, "of layout sparse_coo is not in one piece of memory; make it dense"),
        (x, {"reduce": lambda _: object()}, r"\. cannot be saved: it holds a object, and a file has tensors"),
        (x.to("meta"), {}, "is not in one piece of memory"),
        ({frozenset(): x}, {}, "a dict in it has a frozenset for a key"),
    ],
)
def test_what_cannot_be_saved_says_where_it_is(value, options, said, file):
    with pytest.raises(CaptureError, match=said):
        saved(value, file, **options)
    assert not file.exists()


def test_where_it_cannot_be_written(tmp_path):
    model = mlp()
    with capture(model, "0") as seen:
        model(x)
    with pytest.raises(CaptureError, match="there is no folder"):
        seen.save(tmp_path / "none" / "x.safetensors")
    with pytest.raises(CaptureError, match="captured values cannot be saved"):
        seen.save(tmp_path)


GOOD = {
    "version": 1,
    "function": False,
    "notes": [],
    "sites": [
        {"address": "0", "kind": "module", "calls": 1, "fired": 1, "why": "", "entries": [[0, {"tensor": "t"}]]},
    ],
}


def written(file, content):
    text = content if isinstance(content, str) else json.dumps(content)
    save_file({"t": x.clone(), "int": torch.arange(3)}, file, metadata={"tenterhook.capture": text})
    return file


def with_value(value):
    return {**GOOD, "sites": [{**GOOD["sites"][0], "entries": [[0, value]]}]}


def with_site(**fields):
    return {**GOOD, "sites": [{**GOOD["sites"][0], **fields}]}


def test_the_good_file_is_good(file):
    assert torch.equal(load_capture(written(file, GOOD))["0"], x)


HOSTILE = [
    "no json",
    "[" * 100_000,
    [],
    {},
    {**GOOD, "version": 2},
    {**GOOD, "notes": 3},
    {**GOOD, "notes": [3]},
    {**GOOD, "sites": {"a": 1}},
    with_site(address="a[b"),
    with_site(address=3),
    with_site(kind="os.system"),
    with_site(calls=-1),
    with_site(calls=True),
    with_site(fired=1e300),
    with_site(entries=[[0]]),
    with_site(entries=[["0", {"tensor": "t"}]]),
    with_value({"tensor": "missing"}),
    with_value({"tensor": ["t"]}),
    with_value({"complex": "t"}),
    with_value({"complex": "int"}),
    with_value({"named": ["class", [["a", 1]]]}),
    with_value({"named": ["X", [["__reduce__", 1]]]}),
    with_value({"named": ["X", [["a", 1], ["a", 2]]]}),
    with_value({"named": ["X = __import__('os')", [["a", 1]]]}),
    with_value({"dtype": "torch.load"}),
    with_value({"dtype": "torch.__builtins__"}),
    with_value({"device": "nonsense"}),
    with_value({"dict": [[{"list": []}, 1]]}),
    with_value({"tuple": "abc"}),
    with_value({"size": [-1]}),
    with_value({"bytes": "zz"}),
    with_value({"float": "x"}),
    with_value({"pickle": "gASV"}),
    with_value({"tensor": "t", "list": []}),
    with_value([1]),
    with_value({"inputs": [1, 2, 3]}),
]


@pytest.mark.parametrize("content", HOSTILE, ids=lambda content: str(content)[-40:])
def test_a_file_from_somewhere_is_refused_kindly(content, file):
    with pytest.raises(CaptureError, match=r"seen.safetensors (cannot be read as captured values|is of version 2)"):
        load_capture(written(file, content))


def test_what_nests_too_deep_is_refused(file):
    value = x
    for _ in range(3000):
        value = {"list": [value if isinstance(value, dict) else {"tensor": "t"}]}
    text = '{"list": [' * 3000 + '{"tensor": "t"}' + "]}" * 3000
    content = json.dumps(with_value("HERE")).replace('"HERE"', text)
    with pytest.raises(CaptureError, match="cannot be read as captured values"):
        load_capture(written(file, content))


def test_other_files_are_told_apart(tmp_path):
    other = tmp_path / "weights.safetensors"
    save_file({"w": x}, other)
    with pytest.raises(CaptureError, match=r"weights.safetensors holds no captured values; write them with `seen.save"):
        load_capture(other)
    torch.save({"w": x}, tmp_path / "m.pt")
    with pytest.raises(CaptureError, match="is no safetensors file, so it holds no captured values"):
        load_capture(tmp_path / "m.pt")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_capture(tmp_path / "none")


def test_texts_of_a_file_cannot_command_a_terminal(file):
    content = {**GOOD, "notes": ["\x1b[2Jnote"], "sites": [*GOOD["sites"], {**GOOD["sites"][0], "address": "a\x1b[3m"}]}
    content["sites"][1] |= {"fired": 0, "entries": [], "why": "\x1b]0;x\x07 <script>"}
    with pytest.raises(CaptureError):
        load_capture(written(file, content))
    content["sites"][1]["address"] = "a\x1b"
    loaded = load_capture(written(file, content))
    assert "\x1b" not in str(loaded.report()) + repr(loaded) and "\x07" not in str(loaded.report())
    assert "<script>" not in loaded._repr_html_() and "&lt;script&gt;" in loaded._repr_html_()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["tensor", "list", "tuple", "dict", "named", "inputs", "size", "x"]), inner, max_size=2
        )
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(JSON)
def test_whatever_is_in_the_header_it_is_read_or_refused(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    with contextlib.suppress(CaptureError):
        dict(load_capture(written(file, with_value(content))))


def test_loading_imports_nothing_that_the_file_names(file, tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(str(tmp_path))
    content = with_value({"named": ["evil_module", [["a", {"tensor": "t"}]]]})
    loaded = load_capture(written(file, {**content, "notes": ["what was a evil_module.Out is a namedtuple here"]}))
    assert torch.equal(loaded["0[a]"], x) and "evil_module" not in sys.modules


def test_without_safetensors_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r'captured values in files need safetensors: pip install "tenterhook\[safet'):
        load_capture(tmp_path / "x.safetensors")


def test_calls_stay_aligned_in_a_file(tmp_path):
    model = nn.Linear(2, 2)
    with capture(model, "grad(.)") as seen:
        for wanted in (True, False, True):
            out = model(torch.ones(1, 2))
            if wanted:
                out.sum().backward()
    seen.save(tmp_path / "a.safetensors")
    assert [one is None for one in seen.calls("grad(.)")] == [False, True, False]
    assert [one is None for one in load_capture(tmp_path / "a.safetensors").calls("grad(.)")] == [False, True, False]
    assert [one is None for one in seen.to("cpu").calls("grad(.)")] == [False, True, False]
