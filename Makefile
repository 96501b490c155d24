# Every target makes the environment first. Two commands do everything: `make fuzz`, `make test`.
PYTHON ?= python3
VENV := .venv
# which torch `make versions` tries: a release, or the newest
TORCH ?= newest
TRIED := .venv-$(TORCH)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# what `make models` needs besides
MODELS := $(VENV)/.models
MINUTES ?=
ARGS ?=

export OMP_NUM_THREADS = 1
# runs and tests start processes by the hundred: what these import is compiled once
unexport PYTHONDONTWRITEBYTECODE

.PHONY: fuzz test lint bench watch-trials watch-titan models score gate seed-bug gpu versions history \
	explained page nightly clean

fuzz: $(READY)
	$(BIN)/narrowfuzz run $(addprefix --minutes ,$(MINUTES)) $(ARGS)

# mypy has one process: beside the gate the other core is not idle
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not heavy" --durations=25 $(ARGS) tests properties --nf-profile smoke
	$(MAKE) -j 2 lint gate

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/bench.py $(ARGS)

# faults injected into a training on four ranks: does watch name rank, operator and collective?
watch-trials: $(READY)
	$(BIN)/python benchmarks/watch_trials.py $(ARGS)

# watch around torchtitan's own trainer, with nothing wrong in it: it must be silent
watch-titan: $(READY)
	$(BIN)/python benchmarks/watch_titan.py $(ARGS)

# check on models that others wrote; whatever is reported needs an owner: docs/models.md.
# It takes hours, and goes on where it was stopped; ARGS="--only 'mnist.py:*'"
models: $(MODELS)
	$(BIN)/python benchmarks/models.py $(ARGS)

# everything that says how much is found; --seconds scales it, --write renews docs/detection.md
score: $(READY)
	$(BIN)/python benchmarks/detection.py $(ARGS)

# 20 eager faults and 5 controls, counted in cases: recall must not be lost, no false alarm
gate: $(READY)
	$(BIN)/narrowfuzz score $(addprefix --only ,$(shell cat benchmarks/gate.txt)) --seed 1 \
		--seconds 120 --cases 400 --control-cases 30 --arm eager --arm 'eager+*' \
		--against benchmarks/gate.json

# what campaigns find in old releases, and which later one fixed it: docs/history.md; about four
# hours, and twenty gigabytes for releases of torch
history: $(READY)
	$(BIN)/python benchmarks/history.py torchao 0.9.0 0.10.0 0.11.0 0.12.0 0.13.0 0.14.1 0.15.0 0.16.0 \
		0.17.0 --write $(ARGS)
	$(BIN)/python benchmarks/history.py torchtitan 0.1.0 0.2.2 0.3.0 --write $(ARGS)
	$(BIN)/python benchmarks/history.py torch 2.11.0 2.12.1 2.14.1 --write $(ARGS)
	$(BIN)/python benchmarks/history.py transformer_engine 1.9.0.post1 1.10.0 1.11.0 1.12.0 \
		1.13.0 2.4.0 2.5.0 2.6.0.post1 2.7.0 2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0 2.14.1 \
		2.16.1 2.18.0 2.19.0 2.20.2 --write $(ARGS)

# what explain says of findings whose cause is known: docs/explained.md; about an hour
explained: $(READY)
	$(BIN)/python benchmarks/explained.py $(ARGS)

seed-bug: $(READY)
	$(BIN)/python benchmarks/seed_bug.py $(ARGS)

# a first day on a GPU, as benchmarks/gpu_day.py tells it: resumable, in the Python that is there, with
# what that lacks from a folder of WHEELS; ARGS=--simulate plays it on a simulated Hopper
gpu: MINUTES = 18
gpu:
	$(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON)) benchmarks/gpu_day.py --minutes $(MINUTES) \
		$(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

# report.html in a real browser, with axe-core; needs Chromium and npm
page: $(READY)
	$(BIN)/python -m pytest -q tests/page_checks.py $(ARGS)

# what of the ledger and the baselines holds on another torch, in an environment of its own (gigabytes
# of it): `make versions` takes the newest torch and torchao of the package index, `make versions
# TORCH=2.11.0` that release with the pinned torchao
versions:
	$(PYTHON) -m venv $(TRIED)
	grep -v '^torch$(if $(filter newest,$(TORCH)),,==)' constraints.txt > $(TRIED)/constraints.txt
	$(TRIED)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
		-c $(TRIED)/constraints.txt $(if $(filter newest,$(TORCH)),torch,torch==$(TORCH)) torchao
	$(TRIED)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c $(TRIED)/constraints.txt $(if $(filter newest,$(TORCH)),,torch==$(TORCH)) -e '.[dev]'
	$(TRIED)/bin/python benchmarks/versions.py $(ARGS)

nightly: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m heavy tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup properties --nf-profile nightly $(ARGS)
	$(MAKE) gpu ARGS=--simulate MINUTES=9

PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# pip compiles its modules one by one; a few that are for another Python cannot be compiled
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile torch==2.13.0
	$(PIP) --no-compile -e '.[dev]'
	-$(BIN)/python -m compileall -qq -j 2 $(VENV)/lib
	touch $(READY)

$(MODELS): $(READY)
	$(PIP) torch==2.13.0 -e '.[models]'
	touch $(MODELS)

clean:
	rm -rf $(VENV)
