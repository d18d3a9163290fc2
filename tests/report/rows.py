"""Findings as they are read from a run."""


def row(rule, step, severity="warn", place=None, **more):
    model, _, site = (place or "").partition(": ")
    where = {"model": model or None, "site": site or None, "what": None, "rank": 0}
    texts = {"text": f"text of {rule}", "why": f"why of {rule}", "then": f"next of {rule}"}
    return {"rule": rule, "severity": severity, "step": step, "until": None, **where, **texts, **more}
