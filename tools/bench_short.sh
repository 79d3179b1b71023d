#!/usr/bin/env bash
# The short form for CI: what paging and batching bring, and page sizes, on the default model in bfloat16 and in AWQ's
# format. Fails if an answer depends on how it was computed, a request fails, or a report lacks something.
# AWQ=FOLDER is a checkpoint of the default model made with `paged quantize --awq`. Without it one is made by rounding to
# nearest: it runs as fast as any in this format, but its quality is not that of AWQ, so that no claim on quality is judged.
# PAGED is the command, PYTHON the interpreter, OUT the folder.
set -euo pipefail
paged=${PAGED:-paged} python=${PYTHON:-python3} out=${OUT:-build/bench-short} awq=${AWQ:-}
mkdir -p "$out"
if [ -z "$awq" ]; then
  awq=$out/rounded-to-nearest
  "$python" "$(dirname "$0")/rounded_copy.py" "$awq"
fi

files() { printf -- '--json %s.json --html %s.html --markdown %s.md' "$out/$1" "$out/$1" "$out/$1"; }
pages() { # name, then the flags of a model
  # shellcheck disable=SC2046
  $paged bench "${@:2}" --no-config --page-size 8,16,64 --requests 4 --workload random:32-96:8-16 --repeats 1 \
    --kv-memory 64MiB $(files "$1")
}

# shellcheck disable=SC2046
$paged bench compare --no-config --dtype bfloat16 --awq "$awq" --short --repeats 2 $(files compare)
pages pages-bf16 --dtype bfloat16
pages pages-awq -m "$awq"

"$python" - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

out = Path(sys.argv[1])
compared = json.loads((out / "compare.json").read_text())
names = [row["name"] for row in compared["rows"]]
assert compared["same_ids"] and not compared["failed"] and not compared["interrupted"], compared["failed"]
assert len(names) == 8 and names[-2:] == ["+ prefix sharing", "+ AWQ"], names
judged = {claim["id"]: claim["verdict"] for claim in compared["claims"]}
assert sum(verdict == "not measured" for verdict in judged.values()) <= 3, judged
for name in ("pages-bf16", "pages-awq"):
    runs = json.loads((out / f"{name}.json").read_text())
    assert [run["settings"]["page_size"] for run in runs] == [8, 16, 64]
    assert all(run["requests"] == 4 and run["failed"] == 0 and 0 < run["kv_use"] <= 1 for run in runs)
    assert runs[0]["kv_use"] > runs[-1]["kv_use"], [run["kv_use"] for run in runs]
for name in ("compare", "pages-bf16", "pages-awq"):
    assert (out / f"{name}.html").stat().st_size > 10_000 and (out / f"{name}.md").stat().st_size > 500, name
print(f"bench-short: {len(judged)} claims, {len(names)} ways to run the same requests, all answers equal: {out}")
PYTHON
