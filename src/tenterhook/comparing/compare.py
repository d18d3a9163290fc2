"""compare: where two models first part.

print(compare(a, b, x))                               every module, in the order of the run
compare(a, b, x).first                                the first place that makes a difference, and its line
compare(model, x, under=in_dtype(torch.bfloat16))     one model under two conditions
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tenterhook.addresses.grammar import Address, escape, parse
from tenterhook.addresses.modules import own_tensors, tensors_of
from tenterhook.addresses.sites import Selector, check_model, resolve
from tenterhook.comparing import opaque, reference
from tenterhook.comparing.align import Alignment, is_below
from tenterhook.comparing.comparison import Comparison, First, Row
from tenterhook.comparing.conditions import Condition, as_condition
from tenterhook.comparing.following import Found, Layout
from tenterhook.comparing.in_turn import Outcome, Two, run
from tenterhook.comparing.judge import Judged, judge
from tenterhook.comparing.line import line_in
from tenterhook.comparing.loss import WrongCallError, loss_of, without_gradient
from tenterhook.comparing.saved import compare_kept, is_kept, keys_of
from tenterhook.comparing.source import Key
from tenterhook.comparing.why import code_of, differences
from tenterhook.values.tree import describe, leaves, rebuild_live

_NOT_GIVEN: Any = object()
_IN_B = "in b: "  # before the names of modules of b that have no partner
_NOTHING = Condition("", model=lambda model: model)


def compare(
    a: Any,
    b: Any = None,
    inputs: Any = _NOT_GIVEN,
    *,
    under: Any = None,
    match: Selector = "**",
    rename: Mapping[str, str] | None = None,
    layout: Mapping[str, Layout] | None = None,
    b_inputs: Any = _NOT_GIVEN,
    grad: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    reference: bool = False,
) -> Comparison:
    """Where two models, or one model under two conditions, first part.

        found = compare(a, b, x)
        print(found)                  # a table in the order of the run
        found.first                   # the first place whose inputs agree and whose output does not

    `inputs` is the models' argument, a tuple of arguments, or a dict of keyword arguments; `b_inputs`, where b takes
    them in another form. Models whose modules have other names are aligned by themselves; `rename` maps patterns of
    a's names to b's, and `layout` an address of a to a function that makes of its value what b has there. `match`
    says which modules of a; `"**/**"`, every value inside the forwards, too. `compare(model, inputs, under=...)`
    compares a model with itself: under a dtype, a device, `torch.compile`, or a condition of `tenterhook.comparing`.
    `grad=True` compares gradients, too, of `loss(output)`. `reference=True` runs both in float64 as well, which tells
    rounding from everything else, and which of the two is right. a may be what was captured, by address. Both models,
    random states and gradients are left as they were; without inputs, a and b are both what was captured.
    """
    if under is not None:
        if inputs is not _NOT_GIVEN:
            raise TypeError("with under= there is one model: compare(model, inputs, under=...)")
        b, inputs = None, b
    elif is_kept(a) and is_kept(b):
        return compare_kept(a, b)
    elif inputs is _NOT_GIVEN:
        raise TypeError("compare needs two models and inputs: compare(a, b, inputs); or compare(model, inputs, under=)")
    condition = _NOTHING if under is None else as_condition(under)
    if loss is not None and not grad:
        raise TypeError("loss= is for gradients: compare(a, b, inputs, grad=True, loss=...)")
    if not is_kept(a):
        check_model(a, "compare")
    else:
        check_model(b, "compare")
        if grad or reference:
            raise TypeError("grad=True and reference=True need both models; one of the two is what was captured")
        return _Comparing(None, b, condition, match, rename, layout).of_saved(a, inputs)
    other = condition.model(a) if b is None else b
    check_model(other, "compare")
    given_b = condition.inputs(inputs) if b_inputs is _NOT_GIVEN else b_inputs
    if condition.compiles is not None or opaque.is_compiled(other):
        if grad or reference:
            raise TypeError("grad=True and reference=True need models that run as Python; torch.compile runs this one")
        return opaque.compare_compiled(a, other, condition.compiles, inputs)
    comparing = _Comparing(a, other, condition, match, rename, layout)
    return comparing.of_models(inputs, given_b, loss_of(loss) if grad else None, reference)


def _check_ran(free: Outcome, inputs: Any) -> None:
    """Raise where it was not the models that failed, but what they were given."""
    for error in free.failed:
        if isinstance(error, WrongCallError):
            raise error
    if all(free.failed) and not free.found:
        sides = zip("ab", free.failed, free.went, strict=True)
        how = [f"{name} raised {_failure(error, went)}" for name, error, went in sides]
        what = f"neither model runs with these inputs, {describe(inputs)}"
        raise TypeError(f"{what}: {'; '.join(how)}") from free.failed[0]


def _failure(error: BaseException | None, went: list[str]) -> str:
    if error is None:
        return ""
    where = f" in {escape(went[0])}" if went else ""
    return f"{type(error).__name__}{where}: {str(error).partition(chr(10))[0]}"


class _Comparing:
    """One comparison, on its way."""

    def __init__(
        self,
        a: nn.Module | None,
        b: nn.Module,
        condition: Condition,
        match: Selector,
        rename: Mapping[str, str] | None,
        layout: Mapping[str, Layout] | None,
    ) -> None:
        self.a, self.b, self.condition = a, b, condition
        self.alignment = Alignment(b if a is None else a, b, rename)
        asked = self._asked(b if a is None else a, match)
        self.inner = list(asked) if isinstance(match, str) and "/" in match else []
        pairs = {x: y for x, y in self.alignment.pairs.items() if x in asked or x == "."}
        self.mine = {x: self.alignment.a[x] for x in pairs}
        self.theirs = {x: self.alignment.b[y] for x, y in pairs.items()}
        self.layouts = self._layouts(b if a is None else a, layout or {})
        expects = f"{condition}: what was to be expected is {condition.expects}"
        self.notes = [expects] if str(condition) else []

    def _asked(self, a: nn.Module, match: Selector) -> set[str]:
        """The names that are asked for."""
        names = {id(module): name for name, module in self.alignment.a.items()}
        return {names[id(site.owner())] for site in resolve(a, match) if id(site.owner()) in names}

    def _layouts(self, a: nn.Module, layout: Mapping[str, Layout]) -> dict[tuple[str, str], Layout]:
        names = {id(module): name for name, module in self.alignment.a.items()}
        found = {}
        for selector, function in layout.items():
            for site in resolve(a, selector):
                found[names[id(site.owner())], site.address.role] = function
        return found

    def of_models(self, inputs: Any, b_inputs: Any, loss: Any, is_judged: bool) -> Comparison:
        assert self.a is not None
        two = Two(
            self.mine,
            self.theirs,
            _for(self.a, inputs),
            _for(self.b, b_inputs),
            self.condition,
            self.layouts,
            parameters=self._parameters() if loss is not None else (),
        )
        free = run(two, inner=self.inner, loss=loss)
        _check_ran(free, inputs)
        if loss is not None and not any(free.failed):
            self.notes += without_gradient(free.found, two.parameters)
        judged = reference.truth(two, self.inner) if is_judged else None
        return self._told(two, free, judged, loss)

    def of_saved(self, saved: Any, inputs: Any) -> Comparison:
        """a is values from a file."""
        kept, notes = keys_of(saved, self.alignment)
        if not kept:
            raise TypeError(f"nothing that was saved has a place in b; {'; '.join(notes[:3])}")
        here = {key.name for key in kept} | {"."}
        self.theirs = {name: module for name, module in self.theirs.items() if name in here}
        two = Two(None, self.theirs, None, _for(self.b, inputs), self.condition, self.layouts, kept)
        comparison = self._told(two, run(two), None)
        comparison.notes += notes
        return comparison

    def _told(self, two: Two, free: Outcome, truth: reference.Truth | None, loss: Any = None) -> Comparison:
        forced = None
        if any(not one.apart.is_equal for one in free.found):
            forced = run(two, force=True, inner=self.inner, loss=loss)
        judged = judge(free, forced, self.theirs, truth)
        rows = [self._row(one, verdict, own, truth) for one, verdict, own in judged.rows]
        failed = tuple(_failure(error, went) for error, went in zip(free.failed, free.went, strict=True))
        return Comparison(
            rows,
            self._first(two, judged),
            self.alignment,
            [*self._alone(free.only_a), *map(escape, self.alignment.only_a)],
            [*self._alone(free.only_b), *map(escape, self.alignment.only_b)],
            failed,  # type: ignore[arg-type]
            str(self.condition),
            self.notes,
        )

    def _row(self, one: Found, verdict: str, own: Any, truth: reference.Truth | None) -> Row:
        key, spot = one.key, one.spot
        code = code_of(self.theirs[key.name]) if key.name in self.theirs else None
        source = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
        note = one.apart.what or one.missing
        return Row(
            self._address(key),
            self._address(key, in_b=True),
            str(spot.source) if spot is not None else source,
            one.shape,
            one.apart,
            verdict,
            own,
            note,
            None if truth is None else truth.wrong(key),
        )

    def _address(self, key: Key, in_b: bool = False) -> str:
        name = self.alignment.pairs.get(key.name, key.name) if in_b else key.name
        call = f"@{key.call}" if key.call else ""
        if key.role in ("in", "out"):
            return str(Address(escape(name), role=key.role)) + call
        if key.role.startswith("grad"):
            leaf = key.role.removeprefix("grad")
            return f"grad({escape(name)}{':out' if leaf.startswith('[') else ''}{leaf}{call})"
        return str(parse(f"{escape(name)}{key.role.removesuffix('#0')}")) + call

    def _alone(self, keys: list[Key]) -> list[str]:
        return [self._address(key) for key in keys if key.role != "in"]

    def _first(self, two: Two, judged: Judged) -> First | None:
        one = judged.first
        if one is None:
            return None
        name, key = judged.owner, one.key
        first = First(
            escape(name),
            escape(self.alignment.pairs.get(name, name)),
            self._seen_at(name, one),
            one.apart,
            judged.call,
            why=tuple(self._why(name, judged)),
        )
        if one.spot is not None:
            first = replace(first, line=str(one.spot.text), source=str(one.spot.source))
        if "#" in key.role:
            return replace(first, inner=self._address(key))
        if two.a is None or key.role.startswith("grad"):
            return first
        line = line_in(two, self._without_partner(name), Key(name, "out", judged.call), key, judged.length)
        if line is None:
            return first
        where = first.other if line.name == name else escape(line.name.removeprefix(_IN_B))
        inner = str(parse(f"{where}{line.inner}"))
        return replace(first, line=line.text, source=line.source, inner=inner)

    def _without_partner(self, name: str) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
        """The modules inside one that have no partner, or were not asked for: of a and of b."""
        mine = {n: m for n, m in self.alignment.a.items() if n not in self.mine and is_below(n, name)}
        taken, other = {id(m) for m in self.theirs.values()}, self.alignment.pairs[name]
        left = {n: m for n, m in self.alignment.b.items() if id(m) not in taken and is_below(n, other)}
        return mine, {f"{_IN_B}{n}": module for n, module in left.items()}

    def _seen_at(self, name: str, one: Found) -> str:
        key = one.key
        leaf = "".join(f"[{part}]" for part in one.leaf)
        if key.role == "out":
            address = self._address(key)
            return address if not leaf or key.name == name else f"{escape(key.name)}:out{leaf}"
        return f"{escape(key.name)}:in{leaf}" if key.role == "in" else self._address(key)

    def _why(self, name: str, judged: Judged) -> list[str]:
        why = ["it writes into what it is given, in one of the two alone"] if judged.writes else []
        if judged.first is not None and judged.first.missing:
            why.append(judged.first.missing)
        if name in self.mine and self.a is not None:
            why += differences(self.mine[name], self.theirs[name])
        return why

    def _parameters(self) -> list[tuple[str, Tensor, Tensor]]:
        found = []
        for name, module in self.mine.items():
            theirs = own_tensors(self.theirs[name], "parameter")
            for part, tensor in own_tensors(module, "parameter").items():
                other = theirs.get(part)
                if tensor is not None and other is not None and tensor.shape == other.shape:
                    found.append((part if name == "." else f"{name}.{part}", tensor, other))
        return found


def _for(model: nn.Module, inputs: Any) -> Any:
    """Inputs on the device of a model, where all of it is on one."""
    devices = {tensor.device for _, (_, tensor) in tensors_of(model, "parameter")}
    if len(devices) != 1:
        return inputs
    (device,) = devices
    if all(tensor.device == device for _, tensor in leaves(inputs)):
        return inputs
    return rebuild_live(inputs, lambda _, tensor: tensor.to(device))
