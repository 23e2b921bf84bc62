# `make demo` and `make test` need only Python 3.11 or newer, git and make; everything else lands in .venv and .tools.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?= --scenario sustained
export PATH := $(CURDIR)/.tools/usr/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.PHONY: help demo test soak check bench bench-attribution bench-detect bench-partial bench-recovery bench-replay \
	bench-checkpoints bench-ranks bench-rules bench-fleet bench-gpu gpu-check dashboards reference format venv tools \
	tools-all clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

demo: venv ## break a training run on purpose and watch it heal; options in DEMO_ARGS="--scenario clean"
	@(command -v prometheus && command -v prometheus-alertmanager) >/dev/null || tests/fetch_tools.sh bookworm
	$(BIN)/python -m trainer_plugin demo $(DEMO_ARGS)

# Jobs on real servers wait for most of their time; with torch's own threads beside them they would wait for each other.
test: venv tools check ## everything: style, types, unit tests, and the loop on real servers
	$(BIN)/python -m pytest -q -rs -m "not live" -n auto --maxprocesses 4
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -m live -n 3

soak: venv tools-all ## long and large runs of what the tests run small, all versions of the servers; half an hour and more
	$(BIN)/python -m pytest -q -rs -m soak tests/soak_*.py

check: venv ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: venv ## what the guard costs; for a quiet machine, results go to tests/bench/LOG.md
	$(BIN)/python tests/bench/overhead.py

bench-detect: venv ## how well the detectors detect, beside the peers' rules; DETECT_ARGS="--curves DIR" adds old logs
	$(BIN)/python tests/bench/detect.py $(DETECT_ARGS)

bench-attribution: venv ## how often the class of an incident is the right one: a small GPT, hurt in every way; half an hour
	$(BIN)/python tests/bench/attribution.py $(ATTRIBUTION_ARGS)

bench-partial: venv ## whether a partial rollback heals: a small GPT damaged in one block or in all
	$(BIN)/python tests/bench/partial.py

bench-replay: venv ## whether replay finds the broken sample or layer; REPLAY_ARGS="--seeds 2 --verbose"
	$(BIN)/python tests/bench/replay.py $(REPLAY_ARGS)

bench-checkpoints: venv ## what a checkpoint and the way back cost; for a quiet machine and a disk like the real one
	$(BIN)/python tests/bench/checkpoints.py

bench-ranks: venv ## what the guard costs four ranks, FSDP2 over gloo; RANKS_ARGS="--pairs 300"
	$(BIN)/python tests/bench/ranks.py $(RANKS_ARGS)

bench-rules: venv tools ## what the rules cost on a real Prometheus, and from condition to command; RULES_ARGS="--runs 8"
	$(BIN)/python tests/bench/rules.py $(RULES_ARGS)

bench-recovery: venv tools ## what each remedy saves of a run, ours and the peers'; hours, goes on where it was. RECOVERY_ARGS="--quick"
	$(BIN)/python tests/bench/recovery.py $(RECOVERY_ARGS)

bench-fleet: venv tools ## 8, 32 and 128 runs, 20 hurt at once: what reaches whose inbox, and when; half an hour
	$(BIN)/python tests/bench/fleet.py $(FLEET_ARGS)

bench-gpu: venv ## what reading GPUs costs, on a fake driver with 8 of them; needs gcc. BENCH_GPU_ARGS="--collections 100"
	$(BIN)/python tests/bench/gpu.py $(BENCH_GPU_ARGS)

# Its own spelling of torch: whatever build for GPUs is installed there. PYTHON names the interpreter.
gpu-check: ## on a machine with a GPU and torch for it: no sync, true norms, the shield, the GPU page, what it costs
	$(PYTHON) tests/gpu_check.py

reference: venv ## write alert_rules/reference.md anew, from the catalog and the rules
	$(BIN)/python -m exporter.reference > alert_rules/reference.md

dashboards: venv ## write the JSON of the Grafana dashboards anew, from the code in grafana_dashboards/
	$(BIN)/python -m grafana_dashboards build

format: venv ## rewrite the code in the house style
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

venv: $(VENV)/.installed ## the virtual environment, with all that the tests need

# torch first and in this spelling, which gets the build for CPUs.
$(VENV)/.installed: pyproject.toml
	@echo "installing into $(VENV) (torch is large)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -qq torch==2.13.0
	@$(BIN)/pip install -qq --editable '.[dev]'
	@touch $@

tools: ## the oldest and the newest servers that are tested, as files in .tools; no root, nothing installed or started
	@tests/fetch_tools.sh bookworm sid compose-trixie

tools-all: ## every version of the servers that `make soak` tests, VictoriaMetrics too
	@tests/fetch_tools.sh bookworm trixie sid victoria-trixie victoria-sid compose-trixie

clean: ## remove what make and the tools have made
	rm -rf $(VENV) .tools build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
