# ruff: noqa: F841
"""Reports and errors: why a value did not come, and addresses that cannot be."""

import functools
import threading

import pytest
import torch
from torch import nn

from tenterhook import AddressError, EditError, NotSeenError, TenterhookWarning, capture, edit, observe, sweep
from tenterhook.changes import zero
from tests.inside.models import Residual, X, module_of


def test_the_report_says_where_torch_takes_another_path():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad(), capture(model, "./_ff_block/x") as seen:
        model(torch.randn(1, 3, 8))
    assert "turn off PyTorch's fused transformer kernel" in str(seen.report())


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("./y:in", "':in' belongs to modules"),
        ("./helped#1/scaled", "a number belongs to the last name"),
        ("fcc/y", "did you mean fc"),
        ("fc.weight/y", "is a parameter, which has no forward"),
    ],
)
def test_addresses_that_cannot_be(address, words):
    with pytest.raises(AddressError, match=words):
        capture(Residual(), address)


def test_why_a_variable_did_not_come():
    def forward(self, x, skip=True):
        size = len(x)
        if not skip:
            y = x + size
        return x * 1

    model = module_of(forward)
    with capture(model, "./y", "./size") as seen:
        model(X)
    assert ["that line did not run, or it holds something else" in row[2] for row in seen.report()] == [True, True]
    with capture(model, "./y") as seen:
        thread = threading.Thread(target=model, args=(X,), kwargs={"skip": False})
        thread.start()
        thread.join()
    assert "it ran in another thread" in str(seen.report())
    with pytest.raises(AddressError, match=r"did you mean \./y"):
        capture(model, "y")
    with pytest.raises(AddressError, match="written module/name"):
        capture(model, "a//y")
    with pytest.raises(EditError, match="was never edited: no value of that name came while it ran"):
        sweep(model, X, [{"./nothing": zero()}])


def middle(x):
    return inner(x) + 1


def inner(x):
    y = x * 2
    return y


def test_a_path_with_a_part_missing_is_told_in_full():
    def forward(self, x):
        return middle(x)

    with capture(model := module_of(forward), "./inner/y", "./mid*/y") as seen:
        model(X)
    assert [row[2] for row in seen.report()] == ["it came as ./middle/inner/y"] * 2


@pytest.mark.parametrize("address", ["./middle/inner/yy", "./**/yy"])
def test_a_misspelt_variable_of_a_helper_is_told_what_is_near(address):
    def forward(self, x):
        return middle(x)

    with capture(model := module_of(forward), address) as seen:
        model(X)
    ((_, _, why),) = seen.report()
    assert "did you mean y?" in why


def test_when_a_misspelt_variable_is_an_error():
    def forward(self, x):
        hidden = x * 2
        return hidden

    model = module_of(forward)
    with capture(model, "./hiden") as seen:
        model(X)
    with pytest.raises(NotSeenError, match="did you mean hidden"):
        seen["./hiden"]
    with pytest.warns(TenterhookWarning, match="did you mean hidden"), observe(model, {"./hiden": print}):
        model(X)
    with pytest.raises(EditError, match="did you mean hidden"), edit(model, {"./hiden": zero()}):
        model(X)
    for verb in (capture, lambda m, at: edit(m, {at: zero()}), lambda m, at: observe(m, {at: print})):
        with pytest.raises(AddressError):  # the module's name is known before anything runs
            verb(model, "nowhere/hidden")


def test_nothing_is_said_of_a_helper_that_was_not_seen():
    def forward(self, x):
        return x + 1

    with capture(model := module_of(forward), "./inner/y") as seen:
        model(X)
    ((_, _, why),) = seen.report()
    assert why.startswith("no call of a function inner was seen in it")


def test_the_inside_of_torchscript_is_refused_as_its_output_is():
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 3)))
    with capture(model, "./y", "0/y") as seen:
        model(torch.ones(1, 3))
    assert all("TorchScript" in row[2] for row in seen.report())


class Encoder(nn.Module):
    def encode(self, x):
        e = x * 5
        return e + 1


@pytest.mark.parametrize("wrap", [lambda method: method, functools.partial])
def test_a_method_of_a_module_is_a_function_like_others(wrap):
    encode = wrap(Encoder().encode)
    with capture(encode, "e") as seen:
        encode(X)
    assert seen["e"].equal(X * 5)


def test_a_forward_that_is_replaced_inside_the_block_is_told_of():
    def forward(self, x):
        y = x + 1
        return y

    model = module_of(forward)
    with capture(model, "./y") as seen:
        model.forward = lambda x: x * 2
        model(X)
    assert "its forward was replaced after the block was entered" in str(seen.report())


def test_code_that_cannot_be_copied_is_told_of_and_runs_as_ever(monkeypatch):
    def forward(self, x):
        y = x + 1
        return y

    def fails(*args):
        raise ValueError("no such instruction")

    monkeypatch.setattr("tenterhook.inside.copies.instrument", fails)
    model = module_of(forward)
    with capture(model, "./y") as seen:
        assert torch.equal(model(X), X + 1)
    assert "forward was not looked into: its code cannot be copied (ValueError: no such" in str(seen.report())


def pool(h):
    return h.flatten(1)


def around_pool(h):
    halved = pool(h) / 2
    return halved * 2


def test_what_is_made_in_a_helper_leads_to_its_path():
    def forward(self, x):
        return around_pool(x)

    model = module_of(forward)
    with capture(model, "./flatten", "./halved") as seen:
        model(X)
    for (address, fired, why), path in zip(
        seen.report(), ("./around_pool/pool/flatten", "./around_pool/halved"), strict=True
    ):
        assert fired == "never" and why.endswith(f"ask for {path}"), address
        with capture(model, path) as found:
            model(X)
        assert len(found) == 1  # it is there


class Attends(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = {"chosen": attend}

    def forward(self, x):
        return self.attend["chosen"](x)


def attend(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def never_runs(x):
    secret = x + 1
    return secret


def test_probabilities_lead_to_where_they_may_be():
    model = Attends(attend)
    with capture(model, "./probabilities") as seen:
        model(torch.ones(1, 2, 3, 4))
    ((_, _, why),) = seen.report()
    assert "./**/probabilities" in why
    with capture(model, "./**/probabilities") as seen:
        model(torch.ones(1, 2, 3, 4))
    assert list(seen) == ["./attend/scaled_dot_product_attention/probabilities"]


def test_only_functions_that_ran_are_spoken_of():
    def forward(self, x):
        helper = never_runs if x is None else inner
        return helper(x)

    model = module_of(forward)
    with capture(model, "./**/probabilities", "./nev*/probabilities") as seen:
        model(X)
    for _, fired, why in seen.report():
        assert fired == "never" and "secret" not in why
