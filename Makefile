# Every target does its own set-up: a virtual environment in .venv with the versions of constraints.txt.

PYTHON ?= python3
DEVICES ?= 2
BIN := .venv/bin
READY := .venv/.ready
GENERATED := build/protos
PROTOC = $(BIN)/python -m grpc_tools.protoc -I protos --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) \
	protos/actorflow_protos/*.proto

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help .venv demo test test-all check lint types drift protos bench clean

help: ## show this list
	@sed -n 's/^\([.a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

.venv: $(READY) ## install actorflow and its tools into .venv

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or later is needed; $(PYTHON) is {v[0]}.{v[1]}. Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,bench]'
	@touch $@

demo: $(READY) ## train a digit classifier on 2 devices (DEVICES=N)
	$(BIN)/actorflow run examples/digits.py --devices $(DEVICES)

test: $(READY) ## run the tests, but for the slow ones
	$(BIN)/python -m pytest -m "not slow"

test-all: $(READY) ## run all tests
	$(BIN)/python -m pytest

check: lint types drift ## lint, types, and whether the generated protobuf code is fresh

lint: $(READY)
	$(BIN)/ruff check

types: $(READY)
	$(BIN)/mypy

drift: $(READY)
	@rm -rf $(GENERATED) && mkdir -p $(GENERATED)
	@$(call PROTOC,$(GENERATED))
	@diff -ru -x '*.proto' -x __init__.py -x py.typed -x __pycache__ protos/actorflow_protos $(GENERATED)/actorflow_protos \
		|| { echo "The generated code in protos/ is not what the .proto files make; run: make protos"; exit 1; }
	@echo "Generated protobuf code is fresh."

protos: $(READY) ## generate the Python code of the .proto files
	$(call PROTOC,protos)

bench: $(READY) ## measure the overhead over eager PyTorch, compile time and the cost of a fire
	$(BIN)/python benchmarks/overhead.py

clean: ## remove .venv and everything made
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
