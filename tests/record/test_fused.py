"""nn.TransformerEncoderLayer, which torch may run as one operation, stays so."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import watch
from tenterhook.record.sources import fused
from tests.conftest import ours
from tests.record.small import agrees, rows


def encoder(dtype=torch.float32, **options):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, dtype=dtype, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def padded(dtype):
    mask = torch.zeros(16, 10, dtype=torch.bool)
    mask[:, 7:] = True
    return torch.randn(16, 10, 32, dtype=dtype), mask


class Probe(nn.Module):
    """A head on an encoder, which may be a single layer."""

    def __init__(self, encoder, dtype):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(32, 3, dtype=dtype)

    def forward(self, x, mask):
        return self.head(self.encoder(x, src_key_padding_mask=mask)[:, 0])


def probed(model, dtype, frozen):
    """Train the head of a frozen encoder, or all, with a validation after each step: what comes out of both."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(6):
        model.train()
        model.encoder.train(not frozen)
        (x, mask), y = padded(dtype), torch.randint(0, 3, (16,))
        loss = F.cross_entropy(model(x, mask).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            yield loss.item(), model.encoder(x, src_key_padding_mask=mask)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoder_that_torch_runs_as_one_operation_stays_so(tmp_path, dtype, frozen):
    model = Probe(encoder(dtype).requires_grad_(not frozen), dtype)
    plain = list(probed(copy.deepcopy(model), dtype, frozen))
    with watch(model, to=tmp_path / "run", every=1) as run:
        watched = list(probed(model, dtype, frozen))
    for (loss, values), (expected, others) in zip(watched, plain, strict=True):
        assert loss == expected and torch.equal(values, others)
    sites = {row["site"] for row in rows(run.open(), what="output")}
    assert {"head", "encoder"} <= sites
    assert ("encoder.layers.0.linear1" in sites) is not frozen
    assert ("inside of an nn.TransformerEncoderLayer" in run.verdict()) is frozen
    assert not ours(model)


@pytest.mark.parametrize("why", ["gradients", "switch", "layout"])
def test_an_encoder_in_eval_mode_that_torch_does_not_fuse_is_recorded(tmp_path, monkeypatch, why):
    body = nn.TransformerEncoderLayer(32, 4, 64) if why == "layout" else encoder()
    model = Probe(body.eval().requires_grad_(False), torch.float32)
    prompt = torch.zeros(32, requires_grad=why == "gradients")
    optimizer = torch.optim.SGD([prompt, *model.head.parameters()], lr=0.01)
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", why != "switch")
    with watch(model, to=tmp_path / "run", every=1) as run:
        for _ in range(2):
            model(prompt + padded(torch.float32)[0], None).sum().backward()
            optimizer.step()
    assert any(row["site"].endswith("linear1") for row in rows(run.open(), what="output"))
    assert "TransformerEncoderLayer was not" not in run.verdict()


@torch.no_grad()
def given(layer, inputs):
    return [layer(x, src_key_padding_mask=mask) for x, mask in inputs]


def test_a_layer_that_is_the_model_is_run_as_one_operation(tmp_path):
    layer = encoder().layers[0].eval()
    inputs = [padded(torch.float32) for _ in range(3)]
    plain = given(layer, inputs)
    with watch(layer, to=tmp_path / "run", every=1) as run:
        watched = given(layer, inputs)
    assert all(map(torch.equal, watched, plain))
    (one,) = rows(run.open(), what="input", step=1, site=".:in[0]")
    agrees(one, inputs[1][0])
    assert not torch.nn.modules.module._global_forward_pre_hooks


class Whole(nn.TransformerEncoderLayer):
    """A subclass that has torch's forward, in the end."""

    def forward(self, src, **options):
        return super().forward(src * 2, **options)


class Own(nn.TransformerEncoderLayer):
    """One that torch never runs as one operation."""

    def forward(self, src, src_key_padding_mask=None):
        src = self.norm1(src + self.self_attn(src, src, src, need_weights=False)[0])
        return self.norm2(src + self.linear2(self.linear1(src).relu()))


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, Whole])
def test_a_layer_is_run_as_one_operation_in_the_call_that_begins_a_sampled_step_too(tmp_path, kind):
    layer = kind(32, 4, 64, batch_first=True).eval()
    inputs = [padded(torch.float32) for _ in range(45)]
    plain = given(layer, inputs)
    with watch(layer, to=tmp_path / "run", every=3) as run:
        watched = given(layer, inputs)
    assert all(map(torch.equal, watched, plain))
    assert len(run.open().steps()) == 45 and not ours(layer)


def test_a_subclass_of_an_encoder_layer_with_a_forward_of_its_own_is_recorded(tmp_path):
    model = Probe(Own(32, 4, 64, batch_first=True).requires_grad_(False), torch.float32)
    with watch(model, to=tmp_path / "run", every=1) as run:
        for _ in probed(model, torch.float32, frozen=True):
            pass
    assert {"encoder", "encoder.linear1", "encoder.norm2"} <= {row["site"] for row in rows(run.open(), what="output")}
    assert "TransformerEncoderLayer was not" not in run.verdict()


def test_an_encoder_layer_without_a_layout_is_trained(tmp_path):
    model = Probe(nn.TransformerEncoderLayer(32, 4, 64, batch_first=None), torch.float32)
    plain = list(probed_rows(copy.deepcopy(model)))
    with watch(model, to=tmp_path / "run", every=1) as run:
        assert list(probed_rows(model)) == plain
    assert len(run.open().steps()) == 6 and run.open().rank_info()["failed"] is None


def probed_rows(model):
    """The losses of a training without a mask, and the sums of what a validation gives."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(6):
        x = torch.randn(16, 10, 32)
        loss = model.train()(x, None).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            yield loss.item(), model.eval()(x, None).sum().item()


@pytest.mark.parametrize("prompted", [True, False])
def test_what_a_layer_is_given_by_its_name(tmp_path, prompted):
    layer = encoder().layers[0].eval().requires_grad_(not prompted)
    prompt = torch.zeros(32, requires_grad=prompted)
    inputs = [padded(torch.float32) for _ in range(3)]
    with watch(layer, to=tmp_path / "run", every=1) as run:
        for x, mask in inputs:
            layer(src=x + prompt, src_key_padding_mask=mask).sum().backward()
    (one,) = rows(run.open(), what="input", step=1, site=".:in[src]")
    agrees(one, inputs[1][0])
    assert {".", "linear1"} <= {row["site"] for row in rows(run.open(), what="output")}


def test_a_watch_that_another_thread_ends_while_a_layer_is_called_leaves_no_hook(tmp_path, monkeypatch):
    model = Probe(encoder(), torch.float32)
    recorder = watch(model, to=tmp_path / "run", every=1).__enter__()._recording.recorder
    ends = threading.Thread(target=recorder.remove)

    def is_fused(layer, args):
        if not ends.ident:
            ends.start()
            ends.join(0.3)
        return False

    monkeypatch.setattr(fused, "is_fused", is_fused)
    model(*padded(torch.float32))
    ends.join()
    assert not ours(model)
