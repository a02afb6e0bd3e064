# make demo | test | test-newest | lint | format | clean. Needs python3 (3.11 or newer) with venv, and nothing else.

SHELL := /bin/bash
PYTHON ?= python3
# The index of torch's CPU builds: PyPI's own build for Linux comes with gigabytes of CUDA. Empty: PyPI alone.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# A file of tests stays in one process: its tests share compiled models.
PYTEST_OPTIONS ?= -n 2 --dist loadfile

VENV := .venv
BIN := $(VENV)/bin
PIP := -m pip install --quiet --disable-pip-version-check
VENV_NEWEST := .venv-newest
# A python3.12 or newer that runs: pyenv's shims are on PATH even where they refuse to.
NEWEST_PYTHON ?= $(shell root="$${PYENV_ROOT:-$$HOME/.pyenv}"; for v in 3.12 3.13; do \
	for p in python$$v "$$root"/versions/$$v.*/bin/python$$v; do \
	"$$p" -c "" 2>/dev/null && echo "$$p" && exit; done; done)

.PHONY: demo test test-newest lint format clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest $(PYTEST_OPTIONS)

test-newest: $(VENV_NEWEST)/.installed
	$(VENV_NEWEST)/bin/python -m pytest $(PYTEST_OPTIONS) -m "not torch"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV_NEWEST) demo dist build .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What the library and the demo need. torch goes first, so that nothing else chooses its build.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --no-deps --retries 1 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt torch
	$(BIN)/python $(PIP) -c constraints.txt -e ".[torch]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python $(PIP) -c constraints.txt -e ".[dev]"
	touch $@

# The newest releases of everything that pyproject.toml allows, without torch.
$(VENV_NEWEST)/.installed: pyproject.toml
	@test -n "$(NEWEST_PYTHON)" || { echo "make test-newest needs python3.12 or python3.13 on PATH or under pyenv;" \
		"name another with NEWEST_PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(VENV_NEWEST)/bin/python || $(NEWEST_PYTHON) -m venv $(VENV_NEWEST)
	$(VENV_NEWEST)/bin/python $(PIP) --upgrade --upgrade-strategy eager -e ".[test]"
	touch $@
