# Each verb does its own set-up in .venv: Python environment, torch, the C++ extension, what the verb needs.
# What is done is not done again; a change in csrc/, setup.py or pyproject.toml re-builds what depends on it.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
VENV ?= .venv
CUDA_TORCH ?= torch==2.14.1
CUDA_VENV ?= .venv-cuda
ARGS ?=
MODE ?= plain

BIN := $(VENV)/bin
PY := $(BIN)/python
FORMATTED := find csrc tests/native tests/cuda_emulator -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh' \)
PIP := $(PY) -m pip --disable-pip-version-check
STAMPS := $(VENV)/stamps
TORCH_STAMP := $(STAMPS)/torch-$(shell printf '%s %s' '$(TORCH)' '$(TORCH_INDEX)' | cksum | tr ' ' '-')
SOURCES := setup.py $(shell find csrc -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh' \))
LOG := build/compile.log

# An install without the extension is never up to date: by the next call there may be a compiler.
ifneq ($(shell test ! -s $(STAMPS)/extension || echo without)$(filter 0,$(ATTNKIT_BUILD_EXT)),)
ALWAYS := always
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SECONDARY:
.PHONY: help demo test bench bench-cpu gpu-check info verify docs lint format types sanitize native spills mutants check-cuda wheel clean distclean always

help:
	@echo 'make demo      train a Transformer on the kernels, translate dates, write runs/demo/index.html'
	@echo 'make test      run the tests     (ARGS="-k masks" chooses some, ARGS="-m slow" the long ones)'
	@echo 'make bench     measure against PyTorch, two minutes; build/bench/index.html  (ARGS="--preset cpu": all of it)'
	@echo 'make bench-cpu the goals of the CPU kernels, beside other libraries, into bench/results'
	@echo 'make gpu-check on a machine with a GPU: every kernel against float64, races, then times, into DIR'
	@echo 'make info      machine, versions, backends, and why a backend is missing'
	@echo 'make verify    the kernels of this machine against float64, what half a minute holds'
	@echo 'make docs      build the documentation into build/docs'
	@echo 'make lint      ruff and clang-format, changing nothing    (make format changes)'
	@echo 'make types     mypy'
	@echo 'make sanitize  the tests of the C++ kernels under ASan and UBSan'
	@echo 'make native    the kernels without torch                  (MODE=plain, clang, thread, address, aarch64)'
	@echo 'make spills    hot loops of the built extension; none may spill a register'
	@echo 'make mutants   plant bugs in the C++ kernels; every one must be caught'
	@echo 'make check-cuda  build against a CUDA torch (gigabytes), import it, hold kernels to their budgets'
	@echo 'make wheel     build a source distribution and a wheel into dist/'
	@echo 'make clean     remove what was built                      (make distclean: .venv too)'
	@echo
	@echo 'Variables: PYTHON (now $(PYTHON)), TORCH (now $(TORCH)), TORCH_INDEX (an index of pip to look at, too,'
	@echo 'for torch: https://download.pytorch.org/whl/cpu has small CPU builds), VENV (now $(VENV)), ARGS.'

demo: ready-demo
	@$(BIN)/attnkit demo $(ARGS)

test: ready-test
	@$(BIN)/pytest -q -m 'not slow' $(ARGS)
	@test -n '$(ARGS)' || TRITON_INTERPRET=1 $(BIN)/pytest -q -m 'not slow' tests/test_triton.py

bench: ready-bench
	@$(BIN)/attnkit bench --json build/bench/results.json $(ARGS)
	@$(BIN)/attnkit report build/bench/results.json -o build/bench

bench-cpu: ready-bench,peers
	@$(PY) bench/cpu_goals.py $(ARGS)

# With the Python at hand, its PyTorch and its Triton: a machine with a GPU may have no network.  The
# CUDA kernels are compiled for the GPU that is there alone: for all of them it takes many minutes.
gpu-check: DIR ?= build/gpu_check
gpu-check:
	@mkdir -p '$(DIR)'
	@TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-$$($(PYTHON) -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())' 2>/dev/null)}" \
	  $(PYTHON) -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e . >'$(DIR)/build.log' 2>&1 || { cat '$(DIR)/build.log'; exit 1; }
	@$(PYTHON) bench/gpu_check.py '$(DIR)' $(ARGS); rc=$$?; \
	  bash -o pipefail -c ".ci/gpu_cuda '$(PYTHON)' 2>&1 | tee '$(DIR)/cuda.log'" && exit $$rc

info: ready-demo
	@$(BIN)/attnkit info $(ARGS)

verify: ready-demo
	@$(BIN)/attnkit verify $(ARGS)

docs: ready-docs
	@mkdir -p build && NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS) >build/docs.log 2>&1 || { cat build/docs.log; exit 1; }
	@echo 'build/docs/index.html'

