#!/usr/bin/env bash
# Makes the reports of docs/benchmarks: tools/bench_reports.sh ORIGINAL AWQ GPTQ (folders of one model).
# Give the folders by relative names: the command line stands in the reports.
# PAGED is the command, OUT the folder; SHORT=--short REPEATS=1 take little time.
set -euo pipefail
original=$1 awq=$2 gptq=$3
paged=${PAGED:-paged} out=${OUT:-docs/benchmarks} short=${SHORT:-}
mkdir -p "$out"

files() { printf -- '--json %s.json --html %s.html --markdown %s.md' "$out/$1" "$out/$1" "$out/$1"; }
pages() { # page sizes and batches of one checkpoint
  # shellcheck disable=SC2046
  $paged bench -m "$1" --page-size 8,16,32,64,256 --max-num-seqs 1,8 --requests 16 \
    --workload random:32-160:16-64 --repeats "${REPEATS:-3}" --kv-memory 256MiB $(files "$2")
}

# shellcheck disable=SC2046,SC2086
$paged bench compare -m "$original" --awq "$awq" --gptq "$gptq" $short $(files compare-bf16)
# shellcheck disable=SC2046,SC2086
$paged bench compare -m "$awq" $short $(files compare-awq)
pages "$original" pages-bf16
pages "$awq" pages-awq
# A page that tells what they showed, where there is one with its marks.
if [ -f "$out/README.md" ]; then
  "${PYTHON:-python3}" "$(dirname "$0")/bench_page.py" "$out/compare-bf16.json" "$out/compare-awq.json"
fi
