# Development tasks. Every target sets up .venv first if it has to; `make help` lists them.

PYTHON    ?= python3
# What `make fuzz` runs. Anything that `amp-fuzz` takes: make fuzz FUZZ_ARGS="run --seed=7"
FUZZ_ARGS ?= run --profile=ci
# Processes that share the tests, one for each of two cores: three took a quarter more CPU time, and longer. Further
# arguments: make test TEST_ARGS="-k cache -x"
JOBS      ?= 2
TEST_ARGS ?=
PYTEST     = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
# The torch of `make test-torch`: each has a file in constraints/
TORCH     ?=
# `make gpu`: the device, by default the one that torch sees here, and the folder of results. `make gpu-bundle`:
# the interpreter of the machine without a network, and what to bring it.
DEVICE       ?=
OUT          ?= gpu-results
MINUTES      ?= 9
GPU_PYTHON   ?= 3.12
GPU_PACKAGES ?= msgspec hypothesis pytest pandas click rich jinja2 filelock packaging psutil

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
# `make test-torch` has a folder for each torch and interpreter. No JAX there: torchax needs its own torch.
OTHER := .venvs/torch-$(TORCH)-$(notdir $(PYTHON))
MODELS := .venvs/models
# Never prompt, say only errors, never resolve past the pins; compile what is imported, when it is: most
# files of torch and JAX never are.
PIP    = $(@D)/bin/python -m pip install --no-input --disable-pip-version-check --no-compile -qq \
         --constraint $(PINS)

ifneq ($(filter test-torch,$(MAKECMDGOALS)),)
ifeq ($(wildcard constraints/torch-$(TORCH).txt),)
$(error which torch? make test-torch TORCH=VERSION, one of \
  $(patsubst constraints/torch-%.txt,%,$(wildcard constraints/torch-*.txt)) (another needs a file in constraints/))
endif
endif

.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE # hundreds of processes import torch
.PHONY: help venv fuzz open docs pages test test-rest test-all test-torch models gpu gpu-bundle lint types format \
  clean distclean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

venv: $(STAMP)  ## create and fill .venv (does nothing unless the pins changed)

# Two steps, because pip's constraints do not reach an isolated build: the pinned build backend
# first, then the package, built with it. Installed in one transaction, torch is resolved once,
# to its pin.
$(STAMP): PINS = constraints.txt
$(STAMP): EXTRAS = dev,fp8,jax,parquet,sweep
# The code of the backend te-python, in its folder.
$(STAMP): CODE = $(PIP) --no-deps --upgrade transformer-engine \
  --target="$$($(BIN)/python -c 'from amp_fuzz.backends.te import stub; print(stub.folder())')"
$(OTHER)/.installed: PINS = constraints/torch-$(TORCH).txt
$(OTHER)/.installed: EXTRAS = dev,parquet
$(MODELS)/.installed: PINS = constraints/models.txt
$(MODELS)/.installed: EXTRAS = dev
$(MODELS)/.installed: MORE = transformers timm torchvision peft diffusers
$(STAMP) $(OTHER)/.installed $(MODELS)/.installed: pyproject.toml constraints.txt $(wildcard constraints/*.txt)
	@echo "setting up $(@D) with $$($(PYTHON) --version), a minute or two ..."
	@test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[$(EXTRAS)]' $(MORE)
	@$(CODE)
	@touch $@
	@echo "ready: $(@D)/bin/amp-fuzz, torch $$($(@D)/bin/python -c \
	  'from importlib.metadata import version; print(version("torch"))')"

fuzz: $(STAMP)  ## fuzz the installed torch (FUZZ_ARGS="run --profile=ci")
	$(BIN)/amp-fuzz $(FUZZ_ARGS)

open: $(STAMP)  ## judge the findings again that the package lists and nobody has explained
	$(BIN)/amp-fuzz baseline check --baseline=amp_fuzz/findings/open.toml

pages: $(STAMP)  ## write the pages of known bugs, of honest runs and of promises (docs/findings, docs/evidence)
	@failed=; for page in findings measured promises; do $(BIN)/python docs/$$page.py || failed=yes; done; test -z "$$failed"

# A warning is an error, and so is a name that nothing documents. Needs no network once installed.
docs: $(VENV)/.docs  ## build the documentation in build/docs (open build/docs/index.html)
	$(BIN)/python -m sphinx --quiet --nitpicky --fail-on-warning --keep-going -d build/doctrees docs build/docs

$(VENV)/.docs: PINS = constraints.txt
$(VENV)/.docs: $(STAMP)
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

# What each of these guarantees: CONTRIBUTING.md, "Tests".
test: $(STAMP)  ## run the tests of the first tier, five and a half minutes (TEST_ARGS="-k cache", JOBS=2)
	$(PYTEST) -m "not thorough and not slow" $(TEST_ARGS)

test-rest: $(STAMP)  ## run the other tests that guard a merge
	$(PYTEST) -m "thorough and not slow" $(TEST_ARGS)

test-all: $(STAMP)  ## run every test, the slow ones too
	$(PYTEST) $(TEST_ARGS)

# The second runs even if the first fails. Findings of this torch stay beside it.
test-torch: $(OTHER)/.installed  ## run the tests, then `amp-fuzz`, on another torch (TORCH=2.9.1 PYTHON=python3.12)
	@failed=; \
	$(OTHER)/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(TEST_ARGS) || failed="tests"; \
	$(OTHER)/bin/amp-fuzz $(FUZZ_ARGS) --store=$(OTHER)/findings --report=$(OTHER)/report || \
	  failed="$$failed amp-fuzz"; \
	if [ -n "$$failed" ]; then echo "failed on torch $(TORCH): $$failed" >&2; exit 1; fi

# The second runs even if the first fails. Checks that benchmarks/real_models.json has are not made again.
models: $(MODELS)/.installed  ## check 25 models of transformers, timm, peft and diffusers, honest and broken
	@failed=; for what in "" --faults; do \
	  $(MODELS)/bin/python benchmarks/real_models.py $$what || failed=yes; \
	done; [ -z "$$failed" ]

# With the interpreter that has torch, not .venv: nothing is installed or downloaded.
gpu:  ## run everything on an accelerator, 9 minutes (PYTHON=python3 DEVICE=privateuse1 OUT=gpu-results)
	@$(PYTHON) benchmarks/gpu.py --device=$(DEVICE) --minutes=$(MINUTES) --output=$(OUT)

# pip matches the numbers of manylinux exactly.
gpu-bundle:  ## download wheels for a machine without a network to wheels/ (GPU_PYTHON=3.12 GPU_PACKAGES=msgspec)
	@$(PYTHON) -m pip download -qq --dest wheels --only-binary=:all: --constraint constraints/shared.txt \
	  --implementation cp --python-version $(GPU_PYTHON) \
	  $(foreach n,28 27 24 17 5,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 $(GPU_PACKAGES)
	@echo "bring wheels/ along: $$(du -sh wheels | cut -f1), for Python $(GPU_PYTHON)"

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
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean  ## remove .venv, .venvs and .amp-fuzz too
	rm -rf $(VENV) .venvs .amp-fuzz
