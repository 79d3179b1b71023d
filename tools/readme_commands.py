"""Print a command of README.md as it stands there, so that CI runs what the reader is told to run.

    python tools/readme_commands.py run | bash

A command is the fenced block after the line `<!-- command: NAME -->`. Standard library only.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def command(name: str, text: str) -> str | None:
    """The fenced block marked with `name` in `text`, or None."""
    found = re.search(rf"<!-- command: {re.escape(name)} -->\s*```sh\n(.*?)```", text, re.DOTALL)
    return found.group(1) if found else None


def main() -> int:
    """Print the command named by the first argument; 2 if README.md has none of that name."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    block = command(name, README.read_text())
    if block is None:
        print(f"README.md has no command marked <!-- command: {name} -->", file=sys.stderr)
        return 2
    print(block, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
