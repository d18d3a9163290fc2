"""Where a run was made: versions, devices, command, git state."""

import os
import platform
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from tenterhook import __version__


def versions() -> dict[str, str]:
    """Of what a training runs on."""
    return {"tenterhook": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def surroundings(command: list[str]) -> dict[str, Any]:
    """What run.json says about where and how: versions, command, git state, time."""
    devices = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    )
    return {
        "command": command,
        "folder": str(Path.cwd()),
        "started": time.time(),
        "versions": versions(),
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "devices": devices,
        "git": _git_state(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
    }


def _git_state() -> dict[str, Any] | None:
    """The commit of the working directory and whether something is changed, or None."""

    def git(*words: str) -> str:
        done = subprocess.run(("git", *words), capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
