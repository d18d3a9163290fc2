"""The cases of SEEDS.md, by number, with their figures."""

import torch
from torch import nn

from tenterhook import capture, edit
from tenterhook.changes import add, ones, scale


class Square(nn.Module):
    """S1's y = x + 2 and z = mean(y²), inside modules."""

    def __init__(self):
        super().__init__()
        self.plus = nn.Module()
        self.plus.forward = lambda x: x + 2

    def forward(self, x):
        return self.plus(x).pow(2).mean()


def test_s1_gradient_of_an_intermediate():
    model, x = Square(), torch.tensor([1.0, 5.0], requires_grad=True)
    with capture(model, "plus", "grad(plus)") as seen:
        model(x).backward()
    assert torch.equal(seen["grad(plus)"], seen["plus"])
    assert torch.equal(seen["grad(plus)"], torch.tensor([3.0, 7.0]))


class Double(nn.Module):
    def forward(self, a):
        return 2 * a


def test_s2_order_and_figures_s3_memory():
    model = nn.Sequential(Double())
    a = torch.ones(5, requires_grad=True)
    with capture(model, "grad(0:in)", "grad(0)") as seen:
        model(a).mean().backward()
    torch.testing.assert_close(seen["grad(0)"], torch.full((5,), 0.2))
    torch.testing.assert_close(seen["grad(0:in)"], torch.full((5,), 0.4))
    assert list(seen) == ["grad(0)", "grad(0:in)"]  # b's arrives before a's

    b = model(a)
    b.retain_grad()
    b.mean().backward()
    assert torch.equal(b.grad, seen["grad(0)"])
    held = b.untyped_storage().nbytes() + b.grad.untyped_storage().nbytes()
    with capture(model, "grad(0)") as seen:
        model(a).mean().backward()
    assert seen["grad(0)"].untyped_storage().nbytes() == held // 2


def test_s5_s6_s7_inputs_outputs_and_their_gradients_of_one_module():
    layer = nn.Linear(10, 20)
    x = torch.randn(3, 10, requires_grad=True)
    with capture(layer, ".:in", ".", "grad(.:in)", "grad(.)") as seen:
        out = layer(x)
        out.sum().backward()
    assert torch.equal(seen[".:in"], x)
    assert torch.equal(seen["."], out)
    assert torch.equal(seen["grad(.)"], torch.ones(3, 20))
    assert torch.equal(seen["grad(.:in)"], x.grad)


def test_s8_everything_but_relu6_by_type():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1), nn.ReLU(), nn.ReLU6())
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    x = torch.full((2, 2), 0.1)
    with capture(model, nn.Linear, "**<ReLU>", "**<Linear>:in", "**<ReLU>:in") as seen:
        model(x)
    for address, value in (("0", 1.2), ("1", 3.4), ("2", 3.4)):
        torch.testing.assert_close(seen[address], torch.full_like(seen[address], value))
    assert "3" not in seen
    assert torch.equal(seen["0:in"], x)
    assert torch.equal(seen["1:in"], seen["0"])
    assert torch.equal(seen["2:in"], seen["1"])


def test_s9_sigmoid_net_in_one_session():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Linear(2, 2), nn.Sigmoid())
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.15, 0.2], [0.25, 0.3]]))
        model[0].bias.fill_(0.35)
        model[2].weight.copy_(torch.tensor([[0.4, 0.45], [0.5, 0.55]]))
        model[2].bias.fill_(0.6)
    x = torch.tensor([[0.05, 0.10]], requires_grad=True)
    with capture(model, "*", "*:in", grad=True) as seen:
        model(x).sum().backward()
    torch.testing.assert_close(seen["1"], torch.tensor([[0.593270, 0.596884]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(seen["3"], torch.tensor([[0.751365, 0.772928]]), atol=1e-6, rtol=0)
    assert len(seen) == 16
    twin = x.detach().clone().requires_grad_()
    values = [twin]
    for layer in model:
        values.append(layer(values[-1]))
    truth = torch.autograd.grad(values[-1].sum(), values)
    for i in range(4):
        assert torch.equal(seen[f"grad({i}:in)"], truth[i])
        assert torch.equal(seen[f"grad({i})"], truth[i + 1])


def test_s11_removed_hooks_cost_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with capture(model, "**", "**:in", grad=True):
        assert any(m._forward_hooks for m in model.modules())
    for module in model.modules():  # torch's fast path in __call__ asks for exactly these
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not module._backward_hooks and not module._backward_pre_hooks


def test_s12_one_gradient_per_backward_in_order():
    model = nn.Sequential(Double())
    x = torch.ones(2, requires_grad=True)
    with capture(model, "grad(0)") as seen:
        out = model(x).sum()
        for k in range(1, 4):
            (out * k).backward(retain_graph=True)
    assert [g.unique().item() for g in seen.calls("grad(0)")] == [1.0, 2.0, 3.0]


def test_s13_parameters_by_the_same_syntax():
    model = nn.Sequential()
    model.fc = nn.Linear(3, 2)
    with capture(model, "grad(fc.weight)", "grad(fc.bias)") as seen:
        model(torch.randn(4, 3)).pow(2).sum().backward()
    assert torch.equal(seen["grad(fc.weight)"], model.fc.weight.grad)
    assert torch.equal(seen["grad(fc.bias)"], model.fc.bias.grad)


def test_s4_a_gradient_is_replaced():
    model, a = nn.Sequential(Double()), torch.ones(5, requires_grad=True)
    with edit(model, {"grad(0)": scale(2.0)}):
        model(a).mean().backward()
    torch.testing.assert_close(a.grad, torch.full((5,), 0.8))


def test_s5_inputs_are_changed_before_a_forward():
    class Shift(nn.Module):
        def forward(self, x, *, by):
            return x + by

    model, x = Shift(), torch.zeros(3)
    with edit(model, {".:in[0]": add(1.0)}):
        assert torch.equal(model(x, by=torch.tensor(5.0)), torch.full((3,), 6.0))
    with edit(model, {".:in[by]": scale(2.0)}):
        assert torch.equal(model(x, by=torch.tensor(5.0)), torch.full((3,), 10.0))
    assert torch.equal(x, torch.zeros(3))


def test_s6_an_output_is_changed_after_a_forward():
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU())
    x = torch.randn(3, 10)
    with edit(model, {"0": lambda v: v * 0 + 7}), capture(model, "0:in", "0") as seen:
        assert torch.equal(model(x), torch.full((3, 20), 7.0))
    assert torch.equal(seen["0:in"], x) and torch.equal(seen["0"], torch.full((3, 20), 7.0))


def test_s7_the_gradient_of_the_inputs_is_replaced_by_ones():
    layer, x = nn.Linear(10, 20), torch.randn(3, 10, requires_grad=True)
    with edit(layer, {"grad(.:in)": ones()}):
        layer(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 10))


def test_s14_a_graph_node():
    a = torch.ones(5, requires_grad=True)
    b = 2 * a
    c = b.mean()
    with capture(c, "grad(0)") as seen, edit(b.grad_fn, {"grad(.:in[0])": scale(10.0)}):
        c.backward()
    torch.testing.assert_close(seen["grad(0)"], torch.full((5,), 0.2))
    torch.testing.assert_close(a.grad, torch.full((5,), 4.0))
