"""Snapshots of feature maps and attention maps, as the recorder has written them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tenterhook.errors import TenterhookError

_MOST = 4096  # pictures, and pixels of a side


class NoPicture(TenterhookError, LookupError):
    """A picture that is not there, or cannot be read."""


def listed(folder: Path) -> list[dict[str, Any]]:
    """The pictures of a rank in the order of time; those that make no sense are left out."""
    try:
        found = json.loads((folder / "snapshots" / "pictures.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    return [one for one in found[:_MOST] if _makes_sense(one)] if isinstance(found, list) else []


def pixels(folder: Path, file: str) -> bytes:
    """A picture, by `file` of its entry: a line with its lowest and highest value, then a byte for each pixel.

    0 is the lowest and 254 the highest; 255 is not finite.
    """
    if not any(one["file"] == file for one in listed(folder)):
        raise NoPicture(f"there is no picture {file!r} in this run")
    step, _, name = file.partition("/")
    try:
        from safetensors.numpy import load_file

        found = load_file(folder / "snapshots" / f"{int(step)}.safetensors")[name].astype(np.float64)
    except ImportError as error:
        raise NoPicture(
            f'reading pictures needs safetensors ({error}); pip install "tenterhook[safetensors]"'
        ) from error
    except Exception as error:  # it has classes of its own for what is damaged
        raise NoPicture(f"the picture {file} cannot be read: {error}") from error
    finite = np.isfinite(found)
    low, high = (float(found[finite].min()), float(found[finite].max())) if finite.any() else (0.0, 0.0)
    with np.errstate(all="ignore"):
        shades = np.where(finite, np.round(254 * (found - low) / ((high - low) or 1.0)), 255)
    return json.dumps({"low": low, "high": high}).encode() + b"\n" + shades.astype(np.uint8).tobytes()


def _makes_sense(one: Any) -> bool:
    if not isinstance(one, dict) or not all(isinstance(one.get(k), str) for k in ("model", "site", "what", "file")):
        return False
    step, _, name = one["file"].partition("/")
    shape = one.get("shape")
    sides = isinstance(shape, list) and len(shape) == 3 and all(isinstance(n, int) and 0 < n <= _MOST for n in shape)
    digits = all(part.isascii() and part.isdecimal() and len(part) < 18 for part in (step, name))
    return sides and digits and isinstance(one.get("step"), int)
