"""Layers that the way back from the loss does not reach."""

from collections.abc import Iterator
from dataclasses import replace

from tenterhook.record.rule import Checked, Finding
from tenterhook.record.rules._depth import at_module, place_of
from tenterhook.record.rules.thresholds import CUT_SAMPLES
from tenterhook.record.step import Parameter, Step
from tenterhook.say import counted

Key = tuple[str, str]  # model and site


class CutOff(Checked):
    """In an optimizer and called before the first layer that gets gradients, or under no_grad, and without a gradient.

    A head that is not in use is called after layers that get some, and so is not meant; nor is what is written into.
    """

    name = "cut off from the loss"
    needs = f"fewer than {CUT_SAMPLES} sampled steps of an optimizer"

    def __init__(self) -> None:
        self._samples: dict[Key, int] = {}  # without a gradient, while an optimizer had it
        self._reached: set[Key] = set()  # those that got a gradient, or were written into
        self._marks: dict[Key, float] = {}
        self._told: dict[Finding, list[Key]] = {}

    def look(self, step: Step) -> Iterator[Finding]:
        """One finding for each model; it is closed when a gradient comes after all."""
        if not step.parameters:
            return
        idle = self._note(step)
        yield from self._over(step)
        told = {key for keys in self._told.values() for key in keys}
        cut = [key for key in _before_the_first(step, idle, self._reached) if self._samples[key] >= CUT_SAMPLES]
        for model in dict.fromkeys(model for model, site in cut if (model, site) not in told):
            keys = [key for key in cut if key[0] == model]
            finding = _finding(step, [idle[key] for key in keys])
            self._told[finding] = keys
            yield finding

    def _over(self, step: Step) -> Iterator[Finding]:
        """What is refuted by now."""
        for finding, keys in [*self._told.items()]:
            if self._reached.intersection(keys):
                del self._told[finding]
                yield replace(finding, severity="note", why="it is trained since", until=step.number - 1)

    def _note(self, step: Step) -> dict[Key, Parameter]:
        """Count the samples, and give those that had no gradient so far."""
        for key, mark in step.marks.items():
            if self._marks.setdefault(key, mark) != mark:
                self._reached.add(key)
        self._reached.update((one.model, one.site) for one in step.parameters if one.has_gradient)
        held = [one for one in step.parameters if one.trainable and one.rate is not None]
        idle = {key: one for one in held if (key := (one.model, one.site)) not in self._reached}
        for key in idle:
            self._samples[key] = self._samples.get(key, 0) + 1
        self.has_looked |= bool(step.order) and step.number >= CUT_SAMPLES
        return idle


def _before_the_first(step: Step, idle: dict[Key, Parameter], reached: set[Key]) -> list[Key]:
    """Those whose module is called before all that get gradients, or only under no_grad."""
    depths = [at for key in reached if (at := step.order.get(at_module(*key), -1)) >= 0]
    first = min(depths, default=-1)
    return [key for key in idle if _is_before(step, at_module(*key), first)]


def _is_before(step: Step, module: Key, first: int) -> bool:
    at = step.order.get(module, -1)
    return 0 <= at < first or (at < 0 and module in step.silent)


def _finding(step: Step, found: list[Parameter]) -> Finding:
    first = found[0]
    names = ", ".join(one.site for one in found[:4]) + (" …" if len(found) > 4 else "")
    is_silent = at_module(first.model, first.site) in step.silent
    how = "called under no_grad" if is_silent else "called before all layers that get gradients, and gets none"
    text = f"{how}: {names} ({counted(sum(one.size for one in found), 'value')})"
    why = "an optimizer has it, and no gradient comes back to it: it keeps its initial values"
    then = "look for detach(), .data, no_grad() or NumPy behind it; freeze it if it is not to be trained"
    return Finding(CutOff.name, "warn", step.number, text, place_of(first.model, first.site, step), why, then)
