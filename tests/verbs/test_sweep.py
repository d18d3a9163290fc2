"""sweep: many edits in one forward, equal to one run each, and refused where rows are not independent."""

import itertools
import math

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, DynamicCache, GPT2Config, GPT2LMHeadModel

from tenterhook import EditError, TenterhookWarning, capture, edit, sweep
from tenterhook.changes import add, at, noise, project_out, scale, zero


def one_by_one(model, inputs, edits):
    out = []
    for changes in edits:
        with edit(model, changes):
            if isinstance(inputs, dict):
                out.append(model(**inputs))
            else:
                out.append(model(*inputs) if isinstance(inputs, tuple) else model(inputs))
    return out


def check(model, inputs, edits, **options):
    together = sweep(model, inputs, edits, **options)
    apart = one_by_one(model, inputs, edits)
    assert len(together) == len(apart) == len(edits)
    for a, b in zip(together, apart, strict=True):
        assert type(a) is type(b)
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    return together


def test_64_edits_of_gpt2_equal_64_runs():
    config = GPT2Config(n_layer=4, n_head=4, n_embd=32, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 50, (2, 7))
    where = [(layer, head) for layer in range(4) for head in range(4)]
    edits = [{f"transformer.h.{i}.attn.c_proj:in": at((..., slice(8 * j, 8 * j + 8)), zero())} for i, j in where]
    edits += [{f"transformer.h.{i}.mlp": scale(j / 4)} for i, j in where]
    edits += [{f"transformer.h.{i}": at((slice(None), j), add(torch.ones(32)))} for i, j in where if j < 4]
    edits += [
        {"transformer.h.*.ln_1": lambda v, site: v * 0.5, f"transformer.h.{i}.attn": project_out(torch.randn(32))}
        for i in range(4)
    ]
    edits += [{"transformer.wte": noise(0.1, seed=k), "transformer.drop:in": add(0.1)} for k in range(11)] + [{}]
    assert len(edits) == 64
    with torch.no_grad():
        out = sweep(model, {"input_ids": ids, "use_cache": False}, edits)
        apart = one_by_one(model, {"input_ids": ids, "use_cache": False}, edits)
        for a, b in zip(out, apart, strict=True):
            torch.testing.assert_close(a.logits, b.logits, atol=2e-5, rtol=1e-4)
        assert sum(not torch.equal(o.logits, out[-1].logits) for o in out) == 63
        torch.testing.assert_close(out[-1].logits, model(ids).logits, atol=2e-5, rtol=1e-4)


def test_masks_and_keyword_inputs():
    model = BertModel(
        BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50)
    ).eval()
    ids = torch.randint(0, 50, (3, 6))
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[1, 4:] = 0
    edits = [{"encoder.layer.0": scale(k)} for k in (0.0, 0.5, 2.0)]
    with torch.no_grad():
        out = sweep(model, {"input_ids": ids, "attention_mask": mask}, edits)
        for a, b in zip(out, one_by_one(model, {"input_ids": ids, "attention_mask": mask}, edits), strict=True):
            torch.testing.assert_close(a.pooler_output, b.pooler_output, atol=2e-5, rtol=1e-4)


class SeqFirst(nn.Module):
    """Rows are the second dimension inside, and folded with heads in one place."""

    def __init__(self):
        super().__init__()
        self.lstm, self.fold, self.head = nn.LSTM(4, 4), nn.Identity(), nn.Linear(4, 2)

    def forward(self, x):
        out, _ = self.lstm(x.transpose(0, 1))
        out = self.fold(out.transpose(0, 1).reshape(-1, 4)).view(len(x), -1, 4)
        return self.head(out), {"mean": out.mean(1)}


@pytest.mark.parametrize("steps", [2, 3, 6])  # with 6 rows in all, 6 steps look like rows
def test_rows_in_other_dimensions(steps):
    x = torch.randn(2, steps, 4)
    edits = [{"lstm[0]": scale(0.5)}, {"fold": at((..., 0), zero())}]
    check(SeqFirst(), x, edits)


def test_several_arguments_tuples_calls_and_chunks():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = nn.Linear(3, 3)

        def forward(self, x, y, flag):
            for _ in range(3):
                x = self.step(x).tanh() + y if flag else x
            return (x, x.sum(-1))

    model, x = Model(), torch.randn(5, 3)
    edits = [
        {"step@1": zero()},
        {"step": scale(2.0)},
        {"step:in": add(1.0)},
        {},
        {"step@0": 1.0, "step@2": lambda v: v * 3},
    ]
    for at_once in (None, 1, 2, 5, 100):
        check(model, (x, torch.randn(3), True), edits, at_once=at_once)


