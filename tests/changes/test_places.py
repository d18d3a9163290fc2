"""head and token: places for at(...)."""

import pytest
import torch
from torch import nn

from tenterhook import capture, edit, load_edits, sweep
from tenterhook.changes import add, at, head, scale, token, zero


@pytest.mark.parametrize(("k", "of"), [(0, 4), (3, 4), (-1, 4), (1, 2), (0, 1), (7, 8)])
def test_a_head_is_a_part_of_the_last_dimension(k, of):
    value = torch.randn(2, 3, 8)
    expected = value.clone()
    expected.unflatten(-1, (of, -1))[..., k, :] = 0
    assert torch.equal(at(head(k, of=of), zero)(value), expected)
    assert torch.equal(at(head(k, of), zero())(value[0, 0]), expected[0, 0])


def test_a_token_is_one_of_each_row():
    value = torch.randn(2, 5, 8)
    for k in (0, -1, [1, 3], slice(2, None)):
        expected = value.clone()
        expected[:, k] += 1
        assert torch.equal(at(token(k), add(1.0))(value), expected)
    both = at(token(2), at(head(1, of=4), zero))(value)
    assert not both[:, 2, 2:4].any() and torch.equal(both[:, 2, 4:], value[:, 2, 4:])


def test_they_read_as_written_and_what_they_cannot_be():
    assert repr(at(head(3, of=12), zero)) == "at(head(3, of=12), zero())" and head(3, 12) == head(3, of=12)
    assert repr(at(token(5), scale(2.0))) == "at((:, 5), scale(2.0))"
    for k, of in ((12, 12), (-13, 12), (0, 0), (1.5, 3), ("0", 12)):
        with pytest.raises(ValueError, match="a head is a whole number from 0 to one less than how many there are"):
            head(k, of=of)
    with pytest.raises(ValueError, match=r"head\(0, of=3\): the last dimension of 2×8 is not 3 heads"):
        at(head(0, of=3), zero)(torch.randn(2, 8))
    with pytest.raises(ValueError, match="is not 3 heads"):
        at(head(0, of=3), zero)(torch.tensor(1.0))


def test_in_the_verbs(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(2, 3, 4)
    edits = {"1": at(head(1, of=4), zero), "2": at(token(0), scale(2.0))}
    with edit(model, edits) as session, capture(model, "1") as seen:
        out = model(x)
    assert not seen["1"][..., 2:4].any() and seen["1"][..., :2].all()
    torch.testing.assert_close(out[:, 0], 2 * model[2](seen["1"])[:, 0])
    session.save(tmp_path / "edits.safetensors")
    assert repr(load_edits(tmp_path / "edits.safetensors")) == repr(edits)
    with edit(model, load_edits(tmp_path / "edits.safetensors")):
        assert torch.equal(model(x), out)
    with capture(model, "1") as other:
        model(-x)
    with edit(model, other.patch("1", at=head(1, of=4))), capture(model, "1") as seen:
        model(x)
    torch.testing.assert_close(seen["1"][..., 2:4], model[:2](-x)[..., 2:4])
    torch.testing.assert_close(seen["1"][..., 4:], model[:2](x)[..., 4:])
    found = sweep(model, x, [{"1": at(head(k, of=4), zero)} for k in range(4)], metric=lambda out: out.sum())
    assert len(found.values.unique()) == 4
