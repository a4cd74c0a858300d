# Everything runs in a virtual environment of its own. Stamp files remember what is installed, so
# that a second run installs nothing.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Tests wait for other processes half of the time, so two of their processes share a core.
JOBS ?= $(shell $(PYTHON) -c "import os; print(max(2, min(8, 2 * os.cpu_count())))")

BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# The build backend is installed beside torch, so that no build environment has to be filled.
PROJECT := $(PIP) --no-build-isolation -e

.PHONY: help demo test lint format bench docs docs-serve clean

help:
	@echo "make demo    train a small model, kill it, go on with more ranks, and show who saw what"
	@echo "make test    run all tests with coverage; ARGS goes to pytest, JOBS of them run at once"
	@echo "make lint    check format, rules, types and layers"
	@echo "make format  format the code"
	@echo "make bench   run the benchmarks; ARGS goes to them"
	@echo "make docs    build the documentation into site/; make docs-serve shows it while you write"
	@echo "make clean   remove the virtual environment and every cache"

demo: $(STAMPS)/demo
	@$(BIN)/python examples/digits_demo.py
	@$(BIN)/python examples/resume_demo.py

test: $(STAMPS)/test
	@$(BIN)/coverage erase
# A thousand ranks are started; without bytecode on the disk each of them would compile the tests.
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --cov $(ARGS)
	@$(BIN)/coverage report --include='*/shardplug/plan/*' --fail-under=100

lint: $(STAMPS)/lint
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(STAMPS)/lint
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

bench: $(STAMPS)/bench
	@$(BIN)/python -m benchmarks $(ARGS)

docs: $(STAMPS)/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The documentation is in site/; start with site/index.html"

docs-serve: $(STAMPS)/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict

clean:
	rm -rf $(VENV) build dist site .coverage .coverage.* htmlcov
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/torch: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 10) or sys.exit('shardplug needs Python 3.10 or newer, got ' + sys.version.split()[0] + '. Name another one: make PYTHON=python3.12')"
	@test -x $(BIN)/python || echo "Making the virtual environment $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@echo "Installing torch"
	@$(PIP) torch hatchling editables
	@touch $@

$(STAMPS)/demo: $(STAMPS)/torch
	@echo "Installing shardplug with what the demo needs"
	@$(PROJECT) '.[demo]'
	@touch $@

$(STAMPS)/test: $(STAMPS)/torch
	@echo "Installing shardplug with what the tests need"
	@$(PROJECT) '.[test]'
	@touch $@

$(STAMPS)/lint: $(STAMPS)/torch
	@echo "Installing shardplug with what lint and tests need"
	@$(PROJECT) '.[lint]'
	@touch $@ $(STAMPS)/test $(STAMPS)/demo $(STAMPS)/docs

$(STAMPS)/bench: $(STAMPS)/torch
	@echo "Installing shardplug with what the benchmarks need"
	@$(PROJECT) '.[bench]'
	@touch $@

$(STAMPS)/docs: $(STAMPS)/torch
	@$(BIN)/python -c "import sys; sys.version_info >= (3, 11) or sys.exit('make docs needs Python 3.11 or newer, got ' + sys.version.split()[0] + '. Name another one: make docs PYTHON=python3.12 VENV=.venv-docs')"
	@echo "Installing shardplug with what the documentation needs"
	@$(PROJECT) '.[docs]'
	@touch $@
