"""watch: record a training from inside a program; and the same recorder for `tenterhook run`."""

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tenterhook.addresses.sites import check_model
from tenterhook.errors import RunError, TenterhookWarning
from tenterhook.record.guard import uninterrupted
from tenterhook.record.judge import Judge
from tenterhook.record.log import Log
from tenterhook.record.log_function import LogFunction, Stats
from tenterhook.record.places import KINDS
from tenterhook.record.recorder import Recorder
from tenterhook.record.rule import Rule
from tenterhook.record.rules import all_rules
from tenterhook.record.schedule import Schedule
from tenterhook.record.snapshots import Snapshots
from tenterhook.record.step import Step
from tenterhook.record.surroundings import surroundings
from tenterhook.say import counted, say
from tenterhook.store.run import Run, open_run
from tenterhook.store.schemas import arrow
from tenterhook.store.write import new_folder


@dataclass(frozen=True)
class Options:
    """What to record and how often."""

    every: int = 10
    dense: int = 20  # steps at the start of which each is sampled
    budget: float | None = None
    what: tuple[str, ...] = KINDS
    sites: tuple[str, ...] = ()
    snapshots: int = 0  # how many pictures to keep of a layer
    capsule: bool = False  # whether a step that is not finite is saved

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every}: sample every N-th step, with N of 1 or more")
        if self.dense < 0:
            raise ValueError(f"dense={self.dense}: sample each of the first N steps, with N of 0 or more")
        unknown = [name for name in self.what if name not in KINDS]
        if unknown:
            raise ValueError(f"there is nothing called {', '.join(unknown)} to record; there are {', '.join(KINDS)}")
        if self.snapshots < 0:
            raise ValueError(f"snapshots={self.snapshots}: how many to keep over the training, 0 or more")
        if self.budget is not None and not 0 < self.budget < 1:
            raise ValueError(f"budget={self.budget}: a share of the time between 0 and 1, such as 0.03")


def _rank() -> int:
    """Of this process."""
    return int(os.environ.get("RANK", "0"))


class Recording:
    """A run that is being recorded: the recorder, the rules and the files."""

    def __init__(
        self,
        folder: Path,
        options: Options,
        rules: Iterable[Rule] | None,
        command: list[str],
        log_function: LogFunction | None = None,
    ) -> None:
        arrow()
        self.folder = folder.absolute()  # the program may change its directory
        self.shown = folder
        schedule = Schedule(options.every, options.dense, options.budget)
        self.judge = Judge(all_rules() if rules is None else rules)
        self.rank = _rank()
        described = {"every": options.every, "dense": options.dense, "budget": options.budget}
        info = {**surroundings(command), "schedule": {**described, "what": options.what, "sites": options.sites}}
        self.snapshots = self._snapshots(options.snapshots)
        capsule = self.folder / f"rank-{self.rank}" / "capsule.safetensors" if options.capsule else None
        self.recorder = Recorder(
            self._take, self._complain, schedule, options.what, options.sites, self.snapshots, capsule
        )
        self.log = Log(self.folder, self.rank, self.judge, info, self.recorder.places)
        self._log_function = log_function
        self._described = 0
        self._again = 0.0  # when the file about the rank is written again, for a run that is killed
        self._pid = os.getpid()

    def _snapshots(self, many: int) -> Snapshots | None:
        folder = self.folder / f"rank-{self.rank}"
        return Snapshots(folder / "snapshots", many) if many else None

    def _take(self, step: Step) -> None:
        if self.log.take(step):
            self.recorder.schedule.found(self.recorder.steps)  # which may be some steps later
        if self._log_function is not None:
            self._log_function.call_for(step)
        now = time.monotonic()
        if len(self.recorder.models.all) != self._described or now >= self._again:
            self._described = len(self.recorder.models.all)
            self._describe()
            self._again = max(now + 2, time.monotonic() + 200 * (time.monotonic() - now))  # half a percent at most

    def _describe(self, **facts: Any) -> None:
        models = [model.describe() for model in self.recorder.models.all]
        facts["sources"] = {k: v for model in self.recorder.models.all for k, v in model.sources().items()}
        facts["further_models"] = self.recorder.models.passed_over
        facts["fused"] = self.recorder.fused
        by_hand = self.recorder.by_hand
        facts |= {"optimizers": self.recorder.optimizers, "awaits_optimizer": self.recorder.awaits_optimizer}
        facts |= {"passes": by_hand.passes, "by_hand": by_hand.noticed}
        self.log.describe(models=models, failed=self.recorder.failed, **facts)

    def _complain(self, what: str) -> None:
        say(f"tenterhook: recording stopped ({what}); the program goes on unchanged")

    is_open = True

    def is_mine(self) -> bool:
        """False in a forked process, which has nothing to do with it."""
        return os.getpid() == self._pid

    def close(self, ended: str) -> bool:
        """Write the rest; False in a forked process."""
        if not self.is_mine():
            return False
        self.is_open = False
        with uninterrupted():
            self.recorder.finish()
            if self.snapshots is not None:
                self.snapshots.write()
            try:
                try:
                    self.log.close()
                finally:  # whoever waits for this rank may read all of it then
                    self._describe(ended=ended, passed_over=self.recorder.schedule.passed_over)
            except Exception as error:  # a full disk, most likely: what was flushed can be read
                self.recorder.fail(error)
        return True


