PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# Of `make soak`: how many schedules of random faults, and the number of the first.
SCHEDULES ?= 300
FIRST := $(or $(FIRST),$(shell date +%s))

.PHONY: setup demo test check soak coverage mutants

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

# One run of the digits scenario; a finished demo is replaced by the next.
demo: $(STAMP)
	rm -rf runs/demo
	$(BIN)/fl-dpgan simulate digits --out runs/demo
	$(BIN)/fl-dpgan evaluate runs/demo

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -m 'not ray' --numprocesses 3 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -m ray

# Faults on real processes, for half an hour: random schedules, then Ray's actors, whole simulations, a deployed
# federation's ServerApp and SuperLink, all killed. One schedule again: make soak SCHEDULES=1 FIRST=its number
soak: $(STAMP)
	$(BIN)/python -m pytest -s tests/soak --schedules $(SCHEDULES) --first-schedule $(FIRST)
	$(BIN)/python -m pytest --thorough tests/test_simulation.py tests/federation/test_kill.py tests/deploy/test_deployment.py

# Branches of what the guarantee rests on; beside `make test`, for it takes as long again.
coverage: $(STAMP)
	$(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered --cov-fail-under=95 -m 'not ray' \
	    --numprocesses 3 --dist loadfile --no-loadscope-reorder \
	    tests/privacy tests/training tests/federation tests/baselines tests/moments tests/test_*.py

# Whether the tests notice a fault in the accountant, the clipping rules or the ledger.
mutants: $(STAMP)
	$(BIN)/python tests/mutants.py
