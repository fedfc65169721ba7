# Everything a newcomer, CI and a developer run. `make help` lists it.
SHELL := bash
PY := .venv/bin/python
READY := .venv/.ready
GPU_PY ?= $(if $(wildcard $(PY)),$(PY),python3)

.PHONY: help setup run up test parity asan soak gpu-check fuzz lint format protos breaking bench bench-peers bench-tracing bench-self bench-gate bench-gateway dashboards clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(READY): pyproject.toml
	@command -v python3 >/dev/null || { echo "headrace: python3 (3.11 or newer) is needed"; exit 1; }
	@echo "setting up .venv (first time: a few minutes)"
	@test -x $(PY) || python3 -m venv .venv
	@.venv/bin/pip install --quiet --disable-pip-version-check -e '.[services,engine,import,bench,dev]'
	@touch $@

setup: $(READY) ## the virtual environment with everything in it

run: setup ## start the four processes, ask one question, stream the answer, stop
	@.venv/bin/headrace up --ask "What is the capital of France? Answer in one sentence."

up: setup ## serve on 127.0.0.1:50050 until Ctrl-C
	@.venv/bin/headrace up

test: setup ## every test that CI runs
	@.venv/bin/pytest

parity: setup ## every family x grouping x block size x chunk against transformers (CI runs a third)
	@PARITY=full .venv/bin/pytest tests/engine/model/test_parity.py

# Python and torch are not built with sanitizers: theirs is loaded before all, and what they leak is not looked at.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1
asan: setup ## the extension's tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@HEADRACE_NATIVE_FLAGS="$(SANITIZE)" LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 .venv/bin/pytest -p no:cacheprovider tests/engine/kernels tests/engine/test_native_sampler.py

soak: setup ## 20,000 requests with cancels, deadlines and pauses: nothing leaks, nothing hangs (up to 30 minutes)
	@$(PY) -m tests.soak

gpu-check: ## parity and figures on a GPU, within 6 minutes, also in gpu-check.json; with GPU_PY=python3 on that Python's own torch
	@$(GPU_PY) -m tests.gpu --json gpu-check.json

fuzz: setup ## 10,000 requests drawn from the contract's descriptors: no INTERNAL, no silence (about 3 minutes)
	@FUZZ=10000 .venv/bin/pytest tests/fuzz

lint: setup ## formatting, lint, types, contract
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@cd protos && ../.venv/bin/buf lint && ../.venv/bin/buf format --diff --exit-code
	@$(MAKE) --no-print-directory breaking

format: setup ## rewrite files in the house format
	@.venv/bin/ruff format . && .venv/bin/ruff check --fix . && cd protos && ../.venv/bin/buf format --write

protos: setup ## regenerate headrace/v1 from protos/
	@$(PY) -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. --grpc_python_out=. protos/headrace/v1/*.proto

breaking: $(READY) ## compare the contract with protos/baseline.binpb
	@.venv/bin/buf breaking protos --against protos/baseline.binpb

bench: setup ## W1 in process, then through the four processes
	@.venv/bin/headrace bench offline --workload w1
	@.venv/bin/headrace bench offline --workload w1 --pipeline

bench-peers: setup ## install other engines into a cache folder, and measure by turns with each (25 minutes; goes on where it was)
	@$(PY) -m headrace.bench.peers.install
	@$(PY) -m headrace.bench.peers

bench-self: setup ## the workbench itself: its ceiling, and whether it sees a stall (2 minutes)
	@$(PY) -m headrace.bench.self_check

bench-gate: setup ## the gate tried: red on a pipeline 10 % slower, green on one that is the same (an hour; goes on where it was)
	@$(PY) -m headrace.bench.gate_trials

bench-tracing: setup ## what tracing costs: off, 10 % and 100 % in turn
	@$(PY) -m headrace.bench.tracing

bench-gateway: setup ## the front door: cost of limits, prefixes over two engines, tenants, attacks, losses (10 minutes)
	@WINDOWS=20 .venv/bin/pytest -q tests/pipeline/test_quotas.py tests/pipeline/test_routing.py tests/pipeline/test_attacks.py tests/gateway/test_meter.py
	@$(PY) -m tests.bench_gateway

dashboards: setup ## rewrite the Grafana dashboards in deploy/observability
	@$(PY) -m deploy.observability.dashboards

clean: ## remove what was built; the model cache stays
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis tests/interop/node_modules
