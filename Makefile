# Each target sets up .venv by itself, from pyproject.toml and the pins in constraints.txt.
#
#   make demo    the main job: data, semantic IDs, training, evaluation, into runs/demo
#   make test    lint, then the tests
#   make lint    ruff and mypy over gr and tests
#   make clean   remove .venv and the tools' caches (never runs/)
#
# PYTHON names the interpreter .venv is made with:  make demo PYTHON=python3.12
# WORKERS is the number of processes the tests run in:  make test WORKERS=0 runs them in one.

PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# Written last, so that a .venv without either is half made and is started over.
BASE := $(VENV)/.installed
FULL := $(VENV)/.installed-test
INPUTS := pyproject.toml constraints.txt

# A moved folder or a removed interpreter leaves scripts that no longer start.
ifneq ($(shell grep -qsF '$(CURDIR)/$(VENV)' $(BIN)/activate && $(BIN)/python -c 'print("ok")' 2>/dev/null),ok)
$(shell rm -f $(BASE) $(FULL))
endif

.NOTPARALLEL:
.PHONY: help demo test lint clean

help:
	@sed -n '/^#  /s/^#//p' Makefile

demo: $(BASE)
	$(BIN)/gr demo

# One thread a process: two processes fill two cores, and sums are added in one order everywhere.
# Offline: a test that would reach for a model hub fails at once instead of waiting for it.
test: lint
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 MPLBACKEND=Agg TOKENIZERS_PARALLELISM=false \
		$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

lint: $(FULL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BASE): $(INPUTS)
	$(call install,.)
	@touch $(BASE)

# The test environment holds everything the base one does.
$(FULL): $(INPUTS)
	$(call install,'.[test]')
	@touch $(BASE) $(FULL)

define install
@command -v $(PYTHON) >/dev/null || \
	{ echo "$(PYTHON): not found. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), wanted 3.10 or newer. Name another: make PYTHON=python3.12" >&2; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	{ echo "$(PYTHON) cannot make virtual environments (no ensurepip). On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
@if [ -e $(BASE) ]; then rm -f $(BASE) $(FULL); else $(PYTHON) -m venv --clear $(VENV); fi
@echo "Installing gr into $(VENV); the first time takes a few minutes."
$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e $(1)
endef
