# Tools come from .venv where there is one, else from PATH.
BIN := $(if $(wildcard .venv/bin/python),.venv/bin/)
PYTEST := $(BIN)python -m pytest -n auto --dist loadfile

.PHONY: check docs extras format lint release-check slow test

# Everything, with the coverage of all tests.
check: lint docs extras
	$(PYTEST) -m "slow or not slow" --cov --cov-report=term-missing:skip-covered --cov-fail-under=95

# The site, in build/site, with the outputs of the notebooks; a warning is an error.
# SPHINXOPTS="-D nb_execution_mode=off" leaves the outputs out, which takes half the time.
docs:
	$(BIN)python -m sphinx -W --keep-going $(SPHINXOPTS) -d build/doctrees docs build/site

# Flower, NVFlare and the trackers, in an environment of their own with all extras: tests/with_extras.sh.
extras:
	tests/with_extras.sh

format:
	$(BIN)ruff check --fix
	$(BIN)ruff format

lint:
	$(BIN)ruff check
	$(BIN)ruff format --check
	$(BIN)mypy
	$(BIN)lint-imports

# The wheel in empty environments, which need several Pythons, a package index and about an hour.
release-check:
	$(BIN)python tests/try_release.py

# What `test` leaves out.
slow:
	$(PYTEST) -m slow

test:
	$(PYTEST)
