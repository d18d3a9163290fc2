"""fastai's tabular quick start: a learner with its own optimizer (fastai's Adam), fit_one_cycle."""

import warnings

import numpy
import pandas
from digest import digest
from fastai.tabular.all import (
    Categorify,
    CategoryBlock,
    FillMissing,
    Normalize,
    TabularDataLoaders,
    accuracy,
    set_seed,
    tabular_learner,
)

warnings.filterwarnings("ignore")


def people(count):
    rng = numpy.random.default_rng(0)
    age, hours = rng.normal(40, 12, count), rng.normal(38, 9, count)
    job = rng.choice(["clerk", "teacher", "farmer", "smith"], count)
    rich = age / 12 + hours / 9 + (job == "smith") * 2 + rng.normal(0, 0.5, count) > 8
    return pandas.DataFrame({"age": age, "hours": hours, "job": job, "rich": numpy.where(rich, "yes", "no")})


def main():
    set_seed(0, reproducible=True)
    loaders = TabularDataLoaders.from_df(
        people(1600),
        procs=[Categorify, FillMissing, Normalize],
        cat_names=["job"],
        cont_names=["age", "hours"],
        y_names="rich",
        y_block=CategoryBlock(),
        valid_idx=[*range(1280, 1600)],
        bs=64,
        num_workers=0,
    )
    learn = tabular_learner(loaders, layers=[32, 16], metrics=accuracy)
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(3, 1e-2)
    print("validation", [float(value).hex() for value in learn.recorder.values[-1]])
    print("steps", len(learn.recorder.losses))
    print("weights", digest(learn.model))


if __name__ == "__main__":
    main()
