"""Writes the tables of docs/formats.md from docs/data/interop.json and interop-whole.json.

    python tools/interop/table.py [--check]

With --check, fails if the page is not up to date. Imports the standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "formats.md"
TABLES = {"interop": "docs/data/interop.json", "interop-whole": "docs/data/interop-whole.json"}
COLUMNS = (
    "paged",
    "independent unpacker",
    "autoawq",
    "compressed-tensors",
    "auto-gptq",
    "gptqmodel",
    "transformers",
    "vllm",
)
TARGETS = ("autoawq", "gptq", "gptq_v2", "compressed-tensors")

_NAME = re.compile(
    r"(?P<target>autoawq|gptq_v2|gptq|compressed-tensors)-(?P<bits>\d)bit(?:-g(?P<group>-?\d+))?-(?P<zeros>a?sym)"
    r"(?P<order>-act-order)?(?P<untied>-untied)?(?P<kept>-kept)?"
)
_OUTCOME = re.compile(
    r"(?P<verdict>close|WRONG) \((?P<worst>[\d.e+-]+)(?P<nats> nats)?(?:; plain bfloat16 (?P<own>.*))?\)"
)
Cell = dict[str, str]


def label(name: str) -> str:
    """What a row is, from the name of its folder; a folder of another package's quantizer is named as it is."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    parts = [f"{found['target']} {found['bits']} bits"]
    if found["group"]:
        parts.append("whole rows" if found["group"] == "-1" else f"groups of {found['group']}")
    parts.append("symmetric" if found["zeros"] == "sym" else "asymmetric")
    said = {"order": "`--desc-act`", "untied": "untied", "kept": "layers kept"}
    return ", ".join(parts + [words for key, words in said.items() if found[key]])


def shown(outcome: str, refusals: list[str]) -> str:
    """A cell; the words of a refusal are added to `refusals`, and the cell has their number."""
    if outcome.startswith("refused: "):
        words = outcome.removeprefix("refused: ")
        if words not in refusals:
            refusals.append(words)
        return f"refused [{refusals.index(words) + 1}]"
    found = _OUTCOME.fullmatch(outcome)
    if found is None:
        return outcome.partition(",")[0]
    worst = float(found["worst"])
    text = f"{worst:.2g} nats" if found["nats"] else f"within {100 * worst:.2g}%"
    if found["own"]:
        percent, nats = (float(part.split()[0]) for part in found["own"].split(", "))
        text += f" ({nats:.2g})" if found["nats"] else f" ({100 * percent:.2g}%)"
    return text if found["verdict"] == "close" else "WRONG, silently"


def table(cells: list[Cell]) -> str:
    """Markdown: a row for each folder, a column for each reader, the words of refusals below."""
    readers = [name for name in COLUMNS if any(cell["reader"] == name for cell in cells)]
    known = {(cell["reader"], cell["read"]): cell for cell in cells}
    targets = {(cell["reader"], cell["read"].partition("-")[0]) for cell in cells}
    refusals: list[str] = []
    lines = [
        f"| written | {' | '.join(_heading(name, cells) for name in readers)} |",
        "|---" * (len(readers) + 1) + "|",
    ]
    for name in sorted({cell["read"] for cell in cells if _NAME.fullmatch(cell["read"])}, key=_place):
        row = []
        for reader in readers:
            if (reader, name) in known:
                row.append(shown(known[reader, name]["outcome"], refusals))
            else:
                row.append("-" if (reader, name.partition("-")[0]) in targets else "")
        lines.append(f"| {label(name)} | {' | '.join(row)} |")
    said = [f"[{number}] {words}" for number, words in enumerate(refusals, 1)]
    return "\n".join(lines + ([""] if said else []) + ["  \n".join(said)] * bool(said))


def _heading(reader: str, cells: list[Cell]) -> str:
    versions = {cell["version"].rpartition(" ")[2] for cell in cells if cell["reader"] == reader}
    return " ".join(
        [reader, ", ".join(sorted(version for version in versions if version[:1].isdigit()))]
    ).strip()


def _place(name: str) -> tuple[int, str, bool, str]:
    found = _NAME.fullmatch(name)
    assert found is not None
    return TARGETS.index(found["target"]), found["bits"], bool(found["kept"]), name


def filled(page: str) -> str:
    """The page with its tables made anew, between their marks."""
    for name, file in TABLES.items():
        first, last = f"<!-- {name}: made by tools/interop/table.py -->\n", f"<!-- {name} ends -->"
        before, _, rest = page.partition(first)
        after = rest.partition(last)[2]
        cells = json.loads((ROOT / file).read_text(encoding="utf-8"))
        page = f"{before}{first}{table(cells)}\n{last}{after}"
    return page


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    wanted = filled(page)
    if check and page != wanted:
        print(f"{PAGE.relative_to(ROOT)} is not up to date: run tools/interop/table.py", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
