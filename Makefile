# Each target sets up what it needs: a virtual environment in .venv with the pinned dependencies.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
OTHERS := .venv-frameworks

.PHONY: demo test zoo frameworks selfcheck lint bench clean
demo: $(READY)
	$(BIN)/tenterhook run examples/faulty.py

test: $(READY)
	$(BIN)/python -m pytest

# Small trainings with and without a planted fault, each bare and watched; it takes half an hour on one core.
zoo: $(READY)
	$(BIN)/python -m tests.zoo --check --workers 2 --table docs/zoo.md

# The quick starts of training frameworks, each bare and watched, in an environment of their own; it takes minutes.
frameworks: $(OTHERS)/.ready
	FRAMEWORKS=1 $(OTHERS)/bin/python -m pytest --dist load tests/frameworks

# The assembler and the instrumented copies, on every Python that inner addresses are accepted for; it takes minutes.
selfcheck: $(READY)
	$(BIN)/python tests/selfcheck
	SELFCHECK=1 $(BIN)/python -m pytest tests/inside/test_fuzz.py

lint: $(READY)
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/capture.py
	$(BIN)/python benchmarks/edit.py
	$(BIN)/python benchmarks/inner.py
	$(BIN)/python benchmarks/watch.py
	$(BIN)/python benchmarks/compare.py

$(READY): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(READY)

# Torch first and by itself, so that nothing else chooses its build or version.
$(OTHERS)/.ready: tests/frameworks/requirements.lock pyproject.toml
	test -x $(OTHERS)/bin/python || $(PYTHON) -m venv $(OTHERS)
	$(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' $<)"
	$(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	$(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) $(OTHERS) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache out
