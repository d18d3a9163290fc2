"""Models of transformers with one line of their source changed, so that the right answer is known."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers as hf
from torch import nn

SIZES = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
CONFIGS = {
    "gpt2": hf.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1, use_cache=False
    ),
    "llama": hf.LlamaConfig(vocab_size=50, use_cache=False, **SIZES),
    "bert": hf.BertConfig(vocab_size=50, **SIZES),
    "t5": hf.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, use_cache=False
    ),
    "vit": hf.ViTConfig(image_size=32, patch_size=16, **SIZES),
    "resnet": hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16], depths=[1, 2, 1], layer_type="basic"),
}
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "resnet": "ResNetForImageClassification",
}
IDS = torch.randint(2, 50, (2, 6), generator=torch.Generator().manual_seed(0))
TEXT = dict(input_ids=IDS, attention_mask=torch.ones_like(IDS).index_fill_(1, torch.tensor(0), 0))
IMAGE = dict(pixel_values=torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
INPUTS = {
    "gpt2": TEXT,
    "llama": TEXT,
    "bert": TEXT,
    "t5": dict(TEXT, decoder_input_ids=IDS[:, :3]),
    "vit": IMAGE,
    "resnet": IMAGE,
}


class Line(NamedTuple):
    """A line of the source, what it becomes, and the module that is then the first."""

    model: str
    old: str
    new: str
    owner: str


def source_of(name: str) -> Path:
    return Path(hf.__file__).parent / "models" / name / f"modeling_{name}.py"


def build(name: str, config: Any = None, home: Any = None) -> nn.Module:
    """A model with weights that are neither all alike nor tiny."""
    config = CONFIGS[name] if config is None else config
    config._attn_implementation = "eager"
    model = getattr(home or hf, CLASSES[name])(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        for part, buffer in model.named_buffers():
            if "running" in part:
                buffer.add_(torch.rand(buffer.shape, generator=generator))
    return model.eval()


def edited(name: str, old: str, new: str, folder: Path) -> Any:
    """The module of a model with one piece of its source replaced, as a file that has lines."""
    text = source_of(name).read_text()
    assert text.count(old) >= 1, f"{name} has no {old!r}"
    file = folder / f"modeling_{name}.py"
    file.write_text(text.replace(old, new, 1))
    full = f"transformers.models.{name}.edited_{abs(hash((old, new)))}"
    spec = importlib.util.spec_from_file_location(full, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


def copy_of(model: nn.Module, name: str, home: Any = None, config: Any = None) -> nn.Module:
    """The same weights in another class."""
    other = build(name, config, home)
    other.load_state_dict(model.state_dict())
    return other.eval()
