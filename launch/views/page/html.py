"""HTML of the page of a run: as one self-contained file, or as the page of a server with files of its own.

Every text is escaped here. The tables need no script. A policy in each page names by hash, or by origin, the
only scripts and styles that a browser may use.
"""

import base64
import hashlib
from html import escape
from importlib.resources import files

from aedit.launch.views.page.contents import PageChart, PageSection, PageTable, RunPage, as_json

STYLES, SCRIPTS = ("uPlot.min.css", "page.css"), ("uPlot.iife.min.js", "page.js")
LICENSE = "uPlot.LICENSE"
LIVE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Content-Security-Policy of a page that a server gives; a header."""
LONG = 40
"""Characters of a cell that is folded, if it has more; as in `page.js`."""


def asset(name: str) -> str:
    """Return the text of a file that the page uses."""
    return (files("aedit.launch.views.page") / "static" / name).read_text(encoding="utf-8")


def file_page(page: RunPage) -> str:
    """Return the page as one file, which uses no other one."""
    styles, scripts = [asset(name) for name in STYLES], [asset(name) for name in SCRIPTS]
    scripts[0] = f"/*\n{asset(LICENSE)}*/\n{scripts[0]}"
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))};"
        f" style-src {' '.join(map(_hash, styles))}; base-uri 'none'; form-action 'none';"
        " require-trusted-types-for 'script'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
    head += "".join(f"<style>{text}</style>" for text in styles)
    return _document(page, head, "".join(f"<script>{text}</script>" for text in scripts), live=False)


def live_page(page: RunPage) -> str:
    """Return the page of a server, which follows the run."""
    head = "".join(f'<link rel="stylesheet" href="static/{name}">' for name in STYLES)
    return _document(
        page, head, "".join(f'<script src="static/{name}"></script>' for name in SCRIPTS), live=True
    )


def _hash(text: str) -> str:
    """Return the source expression that allows exactly this text of a script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _document(page: RunPage, head: str, scripts: str, *, live: bool) -> str:
    links = "".join(f'<a href="#{escape(each.name)}">{escape(each.title)}</a>' for each in page.sections[1:])
    alerts = "".join(f"<li>{escape(text)}</li>" for text in page.alerts)
    body = "".join(map(_section, page.sections))
    mark = ' data-live="1"' if live else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{escape(page.title)} - aedit</title>{head}</head>"
        f"<body{mark}><h1>{escape(page.title)}</h1>"
        f'<nav>{links}</nav><p id="live">{"" if live else "A copy of the page at one time."}</p>'
        f'<ul class="alerts" id="alerts">{alerts}</ul><main>{body}</main>'
        f'<script type="application/json" id="data">{as_json(page)}</script>{scripts}</body></html>\n'
    )


def _section(section: PageSection) -> str:
    note = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
    lanes = '<div id="lanes"></div>' if section.lanes else ""
    charts = "".join(map(_chart, section.charts))
    charts = f'<div class="charts">{charts}</div>' if charts else ""
    return (
        f'<section id="{escape(section.name)}"><h2>{escape(section.title)}</h2>{note}{lanes}'
        f"{charts}{''.join(map(_table, section.tables))}</section>"
    )


def _chart(chart: PageChart) -> str:
    return (
        f'<div class="chart"><h3>{escape(chart.title)}</h3><div id="chart-{escape(chart.name)}"></div></div>'
    )


def _table(table: PageTable) -> str:
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    head = "".join(map(_head, table.columns))
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return (
        f'{title}<div class="table"><table id="table-{escape(table.name)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _head(text: str) -> str:
    return f"<th>{escape(text)}</th>"


def _cell(text: str) -> str:
    kind = ' class="long"' if len(text) > LONG else ""
    return f"<td{kind}>{escape(text)}</td>"
