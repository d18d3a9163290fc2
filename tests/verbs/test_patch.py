"""What was captured, put into another run."""

import pytest
import torch
from torch import nn

from tenterhook import AddressError, AmbiguousError, EditError, NotSeenError, capture, edit

A, B = torch.randn(3, 4), torch.randn(3, 4)


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def test_two_lines(model):
    with capture(model, "1") as seen:
        model(A)
    with edit(model, seen.patch("1")) as edits:
        out = model(B)
    torch.testing.assert_close(out, model(A))
    assert edits.report().silent == []


def test_positions(model):
    with capture(model, "1", "0") as seen:
        model(A)
    index = (slice(None), [0, 2])
    h = model[1](model[0](B)).clone()
    h[index] = model[1](model[0](A))[index]
    with edit(model, seen.patch("1", at=index)):
        torch.testing.assert_close(model(B), model[2](h))
    assert list(seen.patch("0", "1")) == ["0", "1"]


def test_by_leaf():
    lstm = nn.LSTM(4, 4)
    a, b = torch.randn(2, 1, 4), torch.randn(2, 1, 4)
    with capture(lstm, ".") as seen:
        out_a, (h_a, c_a) = lstm(a)
    out_b, (h_b, _) = lstm(b)
    assert list(seen.patch(".")) == [".:out[0]", ".:out[1][0]", ".:out[1][1]"]
    with edit(lstm, seen.patch(".")):
        out, (h, c) = lstm(b)
    assert torch.equal(out, out_a) and torch.equal(h, h_a) and torch.equal(c, c_a)
    with edit(lstm, seen.patch(".:out[1][1]")):
        out, (h, c) = lstm(b)
    assert torch.equal(out, out_b) and torch.equal(h, h_b) and torch.equal(c, c_a)


def test_by_call():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(3):
                x = self.step(x).tanh()
            return x

    model = Loop()
    with capture(model, "step") as seen:
        model(A)
    values = seen.calls("step")
    assert list(seen.patch("step")) == ["step@0", "step@1", "step@2"]
    with edit(model, seen.patch("step@1")), capture(model, "step") as after:
        model(B)
    assert torch.equal(after["step@1"], values[1]) and not torch.equal(after["step@0"], values[0])
    with edit(model, seen.patch("step")), capture(model, "step") as after:
        model(B)
    assert all(torch.equal(a, b) for a, b in zip(after.calls("step"), values, strict=True))


def test_one_call_goes_into_every_call(model):
    with capture(model, "1") as seen:
        model(A)
    with edit(model, seen.patch("1")):
        assert torch.equal(model(B), model(A)) and torch.equal(model(B * 2), model(A))
    with edit(model, seen.patch("1@0")):
        assert torch.equal(model(B), model(A))
        assert not torch.equal(model(B), model(A))


def test_inputs_parameters_and_gradients(model):
    with capture(model, "2:in", "0.weight", "grad(1)") as seen:
        model(A).sum().backward()
    other = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with edit(other, seen.patch("2:in", "0.weight")):
        assert torch.equal(other(B), other[2](seen["2:in"]))
        assert torch.equal(other[0].weight, model[0].weight)
    with edit(other, seen.patch("grad(1)")), capture(other, "grad(1)") as after:
        other(B).sum().backward()
    assert torch.equal(after["grad(1)"], seen["grad(1)"])


def test_gradients_reach_the_run_that_a_patch_came_from(model):
    with capture(model, "1", detach=False, copy=False) as seen:
        model(A)
    with edit(model, seen.patch("1")):
        model(B).sum().backward()
    grad = model[0].weight.grad
    model.zero_grad()
    model(A).sum().backward()
    torch.testing.assert_close(grad, model[0].weight.grad)


def test_globs_modules_and_errors(model):
    with capture(model, "**<Linear>") as seen:
        model(A)
        model(A)
    assert list(seen.patch("*<Linear>")) == ["0@0", "0@1", "2@0", "2@1"]
    assert list(seen.patch(model[0])) == ["0@0", "0@1"]
    with pytest.raises(NotSeenError, match="1"):
        seen.patch("1")
    with capture(model, "grad(0)") as seen:
        loss = model(A).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    with pytest.raises(AmbiguousError, match=r"grad\(0@0\) was captured more than once"):
        seen.patch("grad(0)")


def test_everything_and_globs_go_into_every_call(model):
    with capture(model, "0", "1") as seen:
        model(A)
    assert list(seen.patch()) == ["0", "1"] and list(seen.patch("*")) == ["0", "1"]
    with edit(model, seen.patch("*")) as edits:
        model(B)
        assert torch.equal(model(B), model[2](seen["1"]))
    assert [row[1] for row in edits.report()] == ["2×", "2×"]
    with pytest.raises(IndexError, match=r"0: index 9 is out of bounds .*; it is 3×4 float32"):
        seen.patch("0", at=(slice(None), 9))


