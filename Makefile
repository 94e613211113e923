# make help prints what is here. Settings, as in `make test VENV=/opt/env ARGS="-k npy"`:
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Files of tests at a time: many of them wait. With three, two cores are idle for 6 % of the time.
JOBS ?= 4

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV_PYTHON := $(VENV)/bin/python
PIP := $(VENV_PYTHON) -m pip --disable-pip-version-check
BUILD_REQUIRES := $(shell sed -n 's/^requires = \[\(.*\)\]/\1/p' pyproject.toml | tr ',' ' ')
# With the folders, whose times change when a file leaves.
CSRC := $(shell find csrc -mindepth 1 -name __pycache__ -prune -o \( -name '*.cpp' -o -name '*.h' -o -name '*.py' -o -type d \) -print)
CLANG_FORMAT = find csrc tests/cpp -name '*.cpp' -o -name '*.h' | xargs $(VENV)/bin/clang-format
CPP_TESTS := $(MAKE) -f tests/cpp/Makefile -j2
OF_ENGINE := VARIANT=plain ENGINE_OBJECTS=build/engine

# Three stamps, in the environment that they speak of. They hold the settings they were made with, and are made anew when
# these change (an environment that another checkout has taken over, an engine without liburing).
TOOLS := $(VENV)/.gdsdata-tools
ENGINE := $(VENV)/.gdsdata-engine
INSTALLED := $(VENV)/.gdsdata-installed
READY := $(ENGINE) $(INSTALLED)
SETTINGS := $(strip $(CURDIR) CXX=$(CXX) PREFIX=$(LIBURING_PREFIX) WITHOUT=$(GDSDATA_WITHOUT_LIBURING))
ifneq ($(shell cat $(INSTALLED) 2>/dev/null),$(CURDIR))
$(INSTALLED): again
endif
ifneq ($(shell cat $(ENGINE) 2>/dev/null),$(SETTINGS))
$(ENGINE): again
endif
ifeq ($(wildcard gdsdata/_engine*.so),)
$(ENGINE): again
endif
.PHONY: again

.PHONY: help
help:  ## this list
	@echo "gdsdata: make <target>. PYTHON= makes the environment from another interpreter, VENV= uses another"
	@echo "environment, ARGS= passes arguments on, JOBS= are files of tests at a time, GDSDATA_REQUIRE_GPU=1 fails tests that find no GPU."
	@sed -n 's/^\([a-z-]*\):.*  ## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 18

.PHONY: bench
bench: $(READY)  ## set up what is missing, then the benchmark: ARGS="case=loader data.path=/my/files"
	@$(VENV_PYTHON) -m gdsdata.bench $(ARGS)

.PHONY: test
test: $(READY) build/.system-tests build/.azurite  ## set up what is missing, then the C++ engine's tests beside pytest: ARGS="-k npy"
	@$(CPP_TESTS) all $(OF_ENGINE)
	@$(MAKE) -j2 cpp-tests pytest

# The C++ tests wait more than they compute. Their output comes as a whole, between lines of pytest's.
.PHONY: cpp-tests
cpp-tests:
	@$(MAKE) -f tests/cpp/Makefile run $(OF_ENGINE) > build/cpp-tests.log 2>&1 && cat build/cpp-tests.log || \
	  { cat build/cpp-tests.log; echo "gdsdata: C++ tests failed"; exit 1; } >&2

.PHONY: pytest
pytest: $(READY) build/.system-tests build/.azurite  ## the Python tests alone: ARGS="-k npy"
	@$(VENV_PYTHON) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

.PHONY: fuzz
fuzz: $(READY)  ## damaged files for every parser: ARGS="all --seconds 600", or a target's name
	@$(VENV_PYTHON) tests/fuzz.py $(or $(ARGS),all)

.PHONY: soak
soak: $(READY)  ## everything at once for HOURS=1, bytes checked and growth judged: samples and plot are in build/soak
	@$(VENV_PYTHON) tests/soak.py --hours $(or $(HOURS),1) $(ARGS)

.PHONY: chaos
chaos: $(READY)  ## training jobs that are killed, stopped and starved by a seed: SEED=7 MINUTES=5
	@$(VENV_PYTHON) tests/chaos.py --seed $(or $(SEED),0) --minutes $(or $(MINUTES),5) $(ARGS)

