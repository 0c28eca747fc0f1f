"""Tests the page of a run in a real browser: a headless Chromium, where one is installed."""

import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit.browser import PATH, browser
from kit.rl_runs import RLNode
from kit.rl_runs import closing as closing_nodes
from kit.waiting import until
from test_kept_rollouts import kept
from test_page import EVIL, evil_run, hundred_nodes, serving, url_in
from test_views import Writer, full_run

from aedit.launch.records import KeptToken, RunFollower, read_run
from aedit.launch.views.page.contents import contents
from aedit.launch.views.page.html import file_page
from aedit.launch.views.page.server import MOST_LINES

CONFIGS = Path(__file__).parent.parent / "configs"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(PATH is None, reason="no Chromium here: `make test-browser` installs it where it may"),
]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


@pytest.fixture(autouse=True)
def _without_errors(chromium):
    """Fail on every message of the console: an error of a script, or a breach of the page's policy."""
    chromium.look(1200)
    chromium.console.clear()
    with closing_nodes():
        yield
    assert chromium.console == []


@contextmanager
def live(chromium, read, rollouts=lambda most: ()):
    """Open the page of a server in the browser, which leaves it before the server ends."""
    with serving(read, rollouts=rollouts) as address:
        chromium.open(f"http://{address}/")
        chromium.until("document.getElementById('live')?.textContent === 'live'")
        yield
        chromium.open("about:blank")


def cells(chromium, name):
    """Return the texts of a table that the browser shows."""
    rows = f"[...document.querySelectorAll('#table-{name} tbody tr')]"
    return chromium.value(f"{rows}.map(row => [...row.cells].map(cell => cell.textContent))")


def drawn(chromium, selector):
    """Return whether a canvas has a pixel that is not transparent."""
    return chromium.value(
        f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
        " const data = found.getContext('2d').getImageData(0, 0, found.width, found.height).data;"
        " return data.some(value => value > 0); })()"
    )


def steady(table, rows):
    """Return the rows of a table without the state of a node, which depends on when it is looked at."""
    kept = [i for i, name in enumerate(table.columns) if name != "state"]
    return [[row[i] for i in kept] for row in rows]


def test_every_chart_is_drawn_and_the_page_follows_the_run(tmp_path, chromium):
    run_dir = full_run(tmp_path)
    node = Writer(run_dir, 7)
    node.start()
    node.metric(1.0, step=1)
    follower = RunFollower(run_dir)
    with live(chromium, follower.poll):
        places = chromium.value("[...document.querySelectorAll('[id^=chart-]')].map(each => each.id)")
        page = contents(read_run(run_dir))
        assert places == [f"chart-{chart.name}" for part in page.sections for chart in part.charts]
        for place in places:
            assert drawn(chromium, f"#{place} canvas"), place
        assert drawn(chromium, "#lanes canvas")
        for part in page.sections:
            for table in part.tables:
                assert steady(table, cells(chromium, table.name)) == steady(table, table.rows)
        node.metric(2.0, step=1234)
        node.event("alert", 2.0, kind="loss", message="the training loss is not finite")
        chromium.until("document.getElementById('alerts').textContent.includes('not finite')")
        assert cells(chromium, "nodes")[3][2] == "1,234"


def test_a_run_of_learning_shows_lanes_by_cause_and_rollouts_that_can_be_filtered(tmp_path, chromium):
    node = RLNode(tmp_path, 0)
    node.start()
    for n in range(1, 31):
        node.step(n)
    rollouts = [kept(node=k % 2, reward=k / 4, num_tokens=10 * k, completion=f"answer {k}") for k in range(5)]
    (tmp_path / "page.html").write_text(file_page(contents(read_run(tmp_path)), rollouts))
    chromium.open((tmp_path / "page.html").as_uri())
    assert "waiting: hub" in chromium.value("document.querySelector('#lanes .key').textContent")
    assert drawn(chromium, "#chart-reward canvas")

    def visible(**values):
        for name in ("least_reward", "most_reward", "least_length", "node", "text"):
            chromium.value(
                f"(() => {{ const field = document.getElementById('filters').elements.{name};"
                f" field.value = {json.dumps(values.get(name, ''))};"
                " field.dispatchEvent(new Event('input', {bubbles: true})); })()"
            )
        found = chromium.value(
            "[...document.querySelectorAll('details.rollout')].filter(each => !each.hidden)"
            ".map(each => Number(each.dataset.length))"
        )
        assert (
            chromium.value("document.getElementById('rollouts-shown').textContent") == f"{len(found)} shown"
        )
        return found

    assert visible() == [0, 10, 20, 30, 40]
    assert visible(least_reward="0.5") == [20, 30, 40]
    assert visible(least_reward="0.25", most_reward="0.5") == [10, 20]
    assert visible(least_length="30") == [30, 40]
    assert visible(node="1") == [10, 30]
    assert visible(text="answer 4") == [40]
    assert visible(node="1", least_reward="0.6") == [30]
    assert visible(least_reward="x") == [0, 10, 20, 30, 40]


