# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export DS_ACCELERATOR ?= cpu
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.cache/torch_extensions
export TOKENIZERS_PARALLELISM = false
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test test-fast lint bench verify-gpu clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[deepspeed,frameworks,test,lint]'
	touch $@

# DeepSpeed compiles its ops on first use, for minutes on a busy machine: not while a test is timed.
$(TORCH_EXTENSIONS_DIR)/.built: $(VENV)/.installed
	$(BIN)/python -c "from ckptkit.verify.deepspeed_ops import BUILDERS, build_ops; build_ops(*BUILDERS)"
	touch $@

test: $(TORCH_EXTENSIONS_DIR)/.built lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --maxfail 30

test-fast: $(TORCH_EXTENSIONS_DIR)/.built
	$(BIN)/python -m pytest -m "not slow" -n 2

demo: $(VENV)/.installed
	bash fixtures/demo/run.sh

bench: $(VENV)/.installed
	$(BIN)/python -m tests.benchmarks.convert

# Needs a machine with a GPU: strategies under NCCL in fp32 and bf16, DeepSpeed where it is installed.
verify-gpu: $(VENV)/.installed
	env -u DS_ACCELERATOR bash tests/gpu_check.sh

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check ckptkit cli tests fixtures/*.py
	$(BIN)/mypy

clean:
	rm -rf .cache demo build dist *.egg-info
