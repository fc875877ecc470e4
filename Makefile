# Tools come from .venv where there is one, else from PATH.
BIN := $(if $(wildcard .venv/bin/python),.venv/bin/)

.PHONY: check docs format test

check:
	$(BIN)ruff check
	$(BIN)ruff format --check
	$(BIN)mypy
	$(BIN)lint-imports
	$(BIN)python -m pytest -n auto --dist loadfile --cov --cov-report=term-missing:skip-covered --cov-fail-under=95

# The site, in build/site; a warning is an error.
docs:
	$(BIN)python -m sphinx -W --keep-going -d build/doctrees docs build/site

format:
	$(BIN)ruff check --fix
	$(BIN)ruff format

test:
	$(BIN)python -m pytest -n auto --dist loadfile
