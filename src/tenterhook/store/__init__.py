"""A run on disk: run.json and Arrow streams, one folder per rank. Nothing here imports torch. See docs/format.md."""

from tenterhook.store.run import Run, open_run
from tenterhook.store.write import RankWriter, new_folder

__all__ = ["RankWriter", "Run", "new_folder", "open_run"]
