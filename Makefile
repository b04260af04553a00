# Everything runs in a virtual environment of its own; `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv
TRITON ?= 3.6.0
# What the wheel is installed with for test-wheel, and where; nothing pins what pip would bring.
WHEEL_PINS ?=
WHEEL_VENV ?= .venv-wheel
TORCH_CPU ?= 2.13.0+cpu
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
JOBS ?= auto

DEVICE ?= a30
SHAPES ?= shapes.yaml
REPORT ?= report

BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(TRITON)
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n $(JOBS) --maxprocesses 8 --dist worksteal
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)

# Workers and child processes start in half the time where bytecode is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help tune precompiled test test-exhaustive test-gpu lint format report docs dist test-wheel clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

tune: $(READY) ## Tune the problems of SHAPES for DEVICE (a30 and shapes.yaml)
	$(BIN)/autoattn tune --device $(DEVICE) --shapes $(SHAPES)

report: $(READY) ## Write the report of what was tuned into REPORT (report/)
	$(BIN)/autoattn report --out $(REPORT)

precompiled: $(READY) ## Compile the kernels that come with machine code, for the cards that cache/ was measured for
	for device in h200 h100; do \
		$(BIN)/autoattn cache compile --device $$device --cache cache --shapes precompiled.yaml || exit; done

test: $(READY) ## Run the tests that need no GPU
	$(PYTEST) -m "not gpu and not exhaustive" $(PARALLEL)

test-exhaustive: $(READY) ## Run the tests that make test leaves out: more of what it proves
	$(PYTEST) -m "exhaustive and not gpu" $(PARALLEL)

test-gpu: $(READY) ## Run the tests that need an NVIDIA GPU
	$(PYTEST) -m gpu $(PARALLEL)

lint: $(READY) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

format: $(READY) ## Put the code into the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## Build the documentation's site into site/; a broken link or a missing page is an error
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs . site

# The wheel is built from the sdist; the one of the checkout is there to be compared with it.
dist: $(READY) ## Build the sdist and the wheel of a release into dist/, and check what they hold
	rm -rf dist
	$(BIN)/python -m build --outdir dist . > dist.log 2>&1 || { cat dist.log >&2; exit 1; }
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist/checkout .
	rm dist.log
	AUTOATTN_DIST="$(CURDIR)/dist" $(PYTEST) tests/release

# Away from the checkout, so that the tests meet the wheel's package and files. PyPI's torch brings gigabytes of CUDA.
test-wheel: dist ## Install the wheel with WHEEL_PINS into a fresh WHEEL_VENV, tune a problem and run the tests there
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "autoattn needs Python 3.10 or newer, got $$($(PYTHON) --version); run make PYTHON=python3.11" >&2; exit 2; }
	rm -rf $(WHEEL_VENV)
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet dist/*.whl $(WHEEL_PINS)
	cd $(WHEEL_VENV) && bin/autoattn tune --device a30 --dtype bfloat16 --batch 1 --heads 1 --seq-q 128 --head-dim 16 \
		--effort instant --cache tuned
	$(WHEEL_VENV)/bin/python -m pip install --quiet "$$(ls dist/*.whl)[dev]" $(WHEEL_PINS)
	$(WHEEL_VENV)/bin/python -m pip list --format freeze | grep -E "^(torch|triton|numpy|autoattn)=="
	cd $(WHEEL_VENV) && bin/pytest --rootdir "$(CURDIR)" -c "$(CURDIR)/pyproject.toml" -p no:cacheprovider \
		-m "not gpu and not exhaustive" $(PARALLEL) "$(CURDIR)/tests"

clean: ## Remove the virtual environment
	rm -rf $(VENV) $(WHEEL_VENV) dist site

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "autoattn needs Python 3.10 or newer, got $$($(PYTHON) --version); run make PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# Without a GPU the CPU build of torch is enough; the one of PyPI would bring gigabytes of CUDA. With one, torch brings
# the Triton that it was made for.
$(READY): pyproject.toml | $(VENV)/bin/python
ifeq ($(HAS_GPU),0)
	$(BIN)/python -m pip install --quiet --retries 2 --timeout 15 --extra-index-url $(TORCH_CPU_INDEX) \
		"torch==$(TORCH_CPU)" "triton==$(TRITON)"
	$(BIN)/python -m pip install --quiet "torch==$(TORCH_CPU)" "triton==$(TRITON)" -e ".[dev]"
else
	$(BIN)/python -m pip install --quiet torch
	$(BIN)/python -m pip install --quiet -e ".[dev]"
endif
	touch $@
