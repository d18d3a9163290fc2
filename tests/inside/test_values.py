"""Values and gradients inside a forward are those of a twin that is written out by hand."""

import math

import pytest
import torch
from torch import nn

from tenterhook import TenterhookWarning, capture, edit, observe, sweep
from tenterhook.changes import scale, zero
from tests.inside.models import Residual, X, all_of, five, module_of


def test_values_and_gradients_are_those_of_the_twin():
    torch.manual_seed(0)
    model, x = Residual(), X.clone().requires_grad_()
    wanted = ["y", "h#0", "h#1", "helped/scaled", "s", "a", "b", "mul", "z#0", "kept", "z#1", "z#2", "out"]
    with capture(model, *(f"./{name}" for name in wanted), grad=True) as seen:
        loss = model(x).square().sum()
        loss.backward()
    truth = dict(model.log, **{"h#0": model.log["h"], "z#0": model.log["z"]})
    truth["mul"] = truth["a"] * truth["b"]
    with torch.no_grad():
        for name in wanted:
            if name != "z#1":  # written into afterwards, so the log has lost it
                torch.testing.assert_close(seen[f"./{name}"], truth[name], rtol=0, atol=0)
    assert not torch.equal(seen["./z#1"], seen["./z#2"])
    loss = model(x).square().sum()
    log = model.log
    named = {"y": log["y"], "h#0": log["h"], "h#1": log["h#1"], "s": log["s"], "out": log["out"], "z#0": log["z"]}
    named |= {"helped/scaled": log["helped/scaled"], "a": log["a"], "b": log["b"], "kept": log["kept"]}
    for (name, _), grad in zip(named.items(), torch.autograd.grad(loss, list(named.values())), strict=True):
        torch.testing.assert_close(seen[f"grad(./{name})"], grad)
    assert torch.equal(seen["grad(./z#1)"][:, 0], torch.zeros(3))  # overwritten, so nothing flows into it


def test_generators_decorators_and_autograd_functions():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            twice = x * 2
            return twice

        @staticmethod
        def backward(ctx, g):
            return g * 2

    def pieces(x):
        for k in range(2):
            piece = x + k
            yield piece

    class Model(nn.Module):
        @torch.no_grad()
        def frozen(self, x):
            fixed = x * 7
            return fixed

        def forward(self, x):
            total = sum(piece * 1 for piece in pieces(x))
            doubled = Double.apply(total)
            return self.frozen(x) + doubled

    model, x = Model(), X.clone().requires_grad_()
    with capture(model, "./pieces/piece", "./Double/twice", "./frozen/fixed", "./doubled", "grad(./doubled)") as seen:
        model(x).sum().backward()
    assert [torch.equal(v, X + k) for k, v in enumerate(seen.calls("./pieces/piece"))] == [True, True]
    assert torch.equal(seen["./Double/twice"], seen["./doubled"]) and torch.equal(seen["./frozen/fixed"], X * 7)
    assert torch.equal(seen["grad(./doubled)"], torch.ones(3, 4))


def test_a_user_with_modes_and_tensor_classes_of_their_own():
    class Mine(torch.Tensor):
        pass

    model = Residual()
    with torch.device("cpu"), capture(model, "./y") as seen, torch.device("cpu"):
        model(X.as_subclass(Mine))
    assert type(seen["./y"]) is Mine and torch.equal(seen["./y"].as_subclass(torch.Tensor), X + 2)


