"""Methods that a trainer or the user's own loop calls, such as training_step: addressed from the nearest of them."""

import functools

import pytest
import torch
from torch import nn

from tenterhook import capture, edit
from tenterhook.changes import scale, zero


def penalty(model, x):
    z = model.fc(x) * 2
    return z.pow(2).mean()


class Steps(nn.Module):
    """As LightningModule: optimizer_step runs the closure that calls training_step."""

    def __init__(self):
        super().__init__()
        self.fc, self.net = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def helper(self, q):
        r = q * 3
        return r

    def forward(self, x):
        inner = self.helper(x)
        return inner

    def training_step(self, batch, number):
        x, y = batch
        h = self.fc(x)
        g = self.helper(h)
        f = self(x)
        loss = (self.net(g) - y).pow(2).mean() + f.mean() + penalty(self, x)
        return loss

    def optimizer_step(self, optimizer, closure):
        optimizer.step(closure=closure)


class Trainer:
    def fit(self, model, batch, steps=2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(steps):

            def closure(number=number):
                optimizer.zero_grad()
                loss = model.training_step(batch, number)
                loss.backward()
                return loss

            model.optimizer_step(optimizer, closure)


def decorated(method):
    @functools.wraps(method)
    def wrapper(self, *args):
        w = args[0][0] * 1
        return method(self, (w, args[0][1]), *args[1:])

    return wrapper


class Decorated(Steps):
    training_step = decorated(decorated(Steps.training_step))


class Below(Steps):
    def training_step(self, batch, number):
        mine = batch[0] * 2
        return super().training_step((mine, batch[1]), number)


def by_loop(model, batch):
    for number in range(2):
        model.training_step(batch, number).backward()


def by_trainer(model, batch):
    Trainer().fit(model, batch)


def by_redirection(model, batch):
    """As Lightning under DDP: a wrapper's forward calls the model's, which is exchanged for the method."""

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = model

        def forward(self, *args):
            return self.module(*args)

    wrapper = Wrapper()
    for number in range(2):

        def redirected(*args):
            del model.forward
            return model.training_step(*args)

        model.forward = redirected
        wrapper(batch, number).backward()


RUNS = [by_loop, by_trainer, by_redirection]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", [Steps, Decorated, Below])
@pytest.mark.parametrize("more", [(), ("./training_step/**",), ("./optimizer_step/*",)])
def test_the_nearest_method_begins_the_address(run, kind, more):
    torch.manual_seed(0)
    model, batch = kind(), (torch.randn(2, 3), torch.randn(2, 3))
    asked = ["./training_step/h", "grad(./training_step/h)", "./training_step/helper/r", "./training_step/penalty/z"]
    truth, handle = [], model.fc.register_forward_hook(lambda m, a, out: truth.append(out.detach().clone()))
    with capture(model, *asked, "./inner", *more) as seen:
        run(model, batch)
    handle.remove()
    if more != ("./optimizer_step/*",):
        assert torch.equal(torch.stack(seen.calls(asked[0])), torch.stack(truth[::2]))
        assert torch.equal(torch.stack(seen.calls(asked[2])), 3 * torch.stack(truth[::2]))
        assert torch.equal(torch.stack(seen.calls(asked[3])), 2 * torch.stack(truth[1::2]))
        assert torch.equal(seen["./training_step/h@1"], truth[2])
    assert len(seen.calls("./inner")) == 2 and len(seen.calls(asked[1])) == 2


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", [Steps, Decorated])
def test_edits_there(run, kind):
    model, batch = kind(), (torch.randn(2, 3), torch.randn(2, 3))
    with edit(model, {"./training_step/helper/r@1": scale(0.5)}) as edits, capture(model, "net") as after:
        run(model, batch)
    assert edits.report().rows[0][1] == "1×"
    first, second = after.calls("net")
    assert not torch.equal(first, second)
    model = kind()
    with edit(model, {"grad(./training_step/h)": zero(), "./training_step/penalty/z": zero(), "./inner": zero()}):
        by_loop(model, batch)
    assert not model.fc.weight.grad.any() and model.net[0].weight.grad.any()


def test_a_decorated_method_under_no_grad():
    class Validates(Steps):
        @torch.no_grad()
        def validation_step(self, batch, number):
            v = self.fc(batch[0])
            return self.helper(v)

    model, batch = Validates(), (torch.randn(2, 3), None)
    with capture(model, "./validation_step/v", "./validation_step/helper/r") as seen:
        out = model.validation_step(batch, 0)
    assert torch.equal(seen["./validation_step/helper/r"], out) and torch.equal(seen["./validation_step/v"] * 3, out)


def test_a_compiled_method():
    model, batch = Steps(), (torch.randn(2, 3), torch.randn(2, 3))
    model.training_step = torch.compile(model.training_step, backend="eager")
    with capture(model, "./training_step/h", "fc") as seen:
        model.training_step(batch, 0)
    assert torch.equal(seen["./training_step/h"], seen.calls("fc")[0])


def test_an_optimizer_inside_a_forward_keeps_the_names_of_the_forward():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            optimizer = torch.optim.SGD(self.fc.parameters(), lr=0.1)

            def closure():
                y = self.fc(x)
                loss = y.pow(2).mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            return self.fc(x)

    model = nn.Sequential(Inner())
    with capture(model, "0/**/y") as seen:
        model(torch.randn(2, 3))
    (name,) = seen
    assert name.startswith("0/") and name.endswith("closure/y")
