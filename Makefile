# Two commands do everything: `make sweep` runs the main job, `make test` passes the tests.
# Each creates .venv and installs what is missing; a second run installs nothing.
# Options of the sweep: make sweep OPTIONS="--dataset fashion-mnist"
# `make test-all` adds what takes minutes: killing real sweeps, and searching all they wrote for leaks.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OPTIONS ?=
PYTEST_OPTIONS ?= -m "not thorough and not gpu"
INSTALLED := $(VENV)/installed

.PHONY: sweep test test-all lint docs clean

sweep: $(INSTALLED)
	$(BIN)/python sweeps/group_size.py $(OPTIONS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_OPTIONS)

test-all:
	$(MAKE) test PYTEST_OPTIONS='-m "not gpu"'

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The versions are pinned by constraints.txt, so only a change of it or of pyproject.toml installs again.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: Python 3.11 or newer is needed; give one with PYTHON=/path/to/python"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

# The site, in build/site: a warning, such as a dead link, is an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build *.egg-info
