"""Fills the figures of docs/benchmarks/README.md from reports beside it: tools/bench_page.py compare-bf16.json ...

What stands between the page's two marks is replaced: for each file its head, the main table and the verdicts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pagedcli.bench.report.build import build_document
from pagedcli.bench.report.document import Claims, ClaimText, Document, Section, Table
from pagedcli.bench.report.files import read_results
from pagedcli.bench.report.markdown import as_markdown

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
HEAD = ("Model", "Machine", "Date", "Limits", "Other load", "Command", "Took")


def figures(file: Path) -> str:
    """The part of the page that one report gives."""
    document = build_document(read_results(file))
    mechanisms, claims = document.sections[:2]
    table = next(block for block in mechanisms.blocks if isinstance(block, Table))
    verdicts = next(block for block in claims.blocks if isinstance(block, Claims))
    short = Claims([ClaimText(item.text, "", item.measured, item.verdict) for item in verdicts.items])
    about = [block for block in mechanisms.blocks if isinstance(block, str)][:1]
    head = [(name, text) for name, text in document.head if name in HEAD]
    sections = [Section(mechanisms.title, [*about, table]), Section(claims.title, [short])]
    text = (
        as_markdown(Document(file.stem, head, sections)).replace("\n## ", "\n#### ").replace("# ", "### ", 1)
    )
    links = " · ".join(f"[{kind}]({file.stem}.{kind})" for kind in ("html", "md", "json"))
    return f"{text.replace(' *Test: *', '')}\nWhole report: {links}\n"


def main(files: list[str]) -> None:
    """Fill the page in the folder of the first file."""
    page = Path(files[0]).parent / "README.md"
    text = page.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    filled = "\n".join(figures(Path(file)) for file in files)
    page.write_text(f"{before}{BEGIN}\n\n{filled}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
