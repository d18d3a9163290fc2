"""Runs that no training has made, of any size: written with the recorder's own writer."""

import numpy as np

from tenterhook.stats.arithmetic import Numbers
from tenterhook.stats.columns import INDEX, TABLE
from tenterhook.store.arrays import lists
from tenterhook.store.levels import levels_of
from tenterhook.store.schemas import arrow
from tenterhook.store.write import RankWriter, write_json

KINDS = ("output", "output_grad", "parameter", "parameter_grad", "update")
SIZES = {"output": 0.0, "output_grad": -3.0, "parameter": -1.0, "parameter_grad": -2.0, "update": -4.0, "input": 0.0}
BINS = 12  # in use, of each row
SOURCE = "/home/me/train.py:3"
FORWARD = """\
    def forward(self, x):
        x = self.a(x)
        for block in self.blocks:
            x = block(x)
        return self.b(x)
"""


def places_of(sites, kinds):
    """A row for each site and kind: parameters are those of the site."""
    return [
        ("net", f"{site}.weight" if what.startswith(("parameter", "update")) else site, what)
        for site in sites
        for what in kinds
    ]


def rms_of(places, steps):
    """Some size for each step and place, reproducible, which drifts."""
    numbers = np.arange(len(places))
    size = np.array([SIZES[what] for _, _, what in places]) + 0.5 * np.sin(numbers / 7)
    return 10.0 ** (size + 0.3 * np.sin(np.asarray(steps)[:, None] / 50 + numbers / 3))


def rows_of(places, steps, rms, broken=(), change=None):
    """Columns of the table of statistics; `broken` are pairs of a sample's and a place's index with a NaN.

    `change` may write into the numbers: steps × places × columns.
    """
    many, count = len(steps) * len(places), 1000
    numbers = np.zeros((many, len(TABLE)))
    flat = rms.ravel()
    numbers[:, INDEX["count"]] = numbers[:, INDEX["sampled"]] = count
    numbers[:, INDEX["sumsq"]] = flat**2 * count
    numbers[:, INDEX["min"]], numbers[:, INDEX["max"]] = -3 * flat, 3 * flat
    for sample, place in broken:
        numbers[sample * len(places) + place, INDEX["nan"]] = 1
    if change is not None:
        change(np.asarray(steps), numbers.reshape(len(steps), len(places), len(TABLE)))
    pa = arrow()
    exponents = np.clip(np.nan_to_num(np.log2(np.maximum(flat, 1e-37))).astype(int) + 127, 10, 240)
    half = BINS // 2
    bins = exponents[:, None] + np.concatenate([np.arange(half) - half, np.arange(half) - half + 256])
    counts = np.tile(np.array([1, 5, 20, 70, 200, 204] * 2), (many, 1))
    texts = [np.array(column, object) for column in zip(*places, strict=True)]
    return numbers, {
        "step": np.repeat(np.asarray(steps, np.int64), len(places)),
        **{
            name: pa.array(column.tolist()).take(pa.array(np.tile(np.arange(len(places)), len(steps))))
            for name, column in zip(("model", "site", "what"), texts, strict=True)
        },
        "calls": np.ones(many, np.int32),
        **{column.name: numbers[:, i].astype(column.dtype) for i, column in enumerate(TABLE)},
        "bins": lists(np.arange(many + 1) * BINS, bins.ravel(), pa.int16()),
        "counts": lists(np.arange(many + 1) * BINS, counts.ravel(), pa.int32()),
    }


def modules_of(sites, source=SOURCE):
    names = dict.fromkeys(".".join(site.split(".")[: i + 1]) for site in sites for i in range(site.count(".") + 1))
    inner = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    rest = [
        {"site": name, "class": "Block" if name in inner else "Linear", "source": "", "shapes": {"weight": [8, 8]}}
        for name in names
    ]
    return [{"site": ".", "class": "Net", "source": source, "shapes": {}}, *rest]


