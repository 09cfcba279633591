# The commands of this project. `make help` lists them.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTEST_ARGS ?= -n 3 --dist worksteal
# These wait for nothing: a process per core, and the fewer processes read torch and the tests. They are nice to `lint`
# beside them in `make check`, whose types are checked by one process and would otherwise end last.
QUICK_ARGS ?= -n 2 --dist worksteal
# Most of these start ranks or hosts themselves; those of a file, some of which share an address, stay in one process.
SLOW_ARGS ?= -n 2 --dist loadfile
# One thread each: several processes with all cores each would only wait for one another. No test needs the network.
# Three processes keep two cores busy while tests wait for ranks, signals and locks. Compiled files of Python are kept.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
FAST_PARTS := .venv-fast-parts
LATEST := .venv-latest
LATEST_INSTALLED := $(LATEST)/.installed
QUICKSTART := examples/quickstart
DATA := $(QUICKSTART)/made/train.jsonl
MODEL := $(QUICKSTART)/made/model/model.safetensors

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv quickstart check quick test test-slow test-fast-parts test-latest gpu lint format docs docs-check clean-quickstart

help: ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

venv: $(INSTALLED) ## make .venv and install shardtune with the pinned versions of constraints.txt

# A folder that works is used again; one whose Python is gone is made anew.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'shardtune needs Python 3.11 or newer: make PYTHON=/path/to/python3.11'; exit 1; }
	@$(1)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
	$(1)/bin/python tools/install.py $(2)
	@touch $@
endef

$(INSTALLED): constraints.txt pyproject.toml
	$(call install,$(VENV),constraints.txt)

$(LATEST_INSTALLED): constraints-latest.txt pyproject.toml
	$(call install,$(LATEST),constraints-latest.txt)

$(DATA): $(QUICKSTART)/make_data.py | $(INSTALLED)
	$(BIN)/python $(QUICKSTART)/make_data.py

$(MODEL): $(QUICKSTART)/make_model.py $(DATA) | $(INSTALLED)
	$(BIN)/python $(QUICKSTART)/make_model.py

quickstart: $(DATA) $(MODEL) ## teach a small model arithmetic on this machine: data, model, training, score
	$(BIN)/shardtune train $(QUICKSTART)/recipe.yaml

clean-quickstart: ## forget the quickstart's data, model and run
	rm -rf $(QUICKSTART)/made runs/quickstart

check: $(INSTALLED) ## check style and types, and run the tests that start no process and train nothing: about a minute and a half
	@$(MAKE) --no-print-directory --jobs=2 lint quick

quick: $(INSTALLED) ## run the tests that start no process and train nothing
	$(TEST_ENV) nice $(BIN)/python -m pytest $(QUICK_ARGS) --quick -r fE

# In a new environment each of the test processes would compile the same modules and tests, at the same time.
$(COMPILED): $(INSTALLED)
	@echo 'compiling what the tests import, once: less than a minute'
	@$(TEST_ENV) $(BIN)/python -m pytest --collect-only --quiet > /dev/null 2>&1 || true # the tests themselves report it
	@touch $@

test: $(COMPILED) ## run all tests but the slow ones: of every promise the short form
	$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(COMPILED) ## run the slow tests: further cases and long forms; over half an hour
	$(TEST_ENV) $(BIN)/python -m pytest $(SLOW_ARGS) -m slow

test-latest: $(LATEST_INSTALLED) ## run what `make test` runs with the newest releases (constraints-latest.txt), in a .venv-latest of its own
	$(TEST_ENV) $(LATEST)/bin/python -m pytest $(PYTEST_ARGS)

gpu: $(INSTALLED) ## on a machine with a GPU: all that only a GPU can show, in calls of ten minutes; make gpu GPU_ARGS=--list
	$(BIN)/python bench/gpu.py $(GPU_ARGS)

# Liger and torchao are imported by peft and transformers wherever they are installed, which every run would wait for:
# they get an environment of their own, over the packages of the first.
$(FAST_PARTS)/.installed: $(INSTALLED)
	$(BIN)/python -m venv --clear $(FAST_PARTS)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > "$$($(FAST_PARTS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	$(FAST_PARTS)/bin/python -m pip install --disable-pip-version-check --no-deps -c constraints.txt liger-kernel torchao triton
	@touch $@

test-fast-parts: $(FAST_PARTS)/.installed ## run the tests of Liger's kernels and of FP8, which the other environment lacks
	$(TEST_ENV) TRITON_INTERPRET=1 PYTHONPATH=. $(FAST_PARTS)/bin/python -m pytest tests/models/fast_parts tests/optim/test_fused_adam.py

docs: $(INSTALLED) ## build the documentation site into build/site; a warning is an error
	$(TEST_ENV) $(BIN)/python -m sphinx -W --keep-going -q -c docs -d build/doctrees -b html . build/site
	@echo build/site/index.html

docs-check: docs ## open every page of the site in a headless Chromium, as wide as a phone and a desktop
	$(BIN)/python bench/pages.py --site build/site

lint: $(INSTALLED) ## check style and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m pyright

format: $(INSTALLED) ## put the sources into the project's format
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
