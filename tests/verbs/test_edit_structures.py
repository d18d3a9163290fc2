"""edit: structured values, whole or one leaf of them; types and shapes stay unless it is meant."""

from collections import namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tenterhook import EditError, capture, edit
from tenterhook.changes import any_shape, scale, zero
from tests.verbs.models import X


def test_one_leaf_of_a_structure_and_the_same_tensor_beside_it():
    class Twice(nn.Module):
        def forward(self, x):
            y = x * 2
            return {"a": y, "b": [y, (y,)]}

    model = nn.Sequential(Twice())
    with edit(model, {"0[b][1][0]": zero()}):
        out = model(X)
    assert torch.equal(out["a"], X * 2) and torch.equal(out["b"][0], X * 2)
    assert torch.equal(out["b"][1][0], torch.zeros(3, 4))
    assert type(out) is dict and type(out["b"]) is list and type(out["b"][1]) is tuple


Pair = namedtuple("Pair", "left right")


@dataclass
class Box:
    left: torch.Tensor
    right: torch.Tensor


@pytest.mark.parametrize("kind", [Pair, Box, lambda a, b: [a, b], lambda a, b: {"left": a, "right": b}])
def test_leaves_by_name_and_position_keep_the_type(kind):
    class Model(nn.Module):
        def forward(self, x):
            return kind(x, x + 1)

    model = Model()
    key = 1 if isinstance(kind(0, 0), list) else "right"
    with edit(model, {f".[{key}]": scale(-1.0)}):
        out = model(X)
    assert type(out) is type(kind(X, X))
    left, right = (
        (out[0], out[1]) if isinstance(out, list | tuple) else vars(out).values() if kind is Box else out.values()
    )
    assert torch.equal(left, X) and torch.equal(right, -(X + 1))


def test_a_function_may_change_a_whole_structure():
    lstm = nn.LSTM(4, 4, batch_first=True)
    x = torch.randn(2, 3, 4)
    plain, (h, c) = lstm(x)

    def swap(value):
        out, (h, c) = value
        return out * 2, (c, h)

    with edit(lstm, {".": swap}):
        out, (first, second) = lstm(x)
    assert torch.equal(out, plain * 2) and torch.equal(first, c) and torch.equal(second, h)
    with edit(lstm, {".": lambda v: (v[0].zero_(), None)[1]}):
        out, (first, _) = lstm(x)
    assert not out.any() and torch.equal(first, h)


def test_a_ready_made_change_of_a_structure_wants_one_tensor():
    lstm = nn.LSTM(4, 4)
    with pytest.raises(EditError, match=r"zero\(\) changes one tensor.*tuple.*\[0\], \[1\]\[0\].*at \.@0"):
        with edit(lstm, {".": zero()}):
            lstm(torch.randn(2, 3, 4))

    class Alone(nn.Module):
        def forward(self, x):
            return (x, None)

    model = Alone()
    with edit(model, {".": zero()}):
        out, nothing = model(X)
    assert not out.any() and nothing is None


def test_another_shape_where_it_is_meant():
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))
    with edit(model, {"0": any_shape(lambda v: v[:2])}) as edits:
        assert model(X).shape == (8,)
    assert "nothing to compare" in str(edits.report())
    with edit(model, {"0": any_shape(lambda v: v.double())}):
        assert model(X).dtype == torch.float64


def test_any_shape_in_a_list_and_of_a_structure():
    model = nn.Sequential(nn.Linear(4, 4))
    with edit(model, {".": [any_shape(lambda v: v[:2]), scale(2.0)]}):
        assert model(X).shape == (2, 4)

    class Two(nn.Module):
        def forward(self, a, b=0, c=0):
            return a, b, c

    two = Two()
    with edit(two, {".:in": any_shape(lambda given: (*given, 7)), ".": any_shape(lambda out: [*out, 9])}):
        assert two(1, 2) == [1, 2, 7, 9]


def test_an_output_without_a_tensor():
    class Nothing(nn.Module):
        def forward(self, x):
            return None

    model = Nothing()
    with pytest.raises(EditError, match=r"zero\(\) changes one tensor, and this is None, without any"):
        with edit(model, {".": zero()}):
            model(X)


