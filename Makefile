# make demo | make test: both set everything up by themselves in .venv, and nowhere else.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

.PHONY: demo test check fast nightly gpu format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     a page and pictures of what Vitrail does, in out/demo; MODEL=folder, IMAGE=file for yours"
	@echo "make test     formatter, linter, types, import direction, then the tests (what CI runs)"
	@echo "make fast     the tests alone, without the slow ones"
	@echo "make nightly  the slow tests too"
	@echo "make gpu      the tests that need a CUDA device"
	@echo "make format   rewrite the code as the formatter wants it"

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Vitrail needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: .venv/ready
	$(BIN)/python examples/demo.py --out out/demo $(if $(MODEL),--model "$(MODEL)") $(if $(IMAGE),--image "$(IMAGE)")

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyrefly check
	@$(BIN)/python perf/record.py

fast: .venv/ready
	$(BIN)/pytest -n $(WORKERS) -m "not slow and not gpu" tests
	$(BIN)/pytest docs README.md  # in one process: the blocks of a page build on one another

test: check fast

nightly: check
	$(BIN)/pytest -n $(WORKERS) -m "not gpu" --timeout 1800 tests
	$(BIN)/pytest docs README.md

gpu:
	python3 -m pytest -m gpu -p no:cacheprovider

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv out .pytest_cache .ruff_cache .hypothesis
