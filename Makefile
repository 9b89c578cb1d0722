# Everything runs in .venv, which holds exactly what requirements.txt locks.
#   make train                        train PPO on Snake with Anakin
#   make EXPERIMENT=cartpole_ppo RUNNER=sebulba train   another of gin/experiments
#   make test                         the test suite (without the slow and the learning tests)
#   make test-all                     with the slow ones
#   make check                        checks that take seconds
#   make PYTHON=python3.12 install    choose the interpreter of a new .venv
#   make accelerator                  measure this machine's device
#   make EXTRAS=cuda13 install        choose the accelerator: cuda13, cuda12, tpu; nothing for the CPU

PYTHON ?= python3
WORKERS ?= 2
# The default is the accelerator of this machine. NVIDIA drivers before 580 need CUDA 12. TPUs from
# v5e on appear as VFIO groups beside a PCI device of Google (0x1ae0).
ifeq ($(origin EXTRAS),undefined)
EXTRAS := $(shell \
  if ls /dev/nvidia[0-9]* >/dev/null 2>&1; then \
    sed -n '1s/.* \([0-9][0-9]*\)\.[0-9.]* .*/\1/p' /proc/driver/nvidia/version 2>/dev/null \
      | awk '{ if ($$1 < 580) old = 1 } END { print old ? "cuda12" : "cuda13" }'; \
  elif ls /dev/accel[0-9]* >/dev/null 2>&1 || { ls /dev/vfio/[0-9]* >/dev/null 2>&1 \
    && grep -qx 0x1ae0 /sys/bus/pci/devices/*/vendor 2>/dev/null; }; then echo tpu; fi)
endif
KNOWN_EXTRAS := cuda12 cuda13 tpu gcs wandb gymnax brax craftax xminigrid jaxmarl pgx playground export onnx hub sweep notebooks docs test
COMMA := ,
# pip only warns, and JAX would find only the CPU.
ifneq ($(filter-out $(KNOWN_EXTRAS),$(subst $(COMMA), ,$(EXTRAS))),)
$(error EXTRAS: expected some of '$(KNOWN_EXTRAS)', or nothing, got '$(EXTRAS)')
endif

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed$(addprefix -,$(EXTRAS))
SOURCES := podracers agents environments scripts tests
LOCKED_EXTRAS := test docs notebooks gymnax brax craftax xminigrid pgx jaxmarl playground export onnx hub sweep

EXPERIMENT ?= snake_ppo
# Without RUNNER the environment chooses the runner; without RUN_DIR the script names the directory.
RUNNER ?=
RUN_DIR ?=
PYTEST := $(BIN)/python -m pytest
IN_PARALLEL := -n $(WORKERS) --dist loadfile
SPHINX := $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going

SUDO := $(if $(filter-out 0,$(shell id -u)),sudo)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install train test test-slow test-all test-learning check lint types format \
  benchmark accelerator docs linkcheck dist lock slurm clean

# Measured on two cores: the first on an Intel at 2.5 GHz (an AMD EPYC takes 4:40), the second, with a
# cold cache, on an AMD EPYC, where the Intel takes 1.5 times the CPU. Tests compare the README with this.
TRAIN_TIME := 6 minutes, installation included
TEST_TIME := 8 minutes of CPU
CHECK_TIME := about 20 seconds
# Times of other experiments are in docs/generated/results.md.
SHOWN_TRAIN_TIME := $(if $(filter filefile,$(origin EXPERIMENT)$(origin RUNNER)),$(TRAIN_TIME) (on two cores),\
  docs/generated/results.md has times of experiments)

help:
	@echo "make install"
	@echo "make train          PPO on Snake with Anakin: $(TRAIN_TIME)"
	@echo "make train EXPERIMENT=NAME RUNNER=sebulba  another of gin/experiments, another runner"
	@echo "make check          format, lint, types, imports, gin files, pages: $(CHECK_TIME)"
	@echo "make test           the test suite: $(TEST_TIME)"
	@echo "make test-all       with the slow tests, which make test-slow runs alone"
	@echo "make test-learning  agents until they have learnt"
	@echo "make accelerator    measure this machine's device: runs/accelerator.json"
	@echo "make docs           the site: .cache/docs/html/index.html"
	@echo "make lint | types | format | benchmark | linkcheck | dist | lock | slurm | clean"
	@echo "Times are of two cores."

install: $(STAMP)

# An existing .venv is kept. Without Debian's python3-venv, pip is installed into the new environment
# from outside.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) was not found; install Python 3.11 or newer" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) -V 2>&1 | cut -d' ' -f2);" \
	    "name another one: make PYTHON=python3.12 $(or $(MAKECMDGOALS),install)" >&2; exit 2; }
	@echo "making $(VENV) with $$($(PYTHON) -V)"
	@if $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	else $(PYTHON) -m venv --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; \
	fi || { rm -f $(BIN)/python; \
	  echo "$(VENV) could not be made; on Debian or Ubuntu: sudo apt install python3-venv" >&2; \
	  exit 2; }

# The lock constrains the accelerator's packages too; setuptools is locked, so nothing is fetched to
# build the project itself.
$(STAMP): setup.cfg pyproject.toml requirements.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation -c requirements.txt \
	  -e ".$(if $(EXTRAS),[$(EXTRAS)])"
	@touch $@

train: install
	@echo "training $(EXPERIMENT): $(SHOWN_TRAIN_TIME)"
	$(BIN)/python scripts/train.py --gin_file gin/experiments/$(EXPERIMENT).gin \
	  $(if $(RUNNER),--runner $(RUNNER)) $(if $(RUN_DIR),--run_dir $(RUN_DIR))

test: install
	@echo "the test suite: $(TEST_TIME) (on two cores; make check takes $(CHECK_TIME))"
	$(PYTEST) $(IN_PARALLEL) -m "not slow and not learning"

test-slow: install
	$(PYTEST) $(IN_PARALLEL) -m "slow and not learning"

test-all:
	$(MAKE) test
	$(MAKE) test-slow

test-learning: install
	$(PYTEST) -o faulthandler_timeout=0 -m learning

check: lint types
	$(PYTEST) -q --durations=3 tests/test_imports.py tests/test_docs.py \
	  tests/test_gin_files.py::test_experiments_can_be_built

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/pyrefly check

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: install
	$(BIN)/python scripts/benchmark.py

accelerator: install
	mkdir -p runs
	$(BIN)/python scripts/benchmark.py device --repeats 3 --json runs/accelerator.json

# The site: .cache/docs/html/index.html. A warning is an error, such as a link that leads nowhere.
docs: install
	$(SPHINX) -b html docs .cache/docs/html
	@echo "$(CURDIR)/.cache/docs/html/index.html"

# Links to other sites, which may fail for reasons of their own.
linkcheck: install
	$(SPHINX) -b linkcheck docs .cache/docs/linkcheck

# The files of a release, made with tools of their own.
dist:
	$(PYTHON) -m venv .cache/dist
	.cache/dist/bin/python -m pip install --quiet build twine
	rm -rf dist
	.cache/dist/bin/python -m build
	.cache/dist/bin/twine check --strict dist/*

# Needs uv (https://docs.astral.sh/uv). One file serves every Python that the project supports.
lock:
	@echo "# The exact set that \`make install\` installs, for Python 3.11, 3.12 and 3.13; made by \`make lock\`." \
	  > requirements.txt
	uv pip compile --quiet --universal --python-version 3.11 --upgrade --no-header --no-annotate \
	  $(addprefix --extra ,$(LOCKED_EXTRAS)) setup.cfg >> requirements.txt

# For the tests of Slurm, which root runs and others skip.
slurm:
	command -v slurmctld >/dev/null || { $(SUDO) apt-get update --quiet=2 && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes slurm-wlm munge; }

# Keeps runs, which are results, and .venv, which takes minutes to create.
clean:
	rm -rf .cache .pytest_cache .ruff_cache build dist docs/api docs/notebooks *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