def test_patches_are_swept_too():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    clean, other = torch.randn(4, 3), torch.randn(4, 3)
    with capture(model, "0", "1") as seen:
        model(other)
    out = check(model, clean, [seen.patch("0"), seen.patch("1"), seen.patch("0", at=(slice(None), 1))])
    torch.testing.assert_close(out[0], model(other))


def test_gradients_flow_through_a_sweep():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
    edits = [{"0": scale(2.0)}, {"0": add(1.0)}]
    truth = torch.autograd.grad(sum(o.sum() for o in one_by_one(model, x, edits)), x)[0]
    torch.testing.assert_close(torch.autograd.grad(sum(o.sum() for o in sweep(model, x, edits)), x)[0], truth)


def test_rows_that_are_not_independent_are_refused():
    x = torch.randn(4, 3)
    norm = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(EditError, match=r"1 \(BatchNorm1d\) normalises over the rows.*eval\(\)"):
        sweep(norm, x, [{"0": zero()}])
    check(norm.eval(), x, [{"0": zero()}])
    untracked = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval()
    with pytest.raises(EditError, match="normalises over the rows"):
        sweep(untracked, x, [{"0": zero()}])
    with pytest.raises(EditError, match=r"1 \(Dropout\) is in training mode"):
        sweep(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), x, [{"0": zero()}])

    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(3, 3)

        def forward(self, x):
            h = self.f(x)
            return h - h.mean(0)

    with pytest.raises(EditError, match="rows are not independent in this model: the same inputs come out different"):
        sweep(Mixes(), x, [{"f": scale(5.0)}])


def test_what_has_no_rows_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.position, self.f = nn.Embedding(3, 3), nn.Linear(3, 3)

        def forward(self, x, loss=False):
            out = self.f(x + self.position(torch.arange(3)))
            return out.mean() if loss else out

    model, x = Model(), torch.randn(4, 3, 3)
    with pytest.raises(EditError, match=r"its value is not per row \(3×3 float32\).*position@0"):
        sweep(model, x, [{"position": zero()}])
    with pytest.raises(EditError, match=r"the model's output \(scalar float32\) is not per row"):
        sweep(model, (x, True), [{"f": zero()}])
    with pytest.raises(EditError, match=r"f.weight: a parameter is shared by all rows"):
        sweep(model, x, [{"f.weight": zero()}])
    with pytest.raises(EditError, match=r"grad\(f\): a sweep is a forward pass"):
        sweep(model, x, [{"grad(f)": zero()}])
    with pytest.raises(EditError, match="made 4×3×2 float32 of 4×3×3 float32"):
        sweep(model, x, [{"f": lambda v: v[..., :2]}])
    with pytest.raises(TypeError, match="a list of edits"):
        sweep(model, x, {"f": zero()})
    with pytest.raises(TypeError, match="no tensor among them"):
        sweep(model, (1, 2), [{"f": zero()}])
    with pytest.raises(EditError, match=r"f@1 was never edited: .*\(edit 0 of the list\)\n  strict=False"):
        sweep(model, x, [{"f@1": zero()}])


def test_no_edits_is_no_forward_too_many():
    assert sweep(nn.Linear(2, 2), torch.randn(1, 2), []) == []


# Found by trying to break it


