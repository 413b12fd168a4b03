# Two commands matter: `make quickstart` and `make test`. Each sets up what it needs, once.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all check format clean

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One thread per process: on few cores, more threads than cores is many times slower.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

help:
	@echo "make quickstart   fine-tune a small checkpoint by asynchronous RL on this CPU"
	@echo "make test         the default test suite (CPU, offline, under 5 minutes)"
	@echo "make test-all     the longer sets too"
	@echo "make check        ruff, mypy, codespell"

$(READY): requirements.txt pyproject.toml
	@python=""; \
	for name in $${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do \
	  if "$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	    >/dev/null 2>&1; then python="$$name"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "llamarl needs Python 3.11, 3.12 or 3.13, got $$($${PYTHON:-python3} --version 2>&1 || echo none);" \
	    "set PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
	echo "setting up $(VENV) with $$($$python --version) (once)"; \
	"$$python" -m venv --clear $(VENV) || { \
	  echo "the Python venv module is missing; on Debian: apt install python3-venv" >&2; exit 1; }; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --no-build-isolation --editable .; \
	touch $(READY)

quickstart: $(READY)
	@$(BIN)/llamarl train --config-dir recipes/quickstart $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest $(ARGS)

test-all: $(READY)
	@$(BIN)/python -m pytest -m 'not gpu' $(ARGS)

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/codespell

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs *.egg-info
