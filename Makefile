# From a bare machine to a result: `make demo` and `make test` set up .venv, build, and run.
#   PYTHON=python3.12  the Python that .venv is made of
#   EXT=auto           which extension (auto, none, cpu, cuda) instead of what each target picks
#   JOBS=2             how many processes run the tests

SHELL := /bin/bash
.DELETE_ON_ERROR:
.NOTPARALLEL:
export PIP_DISABLE_PIP_VERSION_CHECK := 1
.PHONY: demo test test-rest frameworks test-frameworks lint clean

PYTHON ?= python3
V := .venv
BIN := $(V)/bin
# mmcv, mmdet and detectron2 on top of .venv, so that `make test` stays what it is without them.
FRAMEWORKS := .venv-frameworks

# Tests need no CUDA toolkit; the demo is run right here, so it is worth compiling where a GPU is.
# Without a compiler the pure-PyTorch reference gives the same bits.
COMPILED := $(if $(shell command -v c++ || command -v g++ || command -v clang++),cpu,none)
TEST_EXT := $(or $(EXT),$(COMPILED))
DEMO_EXT := $(or $(EXT),$(if $(shell nvidia-smi -L 2>/dev/null),auto,$(COMPILED)))

TORCH := 'torch>=2.11,<2.15' 'torchvision>=0.26,<0.30'
BUILD_TOOLS := 'setuptools>=77,<81' wheel ninja numpy
# Tests of one file share what is costly to make, such as trainings. JOBS=0 is one process.
JOBS ?= 2
PYTEST := pytest -n $(JOBS) --dist loadfile
LINT_TOOLS := $(shell sed -nE 's/^ +((ruff|clang-format|mypy)==.*)/\1/p' setup.cfg)
BUILT_FROM := setup.py setup.cfg pyproject.toml $(shell find csrc -type f)
CXX_FILES := $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh')

# What compares bits: these run a second time on the pure-PyTorch reference.
CORE := $(wildcard $(addprefix tests/test_,fixedpoint*.py scatter*.py roi_*.py digest*.py resample*.py interpolate*.py adaptive*.py grid_sample*.py ms_deform_attn*.py deform*.py nll_loss*.py cross_entropy*.py ctc_loss*.py nms*.py topk*.py sine_cosine*.py))

# What does not: once is enough, CI runs it twice.
REST := $(filter-out $(CORE),$(wildcard tests/test_*.py)) tests/integrations

demo: $(V)/built-$(DEMO_EXT)
	$(BIN)/truncdet demo

test: $(V)/built-$(TEST_EXT)
	TRUNCDET_EXPECT_EXT=$(TEST_EXT) $(BIN)/$(PYTEST)
	TRUNCDET_EXT=none $(BIN)/$(PYTEST) $(CORE)

test-rest: $(V)/built-$(TEST_EXT)
	TRUNCDET_EXT=none TRUNCDET_EXPECT_EXT=none $(BIN)/$(PYTEST) $(REST)

frameworks: $(FRAMEWORKS)/ready

# What else has to do with frameworks; the rest is the same with and without them. The warnings,
# thousands, are the frameworks' own.
WITH_FRAMEWORKS := tests/integrations $(addprefix tests/test_,docstrings.py status.py switch.py)

test-frameworks: $(FRAMEWORKS)/ready $(V)/built-$(TEST_EXT)
	TRUNCDET_EXPECT_FRAMEWORKS=1 $(FRAMEWORKS)/bin/python -m $(PYTEST) --disable-warnings \
	  $(WITH_FRAMEWORKS)

lint: $(V)/lint-tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

clean:
	rm -rf $(V) $(FRAMEWORKS) build dist *.egg-info truncdet/_C*.so .*_cache .hypothesis

# Stamps. The newest build is the one that counts, so making one takes the others' stamps away.
$(V)/built-%: $(V)/torch $(BUILT_FROM)
	rm -f $(V)/built-*
	TRUNCDET_EXT=$* $(BIN)/pip install --quiet --no-build-isolation --editable '.[test]'
	$(BIN)/python -c 'import truncdet; print(truncdet.build_info())'
	touch $@

$(V)/torch: $(V)/made
	$(BIN)/pip install $(if $(CI),--quiet) $(TORCH) $(BUILD_TOOLS)
	touch $@

# Any build of truncdet will do, since it is not copied: after the first the order alone counts.
$(FRAMEWORKS)/ready: $(V)/torch $(wildcard .ci/frameworks/*.py .ci/frameworks/*.txt) | $(V)/built-$(TEST_EXT)
	$(BIN)/python .ci/frameworks/install.py $(FRAMEWORKS)
	touch $@

$(V)/lint-tools: $(V)/made setup.cfg
	$(BIN)/pip install --quiet $(LINT_TOOLS)
	touch $@

$(V)/made:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "truncdet: PYTHON must be Python 3.10 or later, $(PYTHON) was not found" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "truncdet: PYTHON must be Python 3.10 or later, got $$($(PYTHON) --version)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "truncdet: $(PYTHON) has no venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(V)
	touch $@
