"""Another entry to compiled code: the same Python, compiled by the same backend, with hooks of ours in it.

    twin_of(callback, key)      what Dynamo calls back in place of `callback` while the hooks of `key` are on

Dynamo keeps what it compiled by code object, and uses an entry only for the backend that it was made with. A twin has
a backend of its own, which does nothing but call the user's. So the hooks are traced once, the user's own entries stay
and are used again without compiling, and so are the twin's when the same hooks are on again. A twin's entries ask which
hooks a module has; the user's do not, or they would be compiled again.

What cannot be compiled with the hooks in it runs as it is written, from then on: `Twin.why` says why.

Relies on: `InstructionTranslatorBase` of `torch._dynamo.symbolic_convert`, what traces a function, with its `parent`,
`f_code` and `symbolic_locals`; `CatchErrorsWrapper` and its `_torchdynamo_orig_backend`, `hooks` and
`_clone_with_backend` in `torch._dynamo.convert_frame`; cache entries that are compared by backend, with `==`;
`torch._TorchCompileInductorWrapper` and its `config`; `counters["graph_break"]`; a skipped frame's
`ConvertFrameReturn` and `FrameExecStrategy`; `cache_size.py`, which counts an entry only where what is in its
`id_matched_objs` is what the frame has; `FRAME_COMPILE_COUNTER` and `_debug_get_cache_entry_list`.
"""

import copy
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable
from importlib.util import find_spec
from types import CodeType
from typing import Any, NamedTuple

import torch._dynamo
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, _FrameAction, _FrameExecStrategy
from torch._dynamo import config
from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER, CatchErrorsWrapper, catch_errors_wrapper
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import counters
from torch._ops import HigherOrderOperator

MOST = 32  # twins of one compiled callable
_UNLIMITED = 1 << 30
_CONFIG = {
    "recompile_limit": _UNLIMITED,
    "accumulated_recompile_limit": _UNLIMITED,
    "error_on_recompile": False,
    # Another module of the class may have other hooks, or none, and would run what was compiled for this one.
    "skip_nnmodule_hook_guards": False,
}
_HOOKS = ("register_hook", "autograd_function_apply")  # what hooks on tensors become, on torch 2.13 and 2.11
_ENTANGLED = (
    "a gradient of the compiled model's own output is asked for, and one part of that output makes another;"
    " ask for the module that gives it"
)
# Before, PyTorch makes a function of each hook on a tensor, and puts all that the hook uses right after that tensor: an
# earlier use of it then has nothing, and nobody may write into the tensor.
HOOKS_ARE_TRACED = find_spec("torch._higher_order_ops.register_hook") is not None  # from 2.13 on
_lock = threading.RLock()
_twins: "weakref.WeakKeyDictionary[Any, OrderedDict[Hashable, Twin]]" = weakref.WeakKeyDictionary()


class CannotStay(Exception):
    """The hooks cannot be in compiled code here."""


_refused: list[str] = []  # by what is being traced now


_wholes: list[str] = []


def refuse_parts(why: str) -> None:
    """For what is being traced: it cannot be in code that is compiled in parts."""
    _wholes.append(why)


def refuse(why: str) -> None:
    """For hooks that are being traced: they cannot be in compiled code."""
    _refused.append(why)


class Function(NamedTuple):
    """A function that is being traced, or runs."""

    file: str
    first: Any  # its first argument, where that is known

    @staticmethod
    def traced(translator: Any) -> "Function":
        code = translator.f_code
        value: Any = translator.symbolic_locals.get(code.co_varnames[0]) if code.co_argcount else None
        value = value.realize() if hasattr(value, "realize") else value
        return Function(code.co_filename, getattr(value, "value", None))


