"""A zoo of small real trainings, with and without a planted fault. `python -m tests.zoo --check` runs them all."""