def test_rows_that_depend_on_later_ones_are_refused_too():
    class Togo(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(3, 3)

        def forward(self, x):
            return self.f(x).flip(0).cumsum(0).flip(0)

    class Weakly(Togo):
        def forward(self, x):
            h = self.f(x)
            return h - 1e-2 * h.mean(0) + 1

    for model in (Togo(), Weakly()):
        with pytest.raises(EditError, match="rows are not independent"):
            sweep(model, torch.randn(4, 3), [{"f": scale(3.0)}, {}])


def test_each_edit_makes_its_changes_in_the_order_written():
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    both = {"0": scale(2.0), "*": add(1.0)}, {"*": add(1.0), "0": scale(2.0)}
    check(model, x, [*both, {"0@0": scale(3.0), "0": add(1.0)}, {"0": add(1.0), "0@0": scale(3.0)}])
    with pytest.raises(ValueError, match="at_once is how many edits go into one forward, got -1"):
        sweep(model, x, both, at_once=-1)


def test_a_cache_of_all_rows_is_not_handed_out():
    config = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=10, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        out = sweep(model, torch.zeros(1, 3, dtype=torch.long), [{"transformer.h.0": zero()}])
    assert repr(out[0].past_key_values) == "<DynamicCache: not a tensor, not kept>"


def test_one_of_several_calls_that_never_comes():
    model = nn.Sequential(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    with pytest.raises(EditError, match=r"0@1 was never edited: that call never came \(edit 1 of the list\)"):
        sweep(model, x, [{"0": zero()}, {"0@1": zero()}])
    with pytest.warns(TenterhookWarning, match="0@1 was never edited: that call never came"):
        _, clean = sweep(model, x, [{"0": zero()}, {"0@1": zero()}], strict=False)
    torch.testing.assert_close(clean, model(x))


class Fold(nn.Module):
    """Rows are folded with something else, in the order of the rows or in another."""

    def __init__(self, fold, unfold):
        super().__init__()
        self.fold, self.unfold = fold, unfold
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.unfold(self.b(self.fold(self.a(x))).tanh(), len(x))


def _halves(h, rows):
    return h[:rows] - 0.5 * h[rows:]


TWICE = Fold(lambda h: torch.cat([h, -h]), _halves)
BY_STEP = Fold(lambda h: h.transpose(0, 1).flatten(0, 1), lambda h, rows: h.unflatten(0, (-1, rows)).transpose(0, 1))
BY_ROW = Fold(lambda h: h.flatten(0, 1), lambda h, rows: h.unflatten(0, (rows, -1)))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(("model", "shape"), [(TWICE, (4,)), (BY_STEP, (2, 4)), (BY_STEP, (5, 4))])
def test_rows_in_another_order_are_refused_where_they_are(model, shape, rows):
    x = torch.randn(rows, *shape)
    check(model, x, [{"a": zero()}, {"a": scale(2.0)}])
    with pytest.raises(EditError, match=r"its rows .* are not in the order of the inputs'.*run of its own.*b@0"):
        sweep(model, x, [{"a": zero()}, {"b": zero()}])


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("steps", [2, 3, 4, 6])
def test_rows_folded_in_their_own_order(rows, steps):
    x = torch.randn(rows, steps, 4)
    check(BY_ROW, x, [{"b": zero()}, {"a": zero(), "b": add(1.0)}, {"b": at(0, scale(2.0))}])
    check(BY_ROW, torch.ones(rows, steps, 4), [{"b": zero()}, {"a": zero(), "b": add(1.0)}])
    check(BY_STEP, torch.ones(rows, steps, 4), [{"b": at(0, scale(2.0))}, {"b": add(1.0)}])


def test_outputs_whose_parts_are_alike():
    same = Fold(lambda h: h, lambda h, rows: torch.cat([h, h]))
    x = torch.randn(3, 4)
    check(same, x, [{}, {"a": zero()}, {"b": add(1.0)}])
    constant = Fold(lambda h: h, lambda h, rows: (h, torch.ones(2 * rows)))
    assert torch.equal(sweep(constant, x, [{"a": zero()}])[0][1], torch.ones(6))


MIXES = {
    "the largest": lambda h: h / h.abs().max(),
    "the smallest": lambda h: h if h.min() > 1 else -h,
    "the mean": lambda h: h - h.mean(0),
    "the order": lambda h: h.flip(0),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_rows_that_change_edited_rows_only_are_refused(mix):
    model, x, vector = Fold(mix, lambda h, rows: h), torch.randn(3, 4), torch.full((4,), 9.0)
    edits = [{"a": add(vector)}, {"a": add(vector, -1)}]
    if mix is MIXES["the largest"]:
        edits = [{}, *({"a": at((..., unit), zero())} for unit in range(4))]
    with pytest.raises(EditError, match=r"not independent in this model: edit \d of the list comes out different when"):
        sweep(model, x, edits)


class Masked(nn.Module):
    def forward(self, x):
        return x.index_fill(-1, torch.tensor(0), -torch.inf)


@pytest.mark.parametrize("last", [nn.Identity(), Masked()], ids=["plain", "masked"])
def test_two_edits_run_alone_and_random_ones_differ_anyway(last):
    model, x, calls = nn.Sequential(nn.Linear(3, 3), last), torch.randn(2, 3), [0, 0, 0, 0]

    def counted(i):
        def change(v):
            calls[i] += 1
            return v + i

        return {"0": change}

    sweep(model, x, [counted(i) for i in range(4)], at_once=2)
    assert calls == [2, 1, 1, 2]  # 3 is farthest from the clean run, 0 from that
    sweep(model, x, [{"0": noise(1.0)}, {"0": lambda v: torch.rand_like(v)}])


def test_each_run_has_inputs_of_its_own():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x, offset, notes):
            notes.append(1)
            return self.a(x.mul_(2)) + offset.add_(1) + len(notes)

    model, x, offset, notes = Writes(), torch.randn(3, 4), torch.randn(1, 4), []
    before = x.clone(), offset.clone()
    out = sweep(model, (x, offset, notes), [{"a": zero()}])
    assert torch.equal(x, before[0]) and torch.equal(offset, before[1]) and not notes
    torch.testing.assert_close(out[0], (offset + 2).expand(3, 4))


def test_caches_among_the_inputs():
    config = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=10, n_positions=8, bos_token_id=0, eos_token_id=0)
    model, cache = GPT2LMHeadModel(config).eval(), DynamicCache(config=config)
    inputs = {"input_ids": torch.zeros(1, 3, dtype=torch.long), "past_key_values": cache}
    with torch.no_grad():
        sweep(model, inputs, [{"transformer.h.0": zero()}])
        assert cache.get_seq_length() == 0
        model(**inputs)
        with pytest.raises(EditError, match=r"such as a cache, holds tensors, whose rows sweep cannot repeat"):
            sweep(model, inputs, [{"transformer.h.0": zero()}])
        assert cache.get_seq_length() == 3
    with pytest.raises(EditError, match=r"no copy of the inputs can be made for each run: .*generator"):
        sweep(model, {**inputs, "past_key_values": (i for i in ())}, [{"transformer.h.0": zero()}])


def test_inputs_without_rows_say_what_was_taken_for_them():
    with pytest.raises(EditError, match=r"fails with 3 times the rows.* input \(4 float32\): .*with a batch dimension"):
        sweep(nn.Linear(4, 8), torch.randn(4), [{".": zero()}])
    model = nn.Bilinear(4, 4, 2)
    with pytest.raises(ZeroDivisionError, match="in the change at"):
        sweep(model, (torch.randn(3, 4), torch.randn(3, 4)), [{".": lambda v: v * (1 // 0)}])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_dtypes_and_values_that_are_not_finite(dtype):
    model, x = nn.Sequential(nn.Linear(3, 3, dtype=dtype)), torch.randn(2, 3).to(dtype)
    check(model, x, [{"0": scale(0.5)}, {"0": add(1.0)}])
    out = sweep(model, x, [{"0": scale(torch.nan)}, {"0": zero()}])
    assert out[0].isnan().all() and not out[1].any()


def test_numbers_that_are_no_tensors_cannot_be_told_apart():
    class Counts(nn.Module):
        def __init__(self, of):
            super().__init__()
            self.fc, self.of = nn.Linear(4, 3), of

        def forward(self, x):
            h = self.fc(x)
            return {"h": h, "about": self.of(h)}

    x = torch.randn(2, 4)
    for of in (lambda h: h.mean().item(), lambda h: h.argmax(-1).tolist(), lambda h: bool((h == 0).all())):
        with pytest.raises(EditError, match="numbers that are no tensors"):
            sweep(Counts(of), x, [{}, {"fc": zero()}])
    assert math.isnan(sweep(Counts(lambda h: math.nan), x, [{"fc": zero()}])[0]["about"])
    assert sweep(Counts(lambda h: ["a", 1, None]), x, [{"fc": zero()}])[0]["about"] == ["a", 1, None]


def test_what_fills_masked_places_hides_no_difference():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            return (h / h.abs().max()).masked_fill(torch.tensor([False, False, False, True]), -1e9)

    with pytest.raises(EditError, match="rows are not independent"):
        sweep(Masked(), torch.randn(2, 4), [{}, {"fc": scale(5.0)}, {"fc": at((..., 0), scale(9.0))}])


def test_addresses_of_one_value_in_another_order_in_each_edit():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = self.a
            self.c = nn.Linear(3, 3)

        def forward(self, x):
            h = self.c(x)
            return self.a(h)

    model, x = Shared(), torch.randn(2, 3)
    places = {"a": add(1.0), "b": scale(2.0), "a:in": scale(3.0), "a:in[0]": add(2.0), "c": scale(0.5), "./h": add(4.0)}
    edits = [{place: places[place] for place in order} for order in itertools.permutations(places)][::31]
    edits += [{"b": add(100.0)}, {"b": add(-100.0), "a": scale(0.1)}]
    for one, out in zip(edits, sweep(model, x, edits), strict=True):
        with edit(model, one):
            torch.testing.assert_close(out, model(x))