lint: ready-lint
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(FORMATTED) | xargs $(BIN)/clang-format --dry-run -Werror
	@echo 'lint: clean'

format: ready-lint
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(FORMATTED) | xargs $(BIN)/clang-format -i

types: ready-types
	@$(BIN)/mypy

sanitize: ready-test
	@VENV=$(VENV) .ci/variant sanitize $(ARGS)

native:
	@tests/native/run.sh $(MODE) $(ARGS)

spills: ready-test
	@$(PY) bench/machine_code_cpu.py $(ARGS)

mutants: ready-test
	@$(PY) tests/mutants.py $(ARGS)
	@test -n '$(ARGS)' || $(PY) tests/cuda_mutants.py
	@test -n '$(ARGS)' || $(PY) tests/mutants_triton.py

check-cuda: $(CUDA_VENV)/torch
	@.ci/check_cuda $(CUDA_VENV)/bin/python
	@$(CUDA_VENV)/bin/python tests/cuda_budgets.py --log build/cuda/build.log

$(CUDA_VENV)/torch:
	@echo '==> installing $(CUDA_TORCH) into $(CUDA_VENV) (once; gigabytes)'
	@$(PYTHON) -m venv $(CUDA_VENV)
	@$(CUDA_VENV)/bin/python -m pip install -q --disable-pip-version-check 'setuptools>=77' ninja numpy '$(CUDA_TORCH)'
	@touch $@

wheel: ready-dev
	@echo '==> building dist/'
	@mkdir -p build && $(PY) -m build --no-isolation --outdir dist . >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	@ls dist

clean:
	rm -rf build dist *.egg-info attnkit/_C*.so attnkit/_build_info.py $(STAMPS)/extension
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks

distclean: clean
	rm -rf $(VENV)

# --- set-up -----------------------------------------------------------------------------------------------------

# What the last build said of a missing extension is said by every verb.
ready-%: $(STAMPS)/project-%
	@cat $(STAMPS)/extension

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo 'attnkit needs Python 3.10 or newer, and $(PYTHON) is '"$$($(PYTHON) -V 2>&1)"'. Name another one: make PYTHON=python3.12 ...'; exit 1; }
	@echo '==> making $(VENV) with '"$$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo 'No virtual environment could be made with $(PYTHON). Debian and Ubuntu: apt install python3-venv'; exit 1; }
	@mkdir -p $(STAMPS)

$(TORCH_STAMP): | $(PY)
	@echo '==> installing $(TORCH) into $(VENV) (once; some minutes)'
	@test -n '$(TORCH_INDEX)' || command -v nvidia-smi >/dev/null || \
	  echo '    No NVIDIA GPU is seen. If pip now loads gigabytes of CUDA, stop it and name an index of CPU builds (make help: TORCH_INDEX).'
	@$(PIP) install -q 'setuptools>=77' ninja
	@$(PIP) install -q '$(TORCH)' $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') || { \
	  echo 'pip cannot install $(TORCH) for '"$$($(PY) -V)"'. Name another release, 2.11 or newer, as in make TORCH=torch==2.14.1 ...;'; \
	  echo 'or an index that has it (TORCH_INDEX), or another Python (make distclean, then make PYTHON=python3.12 ...).'; exit 1; }
	@rm -f $(STAMPS)/torch-* && touch $@

# Empty when the extension was built; else it holds the sentence why not.
$(STAMPS)/extension: $(SOURCES) $(TORCH_STAMP) $(ALWAYS)
	@echo '==> building the C++ extension (messages in $(LOG))'
	@mkdir -p build && $(PY) setup.py -q build_ext --inplace >$(LOG) 2>&1 || { cat $(LOG); exit 1; }
	@grep '^attnkit: ' $(LOG) >$@ || true

$(STAMPS)/project-%: pyproject.toml setup.py $(TORCH_STAMP) | $(STAMPS)/extension
	@echo '==> installing attnkit[$*] and what it needs'
	@$(PIP) install -q --no-build-isolation -e '.[$*]'
	@touch $@
