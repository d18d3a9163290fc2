# ruff: noqa: F841, RUF059
"""The name of a value inside a forward: that of its variable, or of the operation that made it."""

import types
import zipfile

import torch
from torch import nn
from torch.nn import functional as F

from tenterhook import capture, edit
from tenterhook.changes import scale, zero
from tests.inside.models import Residual, X, all_of, dressed, helper, module_of, names, told_of


class Constructs(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.cache = nn.Linear(4, 4), {}
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        a = x + 1
        b = (x * 2).relu() + a
        a += b
        a.add_(1)
        F.relu(a, inplace=True)
        self.total.add_(1)
        c = d = x * 3
        u, (v, w) = x.chunk(2, -1)[0], x.split([1, 3], -1)
        (p, q), r = (x * 1, x * 2), x * 3
        e, f, g, h = x + 1, x * 2, x - 1, x / 2
        self.cache["k"] = x - 1
        self.last = x - 2
        many = [t * 2 for t in (x, x)]
        mapped = list(map(torch.neg, (x, x)))
        if (mean := x.mean()) > -1e9:
            x = x.abs()
        by_lambda = (lambda t: t * 9)(x)
        helped = helper(x)
        undressed = dressed(x)
        part = x[:, :2]
        chosen = x / 2 if x.sum() > -1e9 else x
        normed = F.layer_norm(
            x,
            (4,),
        )
        typed: torch.Tensor = x * 11
        for _ in range(2):
            x = x * 1.5
        one, two, three = x
        x[:, 0] = 0
        largest, index = x.max(-1)
        s = x.sigmoid()
        out = self.fc(s)
        weight = self.fc.weight.T
        return x.mean()


EXPECTED = """
a#0 mul#0 relu b a#1 a#2 a#3 self.total c d chunk u v w p q r e f g h sub self.last mul#1 mul#2 many mapped
mean#0 gt#0 x#0 lambda/mul by_lambda helper/q helper/add helped wrapper/dressed/inner undressed part sum gt#1 chosen
normed typed x#1 x#2 one two three x#3 largest index s out weight mean#1"""


def test_every_construct_has_its_name_on_every_python():
    model = Constructs()
    found = [address.removeprefix("./") for address in names(model, X.clone()) if not address.startswith("fc/")]
    assert found == EXPECTED.split()
    for _ in range(20):  # Python rewrites code that is warm
        again = [address.removeprefix("./") for address in names(model, X.clone()) if not address.startswith("fc/")]
        assert again == found


def test_the_names_inside_a_list_of_modules_are_the_modules_own():
    model = nn.Sequential(Constructs(), nn.Identity())
    model[0].forward = types.MethodType(lambda self, x: torch.relu(x), model[0])
    assert names(model, X, selector="**/**") == ["0/relu", "./input#0", "./input#1"]


def test_code_without_source():
    place = {"nn": nn, "torch": torch}
    exec("class M(nn.Module):\n def forward(self, x):\n  y = x + 1\n  z = (y * 2).relu()\n  return z", place)
    model = place["M"]()
    assert names(model, X) == ["./y", "./mul", "./z"]
    with edit(model, {"./y": zero()}):
        assert model(X).count_nonzero() == 0
    graph = torch.fx.symbolic_trace(model)
    assert names(graph, X)[-1] == "./relu"


def test_code_in_a_zip_file(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as file:
        file.writestr(
            "zipped_model.py",
            "from torch import nn\nclass M(nn.Module):\n def forward(self, x):\n  y = x + 1\n  return y\n",
        )
    monkeypatch.syspath_prepend(str(tmp_path / "code.zip"))
    import zipped_model

    assert names(zipped_model.M(), X) == ["./y"]


def test_globs_inside():
    model = nn.Sequential(Residual(), Residual())
    with capture(model, "*/h", "0/helped/*") as seen:
        model[0](X)
    assert list(seen) == ["0/h#0", "0/h#1", "0/helped/scaled"]
    with capture(model, "**<Residual>/y") as seen:
        model[1](X)
    assert list(seen) == ["1/y"]


TABLE = torch.zeros(4)


def test_a_statement_is_named_by_what_it_writes_into():
    def forward(self, x):
        a, b = x + 1, x + 2
        torch.mul(a, 2, out=b)
        a.view(-1).mul_(2)
        TABLE.add_(a[0])
        F.relu(a[0], inplace=True)
        a[1:] = 0
        a[0] += 1
        a.add_(b if b.sum() > -1e9 else a)
        self.scale.mul_(1.0)
        return a

    found = all_of(module_of(forward, scale=torch.ones(())), X)
    names = [name for name in found if not name.startswith(("getitem", "sum", "gt"))]
    assert names == ["b#0", "a#0", "b#1", "view", "mul_", "TABLE", "relu", "a#1", "add_", "a#2", "a#3", "self.scale"]
    assert torch.equal(found["b#1"], (X + 1) * 2) and torch.equal(found["a#1"][1:], torch.zeros(2, 4))


def test_a_forward_without_arguments():
    model = nn.Module()
    model.forward = lambda: torch.ones(1) * 2
    with capture(model, "./**") as seen:
        model()
    assert seen["./mul"] == 2


def test_an_operation_with_the_name_of_a_function_of_torchs_stays_one():
    def softmax(x):
        ret = torch.softmax(x, -1)
        return ret

    def functional(self, x):
        return F.softmax(x, -1)

    def method(self, x):
        return x.softmax(-1)

    def own(self, x):
        return softmax(x)

    def pooled(self, x):
        return F.max_pool1d(x, 2)

    for forward in (functional, own):
        with capture(model := module_of(forward), "./softmax/ret") as seen:
            model(X)
        assert all(torch.equal(value, X.softmax(-1)) for value in seen.calls("./softmax/ret"))
    for forward, address in ((method, "./softmax/ret"), (pooled, "./max_pool1d/y")):
        with capture(model := module_of(forward), address) as seen:
            model(X)
        assert address not in seen


def test_functions_of_torch_that_write_in_place_count():
    def forward(self, x):
        y = x * -2
        torch.relu_(y)
        F.relu_(y)
        torch.Tensor.add_(y, 1)
        y.data.add_(1)
        x.add_(0)
        return y + 1

    model = module_of(forward)
    assert told_of(model, "./y", torch.ones(1)) == {"./y#0": -2, "./y#1": 0, "./y#2": 0, "./y#3": 1}
    assert told_of(model, "./add_", torch.ones(1)) == {"./add_": 2}
    with edit(model, {"./y#1": lambda value: value * 0 + 7}):
        assert model(torch.ones(1)) == 10


def test_a_module_in_a_variable_may_be_called_like_a_method_of_tensors():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.relu = nn.Identity(), nn.ReLU(inplace=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            y = x * 2
            for block in self.blocks:
                y = block.norm(y)
                y = block.relu(y)
            return y

    assert list(told_of(Model(), "./y", torch.ones(1))) == [f"./y#{k}" for k in range(5)]


def test_a_variable_may_be_called_like_an_operation():
    def forward(self, x):
        getitem = x[0]
        linalg_norm = torch.linalg.norm(x)
        return x[1] + getitem + (torch.linalg.norm(x * 2) + linalg_norm)

    model = module_of(forward)
    assert list(told_of(model, "./getitem", torch.ones(2))) == ["./getitem#0", "./getitem#1"]
    assert list(told_of(model, "./linalg_norm", torch.ones(2))) == ["./linalg_norm#0", "./linalg_norm#1"]


def test_a_statement_that_does_not_say_what_it_writes_into():
    def bound(self, x):
        y = x * 2
        a = x * 1
        for write in (a.add_, y.add_):
            write(a)
        return y

    def taken(self, x, operation):
        a = x * 1
        operation(a)
        return a * 1

    model = module_of(bound)
    assert told_of(model, "./y", torch.ones(1)) == {"./y#0": 2, "./y#1": 4}
    with edit(model, {"./y#1": scale(2.0)}):
        assert model(torch.ones(1)) == 8
    model = module_of(taken)
    told_of(model, "./a", torch.zeros(1), torch.exp_)
    assert told_of(model, "./exp", torch.zeros(1), torch.exp) == {"./exp": 1}
