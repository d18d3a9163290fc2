"""Attention patterns of a model that runs fused kernels, where no such pattern exists; heads that see the word before.

python examples/attention.py        prints a table and writes out/attention.png

The probabilities are computed beside each kernel from its own arguments; the model goes on with what the kernel gave.
"""

from pathlib import Path

import torch
from common import colour, draw, minilm
from torch import Tensor

from tenterhook import capture
from tenterhook.tables import Table

SENTENCE = "The bark of the old dog that lives next door woke us again this morning."
KINDS = {"word before": -1, "itself": 0, "word after": 1}


@torch.no_grad()
def patterns() -> tuple[Tensor, bool]:
    """The probabilities by layer, head, token and token; whether the model's output stayed the same."""
    model, tokenizer = minilm()
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    plain = model(**inputs).last_hidden_state
    with capture(model, "**/**/probabilities") as seen:
        watched = model(**inputs).last_hidden_state
    return torch.cat([seen[address] for address in seen]), torch.equal(plain, watched)


def share(pattern: Tensor, step: int) -> float:
    """How much a head looks from each word to the one that many steps away."""
    words = pattern[1:-1, 1:-1]  # without the two special tokens
    return words.diagonal(step).mean().item()


def main() -> dict[str, float]:
    torch.manual_seed(0)
    found, same = patterns()
    layers, heads = found.shape[:2]
    best, rows, figures = [], [], {"same output": float(same), "rows": found.sum(-1).sub(1).abs().max().item()}
    for kind, step in KINDS.items():
        shares = {(i, j): share(found[i, j], step) for i in range(layers) for j in range(heads)}
        layer, head = max(shares, key=shares.__getitem__)
        typical = sorted(shares.values())[len(shares) // 2]
        rows.append((kind, f"encoder.layer.{layer}", str(head), f"{shares[layer, head]:.0%}", f"{typical:.0%}"))
        best.append(found[layer, head])
        figures |= {kind: shares[layer, head], f"{kind}, a typical head": typical}
    print(f"{SENTENCE}\n{layers} layers of {heads} heads; the model's output is the same to the bit: {same}\n")
    print(
        Table(("looks at", "layer", "head", "share", "a typical head"), rows, right=("head", "share", "a typical head"))
    )
    path = Path("out/attention.png")
    draw(path, [[colour(pattern.sqrt()) for pattern in best]], top=list(KINDS), left=["rows look at columns"], tile=260)
    print(f"\nthese three heads as pictures: {path}")
    return figures


if __name__ == "__main__":
    main()
