"""A report as one HTML file that needs nothing else: no script, no font, no request; plots stand in it as SVG.

Imports matplotlib (through `plots`) when it is called. All texts are escaped; a policy in the page forbids to load
anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from html import escape

from pagedcli.bench.report.document import Block, Claims, ClaimText, Column, Document, Plot, Section, Table
from pagedcli.errors import MissingDependencyError, how_to_install

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# A sign beside the word, so that a verdict is not told by its colour alone.
_SIGNS = {"confirmed": ("✓", "yes"), "refuted": ("✗", "no"), "no difference shown": ("≈", "even")}
_STYLE = """
:root { color-scheme: only light }
body { margin: 0 auto; max-width: 1160px; padding: 16px 20px 48px; background: #fff; color: #1a1a1a;
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .6em 0 .4em }
h2 { font-size: 1.25rem; margin: 2em 0 .5em; border-bottom: 2px solid #1a1a1a; padding-bottom: .15em }
p { max-width: 75ch; margin: .6em 0 }
dl.head { display: grid; grid-template-columns: max-content 1fr; gap: .15em 1em; margin: 0; font-size: .93rem }
dl.head dt { font-weight: 600 } dl.head dd { margin: 0; overflow-wrap: anywhere }
.scroll { overflow-x: auto; margin: .8em 0 }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .3em .55em; border-bottom: 1px solid #ccc; text-align: left; vertical-align: top }
thead th { border-bottom: 2px solid #1a1a1a; vertical-align: bottom; line-height: 1.25 }
th small { display: block; font-weight: 400; color: #444 }
.n { text-align: right } td.n { white-space: nowrap } thead th.n { max-width: 7.2em }
tbody th { font-weight: 400; white-space: nowrap } tr.strong > * { font-weight: 700 }
.note, figcaption { font-size: .88rem; color: #333; max-width: 75ch }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 12px 32px }
figure { margin: .8em 0; max-width: 640px } figure h3 { font-size: 1rem; margin: 0 0 .2em }
figure svg { display: block; width: 100%; height: auto }
figure svg text { font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif !important }
.claim { display: grid; grid-template-columns: 13em 1fr; gap: 0 1.2em; border-bottom: 1px solid #ccc;
  padding: .7em 0 }
.claim p { margin: .1em 0; max-width: none } .claim .test { font-size: .88rem; color: #444 }
.claim .text { font-weight: 600 }
.verdict { font-weight: 700; justify-self: start; align-self: start; border: 2px solid #666; border-radius: 4px;
  padding: .05em .5em; font-size: .88rem }
.yes { border-color: #00664b; background: #e6f4ef } .no { border-color: #a34700; background: #fdeee4;
  border-style: double; border-width: 4px } .even { border-style: dashed }
@media (max-width: 640px) { body { padding: 8px 12px 32px; font-size: 15px }
  .claim { grid-template-columns: 1fr; gap: .3em }
  dl.head { grid-template-columns: 1fr } dl.head dd { margin-bottom: .4em } }
@media print { html { font-size: 9.5pt } body { max-width: none; font-size: 1rem; padding: 0 } h2 { break-after: avoid }
  figure, .claim, tr { break-inside: avoid } .scroll { overflow: visible } table { font-size: 8pt }
  th, td { padding: .2em .4em } tbody th { white-space: normal }
  .plots { grid-template-columns: 1fr 1fr } }
@page { size: A4; margin: 14mm }
"""


def as_html(document: Document) -> str:
    """The whole report.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    names = (f"plot-{index}" for index in itertools.count(1))
    title = escape(document.title)
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>",
        '<dl class="head">',
        *(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in document.head),
        "</dl>",
    ]
    for section in document.sections:
        parts += list(_section(section, names))
    return "\n".join([*parts, "</body>\n</html>"]) + "\n"


def _section(section: Section, names: Iterator[str]) -> Iterator[str]:
    """Plots that follow each other stand side by side where there is room."""
    yield f"<section>\n<h2>{escape(section.title)}</h2>"
    for is_plot, blocks in itertools.groupby(section.blocks, _is_plot):
        if is_plot:
            yield '<div class="plots">'
            yield from (_figure(block, next(names)) for block in blocks if not isinstance(block, _NOT_PLOTS))
            yield "</div>"
        else:
            for block in blocks:
                yield from _text_block(block)
    yield "</section>"


_NOT_PLOTS = (str, Table, Claims)


def _is_plot(block: Block) -> bool:
    return not isinstance(block, _NOT_PLOTS)


def _text_block(block: Block) -> Iterator[str]:
    if isinstance(block, str):
        yield f"<p>{escape(block)}</p>"
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Claims):
        yield from (_claim(item) for item in block.items)


def _table(table: Table) -> Iterator[str]:
    yield '<div class="scroll"><table><thead><tr>'
    yield from (_heading(column) for column in table.columns)
    yield "</tr></thead><tbody>"
    for index, row in enumerate(table.rows):
        cells = [f'<th scope="row"{_align(table.columns[0])}>{escape(row[0])}</th>']
        for column, cell in zip(table.columns[1:], row[1:], strict=True):
            cells.append(f"<td{_align(column)}>{escape(cell)}</td>")
        strong = ' class="strong"' if index in table.strong else ""
        yield f"<tr{strong}>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    if table.note:
        yield f'<p class="note">{escape(table.note)}</p>'


def _heading(column: Column) -> str:
    unit = f"<small>{escape(column.unit)}</small>" if column.unit else ""
    return f'<th scope="col"{_align(column)}>{escape(column.title)}{unit}</th>'


def _align(column: Column) -> str:
    return ' class="n"' if column.is_number else ""


def _claim(item: ClaimText) -> str:
    sign, kind = _SIGNS.get(item.verdict, ("–", "none"))
    return (
        f'<div class="claim"><span class="verdict {kind}">{sign} {escape(item.verdict)}</span><div>'
        f'<p class="text">{escape(item.text)}</p><p>{escape(item.measured)}</p>'
        f'<p class="test">Test: {escape(item.test)}</p></div></div>'
    )


def _figure(plot: Plot, name: str) -> str:
    caption = f"<figcaption>{escape(plot.caption)}</figcaption>" if plot.caption else ""
    return f"<figure><h3>{escape(plot.title)}</h3>{_svg(plot, name)}{caption}</figure>"


def _svg(plot: Plot, name: str) -> str:
    try:
        from pagedcli.bench.report.plots import svg
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise MissingDependencyError(
            f"an HTML report has plots, which need matplotlib: {how_to_install('bench')}"
        ) from None
    return svg(plot, name)
