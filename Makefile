PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo test check

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
