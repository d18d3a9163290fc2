"""The ready-made changes, each against a formula."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tenterhook.changes.change as machinery
from tenterhook import edit
from tenterhook.changes import (
    add,
    any_shape,
    at,
    clamp,
    clip_norm,
    in_turn,
    mean,
    noise,
    ones,
    project_out,
    replace,
    resample,
    reverse,
    scale,
    zero,
)
from tenterhook.changes.change import KINDS, as_change, ready

V = torch.randn(4, 3, 5, dtype=torch.float64)
D = torch.randn(5, dtype=torch.float64)

FORMULAS = [
    (zero(), torch.zeros_like(V)),
    (ones(), torch.ones_like(V)),
    (replace(2.5), torch.full_like(V, 2.5)),
    (replace(D), D.expand(4, 3, 5)),
    (scale(-2), V * -2),
    (scale(D), V * D),
    (add(D), V + D),
    (add(D, times=0.5), V + 0.5 * D),
    (add(1), V + 1),
    (clamp(min=0), V.relu()),
    (clamp(-0.1, 0.2), V.clamp(-0.1, 0.2)),
    (clamp(max=0.0), V.clamp(max=0)),
    (mean(0), V.mean(0, keepdim=True).expand_as(V)),
    (mean((0, 1)), V.mean((0, 1), keepdim=True).expand_as(V)),
    (reverse(), -V),
    (reverse(3.0), -3 * V),
    (project_out(D), V - (V @ D)[..., None] * D / D.dot(D)),
    (project_out(D[:3], dim=1), V - torch.einsum("abc,b->ac", V, D[:3])[:, None] * D[:3, None] / D[:3].dot(D[:3])),
    (clip_norm(1.0), V / V.norm()),
    (clip_norm(1e6), V),
    (clip_norm(0.5, dim=-1), V * (0.5 / V.norm(dim=-1, keepdim=True)).clamp(max=1)),
    (
        at((0, 1), zero()),
        torch.cat([V[:1], V[1:]]).index_put((torch.tensor(0), torch.tensor(1)), torch.zeros(5).double()),
    ),
    (at((..., slice(1, 3)), scale(2.0)), torch.cat([V[..., :1], V[..., 1:3] * 2, V[..., 3:]], -1)),
    (at(V > 0, 0.0), V.clamp(max=0)),
    (at([0, 2], replace(1.0)), torch.stack([torch.ones(3, 5).double(), V[1], torch.ones(3, 5).double(), V[3]])),
    (in_turn([scale(2.0), add(1.0)]), V * 2 + 1),
    (any_shape(lambda v: v[:2]), V[:2]),
]


@pytest.mark.parametrize(
    ("change", "truth"), FORMULAS, ids=lambda x: repr(x) if not isinstance(x, torch.Tensor) else ""
)
def test_formulas(change, truth):
    before = V.clone()
    torch.testing.assert_close(change(V), truth)
    assert torch.equal(V, before)
    assert change(V).untyped_storage().data_ptr() != V.untyped_storage().data_ptr() or change.name == "any_shape"


def test_every_kind_has_a_formula():
    assert {change.name for change, _ in FORMULAS} == KINDS.keys() - {"noise", "resample"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize(
    "change", [change for change, _ in FORMULAS if change.name not in ("any_shape", "clamp", "at")]
)
def test_shape_and_dtype_are_kept(change, dtype):
    value = V.to(dtype)
    new = change(value)
    assert new.dtype == dtype and new.shape == value.shape


def test_several_directions_and_none():
    plane = torch.randn(2, 5, dtype=torch.float64)
    out = project_out(plane)(V)
    torch.testing.assert_close(out @ plane.T, torch.zeros(4, 3, 2, dtype=torch.float64))
    twice = torch.stack([D, 2 * D, torch.zeros(5, dtype=torch.float64)])  # one direction only
    torch.testing.assert_close(project_out(twice)(V), project_out(D)(V))
    torch.testing.assert_close(project_out(torch.zeros(5, dtype=torch.float64))(V), V)
    with pytest.raises(ValueError, match="the direction has 4 entries, the value 5"):
        project_out(torch.ones(4))(V.float())


def test_clipping_of_zeros_of_a_zero_limit_and_of_nan():
    assert torch.equal(clip_norm(1.0)(torch.zeros(3)), torch.zeros(3))
    assert torch.equal(clip_norm(0.0)(torch.zeros(3)), torch.zeros(3))
    assert clip_norm(1.0)(torch.tensor([1.0, torch.nan])).isnan().all()
    big = torch.full((4,), 60000.0, dtype=torch.float16)  # its norm is not a float16
    torch.testing.assert_close(clip_norm(2.0)(big), torch.ones(4, dtype=torch.float16))


def test_zeroing_takes_nan_away():
    assert not zero()(torch.tensor([torch.nan, torch.inf], requires_grad=True)).any()


def test_noise_from_torch_and_from_a_seed():
    torch.manual_seed(5)
    a = noise(2.0)(V) - V
    torch.manual_seed(5)
    torch.testing.assert_close(a, torch.randn(V.shape, dtype=torch.float64) * 2)
    state = torch.get_rng_state()
    assert torch.equal(noise(1.0, seed=1)(V), noise(1.0, seed=1)(V))
    assert not torch.equal(noise(1.0, seed=1)(V), noise(1.0, seed=2)(V))
    assert torch.equal(torch.get_rng_state(), state)
    assert noise(1.0, seed=1)(torch.zeros(100_000)).std().item() == pytest.approx(1, abs=0.02)


def test_resampled_rows_are_rows_of_the_other():
    rows = torch.randn(10, 3, 5, dtype=torch.float64)
    out = resample(rows, seed=7)(V)
    found = [[torch.equal(one, other) for other in rows].index(True) for one in out]
    assert torch.equal(out, resample(rows, seed=7)(V)) and len(set(found)) > 1
    with pytest.raises(ValueError, match="the rows to draw from have shape 10×2, the value 4×3×5"):
        resample(torch.randn(10, 2))(V)


def test_a_tensor_is_moved_to_the_dtype_of_the_value_once_and_anew_when_it_changed():
    vector = torch.ones(5)
    change = add(vector)
    assert change(V).dtype == torch.float64
    (moved,) = change._moved.values()
    change(V)
    assert next(iter(change._moved.values())) is moved
    vector.mul_(3)
    torch.testing.assert_close(change(V), V + 3)


@pytest.fixture
def declared(monkeypatch):
    """What is declared in a test is forgotten after it."""
    monkeypatch.setattr(machinery, "KINDS", dict(KINDS))


@pytest.mark.usefixtures("declared")
def test_a_new_random_change_is_not_made_again_to_be_measured():
    @ready(random=True, numbers=("p",))
    def drop(value, p):
        """Some values set to zero."""
        return value * (torch.rand_like(value) >= p)

    @ready(random=True)
    def shake(value, by, seed=None):
        return value + by * torch.randn(value.shape, generator=torch.Generator().manual_seed(seed or 0))

    model, x = nn.Sequential(nn.Identity()), torch.randn(3, 50)
    assert repr(drop(0.5)) == "drop(0.5)" and machinery.KINDS.keys() == {*KINDS, "drop", "shake"}
    assert not drop(0.5).is_pure and not shake(1.0).is_pure and shake(1.0, seed=2).is_pure and scale(2.0).is_pure
    assert not at(0, drop(0.5)).is_pure and at(0, scale(0.5)).is_pure
    with edit(model, {"0": drop(0.5)}) as edits:
        torch.manual_seed(3)
        apart = (model(x) - x).abs()
        state = torch.get_rng_state()
    row = next(iter(edits.report()))
    assert row[3:] == (f"{apart.max().item():.3g}", f"{apart.mean().item():.3g}")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("declared")
def test_a_new_change_may_have_another_shape():
    @ready(any_shape=True)
    def first_rows(value, n):
        return value[:n]

    model, x = nn.Sequential(nn.Identity()), torch.randn(3, 2)
    with edit(model, {"0": first_rows(2)}):
        assert torch.equal(model(x), x[:2])


@pytest.mark.usefixtures("declared")
def test_a_new_change_may_ask_for_the_site():
    seen = []

    @ready()
    def note(value, factor, site=None):
        seen.append(str(site))
        return value * factor

    model, x = nn.Sequential(nn.Identity()), torch.randn(3, 2)
    with edit(model, {"0": note(2)}):
        assert torch.equal(model(x), x * 2)
    assert seen == ["0@0"] and repr(note(2)) == "note(2)"


def test_what_stands_for_a_change():
    assert repr(as_change(3)) == "replace(3)" and repr(as_change(zero)) == "zero()"
    assert repr(as_change(torch.ones(2, 3))) == "replace(<2×3 float32>)"
    assert repr(as_change([zero, 1.0])) == "in_turn((zero(), replace(1.0)))"
    assert repr(at((..., 3), zero)) == "at((..., 3), zero())"
    assert repr(as_change(torch.relu)) == "relu" and repr(as_change(nn.ReLU())) == "ReLU"
    with pytest.raises(TypeError, match="missing a required argument: 'std'"):
        noise()
    with pytest.raises(TypeError, match="too many positional"):
        zero(1)
    with pytest.raises(TypeError, match="unexpected keyword"):
        scale(1.0, sideways=True)


def test_which_functions_get_the_site():
    def plain(v): ...
    def both(v, site): ...
    def default(v, factor=2): ...
    def named(v, site=None): ...
    def many(*values): ...

    takes = {f: as_change(f).takes_site for f in (plain, both, default, named, many, torch.relu, nn.ReLU())}
    assert [f for f, wants in takes.items() if wants] == [both, named]
    site = object()
    seen = []
    as_change(lambda v, site: seen.append(site))(V, site)
    at(0, lambda v, site: seen.append(site) or v)(V, site)
    in_turn([lambda v, where: seen.append(where)])(V, site)
    assert seen == [site] * 3


def test_functions_of_torch_as_changes():
    model = nn.Sequential(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    with edit(model, {"0": torch.relu}):
        torch.testing.assert_close(model(x), nn.functional.linear(x, model[0].weight, model[0].bias).relu())


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.data(),
)
def test_at_any_index_is_assignment_on_a_copy(shape, data):
    value = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    one = st.one_of(
        [st.slices(size) | st.integers(-size, size - 1) for size in shape[:1]] + [st.just(...), st.just(slice(None))]
    )
    index = data.draw(one)
    if isinstance(index, slice) and (index.step or 1) < 0:
        return  # torch has no negative steps
    truth = value.clone()
    truth[index] = truth[index] * 2 + 1
    assert torch.equal(at(index, lambda v: v * 2 + 1)(value), truth)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: project_out([1.0, 2.0]), TypeError, "project_out: direction is a tensor, got list"),
        (lambda: project_out(torch.ones(1, 1, 2)), ValueError, "the rows of a matrix, got 1×1×2"),
        (lambda: replace(None), TypeError, "replace: by is a tensor or a number, got NoneType"),
        (lambda: add(1.0, times=None), TypeError, "add: times is a tensor or a number, got NoneType"),
        (lambda: resample(3), TypeError, "resample: rows is a tensor, got int"),
        (lambda: clip_norm(-1.0), ValueError, "no norm is below 0, so max_norm cannot be -1.0"),
        (lambda: clamp(), ValueError, "clamp: give it min, max or both"),
    ],
)
def test_wrong_arguments_are_told_when_the_change_is_made(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_projecting_out_keeps_its_precision_under_autocast():
    value, direction = torch.randn(8, 64), torch.randn(64)
    for change in (project_out(direction), project_out(direction.clone().requires_grad_())):
        with torch.autocast("cpu", torch.bfloat16):
            out = change(value)
        assert out.dtype == torch.float32 and (out @ direction).abs().max() < 1e-4
    assert project_out(direction)(value.to("meta")).shape == value.shape


def test_a_direction_is_what_it_was_when_the_change_was_made():
    direction = torch.eye(5, dtype=torch.float64)[:1]
    change = project_out(direction)
    direction.zero_()
    assert not change(V)[..., 0].any()


def test_the_direction_is_as_exact_as_the_value():
    direction = torch.randn(2, 64)
    value = torch.randn(3, 64, dtype=torch.float64) * 100
    change = project_out(direction)
    assert (change(value) @ direction.double().T).abs().max() < 1e-10
    inverse = torch.linalg.pinv(direction.double())
    torch.testing.assert_close(change(value), value - value @ inverse @ direction.double())
    nearly_one = torch.stack([direction[0], direction[0] * (1 / 3)])  # but for what float32 rounds
    assert len(project_out(nearly_one).arguments["direction"]) == 1
    assert change(value.float()).dtype == torch.float32


def test_numbers_of_numpy():
    value = torch.tensor([-1.0, 3.0])
    for number in (np.float32(2), np.float64(2), np.int64(2), np.float16(2)):
        assert scale(number)(value).tolist() == [-2, 6] and repr(scale(number)) in ("scale(2)", "scale(2.0)")
        assert clamp(max=number)(value).tolist() == [-1, 2]
        assert add(value, times=number)(value).tolist() == [-3, 9]
        assert as_change(number)(value).tolist() == [2, 2]


def test_zeros_have_their_signs():
    value = torch.tensor([2.0])
    assert [math.copysign(1, scale(zero)(value).item()) for zero in (0.0, -0.0, 0.0)] == [1, -1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@given(by=st.floats(allow_nan=False))
def test_a_scaled_output_has_the_bits_of_a_product(dtype, by):
    value = torch.tensor([1.0, -2.5, 3e-40, 6e4, -0.0, math.inf, 1 / 3], dtype=dtype)
    model = nn.Identity()
    with edit(model, {".": scale(by)}):
        assert str(model(value).tolist()) == str((value * by).tolist())
        assert str(model(value[0]).tolist()) == str((value[0] * by).tolist())


def test_a_change_made_in_inference_mode_or_in_a_transform_serves_outside_of_it():
    model, value = nn.Identity(), torch.randn(3, requires_grad=True)
    with torch.inference_mode(), torch.device("meta"):
        made = [scale(1.21)]
    torch.func.grad(lambda x: (made.append(scale(1.22)), x.sum())[1])(torch.ones(3))
    torch.vmap(lambda x: (made.append(scale(1.23)), x)[1])(torch.ones(3))
    for change, by in zip(made, (1.21, 1.22, 1.23), strict=True):
        with edit(model, {".": change}):
            assert torch.equal(torch.autograd.grad(model(value).sum(), value)[0], torch.full((3,), by))
            assert torch.equal(torch.vmap(model)(value.detach()), value.detach() * by)
