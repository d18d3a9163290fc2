# ruff: noqa: F841
"""Looking inside changes nothing, runs no code of the model and keeps nothing alive."""

import contextlib
import gc
import sys
import weakref

import torch
from torch import nn

from tenterhook import EditError, capture, edit, observe
from tenterhook.changes import zero
from tests.inside.models import Noisy, Residual, X, five, helper, module_of, used


def test_observing_changes_nothing():
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        model, x = Noisy(), X.clone().requires_grad_()
        session = capture(model, "**/**", grad=True) if watched else torch.enable_grad()
        with session:
            for _ in range(2):
                model(x)["loss"].backward()
        grads = [p.grad for p in model.parameters()]
        results.append([x.grad, *grads, *model.buffers(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_nothing_is_kept_that_was_not_asked_for():
    alive = []

    class Model(nn.Module):
        def forward(self, x):
            big = x + 1
            marker = weakref.ref(big)
            big = big.sum()
            alive.append(marker() is not None)
            tail = helper(big)
            return tail * 2

    for selector in ("./tail", "./**"):
        alive.clear()
        with capture(Model(), selector, reduce=lambda t: t.sum()) as seen:
            seen._session.model()(X)
        assert alive == [False]


def test_a_debugger_or_a_coverage_tool_that_traces_is_left_alone():
    lines = []

    def trace(frame, event, arg):
        lines.append(event)
        return trace

    model, before = Residual(), sys.gettrace()
    sys.settrace(trace)
    try:
        with capture(model, "./y", "./h#1") as seen:
            model(X)
            model(X)
    finally:
        sys.settrace(before)
    assert len(seen.calls("./y")) == 2 and len(seen.calls("./h#1")) == 2 and "line" in lines


def test_debuggers_and_locals_keep_their_variables():
    def asking(self, x):
        here = locals()
        y = five(x)
        x = x * 2
        return here["x"] + x + y

    def traced(self, x):
        y = five(x)
        x = x * 2
        z = x + y
        return z

    def looking(frame, event, argument):
        if frame.f_code is traced.__code__ and "x" in frame.f_locals:
            frame.f_locals["x"].sum()
        return looking

    for forward, tracer in ((asking, None), (traced, looking)):
        model, before = module_of(forward), sys.gettrace()
        truth = model(X)
        with capture(model, "./x", "./y") as seen:
            sys.settrace(tracer or before)
            try:
                assert torch.equal(model(X), truth)
            finally:
                sys.settrace(before)
        assert torch.equal(seen["./x"], X * 2)
        assert torch.equal(seen["./y"], X * 5)


def test_looking_runs_no_code_of_the_models():
    class Lazy(dict):
        def values(self):
            raise AssertionError("asked for its values")

    def forward(self, x):
        y = x * 2
        lazy = Lazy(y=y)
        self.buffer.add_(y)
        self.buffer.mul_(3)
        return y + self.buffers_[0] * 10 + self.buffers_[1] * 100 + lazy["y"]

    def buffer(self):
        self.asked += 1
        return self.buffers_[self.asked % 2]

    def made():
        cls = type("Model", (nn.Module,), {"forward": forward, "buffer": property(buffer)})
        model = cls()
        model.asked, model.buffers_ = 0, [torch.zeros(1), torch.zeros(1)]
        return model

    truth = made()(torch.ones(1))
    for address in ("./y", "./lazy"):
        with capture(made(), address) as seen:
            assert torch.equal(seen._session.model()(torch.ones(1)), truth)


def test_an_exception_lets_go_of_the_frame():
    class Failing(nn.Module):
        def forward(self, x):
            big = x * 2
            refs.append(weakref.ref(big))
            q = x
            w = q + 1
            raise ValueError

    model, refs = Failing(), []
    with contextlib.suppress(ValueError), capture(model, "./q") as seen:
        model(torch.ones(1))
    gc.collect()
    assert refs[0]() is None and seen["./q"] == 1


def evaluate(text):
    variables = sys._getframe(1).f_locals  # as numexpr and pandas.eval do
    return variables[text[0]].cos() + variables[text[-1]].sin()


def test_who_looks_at_the_variables_of_a_caller_keeps_them():
    def compute(x):
        a = x
        b = used(x)
        c = evaluate("a+b")
        return c + a

    def forward(self, x):
        y = x
        out = compute(x)
        return out + y

    model = module_of(forward)
    for address in ("./compute/a", "./compute/b", "./y", "./**"):
        with capture(model, address) as seen:
            assert torch.equal(model(X), X.cos() + (X * 2).sin() + X + X)
        assert seen.report().silent == []


def test_looking_at_variables_lets_go_of_them():
    alive = []

    def forward(self, x):
        y = used(x)
        alive.append(weakref.ref(y))
        z = x * 2
        del y
        alive.append(alive[0]())
        return z

    model = module_of(forward)
    for session in (observe(model, {"./y": lambda value, site: None}), edit(model, {"./y@9": zero()})):
        alive.clear()
        with contextlib.suppress(EditError), session:
            model(X)
        assert alive[1] is None