def test_a_hundred_nodes_and_ten_hours_are_shown(tmp_path, chromium):
    """It prints the seconds from the start of the server until the browser has drawn the page."""
    hundred_nodes(tmp_path)
    began_s = time.monotonic()
    with live(chromium, RunFollower(tmp_path, MOST_LINES).poll):
        assert drawn(chromium, "#lanes canvas")
        print(f"100 nodes, ten hours: {time.monotonic() - began_s:.2f} s")
        assert len(cells(chromium, "nodes")) == 100
        assert cells(chromium, "nodes")[57][2] == "36,000"


def runs_nothing(chromium):
    assert chromium.value("document.querySelectorAll('img, iframe, object').length") == 0
    assert chromium.value("document.scripts.length") == 3
    printable = EVIL.removesuffix("\u2028")
    assert chromium.value("document.querySelector('h1').textContent").startswith(printable)
    assert chromium.value("document.querySelector('details.rollout pre').textContent") == EVIL
    assert cells(chromium, "refused")[0][1].startswith(printable)
    return True


def test_hostile_names_and_completions_run_nothing(tmp_path, chromium):
    follower = RunFollower(evil_run(tmp_path))
    token = KeptToken(id=1, text=EVIL, logprob=-1.0, version=1, drafted=None)
    rollouts = [kept(prompt=EVIL, completion=EVIL, values={EVIL: 1.0}, tokens=(token,), servers=((0, EVIL),))]
    (tmp_path / "page.html").write_text(file_page(contents(follower.poll()), rollouts))
    chromium.open((tmp_path / "page.html").as_uri())
    assert runs_nothing(chromium)
    with live(chromium, follower.poll, lambda most: rollouts):
        assert runs_nothing(chromium)


def test_the_policy_stops_a_script_that_gets_into_the_page(tmp_path, chromium):
    follower = RunFollower(full_run(tmp_path))
    with live(chromium, follower.poll):
        chromium.value("window.done = 0")
        for attack in (
            "document.body.innerHTML = '<img src=x onerror=\"done = 2\">'",
            "document.createElement('script').text = 'done = 1'",
        ):
            tried = f"(() => {{ try {{ {attack}; return 'done' }} catch (error) {{ return error.name }} }})()"
            assert chromium.value(tried) == "TypeError"
        assert (
            chromium.value("fetch('https://example.org/').then(() => 'sent', () => 'stopped')") == "stopped"
        )
        assert chromium.value("window.done") == 0
    assert len(chromium.console) >= 3  # each attempt is reported
    chromium.console.clear()


def test_tables_and_rollouts_need_no_script(tmp_path, chromium):
    page = contents(read_run(full_run(tmp_path)))
    (tmp_path / "page.html").write_text(file_page(page, [kept()]))
    chromium.scripts(on=False)
    try:
        chromium.open((tmp_path / "page.html").as_uri())
        for part in page.sections:
            for table in part.tables:
                assert cells(chromium, table.name) == [list(row) for row in table.rows]
        assert chromium.value("document.querySelectorAll('canvas').length") == 0
        assert "2+2=" in chromium.value("document.querySelector('details.rollout').textContent")
        assert chromium.value("document.getElementById('filters').hidden")
    finally:
        chromium.scripts(on=True)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_fits_a_phone_and_is_readable_in_light_and_dark(tmp_path, chromium, width, dark):
    page = contents(read_run(full_run(tmp_path)))
    (tmp_path / "page.html").write_text(file_page(page, [kept(completion="x" * 500)]))
    chromium.look(width, dark=dark)
    chromium.open((tmp_path / "page.html").as_uri())
    assert chromium.value("document.documentElement.scrollWidth") <= width

    def brightness(field):
        numbers = chromium.value(f"getComputedStyle(document.body).{field}").strip("rgb()").split(",")
        return sum(map(float, numbers)) / 765

    text, behind = brightness("color"), brightness("backgroundColor")
    assert abs(text - behind) > 0.7
    assert (text > behind) is dark


