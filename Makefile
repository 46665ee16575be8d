# Development tasks. Every target sets up .venv first if it has to; `make help` lists them.

PYTHON    ?= python3
# What `make fuzz` runs. Anything that `amp-fuzz` takes: make fuzz FUZZ_ARGS="run --seed=7"
FUZZ_ARGS ?= run --profile=ci
# Processes that share the tests (a quarter of their time is waiting for others that hang or die), and further
# arguments: make test TEST_ARGS="-k cache -x"
JOBS      ?= 3
TEST_ARGS ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
# Never prompt, say only errors, never resolve past constraints.txt; compile what is imported, when it
# is: most files of torch and JAX never are.
PIP   := $(BIN)/python -m pip install --no-input --disable-pip-version-check --no-compile -qq \
         --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help venv fuzz open pages test test-all lint types format clean distclean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

venv: $(STAMP)  ## create and fill .venv (does nothing unless the pins changed)

# Two steps, because pip's constraints do not reach an isolated build: the pinned build backend
# first, then the package, built with it. Installed in one transaction, torch is resolved once,
# to its pin.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) with $$($(PYTHON) --version), a minute or two ..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[dev,jax]'
	@touch $@
	@echo "ready: $(BIN)/amp-fuzz, torch $$($(BIN)/python -c \
	  'from importlib.metadata import version; print(version("torch"))')"

fuzz: $(STAMP)  ## fuzz the installed torch (FUZZ_ARGS="run --profile=ci")
	$(BIN)/amp-fuzz $(FUZZ_ARGS)

open: $(STAMP)  ## judge the unexplained cases in tests/cases/open, and print a table
	$(BIN)/python benchmarks/open_cases.py

pages: $(STAMP)  ## write the pages of known bugs (docs/findings, docs/known-by-version.md)
	$(BIN)/python docs/findings.py

test: $(STAMP)  ## run the tests, except the slow ones (TEST_ARGS="-k cache", JOBS=3)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(TEST_ARGS)

test-all: $(STAMP)  ## run every test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TEST_ARGS)

lint: $(STAMP)  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## check types
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove caches and reports; keep .venv and the findings in .amp-fuzz
	rm -rf build dist amp-fuzz-report .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean  ## remove .venv and .amp-fuzz too
	rm -rf $(VENV) .amp-fuzz