def functions_that_are_traced() -> list[Function]:
    """The one that calls what is being traced now, and the one that calls that."""
    frame: Any = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), InstructionTranslatorBase):
        frame = frame.f_back
    caller = None if frame is None else getattr(frame.f_locals["self"], "parent", None)
    if caller is None:
        return []
    above = getattr(caller, "parent", None)
    if above is not None:
        return [Function.traced(caller), Function.traced(above)]
    while frame is not None and frame.f_code is not Twin.__call__.__code__:  # by whom the compiled function is called
        frame = frame.f_back
    return [] if frame is None else [Function.traced(caller), Function(frame.f_back.f_code.co_filename, None)]


class Twin:
    """What Dynamo calls back for code that it has not compiled yet with these hooks."""

    why = ""  # why it runs as it is written

    def __init__(self, callback: Any, key: Hashable) -> None:
        convert = callback._torchdynamo_orig_backend
        self.backend = _Backend(convert._torchdynamo_orig_backend, key)
        # Dynamo finds the backend by this name.
        self._torchdynamo_orig_backend = catch_errors_wrapper(convert._clone_with_backend(self.backend), callback.hooks)
        self._skipped: set[CodeType] = set()
        self._compiled: Counter[CodeType] = Counter()

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        code = frame.f_code
        if self.why:
            return _as_written(_FrameAction.SKIP)
        if code in self._skipped:
            return _as_written(_FrameAction.DEFAULT)
        if self._compiled[code] >= config.recompile_limit:
            return self._give_up(
                f"{code.co_name} was compiled {self._compiled[code]} times, the limit of torch.compile"
            )
        if len(_debug_get_cache_entry_list(code)) >= config.accumulated_recompile_limit // 2:
            return self._give_up(f"{code.co_name} was compiled too often with other taps in it")
        _refused.clear()
        _wholes.clear()
        self.backend.is_entangled, breaks = False, counters["graph_break"].total()
        try:
            with config.patch(_CONFIG):
                found = self._torchdynamo_orig_backend(frame, cache_entry, frame_state)
        except Exception as error:
            return self._give_up(_in_short(error))
        if _refused:
            return self._give_up(_refused[0])
        if _wholes and counters["graph_break"].total() != breaks:
            return self._give_up(_wholes[0])
        is_whole = counters["graph_break"].total() == breaks  # of a part, what others use is a tensor like any other
        if self.backend.is_entangled and is_whole and _waits_for_gradient(frame.f_locals.get("self")):
            return self._give_up(_ENTANGLED)
        if found.guarded_code is None:
            if found.apply_to_code:  # which would hold without the hooks as well
                self._skipped.add(code)
                found.apply_to_code = False
        else:
            self._compiled[code] += 1
            # Not one of those that the user's own code may have before it is no longer compiled again.
            guards: Any = found.guarded_code.guard_manager
            guards.id_matched_objs["a twin"] = weakref.ref(self.backend)
            FRAME_COMPILE_COUNTER[frame_state["_id"]] -= 1
        return found

    def _give_up(self, why: str) -> Any:
        self.why = why
        return _as_written(_FrameAction.SKIP)


class _Backend:
    """Calls the user's backend; equal to that of a twin with the same hooks.

    `is_entangled` is whether one output of the last graph was made from another, as a loss from logits.

    It has no `__getattr__`: that would be a function of ours which Dynamo looks at while it looks for the backend.
    """

    def __init__(self, inner: Any, key: Hashable) -> None:
        for name in dir(inner):  # such as get_compiler_config
            if not name.startswith("_"):
                setattr(self, name, getattr(inner, name))
        self.key = key
        self.is_entangled = False
        self.innermost = _innermost(inner)
        self._inner = _without_cuda_graphs(inner, self.innermost)

    def __call__(self, graph: Any, *args: Any, **kwargs: Any) -> Any:
        _check_can_stay(graph)
        self.is_entangled = self.is_entangled or _is_entangled(graph)
        if getattr(self.innermost, "compiler_name", "") == "cudagraphs":
            raise CannotStay("CUDA graphs would replay the kernels around a tap, and not the Python in it")
        return self._inner(graph, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backend) and self.key == other.key and self.innermost == other.innermost

    def __hash__(self) -> int:
        return hash(self.key)


