"""A tokenizer and sentences for TRL, with no download."""

import random

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

COLOURS = ("red", "green", "blue", "white")
THINGS = ("house", "car", "tree", "bird", "ship")
WORDS = ("the", "is", "what", "colour", "?", ".", *COLOURS, *THINGS)


def tokenizer():
    vocabulary = {word: k for k, word in enumerate(("<pad>", "<eos>", "<unk>", *WORDS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def pairs(count):
    """A question and its answer: each thing has a colour."""
    for _ in range(count):
        k = random.randrange(len(THINGS))
        yield f"what colour is the {THINGS[k]} ?", f" the {THINGS[k]} is {COLOURS[k % 4]} ."


def causal(size):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
    )
