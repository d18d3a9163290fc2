"""What is asked for inside a forward: addresses as patterns, and what each function must tell for them."""

from types import CodeType
from typing import TYPE_CHECKING

from torch import nn

from tenterhook.addresses.grammar import matches, split_number
from tenterhook.inside.copies import original
from tenterhook.inside.functions import codes_of, functions_of, is_plumbing, what_runs
from tenterhook.inside.instrument import Want
from tenterhook.inside.operation import is_operation
from tenterhook.platform.bytecode import COMPREHENSIONS

if TYPE_CHECKING:
    from tenterhook.inside.taps import WantedTap

PROBABILITIES = "probabilities"
# They take a fused path where nobody looks inside.
FUSED = (nn.MultiheadAttention.forward.__code__, nn.TransformerEncoderLayer.forward.__code__)


class Pattern:
    """An address as it was asked for, with the tap that is made again for each value which it means."""

    def __init__(self, tap: "WantedTap") -> None:
        self.tap = tap
        self.name, self.number = split_number(tap.site.address.inner)
        *self.helpers, self.last = self.name.split("/")[1:]
        self.is_of_helpers = bool(self.helpers) or "**" in self.last
        self.codes = codes_of(tap.site.module)

    def may_be_in(self, code: CodeType) -> bool:
        """Whether a function may hold such a value, by its name."""
        if "**" in self.name or code.co_name in COMPREHENSIONS:
            return True
        if not self.helpers:
            return code.co_name == "forward" or code in self.codes
        helper = self.helpers[-1]
        if "*" in helper or code.co_name.strip("<>") == helper:
            return True
        return code.co_name == "forward" and helper in code.co_qualname.split(".")  # it goes by its class

    def means(self, name: str, number: int) -> bool:
        """Whether it means the `number`-th assignment of a name within one call."""
        if self.number is not None and self.number >= 0 and self.number != number:
            return False
        return matches(self.name, name)


class Patterns:
    """All that one session asks for."""

    def __init__(self) -> None:
        self.of: dict[int, list[Pattern]] = {}  # by the id of the owner
        self.helpers: set[str] = set()  # the functions that are named in addresses
        self.of_helpers = False
        self.everything = False
        self.all_helpers = False  # whether any helper function may be meant
        self.any_name = False
        self.probabilities = False
        self._around: set[CodeType] = set()  # what runs when a module is called of whose helpers something is wanted
        self._found: dict[int, tuple[CodeType, Want]] = {}

    def add(self, tap: "WantedTap") -> Pattern:
        """One more address."""
        pattern, owner = Pattern(tap), tap.site.owner()
        self.of.setdefault(id(owner), []).append(pattern)
        self.helpers.update(pattern.helpers)
        self.any_name = self.any_name or "*" in pattern.last
        self.everything = self.everything or pattern.last == "**"
        self.all_helpers = self.everything or any("*" in name for name in self.helpers)
        self.of_helpers = self.of_helpers or pattern.is_of_helpers
        if pattern.last == PROBABILITIES:
            self.probabilities = True
            self.helpers.add("multi_head_attention_forward")  # it may hide a fused kernel
        if pattern.is_of_helpers:
            self._around.update(original(one.__code__) for one in functions_of(what_runs(owner)))
        return pattern

    def want(self, code: CodeType) -> Want:
        """What a function has to tell."""
        found = self._found.get(id(code))
        if found is None:
            found = self._found[id(code)] = code, self._find(code)
        return found[1]

    def _find(self, code: CodeType) -> Want:
        if is_plumbing(code.co_filename):
            return Want()
        if self.everything:
            return Want(every=True, operations=True, follow=True)
        names = {pattern.last for patterns in self.of.values() for pattern in patterns if pattern.may_be_in(code)}
        follow = (self.of_helpers and self._leads_on(code)) or (bool(names) and code in FUSED)
        if any("*" in name for name in names):
            return Want(frozenset(names), True, True, follow)
        operations = any(is_operation(name) or name in code.co_names for name in names)
        return Want(frozenset(names), operations=operations, follow=follow)

    def _leads_on(self, code: CodeType) -> bool:
        """Whether a function may call a helper that is meant."""
        is_named = code.co_name.strip("<>") in self.helpers or code.co_name in COMPREHENSIONS
        return is_named or self.all_helpers or code in self._around
