"""observe: a function gets each site and value, and changes nothing."""

import pytest
import torch
from torch import nn

from tenterhook import AddressError, TenterhookWarning, capture, edit, observe


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


x = torch.randn(3, 4)


def test_the_function_gets_the_site_and_the_value_of_each_call():
    model, got = mlp(), []
    with observe(
        model, {"**<Linear>": lambda value, site: got.append((str(site), value.clone(), site.module))}
    ) as watching:
        model(x)
        model(x)
    assert [address for address, _, _ in got] == ["0@0", "2@0", "0@1", "2@1"]
    assert torch.equal(got[0][1], model[0](x))
    assert not got[0][1].requires_grad
    assert got[1][2] is model[2]
    assert [row[:2] for row in watching.report()] == [("0", "2×"), ("2", "2×")]


def test_a_function_takes_the_value_and_if_it_wants_the_site():
    model, got = mlp(), []

    class Looks:
        def __call__(self, value, site=None):
            got.append(("object", str(site)))

    def either(value, *, sink=got):
        sink.append(("value", tuple(value.shape)))

    looks = {"0": either, "1": Looks(), "2": lambda value, where: got.append(("both", str(where)))}
    with observe(model, looks), observe(model, {"2": got.append}):
        model(x)
    assert got[:3] == [("value", (3, 8)), ("object", "1@0"), ("both", "2@0")]
    assert isinstance(got[3], torch.Tensor)


@pytest.mark.parametrize("look", [lambda site, value: None, lambda address, v: None])
def test_the_order_of_earlier_versions_is_refused(look):
    with pytest.raises(TypeError, match=r"0: a function is called with \(value, site\), the value first.*: write \(v"):
        observe(mlp(), {"0": look})
    with pytest.raises(TypeError, match=r"0: a function is called with \(value, site\), the value first"):
        edit(mlp(), {"0": look})


def test_gradients_inputs_leaves_and_calls():
    lstm, got = nn.LSTM(4, 5), {}
    look = lambda value, site: got.__setitem__(str(site), value)  # noqa: E731
    addresses = [".[1][0]", ".:in", "grad(.)", "grad(.:in[0])", "grad(weight_ih_l0)", ".[0]@1"]
    with observe(lstm, dict.fromkeys(addresses, look)):
        out, (h, _) = lstm(x.clone().requires_grad_())
        (out.sum() + h.sum()).backward()
        lstm(x)
    assert set(got) == {
        ".:out[1][0]@0", ".:in@0", "grad(.:out[0]@0)", "grad(.:out[1][0]@0)", "grad(.:in[0]@0)",
        "grad(weight_ih_l0@0)", ".:out[1][0]@1", ".:in@1", ".:out[0]@1",
    }  # fmt: skip
    assert torch.equal(got[".:in@0"], x)
    assert torch.equal(got["grad(weight_ih_l0@0)"], lstm.weight_ih_l0.grad)


def test_an_exception_carries_the_address_and_leaves_nothing():
    model = mlp()
    with pytest.raises(ZeroDivisionError) as error, observe(model, {"2": lambda value, site: 1 / 0}):
        model(x)
    assert error.value.__notes__ == ["while observing 2@0"]


def test_an_observer_that_writes_is_caught():
    model = mlp()
    said = pytest.raises(RuntimeError, match="the observer at 0@0 changed the value in place")
    with said, observe(model, {"0": lambda value, site: value.zero_()}):
        model(x)


def test_an_observer_may_use_the_model_itself():
    model, got = mlp(), []
    with observe(model, {"0": lambda value, site: got.append(capture.once(model, x, "2"))}):
        model(x)
    assert torch.equal(got[0], model(x))


def test_observers_that_never_fire_are_warned_about():
    model = mlp()
    said = pytest.warns(TenterhookWarning, match="0 was never observed: not reached: Sequential did not call it")
    with said, observe(model, {"0": lambda value, site: None}):
        pass
    said = pytest.warns(TenterhookWarning, match=r"its value has no leaf \[logits\]")
    with said, observe(model, {"0[logits]": lambda value, site: None}):
        model(x)


@pytest.mark.parametrize("address", ["0@-1", "0@:-1"])
def test_a_call_counted_from_the_end_is_refused(address):
    with pytest.raises(AddressError, match="known only afterwards"):
        observe(mlp(), {address: print})


@pytest.mark.parametrize(("observers", "hint"), [("0", "a dict of selector"), ({"0": 3}, "must be a function")])
def test_wrong_types(observers, hint):
    with pytest.raises(TypeError, match=hint):
        observe(mlp(), observers)
