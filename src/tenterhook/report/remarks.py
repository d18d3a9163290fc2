"""What is said of a run beside its findings: its title, and the lines below."""

from collections.abc import Iterable, Iterator
from typing import Any

from tenterhook.say import counted
from tenterhook.store.run import Run
from tenterhook.store.schemas import RAISED


def models(info: dict[str, Any]) -> str:
    """Which models there are, and how many optimizers where these are several."""
    known = info.get("models", [])
    if not known:
        return "no model was seen"
    if len(known) == 1:
        return f"{known[0]['name']} ({_class(known[0])})"
    total = sum(model.get("parameters") or 0 for model in known)
    names = ", ".join(model["name"] for model in known[:3]) + (" …" if len(known) > 3 else "")
    optimizers = info.get("optimizers") or 0
    return f"{len(known)} models ({names}{_parameters(total)})" + (f", {optimizers} optimizers" * (optimizers > 1))


def each_model(info: dict[str, Any]) -> dict[str, str]:
    """Several models by their names: class and size."""
    known = info.get("models", [])
    return {model["name"]: f"({_class(model)})" for model in known} if len(known) > 1 else {}


def steps(run: Run, info: dict[str, Any]) -> str:
    """How many steps there were, and of how many samples were taken."""
    many, sampled = info.get("steps", 0), info.get("sampled", 0)
    if "ended" not in info:  # what the tables hold, which are written more often
        column = run.steps(0)["sampled"].to_pylist()
        many, sampled = len(column), sum(column)
    ranks = f" · {len(run.ranks)} ranks" if len(run.ranks) > 1 else ""
    return f"{counted(many, 'step')}, {sampled:,} sampled{ranks}"


def nothing(info: dict[str, Any]) -> str:
    """Why there was nothing to check, if so."""
    if not info.get("models"):
        return "no model was seen"
    return "no rule had what it needs" if info.get("passes") else "nothing was trained"


def broken(unchecked: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Rules that raised."""
    return (f"{rule} was not checked to the end: {why}" for rule, why in unchecked if why.startswith(RAISED))


def cost(schedule: dict[str, Any], info: dict[str, Any]) -> Iterator[str]:
    """What watching took of the time."""
    share, later, seconds = (info.get(name) for name in ("overhead", "overhead_later", "overhead_seconds"))
    if seconds is None:
        return
    took = f"watching took {_seconds(seconds)}"
    if share is not None:
        usual = "" if later is None else f", {_share(later)} after step {schedule.get('dense', 0)}"
        yield f"{took}: {_share(share)} of the training's time{usual}{_above_budget(schedule, later)}"
    elif seconds:
        yield f"{took}, most of the time of such short steps"


def _above_budget(schedule: dict[str, Any], later: float | None) -> str:
    """Why it was more than the budget, where it was."""
    budget = schedule.get("budget")
    if not budget or later is None or later <= budget:
        return ""
    return f"; the {budget:.0%} budget can only leave out samples, and each step costs something without one, too"


def left_out(schedule: dict[str, Any], info: dict[str, Any]) -> str:
    """Samples that were not taken."""
    many, budget = info.get("passed_over"), schedule.get("budget") or 0
    return f"{counted(many, 'sample')} left out for the {budget:.0%} budget" if many else ""


def left_out_at_length(schedule: dict[str, Any], info: dict[str, Any]) -> Iterator[str]:
    """The same in full, with what to do about it."""
    many, budget = info.get("passed_over"), schedule.get("budget") or 0
    if many:
        what = f"left out to stay near the budget of {budget:.0%}: {counted(many, 'sample')}"
        yield f"{what}; what came and went in between was not seen; --every N samples whatever it costs"


def on_the_run(run: Run, info: dict[str, Any]) -> Iterator[str]:
    """What was not recorded, and how it ended."""
    if info.get("awaits_optimizer") and info.get("passes"):
        passes = f"the backward passes ({info['passes']:,}) are all in one step"
        yield f"there is an optimizer, and it has not stepped: {passes}"
    elif info.get("passes") and not info.get("optimizers", 1):
        yield "no optimizer of torch.optim has stepped: a step is a call of a model, and its backward pass"
        changed = "parameters changed from one backward pass to the next, so updates were recorded, too"
        yield changed if info.get("by_hand") else "no parameter of a model was seen to change between backward passes"
    yield from _not_recorded(run, info)
    yield from map(str, run.dropped.values())
    if info.get("failed"):
        yield f"recording stopped early: {info['failed']}"
    if "ended" not in info:
        yield "the program has not ended, or was killed; this is how far it was written"
    elif info["ended"] not in ("finished", "exit 0"):
        yield f"the program ended with {info['ended']}"


def _not_recorded(run: Run, info: dict[str, Any]) -> Iterator[str]:
    sites = run.info.get("schedule", {}).get("sites")
    if info.get("further_models"):
        yield f"models after the first {len(info['models'])} were not recorded"
    if many := info.get("unmeasured"):
        were = f"{counted(many, 'value')} {'was' if many == 1 else 'were'}"
        yield f"{were} not measured: sparse, or otherwise without numbers, or written into before"
    if info.get("fused"):
        yield "what is inside of an nn.TransformerEncoderLayer was not recorded where torch runs it as one operation"
    if sites and next(run.stream("stats", 0).batches(["step"]), None) is None:
        yield f"nothing in the models answers to --sites {','.join(sites)}"
    if any(model.get("compiled") for model in info.get("models", [])):
        yield "activations were not recorded: the model runs under torch.compile"


def _share(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _seconds(seconds: float) -> str:
    if 0 < seconds < 0.01:
        return "under 0.01 s"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:,.0f} s"


def _class(model: dict[str, Any]) -> str:
    return f"{model['class']}{_parameters(model.get('parameters'))}"


def _parameters(number: int | None) -> str:
    """Nothing where there are none, or the model was gone before they were counted."""
    return f", {_many(number)} parameter{'' if number == 1 else 's'}" if number else ""


def _many(number: int) -> str:
    for size, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return str(number)
