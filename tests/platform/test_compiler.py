import pytest
import torch
from torch import nn

from tenterhook.platform import compiler


def twice(x):
    return x * 2


@pytest.fixture
def counted():
    """A function that is compiled by a backend of ours, which counts what it compiles and how often that runs."""
    torch._dynamo.reset()
    compiled, ran = [], []

    def backend(graph, inputs):
        compiled.append(graph)

        def run(*args):
            ran.append(graph)
            return graph(*args)

        return run

    yield torch.compile(twice, backend=backend), compiled, ran
    torch._dynamo.reset()


class Holder:
    pass


def test_the_eager_stance_leaves_compiled_code_as_it_is(counted):
    function, compiled, ran = counted
    one, other = Holder(), Holder()
    x = torch.ones(2)
    function(x)
    assert compiler.force_eager(one) and compiler.force_eager(other)
    function(x)
    compiler.allow_compiled(one)
    compiler.allow_compiled(one)
    function(x)
    compiler.allow_compiled(other)
    assert len(ran) == 1, "torch's eager stance no longer runs compiled functions as they are written"
    function(x)
    assert (len(compiled), len(ran)) == (1, 2), "torch now compiles again after its eager stance was lifted"


def test_it_is_known_that_something_was_compiled(counted):
    counted[0](torch.ones(2))
    assert compiler.something_was_compiled(), "torch.compile no longer notes the code that it has compiled"


def test_a_compiled_module_is_known():
    module = nn.Linear(2, 2)
    assert not compiler.is_compiled(module)
    assert compiler.is_compiled(torch.compile(module)), "torch.compile no longer keeps the module as _orig_mod"
    module.compile(backend="eager")
    assert compiler.is_compiled(module), "a module that is compiled in place no longer has a _compiled_call_impl"


def test_the_compiler_tells_when_it_begins(counted):
    function, _, _ = counted
    told = []
    callbacks = compiler.compiler_callbacks()
    assert callbacks is not None, "torch.compile no longer has callbacks for when it begins"
    callbacks.register_start_callback(told.append)
    try:
        function(torch.ones(2))
    finally:
        callbacks.remove_start_callback(told.append)
    assert told, "torch.compile no longer calls back when it begins"


def test_code_that_must_not_be_compiled_is_not(counted):
    _, compiled, _ = counted

    def hook(x):
        return x + 1

    compiler.never_compile(hook)
    torch.compile(hook, backend=lambda graph, inputs: compiled.append(graph) or graph)(torch.ones(2))
    assert not compiled, "torch.compile no longer skips code that it is told to skip"
