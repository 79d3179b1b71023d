# What can be done in this checkout. CI and pre-commit run these same targets. PYTHON makes the environment, VENV holds it.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

.PHONY: help install check lint format types imports docs docs-check sizes test test-core nightly gpu-check bench bench-cpu interop native native-bench native-sanitize native-arm clean

help:            ## list the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

install: $(STAMP)  ## make the environment with everything for tests and every command

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -e '.[test]'
	touch $@

check: lint types imports docs-check sizes  ## everything but the tests

lint: $(STAMP)   ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## ruff: mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

imports: $(STAMP)  ## the layers of docs/architecture.md
	$(BIN)/lint-imports

docs: $(STAMP)   ## write the generated pages
	$(BIN)/python tools/cli_docs.py

docs-check: $(STAMP)  ## the generated pages are up to date
	$(BIN)/python tools/cli_docs.py --check

sizes:           ## files, functions and settings as a table
	$(PYTHON) tools/size_table.py

test: $(STAMP)   ## all tests of the everyday run
	$(BIN)/pytest

test-core:       ## the core in an environment without torch, numpy or transformers
	$(PYTHON) -m venv $(VENV)-core
	$(VENV)-core/bin/pip install --quiet pytest pytest-timeout hypothesis
	PYTHONPATH=. $(VENV)-core/bin/pytest tests/core -m 'not nightly' -p no:cacheprovider

nightly: $(STAMP)  ## the long proofs: 10,000 workloads, soaks
	$(BIN)/pytest -m 'nightly or not nightly' --timeout 7200

gpu-check:       ## what means something on a GPU, on --device cuda; uses $(PYTHON), needs no network
	$(PYTHON) tools/gpu_check.py

interop: $(STAMP)  ## other packages read what paged writes, each in an environment of its own; writes build/interop.json
	$(BIN)/python tools/interop/read_ours.py

bench: $(STAMP)  ## batching and KV allocation compared on the real model; writes build/bench-batching.json
	mkdir -p build
	$(BIN)/python -m pagedcli.bench.batching --json build/bench-batching.json

bench-cpu: $(STAMP)  ## the CPU engine beside the machine's limits and, where installed, other engines; writes build/bench-cpu.json
	mkdir -p build
	$(BIN)/python -m pagedcli.bench.cpu --peers ../shared/peers --json build/bench-cpu.json --roofline build/roofline.svg

native:          ## build the CPU kernels into the source tree, for work on them (needs cmake, ninja, a C++20 compiler)
	cmake -S . -B build/native -G Ninja -DPython_EXECUTABLE=$$(command -v $(PYTHON)) > /dev/null
	cmake --build build/native --target paged_native_inplace

native-bench: $(STAMP)  ## the kernels alone on models' shapes, beside the machine's limits
	$(BIN)/python -m paged_kernels.bench

native-sanitize: ## the kernels and their threads under the address and undefined behaviour sanitizers, without Python
	cmake -S . -B build/sanitize -G Ninja -DPAGED_CHECK=ON -DPAGED_SANITIZE=address,undefined > /dev/null
	cmake --build build/sanitize
	build/sanitize/paged_check build/sanitize/_cpu_*.so

native-arm:      ## the kernels cross-compiled for 64-bit Arm and checked under qemu-user
	cmake -S . -B build/arm -G Ninja -DPAGED_CHECK=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ > /dev/null
	cmake --build build/arm
	qemu-aarch64-static -L /usr/aarch64-linux-gnu build/arm/paged_check build/arm/_cpu_*.so

clean:
	rm -rf $(VENV) $(VENV)-core build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
