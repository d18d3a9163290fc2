"""What can go wrong, each kind with a class of its own.

    TenterhookError
    ├── AddressError      (LookupError)   an address cannot be read, or nothing in the model answers to it
    ├── NotSeenError      (LookupError)   the value was asked for, but never came
    ├── AmbiguousError    (LookupError)   the address means several values
    ├── OverwrittenError  (RuntimeError)  kept without a copy, and changed in place since
    ├── EditError         (RuntimeError)  a change that cannot be made, or that made something else than the model needs
    ├── NonFiniteError    (ArithmeticError) a value is not finite; the message says where the first one was made
    ├── CaptureError      (ValueError)    captured values, or a step, that cannot be written to a file, or read from one
    └── RunError          (ValueError)    a recorded run that cannot be read
    TenterhookWarning     (UserWarning)   something asked for had no effect

Every message says what was asked, what was found, and what to do.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class TenterhookError(Exception):
    """The base of every error that tenterhook raises on purpose."""


class AddressError(TenterhookError, LookupError):
    """An address that cannot be read, or that nothing in the model answers to."""


class NotSeenError(TenterhookError, LookupError):
    """A value that was asked for and never came; the message says the most likely reason."""


class AmbiguousError(TenterhookError, LookupError):
    """An address that means several values where one was wanted."""


class OverwrittenError(TenterhookError, RuntimeError):
    """A value kept with `copy=False` that the model has changed in place since."""


class EditError(TenterhookError, RuntimeError):
    """A change that cannot be made at an address, or that gave something the model cannot go on with."""


class NonFiniteError(TenterhookError, ArithmeticError):
    """A gradient, loss or output that is not finite; `birth` has the facts of where it was made."""

    def __init__(self, birth: Any) -> None:
        super().__init__(str(birth))
        self.birth = birth


class CaptureError(TenterhookError, ValueError):
    """Captured values that cannot be written to a file, or a file of them that cannot be read."""


class RunError(TenterhookError, ValueError):
    """A recorded run that is not there or cannot be read."""


class TenterhookWarning(UserWarning):
    """Something that was asked for had no effect."""


def close_matches(name: str, known: Iterable[str], most: int = 4) -> list[str]:
    """The known names nearest to a misspelt one: those with the same last part, then those spelt alike."""
    known = list(dict.fromkeys(known))
    tail = name.rsplit(".", 1)[-1]
    same_tail = [other for other in known if other.rsplit(".", 1)[-1] == tail]
    alike = get_close_matches(name, known, n=most, cutoff=0.6)
    return list(dict.fromkeys([*same_tail[: most // 2], *alike]))[:most]
