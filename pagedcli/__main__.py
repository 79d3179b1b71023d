"""`python -m pagedcli` is `paged`."""

from __future__ import annotations

from pagedcli.cli.main import main

if __name__ == "__main__":
    main()
