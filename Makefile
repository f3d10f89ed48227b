# Every target builds the environment it needs in .venv, and rebuilds it only when the
# dependencies, the compiled code or PYTHON change:  make test PYTHON=python3.12

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MADE   := $(VENV)/.made-by-$(notdir $(PYTHON))
READY  := $(VENV)/.ready

# The tested versions, also of the packages that build viper; newer versions of pip read the second name for those.
PIP_SETTINGS := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt

# Extra arguments for the program a target runs:  make test ARGS="-k softplus"
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help run test hostile sanitize docs bench lint format dist clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(READY)  ## run the demonstration
	$(BIN)/python -m viper demo $(ARGS)

# One thread per worker, so that workers do not compete for cores. Each gets a contiguous share of the tests, so that a
# file's fixtures are computed once, and takes tests from another worker when it has none left.
test: $(READY)  ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

# Every case must end in a right answer or one clear line; the seeds are the same every time:  make hostile ARGS="models --seed 7"
hostile: $(READY)  ## run thousands of hostile cases and count their outcomes
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m hostile --workers 2 $(ARGS)

# Compiles a copy of the package with the checks of gcc or clang for addresses and undefined behaviour, and tests it;
# then runs the threads of the pass over rows alone, without Python, with the check for data races.
SANITIZED := build/sanitized
SANITIZER := -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1 -Wno-psabi
sanitize: $(READY)  ## test the compiled code with sanitisers
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r src/viper $(SANITIZED)
	for name in inference/kernels/_rows inference/kernels/_rows_512 softplus/_classes softplus/_classes_512 decisions/_arms; do \
	  $(CC) -shared -fPIC $(SANITIZER) src/viper/$$name.c -lm -pthread -o \
	    $(SANITIZED)/viper/$$name$$($(BIN)/python -c 'import sysconfig as s; print(s.get_config_var("EXT_SUFFIX"))') || exit; \
	done
	export LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(SANITIZED) OMP_NUM_THREADS=1; \
	$(BIN)/python -c 'from viper.inference.kernels.library import is_compiled; assert is_compiled()' && \
	$(BIN)/python -c 'from viper.softplus.compiled_classes import class_library; assert class_library()' && \
	$(BIN)/python -c 'from viper.decisions.compiled import arm_library; assert arm_library()' && \
	$(BIN)/python -m pytest -p no:cacheprovider tests/test_compiled.py tests/test_threads.py tests/test_logsumexp.py \
	  tests/test_bandit.py $(ARGS)
	$(CC) -fsanitize=thread -g -O1 -Wno-psabi tests/threaded_pass.c -lm -pthread -o $(SANITIZED)/threaded_pass
	$(SANITIZED)/threaded_pass

docs: $(READY)  ## build the documentation in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(READY)  ## run the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

lint: $(READY)  ## check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)  ## format the code and apply the safe fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# Both are installed in a fresh environment and tried outside the source tree.
dist: $(READY)  ## build a wheel and a source distribution, and try them
	rm -rf dist build/installed
	$(PIP_SETTINGS) $(BIN)/python -m build --outdir dist
	$(BIN)/python -m venv build/installed
	$(PIP_SETTINGS) build/installed/bin/python -m pip install -qq dist/*.whl
	build/installed/bin/python tests/installed.py
	$(PIP_SETTINGS) build/installed/bin/python -m pip install -qq --force-reinstall --no-deps dist/*.tar.gz
	build/installed/bin/python tests/installed.py

clean:  ## remove everything that can be rebuilt
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src -name "*.so" -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): $(MADE) pyproject.toml setup.py constraints.txt $(shell find src -name "*.[ch]")
	@echo "Installing viper and its tools into $(VENV) (a few minutes the first time)"
	@$(PIP_SETTINGS) $(BIN)/python -m pip install -qq -e '.[dev]'
	@touch $@

$(MADE):
	@echo "Creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@
