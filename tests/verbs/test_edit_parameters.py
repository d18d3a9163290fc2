"""edit: parameters and buffers are changed on entering and restored bit for bit."""

import copy
import threading
import warnings

import pytest
import torch
from torch import nn

from tenterhook import AddressError, EditError, TenterhookWarning, edit
from tenterhook.changes import add, scale, zero
from tests.verbs.models import X, raises


def test_parameters_and_buffers_are_changed_and_restored_bit_for_bit():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    before = copy.deepcopy(model.state_dict())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.mul_(0.5)
        twin[1].running_mean.fill_(3.0)
    with edit(model, {"0.weight": scale(0.5), "1.running_mean": 3.0, "0.bias": lambda b: None}) as edits:
        assert torch.equal(model(X), twin(X))
        assert torch.equal(model[0].weight, twin[0].weight)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert [row[1] for row in edits.report()] == ["1×", "1×", "1×"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_parameters_are_restored_when_the_block_fails(error):
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    with pytest.raises(error), edit(model, {"weight": zero()}):
        assert not model.weight.any()
        raise error
    assert torch.equal(model.weight, before)


def test_a_failure_while_entering_restores_what_was_changed_already():
    model = nn.Linear(4, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"boom \(in the change at bias@0\)"):
        with edit(model, {"weight": zero(), "bias": raises}):
            pytest.fail("never entered")
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


def test_nested_edits_of_one_parameter():
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    with edit(model, {"weight": scale(2.0)}):
        with edit(model, {"weight": add(1.0)}):
            assert torch.equal(model.weight, before * 2 + 1)
        assert torch.equal(model.weight, before * 2)
    assert torch.equal(model.weight, before)


def test_an_optimizer_step_inside_is_undone_with_a_warning():
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(TenterhookWarning, match="weight was changed inside the block"):
        with edit(model, {"weight": scale(2.0)}):
            model(X).sum().backward()
            optimizer.step()
    assert torch.equal(model.weight, before)


def test_a_buffer_that_the_model_replaces_comes_back():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(1))

        def forward(self, x):
            self.n = self.n + 1
            return x + self.n

    model = Counter()
    original = model.n
    with pytest.warns(TenterhookWarning, match="n was changed inside"), edit(model, {"n": 10.0}):
        assert model(torch.zeros(1)) == 11
    assert model.n is original and model.n == 0


def test_gradients_with_respect_to_a_changed_parameter_are_those_at_the_changed_value():
    model = nn.Linear(4, 2)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.mul_(2)
    twin(X).pow(2).sum().backward()
    with edit(model, {"weight": scale(2.0)}):
        model(X).pow(2).sum().backward()
    assert torch.equal(model.weight.grad, twin.weight.grad)


def test_a_backward_after_the_parameter_was_restored_is_an_error():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with edit(model, {"1.weight": scale(2.0)}):
        loss = model(X).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tied_weights_are_one_parameter():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    model = Tied()
    with edit(model, {"b.weight": zero()}):
        assert not model.a.weight.any()


def test_a_lazy_parameter_cannot_be_edited_yet():
    model = nn.LazyLinear(2)
    with pytest.raises(EditError, match="weight cannot be edited: it is not initialised"):
        edit(model, {"weight": zero()}).__enter__()


def test_autocasts_cache_of_weights_does_not_hide_or_keep_a_change():
    m, x = nn.Linear(3, 4, bias=False), torch.ones(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        plain = m(x)
        with edit(m, {"weight": zero()}):
            assert not m(x).any()
        assert torch.equal(m(x), plain)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_the_parameters_of_a_script_module_are_restored():
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with edit(model, {"0.weight": zero(), "0.bias": zero()}):
        assert not model(torch.ones(1, 2)).any()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parameters_made_in_inference_mode_are_restored():
    with torch.inference_mode():
        m = nn.Linear(2, 2)
        before = m.weight.clone()
        with edit(m, {"weight": zero()}):
            assert not m.weight.any()
        assert torch.equal(m.weight, before)
    with edit(m, {"weight": zero()}):
        assert not m.weight.any()
    assert torch.equal(m.weight, before)
    model = nn.Identity()
    model.register_buffer("wide", torch.zeros(1, 3).expand(4, 3))
    with pytest.raises(EditError, match="wide cannot be edited: unsupported operation"):
        edit(model, {"wide": 1.0}).__enter__()


def test_blocks_that_end_in_the_order_in_which_they_began():
    m = nn.Linear(2, 2)
    before = m.weight.detach().clone()

    def block(k):
        with edit(m, {"weight": scale(k)}):
            yield

    first, second, third = block(2.0), block(3.0), block(5.0)
    for one in (first, second, third):
        next(one)
    for one in (second, first, third):
        one.close()
    assert torch.equal(m.weight, before)


def test_a_parameter_that_is_replaced_inside_comes_back():
    m = nn.Linear(2, 2)
    weight, before = m.weight, m.weight.detach().clone()
    with pytest.warns(TenterhookWarning, match="weight was changed inside the block"):
        with edit(m, {"weight": scale(2.0)}):
            m.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, assign=True)
    assert m.weight is weight and torch.equal(m.weight, before)


def test_what_writes_without_a_trace_is_noticed_too():
    norm = nn.BatchNorm1d(4)
    with pytest.warns(TenterhookWarning, match="running_mean was changed inside"):
        with edit(norm, {"running_mean": 1.0}):
            norm(X + 5)
    assert not norm.running_mean.any()
    m = nn.Linear(4, 2)
    before, optimizer = m.weight.detach().clone(), torch.optim.SGD(m.parameters(), lr=0.1, fused=True)
    with pytest.warns(TenterhookWarning, match="weight was changed inside"), edit(m, {"weight": scale(2.0)}):
        m(X).sum().backward()
        optimizer.step()
    assert torch.equal(m.weight, before)


def test_a_change_that_learns_cannot_be_one_of_a_parameter():
    m, learnt = nn.Linear(2, 2), torch.ones(2, 2, requires_grad=True)
    with pytest.raises(EditError, match="weight cannot be edited: it is changed once, on entering, so no gradient"):
        edit(m, {"weight": add(learnt)}).__enter__()
    with pytest.raises(EditError, match="cannot be edited"):
        edit(nn.Linear(2, 2), {"weight": lambda w: w * learnt}).__enter__()


def test_many_parameters_are_changed_with_one_mode_and_no_hooks():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2)) for _ in range(300)])
    with edit(model, {"**.weight": scale(2.0)}):
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert torch._C._len_torch_function_stack() == 1
    assert torch._C._len_torch_function_stack() == 0


def test_threads_that_change_one_parameter_leave_it_as_it_was():
    model = nn.Linear(800, 800, bias=False)
    before = model.weight.detach().clone()

    def work(k):
        for _ in range(15):
            with warnings.catch_warnings(), edit(model, {"weight": scale(k)}):
                warnings.simplefilter("ignore")

    threads = [threading.Thread(target=work, args=(k,)) for k in (2.0, 3.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each sees that the other was there
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert torch.equal(model.weight, before)


def test_a_parameter_has_no_calls():
    with pytest.raises(AddressError, match="weight is a parameter, which is one tensor; inputs, leaves and calls"):
        edit(nn.Linear(2, 2), {"weight@1": zero()})