def twin_of(callback: Any, key: Hashable) -> "Twin | None":
    """The twin of what Dynamo calls back; None where that is nothing that we know."""
    if isinstance(callback, Twin):
        return callback
    if type(callback) is not CatchErrorsWrapper:
        return None
    with _lock:
        twins = _twins.setdefault(callback, OrderedDict())
        twin = twins.get(key)
        if twin is None:
            twin = twins[key] = Twin(callback, key)
            if len(twins) > MOST:
                twins.popitem(last=False)  # what it compiled stays, and another with its key would find it
        twins.move_to_end(key)
        return twin


def _innermost(backend: Any) -> Any:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def _without_cuda_graphs(backend: Any, innermost: Any) -> Any:
    """Inductor without them; torch 2.11 does not notice that a graph has an operation in it that they cannot replay."""
    if not isinstance(innermost, torch._TorchCompileInductorWrapper):
        return backend
    own = copy.copy(innermost)
    own.config = {**innermost.config, "triton.cudagraphs": False}
    return own


def _as_written(callees: Any) -> Any:
    """Run one frame as it is written; what it calls too, or as Dynamo finds it."""
    return ConvertFrameReturn(frame_exec_strategy=_FrameExecStrategy(_FrameAction.SKIP, callees), apply_to_code=False)


def _check_can_stay(graph: torch.fx.GraphModule) -> None:
    """Refuse what is written into, and what is in a graph of its own, which may run again, as a checkpoint's does."""
    for node in graph.graph.nodes:
        if str(node.target).startswith("tenterhook.own") and node.meta["example_value"]._version:
            raise CannotStay("a module writes into an input that is edited, or whose gradient is asked for")
        if node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
            kind = node.target.name()
            inner = [getattr(graph, one.target) for one in node.all_input_nodes if one.op == "get_attr"]
            bodies = [one for one in inner if isinstance(one, torch.fx.GraphModule)]
            if kind not in _HOOKS and any(map(_has_tap, bodies)):
                raise CannotStay(f"a tap is inside a {kind}, a part of the graph that may run more than once")


def _is_entangled(graph: torch.fx.GraphModule) -> bool:
    """Whether one output is made from another, so that a hook on the other sees a part of its gradient alone."""
    (end,) = (node for node in graph.graph.nodes if node.op == "output")
    outputs = {node for node in end.all_input_nodes if _has_gradient(node)}
    waiting, seen = [before for node in outputs for before in node.all_input_nodes], set[Any]()
    while waiting:
        node = waiting.pop()
        if node in outputs:
            return True
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return False


def _has_gradient(node: Any) -> bool:
    return bool(getattr(node.meta.get("example_value"), "requires_grad", False))


def _waits_for_gradient(module: Any) -> bool:
    """Whether a hook that runs when this function has returned waits for the gradient of what it returns."""
    hooks = module._forward_hooks.values() if isinstance(module, torch.nn.Module) else ()
    return any(getattr(hook, "gradient", False) for hook in hooks)


def _has_tap(graph: torch.fx.GraphModule) -> bool:
    return any(
        getattr(node.target, "namespace", "") == "tenterhook" or str(node.target).startswith("tenterhook.")
        for part in graph.modules()
        if isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
    )


def _in_short(error: Exception) -> str:
    """An error of the compiler, without what it advises."""
    cause: BaseException = error
    while isinstance(cause, torch._dynamo.exc.BackendCompilerFailed) and cause.inner_exception is not None:
        cause = cause.inner_exception
    lines = [line.strip().removeprefix("Explanation: ") for line in str(cause).splitlines() if line.strip()]
    text = "; ".join(lines[:2])[:300]
    return text if isinstance(cause, CannotStay) else f"{type(cause).__name__}: {text}"