def test_observe_patch_save_and_sweep_inside(tmp_path):
    from tenterhook import load_edits

    model, came = Residual(), []
    with observe(model, {"./h": lambda v, site: came.append((str(site), site.text))}):
        model(X)
    assert came == [("./h@0", "h = self.fc(y)"), ("./h#1@0", "h = F.gelu(h)")]
    with pytest.warns(TenterhookWarning, match=r"\./nothing was never observed: no value of that name came"):
        with observe(model, {"./nothing": print}):
            model(X)
    with capture(model, "./h#1") as seen:
        clean = model(X)
    with edit(model, seen.patch("./h#1")):
        torch.testing.assert_close(model(X * 3)[:, 4:], clean[:, 4:])
    edits = edit(model, {"./h#1": scale(0.5)})
    edits.save(tmp_path / "e.safetensors")
    with edit(model, {"./h#1": scale(0.5)}):
        truth = model(X)
    with edit(model, load_edits(tmp_path / "e.safetensors")):
        assert torch.equal(model(X), truth)
    swept = sweep(model, X, [{"./h#1": scale(0.5)}, {"./y": zero()}, {}])
    torch.testing.assert_close(swept[0], truth)
    torch.testing.assert_close(swept[2], clean)


def test_a_variable_keeps_its_old_value_until_the_whole_statement_is_done():
    def forward(self, x):
        q, k = five(x), five(x + 1)
        q, k = q.sin(), k.cos()
        for _ in range(2):
            a, b, c, d = x + 1, x + 2, x + 3, x + 4
            x = a + d
        return q + k + b + c

    found = all_of(module_of(forward), X)
    first, second = X, (X + 1) + (X + 4)
    truth = {"q#0": X * 5, "q#1": (X * 5).sin(), "k#0": (X + 1) * 5, "k#1": ((X + 1) * 5).cos()}
    truth |= {"a#0": first + 1, "a#1": second + 1, "b#0": first + 2, "b#1": second + 2}
    assert [name for name in found if name[0] in "qkab" and name[1] == "#"] == [
        "k#0", "q#0", "k#1", "q#1", "a#0", "b#0", "a#1", "b#1"
    ]  # fmt: skip
    assert all(torch.equal(found[name], value) for name, value in truth.items())


def test_a_call_that_does_more_than_call_the_module():
    class Block:
        def __init__(self):
            self.fc = nn.Linear(4, 4)

        def __call__(self, t):
            r = self.fc(t)
            return r + 100

    class Scaled(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) * 2

    def forward(self, x):
        y = self.block(x)
        z = self.scaled(x)
        return y * 1 + z

    model = module_of(forward, block=Block(), scaled=Scaled(4, 4))
    found = all_of(model, X)
    assert torch.equal(found["y"], model.block(X)) and torch.equal(found["z"], model.scaled(X))
    for name, other in (("y", model.scaled(X)), ("z", model.block(X))):
        with edit(model, {f"./{name}": zero()}):
            assert torch.equal(model(X), other)


def test_what_one_model_taught_does_not_hide_values_of_another():
    def forward(self, x):
        y = self.act(x)
        return y * 1

    for act in (torch.relu, five, nn.ReLU(), five, torch.relu):
        model = module_of(forward, act=act)
        assert torch.equal(all_of(model, X)["y"], act(X))


def test_results_of_functions_that_call_operations_for_themselves():
    def forward(self, x, c=True):
        loss = sum([t * 2 for t in (x, x, x)])
        chosen = sum([x, x * 2 if c else x])
        added = torch.add(*map(self.fc, (x, x)))
        parts = [x, *x]
        again = [*map(self.fc, (x, x))]
        product = math.prod([x, x, x])
        either = (x * 0).sum() or x.mean()
        return loss, chosen, added, parts, again, product, either

    model = module_of(forward, fc=nn.Linear(4, 4))
    found = all_of(model, X)
    assert torch.equal(found["loss"], X * 2 + X * 2 + X * 2) and torch.equal(found["chosen"], X + X * 2)
    assert torch.equal(found["added"], model.fc(X) + model.fc(X)) and len(found["parts"]) == 4
    assert len(found["again"]) == 2 and torch.equal(found["product"], X * X * X)
    assert torch.equal(found["either"], X.mean())


