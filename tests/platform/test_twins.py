import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo import eval_frame

from tenterhook.platform import twins


@pytest.fixture
def counted(monkeypatch):
    """`counted.on`: the key of the twins that run in place of compiled code; `counted.made`: the graphs made."""
    torch._dynamo.reset()
    plain = eval_frame._callback_from_stance

    def backend(graph, inputs):
        backend.made += 1
        return graph

    def choose(callback):
        if backend.on is None or callback in (None, False):
            return plain(callback)
        backend.twin = twins.twin_of(callback, backend.on)
        return backend.twin

    backend.made, backend.on, backend.twin = 0, None, None
    monkeypatch.setattr(eval_frame, "_callback_from_stance", choose)
    yield backend
    torch._dynamo.reset()


class Same(nn.Module):
    def forward(self, x):
        return x * 1


class Hook:
    def __init__(self, by):
        self.by = by

    def __call__(self, module, args, output):
        return output * self.by


def test_a_twin_has_entries_of_its_own_and_the_users_stay(counted):
    models = [nn.Sequential(Same()) for _ in range(2)]
    first, second = (torch.compile(model, backend=counted) for model in models)
    x = torch.ones(2)
    first(x), second(x)
    assert counted.made == 1, "two models of a class no longer share what was compiled: the rest shows nothing"
    for _ in range(3):
        handle = models[0][0].register_forward_hook(Hook(3))
        counted.on = "three"
        assert first(x).tolist() == [3, 3], "a twin does not trace the hooks that are there"
        assert second(x).tolist() == [1, 1], "a twin does not see which hooks a module has"
        counted.on = None
        handle.remove()
        assert first(x).tolist() == [1, 1] and counted.made == 3
    models[0][0].register_forward_hook(Hook(4))
    counted.on = "four"
    assert first(x).tolist() == [4, 4] and counted.made == 4


def test_a_function_that_is_compiled_anew_has_the_same_twin(counted):
    model, x = nn.Sequential(Same()), torch.ones(2)
    counted.on = "key"
    for _ in range(5):
        torch.compile(model, backend=counted)(x)
    assert counted.made == 1


def test_what_is_refused_runs_as_it_is_written(counted):
    class Model(nn.Module):
        def forward(self, x):
            return x + inner() if torch.compiler.is_compiling() else x - 1

    @torch.compiler.assume_constant_result
    def inner():
        twins.refuse("because")
        return 5

    run = torch.compile(Model(), backend=counted)
    counted.on = "key"
    for _ in range(2):
        assert run(torch.ones(2)).tolist() == [0, 0] and counted.twin.why == "because"


def test_inductor_makes_no_cuda_graphs_of_it():
    torch._dynamo.reset()
    wrapper = torch._TorchCompileInductorWrapper("reduce-overhead", None, False)
    assert wrapper.config["triton.cudagraphs"], "torch names the option of CUDA graphs otherwise"
    own = twins._without_cuda_graphs(wrapper, wrapper)
    assert own.config["triton.cudagraphs"] is False and wrapper.config["triton.cudagraphs"]
