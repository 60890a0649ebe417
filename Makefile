# Everything a person needs: `make train` and `make test`. Both set up .venv first, once.
# All paths are relative, so that a path with a space in it works. PYTHON=... chooses the Python.

VENV_PYTHON := .venv/bin/python

.PHONY: help setup train test test-all test-schedulers test-launchers check-gpu bench chaos golden pages docs lint dist test-wheel check-pythons clean

help:
	@echo 'make train       train a network on real images with one worker, then two'
	@echo 'make test        run the tests, in some 12 minutes on two cores'
	@echo 'make test-all    run the tests that make test leaves out: most of those with processes'
	@echo 'make test-schedulers  install Slurm, Grid Engine and OpenPBS (root) and run the tests under them'
	@echo 'make test-launchers  install MPICH, Debian'"'"'s Open MPI and sshd and run one script under all launchers'
	@echo 'make check-gpu   check everything that needs a GPU, in 8 minutes; make bench-gpu measures it'
	@echo 'make bench       run all benchmarks; make bench-NAME runs benchmarks/bench_NAME.py'
	@echo 'make chaos       strike a training RUNS=50 times by random faults of SEED=... and resume it'
	@echo 'make golden BASE=COMMIT  show that training gives the same bits as at that commit, in 2 minutes'
	@echo 'make pages      write the pages of docs/reference that are made from the source'
	@echo 'make docs        build the documentation site into build/site, offline'
	@echo 'make lint        check style and types'
	@echo 'make dist        build the sdist and the wheel of the last commit into dist/, the same bytes each time'
	@echo 'make test-wheel  install the wheel into a new environment and run the tests outside of this folder'
	@echo 'make check-pythons    try the wheel in clean environments of Python 3.10 to 3.14, those that are here'
	@echo 'make setup       make .venv with everything the others need (they do it themselves)'
	@echo 'make clean       remove .venv'

# Each target installs what it needs; `make setup` everything.
setup:
	@bash scripts/setup.sh $(MAKECMDGOALS)

train: setup
	@$(VENV_PYTHON) examples/make_train.py

# Tests run beside each other; ARGS='-n 0 -k NAME' for some in one process.
test: setup
	@bash scripts/test.sh 'not slow' $(ARGS)

test-all: setup
	@bash scripts/test.sh slow $(ARGS)

test-schedulers: setup
	@bash scripts/setup_schedulers.sh
	@TORCHMN_TEST_SCHEDULERS=1 $(VENV_PYTHON) -m pytest tests/all/schedulers $(ARGS)

test-launchers: setup
	@bash scripts/setup_launchers.sh
	@TORCHMN_TEST_LAUNCHERS=1 $(VENV_PYTHON) -m pytest tests/all/launchers tests/all/processes/test_exit_status.py tests/smoke/test_exit_status.py $(ARGS)

# Says "not run" where there is no GPU, or where torch in .venv was built without CUDA.
check-gpu: setup
	@$(VENV_PYTHON) -m tests.all.gpu.check $(ARGS)

# One after another, for they measure time; all of them, even if one does not hold its limit.
bench: setup
	@bash scripts/bench.sh

bench-%: setup
	@$(VENV_PYTHON) 'benchmarks/bench_$*.py' $(ARGS)

# Appends to benchmarks/records/chaos.jsonl, so that many runs may take several invocations.
RUNS := 50
chaos: setup
	@$(VENV_PYTHON) benchmarks/bench_chaos.py --runs $(RUNS) $(if $(SEED),--seed $(SEED)) $(ARGS)

golden: setup
	@$(VENV_PYTHON) -m tests.golden.compare $(BASE)

pages: setup
	@$(VENV_PYTHON) -m tests.project.names
	@$(VENV_PYTHON) -m tests.scripts.page

docs: setup
	@$(VENV_PYTHON) scripts/make_site.py $(ARGS)

lint: setup
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .
	@$(VENV_PYTHON) -m mypy

dist: setup
	@bash scripts/dist.sh

# ARGS are arguments of pytest: make test-wheel ARGS='-n auto tests'
test-wheel: setup
	@bash scripts/test_wheel.sh $(ARGS)

# ARGS='--train' installs torch, too, and trains; ARGS="--train 'torch==2.6.*'" with the oldest one.
check-pythons: setup
	@bash scripts/check_pythons.sh $(ARGS)

clean:
	rm -rf dist .venv .venv-mpich .venv-setup.log
