# `make help` lists what there is. Every target sets the environment up first; that is a no-op once it has been done.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3.11
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
GRISTMILL_ROOT ?= $(CURDIR)/.demo
BIN := .venv/bin
SEEDS ?= 200
# What is appended to a target's command: make test ARGS="-k leases -x"
ARGS ?=

.PHONY: help setup demo ui check test test-long sim planted-bugs bench docs lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv from locks/dev-py311.txt (Python 3.11, 4 GB); no-op when nothing changed
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" locks/setup.sh

demo: export GRISTMILL_ROOT := $(GRISTMILL_ROOT)
demo: setup ## a whole run with a real small model, published under .demo
	@$(BIN)/gristmill demo $(ARGS)

ui: export GRISTMILL_ROOT := $(GRISTMILL_ROOT)
ui: export MODELS ?= $(GRISTMILL_ROOT)/models
ui: setup ## the Dagster UI of what the demo made
	@$(BIN)/gristmill ui $(ARGS)

check: lint ## lint and the quick tests, under 2 minutes
	@$(BIN)/pytest -m "not slow and not real_vllm and not long" $(ARGS)

test: lint ## lint and every test but the long ones; what CI runs
	@$(BIN)/pytest -m "not long" $(ARGS)

test-long: setup ## the long tests: many seeds, many rows
	@$(BIN)/pytest -m long $(ARGS)

# Frames of twenty rows gain nothing from polars' threads.
sim: setup ## SEEDS=200 crash histories over the real worker loop; ARGS="--seed 17" replays one
	@POLARS_MAX_THREADS=1 $(BIN)/python -m batch_assets.sim.crash --seeds $(SEEDS) $(ARGS)

planted-bugs: setup ## plant each bug of tests/planted in a copy of the tree: a proof must catch it; ARGS="--only 07"
	@$(BIN)/python -m tests.planted.run $(ARGS)

bench: setup ## measure throughput, bookkeeping and memory
	@$(BIN)/python -m benchmarks $(ARGS)

docs: setup ## check the links and run the blocks of README and docs/
	@$(BIN)/pytest tests/docs $(ARGS)

lint: setup ## ruff, types, and which module may import which
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/basedpyright
	@$(BIN)/lint-imports --no-logo

clean: ## remove caches, builds and the demo's root; .venv stays
	@rm -rf .demo build dist .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
