# SPDX-License-Identifier: Apache-2.0
# Everything but `bench` needs only Python 3.11 and no GPU; `rehearse` also needs gcc and g++.

SHELL := /bin/bash
# The first that runs: a version manager's shim may be found and fail.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13; do \
	"$$name" -c pass >/dev/null 2>&1 && command -v "$$name" && break; done)
VENV ?= .venv
VENV033 ?= .venv-033
REHEARSAL ?= .venv-rehearsal
REHEARSAL033 ?= .venv-rehearsal-033
BIN := $(VENV)/bin

# One thread is fastest for the tiny pair. conftest.py sets the same for a bare `pytest`.
export OMP_NUM_THREADS ?= 1
# Models of realistic size get vLLM's default number of threads, or the user's.
USERS_THREADS := $(if $(filter file,$(origin OMP_NUM_THREADS)),env -u OMP_NUM_THREADS)
export VLLM_NO_USAGE_STATS ?= 1
export HF_HUB_OFFLINE ?= 1

FAST := not e2e and not thorough and not slow and not gpu
# One process per core, up to four. The tests of a file share engines, so a file stays in one process.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-033 test-033-full check rehearse rehearse-033 bench clean

help:  ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | column -t -s '|'

# Two stamps: vLLM is installed once, and a changed pyproject.toml reinstalls only this package.
$(VENV)/.vllm-0.32:
	@.ci/setup vllm "$(PYTHON)" "$(VENV)"
	@touch $@

$(VENV)/.ready: $(VENV)/.vllm-0.32 pyproject.toml .ci/setup
	@.ci/setup package "$(PYTHON)" "$(VENV)"
	@touch $@

# vLLM 0.33 has no CPU build, so its Python runs over 0.32's compiled libraries.
$(VENV033)/.ready: $(VENV)/.vllm-0.32 | $(VENV)/.ready
	@.ci/setup overlay "$(BIN)/python" "$(VENV033)"
	@touch $@

setup: $(VENV)/.ready  ## Create .venv with vLLM 0.32 for CPU and this plugin, and the demo's models (once)

demo: $(VENV)/.ready  ## A chat model answers three questions as plain, dflash and bastion; a draft tree is drawn
	@$(USERS_THREADS) $(BIN)/python -m benchmarks.demo

test: $(VENV)/.ready  ## The test suite with a representative part of the end-to-end matrix
	@$(BIN)/python -m pytest -m "not slow and not gpu" $(PARALLEL) --durations=10

test-full: $(VENV)/.ready  ## All tests, the whole end-to-end matrix included (GPU tests where there is one)
	@$(BIN)/python -m pytest $(PARALLEL) --durations=20

test-033: $(VENV033)/.ready  ## What `make test` runs, on vLLM 0.33 (its Python over 0.32's CPU build)
	@$(VENV033)/bin/python -m pytest -m "not slow and not gpu" $(PARALLEL) --durations=10

test-033-full: $(VENV033)/.ready  ## What `make test-full` runs, on vLLM 0.33
	@$(VENV033)/bin/python -m pytest $(PARALLEL) --durations=20

check: $(VENV)/.ready  ## Lint, format, types, the layers of imports and the fast tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@PYTHONPATH=.:kernels $(BIN)/lint-imports --no-logo
	@$(BIN)/python -m pytest -m "$(FAST)" -n auto

# Two stamps: vLLM for CUDA is installed once; a changed driver is only compiled again.
$(REHEARSAL)/.vllm-0.32 $(REHEARSAL033)/.vllm-0.33:
	@tests/rehearsal/setup.sh vllm "$(patsubst .vllm-%,%,$(@F))" "$(PYTHON)" "$(@D)"
	@touch $@

$(REHEARSAL)/.driver: $(REHEARSAL)/.vllm-0.32
$(REHEARSAL033)/.driver: $(REHEARSAL033)/.vllm-0.33
$(REHEARSAL)/.driver $(REHEARSAL033)/.driver: tests/rehearsal/setup.sh $(wildcard tests/rehearsal/fake_driver/*)
	@tests/rehearsal/setup.sh driver "$(@D)"
	@touch $@

# ARGS: names of cases, --verbose, --interpret; see docs/rehearsal.md.
ARGS ?=

rehearse: $(REHEARSAL)/.driver  ## Run vLLM's CUDA build on a simulated GPU (first use: 9 GB; ARGS="fixed hybrid")
	@$(REHEARSAL)/bin/python -m tests.rehearsal $(ARGS)

rehearse-033: $(REHEARSAL033)/.driver  ## The same on vLLM 0.33 (first use: 9 GB more; writes no table)
	@$(REHEARSAL033)/bin/python -m tests.rehearsal $(ARGS)

# A GPU needs a Python with PyTorch for CUDA, which .venv does not have; no CPU setting of above counts.
BENCH_PYTHON ?= $(shell command -v python || command -v python3)
BENCH_ARGS ?=

bench:  ## Check and time every op (a GPU, PyTorch for CUDA; BENCH_ARGS=--quick: minutes)
	@test -n "$(BENCH_PYTHON)" || { echo "no python here: name one with PyTorch for CUDA and" \
		"Triton, make bench BENCH_PYTHON=..."; exit 1; }
	@env -u OMP_NUM_THREADS \
		"$(BENCH_PYTHON)" -m benchmarks.ops $(BENCH_ARGS)

clean:  ## Back to a fresh clone: remove .venv, builds and caches
	rm -rf .venv .venv-033 .venv-rehearsal .venv-rehearsal-033 build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
