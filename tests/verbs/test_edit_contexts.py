"""edit: under no_grad, inference mode, autocast and torch.func, and in threads."""

import threading

import torch
from torch import nn

from tenterhook import capture, edit
from tenterhook.changes import add, scale, zero
from tests.verbs.models import X


def test_no_grad_inference_mode_and_autocast(net):
    truth = net(X, after_a=lambda v: v * 2)
    for mode in (torch.no_grad(), torch.inference_mode()):
        for change in (scale(2.0), lambda v: v * 2, lambda v: v.mul_(2), lambda v: (v.mul_(2), None)[1]):
            with edit(net, {"a": change}) as edits, mode:
                torch.testing.assert_close(net(X), truth)
            assert "changed nothing" not in str(edits.report())
    with edit(net, {"a": add(torch.ones(4))}), torch.autocast("cpu", torch.bfloat16), capture(net, "a") as seen:
        net(X)
    assert seen["a"].dtype == torch.bfloat16


def test_another_thread_is_left_alone(net):
    plain = net(X)
    results = []
    with edit(net, {"a": zero()}):
        thread = threading.Thread(target=lambda: results.append(net(X)))
        thread.start()
        thread.join()
        assert not torch.equal(net(X), plain)
    assert torch.equal(results[0], plain)


def test_two_threads_edit_one_model_each_for_itself(net):
    truth = {k: net(X, after_a=lambda v, k=k: v * k) for k in (2.0, 3.0)}
    barrier, failures = threading.Barrier(2), []

    def work(k):
        for _ in range(50):
            barrier.wait()
            with edit(net, {"a": scale(k)}):
                if not torch.allclose(net(X), truth[k]):
                    failures.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in truth]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_torch_func_transforms(net):
    vmapped = torch.vmap(lambda row: net(row))
    with edit(net, {"a": scale(2.0)}) as edits:
        out = vmapped(X)
    torch.testing.assert_close(out, net(X, after_a=lambda v: v * 2))
    assert edits.report()
    with edit(net, {"a": lambda v: v * 2}):
        grad = torch.func.grad(lambda x: net(x).sum())(X)
    x = X.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(net(x, after_a=lambda v: v * 2).sum(), x)[0])


def test_a_moved_tensor_is_for_all_that_come_later():
    model, x = nn.Sequential(nn.Linear(2, 2)).double(), torch.ones(1, 2).double()
    by = torch.tensor([1.0, 2.0])
    truth = model(x) * by.double()
    with edit(model, {"0": scale(by)}):
        with torch.inference_mode():
            model(x)
        out = model(x)
        out.sum().backward()
    assert torch.equal(out, truth)
    for transform in (torch.func.grad(lambda x: model(x).sum()), torch.vmap(model), torch.func.jacrev(model)):
        with edit(model, {"0": scale(by)}):
            transform(x)
            assert torch.equal(model(x), truth)
