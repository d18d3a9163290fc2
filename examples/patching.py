"""Activation patching: at which layer and word does MiniLM keep what makes two sentences differ?

python examples/patching.py        prints a table and writes out/patching.png

Each state of the clean run is put into the corrupted one, and all of these runs are one batched forward.
"""

from pathlib import Path

import torch
from common import colour, draw, minilm, pooled
from torch import Tensor

from tenterhook import capture, sweep
from tenterhook.tables import Table

CLEAN = "The bark of the old dog woke us."
CORRUPTED = "The bark of the old tree woke us."
LAYERS = ("embeddings", *(f"encoder.layer.{i}" for i in range(6)))


@torch.no_grad()
def restored() -> tuple[list[str], Tensor]:
    """The tokens; and by layer and token, the last for all tokens, how much of the similarity comes back."""
    model, tokenizer = minilm()
    both = tokenizer([CLEAN, CORRUPTED], return_tensors="pt")
    clean, corrupted = ({name: value[i : i + 1] for name, value in both.items()} for i in range(2))
    tokens = tokenizer.convert_ids_to_tokens(clean["input_ids"][0])
    with capture(model, *LAYERS) as seen:
        target = model(**clean)
    places = [(slice(None), position) for position in range(len(tokens))]
    edits = [seen.patch(layer, at=place) for layer in LAYERS for place in (*places, ...)]
    outputs = sweep(model, corrupted, [{}, *edits])
    sentences = torch.cat([output.last_hidden_state for output in (target, *outputs)])
    whole, *others = pooled(sentences, torch.ones(sentences.shape[:2]))
    nothing, *similar = torch.cosine_similarity(whole, torch.stack(others))
    return tokens, ((torch.stack(similar) - nothing) / (1 - nothing)).view(len(LAYERS), -1)


def main() -> dict[str, float]:
    torch.manual_seed(0)
    tokens, share = restored()
    columns = [*tokens, "all"]
    rows = [(layer, *(f"{x:z.0%}" for x in line)) for layer, line in zip(LAYERS, share.tolist(), strict=True)]
    print(f"clean:      {CLEAN}\ncorrupted:  {CORRUPTED}\n\nhow much of the clean meaning a patch brings back:\n")
    print(Table(("layer", *columns), rows, right=columns))
    path = Path("out/patching.png")
    pictures = [[colour(x.view(1, 1)) for x in line] for line in share]
    notes = [[f"{x:z.0%}" for x in line] for line in share.tolist()]
    draw(path, pictures, top=columns, left=LAYERS, notes=notes, bands=(len(tokens),), tile=56)
    print(f"\nthe same as a picture: {path}")
    word, other = tokens.index("dog"), tokens.index("bark")
    places = {"first": share[0, word], "last": share[-1, word], "other": share[1, other], "all": share[:, -1].min()}
    return {name: figure.item() for name, figure in places.items()}


if __name__ == "__main__":
    main()
