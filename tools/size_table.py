"""Print the size of each package as a table: files, lines, functions and their lengths, settings.

The guides of CONTRIBUTING.md (median function under 10 lines, nine in ten under 30, files under 400 lines) are shown,
not enforced; a file or function far over its guide is listed by name. Standard library only.
"""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_GUIDE, FUNCTION_GUIDE = 400, 60


def function_lengths(path: Path) -> list[tuple[int, str]]:
    """(lines, name) of every function in `path`, docstring left out."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            lines = (node.end_lineno or node.lineno) - body[0].lineno + 1 if body else 1
            found.append((lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    return found


def percentile(values: list[int], share: float) -> int:
    """The value below which `share` of the sorted values lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def count_settings() -> int:
    """Fields declared with `setting(...)`: every one is a thing a user can turn."""
    tree = ast.parse((ROOT / "pagedcli/config.py").read_text())
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setting"
        for node in ast.walk(tree)
    )


def packages() -> dict[str, list[Path]]:
    """Source files by the first two folders of their path."""
    groups: dict[str, list[Path]] = {}
    for base in ("pagedcli", "kernels/paged_kernels", "tests", "kernels/tests", "tools"):
        for path in sorted((ROOT / base).rglob("*.py")):
            inside = path.relative_to(ROOT / base).parts
            name = f"{base}/{inside[0]}" if base == "pagedcli" and len(inside) > 1 else base
            groups.setdefault(name, []).append(path)
    return groups


def main() -> int:
    """Print the table, then what lies over the guides."""
    print(
        f"{'package':24} {'files':>5} {'lines':>6} {'largest':>7} {'functions':>9} {'median':>6} {'p90':>4} {'max':>4}"
    )
    notable: list[str] = []
    for name, files in packages().items():
        lines = {path: len(path.read_text().splitlines()) for path in files}
        functions = [item for path in files for item in function_lengths(path)]
        lengths = [length for length, _ in functions] or [0]
        print(
            f"{name:24} {len(files):5} {sum(lines.values()):6} {max(lines.values()):7} {len(functions):9} "
            f"{statistics.median(lengths):6.0f} {percentile(lengths, 0.9):4} {max(lengths):4}"
        )
        notable += [f"{path.relative_to(ROOT)}: {n} lines" for path, n in lines.items() if n > FILE_GUIDE]
        notable += [f"{where}: {n} lines" for n, where in functions if n > FUNCTION_GUIDE]
    print(f"settings: {count_settings()}")
    print("\n".join(["over the guides:", *notable]) if notable else "nothing over the guides")
    return 0


if __name__ == "__main__":
    sys.exit(main())