def test_structures_keep_their_type_unless_it_is_meant():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x + 1

    model = Pair()
    with pytest.raises(EditError, match=r"made list\(0, 1\) of tuple\(0, 1\); the type and the leaves must stay"):
        with edit(model, {".": list}):
            model(X)
    with edit(model, {".": any_shape(lambda pair: {"a": pair[0]})}) as edits:
        assert list(model(X)) == ["a"]
    assert "its leaves are not those that it had before" in str(edits.report())
    with pytest.raises(EditError, match=r"made 0.0 of 3×4 float32; return a tensor like the value"):
        with edit(nn.Identity(), {".": lambda v: 0.0}) as edits:
            edits._model(X)


def test_parts_that_are_attributes_too_are_edited_there_and_kept_as_copies():
    class Out(tuple):
        def __init__(self, parts):
            self.logits = self[0]

    class Head(nn.Module):
        def forward(self, x):
            return Out((x * 2, x * 3))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = Head()

        def forward(self, x):
            return self.head(x).logits + 0

    net, x = Net(), torch.ones(2, requires_grad=True)
    with edit(net, {"head[0]": zero()}):
        assert net(x).tolist() == [0, 0]
    with capture(net, "head") as seen:
        net(x)
    assert seen["head"].logits is seen["head"][0] and seen["head"].logits.grad_fn is None


class Batch(MutableMapping):
    """A mapping that is no dict, whose copy would share what it holds."""

    def __init__(self, **held):
        self.held = held

    def __getitem__(self, key):
        return self.held[key]

    def __setitem__(self, key, value):
        self.held[key] = value

    def __delitem__(self, key):
        del self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


def test_tensors_in_what_cannot_be_copied_are_not_edited():
    class Takes(nn.Module):
        def forward(self, x, batch):
            return x + batch["h"]

    def write(v):
        v[1]["h"].mul_(5)

    model, x = nn.Sequential(Takes()), torch.ones(3, requires_grad=True)
    h = x * 1
    with pytest.raises(EditError, match=r"it wrote into .* \(in the change at 0:in@0\)"), edit(model, {"0:in": write}):
        model[0](x, Batch(h=torch.ones(3)))
    with pytest.raises(EditError, match=r"grad\(0:in\) .* Batch cannot be made anew"):
        with edit(model, {"grad(0:in)": scale(3.0)}):
            model[0](x, Batch(h=h))
    with edit(model, {"0:in": lambda v: (v[0] * 2, Batch(h=v[1]["h"] * 3))}):
        assert model[0](x, Batch(h=h)).tolist() == [5, 5, 5]
    with edit(model, {"0:in[0]": scale(3.0)}):
        assert model[0](x, Batch(h=h)).tolist() == [4, 4, 4]
    with edit(model, {"0:in": lambda v: (v[0] * 2, v[1])}), pytest.raises(KeyError):
        model[0](x, Batch(n=1))  # there is no tensor in it


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("where", ["layers.0", "layers.1:in[src]"])
def test_nested_tensors_are_edited_by_functions(where, mode):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    src, pad = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with mode():
        handle = encoder.layers[0].register_forward_hook(lambda m, given, out: out * 2)
        truth = encoder(src, src_key_padding_mask=pad)
        handle.remove()
        with edit(encoder, {where: lambda v: v * 2}) as edits:
            assert torch.equal(encoder(src, src_key_padding_mask=pad), truth)
    assert "cannot be compared" in str(edits.report())


def test_a_change_that_fails_on_a_tuple_is_led_to_a_leaf():
    class Pair(nn.Module):
        def forward(self, x):
            return x + 1, {"h": x * 2}

    model = Pair()
    with pytest.raises(TypeError, match=r"in the change at \.@0, a tuple.* in it is \.:out\[0\]\)"):
        with edit(model, {".": lambda value: value * 2.0}):
            model(torch.ones(2))
    with edit(model, {".:out[0]": lambda value: value * 2.0}):
        assert model(torch.ones(2))[0].tolist() == [4.0, 4.0]
