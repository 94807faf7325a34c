# `make demo` and `make test` work on a fresh machine with Python 3.11-3.14, make and, for full speed, a C++ compiler.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install demo test test-all test-versions lint bench docs notebooks clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      set everything up, draw figure 1 of the paper in a shorter form, train on digits"
	@echo "make test      set everything up and run the quick tests, six to seven minutes on two cores"
	@echo "make test-all  also the slow ones: killed processes, torchrun, terminals, a browser, fuzzing"
	@echo "make test-versions  the quick tests on the oldest and the newest torch, in environments of their own"
	@echo "make lint      ruff and mypy"
	@echo "make bench     time densities and small networks against JAX, blackjax and posteriors (installs them)"
	@echo "make docs      build the documentation into build/site (installs mkdocs)"
	@echo "make notebooks runs the tutorials again and keeps what they show (needs Chrome or Chromium)"
	@echo "make clean     remove what the other targets made"

install: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e ".[test,lint]"
	touch $@

demo: install
	$(BIN)/torchrex reproduce figure1 --set n_steps=20000 --out runs/demo --overwrite
	$(BIN)/torchrex reproduce digits --out runs/demo --overwrite

PYTEST = PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal
test: install
	$(call PYTEST,$(VENV)) -m "not slow"

test-all: install
	$(call PYTEST,$(VENV))

# uv gets a Python that is missing. On Linux the torch of PyPI brings gigabytes of CUDA along; with UV_TORCH_BACKEND=cpu
# uv takes PyTorch's CPU builds instead.
OLDEST_PYTHON ?= 3.11
NEWEST_PYTHON ?= 3.14
FRESH         := build/versions
define test_on
	rm -rf $(FRESH)
	$(BIN)/uv venv --quiet --python $(2) $(FRESH)
	grep -v "^torch==" constraints.txt > $(FRESH)/constraints.txt
	$(BIN)/uv pip install --quiet --python $(FRESH)/bin/python -c $(FRESH)/constraints.txt "$(1)" -e ".[test]"
	$(FRESH)/bin/python -c "import sys, torch; print('torch', torch.__version__, 'on Python', sys.version)"
	$(call PYTEST,$(FRESH)) -m "not slow"
	rm -rf $(FRESH)
endef
test-versions: install
	$(PIP) uv
	$(call test_on,torch==2.8.*,$(OLDEST_PYTHON))
	$(call test_on,torch,$(NEWEST_PYTHON))

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ruff format --check --line-length 75 README.md CONTRIBUTING.md docs/*.md
	$(BIN)/mypy

$(VENV)/.bench: $(VENV)/.installed
	$(PIP) "jax" "blackjax" "posteriors"
	touch $@

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/density_loop.py --out benchmarks/results/density_loop.json
	taskset -c 0 $(BIN)/python benchmarks/module_cpu.py --out benchmarks/results/module_cpu.json

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) -e ".[docs]"
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(VENV)/.docs
	$(BIN)/python docs/site/notebooks.py

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
