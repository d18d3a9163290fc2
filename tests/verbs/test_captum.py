"""Grad-CAM, guided backpropagation, integrated gradients and ablation as Captum computes them."""

import pytest
import torch
from torch import nn

from tenterhook import capture, edit, sweep
from tenterhook.changes import clamp, zero

attr = pytest.importorskip("captum.attr", reason="Captum is not installed: pip install captum")
pytestmark = [  # Captum's
    pytest.mark.filterwarnings("ignore:Setting backward hooks on ReLU activations:UserWarning"),
    pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require gradients:UserWarning"),
]


class Net(nn.Module):
    """A CNN with modules used once, as Captum needs them."""

    def __init__(self):
        super().__init__()
        self.conv1, self.relu1 = nn.Conv2d(1, 6, 3, padding=1), nn.ReLU()
        self.conv2, self.relu2 = nn.Conv2d(6, 8, 3, padding=1), nn.ReLU()
        self.pool, self.fc1, self.relu3, self.fc2 = nn.MaxPool2d(2), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 10)

    def forward(self, x):
        h = self.relu2(self.conv2(self.relu1(self.conv1(x))))
        return self.fc2(self.relu3(self.fc1(self.pool(h).flatten(1))))


@pytest.fixture
def net():
    return Net().eval()


X, TARGET = torch.rand(5, 1, 8, 8), torch.tensor([3, 1, 4, 1, 5])


def close(mine, theirs):
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def chosen(output):
    return output.gather(1, TARGET[:, None]).sum()


@pytest.mark.parametrize("layer", ["conv1", "conv2", "relu2"])
def test_grad_cam(net, layer):
    with capture(net, layer, grad=True) as seen:
        chosen(net(X)).backward()
    value, grad = seen[layer], seen[f"grad({layer})"]
    mine = (grad.mean((2, 3), keepdim=True) * value).sum(1, keepdim=True)
    close(mine, attr.LayerGradCam(net, net.get_submodule(layer)).attribute(X, TARGET).detach())


def test_guided_backpropagation(net):
    x = X.clone().requires_grad_()
    with edit(net, {"grad(**<ReLU>)": clamp(min=0)}):
        (mine,) = torch.autograd.grad(chosen(net(x)), x)
    close(mine, attr.GuidedBackprop(net).attribute(X, TARGET).detach())
    assert not torch.allclose(mine, torch.autograd.grad(chosen(net(x)), x)[0], atol=1e-4)


def test_deconvolution_replaces_the_gradient_of_the_relus_inputs(net):
    """A deconvolution ignores which units were on: what goes in is the positive part of what comes out."""
    x, came = X.clone().requires_grad_(), {}

    def keep(grad, site):
        came[site.address.name] = grad

    def instead(grad, site):
        return came[site.address.name].clamp(min=0)

    with edit(net, {"grad(**<ReLU>)": keep, "grad(**<ReLU>:in)": instead}):
        (mine,) = torch.autograd.grad(chosen(net(x)), x)
    close(mine, attr.Deconvolution(net).attribute(X, TARGET).detach())


def test_integrated_gradients(net):
    steps = 50
    theirs = attr.IntegratedGradients(net).attribute(
        X, torch.zeros_like(X), TARGET, n_steps=steps, method="riemann_middle"
    )
    total = torch.zeros_like(X)
    for k in range(steps):
        x = (X * (k + 0.5) / steps).requires_grad_()
        with capture(net, "grad(conv1:in)") as seen:
            chosen(net(x)).backward()
        total += seen["grad(conv1:in)"]
    close(X * total / steps, theirs)


def test_integrated_gradients_of_a_layer(net):
    steps = 40
    theirs = attr.LayerIntegratedGradients(net, net.conv2).attribute(
        X, torch.zeros_like(X), TARGET, n_steps=steps, method="riemann_middle"
    )
    end, start = (capture.once(net, x, "conv2") for x in (X, torch.zeros_like(X)))
    total = torch.zeros_like(end)
    for k in range(steps):
        value = start + (end - start) * (k + 0.5) / steps
        with edit(net, {"conv2": value}), capture(net, "grad(conv2)") as seen:
            chosen(net(X)).backward()
        total += seen["grad(conv2)"]
    close((end - start) * total / steps, theirs)


def test_saliency_and_gradient_times_input(net):
    x = X.clone().requires_grad_()
    with capture(net, "grad(.:in)") as seen:
        chosen(net(x)).backward()
    close(seen["grad(.:in)"].abs(), attr.Saliency(net).attribute(X, TARGET))
    close(seen["grad(.:in)"] * X, attr.InputXGradient(net).attribute(X, TARGET).detach())


def test_ablation_of_a_layer_channel_by_channel(net):
    with torch.no_grad():
        clean, *ablated = sweep(
            net, X, [{}] + [{"relu2": lambda v, c=c: v.index_fill(1, torch.tensor(c), 0)} for c in range(8)]
        )
    mine = torch.stack([(clean - out).gather(1, TARGET[:, None])[:, 0] for out in ablated], 1)
    mask = torch.arange(8).view(1, 8, 1, 1).expand(1, 8, 8, 8)
    theirs = attr.LayerFeatureAblation(net, net.relu2).attribute(X, target=TARGET, layer_mask=mask)
    close(mine, theirs[:, :, 0, 0])


def test_a_zeroed_layer_is_a_zeroed_layer(net):
    with edit(net, {"conv2": zero()}):
        mine = net(X)
    close(mine, net.fc2(net.relu3(net.fc1(torch.zeros(5, 128)))))
