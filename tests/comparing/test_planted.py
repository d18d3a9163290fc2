"""Planted differences: `first` names the right module, and the line that was changed."""

import copy

import pytest
import torch
from torch import nn

from tenterhook import compare
from tests.comparing.planted import CONFIGS, INPUTS, Line, build, copy_of, edited

LINES = {
    "gpt2: the scores are not scaled": Line(
        "gpt2", "key.transpose(-1, -2)) * scaling", "key.transpose(-1, -2))", "transformer.h.0.attn"
    ),
    "gpt2: softmax over the wrong dimension": Line(
        "gpt2", "softmax(attn_weights, dim=-1)", "softmax(attn_weights, dim=-2)", "transformer.h.0.attn"
    ),
    "gpt2: positions off by one": Line(
        "gpt2",
        "position_ids = position_ids.unsqueeze(0)",
        "position_ids = position_ids.unsqueeze(0) + 1",
        "transformer",
    ),
    "gpt2: the mask is not added": Line(
        "gpt2",
        "attn_weights = attn_weights + attention_mask",
        "attn_weights = attn_weights + 0",
        "transformer.h.0.attn",
    ),
    "gpt2: a residual is missing": Line(
        "gpt2",
        "hidden_states = residual + feed_forward_hidden_states",
        "hidden_states = feed_forward_hidden_states",
        "transformer.h.0",
    ),
    "gpt2: the residual is taken after the norm": Line(
        "gpt2",
        "hidden_states = attn_output + residual",
        "hidden_states = attn_output + self.ln_1(residual)",
        "transformer.h.0",
    ),
    "gpt2: the heads are not put back": Line(
        "gpt2",
        "attn_output = attn_output.transpose(1, 2)\n\n    return",
        "attn_output = attn_output.transpose(1, 2).flip(2)\n\n    return",
        "transformer.h.0.attn",
    ),
    "llama: gate and up swapped": Line(
        "llama",
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "self.act_fn(self.up_proj(x)) * self.gate_proj(x)",
        "model.layers.0.mlp",
    ),
    "llama: the other rotation": Line(
        "llama", "torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, -x1), dim=-1)", "model.layers.0.self_attn"
    ),
    "llama: interleaved rotation": Line(
        "llama",
        "return torch.cat((-x2, x1), dim=-1)",
        "return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)",
        "model.layers.0.self_attn",
    ),
    "llama: the keys are not rotated": Line(
        "llama", "k_embed = (k * cos) + (rotate_half(k) * sin)", "k_embed = k * 1", "model.layers.0.self_attn"
    ),
    "llama: the mask is shifted": Line(
        "llama",
        "        hidden_states = inputs_embeds\n",
        "        causal_mask = causal_mask.roll(1, -1)\n        hidden_states = inputs_embeds\n",
        "model",
    ),
    "llama: a norm adds up in bfloat16": Line(
        "llama",
        "variance = hidden_states.pow(2).mean(-1, keepdim=True)",
        "variance = hidden_states.bfloat16().pow(2).mean(-1, keepdim=True).float()",
        "model.layers.0.input_layernorm",
    ),
    "llama: post-norm": Line(
        "llama",
        "hidden_states = self.mlp(hidden_states)\n        hidden_states = residual + hidden_states",
        "hidden_states = self.mlp(hidden_states)\n        hidden_states = residual * 1 + 0.5 * hidden_states",
        "model.layers.0",
    ),
    "bert: norm before the residual": Line(
        "bert",
        "self.LayerNorm(hidden_states + input_tensor)",
        "self.LayerNorm(hidden_states) + input_tensor",
        "bert.encoder.layer.0.attention.output",
    ),
    "bert: no token types": Line(
        "bert",
        "embeddings = inputs_embeds + token_type_embeddings",
        "embeddings = inputs_embeds + 0 * token_type_embeddings",
        "bert.embeddings",
    ),
    "bert: the positions are added twice": Line(
        "bert",
        "embeddings = embeddings + position_embeddings",
        "embeddings = embeddings + 2 * position_embeddings",
        "bert.embeddings",
    ),
    "t5: the buckets of the other direction": Line(
        "t5",
        "relative_position = torch.abs(relative_position)",
        "relative_position = torch.relu(relative_position)",
        "encoder.block.0.layer.0.SelfAttention",
    ),
    "t5: another residual": Line(
        "t5",
        "hidden_states = hidden_states + self.dropout(forwarded_states)",
        "hidden_states = hidden_states * 1.001 + self.dropout(forwarded_states)",
        "encoder.block.0.layer.1",
    ),
    "t5: the decoder output is scaled": Line(
        "t5",
        "        lm_logits = self.lm_head(sequence_output)",
        "        sequence_output = sequence_output * self.model_dim**-0.5\n"
        "        lm_logits = self.lm_head(sequence_output)",
        ".",
    ),
    "vit: no position embeddings": Line(
        "vit", "embeddings = embeddings + self.position_embeddings", "embeddings = embeddings * 1", "vit.embeddings"
    ),
    "vit: the class token comes last": Line(
        "vit",
        "embeddings = torch.cat((cls_tokens, embeddings), dim=1)",
        "embeddings = torch.cat((embeddings, cls_tokens), dim=1)",
        "vit.embeddings",
    ),
    "vit: another token is classified": Line(
        "vit", "pooled_output = sequence_output[:, 0, :]", "pooled_output = sequence_output[:, 1, :]", "."
    ),
    "vit: the residual is taken after the norm": Line(
        "vit",
        "hidden_states = hidden_states + residual",
        "hidden_states = hidden_states + self.layernorm_before(residual)",
        "vit.layers.0",
    ),
    "resnet: the shortcut is lost": Line(
        "resnet",
        "hidden_state += residual",
        "hidden_state += 0 * residual",
        "resnet.encoder.stages.0.layers.0",
    ),
    "resnet: something added after the norm": Line(
        "resnet",
        "hidden_state = self.normalization(hidden_state)",
        "hidden_state = self.normalization(hidden_state) + 0.01",
        "resnet.encoder.stages.1.layers.0.shortcut",
    ),
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_the_changed_line_is_named(line, tmp_path):
    a = build(line.model)
    b = copy_of(a, line.model, edited(line.model, line.old, line.new, tmp_path))
    found = compare(a, b, INPUTS[line.model])
    assert found.first is not None, found
    assert found.first.address == line.owner, found
    file, _, number = found.first.source.rpartition(":")
    assert file == str(tmp_path / f"modeling_{line.model}.py")
    changed = (tmp_path / f"modeling_{line.model}.py").read_text()
    begins = changed.index(line.new)
    span = range(changed.count("\n", 0, begins) + 1, changed.count("\n", 0, begins + len(line.new)) + 2)
    assert int(number) in span, (found.first, span)


@pytest.mark.parametrize("name", CONFIGS)
def test_two_equal_models_are_equal(name, tmp_path):
    a = build(name)
    b = copy_of(a, name)
    found = compare(a, b, INPUTS[name])
    assert found.equal and found.first is None
    assert {row.verdict for row in found} <= {"equal", "not compared"} and len(found) > 10
    assert not found.only_a and not found.only_b


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_is_rounding(name):
    model = build(name)
    found = compare(model, INPUTS[name], under=torch.bfloat16)
    assert found.first is None and not found.equal, found


@pytest.mark.parametrize("name", CONFIGS)
def test_rounding_of_gradients_is_rounding(name):
    model = build(name)

    def loss(output):
        return getattr(output, "logits", output[0]).double().square().mean()

    under = torch.float64 if name == "resnet" else torch.bfloat16  # in which more values of a pool are its largest
    found = compare(model, INPUTS[name], under=under, grad=True, loss=loss)
    assert found.first is None and not found.equal and not any(found.failed), found
    assert any(row.address.startswith("grad(") for row in found)


OPTIONS = {
    "gpt2: another epsilon": ("gpt2", dict(layer_norm_epsilon=1e-6), "transformer.h.0.ln_1"),
    "gpt2: another GELU": ("gpt2", dict(activation_function="gelu"), "transformer.h.0.mlp.act"),
    "llama: another epsilon": ("llama", dict(rms_norm_eps=1e-5), "model.layers.0.input_layernorm"),
    "llama: another base of the rotation": (
        "llama",
        dict(rope_parameters=dict(rope_theta=500000.0, rope_type="default")),
        "model.rotary_emb",
    ),
    "bert: another GELU": (
        "bert",
        dict(hidden_act="gelu_new"),
        "bert.encoder.layer.0.intermediate.intermediate_act_fn",
    ),
    "bert: another epsilon": ("bert", dict(layer_norm_eps=1e-5), "bert.embeddings.LayerNorm"),
    "vit: another epsilon": ("vit", dict(layer_norm_eps=1e-6), "vit.layers.0.layernorm_before"),
    "resnet: another activation": ("resnet", dict(hidden_act="leaky_relu"), "resnet.embedder.embedder.activation"),
}


@pytest.mark.parametrize(("name", "change", "owner"), OPTIONS.values(), ids=OPTIONS)
def test_another_option_is_named(name, change, owner):
    a = build(name)
    config = copy.deepcopy(CONFIGS[name])
    for key, value in change.items():
        setattr(config, key, value)
    found = compare(a, copy_of(a, name, config=config), INPUTS[name])
    assert found.first is not None and found.first.address == owner, found
    assert found.first.why


def quantised(weight):
    scale = weight.abs().max() / 127
    return (weight / scale).round() * scale


CHANGES = {
    "a transposed weight": (
        "gpt2",
        "transformer.h.1.attn.c_proj",
        lambda m: m.weight.data.copy_(m.weight.data.T.clone()),
    ),
    "one weight quantised": (
        "llama",
        "model.layers.1.mlp.up_proj",
        lambda m: m.weight.data.copy_(quantised(m.weight.data)),
    ),
    "dropout left on": ("bert", "bert.encoder.layer.1.output.dropout", lambda m: m.train()),
    "running averages": (
        "resnet",
        "resnet.encoder.stages.1.layers.0.shortcut.normalization",
        lambda m: m.running_mean.add_(0.1),
    ),
    "batch norm left in train mode": (
        "resnet",
        "resnet.encoder.stages.1.layers.1.layer.0.normalization",
        lambda m: m.train(),
    ),
    "one value of a bias": ("vit", "vit.layers.1.mlp.fc1", lambda m: m.bias.data[3].add_(0.01)),
    "an embedding": ("t5", "encoder.embed_tokens", lambda m: m.weight.data[5].mul_(1.01)),
}


@pytest.mark.parametrize(("name", "owner", "change"), CHANGES.values(), ids=CHANGES)
def test_another_weight_or_mode_is_named(name, owner, change):
    a = build(name)
    b = copy_of(a, name)
    change(b.get_submodule(owner))
    found = compare(a, b, INPUTS[name])
    assert found.first is not None and found.first.address == owner, found
    assert found.first.why


class InPlace(nn.Module):
    def __init__(self, inplace):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 8)

    def forward(self, x):
        h = self.up(x)
        return h + self.down(self.act(h))


def test_a_module_that_writes_into_what_it_is_given_is_named():
    a = InPlace(False)
    b = InPlace(True)
    b.load_state_dict(a.state_dict())
    found = compare(a, b, torch.randn(3, 8))
    assert found.first.address == "act"
    assert "writes into what it is given" in found.first.why[0]


def test_masks_of_another_dtype_are_the_same():
    model = build("gpt2")
    found = compare(model, INPUTS["gpt2"], under=torch.float16)
    assert found.first is None, found