class Same(nn.Module):
    """Gets one tensor at several leaves, and returns one at several."""

    def __init__(self):
        super().__init__()
        self.fc, self.inner = nn.Linear(4, 4), nn.Bilinear(4, 4, 4)

    def forward(self, x):
        h = self.fc(x)
        h = self.inner(h, h) * h
        return {"last": h, "all": (h, h * 2)}


@pytest.mark.parametrize("address", ["grad(0.inner:in)", "grad(0)", "grad(**)", "grad(**:in)"])
@pytest.mark.parametrize("at", [None, (slice(None), [0, 2])])
def test_gradients_patched_into_their_own_run_change_nothing_where_leaves_are_one_tensor(address, at):
    class Uses(nn.Module):
        def forward(self, out):
            return out["last"].pow(2) + out["all"][0].sin() + out["all"][1]

    model = nn.Sequential(Same(), Uses())
    with capture(model, address) as seen:
        model(A).sum().backward()
    truth = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    with edit(model, seen.patch(at=at)) as edits:
        model(A).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], truth)
    assert not edits.report().silent


def test_the_only_argument_is_a_structure():
    class Sum(nn.Module):
        def forward(self, parts):
            return parts["a"] + parts["b"][0]

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.sum = Sum()

        def forward(self, x, keyword):
            parts = {"a": x, "b": [x * 2]}
            return self.sum(parts=parts) if keyword else self.sum(parts)

    model = Calls()
    for keyword in (False, True):
        with capture(model, "sum:in") as seen:
            truth = model(A, keyword)
        with edit(model, seen.patch()):
            assert torch.equal(model(B, keyword), truth)


@pytest.mark.parametrize("by_name", [False, True])
def test_gradients_of_one_tensor_go_in_however_the_arguments_are_given(by_name):
    class Mix(nn.Module):
        def forward(self, q, k):
            return q * 2 + k.sin()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.p, self.mix, self.by_name = nn.Linear(3, 3), Mix(), by_name

        def forward(self, x):
            h = self.p(x)
            return self.mix(q=h, k=h) if self.by_name else self.mix(h, h)

    net = Net()
    with capture(net, "grad(mix:in)", "grad(p)") as seen:
        net(torch.randn(2, 3)).pow(2).sum().backward()
    net.by_name = not by_name
    with capture(net, "grad(p)") as other, edit(net, seen.patch("grad(mix:in)")):
        net(torch.randn(2, 3)).pow(2).sum().backward()
    assert torch.equal(other["grad(p)"], seen["grad(p)"])


def test_the_gradient_of_one_tensor_does_not_go_into_two():
    class Mix(nn.Module):
        def forward(self, q, k, v):
            return q * 2 + k * 3 + v * 5

    model, x, y = nn.Sequential(Mix()), *(torch.ones(2, requires_grad=True) for _ in range(2))
    with capture(model, "grad(0:in)") as seen:
        model[0](x, x, x * 1).sum().backward()
    patch = seen.patch()
    for _ in range(2):
        with edit(model, patch):
            out = model[0](y, y, y * 1).sum()
            for _ in range(2):
                (grad,) = torch.autograd.grad(out, y, retain_graph=True)
                assert grad.tolist() == [10, 10]
    with pytest.raises(EditError, match=r"were one tensor .*seen.patch"), edit(model, patch):
        model[0](y, y * 1, y * 1).sum().backward()


def test_the_gradient_of_one_tensor_goes_into_each_run_at_its_own_leaf():
    class Mix(nn.Module):
        def forward(self, q, k):
            return q * 2 + k * 3

    model, x = nn.Sequential(Mix()), torch.ones(2, requires_grad=True)
    with capture(model, "grad(0:in)") as seen:
        model[0](x, x).sum().backward()
    patch = seen.patch()
    for given in ((x, x), (torch.ones(2), x), (x, torch.ones(2))):
        with edit(model, patch):
            (grad,) = torch.autograd.grad(model[0](*given).sum(), x)
        assert grad.tolist() == [5, 5]
    with pytest.raises(EditError, match="were one tensor"), edit(model, patch):
        model[0](x, x * 1).sum().backward()


def test_a_key_that_cannot_be_written_in_an_address():
    class Named(nn.Module):
        def forward(self, x):
            return {"a]b": x * 2}

    model = nn.Sequential(Named())
    with capture(model, "0") as seen:
        model(A)
    with pytest.raises(AddressError, match="a key of a dict in it cannot be written in an address"):
        seen.patch()
