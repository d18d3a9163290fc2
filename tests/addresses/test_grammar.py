import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenterhook import AddressError
from tenterhook.addresses.grammar import Address, covers, escape, parse

PIECES = [
    "grad(",
    ")",
    "layer1",
    ".",
    "*",
    "**",
    "<Conv2d>",
    "/",
    "y",
    "#2",
    ":in",
    ":out",
    "[",
    "]",
    "0",
    "-1",
    "@",
    ":",
    "\\",
    " ",
    "é",
]


@given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_parses_or_raises_address_error_and_round_trips(text):
    try:
        address = parse(text)
    except AddressError as error:
        assert repr(text) in str(error)
        return
    assert parse(str(address)) == address
    assert str(parse(str(address))) == str(address)


@given(st.text(min_size=1).filter(lambda name: "." not in name))
def test_any_module_name_can_be_escaped(name):
    address = parse(escape(name))
    assert address == Address(escape(name))
    assert address.name == name
    assert not address.is_glob


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("layer4.1.conv2", Address("layer4.1.conv2")),
        (".", Address(".")),
        ("layer1:out", Address("layer1")),
        ("encoder.layer.3:in[0]", Address("encoder.layer.3", role="in", leaf=(0,))),
        ("a:in[hidden_states]", Address("a", role="in", leaf=("hidden_states",))),
        ("a[0][h][-1]", Address("a", leaf=(0, "h", -1))),
        ("a:out[007]", Address("a", leaf=("007",))),
        ("grad(fc.weight)", Address("fc.weight", grad=True)),
        ("lm_head@-1", Address("lm_head", call=-1)),
        ("a@2:5", Address("a", call=(2, 5))),
        ("a@:5", Address("a", call=(None, 5))),
        ("**<ReLU>:in", Address("**", cls="ReLU", role="in")),
        ("h.0.attn/eager/attn_weights#2", Address("h.0.attn", inner="/eager/attn_weights#2")),
        ("grad(a:in[0]@1)", Address("a", role="in", leaf=(0,), call=1, grad=True)),
        (r"we\:ird\[0\]", Address(r"we\:ird\[0\]")),
    ],
)
def test_grammar(text, address):
    assert parse(text) == address
    assert parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "the model itself is '.'"),
        ("layer1:output", "':output' does not exist"),
        ("grad(layer1", "never closed"),
        ("grad(grad(a))", "cannot be nested"),
        ("a[0", "each bracket closed"),
        ("a[]", "each bracket closed"),
        ("a@x", "a call is written last"),
        ("a@1[0]", "a call is written last"),
        ("a..b", "empty part"),
        ("a.", "empty part"),
        ("(a)", "backslash"),
    ],
)
def test_unreadable_text_says_what_to_write(text, hint):
    with pytest.raises(AddressError, match=re.escape(hint)):
        parse(text)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("**", [".", "a", "a.b.c"], []),
        ("*", ["a", "layer1"], [".", "a.b"]),
        ("layer*.conv?", ["layer1.conv?"], ["layer1.conv1"]),
        ("h.*.attn", ["h.0.attn"], ["h.0.x.attn", "h.attn"]),
        ("**.conv", ["conv", "a.conv", "a.b.conv"], ["a.conv.b"]),
        ("a.**", ["a", "a.b", "a.b.c"], ["b", "ab"]),
        (r"a\*", ["a*"], ["ab"]),
        (".", ["."], ["a"]),
    ],
)
def test_globs(pattern, yes, no):
    means = parse(pattern).path_filter()
    assert all(means(name) for name in yes)
    assert not any(means(name) for name in no)


@given(st.integers(-6, 6), st.none() | st.integers(-6, 6), st.none() | st.integers(-6, 6), st.integers(0, 5))
def test_calls_select_as_indexing_does(k, start, stop, total):
    calls = list(range(total))
    assert [c for c in calls if covers((start, stop), c, total)] == calls[start:stop]
    assert [c for c in calls if covers(k, c, total)] == ([calls[k]] if -total <= k < total else [])
    assert all(covers(None, c, total) for c in calls)
