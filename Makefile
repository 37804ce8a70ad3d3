# Two commands do everything: `make sweep` runs the main job, `make test` passes the tests.
# Each creates .venv and installs what is missing; a second run installs nothing.
# Options of the sweep: make sweep OPTIONS="--dataset fashion-mnist"
# `make test` takes five minutes and skips, with the reason, what this machine lacks. `make test-ci`, which
# .ci/run calls, adds the tests with clusters and servers of what changed since the commit in .ci/base.
# `make test-long` is the rest: all of those, killing real sweeps, searching all they wrote for leaks, deliberate
# breakages.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OPTIONS ?=
PYTEST := $(BIN)/python -m pytest --dist loadfile
# Where Ray and servers start a test waits: so many processes suit two cores.
CI_PROCESSES := -n 3
PYTEST_OPTIONS ?=
# The tests start many processes, which would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
INSTALLED := $(VENV)/installed

.PHONY: sweep dashboard test test-ci test-long seconds mutants mutants-changed lint docs wheel clean

sweep: $(INSTALLED)
	$(BIN)/python sweeps/group_size.py $(OPTIONS)

# Sweeps and their reports, in a browser: make dashboard OPTIONS="--storage FOLDER"
dashboard: $(INSTALLED)
	$(BIN)/python -m dashboards serve $(OPTIONS)

test: $(INSTALLED)
	$(PYTEST) -n auto --maxprocesses 8 -m "not ci and not long and not gpu" $(PYTEST_OPTIONS)

test-ci: $(INSTALLED)
	$(PYTEST) $(CI_PROCESSES) -m "not long and not gpu" --since-base $(PYTEST_OPTIONS)

test-long: $(INSTALLED) mutants
	$(PYTEST) $(CI_PROCESSES) -m "(ci or long) and not gpu" $(PYTEST_OPTIONS)
	@echo "All of it passed. Where it was of a commit, move the base on: git rev-parse HEAD >.ci/base"

# Runs all tests marked `ci`, an hour on two idle cores, and writes .ci/seconds.json, by which .ci/run counts.
seconds: $(INSTALLED)
	$(PYTEST) $(CI_PROCESSES) -m "ci and not long and not gpu" --write-seconds $(PYTEST_OPTIONS)

# Deliberate breakages, which the tests must notice: all, or those of what changed since the commit in .ci/base.
mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants

mutants-changed: $(INSTALLED)
	$(BIN)/python -m tests.mutants --since-base

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m doctest .ci/*.py
	$(BIN)/python .ci/check_names.py

# The versions are pinned by constraints.txt, so only a change of it or of pyproject.toml installs again.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: Python 3.11 or newer is needed; give one with PYTHON=/path/to/python"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[service,dev]"
	@touch $@

# The site, in build/site: a warning, such as a dead link, is an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Source archive and wheel, in dist/.
wheel: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) build dist *.egg-info
