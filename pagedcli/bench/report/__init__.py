"""Reports of benchmarks: views of the JSON that `paged bench` writes, on the console, as Markdown and as one HTML file.

    JSON -> document.Document (head, sections of tables, plots and claims) -> console | markdown | html

Nothing here measures. Only `plots` imports matplotlib, and only an HTML report needs it.
"""
