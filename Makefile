# All that this needs is make and Python 3.10 or newer: the rest goes into .venv, once.
#
#   make demo ARGS="--seconds 20"      arguments for the command behind a target
#   make test PYTHON=python3.12        another Python for .venv
#   make demo PIP_FLAGS="..."          more options for pip. On x86-64 Linux a plain torch brings several GB of
#                                      CUDA libraries; point pip at a CPU build here if you want to spare them
PYTHON ?= python3
PIP_FLAGS ?=
ARGS ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench chaos clean

help:
	@echo "make demo    one command: what batching does, with a real model and an embedded Redis"
	@echo "make test    all tests"
	@echo "make lint    ruff, mypy --strict, import-linter"
	@echo "make format  let ruff rewrite what it can"
	@echo "make bench   how fast batchq is on this machine"
	@echo "make chaos   ten minutes of killing things, with a ledger; ARGS=\"--seed 7\" runs one again"
	@echo "make clean   remove .venv and all caches"

demo: .venv/demo.stamp
	@$(BIN)/batchq demo $(ARGS)

test: .venv/test.stamp
	$(BIN)/pytest -n 2 --dist worksteal $(ARGS)

lint: .venv/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/test.stamp
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: .venv/demo.stamp
	@$(BIN)/batchq bench $(ARGS)

chaos: .venv/test.stamp
	$(BIN)/python -m tests.chaos $(ARGS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "batchq needs Python 3.10 or newer, and '$(PYTHON)' is none: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; rm -rf .venv; exit 1; }

# A stamp is older than pyproject.toml when what it stands for may have changed.
.venv/demo.stamp: pyproject.toml | .venv/pyvenv.cfg
	$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[demo]'
	@touch $@

.venv/test.stamp: pyproject.toml | .venv/pyvenv.cfg
	$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[test]'
	@touch $@ .venv/demo.stamp
