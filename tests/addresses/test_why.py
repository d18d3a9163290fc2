"""The report: what fired, what did not, and why."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import NotSeenError, capture

x = torch.randn(2, 3, 8)


class Ways(nn.Module):
    """Every way in which a child's hook stays silent."""

    def __init__(self):
        super().__init__()
        self.called = nn.Linear(8, 8)
        self.by_forward = nn.Linear(8, 8)
        self.kept_name = nn.Linear(8, 8)
        self.fused = nn.Linear(8, 8)
        self.listed = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.unused = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.by_forward.forward(self.called(x))
        layer = self.kept_name
        x = F.linear(layer.forward(x), self.fused.weight, self.fused.bias)
        for item in self.listed:
            x = item.forward(x)
        return self.attention(x, x, x)[0]


REASONS = {
    "by_forward": "Ways calls its .forward() directly",
    "kept_name": "Ways calls its .forward() directly",
    "listed.1": "Ways calls its .forward() directly",
    "fused": "Ways uses its weights directly (a fused kernel)",
    "attention.out_proj": "MultiheadAttention uses its weights directly (a fused kernel)",
    "listed": "a ModuleList is a container that is never called",
    "unused": "not reached: Ways did not call it",
}


def test_each_way_around_a_hook_is_named():
    model = Ways()
    with capture(model) as seen:
        model(x)
    report = seen.report()
    told = {address: (fired, why) for address, fired, why in report}
    assert told["called"] == ("1×", "2×3×8 float32")
    for address, reason in REASONS.items():
        assert told[address][0] == "never"
        assert reason in told[address][1], (address, told[address])
        with pytest.raises(NotSeenError) as error:
            seen[address]
        assert reason in str(error.value)
    assert set(report.silent) == {*REASONS, "listed.0"}


def test_the_report_reads_well():
    model = Ways()
    with capture(model, "called", "unused", "grad(called)") as seen:
        model(x)
    assert str(seen.report()).splitlines() == [
        "address       fired  value, or why there is none",
        "────────────  ─────  " + "─" * 53,
        "called           1×  2×3×8 float32",
        "unused        never  not reached: Ways did not call it inside this session",
        "grad(called)  never  no backward inside this session reached it: none ran",
    ]
    assert "<td" in seen.report()._repr_html_()


def test_a_session_that_was_never_entered_and_one_that_saw_nothing():
    model = Ways()
    session = capture(model, "called")
    with pytest.raises(NotSeenError, match="the session was never entered"):
        session._seen["called"]
    with capture(model, ".") as seen:
        pass
    with pytest.raises(NotSeenError, match="it was not called inside this session"):
        seen["."]
    with capture(model, "called@3") as seen:
        model(x)
    with pytest.raises(NotSeenError, match="called 1 times, but not the call that was asked for"):
        seen["called@3"]


def test_lazy_parameters_are_not_there_yet():
    model = nn.Sequential(nn.LazyLinear(3))
    with capture(model, "0.weight", "0", "grad(0.weight)") as seen:
        model(x)
    assert seen["0"].shape == (2, 3, 3)
    with pytest.raises(NotSeenError, match="not initialised yet"):
        seen["0.weight"]


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_the_fused_transformer_kernel():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad(), capture(layer, "linear1", "self_attn") as seen:
        layer(x)
    assert seen["linear1"].shape == (2, 3, 16)
    assert "turn off PyTorch's fused transformer kernel" in str(seen.report())
    model = nn.TransformerEncoder(layer, 2).eval()
    mask = torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad(), capture(model, "layers.1.linear1", ".") as seen:
        model(x, src_key_padding_mask=mask)
    assert seen.report().silent == []


class Calls(nn.Module):
    """Its __call__ goes around PyTorch's."""

    def __call__(self, x):
        return x * 2


def test_a_call_of_its_own_and_a_block_that_raised():
    model = nn.Sequential(Calls(), nn.Linear(8, 8))
    with capture(model, "0", "1") as seen:
        model(x)
    assert "has a __call__ of its own" in dict((a, why) for a, _, why in seen.report())["0"]
    with pytest.raises(ValueError, match="half way"), capture(model, ".") as seen:
        model[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(ValueError("half way")))
        model(x)
    assert "the block was left by ValueError" in str(seen.report())


class Through(nn.Linear):
    """Its __call__ leads to PyTorch's."""

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def test_a_call_that_leads_to_torchs_is_not_blamed():
    model = nn.ModuleDict({"one": Through(8, 8), "own": Calls()})
    with capture(model, "one", "own") as seen:
        pass
    told = {address: why for address, _, why in seen.report()}
    assert "__call__" not in told["one"]
    assert told["own"].startswith("no call was seen at any address of this session; if the model ran in it: Calls has")
    with capture(model, "one") as seen:
        model["one"](x)
    assert seen.report().silent == []


def test_an_index_in_an_address_leads_to_at():
    model = nn.Sequential(nn.Linear(8, 8))
    with capture(model, "0[:, -1]", "0[2:]", "0[key]") as seen:
        model(x)
    one, two, three = (why for _, _, why in seen.report())
    assert "at((slice(None), -1), change)" in one and "seen[...][:, -1]" in one
    assert "at(slice(2, None), change)" in two
    assert three == "its value has no leaf [key]; it is one tensor, 2×3×8 float32"
