"""The inside of torch's attention, and probabilities beside its fused kernel."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenterhook import EditError, capture, edit
from tenterhook.changes import zero
from tests.inside.models import names


def test_the_inside_of_multi_head_attention():
    torch.manual_seed(0)
    mha, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    plain = mha(x, x, x, average_attn_weights=False)
    with capture(mha, "./multi_head_attention_forward/attn_output_weights", "./multi_head_attention_forward/q") as seen:
        out = mha(x, x, x, average_attn_weights=False)
    assert torch.equal(out[0], plain[0]) and torch.equal(out[1], plain[1])
    assert torch.equal(seen.calls("./**/attn_output_weights")[-1], plain[1])
    with edit(mha, {"./multi_head_attention_forward/attn_output_weights#1": zero()}):
        assert torch.equal(mha(x, x, x)[0], mha.out_proj.bias.expand(2, 5, 8))
    unopened = names(mha, x, x, x)
    assert "./attn_output_weights" in unopened and not any("forward" in name for name in unopened)


class Attention(nn.Module):
    def forward(self, q, k, v, **options):
        out = F.scaled_dot_product_attention(q, k, v, **options)
        return out


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.rand(5, 5) > 0.3},
    "float": {"attn_mask": torch.randn(5, 5)},
    "scale": {"scale": 0.3},
    "groups": {"enable_gqa": True},
}


@pytest.mark.parametrize("kind", MASKS)
def test_attention_probabilities_beside_the_fused_kernel(kind):
    options = dict(MASKS[kind])
    q, k, v = (
        torch.randn(2, 4, 5, 8),
        torch.randn(2, 2 if kind == "groups" else 4, 5, 8),
        torch.eye(5).expand(2, 4, 5, 5),
    )
    v = v[:, :2] if kind == "groups" else v
    model = Attention()
    plain = model(q, k, v, **options)
    with capture(model, "./**/probabilities", "./out") as seen:
        out = model(q, k, v, **options)
    assert torch.equal(out, plain) and torch.equal(seen["./out"], plain)
    # With the identity as values, what attention gives is its probabilities.
    torch.testing.assert_close(seen["./scaled_dot_product_attention/probabilities"], plain)
    assert "a second attention in time and memory" in str(seen.report())


def test_what_is_computed_beside_the_kernel_cannot_be_changed_and_has_no_gradient():
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    with pytest.raises(EditError, match="computed beside the fused kernel"):
        with edit(Attention(), {"./scaled_dot_product_attention/probabilities": zero()}) as edits:
            edits._model(q, q, q)
    with capture(Attention(), "grad(./scaled_dot_product_attention/probabilities)") as seen:
        seen._session.model()(q, q, q).sum().backward()
    assert "it can be looked at, and no more" in str(seen.report())
