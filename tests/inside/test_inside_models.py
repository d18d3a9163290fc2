"""The inside of real models: every operation has a name, the same ones every time, and the values are right.

What is right is told by a tracer, which looks at the variables of every forward line by line, and by the models' own
`output_attentions`.
"""

import os
import random
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tenterhook import capture, edit, sites
from tenterhook.addresses.sites import resolve
from tenterhook.changes import zero
from tenterhook.hooks.session import Session
from tenterhook.inside.operation import NO_VALUES, name_of
from tenterhook.values.tree import leaves
from tenterhook.verbs.sites import _Describe
from tenterhook.verbs.taps import tap_for
from tests.test_real_models import IDS, IMAGE, RESNET, SIZES, T5

SMALL = dict(SIZES, num_hidden_layers=2)
TEXT = dict(input_ids=IDS)
GPT2 = dict(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1)
GROUPED = dict(SMALL, num_attention_heads=4, num_key_value_heads=2, vocab_size=50)
SWIN = dict(image_size=32, patch_size=2, embed_dim=8, depths=[1, 2], num_heads=[1, 2], window_size=4)
MAMBA = hf.MambaConfig(num_hidden_layers=2, hidden_size=16, vocab_size=50, state_size=4)
CASES = {
    "gpt2 eager": (hf.GPT2LMHeadModel, hf.GPT2Config(attn_implementation="eager", **GPT2), TEXT),
    "gpt2 sdpa": (hf.GPT2LMHeadModel, hf.GPT2Config(attn_implementation="sdpa", **GPT2), TEXT),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED), TEXT),
    "bert": (hf.BertModel, hf.BertConfig(vocab_size=50, **SMALL), TEXT),
    "t5": (hf.T5Model, T5, dict(TEXT, decoder_input_ids=IDS[:, :3])),
    "vit": (hf.ViTModel, hf.ViTConfig(image_size=32, patch_size=16, **SMALL), IMAGE),
    "mamba": (hf.MambaForCausalLM, MAMBA, TEXT),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig(num_local_experts=4, **GROUPED), TEXT),
    "resnet": (hf.ResNetModel, RESNET, IMAGE),
    "swin": (hf.SwinModel, hf.SwinConfig(**SWIN), IMAGE),
}


@pytest.fixture(params=CASES)
def case(request):
    make, config, inputs = CASES[request.param]
    torch.manual_seed(0)
    return make(config).eval(), inputs


