"""What is known of the birth of a value, as a person reads it."""

import re
from dataclasses import dataclass

from tenterhook.birth.lines import Line
from tenterhook.birth.made import Made

_INTERNAL = re.compile(r"^_+|_(forward|backward|for_cpu|cuda|legit)$|^native_")

_DATA = "look at the data: this batch has them before the model sees it"
_SLOPE = "the slope is infinite there: add a small number to its input, or keep such values out of it (not with where)"
_DIVISOR = "add a small number to the divisor, or clamp it"
_SMALLER = "make its inputs smaller"
_OF_OVERFLOW = {
    **dict.fromkeys(("div", "reciprocal", "rsqrt", "remainder", "fmod", "layer_norm", "batch_norm"), _DIVISOR),
    "exp": "clamp its input, or subtract its maximum first",
}
_REMEDIES = {
    **_OF_OVERFLOW,
    **dict.fromkeys(("log", "log2", "log10", "log1p"), "clamp its input, or use log_softmax or logsigmoid"),
    **dict.fromkeys(("softmax", "log_softmax"), "leave one place of every row open, or leave out such rows"),
    **dict.fromkeys(("sqrt", "pow", "acos", "asin", "atanh", "logit"), "clamp its input to where it is defined"),
    "mean": "leave out what has no values, or divide by at least 1",
    "nll_loss": "leave out batches without a target, or divide by at least 1",
    "std": "use more than one value, or correction=0",
}


_NOT_FINITE = ("NaN", "+inf", "-inf")


@dataclass(frozen=True, slots=True)
class Birth:
    """The first operation that made such a value: where it stands, what it was given, and why if that can be known."""

    operation: str  # "log"; of a backward pass the operation whose gradient it was
    backward: bool
    received: bool  # it was in an input or a parameter: nothing made it here
    address: str  # of the variable or module; empty outside of the model
    line: Line | None
    why: str
    inputs: tuple[str, ...]
    output: str
    values: str  # "NaN", "+inf", "-inf", or what else was looked for

    @property
    def sentence(self) -> str:
        """The birth in one sentence."""
        if self.received:
            return f"{self.values} came in with {self.operation}" + (f", used at {self.line}" if self.line else "")
        what = f"the gradient of {self.operation}" if self.backward else self.operation
        inside = f" in {self.address}" if self.address else ""
        at = f", at {self.line}" if self.line else ""
        return f"{self.values} was made by {what}{inside}{at}"

    @property
    def remedy(self) -> str:
        """What is usually done about it."""
        if self.received:
            is_input = self.operation.startswith("input")
            return _DATA if is_input else "it was not finite before this step: look at what wrote it"
        if "squares" in self.why:
            return f"{_SMALLER}, or look at what makes them so large"
        name = self.operation
        if too_large := re.search(r"is more than (\w+) can hold", self.why):
            is_small_type = "float8" in too_large[1] or "float16" in too_large[1]
            return f"compute this in float32, or {_SMALLER}" if is_small_type else _OF_OVERFLOW.get(name, _SMALLER)
        return _SLOPE if self.backward else _REMEDIES.get(name, "look at the inputs of that line")

    def __str__(self) -> str:
        lines = [self.sentence]
        if self.line and self.line.text:
            lines.append(f"      {self.line.text}")
        if self.why or self.values in _NOT_FINITE:
            lines.append(f"  why     {self.why or 'not known: its inputs show no reason'}")
        lines += [f"  {'input ' if not i else '      '}  {one}" for i, one in enumerate(self.inputs)]
        lines.append(f"  result  {self.output}")
        return "\n".join(lines)


def birth_of(made: Made, values: str = "") -> Birth:
    """Of something bad: the facts of where it came from."""
    first = made.origin()
    values = values or ("NaN" if first.kinds.nan else "+inf" if first.kinds.plus else "-inf")
    why = "it was there before" if first.is_given else first.why
    return Birth(
        operation=_operation(first),
        backward=bool(first.node),
        received=first.is_given,
        address=first.line.address if first.line else "",
        line=first.line,
        why=why,
        inputs=tuple(first.inputs),
        output=first.output,
        values=values,
    )


def _operation(made: Made) -> str:
    if made.is_given:
        return made.operation
    name = re.sub(r"Backward\d*$", "", made.node)
    if name:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    before = ""
    name = made.operation
    while name != before:
        before, name = name, _INTERNAL.sub("", name)
    return name
