"""capture's options: copy, detach, device, dtype, reduce and keep."""

import pytest
import torch
from torch import nn

from tenterhook import NotSeenError, OverwrittenError, capture
from tenterhook.values.tree import leaves
from tests.verbs.models import Host, mlp

x = torch.randn(3, 4)


def test_copy_false_raises_when_the_value_was_overwritten():
    model = mlp()
    with capture(model, "0", "2", copy=False) as seen:
        out = model(x)
    assert seen["2"].data_ptr() == out.data_ptr()
    with pytest.raises(OverwrittenError, match="0@0 was kept with copy=False and has been changed in place since"):
        seen["0"]
    out.detach().zero_()
    with pytest.raises(OverwrittenError):
        seen["2"]


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_copy_false_watches_every_leaf(kind):
    model = Host()
    with capture(model, "inner", copy=False) as seen:
        out = model(x.clone(), kind)
    assert seen["inner"] is not None
    list(leaves(out))[1][1].add_(1)
    with pytest.raises(OverwrittenError):
        seen["inner"]


def test_detach_false_keeps_the_graph_for_losses_on_features():
    model = mlp()
    with capture(model, "0", detach=False) as seen:
        model(x)
    seen["0"].pow(2).sum().backward()
    twin = nn.Linear(4, 8)
    twin.load_state_dict(model[0].state_dict())
    twin(x).pow(2).sum().backward()
    assert torch.equal(model[0].weight.grad, twin.weight.grad)


def test_device_and_dtype():
    model = mlp()
    with capture(model, "0", dtype=torch.float64) as seen, capture(model, "0", device="meta") as meta:
        model(x)
    assert seen["0"].dtype == torch.float64
    assert torch.equal(seen["0"].float(), model[0](x))
    assert meta["0"].device.type == "meta"
    ids = nn.Embedding(5, 2)
    with capture(ids, ".:in", dtype=torch.float16) as seen:
        ids(torch.tensor([1, 2]))
    assert seen[".:in"].dtype == torch.int64


@pytest.mark.parametrize("reduce", [lambda t: t[0], lambda t: t, lambda t: t.mean(0), lambda t: t.mean().item()])
def test_reduce_keeps_only_its_result_and_never_an_alias(reduce):
    model = mlp()
    with capture(model, "0", reduce=reduce) as seen:
        model(x)
    true = reduce(model[0](x))
    kept = seen["0"]
    assert kept == true if isinstance(true, float) else torch.equal(kept, true)
    if isinstance(kept, torch.Tensor):
        assert kept.untyped_storage().nbytes() == kept.numel() * 4
        assert not kept.requires_grad


def test_reduce_may_call_the_model_itself():
    model = mlp()
    with capture(model, "0", reduce=lambda t: model(x).sum()) as seen:
        model(x)
    assert len(seen.calls("0")) == 1


def test_an_exception_in_reduce_carries_the_address():
    model = mlp()
    with pytest.raises(ZeroDivisionError) as error, capture(model, "0", reduce=lambda t: 1 / 0):
        model(x)
    assert error.value.__notes__ == ["while keeping the value at 0"]


def test_keep_last():
    model = mlp()
    with capture(model, "0", grad=True, keep="last") as seen:
        for i in range(5):
            (model(x + i).sum() * i).backward()
    assert torch.equal(seen["0"], model[0](x + 4))
    assert len(seen.calls("grad(0)")) == 1
    assert torch.equal(seen["grad(0)"], 4 * (seen["0"] > 0) * model[2].weight.sum(0))
    assert [fired for _, fired, _ in seen.report()] == ["5×", "5×"]
    with pytest.raises(ValueError, match="keep is 'all' or 'last', got 'first'"):
        capture(model, keep="first")


def test_of_a_part_of_a_large_tensor_only_the_part_is_held():
    with capture(model := nn.Identity(), ".") as seen:
        model(torch.randn(1000, 4)[:2])
    assert seen["."].untyped_storage().nbytes() == 2 * 4 * 4


@pytest.mark.parametrize(
    "reduce", [lambda t: (t[:2],), lambda t: {"q": t}, lambda t: t.numpy()], ids=["tuple", "dict", "array"]
)
def test_reduce_never_hands_out_the_models_own_memory(reduce):
    model = mlp()
    with capture(model, "0", reduce=reduce) as seen, torch.no_grad():
        model(x)
    kept = seen["0"]
    part = kept[0] if isinstance(kept, tuple) else kept["q"] if isinstance(kept, dict) else torch.from_numpy(kept)
    assert torch.equal(part, model[0](x)[: len(part)])


def test_reduce_that_writes_is_caught():
    model = mlp()
    with (
        pytest.raises(RuntimeError, match="reduce changed the value in place"),
        capture(model, "0", reduce=torch.relu_),
    ):
        model(x)


def test_copy_false_copies_where_a_write_would_leave_no_trace():
    model = mlp()
    with torch.inference_mode(), capture(model, "0", copy=False) as seen:
        model(x)
    assert torch.equal(seen["0"], model[0](x))


@pytest.mark.parametrize(
    ("options", "hint"),
    [({"dtype": "float32"}, "torch.dtype"), ({"reduce": "mean"}, "a function"), ({"device": "cdua"}, "cdua")],
)
def test_wrong_options_fail_at_once(options, hint):
    with pytest.raises((TypeError, RuntimeError), match=hint):
        capture(mlp(), "0", **options)
    with pytest.raises(TypeError, match=r"capture\(model, \*names\)"):
        capture(mlp(), ["0", "1"])
    with pytest.raises(TypeError, match="did you mean reduce"):
        capture(mlp(), "0", reduced=True)


def test_reduce_that_fails_at_one_of_many_sites_is_told_and_ends_nothing():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.ids, self.both, self.fc = nn.Identity(), nn.Identity(), nn.Linear(4, 4)

        def forward(self, x):
            self.ids(x.long())
            self.both((x, x.long()))
            return self.fc(x)

    model = Model()
    with capture(model, "*", reduce=torch.mean) as seen:
        model(x).sum().backward()
    assert torch.equal(seen["fc"], model.fc(x).mean()) and torch.equal(seen["both[0]"], x.mean())
    for address in ("ids", "both[1]"):
        with pytest.raises(NotSeenError, match="was not kept: reduce failed with RuntimeError"):
            seen[address]
    assert any(note.startswith("ids, both: reduce failed with RuntimeError") for note in seen.report().notes)
    with pytest.raises(RuntimeError), capture(model, "ids", reduce=torch.mean):
        model(x)
    with pytest.raises(RuntimeError, match="reduce changed the value in place"):
        with capture(model, "**<Linear>", reduce=lambda t: t.add_(1) and 1 / 0):
            model(x)


def test_a_reduce_that_fails_at_some_gradients_or_calls():
    model, times = mlp(), []

    def second_fails(tensor):
        times.append(1)
        return 1 / (len(times) != 2) and tensor.sum()

    with capture(model, "grad(*)", reduce=second_fails) as seen:
        model(x).sum().backward()
    assert len(seen) == 2 and "its gradient was not kept: reduce failed with ZeroDivisionError" in str(seen.report())
    times.clear()
    with capture(model, "**<ReLU>", reduce=second_fails) as seen:
        for k in range(3):
            model(x * k)
    first, second, third = seen.calls("1")
    assert second is None and torch.equal(third, model[:2](2 * x).sum()) and first is not None