class Everything(TorchFunctionMode):
    """Keeps every tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if name_of(func) not in NO_VALUES:
            self.made += [tensor for _, tensor in leaves(out)]
        return out


def test_every_operation_has_a_name_and_the_same_one_every_time(case):
    model, inputs = case
    seen = {}

    class Keep(_Describe):
        def on_value(self, tap, value, call):
            super().on_value(tap, value, call)
            seen.update((id(tensor), tensor) for _, tensor in leaves(value))

    everything = Everything()
    session = Session(model, verb="capture")
    session.taps = [tap_for(site, session.scope, Keep) for site in resolve(model, "**/**")]
    with torch.no_grad(), everything, session:
        model(**inputs)
    assert len(everything.made) > 20
    assert [tensor.shape for tensor in everything.made if id(tensor) not in seen] == []
    listed = [[str(site) for site in sites(model, inputs)] for _ in range(2)]
    assert listed[0] == listed[1]
    assert {str(tap.site) for tap in session.shown_taps() if tap.fired} <= set(listed[0])


def test_asking_for_one_name_gives_what_asking_for_all_does(case):
    model, inputs = case
    with torch.no_grad():
        with capture(model, "**/**") as everything:
            model(**inputs)
        addresses = [str(tap.site) for tap in everything._reached()]
        made = {str(tap.site) for tap in everything._taps if "empty" not in tap.site.text}  # that is never the same
        for address in random.Random(0).sample([address for address in addresses if address in made], 15):
            with capture(model, address) as one:
                model(**inputs)
            ours, theirs = one.calls(address), everything.calls(address)
            assert len(ours) == len(theirs)
            for (_, a), (_, b) in zip(leaves(ours), leaves(theirs), strict=True):
                assert torch.equal(a, b)
        with capture(model, *addresses) as together:
            model(**inputs)
    assert [str(tap.site) for tap in together._reached()] == addresses
    assert list(together) == list(everything)


def traced(model, inputs):
    """By module and variable: the tensors that were assigned in its forward, one after the other."""
    names = {id(module): name or "." for name, module in model.named_modules()}
    found = {}

    def start(frame, event, argument):
        module = frame.f_locals.get("self")
        if (
            frame.f_code.co_name != "forward"
            or id(module) not in names
            or "site-packages/torch/" in frame.f_code.co_filename
        ):
            return None
        last = dict(frame.f_locals)

        def look(frame, event, argument):
            for name, value in frame.f_locals.items():
                if isinstance(value, Tensor) and value is not last.get(name):
                    found.setdefault((names[id(module)], name), []).append(value.clone())
                last[name] = value
            return look

        return look

    before = sys.gettrace()
    sys.settrace(start)
    try:
        model(**inputs)
    finally:
        sys.settrace(before)
    return found


def test_values_are_what_a_tracer_finds_in_the_variables(case):
    model, inputs = case
    with torch.no_grad():
        truth = traced(model, inputs)
        with capture(model, *(f"{module}/{name}" for module, name in truth)) as seen:
            model(**inputs)
    assert len(truth) > 8
    unseen = []
    for (module, name), wanted in truth.items():
        address = f"{module}/{name}"
        ours = iter(seen.calls(address) if address in seen else [])
        for value in wanted:  # in this order; ours may have more, for we see several assignments in a line
            if not any(isinstance(own, Tensor) and torch.equal(own, value) for own in ours):
                unseen.append(address)
    assert not unseen, unseen


@pytest.mark.parametrize("name", ["gpt2 eager", "llama", "bert", "t5", "vit", "swin"])
def test_attention_weights_are_what_the_model_says(name):
    make, config, inputs = CASES[name]
    config = type(config)(**{**config.to_dict(), "attn_implementation": "eager"})
    model = make(config).eval()
    with torch.no_grad():
        own = model(**inputs, output_attentions=True)
        with capture(model, "**/attn_weights", "**/attention_probs", "**/**/attn_weights") as seen:
            model(**inputs, output_attentions=True)
    own = [
        *(own.get("attentions") or ()),
        *(own.get("decoder_attentions") or ()),
        *(own.get("encoder_attentions") or ()),
    ]
    captured = [value for address in seen for value in seen.calls(address)]
    assert own
    assert all(any(a.shape == b.shape and torch.equal(a, b) for b in captured) for a in own)


def test_attention_weights_can_be_edited_where_they_are_made_and_where_they_are_returned():
    make, config, inputs = CASES["gpt2 eager"]
    model = make(config).eval()

    def run():
        with torch.no_grad():
            out = model(**inputs, output_attentions=True)
        return out.logits if "logits" in out else out.last_hidden_state, out.attentions

    plain, weights = run()
    with edit(model, {"**.0.attn/attn_weights": zero()}) as edits:  # of what the helper returned, which used it before
        hidden, returned = run()
    assert edits.report().silent == [] and torch.equal(hidden, plain)
    assert not returned[0].any() and torch.equal(returned[1], weights[1])
    with edit(model, {"**.0.attn/eager_attention_forward/attn_weights": zero()}):
        assert not torch.allclose(run()[0], plain)


def test_probabilities_beside_the_fused_kernel_are_those_of_the_eager_model():
    torch.manual_seed(0)
    fused = hf.LlamaForCausalLM(hf.LlamaConfig(attn_implementation="sdpa", **GROUPED)).eval()
    eager = hf.LlamaForCausalLM(hf.LlamaConfig(attn_implementation="eager", **GROUPED)).eval()
    eager.load_state_dict(fused.state_dict())
    with torch.no_grad():
        plain = fused(**TEXT).logits
        own = eager(**TEXT, output_attentions=True).attentions
        with capture(fused, "**/**/probabilities") as seen:
            assert torch.equal(fused(**TEXT).logits, plain)
    ours = [seen[address] for address in seen]
    assert len(ours) == 2
    for a, b in zip(ours, own, strict=True):
        torch.testing.assert_close(a, b)
