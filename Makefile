# Tools come from .venv where there is one, else from PATH.
BIN := $(if $(wildcard .venv/bin/python),.venv/bin/)

.PHONY: check format test

check:
	$(BIN)ruff check
	$(BIN)ruff format --check
	$(BIN)mypy
	$(BIN)lint-imports
	$(BIN)python -m pytest --cov --cov-report=term-missing:skip-covered --cov-fail-under=95

format:
	$(BIN)ruff check --fix
	$(BIN)ruff format

test:
	$(BIN)python -m pytest