def describe(folder, sites, rank=0, steps=0, sampled=0, ended="exit 0", called="net", **more):
    model = {"name": called, "class": "Net", "parameters": 1234, "trainable": 1234, "compiled": False}
    known = {"rank": rank, "pid": 1, "steps": steps, "sampled": sampled, "optimizers": 1, "passes": steps}
    rules = [{"rule": "loss is NaN", "state": "clean", "why": ""}]
    info = {**known, "models": [{**model, "modules": modules_of(sites)}], "rules": rules, "failed": None}
    info |= {"sources": {SOURCE: {"line": 10, "text": FORWARD}}, "overhead": 0.012, "overhead_seconds": 0.5}
    if ended is not None:
        info["ended"] = ended
    folder.joinpath(f"rank-{rank}").mkdir(parents=True, exist_ok=True)
    write_json(folder / f"rank-{rank}" / "rank.json", {**info, **more})


def finding(step, rule="dead ReLU", site="a", what="output", severity="error", **more):
    texts = {"text": f"text of {rule}", "why": "because", "then": "do this"}
    return {
        "step": step,
        "rule": rule,
        "severity": severity,
        "model": "net",
        "site": site,
        "what": what,
        **texts,
        **more,
    }


class Made:
    """A run that grows by `add`."""

    def __init__(
        self,
        folder,
        sites=("a", "blocks.0.x", "blocks.1.x", "blocks.2.x", "b"),
        kinds=KINDS,
        every=10,
        rank=0,
        change=None,
        model="net",
    ):
        self.folder, self.sites, self.rank, self.every = folder, sites, rank, every
        self.places = [(model, site, what) for _, site, what in places_of(sites, kinds)]
        self.change, self.model = change, model
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "run.json").exists():
            schedule = {"every": every, "dense": 0, "budget": None, "what": list(kinds), "sites": []}
            info = {"format": 1, "command": ["python", "train.py"], "started": 1.8e9, "schedule": schedule}
            write_json(folder / "run.json", info)
        self.writer = RankWriter(folder / f"rank-{rank}")
        self.samples = 0
        describe(folder, sites, rank, ended=None, called=model)

    def add(self, samples, broken=(), zero=(), findings=()):
        """Write a batch of samples; of `broken` and `zero`, the samples are counted from its first."""
        steps = (self.samples + np.arange(samples)) * self.every
        rms = rms_of(self.places, steps)
        for sample, place in zero:
            rms[sample, place] = 0
        numbers, columns = rows_of(self.places, steps, rms, broken, self.change)
        if not self.samples:
            texts = zip(*self.places, strict=True)
            named = dict(zip(("model", "site", "what"), map(list, texts), strict=True))
            dtypes = ["float32"] * len(self.places)
            self.writer.write("places", {"place": list(range(len(self.places))), **named, "dtype": dtypes})
        self.writer.write("stats", columns)
        codes = levels_of(Numbers(numbers))
        listed = [list(range(len(self.places))), *[None] * (samples - 1)]
        levels = lists(np.arange(samples + 1) * len(self.places), codes, arrow().int16())
        self.writer.write("levels", {"step": steps, "places": listed, "levels": levels})
        every = np.arange(samples * self.every) + self.samples * self.every
        loss = 2 * np.exp(-every / (every[-1] + 1)) + 0.05 * np.sin(every)
        self.writer.write(
            "steps", {"step": every, "loss": loss, "rates": [[0.01]] * len(every), "sampled": every % self.every == 0}
        )
        if findings:
            self.writer.write(
                "findings", {name: [row.get(name) for row in findings] for name in (*findings[0], "until")}
            )
        self.samples += samples
        return self

    def end(self, ended="exit 0", **more):
        self.writer.close()
        describe(self.folder, self.sites, self.rank, self.samples * self.every, self.samples, ended, self.model, **more)
        return self.folder
