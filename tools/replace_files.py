"""Put files into a folder without disturbing who uses the old ones: written beside them, then renamed into place.

    python tools/replace_files.py FOLDER FILE...

A process that has mapped a library would die of SIGBUS if that were overwritten; renamed over, it keeps what it has
mapped. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def replace_file(source: Path, folder: Path) -> None:
    """Copy `source` into `folder` under its own name, in one step for whoever looks."""
    fresh = folder / f"{source.name}.{os.getpid()}.new"
    shutil.copy2(source, fresh)
    fresh.replace(folder / source.name)


def main() -> int:
    """Copy the files named by the arguments after the first."""
    folder, *sources = (Path(argument) for argument in sys.argv[1:])
    for source in sources:
        replace_file(source, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
