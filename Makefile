# Every target sets up what it needs; `make test` or `make demo` on a fresh clone is enough.
#
# Set-up makes a virtual environment with a pinned vLLM for CPU, this package in
# editable form and a Redis server binary.  Nothing here needs root.  pip must be able
# to find the CPU build of torch: where the default index does not carry it, name
# PyTorch's CPU wheel index in pip's own configuration (PIP_EXTRA_INDEX_URL).

PYTHON ?= python3
VENV ?= .venv
VLLM_VERSION ?= 0.32.0
COMPAT_VENV ?= .venv-0.29
COMPAT_VLLM_VERSION ?= 0.29.0
PYTEST_ARGS ?=
BENCH_ARGS ?=
# Test files run side by side, one engine each (about 2 GB); 1 keeps all in one process.
TEST_PROCESSES ?= 2
PYTEST_PARALLEL := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# Long form of the chaos suite: one engine for each seed, so many requests on each.
CHAOS_SEED ?= 1,2,3,4
CHAOS_REQUESTS ?= 2500

PY := $(VENV)/bin/python
COMPAT_PY := $(COMPAT_VENV)/bin/python
SETUP_SOURCES := scripts/setup_env.py pyproject.toml
STAMP := $(VENV)/.ready
COMPAT_STAMP := $(COMPAT_VENV)/.ready

# No model or data set is ever looked up on a hub, and vLLM reports no usage.
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
# vLLM compiles a few sampling helpers at the first request even in eager mode, which
# takes half a minute of C++ compiler time and changes nothing for a tiny model.
export TORCHDYNAMO_DISABLE := 1
# One compute thread per engine: with two, each waits for the other at every operator, and
# on a busy or shared two-core machine a step of the tiny model takes ten times as long.
export VLLM_CPU_OMP_THREADS_BIND := nobind
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help setup test chaos demo lint bench bench-redis test-compat clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## make the virtual environment (minutes the first time, then nothing)

$(STAMP): $(SETUP_SOURCES)
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --vllm $(VLLM_VERSION)
	@touch $@

$(COMPAT_STAMP): $(SETUP_SOURCES)
	@$(PYTHON) scripts/setup_env.py --venv $(COMPAT_VENV) --vllm $(COMPAT_VLLM_VERSION)
	@touch $@

test: $(STAMP) ## run the whole test suite
	$(PY) -m pytest $(PYTEST_PARALLEL) $(PYTEST_ARGS)

chaos: $(STAMP) ## 10,000 requests under random faults, figures in docs/reliability.md
	CHAOS_SEED=$(CHAOS_SEED) CHAOS_REQUESTS=$(CHAOS_REQUESTS) $(PY) -m pytest -s tests/chaos

demo: $(STAMP) ## two servers, three adapters, one table
	$(PY) -m examples.demo

lint: $(STAMP) ## ruff, mypy, import rules
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

bench: $(STAMP) ## cost on a miss and gain on a hit; many adapters against vLLM alone and LMCache
	$(PY) benchmarks/overhead.py
	$(PY) benchmarks/multi_lora.py $(BENCH_ARGS)

bench-redis: $(STAMP) ## chunks in and out of Redis, against other clients and a bare socket
	$(PY) benchmarks/redis_speed.py $(BENCH_ARGS)

test-compat: $(COMPAT_STAMP) ## engine tests on the oldest supported vLLM
	$(COMPAT_PY) -m pytest $(PYTEST_PARALLEL) tests/engine $(PYTEST_ARGS)

clean: ## remove both environments and all caches
	rm -rf $(VENV) $(COMPAT_VENV) build *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