.PHONY: test-slow
test-slow: $(READY) build/.system-tests build/.azurite  ## the tests that `make test` leaves out: three hundred kills, builds without liburing, benchmarks
	@$(VENV_PYTHON) -m pytest -m slow $(ARGS)

FRAMEWORKS := $(addprefix tests/test_,composer.py deepspeed.py hf_datasets.py integration_examples.py litdata.py litdata_rows.py loops.py mds.py mds_text.py megatron_core.py migrate.py torchtitan.py)
.PHONY: test-frameworks
test-frameworks: $(READY) build/.frameworks  ## the tests with frameworks whose packages do not go into one environment with the others (tests/frameworks.txt)
	@build/frameworks/bin/python -m pytest -m "slow or not slow" -n $(JOBS) --dist loadfile $(FRAMEWORKS) $(ARGS)

.PHONY: test-safetensors
test-safetensors: $(READY)  ## the tests of the package safetensors with gdsdata in its place, from a checkout SAFETENSORS=FOLDER, or from sources that pip fetches
	@$(VENV_PYTHON) -W ignore tests/safetensors_suite.py $(SAFETENSORS) $(ARGS)

.PHONY: test-megatron
test-megatron: $(READY) build/.frameworks  ## Megatron-LM's own tests of checkpoints, from its checkout MEGATRON=FOLDER, on eight processes of the CPU
	@build/frameworks/bin/python -W ignore tests/megatron_suite.py $(or $(MEGATRON),$(error MEGATRON= is a checkout of Megatron-LM)) $(ARGS)

.PHONY: test-dali
test-dali: $(READY) build/.dali  ## the page about DALI's pipelines and the adapter, with DALI itself
	@build/dali/bin/python -m pytest tests/test_dali.py tests/test_migrate.py -k dali $(ARGS)

.PHONY: test-site
test-site: $(READY) build/.browser  ## build the documentation site; look at it, and at the page of the live view, in Chromium: build/site-shots
	@GDSDATA_REQUIRE_BROWSER=1 build/docs/bin/python -m pytest -m slow tests/test_site.py tests/test_top_page.py $(ARGS)

.PHONY: lint
lint: $(READY)  ## ruff, clang-format, mypy and the prose check; make format mends what the first two can mend
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .
	@$(CLANG_FORMAT) --dry-run --Werror
	@$(VENV_PYTHON) -m mypy --no-error-summary
	@$(VENV_PYTHON) tests/check_prose.py


.PHONY: format
format: $(INSTALLED)  ## lay the C++ sources out, and mend what ruff can mend
	@$(CLANG_FORMAT) -i
	@$(VENV_PYTHON) -m ruff check --fix .
	@$(VENV_PYTHON) -m ruff format .

.PHONY: reference
reference: $(INSTALLED)  ## docs/reference/*.md from the docstrings
	@$(VENV_PYTHON) docs/make_reference.py

.PHONY: docs
docs: build/.docs  ## the documentation site, in build/site; broken links and missing docstrings are errors
	@build/docs/bin/python docs/make_site.py

.PHONY: figures
figures: | $(VENV_PYTHON)  ## docs/figures.md and docs/figures/ from benchmarks/results, and the diagrams
	@$(VENV_PYTHON) docs/make_figures.py
	@$(VENV_PYTHON) docs/make_diagrams.py

.PHONY: sanitize
sanitize: build/.system-tests  ## the C++ engine's tests under ASan and UBSan, then under TSan
	@$(CPP_TESTS) run VARIANT=asan
	@$(CPP_TESTS) run VARIANT=tsan

.PHONY: build
build: $(READY)  ## set up what is missing and build the extension, in place

.PHONY: ext
ext: $(ENGINE)  ## build the extension alone, in place; nothing is installed beside what builds it

.PHONY: clean
clean:  ## remove what was built; .venv stays
	rm -rf build *.egg-info gdsdata/_engine*.so .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# One wheel, built once, must pass the tests under the oldest and the newest torch: away from the sources, so that it is
