"""Arrow arrays, made of their bytes: `pyarrow.array` imports pandas where that is installed, for half a second.

Nor do they take or cast, for which pyarrow imports all that it can compute.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np

from tenterhook.store.schemas import arrow


def array(values: Any, kind: Any) -> Any:
    """Of a list in which None is null, or a NumPy array in which what is masked is; an Arrow array as it is."""
    pa = arrow()
    if isinstance(values, pa.Array):
        return values if values.type == kind else values.cast(kind)
    many, null = len(values), _nulls(values)
    valid = _bits(~null) if null.any() else None
    if pa.types.is_list(kind):
        parts = [part or () for part in values]
        inside = array(list(chain.from_iterable(parts)), kind.value_type)
        return pa.Array.from_buffers(kind, many, [valid, _offsets(parts)], children=[inside])
    if pa.types.is_string(kind):
        return strings([encoded(text or "") for text in values], valid)
    filled = np.where(null, 0, np.asarray(values, dtype=object if isinstance(values, list) else None))
    return pa.Array.from_buffers(kind, many, [valid, _numbers(filled, kind)])


def encoded(text: str) -> bytes:
    """As Arrow has it; what is no character is spelt out."""
    return text.encode(errors="backslashreplace")


def strings(texts: Sequence[bytes], valid: Any = None) -> Any:
    """Of texts that are encoded."""
    pa = arrow()
    return pa.Array.from_buffers(pa.string(), len(texts), [valid, _offsets(texts), pa.py_buffer(b"".join(texts))])


def lists(starts: Any, inside: Any, kind: Any) -> Any:
    """Lists of what is in one array, each from one start to the next."""
    pa = arrow()
    offsets = pa.py_buffer(np.ascontiguousarray(starts, dtype=np.int32))
    return pa.Array.from_buffers(pa.list_(kind), len(starts) - 1, [None, offsets], children=[array(inside, kind)])


def _nulls(values: Any) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    if isinstance(values, np.ndarray):
        return np.ma.getmaskarray(values)
    return np.fromiter((value is None for value in values), dtype=bool, count=len(values))


def _numbers(values: Any, kind: Any) -> Any:
    pa = arrow()
    if pa.types.is_boolean(kind):
        return _bits(values.astype(bool))
    letter = "f" if pa.types.is_floating(kind) else "i"
    return pa.py_buffer(np.ascontiguousarray(values, dtype=f"{letter}{kind.bit_width // 8}"))


def _bits(values: Any) -> Any:
    return arrow().py_buffer(np.packbits(values, bitorder="little"))


def _offsets(parts: Iterable[Sequence[Any]]) -> Any:
    return arrow().py_buffer(np.fromiter(accumulate(map(len, parts), initial=0), dtype=np.int32))
