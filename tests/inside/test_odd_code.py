"""Code that is written in unusual ways: what is seen, edited and left alone."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenterhook import capture, edit
from tenterhook.changes import zero
from tenterhook.platform.bytecode import looks_at_variables

ONES = torch.ones(2)


def model_of(forward, **parts):
    """A model with that forward."""
    model = type("Model", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def fired(model, *addresses, inputs=(ONES,), **more):
    with capture(model, *addresses) as seen:
        model(*inputs, **more)
    return {line.split()[0]: line.split()[1] for line in str(seen.report()).splitlines()[2:] if "×" in line}


# Arguments.


def test_an_argument_that_is_asked_for_by_name_is_seen_whoever_asks_for_everything():
    model = model_of(lambda self, x: x * 2)
    assert fired(model, "./*") == {"./mul": "1×"}
    assert fired(model, "./x", "./*") == {"./x": "1×", "./mul": "1×"}
    with capture(model, "./*") as others:
        assert fired(model, "./x") == {"./x": "1×"}
    assert "./x" not in others


def test_rest_and_more_are_arguments_too():
    def forward(self, *xs, **kw):
        return xs[0] + kw["z"]

    assert fired(model_of(forward), "./xs", "./kw", z=ONES) == {"./xs": "1×", "./kw": "1×"}
    model = model_of(forward)
    with edit(model, {"./xs": lambda xs: (xs[0] * 5,)}):
        assert model(ONES, z=ONES).tolist() == [6, 6]


def test_a_statement_with_keywords_writes_into_its_object():
    def forward(self, x):
        x.clamp_(min=2)
        return x + 0

    model = model_of(forward)
    with capture(model, "./x") as seen:
        model(torch.ones(2))
    assert seen["./x"].tolist() == [2, 2]  # what was written, alone


# Assignments inside expressions and patterns.


def test_a_pattern_whose_guard_fails_leaves_the_value_to_the_next():
    def forward(self, x, flag):
        match x * 2:
            case y if flag:
                return y
            case z:
                return z

    model = model_of(forward)
    for flag, expected in ((False, [2, 2]), (True, [0, 0])):
        with edit(model, {"./y": 0}):
            got = model(ONES, flag)
        assert got.tolist() == expected


def test_the_object_and_the_index_of_an_assignment_may_be_named_there():
    def into(self, x):
        (y := x + 1)[0] = 7
        return y

    def at(self, x, i):
        x = x.clone()
        x[(j := i + 0)] = 9
        return x, j

    model = model_of(into)
    with edit(model, {"./y#0": lambda y: y * 10}):
        assert model(ONES).tolist() == [7, 20]
    model = model_of(at)
    with edit(model, {"./j": lambda j: j * 0}):
        assert model(torch.zeros(3), torch.tensor(2))[0].tolist() == [9, 0, 0]


def test_a_name_that_an_expression_goes_on_with():
    def forward(self, x, c=True):
        a = self.b = z = x + 1
        w = torch.maximum((y := x * 2), x if c else a) + sum([v for v in (x, a)])
        return a + self.b + z + w + y

    def twin(change):
        a, y = ONES + 1, change(ONES * 2)
        return 3 * a + torch.maximum(y, ONES) + ONES + ONES + 1 + y

    model = model_of(forward)
    with edit(model, {"./y": lambda y: y * 10}):
        got = model(ONES)
    assert torch.equal(got, twin(lambda y: y * 10))
    with edit(model, {"./a": 0}):
        assert torch.equal(model(ONES), twin(lambda y: y) - 4)


def test_an_async_comprehension_and_what_follows_it():
    async def items(x):
        yield x * 2

    async def forward(self, x):
        ys = [y async for y in items(x)]
        y = ys[0] + 1
        return y

    model = model_of(forward)
    with capture(model, "./ys", "./y") as seen:
        with pytest.raises(StopIteration):
            model(ONES).send(None)
    assert seen["./y"].tolist() == [3, 3] and seen["./ys"][0].tolist() == [2, 2]


# Names that mean something else.


def test_methods_that_are_called_like_an_attribute_of_tensors():
    class Real(nn.Module):
        def T(self, x):
            t = x + 1
            return t

        def forward(self, x):
            return torch.real(self.T(x)) * x.T

    assert fired(Real(), "./**", inputs=(torch.ones(1, 2),)) == {
        "./T/t": "1×",
        "./real": "1×",
        "./T": "1×",
        "./mul": "1×",
    }


def test_a_model_with_a_part_called_function():
    def forward(self, x):
        y = x + 1
        return self.function(y)

    assert fired(model_of(forward, function=nn.ReLU()), "./y", "./**").keys() >= {"./y"}


def test_a_function_called_like_one_that_looks_at_variables():
    def dir(x):
        t = x * 2
        return t

    def forward(self, x):
        y = x.clone()
        self.part.eval()
        y.add_(1)
        return dir(y)

    model = model_of(forward, part=nn.Linear(2, 2))
    assert fired(model, "./y", "./dir/t") == {"./y#0": "1×", "./y#1": "1×", "./dir/t": "1×"}
    assert not looks_at_variables(forward.__code__) and looks_at_variables(compile("locals()", "", "exec"))


def test_what_eval_returns_is_nobodys_business():
    class Frozen(dict):
        def pop(self, *_):
            raise RuntimeError("frozen")

    class NeverEqual:
        def __eq__(self, other):
            raise ValueError("cannot be compared")

        __hash__ = None

    kept = [NeverEqual(), 1], Frozen(a=1)

    def forward(self, x):
        many, frozen = eval("self.kept")
        one = eval("many")
        y = x + one[1] + eval("frozen")["a"]
        return y, sorted(locals())

    model = model_of(forward)
    model.kept = kept
    with capture(model, "./y") as seen:
        assert model(ONES)[1] == ["frozen", "many", "one", "self", "x", "y"]
    assert seen["./y"].tolist() == [3, 3]


def test_a_method_of_super_is_followed_however_often_it_ran():
    class Base(nn.Module):
        def helper(self, x):
            t = x * 2
            return t

        def forward(self, x):
            return self.helper(x)

    class Derived(Base):
        def helper(self, x):
            return super().helper(x) + 1

    model = Derived()
    for _ in range(50):  # Python specialises instructions that run often
        with capture(model, "./helper/helper/t") as seen:
            model(ONES)
        assert seen["./helper/helper/t"].tolist() == [2, 2]


def test_the_kernel_and_its_probabilities():
    model = model_of(lambda self, q: F.scaled_dot_product_attention(q, q, q))
    kernel = "./scaled_dot_product_attention"
    assert fired(model, kernel, f"{kernel}/probabilities", inputs=(torch.ones(1, 1, 3, 4),)).keys() == {
        kernel,
        f"{kernel}/probabilities",
    }


# What lives longer than it should, or shorter.


def test_variables_that_somebody_keeps_do_not_make_other_calls_the_models():
    kept = []

    def helper(x):
        t = x + 1
        return t

    def forward(self, x):
        y = x + 1
        kept.append(dict(sys._getframe().f_locals))
        return helper(y)

    known = {"helper": helper}
    for n in range(25):  # frames of all sizes, so that one is where the model's was
        exec(f"def other{n}(x):\n" + "".join(f" a{i} = 0\n" for i in range(n)) + " return helper(x)\n", known)
    model = model_of(forward)
    with capture(model, "./**") as seen:
        model(ONES)
        for n in range(25):
            known[f"other{n}"](ONES)
    assert len(seen.calls("./helper/t")) == 1


def test_an_autograd_function_that_drops_its_context():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            del ctx
            return inner(x)

    inner = nn.Linear(2, 2)
    model = model_of(lambda self, x: Own.apply(x), inner=inner)
    with edit(model, {"inner": zero()}):
        assert model(ONES).tolist() == [0, 0]
    assert fired(model, "inner/linear") == {"inner/linear": "1×"}