# the wheel that is tested (test_structure.py is about the sources). Downloads some 3 GB a torch.
.PHONY: torch-versions
torch-versions: $(READY)  ## one wheel, tested with torch 2.9 and with torch 2.15, or with others: TORCH="2.10 2.12.1"
	rm -rf build/wheel build/lib.* && $(PIP) wheel -q --no-deps --no-build-isolation -w build/wheel .
	for torch in $(or $(TORCH),2.9 2.15); do \
	  there=build/torch-$$torch; \
	  $(VENV_PYTHON) -m venv --clear $$there/venv; \
	  $$there/venv/bin/python -m pip --disable-pip-version-check install -q "torch==$$torch.*" \
	    "gdsdata[test] @ file://$$(echo $(CURDIR)/build/wheel/gdsdata-*.whl)"; \
	  cp -r pyproject.toml README.md docs tests $(wildcard examples) $$there/; \
	  echo "gdsdata: one wheel, torch $$torch:"; \
	  (cd $$there && env -u PYTHONPATH venv/bin/pytest -m "not slow" --ignore tests/test_structure.py $(ARGS)); \
	  rm -rf $$there; \
	done

.PHONY: wheels
wheels: $(TOOLS) build/.wheel-tools  ## manylinux wheels for Python 3.10 to 3.14 in dist/, checked: ARGS="3.12 --arch aarch64"
	@build/wheel-tools/bin/python .ci/wheels.py $(ARGS)
	@build/wheel-tools/bin/python .ci/check_wheels.py dist/*.whl

.PHONY: sdist
sdist: build/.wheel-tools  ## the sdist in dist/, in an environment of its own (a download of torch, some 3 GB)
	@build/wheel-tools/bin/python -m build --sdist --outdir dist .
	@build/wheel-tools/bin/python -m twine check --strict dist/*.tar.gz

# Away from the sources, with the packages of $(VENV) but for gdsdata, and no compiler on the path.
WHEEL_TESTS := $(addprefix tests/test_,checkpoint.py dataset.py engine.py formats.py lanes.py lifecycle.py options.py order.py shuffle.py tensor.py)
.PHONY: test-wheels
test-wheels: $(INSTALLED)  ## the wheel of dist/ in a fresh environment: the doctor, then a part of the tests
	@.ci/install-wheel $(VENV_PYTHON) dist build/wheel-test
	@cp -r pyproject.toml README.md docs tests examples build/wheel-test/
	@cd build/wheel-test && env -u PYTHONPATH CXX=false CC=false venv/bin/python -m gdsdata.doctor
	@cd build/wheel-test && env -u PYTHONPATH venv/bin/python -m pytest $(WHEEL_TESTS) $(ARGS)

.PHONY: clean-machine
clean-machine:  ## follow docs/start.md in a bare Debian or Ubuntu, as root: ARGS="--suite jammy", "--arch aarch64", "--tests FILE"
	@$(PYTHON) .ci/clean_machine.py $(ARGS)

.PHONY: test-wheel-engine
test-wheel-engine: build/.wheel-tools  ## the C++ engine's tests as wheels are compiled, with libc++: ARGS="engine_test.cpp"
	@build/wheel-tools/bin/python .ci/engine_tests.py $(ARGS)

.PHONY: test-emulated
test-emulated: build/.wheel-tools  ## the same for aarch64, emulated: ARGS="--page-bytes 65536"
	@build/wheel-tools/bin/python .ci/engine_tests.py --arch aarch64 $(ARGS)

.PHONY: lint-workflows
lint-workflows: build/.actionlint  ## actionlint over .github/workflows/; in CI (CI=true) it is an error if there is no Go
	@if [[ -x build/go/bin/actionlint ]]; then build/go/bin/actionlint; else \
	  echo "gdsdata: no actionlint here, because there is no Go: install it from https://go.dev, or apt-get install golang-go" >&2; \
	  [[ $${CI-} != true ]]; fi

build/.system-build: .ci/system-packages
	@.ci/system-packages $$([[ -x $(VENV_PYTHON) ]] && echo $(VENV_PYTHON) || echo $(PYTHON))
	@mkdir -p build && touch $@

build/.system-tests: .ci/system-packages
	@.ci/system-packages $$([[ -x $(VENV_PYTHON) ]] && echo $(VENV_PYTHON) || echo $(PYTHON)) tests
	@mkdir -p build && touch $@

# The tests of az:// are skipped without it.
build/.azurite:
	@! command -v npm > /dev/null || npm install --silent --no-fund --prefix build/azurite azurite@3 || \
	  echo "gdsdata: npm could not install azurite: its tests will be skipped"
	@mkdir -p build && touch $@

# It sees the packages of $(VENV), of which it needs torch's headers.
build/.wheel-tools: .ci/wheel-tools.txt $(TOOLS)
	@echo "gdsdata: installing a compiler and checks for wheels into build/wheel-tools: a download of some 100 MB, 500 MB unpacked"
	@$(VENV_PYTHON) -m venv --clear build/wheel-tools
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  echo "import site; site.addsitedir('$$($(VENV_PYTHON) -c "$$site")')" > $$(build/wheel-tools/bin/python -c "$$site")/base.pth
	@build/wheel-tools/bin/python -m pip --disable-pip-version-check install -q -r $<
	@touch $@

build/.actionlint:
	@mkdir -p build
	@if command -v go > /dev/null; then \
	  GOBIN=$(CURDIR)/build/go/bin go install github.com/rhysd/actionlint/cmd/actionlint@v1.7.7 && touch $@; fi

# It sees the packages of $(VENV), torch among them, and setuptools: one of venv's own may be too old to build wheels.
build/.frameworks: tests/frameworks.txt $(INSTALLED)
	@echo "gdsdata: installing frameworks into build/frameworks: a download of some 100 MB"
	@$(VENV_PYTHON) -m venv --clear --without-pip build/frameworks
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  echo "import site; site.addsitedir('$$($(VENV_PYTHON) -c "$$site")')" > $$(build/frameworks/bin/python -c "$$site")/base.pth
	@DS_BUILD_OPS=0 $(PIP) --python build/frameworks/bin/python install -q --no-deps --no-build-isolation \
	  --ignore-requires-python -r $<
	@touch $@

# It sees the packages of $(VENV).
build/.dali: $(INSTALLED)
	@echo "gdsdata: installing DALI into build/dali: a download of some 420 MB"
	@$(VENV_PYTHON) -m venv --clear --without-pip build/dali
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  echo "import site; site.addsitedir('$$($(VENV_PYTHON) -c "$$site")')" > $$(build/dali/bin/python -c "$$site")/base.pth
	@$(PIP) --python build/dali/bin/python install -q nvidia-dali-cuda130==2.4.0
	@touch $@

# It reads the sources of gdsdata and imports nothing of them, so it needs neither torch nor the extension.
build/.docs: docs/site/requirements.txt | $(VENV_PYTHON)
	@echo "gdsdata: installing what builds the documentation into build/docs: a download of some 25 MB"
	@$(VENV_PYTHON) -m venv --clear build/docs
	@build/docs/bin/python -m pip --disable-pip-version-check install -q -r $<
	@touch $@

# Beside Sphinx, in an environment that sees the packages of $(VENV). The browser is the distribution's.
build/.browser: docs/site/browser.txt build/.docs $(INSTALLED)
	@.ci/system-packages $(VENV_PYTHON) browser
	@echo "gdsdata: installing playwright into build/docs: a download of some 50 MB"
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  echo "import site; site.addsitedir('$$($(VENV_PYTHON) -c "$$site")')" > $$(build/docs/bin/python -c "$$site")/base.pth
	@build/docs/bin/python -m pip --disable-pip-version-check install -q -r $<
	@touch $@

$(VENV_PYTHON): | build/.system-build
	@echo "gdsdata: making $(VENV) from $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(TOOLS): pyproject.toml | $(VENV_PYTHON)
	@echo "gdsdata: installing what builds the extension into $(VENV); the first time, torch is a download of some 3 GB"
	@$(PIP) install -q $(BUILD_REQUIRES)
	@touch $@

$(ENGINE): $(TOOLS) $(CSRC) | build/.system-build
	@echo "gdsdata: building the extension"
	@touch build/.engine-begun
	@$(VENV_PYTHON) -c "from setuptools import setup; setup()" build_ext --inplace > build/engine.log 2>&1 || { \
	  grep -E "error:|Error:" build/engine.log || tail -n 20 build/engine.log; \
	  echo "gdsdata: the extension did not build; the whole log is build/engine.log"; exit 1; } >&2
	@grep -A 3 "warning:" build/engine.log || true
	@echo "$(SETTINGS)" > $@ && touch -r build/.engine-begun $@  # older than what was edited meanwhile

# After the extension: a compiler's error is easier to read there than in pip's report, and the objects are shared.
$(INSTALLED): pyproject.toml | $(ENGINE)
	@echo "gdsdata: installing the package and what its bench and tests need into $(VENV)"
	@$(PIP) install -q --no-build-isolation -e ".[bench,test,lint]"
	@echo "$(CURDIR)" > $@