def test_stars_nested_targets_dicts_and_dataclasses():
    class Pair(nn.Module):
        def forward(self, x):
            return x * 1, (x * 2, x * 3)

    class Named(nn.Module):
        def forward(self, x):
            return {"a": x * 4, "b": None}

    def forward(self, x):
        first, *rest = x.unbind(0)
        out, (h, c) = self.pair(x)
        named = self.named(x)
        made = dict(p=x * 5)
        return first + named["a"][0] + h[0] + c[0] + out[0] + made["p"][0] + rest[0]

    model = module_of(forward, pair=Pair(), named=Named())
    found = all_of(model, X)
    assert torch.equal(found["first"], X[0]) and len(found["rest"]) == 2 and torch.equal(found["rest"][1], X[2])
    assert torch.equal(found["h"], X * 2) and torch.equal(found["c"], X * 3) and torch.equal(found["named"]["a"], X * 4)
    assert torch.equal(found["made"]["p"], X * 5)
    with edit(model, {"./h": zero(), "./named[a]": zero(), "./first": zero()}):
        expected = X[0] * 9 + X[1]  # out, c and made of the first row, and the rest's first
        torch.testing.assert_close(model(X), expected)


def test_deep_stacks_long_functions_and_many_variables():
    def deep(t, n):
        return t * 2 if n == 0 else deep(t, n - 1)

    def forward(self, x):
        y = deep(x, 400)
        return y

    assert torch.equal(all_of(module_of(forward), X)["y"], X * 2)
    lines = "".join(f"    v{k} = x + {k}\n" for k in range(600))
    place = {}
    exec(f"def long(x, c=True):\n{lines}    w = (x * 2 if c else x * 3)\n    return w", place)
    found = all_of(place["long"], X, selector="*")
    assert len(found) == 601 and torch.equal(found["w"], X * 2) and torch.equal(found["v599"], X + 599)


def test_once_waits_for_what_is_inside():
    def forward(self, x):
        a = self.fc(x)
        y = a + 1
        return y

    model = module_of(forward, fc=nn.Linear(4, 4))
    seen = capture.once(model, X, "fc", "./y")
    assert torch.equal(seen["./y"], seen["fc"] + 1)
    assert torch.equal(capture.once(five, X, "q"), X * 5)


@pytest.mark.parametrize(
    "lines",
    [
        ["for y in g(x): kept.append(y)"],
        ["for y in g(x):", "    z = y", "    kept.append(z)"],
        ["it = g(x)", "y = next(it)", "y = next(it)", "y = next(it)", "kept.append(y)"],
    ],
    ids=["for", "another name", "next"],
)
@pytest.mark.parametrize("address", ["./y", "./**"])
def test_what_a_generator_gives_to_a_variable(lines, address):
    known = {"torch": torch}
    body = [
        "def g(v):",
        "    for i in range(2, 5): yield v * i",
        "kept = []",
        *lines,
        "return torch.stack(kept).sum(0)",
    ]
    exec("def forward(self, x):\n" + "\n".join("    " + line for line in body), known)
    with capture(module_of(known["forward"]), address) as seen:
        seen._session.model()(torch.ones(1))
    assert seen.calls("./y") == [2, 3, 4]
    if "z = y" in str(lines) and address == "./**":
        assert seen.calls("./z") == [2, 3, 4]


def test_a_generator_that_goes_on_sees_what_its_caller_has_assigned_since():
    def parts(value):
        for k in range(4):
            yield value * k

    def kept(value):
        return value

    def forward(self, x):
        more = parts(x)
        total = x * 0
        for _ in range(4):
            part = next(more)
            y = kept(part)
            y.detach().add_(1)
            total = total + y
        for z in parts(x):
            y = kept(z)
        return total + y

    model = module_of(forward)
    for _ in range(3):
        with capture(model, "./y") as seen:
            assert model(torch.ones(1)) == 0 + 1 + 2 + 3 + 4 + 3
        assert [float(seen[address]) for address in seen] == [0, 1, 2, 3, 0, 1, 2, 3]
