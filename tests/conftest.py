import sys
import weakref

import pytest
import torch
from torch import nn

from tenterhook.hooks import scope
from tenterhook.hooks.session import Session
from tenterhook.inside import copies
from tenterhook.platform import compiler
from tenterhook.platform.hook_tables import is_ours
from tenterhook.view.page import FILE


def ours(model: nn.Module) -> list[str]:
    """Where hooks of tenterhook sit in a model."""
    found = []
    for name, module in model.named_modules():
        for table in (module._forward_hooks, module._forward_pre_hooks):
            found += [name or "." for key in table if is_ours(key)]
        found += [name for key in module._forward_hooks_with_kwargs if key not in module._forward_hooks]
        found += [name for key in module._forward_pre_hooks_with_kwargs if key not in module._forward_pre_hooks]
    for name, parameter in model.named_parameters():
        found += [name for table in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks) if table]
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch):
    """Fails a test whose sessions leave a hook, an open scope or a compiler stance."""
    models = []
    plain = Session.__init__

    def remember(self, model, **options):
        models.append(weakref.ref(model))
        plain(self, model, **options)

    monkeypatch.setattr(Session, "__init__", remember)
    yield
    left = [where for ref in models if isinstance(model := ref(), nn.Module) for where in ours(model)]
    assert not left, f"hooks left behind: {left}"
    assert scope.here() == (), "a scope is still open"
    assert copies.running() == [], "a function still runs a copy of its code"
    assert torch._C._len_torch_function_stack() == 0, "a function mode is still on"
    assert not compiler._holders, "the compiler stance was not put back"


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled():
    """What the tests of one file have compiled is told of in the reports of the next."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def built_page():
    """For tests that need the page of `tenterhook view`."""
    if not FILE.exists():
        pytest.skip("the page is not built: `make web` builds it")
    return FILE
