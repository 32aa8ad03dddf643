# Every target does its own set-up: a virtual environment in .venv with the versions of constraints.txt.

PYTHON ?= python3
DEVICES ?= 2
# processes for tests, each of one thread: one more than cores, as many wait for what they have started; WORKERS=0 is one that
# shows what it does
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n + 1 : 8)))
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
BIN := .venv/bin
READY := .venv/.ready
GENERATED := build/protos
GENERATOR := build/generator
OLDEST := build/oldest
FLOORS := build/floors
PROTOC = $(GENERATOR)/bin/python -m grpc_tools.protoc -I protos --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) \
	protos/actorflow_protos/*.proto

# with bytecode kept, tests import and collect in half the time: hundreds of processes import the same modules
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help .venv demo test test-all test-oldest test-floors test-hosts test-two-hosts test-engines chaos fuzz check lint types drift docs protos bench bench-list clean

help: ## show this list
	@sed -n 's/^\([.a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

.venv: $(READY) ## install actorflow and its tools into .venv

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or later is needed; $(PYTHON) is {v[0]}.{v[1]}. Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,docs]'
	@touch $@

demo: $(READY) ## train a digit classifier on 2 devices (DEVICES=N)
	$(BIN)/actorflow run examples/digits.py --devices $(DEVICES)

test: $(READY) ## run the tests, but for the slow ones
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not hosts" $(ARGS)

test-all: $(READY) ## run all tests, but for those that need several hosts
	$(BIN)/python -m pytest $(PARALLEL) -m "not hosts" $(ARGS)

$(OLDEST)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(OLDEST)
	grep -v '^torch==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c $(OLDEST)/constraints.txt \
		"$$(sed -n 's/^ *"torch>=\(.*\)",.*/torch==\1.*/p' pyproject.toml)" -e '.[test]'
	@touch $@

test-oldest: $(OLDEST)/.ready ## run the tests on the oldest torch that pyproject.toml allows (ARGS="tests/frontend -x")
	$(OLDEST)/bin/python -m pytest $(PARALLEL) -m "not slow and not hosts" -o timeout=600 $(ARGS)

$(FLOORS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(FLOORS)
	sed -n '/^dependencies/,/^]/s/^ *"\([[:alnum:]._-]*\)>=\([^",]*\)".*/\1==\2/p' pyproject.toml | grep -v '^torch==' > $(FLOORS)/constraints.txt
	$(FLOORS)/bin/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(FLOORS)/bin/pip install --quiet --disable-pip-version-check -c $(FLOORS)/constraints.txt -e '.[test]'
	@touch $@

test-floors: $(FLOORS)/.ready ## run the tests on the oldest of all other dependencies (Python 3.11 or 3.12)
	$(FLOORS)/bin/python -m pytest $(PARALLEL) -m "not slow and not hosts" $(ARGS)

fuzz: $(READY) ## send 10,000 messages that nobody sends to each door of live ranks (ARGS="--messages N --from-seed S")
	$(BIN)/python -m pytest -s -o timeout=3600 tests/fuzz --messages 10000 $(ARGS)

test-hosts: $(READY) ## tests across hosts: four containers (installs Docker on Debian; see docker/test-hosts)
	PYTHON=$(BIN)/python docker/test-hosts $(ARGS)

test-two-hosts: $(READY) ## the quick ones, on two containers; without an engine, in network namespaces
	PYTHON=$(BIN)/python docker/test-hosts --on either --nodes 2 -m "hosts and not slow" $(ARGS)

chaos: $(READY) ## runs to which faults happen at random moments (ARGS="--runs 50 --seed 1"; root, iproute2, iptables)
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m chaos.campaign $(ARGS)

test-engines: $(READY) ## the tests on Slurm (where Debian's slurmctld, slurmd and munge are), Ray, and two network cards
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest -m hosts tests/engines $(ARGS)

check: lint types drift docs ## lint, types, documentation, and whether the generated protobuf code is fresh

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet

types: $(READY)
	$(BIN)/mypy

$(GENERATOR)/.ready: protos/generator.txt
	$(PYTHON) -m venv --clear $(GENERATOR)
	$(GENERATOR)/bin/pip install --quiet --disable-pip-version-check -r protos/generator.txt
	@touch $@

drift: $(GENERATOR)/.ready
	@rm -rf $(GENERATED) && mkdir -p $(GENERATED)
	@$(call PROTOC,$(GENERATED))
	@diff -ru -x '*.proto' -x __init__.py -x py.typed -x __pycache__ protos/actorflow_protos $(GENERATED)/actorflow_protos \
		|| { echo "The generated code in protos/ is not what the .proto files make; run: make protos"; exit 1; }
	@echo "Generated protobuf code is fresh."

docs: $(READY) ## build the documentation in build/docs; a link that leads nowhere is an error
	$(BIN)/python -m sphinx -q --builder html --fail-on-warning --keep-going docs build/docs
	@echo "The documentation is in build/docs/index.html."

protos: $(GENERATOR)/.ready ## generate the Python code of the .proto files
	$(call PROTOC,protos)

bench: $(READY) ## measure steps against DDP, FSDP2, DTensor, pipelining and Ray (ARGS=--quick)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/suite.py $(ARGS)

bench-list: ## list the benchmarks; each has a target of its own: make bench-overhead ARGS=step
	@for file in benchmarks/*.py; do \
		sed -n "1{s,^\"\"\",  make bench-$$(basename $$file .py)\t,;s,\"*$$,,;p}" $$file; \
	done | expand -t 26

bench-%: $(READY)
	$(BIN)/python benchmarks/$*.py $(ARGS)

clean: ## remove .venv and everything made
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
