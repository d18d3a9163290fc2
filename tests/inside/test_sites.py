"""sites: the list of what is inside."""

from pathlib import Path

import torch

from tenterhook import capture, sites
from tests.inside import models
from tests.inside.models import Noisy, Residual, X, helper


def test_sites_with_inputs_lists_what_is_inside():
    model = Residual()
    model.train()
    rng, buffers = torch.get_rng_state(), [b.clone() for b in model.buffers()]
    table = sites(model, X)
    rows = {str(site): site for site in table}
    inside = "y h#0 h#1 helped/scaled s a b mul z#0 kept sin z#1 z#2 clone out tanh"
    assert list(rows) == [".", *(f"./{name}" for name in inside.split()), "fc", "fc/linear"]
    assert rows["./y"].seen == "3×4 float32" and rows["./y"].text == "y = x + 2"
    file, _, line = rows["./y"].source.rpartition(":")
    assert file == models.__file__ and "y = x + 2" in Path(file).read_text().splitlines()[int(line) - 1]
    assert rows["./s"].text == "s = self.helped(h)" and rows["./kept"].text == "kept = z"
    text = str(table)
    assert "models.py" in text and "y = x + 2" in text
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert [str(s) for s in sites(model, X, match="./h")] == ["./h#0", "./h#1"]
    for site in table:  # what is listed can be asked for
        if site.kind == "inner":
            assert str(site) in capture_once(model, str(site))
    assert [str(s) for s in sites(helper, X)] == ["q", "add"]


def capture_once(model, address):
    with capture(model, address) as seen:
        model(X)
    return seen


def test_sites_leaves_batch_norm_and_random_states_alone():
    model = Noisy()
    before = [b.clone() for b in model.buffers()]
    rng = torch.get_rng_state()
    assert len(sites(model, X)) > 8
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert torch.equal(rng, torch.get_rng_state())
