# torchext: build, test, demo. `make help` lists the targets.
#
# The dependencies (torch is 5 GB with its CUDA libraries) live in an environment of their own, $(DEPS), named after the
# hash of what it holds and made once. .venv lies over it and holds torchext alone. Nothing is redone that is up to date.

PYTHON ?= python3
TORCH ?= torch==2.15.0
# Where the environment of dependencies is kept; continuous integration puts it outside the clone.
DEPS_HOME ?= $(CURDIR)/.cache
# Set DEPS to a virtual environment that already has torch and requirements-dev.txt to use that instead.
DEPS ?= $(DEPS_HOME)/deps-$(shell { echo '$(TORCH)'; $(PYTHON) -VV; cat requirements-dev.txt; } | sha256sum | cut -c1-16)
# The generator of the site; it needs no torch.
DOCS_ENV ?= $(DEPS_HOME)/docs-$(shell { $(PYTHON) -VV; cat docs/requirements.txt; } | sha256sum | cut -c1-16)
VENV ?= .venv
# What `make test` runs; empty is everything but the slow tests.
SUITES ?=
export MAX_JOBS ?= 2
# The kinds of `make sanitize`.
KINDS ?= thread address

RUN := PATH="$(CURDIR)/$(VENV)/bin:$(DEPS)/bin:$$PATH" $(VENV)/bin/python
CXX_FILES = $(shell find csrc kernels tests/cpp benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cc' -o -name '*.cu')

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick lint format docs matrix sanitize clean install deps

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: install  ## installs torchext from source into .venv and runs the demo
	@$(RUN) examples/demo.py

test: install  ## everything: C++ (plain, ASan + UBSan, TSan), Python, distributed, everyday, frameworks, packaging
	@$(RUN) tools/run_tests.py $(SUITES)

test-quick: install  ## C++ (plain), Python but its long cases, and each sixteenth case of distributed and everyday
	@$(RUN) tools/run_tests.py --every 16 cpp python distributed everyday

lint: deps  ## ruff, mypy --strict, clang-format, layers, pages, prose, tables, clang-tidy
	@bash tools/lint.sh "$(DEPS)/bin/python" "$(DEPS_HOME)" $(CXX_FILES)

format: deps  ## rewrites Python and C++ in the house's format
	@"$(DEPS)/bin/python" -m ruff check --fix-only --quiet . && "$(DEPS)/bin/python" -m ruff format .
	@clang-format -i $(CXX_FILES)

docs:  ## builds the site in build/docs/site (readable from disk), and checks links and code blocks
	@$(PYTHON) tools/check_docs.py
	@bash tools/make_docs_env.sh "$(PYTHON)" "$(DOCS_ENV)"
	@"$(DOCS_ENV)/bin/python" tools/make_docs.py

matrix:  ## builds and tests also against torch 2.11, in a copy of the tree; then the slow tests (downloads torch)
	@bash tools/matrix.sh torch==2.11.0
	@$(MAKE) --no-print-directory install
	@$(RUN) tools/run_tests.py slow

sanitize: deps  ## the tests marked sanitize, most of several processes, with sanitizers in the extension (an hour; KINDS=thread for one of them)
	@for kind in $(KINDS); do \
	  bash tools/sanitize.sh $$kind "$(DEPS)/bin/python" -m "sanitize and not slow" tests/distributed tests/python/backends || exit 1; done

install: deps
	@bash tools/install.sh "$(DEPS)" "$(VENV)"

deps:
	@bash tools/system_packages.sh build
	@bash tools/make_deps.sh "$(PYTHON)" "$(DEPS)" '$(TORCH)'

clean:  ## removes builds and .venv; keeps the downloaded dependencies in .cache
	rm -rf build build-* dist *.egg-info demo-output "$(VENV)" torchext/*.so torchext/_build_info.json
	find . -name __pycache__ -prune -exec rm -rf {} + -o -name '.*_cache' -prune -exec rm -rf {} +
