# Shoal's tasks. `make help` lists them; each sets up what it needs by itself.

PYTHON ?= python3
# Flags for the command behind `run`, `test` and `bench`: make run ARGS="--port 9000".
ARGS ?=
# How many processes share the tests: make test JOBS=2.
JOBS ?= 1
# A package index with torch builds; empty leaves it to pip. Default: PyTorch's CPU builds, unless
# there is an NVIDIA driver (PyPI's build is for CUDA) or a local wheel. To choose a CUDA version:
# make run TORCH_INDEX=https://download.pytorch.org/whl/cu130
TORCH_INDEX ?= $(shell tools/torch-index.sh $(PYTHON))

BIN := .venv/bin
SETUP = PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" tools/setup.sh
RUN_READY := .venv/.ready-run
DEV_READY := .venv/.ready-dev

.PHONY: help run chat test lint docs format protos web baseline bench bench-all bench-engine bench-peers chaos fleet-sim test-gpu bench-gpu check-cuda-build check-all sbom clean
.DEFAULT_GOAL := help

help: ## list the tasks
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(RUN_READY) ## serve the embedded model on http://127.0.0.1:8000 (ARGS="--port 9000 ...")
	@$(BIN)/python -m services serve $(ARGS)

chat: $(RUN_READY) ## chat in the terminal, with a running fleet or one of its own
	@$(BIN)/python -m services chat $(ARGS)

test: $(DEV_READY) ## run every test (ARGS="tests/worker -k radix ...")
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --no-loadscope-reorder) $(ARGS)

lint: $(DEV_READY) ## check style, types, imports and protos
	@echo "==> ruff"; $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "==> mypy"; $(BIN)/mypy
	@echo "==> import-linter"; $(BIN)/lint-imports --no-logo
	@echo "==> protos"; tools/protos.sh --check
	@$(BIN)/buf lint
	@$(BIN)/buf breaking --against protos/baseline.binpb

docs: $(DEV_READY) ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q

format: $(DEV_READY) ## rewrite the code in the one style
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

protos: $(DEV_READY) ## generate the Python code of protos/*.proto
	@tools/protos.sh

web: ## bundle the page at / (needs npm); what it makes is committed
	@cd services/gateway/web && npm ci --silent --no-audit --no-fund && node build.mjs

baseline: $(DEV_READY) ## at a release only: promise the field numbers as they are now
	@$(BIN)/buf build -o protos/baseline.binpb

bench: $(DEV_READY) ## measure a fleet with the fake engine
	@$(BIN)/python -m bench.fleet $(ARGS)

bench-peers: $(DEV_READY) ## the wire and the engine beside their peers (bench/README.md: how to install them)
	@HF_HUB_OFFLINE=1 $(BIN)/python -m bench --only wire,engine_peers $(ARGS)

bench-all: $(DEV_READY) ## every benchmark, figures into build/figures (ARGS="--quick": shortest forms)
	@HF_HUB_OFFLINE=1 $(BIN)/python -m bench $(ARGS)

fleet-sim: $(DEV_READY) ## what a fleet costs from 2 to 64 workers, and what that says of 1,000
	@$(BIN)/python -m bench.fleet_sim $(ARGS)

chaos: $(DEV_READY) ## 500 faults over 5,000 streams (SHOAL_CHAOS_SEED=N repeats the draw of N)
	@SHOAL_FULL=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -s tests/chaos $(ARGS)

test-gpu: $(DEV_READY) ## run the tests that need a GPU
	@SHOAL_TEST_GPU=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/gpu $(ARGS)

bench-gpu: $(RUN_READY) ## check and time the CUDA path on a GPU (ARGS="--json gpu.json")
	@$(BIN)/python -m bench.gpu $(ARGS)

check-cuda-build: $(DEV_READY) ## build FlashInfer's modules with nvcc, without a GPU (an hour)
	@SHOAL_CHECK_CUDA_BUILD=1 $(BIN)/python -m pytest tests/worker/attention/test_flashinfer_build.py $(ARGS)

bench-engine: $(RUN_READY) ## measure the engine's choices with the embedded model (ARGS="--rounds 3")
	@$(BIN)/python -m bench.engine $(ARGS)

check-all: lint ## everything that CI checks, and the slow suites in full
	@tools/clients.sh
	@SHOAL_FULL=1 SHOAL_STATEFUL_EXAMPLES=10 $(MAKE) --no-print-directory test

sbom: $(RUN_READY) ## list the packages of .venv in sbom.cdx.json (CycloneDX)
	@tools/sbom.sh

clean: ## remove the virtual environment and every cache
	@rm -rf .venv .venv-sbom sbom.cdx.json build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN_READY): pyproject.toml constraints.txt
	@$(SETUP) run
	@touch $@

$(DEV_READY): $(RUN_READY)
	@$(SETUP) dev
	@touch $@