def test_a_completion_is_shown_with_each_of_its_characters(tmp_path, chromium):
    """Found: a carriage return, a NUL and a newline at the start, which an untrained policy writes."""
    texts = ["\n", "\r", "\r\n", "\0", *map(chr, range(256))]
    tokens = tuple(
        KeptToken(id=i, text=text, logprob=-1.0, version=1, drafted=bool(i % 2))
        for i, text in enumerate(texts)
    )
    rollout = kept(prompt="".join(texts), completion="".join(texts), tokens=tokens)
    (tmp_path / "page.html").write_text(file_page(contents(read_run(full_run(tmp_path))), [rollout]))
    chromium.open((tmp_path / "page.html").as_uri())
    found = chromium.value("[...document.querySelectorAll('details.rollout pre')].map(e => e.textContent)")
    assert found == ["".join(texts).replace("\0", "\N{SYMBOL FOR NULL}")] * 3


PARTS = ["run", "nodes", "speed", "quality", "pushes", "refused", "bytes"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("preset", "nodes", "words"),
    [
        ("tiny", 3, ["--train.seconds", "3600"]),
        ("tiny-rl", 2, ["--train.steps", "100000", "--rl.supervised_steps", "10", "--rl.eval_every", "20"]),
    ],
)
def test_a_real_run_is_followed_from_its_hub_and_each_table_says_what_the_directory_says(
    tmp_path, chromium, preset, nodes, words
):
    """The run goes on until the page has been seen: its hub ends with it, and the page's server with that."""
    words = [
        sys.executable,
        "-m",
        "aedit",
        "run",
        str(CONFIGS / f"{preset}.toml"),
        "--local",
        str(nodes),
        *words,
    ]
    words += ["--dir", str(tmp_path), "--hub.view", "127.0.0.1:0"]
    run_dir, follower = tmp_path / preset, None

    def recorded():
        page = contents(follower.poll())
        has_all = [part.name for part in page.sections][: len(PARTS)] == PARTS
        return has_all and (preset == "tiny" or bool(follower.rollouts(256)))

    with (tmp_path / "run.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            address = until(lambda: url_in(run_dir / "hub" / "view.log"), "the page", limit_s=240)
            chromium.open(f"http://{address}/")
            chromium.until(f"document.querySelectorAll('#table-nodes tbody tr').length === {nodes}")
            chromium.until("document.querySelectorAll('#lanes canvas').length === 1")
            assert drawn(chromium, "#lanes canvas")
            chromium.open("about:blank")
            follower = RunFollower(run_dir)
            until(recorded, "records of each kind", limit_s=240, look_s=1.0)
            process.send_signal(signal.SIGINT)
            assert process.wait(240) == 130, (tmp_path / "run.log").read_text()[-2000:]
        finally:
            process.terminate()
            process.wait(60)
    page, rollouts = contents(follower.poll()), follower.rollouts(256)  # one thread at a time reads by it
    with live(chromium, follower.poll, follower.rollouts):
        for part in page.sections:
            for table in part.tables:
                assert cells(chromium, table.name) == [list(row) for row in table.rows]
        texts = chromium.value(
            "[...document.querySelectorAll('details.rollout pre.tokens')].map(e => e.textContent)"
        )
    wanted = ["".join(token.text for token in each.tokens) for each in rollouts]
    assert texts == [text.replace("\0", "\N{SYMBOL FOR NULL}") for text in wanted]
    assert bool(rollouts) is (preset == "tiny-rl")
