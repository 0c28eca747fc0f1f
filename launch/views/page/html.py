"""HTML of the page of a run: as one self-contained file, or as the page of a server with files of its own.

Every text is escaped here. The tables need no script. A policy in each page names by hash, or by origin, the
only scripts and styles that a browser may use.
"""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from math import isfinite

from aedit.launch.records import KeptRollout, KeptToken
from aedit.launch.views import formatting as fmt
from aedit.launch.views.page.contents import PageChart, PageSection, PageTable, RunPage, as_json, page_digest

STYLES, SCRIPTS = ("uPlot.min.css", "page.css"), ("uPlot.iife.min.js", "page.js")
LICENSE = "uPlot.LICENSE"
LIVE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Content-Security-Policy of a page that a server gives; a header."""
UNLIKELY = (-4.0, -2.0, -0.7)
"""Log-probabilities below which a token is marked, the darkest mark first."""
MOST_ROLLOUTS = 256
LONG = 40
"""Characters of a cell that is folded, if it has more; as in `page.js`."""


def asset(name: str) -> str:
    """Return the text of a file that the page uses."""
    return (files("aedit.launch.views.page") / "static" / name).read_text(encoding="utf-8")


def file_page(page: RunPage, rollouts: Sequence[KeptRollout] = ()) -> str:
    """Return the page with these rollouts as one file, which uses no other one."""
    styles, scripts = [asset(name) for name in STYLES], [asset(name) for name in SCRIPTS]
    scripts[0] = f"/*\n{asset(LICENSE)}*/\n{scripts[0]}"
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))};"
        f" style-src {' '.join(map(_hash, styles))}; base-uri 'none'; form-action 'none';"
        " require-trusted-types-for 'script'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
    head += "".join(f"<style>{text}</style>" for text in styles)
    script = "".join(f"<script>{text}</script>" for text in scripts)
    return _document(page, rollouts, as_json(page), head, script, 'id="live">A copy of the page at one time.')


def live_page(page: RunPage, rollouts: Sequence[KeptRollout] = (), data: str = "") -> str:
    """Return the page of a server with these rollouts, which follows the run. data: `as_json(page)`."""
    data = data or as_json(page)
    head = "".join(f'<link rel="stylesheet" href="static/{name}">' for name in STYLES)
    script = "".join(f'<script src="static/{name}"></script>' for name in SCRIPTS)
    return _document(page, rollouts, data, head, script, f'id="live" data-have="{page_digest(data)}">')


def _hash(text: str) -> str:
    """Return the source expression that allows exactly this text of a script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _document(
    page: RunPage, rollouts: Sequence[KeptRollout], data: str, head: str, scripts: str, state: str
) -> str:
    links = "".join(f'<a href="#{escape(each.name)}">{escape(each.title)}</a>' for each in page.sections[1:])
    links += '<a href="#rollouts">Rollouts</a>' if rollouts else ""
    alerts = "".join(f"<li>{escape(text)}</li>" for text in page.alerts)
    body = "".join(map(_section, page.sections)) + (_rollouts(rollouts) if rollouts else "")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{escape(page.title)} - aedit</title>{head}</head>"
        f"<body><h1>{escape(page.title)}</h1><nav>{links}</nav><p {state}</p>"
        f'<ul class="alerts" id="alerts">{alerts}</ul><main>{body}</main>'
        f'<script type="application/json" id="data">{data}</script>{scripts}</body></html>\n'
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


def _rollouts(rollouts: Sequence[KeptRollout]) -> str:
    """Return the section of the rollouts, which `page.js` filters."""
    fields = (("least_reward", "reward from"), ("most_reward", "to"), ("least_length", "tokens from"))
    inputs = "".join(
        f'<label>{label} <input name="{name}" inputmode="decimal"></label>'
        for name, label in (*fields, ("node", "node"), ("text", "text"))
    )
    return (
        '<section id="rollouts"><h2>Rollouts</h2><p class="note">A sample of the run, the newest first.'
        " Underlined tokens were drafted; the darker a token, the less likely it was. A reload shows"
        f' newer ones.</p><form class="filters" id="filters" hidden>{inputs}'
        '<span id="rollouts-shown"></span></form>'
        f"{''.join(map(_rollout, rollouts))}</section>"
    )


def _rollout(rollout: KeptRollout) -> str:
    reward = f"{rollout.reward:g}" if isfinite(rollout.reward) else ""
    head = (
        f"node {rollout.node}, step {rollout.step:,}, prompt {rollout.position:,}, sample {rollout.sample}:"
        f" reward {reward or 'none'}, advantage {fmt.decimals(rollout.advantage, 3)},"
        f" {fmt.some(rollout.num_tokens, 'token')}, {rollout.finish_reason or 'not finished'}"
    )
    values = ", ".join(f"{name} {fmt.decimals(value, 3)}" for name, value in rollout.values.items())
    facts = [f"rewards: {values or 'none'}", f"policy versions: {_versions(rollout.tokens)}"]
    known = [token.drafted for token in rollout.tokens if token.drafted is not None]
    facts.append(f"drafted: {sum(known)} of {len(known)}" if known else "drafted: not known")
    facts.append(f"rank {rollout.rank}, {fmt.clock(rollout.t)} into the run")
    if rollout.servers:
        parts = ", ".join(f"{name or 'this node'} from token {place}" for place, name in rollout.servers)
        facts.append(f"generated by {parts}")
    if len(rollout.tokens) < rollout.num_tokens:
        facts.append(f"the first {len(rollout.tokens):,} tokens are kept")
    # The parser of a browser drops a newline at the start of `pre`.
    return (
        f'<details class="rollout" data-node="{rollout.node}" data-reward="{reward}"'
        f' data-length="{rollout.num_tokens}"><summary>{escape(head)}</summary>'
        f"<p>{escape('; '.join(facts))}</p><h3>Prompt</h3><pre>\n{_exact(rollout.prompt)}</pre>"
        f"<h3>Completion</h3><pre>\n{_exact(rollout.completion)}</pre>"
        f'<h3>Tokens</h3><pre class="tokens">{"".join(map(_token, rollout.tokens))}</pre></details>'
    )


def _versions(tokens: Sequence[KeptToken]) -> str:
    """Return the versions with the number of tokens that each has drawn."""
    counts: dict[int, int] = {}
    for token in tokens:
        counts[token.version] = counts.get(token.version, 0) + 1
    return ", ".join(f"{version} ({fmt.some(count, 'token')})" for version, count in counts.items()) or "none"


def _exact(text: str) -> str:
    """Return a text escaped such that a browser keeps each character; NUL, which it would drop, as a sign."""
    return escape(text).replace("\r", "&#13;").replace("\0", "\u2400")


def _token(token: KeptToken) -> str:
    kind = next((f' class="p{3 - i}"' for i, limit in enumerate(UNLIKELY) if token.logprob < limit), "")
    name = "s" if token.drafted else "span"
    how = ", drafted" if token.drafted else ""
    title = f"{token.id}: {fmt.decimals(token.logprob, 3)}, version {token.version}{how}"
    return f'<{name}{kind} title="{title}">{_exact(token.text)}</{name}>'
