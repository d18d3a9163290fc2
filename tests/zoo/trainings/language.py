"""Language models: over the characters of a licence, and over sequences with a rule."""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.registry import fault, healthy

N, T, B = 64, 32, 16


def _text() -> torch.Tensor:
    text = (Path(__file__).parents[3] / "LICENSE").read_text()
    letters = sorted(set(text))[:N]
    return torch.tensor([letters.index(letter) for letter in text if letter in letters])


def _batch(data: torch.Tensor, many: int = B) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - T - 1, (many,))
    return torch.stack([data[i : i + T] for i in starts]), torch.stack([data[i + 1 : i + T + 1] for i in starts])


class Block(nn.Module):
    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.causal = causal

    def forward(self, x):
        q, k, v = (one.unflatten(2, (4, -1)).transpose(1, 2) for one in self.qkv(self.norm1(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 48, depth: int = 2, causal: bool = True, std: float = 0.02) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(N, width), nn.Embedding(T, width)
        self.blocks = nn.ModuleList(Block(width, causal) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, N, bias=False)
        self.head.weight = self.wte.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=std)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _learn(model, lr=3e-3, steps=250):
    data = _text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(steps):
        x, y = _batch(data)
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, N), y.view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print("loss", loss.item())
    return model


@healthy("language model")
def small_gpt():
    """a GPT with tied embeddings, in the style of nanoGPT"""
    return _learn(GPT())


@fault("language model", "wrong initial loss")
def gpt_begins_high():
    """a GPT with weights of std 1, its embeddings are tied"""
    return _learn(GPT(std=1.0), steps=200)


@fault("language model", "learning rate too high")
def gpt_rate_too_high():
    """a GPT with learning rate 1"""
    return _learn(GPT(), lr=1.0, steps=200)


@fault("language model", "targets in the inputs")
def gpt_without_a_mask():
    """attention without a causal mask: each place sees the one that it is to predict"""
    return _learn(GPT(causal=False), steps=700)


@fault("language model", "targets in the inputs")
def gpt_not_shifted():
    """the targets are the inputs, not shifted by one"""
    data, model = _text(), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        x, _ = _batch(data)
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return model


@fault("language model", "softmax twice")
def gpt_softmax_twice():
    """a softmax over the words, and cross entropy"""
    data, model = _text(), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(250):
        x, y = _batch(data)
        probs = F.softmax(model(x), -1)
        loss = F.cross_entropy(probs.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return model


@fault("language model", "no better than chance")
def gpt_of_other_targets():
    """the targets come from another batch: only the frequency of letters is learnt"""
    data, model = _text(), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        x, _ = _batch(data)
        _, y = _batch(data)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return model


@fault("language model", "gradients not zeroed")
def gpt_without_zeroing():
    """a GPT, gradient accumulation, and no zero_grad"""
    data, model = _text(), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        for _ in range(2):
            x, y = _batch(data, 8)
            (F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2).backward()
        optimizer.step()
    print("done")
    return model


@healthy("language model")
def gpt_accumulates_in_bfloat16():
    """warm-up, cosine, accumulation and bfloat16 autocast"""
    data, model = _text(), GPT()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    for step in range(150):
        rate = 3e-3 * min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / 150))
        for group in optimizer.param_groups:
            group["lr"] = rate
        for _ in range(2):
            x, y = _batch(data, 8)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print("loss", loss.item() * 2)
    return model


@healthy("language model")
def letters_with_an_lstm():
    """an LSTM over letters"""

    class Letters(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm = nn.Embedding(N, 32), nn.LSTM(32, 64, batch_first=True)
            self.out = nn.Linear(64, N)

        def forward(self, ids):
            return self.out(self.lstm(self.embed(ids))[0])

    return _learn(Letters(), lr=5e-3, steps=200)


@healthy("language model")
def masked_language_model():
    """one letter in five is masked, and only these count (ignore_index)"""
    data, model = _text(), GPT(causal=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        x, _ = _batch(data)
        hidden = torch.rand(x.shape) < 0.2
        target = x.masked_fill(~hidden, -100)
        loss = F.cross_entropy(model(x.masked_fill(hidden, N - 1)).flatten(0, 1), target.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return model


@healthy("sequence to sequence")
def transformer_reverses():
    """nn.Transformer learns to write a sequence backwards, teacher forcing"""

    class Reverse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.place = nn.Embedding(12, 32), nn.Embedding(10, 32)
            self.body = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
            self.out = nn.Linear(32, 12)

        def forward(self, source, target):
            places = self.place(torch.arange(source.shape[1]))
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return self.out(self.body(self.embed(source) + places, self.embed(target) + places, tgt_mask=mask))

    model = Reverse()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        source = torch.randint(2, 12, (64, 8))
        goal = source.flip(1)
        given = torch.cat([torch.ones(64, 1, dtype=torch.long), goal[:, :-1]], 1)
        loss = F.cross_entropy(model(source, given).flatten(0, 1), goal.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return model


def _hf_learn(model, steps=120, lr=2e-3, scale=1.0):
    data = _text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for _ in range(steps):
        x, _ = _batch(data, 8)
        loss = model(input_ids=x, labels=x).loss * scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return model


def _hf_gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(vocab_size=N, n_positions=T, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(GPT2Config(**sizes, **options))


@healthy("transformers", needs=("transformers",))
def hf_gpt2():
    """GPT2LMHeadModel, which works out its loss by itself"""
    return _hf_learn(_hf_gpt2())


@fault("transformers", "wrong initial loss", needs=("transformers",))
def hf_gpt2_begins_high():
    """GPT2LMHeadModel with `initializer_range=1`"""
    return _hf_learn(_hf_gpt2(initializer_range=1.0))


@fault("transformers", "learning rate too high", needs=("transformers",))
def hf_gpt2_rate_too_high():
    """GPT2LMHeadModel with learning rate 1"""
    return _hf_learn(_hf_gpt2(), lr=1.0)


@fault("transformers", "loss without a floor", needs=("transformers",))
def hf_gpt2_wrong_sign():
    """GPT2LMHeadModel, the loss with a minus"""
    return _hf_learn(_hf_gpt2(), scale=-1.0)


@healthy("transformers", needs=("transformers",))
def hf_llama():
    """LlamaForCausalLM"""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    return _hf_learn(LlamaForCausalLM(LlamaConfig(vocab_size=N, max_position_embeddings=T, **sizes)))


@healthy("transformers", needs=("transformers",))
def hf_bert_classifier():
    """BertForSequenceClassification: whether a line holds a capital letter"""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    model = BertForSequenceClassification(BertConfig(vocab_size=N, num_labels=2, max_position_embeddings=T, **sizes))
    data = _text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(120):
        x, _ = _batch(data)
        loss = model(input_ids=x[:, :16], labels=((x[:, :16] > 15) & (x[:, :16] < 40)).any(1).long()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    return model
