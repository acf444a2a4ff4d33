# Every target sets up what it needs; `make setup` alone prepares .venv and does nothing when nothing changed.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := core $(addprefix toolkits/nemorl-,tensors rl trust cli testing) nemorl-dtensor nemorl-math-env nemorl-megatron nemorl-vllm $(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/nemorl-*/pyproject.toml)))
EDITABLE := $(foreach package,$(PACKAGES),-e ./$(package)) -e .
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
SOURCES := $(foreach package,$(PACKAGES),$(package)/src)

# Images of containers often set this. Each of the hundreds of processes that tests start would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

STREAMS := test-runs test-on-ray test-units test-together test-kernel test-programs test-toolkits
FAST_STREAMS := fast-kernel fast-units fast-contracts fast-programs
.PHONY: help setup quickstart test $(STREAMS) test-fast $(FAST_STREAMS) test-full chaos lint format wheels docs gpu-check clean

help:
	@echo "make quickstart   install, then train a tiny model with GRPO (a few minutes on a laptop)"
	@echo "make test         install, then the whole test suite with coverage"
	@echo "make test-fast    the tests that take seconds, in under three minutes"
	@echo "make test-full    everything, also what proves the tests themselves"
	@echo "make chaos        fail every file operation of a run, kill its processes at random; hours, goes on where it was"
	@echo "make lint         ruff and mypy"
	@echo "make format       ruff format and import order"
	@echo "make wheels       build every package into dist/"
	@echo "make docs         build docs/reference and the site in site/"
	@echo "make gpu-check    pack tests and benchmarks for a CUDA machine without network (docs/gpu-check.md)"
	@echo "make setup        only prepare .venv"
	@echo "WORKERS=4 runs make test-full in four processes instead of two"

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

FOLDERS := $(addprefix tests/,integration e2e chaos conformance spec unit)
FAST := -m "not slow and not full"

# These tests, which are written for the lines of kernel and toolkits, alone have to reach the 85 %.
KERNEL := $(addprefix tests/unit/,base core rl tensors)
TOOLKITS := $(addprefix tests/unit/,report isolation commands testing)
MEASURED := $(KERNEL) $(TOOLKITS)
COVERAGE := .coverage.kernel.json .coverage.toolkits.json
# Lines stay measured after they were first run: to take them out again costs more than it saves, and walks through the
# variables of modules while other threads may change them.
SLIPCOVER := -m slipcover --threshold 1000000000 --json
# Most of their time these wait for programs that they start: beside the others they cost little.
PROGRAMS := $(addprefix tests/unit/,agent_env code_env interop_envs launch server_engine transports)
TOGETHER := $(addprefix tests/integration/,megatron vllm)
ON_RAY := $(addprefix tests/integration/,async ray) tests/conformance
RUNS := tests/e2e tests/chaos tests/spec tests/integration
ignored = $(addprefix --ignore=,$(1))

# Four processes side by side, on two cores: what starts other processes waits for them much of its time. More cost more
# than they win, in caches and in processes that look for work. Those that take longest begin first. What starts vLLM and
# Megatron runs one after the other, so that no engine finds the ports or the memory of another.
test: $(DEV_STAMP)
	$(MAKE) --no-print-directory --keep-going --jobs=4 $(STREAMS)
	$(BIN)/python -m slipcover --fail-under=85 --skip-covered --merge $(COVERAGE) --out .coverage.json

test-together: $(DEV_STAMP)
	$(BIN)/python -m pytest $(TOGETHER)

test-kernel: $(DEV_STAMP)
	$(BIN)/python $(SLIPCOVER) --out .coverage.kernel.json -m pytest $(KERNEL)

test-toolkits: $(DEV_STAMP)
	$(BIN)/python $(SLIPCOVER) --out .coverage.toolkits.json -m pytest $(TOOLKITS)

test-units: $(DEV_STAMP)
	$(BIN)/python -m pytest $(call ignored,$(MEASURED) $(PROGRAMS)) tests/unit

test-programs: $(DEV_STAMP)
	$(BIN)/python -m pytest $(PROGRAMS)

test-on-ray: $(DEV_STAMP)
	$(BIN)/python -m pytest $(ON_RAY)

test-runs: $(DEV_STAMP)
	$(BIN)/python -m pytest $(call ignored,$(TOGETHER) $(ON_RAY)) $(RUNS)

test-fast: $(DEV_STAMP)
	$(MAKE) --no-print-directory --keep-going --jobs=4 $(FAST_STREAMS)

fast-kernel: $(DEV_STAMP)
	$(BIN)/python -m pytest $(FAST) $(KERNEL)

fast-units: $(DEV_STAMP)
	$(BIN)/python -m pytest $(FAST) $(call ignored,$(MEASURED) $(PROGRAMS)) tests/unit

fast-programs: $(DEV_STAMP)
	$(BIN)/python -m pytest $(FAST) $(PROGRAMS)

fast-contracts: $(DEV_STAMP)
	$(BIN)/python -m pytest $(FAST) $(TOOLKITS) tests/conformance tests/spec

# A file of tests goes to one worker, which makes what its tests share once. Files that take long are given out first, so
# that no worker is left alone with one at the end.
test-full: $(DEV_STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "full or not full" $(FOLDERS)

# results.jsonl in each of the two folders holds a line per case. BLOWS: the seeds of each subject.
CHAOS ?= .chaos
BLOWS ?= 0:60
chaos: $(DEV_STAMP)
	failed=0; \
	nice $(BIN)/python tests/chaos/file_sweep.py $(CHAOS)/files || failed=1; \
	nice $(BIN)/python tests/chaos/command_sweep.py $(CHAOS)/commands || failed=1; \
	nice $(BIN)/python tests/chaos/random_blows.py $(CHAOS)/blows --seeds $(BLOWS) || failed=1; \
	exit $$failed

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheels: $(VENV)/.build
	rm -rf dist
	for package in $(PACKAGES) .; do $(BIN)/python -m build --quiet --wheel --outdir dist $$package || exit 1; done

docs: $(DEV_STAMP)
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/generate_api.py
	$(BIN)/python -m pip install --quiet mkdocs-material
	$(BIN)/mkdocs build --strict

# GPU_PYTHON: the Python version of that machine.
GPU_PYTHON ?= 3.12
gpu-check: $(DEV_STAMP)
	$(BIN)/python benchmarks/gpu/pack.py --python $(GPU_PYTHON)

clean:
	rm -rf $(VENV) dist site docs/reference .coverage .coverage.* .mypy_cache .ruff_cache
