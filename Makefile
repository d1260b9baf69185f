# `make run` and `make test` do all their own set-up in .venv; nothing is installed again until something changed.
# Needs: a Python of at least 3.11 with venv, and for the tests a C++ compiler and a Chromium, which the tests look at
# pages with. Nothing needs root; where it is there, on Debian and Ubuntu, a missing Chromium is installed.

.NOTPARALLEL:
.PHONY: help run test test-quick test-full docs docs-outputs fuzz check package clean compiler-noted compiler-required browser-required unlinked

VENV := .venv
PYTHON_IN_VENV := $(VENV)/bin/python
PIP := $(PYTHON_IN_VENV) -m pip --disable-pip-version-check install --quiet --constraint tests/constraints.txt
ROOMS := phaze_plugin frontends backends hooks
MAIN_JOB ?= optimize gpt2-xl --cluster a100-80gb:8 --global-batch 512 --explain

# Two workers, and the process groups that tests start, share the cores: more threads in each only wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1

# Where PYTHONDONTWRITEBYTECODE is set, each of the hundreds of processes that tests start would compile every module anew.
COMPILED_ONCE := PYTHONDONTWRITEBYTECODE=

# A file's tests run in one process and share its fixtures; files are handed out in order, those with processes first.
PYTEST := $(ONE_THREAD) $(COMPILED_ONCE) $(PYTHON_IN_VENV) -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=20

# Where no test imports torch or JAX, or starts a process that does, but in files whose names say so.
QUICK_ROOMS := calibration_fitting cost explore hardware hooks ir place plan planner profile schedule shard solvers verify
QUICK := $(QUICK_ROOMS:%=tests/%) $(wildcard tests/test_*.py) --ignore-glob='*_with_frameworks.py'

# What an installation depends on: the project's description and version, the pinned versions, which files exist (a
# strict editable install links every file, so their contents may change freely) and where the clone lies.
FINGERPRINT := $(shell { pwd; cat pyproject.toml tests/constraints.txt phaze_plugin/__init__.py; \
	find $(ROOMS) -type f ! -name '*.pyc' | LC_ALL=C sort; } | cksum | tr ' ' '-')
TEST_STAMP := $(VENV)/installed-test-$(FINGERPRINT)
CORE_STAMP := $(VENV)/installed-core-$(FINGERPRINT)
RUN_STAMP := $(or $(wildcard $(TEST_STAMP)),$(CORE_STAMP))
# The links of a strict editable install lie in build/: without them nothing is installed, whatever a stamp says.
UNLINKED := $(if $(wildcard build/__editable__.*),,unlinked)

help:
	@echo 'make run         install the core into .venv and run the main job (phaze $(MAIN_JOB))'
	@echo 'make test        install everything the tests need; ruff, mypy --strict, pytest'
	@echo 'make test-quick  only pytest, only quick tests, only the rooms that need no framework: for between two edits'
	@echo 'make test-full   make test with the exhaustive versions of slow tests'
	@echo 'make docs        build the site of docs/ into build/site; a broken link or a warning is an error'
	@echo 'make docs-outputs  write what blocks of docs/ print now into its pages; LONG=1 the long ones too'
	@echo 'make fuzz        damaged files of every format: MINUTES=10 of them, or COUNT=N; SEED=N draws others'
	@echo 'make package     source distribution and wheel in dist/'
	@echo 'make clean       remove .venv, build/ and dist/'

run: compiler-noted $(RUN_STAMP)
	@$(VENV)/bin/phaze $(MAIN_JOB)

test: compiler-required browser-required check
	@$(PYTEST)

test-quick: $(TEST_STAMP)
	@$(PYTEST) $(QUICK) -m 'not exhaustive and not slow' --hypothesis-profile=quick

test-full: compiler-required browser-required check
	@$(PYTEST) -m '' --hypothesis-profile=full

# The theme would print a note about its successor.
docs: $(TEST_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(PYTHON_IN_VENV) -m mkdocs build --strict --quiet
	@echo 'the site is build/site/index.html'

docs-outputs: $(TEST_STAMP)
	@$(ONE_THREAD) PYTHONPATH=tests/support $(PYTHON_IN_VENV) tests/support/rewrite_outputs.py $(if $(LONG),--long)

fuzz: $(TEST_STAMP)
	@$(ONE_THREAD) PYTHONPATH=tests:tests/support $(PYTHON_IN_VENV) benchmarks/fuzz.py --minutes $(or $(MINUTES),10) \
		$(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED)) $(if $(KEEP),--keep $(KEEP))

check: $(TEST_STAMP)
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) -m ruff format --check .
	@$(PYTHON_IN_VENV) -m mypy -p phaze
	@$(PYTHON_IN_VENV) -m mypy examples/plugin/phaze_sample tests/oracles

package: $(TEST_STAMP)
	@$(PYTHON_IN_VENV) -m build

clean:
	@rm -rf $(VENV) build dist *.egg-info

$(CORE_STAMP): $(PYTHON_IN_VENV) $(UNLINKED)
	@echo 'installing phaze into $(VENV)'
	@rm -rf build *.egg-info && $(PIP) --editable .
	@rm -f $(VENV)/installed-* && touch $@

$(TEST_STAMP): $(PYTHON_IN_VENV) $(UNLINKED)
	@echo 'installing phaze and what its tests need into $(VENV)'
	@rm -rf build *.egg-info && $(PIP) --editable '.[dev,docs,gurobi,torch,jax,dask,baselines]'
	@rm -f $(VENV)/installed-* && touch $@

# Candidates are started, not only looked up: a version manager may list a Python that it cannot start.
$(PYTHON_IN_VENV):
	@for candidate in $(PYTHON) python3.11 python3 python3.12 python3.13 python; do \
		if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
		then "$$candidate" -m venv --clear $(VENV) && exit 0; fi; \
	done; \
	echo 'phaze needs Python 3.11 or newer with the venv module, and none was found; python3 here is:' >&2; \
	python3 --version >&2 || true; \
	echo 'Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv; macOS: brew install python@3.11)' >&2; \
	echo 'or name it: make run PYTHON=/path/to/python3.11' >&2; \
	exit 1

COMPILER_ADVICE := Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install
FIND_COMPILER := command -v "$${CXX:-c++}" || command -v g++ || command -v clang++

compiler-noted:
	@{ $(FIND_COMPILER); } >/dev/null || echo 'note: no C++ compiler found; the tests need one ($(COMPILER_ADVICE))' >&2

compiler-required:
	@{ $(FIND_COMPILER); } >/dev/null || { \
		echo 'no C++ compiler found, and the tests need one ($(COMPILER_ADVICE); or set CXX)' >&2; exit 1; }

BROWSER_ADVICE := Debian, Ubuntu: apt install chromium; Fedora: dnf install chromium; macOS: brew install --cask chromium
FIND_BROWSER := command -v "$${CHROMIUM:-chromium}" || command -v chromium-browser || command -v google-chrome

browser-required:
	@{ $(FIND_BROWSER); } >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		echo 'installing chromium, which the tests look at pages with' && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null; } || { \
		echo 'no Chromium found, and the tests need one to look at pages ($(BROWSER_ADVICE); or set CHROMIUM)' >&2; exit 1; }
