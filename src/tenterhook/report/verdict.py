"""The verdict: what the rules found in a run, for a person. Works on the files; torch is not needed."""

from dataclasses import dataclass, field
from pathlib import Path

from tenterhook.report import remarks
from tenterhook.report.box import box
from tenterhook.report.causes import Finding, by_severity, told_together, worst_of
from tenterhook.report.ranks import RANKS, compare_ranks
from tenterhook.store.run import Run


@dataclass
class Verdict:
    """Findings, and what was clean or not checked; `str()` is the box."""

    folder: str
    models: str = ""
    steps: str = ""
    findings: list[Finding] = field(default_factory=list)
    clean: list[str] = field(default_factory=list)
    unchecked: list[tuple[str, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # lines below the findings
    details: list[str] = field(default_factory=list)  # those for which they stand, at length
    left_out: str = ""  # samples
    nothing: str = "nothing was trained"  # why there was nothing to check
    about: dict[str, str] = field(default_factory=dict)  # each of several models by its name

    @classmethod
    def of(cls, run: Run, shown: Path | None = None, compare: bool = True) -> "Verdict":
        """The verdict on a run as it is on disk now; `shown` is its folder as a person knows it.

        To compare ranks, all of their statistics are read.
        """
        info = run.rank_info(0)
        schedule = run.info.get("schedule", {})
        states = info.get("rules", [])
        verdict = cls(str(shown or run.folder), remarks.models(info), remarks.steps(run, info))
        verdict.findings = run.findings().to_pylist()
        found = {row["rule"] for row in verdict.findings}
        verdict.clean = [s["rule"] for s in states if s["state"] == "clean" and s["rule"] not in found]
        verdict.unchecked = [(s["rule"], s["why"]) for s in states if s["state"] == "not checked"]
        if len(run.ranks) > 1:
            verdict._add_ranks(compare_ranks(run) if compare else "ranks are compared once the run has ended")
        verdict.nothing = remarks.nothing(info)
        verdict.about = remarks.each_model(info)
        verdict.left_out = remarks.left_out(schedule, info)
        rest = [*remarks.on_the_run(run, info)]
        verdict.remarks = [*remarks.cost(schedule, info), *remarks.broken(verdict.unchecked), *rest]
        verdict.details = [*remarks.cost(schedule, info), *remarks.left_out_at_length(schedule, info), *rest]
        return verdict

    @property
    def worst(self) -> str | None:
        """The severity of the worst finding, or None."""
        return worst_of(self.findings) if self.findings else None

    @property
    def groups(self) -> list[list[Finding]]:
        """The findings by their causes, worst first."""
        return by_severity(told_together(self.findings))

    def __str__(self) -> str:
        return self.box()

    def box(self, width: int = 100, colour: bool = False, everything: bool = False) -> str:
        """The verdict in a frame of this width: in short, or everything that is known."""
        return box(self, width, colour, everything)

    def _add_ranks(self, compared: Finding | str) -> None:
        if not isinstance(compared, str):
            self.findings.append(compared)
        elif compared == "clean":
            self.clean.append(RANKS)
        else:
            self.unchecked.append((RANKS, compared))
