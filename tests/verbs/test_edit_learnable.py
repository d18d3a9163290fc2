"""edit: changes whose tensors are learnt."""

import torch
from torch import nn

from tenterhook import edit
from tenterhook.changes import add, project_out
from tests.verbs.models import X


def test_a_learnable_change_gets_its_gradient_and_its_new_value(net):
    vector = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([vector], lr=1.0)
    losses = []
    with edit(net, {"a": add(vector)}):
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(X).pow(2).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert vector.grad.any() and len(set(losses)) == 3
    truth = net(X, after_a=lambda v: v + vector)
    with edit(net, {"a": add(vector)}):
        torch.testing.assert_close(net(X), truth)


def test_a_direction_can_be_learnt(net):
    direction = torch.rand(4, requires_grad=True)
    with edit(net, {"a": project_out(direction)}):
        out = net(X)
    out.pow(2).sum().backward()
    d = direction.detach().clone().requires_grad_()
    truth = net(X, after_a=lambda v: v - (v @ d)[:, None] * d / d.dot(d))
    truth.pow(2).sum().backward()
    torch.testing.assert_close(out, truth)
    torch.testing.assert_close(direction.grad, d.grad)


def test_how_much_of_a_vector_can_be_learnt():
    model, x, vector = nn.Sequential(nn.Linear(2, 2)), torch.ones(3, 2), torch.tensor([1.0, 2.0])
    for start in (torch.tensor(0.9), torch.tensor(1.0), torch.tensor([1.0, 2.0]), torch.ones(3, 1)):
        times = start.requires_grad_()
        with edit(model, {"0": add(vector, times=times)}):
            out = model(x)
        truth = model(x) + times * vector
        torch.testing.assert_close(out, truth)
        grads = [torch.autograd.grad(one.pow(2).sum(), times)[0] for one in (out, truth)]
        torch.testing.assert_close(*grads)
