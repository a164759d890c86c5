# make demo: see it work. make test: check that it does. Both set up everything they need in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := dev,docs,fast,flower,mlflow,onnx,search,tables,tensorboard

.DEFAULT_GOAL := help
.PHONY: help demo test test-bits test-all lint types keys docs bench bench-peers constraints clean

help:            ## this list
	@sed -n 's/^\([a-z-]*\): .*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

demo: $(STAMP)   ## train small federations, let unlabelled newcomers join, show what they gain (under two minutes)
	$(BIN)/upfl demo

test: $(STAMP)   ## the test suite
	$(BIN)/pytest -n 2 --dist worksteal -m "not full"

test-bits: $(STAMP) ## the checks of bits once more, as on a processor with another instruction set
	$(BIN)/python -m tests.other_processor

test-all: $(STAMP) ## the test suite with the full matrix of methods, workers and kills, and bits on plain x86-64
	$(BIN)/pytest -n 2 --dist worksteal
	$(BIN)/python -m tests.other_processor default

lint: $(STAMP)   ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

docs: $(STAMP)   ## the documentation site, into ./site: open site/index.html
	$(BIN)/python -m docs.build

keys: $(STAMP)   ## certificates and keys for a trial of a Flower federation on this machine, into ./keys
	$(BIN)/python -m upfl.flower.keys keys

bench: $(STAMP)  ## one training step against the machine's matrix-multiply rate
	$(BIN)/python -m benchmarks.steps

bench-peers: $(STAMP)  ## rounds against other systems', each in an environment of its own (hours: see --help)
	$(BIN)/python -m benchmarks.peers

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "upfl needs Python 3.11 or later; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

constraints:     ## resolve all extras together anew and write constraints.txt
	rm -rf .venv-constraints && $(PYTHON) -m venv .venv-constraints
	.venv-constraints/bin/python -m pip install --quiet torch==2.13.0
	.venv-constraints/bin/python -m pip install --quiet -e ".[$(EXTRAS)]" torch==2.13.0
	( echo "# All extras resolved together (make constraints). Every install uses this file: pip install -c constraints.txt ..."; \
	  .venv-constraints/bin/python -m pip list --format=freeze --exclude-editable --exclude pip --exclude setuptools \
	  | sed 's/+cpu$$//' ) > constraints.txt
	rm -rf .venv-constraints

clean:           ## remove the environment and what tools left behind
	rm -rf $(VENV) .venv-constraints .mypy_cache .pytest_cache .ruff_cache dist site .site
