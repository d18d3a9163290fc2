"""Steering: a direction between two sets of sentences, added to MiniLM's hidden states, or taken out of them.

python examples/steering.py        prints two tables and writes out/steering.safetensors

The edit that steers is data: it is saved to a file, and what is loaded from there does exactly the same.
"""

from pathlib import Path

import torch
from common import minilm, pooled
from torch import Tensor

from tenterhook import capture, edit, load_edits
from tenterhook.changes import add, project_out
from tenterhook.tables import Table

LAYER = "encoder.layer.3"
GOOD = ("I love this film.", "What a wonderful meal!", "The hotel was excellent.", "She is happy with her new job.")
BAD = ("I hate this film.", "What an awful meal!", "The hotel was terrible.", "She is unhappy with her new job.")
OTHERS = (
    ("The concert was great.", "The concert was bad."),
    ("He enjoys the rain.", "He dislikes the rain."),
    ("My phone works well.", "My phone works badly."),
)
ABOUT = "They read the book on the train."
SHELF = (
    "The book was a joy to read.",
    "The book was dreadful to read.",
    "They had a book with them on the train.",
    "The train ride was delightful.",
    "The train ride was a nightmare.",
)


@torch.no_grad()
def embed(*sentences: str, at: str = ".:out[last_hidden_state]") -> Tensor:
    """The mean state of each sentence at an address; at the end, its embedding."""
    model, tokenizer = minilm()
    batch = tokenizer(list(sentences), padding=True, return_tensors="pt")
    return pooled(capture.once(model, dict(batch), at), batch["attention_mask"])


def main() -> dict[str, float]:
    torch.manual_seed(0)
    model, _ = minilm()
    direction = (embed(*GOOD, at=LAYER) - embed(*BAD, at=LAYER)).mean(0)
    good, bad, shelf = embed(*GOOD).mean(0), embed(*BAD).mean(0), embed(*SHELF)
    figures, rows = {}, []
    for times in (-4, -2, -1, 0, 1, 2, 4):
        with edit(model, {LAYER: add(direction, times)}) as steered:
            there = embed(ABOUT)
        mood = torch.cosine_similarity(there, good, 1) - torch.cosine_similarity(there, bad, 1)
        figures[f"mood {times:+d}"] = mood.item()
        rows.append((f"{times:+d}", f"{mood.item():+.3f}", SHELF[torch.cosine_similarity(there, shelf).argmax()]))
    header = ("times", "nearer to good than to bad", "nearest sentence")
    print(f"“{ABOUT}”, steered at {LAYER}:\n\n{Table(header, rows, right=header[:2])}\n")
    file = Path("out/steering.safetensors")
    file.parent.mkdir(parents=True, exist_ok=True)
    steered.save(file)
    with edit(model, load_edits(file)):
        figures["loaded"] = float(torch.equal(embed(ABOUT), there))
    print(f"{load_edits(file)} from {file}: {'the same' if figures['loaded'] else 'another'} embedding\n")
    columns = []
    for changes in ({}, {LAYER: project_out(direction)}):
        with edit(model, changes):
            columns.append([torch.cosine_similarity(*embed(*pair), dim=0).item() for pair in OTHERS])
    rows = [(*pair, f"{a:.3f}", f"{b:.3f}") for pair, a, b in zip(OTHERS, *columns, strict=True)]
    figures["closer"] = min(b - a for a, b in zip(*columns, strict=True))
    header = ("a sentence", "its opposite", "similarity", "with the direction projected out")
    print(Table(header, rows, right=header[2:]))
    return figures


if __name__ == "__main__":
    main()
