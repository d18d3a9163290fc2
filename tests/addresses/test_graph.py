"""Graph nodes (S14): gradients at a grad_fn, seen and changed, against hooks put there by hand."""

import pytest
import torch
from torch import nn

from tenterhook import AddressError, EditError, capture, edit, observe, sites
from tenterhook.changes import ones, reverse, scale, zero

X = torch.randn(3, 4)


def test_s14_the_gradient_at_a_node_is_seen_and_changed():
    a = torch.ones(5, requires_grad=True)
    b = 2 * a
    c = b.mean()
    with capture(c, "grad(.)", "grad(.:in)", "grad(0)", "grad(0:in[0])") as seen:
        c.backward(retain_graph=True)
    assert seen["grad(.)"] == 1
    torch.testing.assert_close(seen["grad(.:in)"], torch.full((5,), 0.2))
    torch.testing.assert_close(seen["grad(0)"], torch.full((5,), 0.2))
    torch.testing.assert_close(seen["grad(0:in[0])"], torch.full((5,), 0.4))
    a.grad = None
    with edit(c, {"grad(0)": scale(2.0)}) as edits:
        c.backward(retain_graph=True)
    torch.testing.assert_close(a.grad, torch.full((5,), 0.8))
    assert edits.report().silent == []
    a.grad = None
    with edit(c, {"grad(0:in[0])": ones()}):
        c.backward()
    assert torch.equal(a.grad, torch.ones(5))


def test_a_node_reached_from_a_captured_tensor():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with capture(model, "1", detach=False, copy=False) as seen:
        out = model(X)
    truth, twin = [], seen["1"].grad_fn.register_prehook(lambda grads: truth.append(grads[0].clone()))
    with capture(seen["1"], "grad(.)", "grad(0:in[1])") as at_node:
        out.sum().backward(retain_graph=True)
    twin.remove()
    assert torch.equal(at_node["grad(.)"], truth[0])
    bare = model[0].weight.grad.clone()
    model.zero_grad()
    with edit(seen["1"].grad_fn, {"grad(.)": reverse()}):
        out.sum().backward()
    torch.testing.assert_close(model[0].weight.grad, -bare)


def test_the_graph_has_addresses_like_a_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    loss = model(X).sum()
    table = str(sites(loss))
    assert "AddmmBackward0" in table and "TanhBackward0" in table and "AccumulateGrad" in table
    names = {site.class_name: str(site) for site in sites(loss)}
    assert names["SumBackward0"] == "." and names["TanhBackward0"] == "0.1"
    with capture(loss, "grad(**<AddmmBackward0>:in)") as seen:
        loss.backward(retain_graph=True)
    assert list(seen) == ["grad(0:in)", "grad(0.1.0:in)"]
    bias, value, weight = seen["grad(0:in)"]
    assert torch.equal(bias, torch.full((2,), 3.0)) and torch.equal(weight.T, model[2].weight.grad)
    assert torch.equal(value, torch.ones(3, 2) @ model[2].weight)
    assert seen["grad(0.1.0:in)"][1] is None  # the input needs none
    with capture(loss) as seen:
        loss.backward()
    assert len(seen) == len(sites(loss))


def test_several_backwards_functions_and_observers():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = (x * x).sum()
    shown = []
    with (
        capture(y, "grad(0)") as seen,
        observe(y, {"grad(0)": lambda grad, site: shown.append((str(site), grad.tolist()))}),
    ):
        y.backward(retain_graph=True)
        (3 * y).backward(retain_graph=True)
    assert [g.tolist() for g in seen.calls("grad(0)")] == [[1, 1], [3, 3]]
    assert shown == [("grad(0@0)", [1, 1]), ("grad(0@0)", [3, 3])]
    x.grad = None
    with edit(y, {"grad(0)": lambda g: (g.zero_(), None)[1]}):
        y.backward()
    assert not x.grad.any()


def test_inputs_of_a_node_one_by_one():
    a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    for address, truth in {"grad(.:in[0])": (0, 2), "grad(.:in[1])": (5, 0), "grad(.:in)": (0, 0)}.items():
        a.grad = b.grad = None
        c = a * b
        with edit(c, {address: zero()}):
            c.backward()
        assert (a.grad, b.grad) == truth


def test_what_a_graph_cannot_do_says_so():
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).sum()
    with pytest.raises(TypeError, match="was not computed from others"):
        capture(x, "grad(.)")
    with pytest.raises(AddressError, match=r"a graph node has no value, only gradients; ask for grad\(0\)"):
        capture(y, "0")
    with pytest.raises(AddressError, match=r"answers to 'grad\(5\)'; its nodes are \. \(SumBackward0\), 0 \(Mul"):
        capture(y, "grad(5)")
    with pytest.raises(AddressError, match="its nodes are MulBackward0"):
        edit(y, {"grad(**<MulBackward>)": zero()})
    with pytest.raises(TypeError, match="in a graph a selector is an address"):
        capture(y, lambda name, node: True)
    with pytest.raises(EditError, match=r"the change at grad\(0@0\) made 1 float32 of 2 float32"):
        with edit(y, {"grad(0)": lambda g: g[:1]}):
            y.backward(retain_graph=True)
    with pytest.raises(EditError, match=r"grad\(0:out\[3\]\) was never edited: the node has 1 of these"):
        with edit(y, {"grad(0[3])": zero()}):
            y.backward()


def test_no_hook_stays_on_a_node():
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).sum()
    with edit(y, {"grad(**)": zero()}):
        y.backward(retain_graph=True)
    x.grad = None
    y.backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))
