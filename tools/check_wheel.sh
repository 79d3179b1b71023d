#!/usr/bin/env bash
# The wheel in dist/ on a machine that cannot compile: installed into a new environment from wheels only, with a PATH
# that holds no compiler, it answers the examples without torch and transformers.
#
#     tools/check_wheel.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
shopt -s nullglob
wheels=(dist/*manylinux*.whl)
test "${#wheels[@]}" -eq 1 || { echo "dist/ must hold one manylinux wheel: make wheel"; exit 1; }

work=$(mktemp -d) everything=$PATH
trap 'PATH=$everything; rm -rf "$work"' EXIT
"${1:-python3}" -m venv "$work/venv"
# Out of the checkout, so that nothing is imported from it; nothing of this machine but the new environment is found.
cd "$work"
export PATH="$work/venv/bin" CC=/bin/false CXX=/bin/false PIP_ONLY_BINARY=:all: PIP_DISABLE_PIP_VERSION_CHECK=1
for compiler in c++ g++ gcc cc clang cmake ninja make; do
  if command -v "$compiler" > /dev/null; then echo "$compiler can be reached"; exit 1; fi
done
pip install --quiet "$root/${wheels[0]}"
for package in torch transformers; do
  if python -c "import $package" 2> /dev/null; then echo "$package is installed"; exit 1; fi
done

paged generate "$root/examples/prompts.jsonl" -o answers.jsonl --quiet
python - "$root/examples/prompts.jsonl" answers.jsonl <<'CHECK'
import json
import sys

prompts, answers = ([json.loads(line) for line in open(name) if line.strip()] for name in sys.argv[1:])
assert len(answers) == len(prompts), (len(answers), len(prompts))
failed = [answer for answer in answers if "error" in answer]
assert not failed, failed
print(f"{len(answers)} answers to {len(prompts)} examples")
CHECK

# All variants are in the one wheel; what this machine cannot run is at least there.
for isa in $(python -c "from paged_kernels.native import available_isas; print(*available_isas())"); do
  printf '%s:' "$isa"
  PAGED_CPU_ISA=$isa paged generate -p "The capital of France is" --max-tokens 4 --quiet
done
python - <<'LIBRARIES'
import platform
from pathlib import Path

import paged_kernels

found = {file.stem for file in Path(paged_kernels.__file__).parent.glob("_cpu_*.so")}
wanted = {"x86_64": "amx avx512bf16 avx512 avx2 portable", "aarch64": "neondot neon portable"}[platform.machine()]
assert found == {f"_cpu_{isa}" for isa in wanted.split()}, found
LIBRARIES