class watch:
    """Record the training of a model while the block runs: statistics over time, and what the rules find.

        with watch(model) as run:
            train(model)
        print(run.verdict())

    Steps are those of the optimizer that has the model's parameters, which is found by itself. All of the first 20
    (`dense`) are sampled, then every 10th (`every`) within a `budget`, a share of the time, and all for a while after a
    finding. It is written to `.tenterhook/<time>-<class>`, or to the folder `to`. `log(step, name, stats)` is called
    for what was measured in a sampled step, with names such as "parameter_grad/fc.weight":

        watch(model, log=lambda step, name, stats: writer.add_scalar(name, stats.norm, step))

    `rules` replaces the set of rules; `what` and `sites` say what to record. With `capsule=True` the first step that is
    not finite is saved, for `tenterhook replay`; for that, each step of a GPU is waited for.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        to: str | os.PathLike[str] | None = None,
        every: int = 10,
        dense: int = 20,
        budget: float | None = None,
        log: Callable[[int, str, Stats], object] | None = None,
        sites: str | Sequence[str] = (),
        what: str | Sequence[str] = KINDS,
        rules: Iterable[Rule] | None = None,
        snapshots: int = 0,
        capsule: bool = False,
    ) -> None:
        check_model(model, "watch")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            hint = f"; a folder is to={str(optimizer)!r}" if isinstance(optimizer, (str, os.PathLike)) else ""
            raise TypeError(f"what comes after the model is its optimizer, got {type(optimizer).__name__}{hint}")
        if to is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("the ranks of a job share one folder: give it as `to`, the same in each")
        self._model = model
        self._optimizer = optimizer
        self._rules = None if rules is None else list(rules)
        what, sites = ((one,) if isinstance(one, str) else tuple(one) for one in (what, sites))
        self._options = Options(every, dense, budget, what, sites, snapshots, capsule)
        self._log_function = None if log is None else LogFunction(log)
        self._to = None if to is None else Path(to)  # else a new folder, when it begins
        self._folder = None if to is None else Path(to).absolute()  # the program may change its directory
        self._recording: Recording | None = None

    def __enter__(self) -> "watch":
        if self._recording is not None:
            raise RuntimeError("a watch can be entered once; make a new one for the next block")
        if self._folder is None:
            self._to = new_folder(Path(".tenterhook"), type(self._model).__name__)
            self._folder = self._to.absolute()
        if (self._folder / f"rank-{_rank()}").exists():  # each rank looks for its own part: run.json belongs to all
            raise FileExistsError(f"{self._to} holds a run already; give another folder as `to`, or none for a new one")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._recording = Recording(self._folder, self._options, self._rules, list(sys.argv), self._log_function)
        self._recording.recorder.install([("model", self._model)], self._optimizer)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        recording = self._recording
        assert recording is not None
        recording.close("finished" if kind is None else kind.__name__)
        if kind is None and recording.log.steps == 0 and recording.recorder.failed is None:
            what = "there was no step of an optimizer with its parameters, and no backward pass through it"
            warnings.warn(f"watch recorded nothing: {what}", TenterhookWarning, stacklevel=2)

    @property
    def findings(self) -> list[Any]:
        """What the rules have found so far."""
        return [] if self._recording is None else list(self._recording.judge.findings)

    def open(self) -> Run:
        """The run, as `open_run` gives it."""
        if self._folder is None:
            raise RunError("this watch was not entered, so there is no run; open it after `with watch(...)`")
        return open_run(self._folder)

    def verdict(self, everything: bool = False) -> str:
        """The findings, as text, which a notebook shows as a page: by their causes, or all that is known."""
        from tenterhook.report.page import VerdictText
        from tenterhook.report.verdict import Verdict

        return VerdictText.of(Verdict.of(self.open(), self._to), everything)

    def __repr__(self) -> str:
        recording = self._recording
        if recording is None:
            return f"<watch of {type(self._model).__name__}, to be recorded in {self._to}>"
        if recording.is_open:
            found, so_far = counted(len(self.findings), "finding"), counted(recording.log.steps, "step")
            return f"<watch of {type(self._model).__name__} in {self._to}: {so_far} so far, {found}>"
        return str(self.verdict())

    def _repr_html_(self) -> str | None:
        recording = self._recording
        shown: Any = None if recording is None or recording.is_open else self.verdict()
        return None if shown is None else shown._repr_html_()
