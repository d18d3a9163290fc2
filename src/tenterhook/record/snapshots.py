"""Small pictures of what layers give: feature maps and attention maps, a few over the whole training."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tenterhook.store.write import write_json

_SITES, _CHANNELS, _SIDE = 12, 16, 64  # the most of each
_SMALLEST = 4  # pixels: less is no picture


class Snapshots:
    """Keeps at most `most` sampled steps: where there are more, every second one goes, and the next are rarer."""

    def __init__(self, folder: Path, most: int) -> None:
        import safetensors.torch  # where it is not installed, this says so before the training begins

        self._save = safetensors.torch.save_file
        self._folder, self._most = folder, most
        self._kept: dict[int, list[dict[str, Any]]] = {}  # by step: what is in its file
        self._sites: set[tuple[str, str]] = set()
        self._step, self._next, self._between = -1, 0, 1
        self._tensors: dict[str, Tensor] = {}
        self._told: list[dict[str, Any]] = []
        self.failed: str | None = None

    def look(self, model: str, site: str, is_convolution: bool, step: int, value: Tensor) -> None:
        """A layer has given this value."""
        if self.failed is not None or (step != self._step and step < self._next):
            return
        if step != self._step:
            self.write()
            self._step = step
        what = _kind(value, is_convolution)
        if what is None or not self._takes(model, site):
            return
        picture = _small(value)
        name = str(len(self._told))
        self._tensors[name] = picture
        where = {"step": step, "model": model, "site": site, "what": what, "shape": list(picture.shape)}
        self._told.append({**where, "file": f"{step}/{name}"})

    def write(self) -> None:
        """Write what the last step has given, and thin out."""
        if not self._told or self.failed is not None:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            self._save(self._tensors, self._folder / f"{self._step}.safetensors")
            self._kept[self._step] = self._told
            while len(self._kept) > self._most:
                for step in list(self._kept)[1::2]:
                    (self._folder / f"{step}.safetensors").unlink(missing_ok=True)
                    del self._kept[step]
                self._between *= 2
            write_json(self._folder / "pictures.json", [one for told in self._kept.values() for one in told])
        except Exception as error:  # a full disk: the statistics matter more
            self.failed = f"{type(error).__name__}: {error}"
        self._next = self._step + self._between
        self._tensors, self._told = {}, []

    def _takes(self, model: str, site: str) -> bool:
        if len(self._sites) < _SITES:
            self._sites.add((model, site))
        known = any(one["model"] == model and one["site"] == site for one in self._told)
        return (model, site) in self._sites and not known  # the first call of a step


def _kind(value: Tensor, is_convolution: bool) -> str | None:
    """Feature maps have channels before two sides; attention maps are square, and not of a convolution."""
    shape = value.shape
    if not value.is_floating_point() or value.layout is not torch.strided or value.dim() not in (3, 4):
        return None
    if min(shape[-2:]) < _SMALLEST or not value.numel():
        return None
    if is_convolution:
        return "feature maps" if value.dim() == 4 else None
    return "attention" if shape[-1] == shape[-2] and (value.dim() == 3 or shape[1] <= _SIDE) else None


@torch.no_grad()
def _small(value: Tensor) -> Tensor:
    """Of the first sample, some channels, made smaller by averages."""
    picture = value.detach()[0]
    picture = picture[:_CHANNELS] if picture.dim() == 3 else picture[None]
    high, wide = (min(side, _SIDE) for side in picture.shape[-2:])
    if (high, wide) != tuple(picture.shape[-2:]):
        picture = torch.nn.functional.adaptive_avg_pool2d(picture.float(), (high, wide))
    return picture.to("cpu", torch.float32, copy=True).contiguous()
