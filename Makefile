# Each target sets up what it needs: a virtual environment in .venv with the pinned dependencies.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
OTHERS := .venv-frameworks
PAGE   := src/tenterhook/view/page.html
NODE   := PATH="$(CURDIR)/$(BIN):$$PATH"

.PHONY: demo test web wheel browser screenshot zoo frameworks selfcheck lint bench clean
demo: $(READY) $(PAGE)
	$(BIN)/tenterhook run examples/faulty.py
	$(BIN)/tenterhook report -o report.html

test: $(READY) $(PAGE) browser
	$(NODE) npm --prefix web test --silent
	$(BIN)/python -m pytest

# The page of `tenterhook view` and `tenterhook report`: TypeScript, built with the Node that is on PyPI.
web: $(PAGE)
$(PAGE): $(READY) web/node_modules/.ready web/index.html web/vite.config.ts $(wildcard web/src/*)
	$(NODE) npm --prefix web run build --silent
	cp web/dist/index.html $(PAGE)

web/node_modules/.ready: $(READY) web/package-lock.json
	$(NODE) npm --prefix web ci --silent --no-audit --no-fund
	touch $@

# The tests of the page drive Debian's Chromium; where it is not there and cannot be installed, they are skipped.
browser:
	@command -v chromium >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
	  (apt-get update -qq && apt-get install -qq --yes --no-install-recommends chromium) >/dev/null || true

# The pictures of the page in the README and in docs/viewing.md.
screenshot: $(READY) $(PAGE) browser
	$(BIN)/tenterhook run --quiet examples/faulty.py
	$(BIN)/python web/screenshot.py

# With the page in it.
wheel: $(READY) $(PAGE)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

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

bench: $(READY) $(PAGE)
	$(BIN)/python benchmarks/capture.py
	$(BIN)/python benchmarks/edit.py
	$(BIN)/python benchmarks/inner.py
	$(BIN)/python benchmarks/watch.py
	$(BIN)/python benchmarks/birth.py
	$(BIN)/python benchmarks/compare.py
	$(BIN)/python benchmarks/compiled.py
	$(BIN)/python benchmarks/view.py

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
	rm -rf $(VENV) $(OTHERS) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache out web/node_modules web/dist $(PAGE)
