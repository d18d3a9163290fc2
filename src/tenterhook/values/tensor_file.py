"""Safetensors files with something of ours in the header, as JSON. No code, no pickle."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from tenterhook.errors import TenterhookError


class TensorFile:
    """One kind of such files: the key in the header, what they hold, and the error to raise."""

    def __init__(self, key: str, what: str, error: type[TenterhookError], hint: str) -> None:
        self.key = key
        self.what = what
        self.error = error
        self.hint = hint  # how such a file is written

    def write(self, file: str | Path, tensors: dict[str, Tensor], content: Any) -> None:
        """Write tensors that share no memory, and what goes into the header."""
        if not Path(file).parent.is_dir():
            raise self.error(f"{file} cannot be written: there is no folder {Path(file).parent}")
        safetensors = _safetensors(self.what)
        try:
            safetensors.torch.save_file(tensors, file, metadata={self.key: json.dumps(content)})
        except (ValueError, RuntimeError, OSError, safetensors.SafetensorError) as error:
            raise self.error(f"{self.what} cannot be saved: {error}") from error

    def read(self, file: str | Path) -> tuple[Any, dict[str, Tensor]]:
        """What is in our header in a file, and its tensors."""
        safetensors = _safetensors(self.what)
        if not Path(file).is_file():
            raise FileNotFoundError(f"there is no file {file}")
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                header = (opened.metadata() or {}).get(self.key)
                if header is None:
                    raise self.error(f"{file} holds no {self.what}; write them with {self.hint}")
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except safetensors.SafetensorError as error:
            what = f"is no safetensors file, so it holds no {self.what}"
            raise self.error(f"{file} {what}: {error}") from None
        try:
            return json.loads(header), tensors
        except (ValueError, RecursionError) as error:
            raise self.error(f"{file} cannot be read as {self.what}: {error}") from error


def _safetensors(what: str) -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise ImportError(f'{what} in files need safetensors: pip install "tenterhook[safetensors]"') from None
    return safetensors
