"""Tests the page of a run against run directories whose figures are known by arithmetic."""

import base64
import hashlib
import http.client
import inspect
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from contextlib import closing, contextmanager
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from kit.hub_processes import Client, HubProcess, ending, write_run
from kit.rl_runs import RLNode
from kit.rl_runs import closing as closing_nodes
from kit.swarm_processes import swarm
from kit.waiting import until
from test_hub_views import line, node_at, write
from test_views import Writer, full_run

from aedit.launch.cli import main
from aedit.launch.cli.keys import make_keys
from aedit.launch.records import RunFollower, read_run, reader
from aedit.launch.views.page.contents import as_json, contents
from aedit.launch.views.page.histories import BINS
from aedit.launch.views.page.html import LICENSE, asset, file_page, live_page
from aedit.launch.views.page.server import MOST_LINES, serve_page
from aedit.launch.views.sources import open_source
from aedit.types import UserError


@pytest.fixture(autouse=True)
def _files_are_closed():
    with closing_nodes():
        yield


def page_of(run_dir, most_lines=MOST_LINES):
    """Return the page of a run as JSON has it."""
    return json.loads(as_json(contents(RunFollower(run_dir, most_lines).poll())))


def section(page, name):
    (found,) = (each for each in page["sections"] if each["name"] == name)
    return found


def table(page, name):
    (found,) = (each for part in page["sections"] for each in part["tables"] if each["name"] == name)
    return found["rows"]


def chart(page, name):
    (found,) = (each for part in page["sections"] for each in part["charts"] if each["name"] == name)
    return found["xs"], {curve["label"]: curve["values"] for curve in found["series"]}


def lane(page, node, use):
    lanes = section(page, "nodes")["lanes"]
    return lanes["shares"][node][lanes["uses"].index(use)]


def text_run(tmp_path):
    """Write a node that trains, waits for half of each second from 20 to 60 s, and is away until 80 s."""
    writer = Writer(tmp_path, 0)
    writer.start()
    busy, wait = 0.0, 0.0
    for t in range(1, 61):
        busy, wait = (busy + 1, wait) if t <= 20 else (busy + 0.5, wait + 0.5)
        writer.metric(float(t), step=int(2 * busy), busy_s=busy, wait_s=wait, tokens=200 * busy)
    writer.start(t=80.0, attempt=1, step=int(2 * busy))
    for t in range(81, 121):
        busy += 1
        writer.metric(float(t), step=int(2 * busy), busy_s=busy, wait_s=wait, tokens=200 * busy)
    (tmp_path / "run.toml").write_text('name = "known"\n')
    return tmp_path


# -- contents


def test_lanes_show_training_waits_and_the_time_without_a_process(tmp_path):
    page = page_of(text_run(tmp_path))
    assert BINS == 120  # a bin is a second
    training, waiting, away = (lane(page, 0, use) for use in ("training", "waiting: nodes", "away"))
    assert training[2:19] == [100] * 17
    assert training[22:59] == [50] * 37
    assert waiting[22:59] == [50] * 37
    assert away[61:79] == [100] * 18
    assert training[82:119] == [100] * 37
    assert all(sum(shares) == 100 for shares in zip(training, waiting, away, strict=True))


def test_the_use_of_time_sums_up_to_the_length_of_the_run(tmp_path):
    (row,) = table(page_of(text_run(tmp_path)), "times")
    assert row == ["node 0", "80.0 s", "20.0 s", "0.0 s", "0.0 s", "20.0 s"]


def test_speed_is_half_of_the_solo_speed_while_half_of_the_time_is_waited(tmp_path):
    xs, curves = chart(page_of(text_run(tmp_path)), "speed")
    at = {round(x - 0.5): i for i, x in enumerate(xs)}
    assert curves["run"][at[10]] == pytest.approx(200.0)
    assert curves["run"][at[40]] == pytest.approx(100.0)
    assert curves["sum of solo speeds"][at[40]] == pytest.approx(200.0)
    assert curves["run"][at[70]] == 0.0
    assert curves["sum of solo speeds"][at[70]] is None


def test_counters_that_run_ahead_of_the_clock_fill_a_lane_and_no_more(tmp_path):
    writer = Writer(tmp_path, 0)
    writer.start()
    for t in range(1, 121):
        writer.metric(float(t), step=t, busy_s=3.0 * t, wait_s=1.0 * t)
    page = page_of(tmp_path)
    assert lane(page, 0, "training") == [75] * BINS
    assert lane(page, 0, "waiting: nodes") == [25] * BINS


def test_lanes_of_learning_show_the_waits_by_cause_and_the_part_that_was_used(tmp_path):
    node = RLNode(tmp_path, 0)
    node.start()
    for n in range(1, 121):
        node.step(n)
    page = page_of(tmp_path)
    uses = section(page, "nodes")["lanes"]["uses"]
    assert {"waiting: hub", "waiting: longest sample", "rollouts", "rewards", "idle work"} <= set(uses)
    (row,) = table(page, "times")
    spent = dict(zip(uses, (float(cell.removesuffix(" s")) for cell in row[1:]), strict=True))
    # Of 2 s a step: generation 0.9, rewards 0.1, training 0.4; 0.3 of the 0.4 s of waits are used.
    assert spent["rollouts"] == pytest.approx(108, abs=0.1)
    assert spent["rewards"] == pytest.approx(12, abs=0.1)
    assert spent["training"] == pytest.approx(48, abs=0.1)
    assert spent["idle work"] == pytest.approx(36, abs=0.1)
    assert spent["waiting: hub"] == pytest.approx(9, abs=0.1)
    assert spent["waiting: longest sample"] == pytest.approx(3, abs=0.1)
    _, curves = chart(page, "reward")
    assert curves["node 0"][-1] == pytest.approx(1.0)


def test_nodes_of_which_only_the_hub_has_records_have_lanes_too(tmp_path):
    lines = []
    for t in range(0, 121, 2):
        nodes = [node_at(0, 10 * t, busy_s=t / 2, wait_s=t / 2)]
        # The second node's process ends at 40 s and a new one, with counters from 0, joins at 80 s.
        told = node_at(1, 10 * (t if t <= 40 else t - 80), busy_s=t if t <= 40 else t - 80.0, wait_s=0.0)
        nodes.append(told if not 40 < t <= 80 else node_at(1, 0, state="gone: silent"))
        lines.append(line(float(t), nodes, [1, 1]))
    write(tmp_path / "hub", lines)
    page = page_of(tmp_path)
    assert section(page, "nodes")["lanes"]["names"] == ["0 box-0", "1 box-1"]
    assert lane(page, 0, "training")[10:100] == [50] * 90
    assert lane(page, 1, "training")[2:38] == [100] * 36
    assert lane(page, 1, "away")[42:80] == [100] * 38
    assert lane(page, 1, "training")[84:118] == [100] * 34
    assert table(page, "times")[1][1] == "80.0 s"


def test_pushes_refusals_and_bytes_are_those_of_the_hub(tmp_path):
    refused = [{}, {"stale": 3}, {"stale": 3, "norm": 1}]
    lines = [line(10.0 * k, [node_at(0, 80 * k, refused=refused[k])], [k, k]) for k in range(3)]
    write(tmp_path / "hub", lines, [{"t": 0.0, "event": "lead", "term": 1}])
    page = page_of(tmp_path)
    assert table(page, "refused") == [["0 box-0", "stale", "3"], ["0 box-0", "norm", "1"]]
    xs, curves = chart(page, "refused")
    assert xs == [0, 10, 20]
    assert curves == {"accepted": [0, 10, 20], "refused": [0, 3, 4]}
    assert chart(page, "bytes")[1] == {"up": [0, 8000, 16000], "down": [0, 24000, 48000]}
    assert chart(page, "weight")[1]["0 box-0"] == [None, 0.5, 0.5]
    assert table(page, "hubs")[0][:3] == ["0", "1", "2"]


def test_many_nodes_share_three_curves(tmp_path):
    nodes = [node_at(i, 80, staleness=i) for i in range(21)]
    write(tmp_path / "hub", [line(10.0, nodes, [1]), line(20.0, nodes, [2])])
    _, curves = chart(page_of(tmp_path), "staleness")
    assert curves == {"smallest": [0, 0], "median": [10, 10], "largest": [20, 20]}


def test_held_out_loss_is_drawn_over_the_tokens_of_all_nodes(tmp_path):
    for index in (0, 1):
        writer = Writer(tmp_path, index)
        writer.start()
        for t in (1, 2, 3, 4):
            writer.metric(float(t), step=t, tokens=1000 * t * (index + 1))
        if index == 0:
            for t, loss in ((1.0, 5.0), (4.0, 3.0)):
                writer.event("eval", t, step=t, round=int(t), loss=loss)
    page = page_of(tmp_path)
    assert chart(page, "quality-time") == ([1, 4], {"held-out loss": [5, 3]})
    assert chart(page, "quality-tokens") == ([3000, 12000], {"held-out loss": [5, 3]})


# -- large runs


def hundred_nodes(run_dir):
    """Write the records of a hundred nodes over ten hours; return those of the first."""
    one = Writer(run_dir, 0)
    one.start()
    common = {"lr": 1e-3, "grad_norm": 0.5, "idle_used_s": 0.0, "other_s": 0.0, "progress": 0.5}
    with (one.dir / "metrics.jsonl").open("a") as file:
        for t in range(1, 36_001):
            counts = {"t": float(t), "step": t, "round": t // 10, "tokens": 1000 * t, "loss": 2.0}
            times = {"busy_s": 0.75 * t, "wait_s": 0.25 * t}
            file.write(json.dumps(counts | times | common) + "\n")
    judged = {"bytes": 700, "norms": [1.0] * 20, "distrusted": [], "effective_nodes": [90.0] * 20}
    with (one.dir / "events.jsonl").open("a") as file:
        for id in range(1, 3_601):
            line = {"t": 10.0 * id, "event": "round", "id": id, "step": 10 * id, "nodes": 100, **judged}
            file.write(json.dumps(line) + "\n")
            if id == 1800:
                line = {"t": 10.0 * id, "event": "heal", "round": id, "from_node": 3}
                file.write(json.dumps(line) + "\n")
    for index in range(1, 100):
        folder = run_dir / "nodes" / str(index)
        folder.mkdir()
        for name in ("metrics.jsonl", "events.jsonl"):
            os.link(one.dir / name, folder / name)
    return one


def test_a_hundred_nodes_and_ten_hours_are_read_as_a_sample_of_bounded_size(tmp_path):
    one = hundred_nodes(tmp_path)
    follower = RunFollower(tmp_path, MOST_LINES)
    run = follower.poll()
    assert len(run.nodes) == 100
    tails = [node._metrics_tail for node in follower._nodes.values()]
    size = (one.dir / "metrics.jsonl").stat().st_size
    assert size > 4 << 20
    assert all(tail.read_bytes < size / 10 for tail in tails)
    each = MOST_LINES // 2  # of each of so many nodes
    for node in run.nodes[::33]:
        assert each <= len(node.metrics) <= 2 * each
        assert node.metrics[-1].step == 36_000
        steps = [metric.step for metric in node.metrics]
        gaps = [after - before for before, after in pairwise(steps)]
        assert min(gaps) > 0
        assert max(gaps) <= 1.25 * 36_000 / each  # no part of the run is left out
        assert each / 2 <= len(node.rounds) <= 3 * each
        assert [notice.event for notice in node.notices] == ["heal"]  # one line among thousands
    page = json.loads(text := as_json(contents(run)))
    assert len(text) < 300_000
    assert lane(page, 57, "training") == [75] * BINS
    assert len(live_page(contents(run))) < 400_000


def test_the_newest_line_of_a_hub_of_many_nodes_is_read_however_long_it_is(tmp_path):
    nodes = [node_at(i, 80) for i in range(400)]
    write(tmp_path / "hub", [line(float(t), nodes, [t]) for t in range(1, 40)])
    (hub,) = RunFollower(tmp_path, 4).poll().hubs
    assert len(json.dumps(nodes)) > 100_000
    assert hub.last.versions == (39,)
    assert hub.lines[0].versions == (1,)
    assert len(hub.lines) <= 4 + 4 * 16


def test_events_of_a_hub_that_views_show_are_found_among_many_others(tmp_path):
    events = [{"t": float(t), "event": "refused", "node": 0, "reason": "stale"} for t in range(20_000)]
    events[7000] = {"t": 7000.0, "event": "excluded", "node": 0, "name": "box-0", "reason": "norm"}
    events[9000] = {"t": 9000.0, "event": "alert", "kind": "disk", "message": "full"}
    write(tmp_path / "hub", [line(10.0, [node_at(0, 80)], [1])], events)
    follower = RunFollower(tmp_path, MOST_LINES)
    (hub,) = follower.poll().hubs
    assert [notice.event for notice in hub.notices] == ["excluded", "alert"]
    assert hub.alerts == ("full (since 9,000 s)",)


def test_a_long_file_that_grows_is_followed_to_its_newest_line(tmp_path):
    writer = Writer(tmp_path, 0)
    writer.start()
    follower = RunFollower(tmp_path, 16)
    for t in range(1, 4001):
        writer.metric(float(t), step=t)
        if t % 1000 == 0:
            metrics = follower.poll().nodes[0].metrics
            assert metrics[-1].step == t
            assert metrics[0].step == 1
    assert len(metrics) <= 64  # also in memory


def long_run(run_dir, judged=None, resumed_at=None):
    """Write two nodes of 4,000 rounds without a hub, of four fragments; the first one evaluates.

    judged: Units of node 1 that are distrusted, and rolled back, by round. resumed_at: Round after which a
    second attempt repeats the others, without any.
    """
    for index in (0, 1):
        node = Writer(run_dir, index)
        node.start()
        lines = [(id, True) for id in range(1, 4001)]
        if resumed_at is not None:
            lines += [(id, False) for id in range(resumed_at + 1, 4001)]
        with (node.dir / "events.jsonl").open("a") as file:
            for place, (id, is_first) in enumerate(lines):
                t = float(place)
                if is_first is False and lines[place - 1][1]:
                    start = {"t": t - 0.5, "event": "start", "attempt": 1, "step": 10 * resumed_at}
                    file.write(json.dumps(start) + "\n")
                distrusted, rolled_back = (judged or {}).get(id, ([], [])) if index and is_first else ([], [])
                line = {"t": t, "event": "round", "id": id, "step": 10 * id, "nodes": 2}
                line |= {"bytes": bytes_of(id, index), "norms": [0.5] * 8, "weights": [0.5] * 8}
                line |= {"distrusted": distrusted, "effective_nodes": [2.0] * 8, "rolled_back": rolled_back}
                file.write(json.dumps(line) + "\n")
                if not index and not id % 3:
                    file.write(json.dumps({"t": t, "event": "eval", "step": 10 * id, "loss": 2.0}) + "\n")
    return run_dir


def bytes_of(id, node):
    return 1000 * (id % 4) + 100 * node + id // 1000


def test_the_bytes_of_a_round_are_those_of_all_nodes_however_few_rounds_are_read(tmp_path):
    follower = RunFollower(long_run(tmp_path), 32)
    run = follower.poll()
    sizes = [node._events_tail.read_bytes for node in follower._nodes.values()]
    assert all(size > 4 * reader.WHOLE_BYTES for size in sizes)
    assert all(len(node.rounds) < 400 for node in run.nodes)
    ids, curves = chart(json.loads(as_json(contents(run))), "bytes")
    assert curves["all nodes"] == [bytes_of(id, 0) + bytes_of(id, 1) for id in ids]
    assert {id % 4 for id in ids} == {0, 1, 2, 3}, "rounds of each fragment"
    assert ids[-1] == 4000
    older = [id for id in ids if id <= 3800]
    assert 16 <= len(older) <= 64
    assert max(after - before for before, after in pairwise([0, *older])) < 4 * 4000 / 32


@pytest.mark.parametrize("resumed_at", [None, 2000])
def test_each_distrusted_unit_is_counted_however_few_rounds_are_read(tmp_path, resumed_at):
    judged = {7: ([1, 2], []), 1500: ([3], [5, 6]), 3000: ([0], [])}
    page = page_of(long_run(tmp_path, judged, resumed_at), 32)
    num_distrusted = 4 if resumed_at is None else 3
    assert table(page, "refused") == [["1", "distrusted", str(num_distrusted)], ["1", "rolled back", "2"]]
    assert section(page_of(tmp_path, None), "refused") == section(page, "refused")


def test_without_a_limit_every_line_is_read(tmp_path):
    writer = Writer(tmp_path, 0)
    writer.start()
    for t in range(1, 3001):
        writer.metric(float(t), step=t)
    assert len(read_run(tmp_path).nodes[0].metrics) == 3000


# -- HTML


class Tables(HTMLParser):
    """Cells of each table, and every tag with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.tags, self.scripts, self._name, self._cell = {}, [], [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append((tag, found))
        if tag == "table":
            self._name = found["id"]
            self.cells[self._name] = []
        if tag == "tr":
            self.cells[self._name].append([])
        self._cell = "" if tag in ("td", "script", "style") else None

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data

    def handle_endtag(self, tag):
        if tag == "td":
            self.cells[self._name][-1].append(self._cell)
        if tag in ("script", "style"):
            self.scripts.append((tag, self._cell))
        self._cell = None


EVIL = "</script ></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028"


def evil_run(tmp_path):
    nodes = [node_at(0, 80, name=EVIL, state=EVIL, refused={EVIL: 2})]
    server = {"name": EVIL, "address": EVIL, "state": EVIL, "live": True, "lag": 1, "tokens_per_s": 5.0}
    server |= {"running": 1, "waiting": 0, "accused": {EVIL: 1}, "reason": EVIL, "banned": EVIL}
    write(tmp_path / "hub", [line(10.0, nodes, [1], servers=[server])] * 2)
    writer = Writer(tmp_path, 0)
    writer.start()
    writer.metric(1.0, step=1)
    writer.event("error", 1.5, error=EVIL)
    (tmp_path / "run.toml").write_text(f"name = {json.dumps(EVIL)}\n")
    return tmp_path


@pytest.mark.parametrize("write_page", [file_page, live_page])
def test_hostile_names_stay_text(tmp_path, write_page):
    page = contents(read_run(evil_run(tmp_path)))
    parsed = Tables(write_page(page))
    safe = EVIL.replace("\u2028", "?")
    assert any(safe[:40] in cell.replace("\u2028", "?") for cell in parsed.cells["table-refused"][1])
    assert "img" not in {tag for tag, _ in parsed.tags}
    assert not [name for _, found in parsed.tags for name in found if name.startswith("on")]
    kinds = [found.get("type") for tag, found in parsed.tags if tag == "script"]
    assert kinds == ["application/json", None, None]
    texts = [text for tag, text in parsed.scripts if tag == "script"]
    assert json.loads(texts[0])["title"].startswith("</script >")
    assert "<" not in texts[0]


def test_the_file_needs_nothing_else_and_its_policy_allows_its_own_scripts_only(tmp_path):
    text = file_page(contents(read_run(text_run(tmp_path))))
    parsed = Tables(text)
    assert not [found for tag, found in parsed.tags if "src" in found or tag == "link"]
    assert not re.search(r"https?://(?!github\.com/leeoniya)", text)
    (policy,) = (found["content"] for tag, found in parsed.tags if found.get("http-equiv"))
    texts = [(tag, found) for tag, found in parsed.scripts if not found.startswith("{")]
    assert [tag for tag, _ in texts] == ["style", "style", "script", "script"]
    for tag, found in texts:
        digest = base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
        assert (
            f"'sha256-{digest}'"
            in dict(each.split(" ", 1) for each in policy.split("; ") if " " in each)[f"{tag}-src"]
        )
    assert "unsafe" not in policy
    assert asset(LICENSE) in text


def test_the_manual_has_a_picture_of_each_view():
    """`python -m kit.pictures` takes them."""
    source = inspect.getsource(sys.modules[contents.__module__])
    views = {*re.findall(r'PageSection\(\s*name="(\w+)"', source), "rollouts", "phone"} - {"run"}
    assert len(views) == 12
    manual = (Path(__file__).parent.parent / "docs" / "operating.md").read_text()
    assert {f"img/page-{view}.webp" for view in views} == set(re.findall(r"img/page-\w+\.webp", manual))


def test_the_tables_of_the_html_have_the_rows_of_the_data(tmp_path):
    page = contents(read_run(full_run(tmp_path)))
    parsed = Tables(live_page(page))
    for part in page.sections:
        for each in part.tables:
            assert parsed.cells[f"table-{each.name}"][1:] == [list(row) for row in each.rows]


# -- server


@contextmanager
def serving(read, listen="127.0.0.1:0", keys=None, rollouts=lambda most: ()):
    server = serve_page(read, listen, keys, rollouts)
    try:
        yield server.address
    finally:
        server.close()


def get(address, path="/", *, method="GET", headers=None, context=None):
    host, _, port = address.rpartition(":")
    made = http.client.HTTPSConnection if context else http.client.HTTPConnection
    with closing(made(host, int(port), timeout=60, **({"context": context} if context else {}))) as call:
        call.request(method, path, headers=headers or {})
        answer = call.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()


def test_the_page_its_data_and_its_files_are_served_under_a_strict_policy(tmp_path):
    follower = RunFollower(text_run(tmp_path), MOST_LINES)
    with serving(follower.poll) as address:
        for path, has in (("/", "known"), ("/data.json", '"known"'), ("/static/page.js", "EventSource")):
            status, headers, text = get(address, path)
            assert status == 200
            assert has in text
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
        for name in re.findall(r'(?:src|href)="(static/[^"]+)"', get(address)[2]):
            assert get(address, f"/{name}")[0] == 200
        assert get(address, "/static/../page.py")[0] == 404
        assert get(address, "/static/%2e%2e%2fhtml.py")[0] == 404
        assert get(address, "/x")[0] == 404
        assert get(address, "/", method="POST")[0] == 405


def test_a_page_of_another_site_cannot_read_it_under_its_own_name(tmp_path):
    follower = RunFollower(text_run(tmp_path), MOST_LINES)
    with serving(follower.poll) as address:
        for path in ("/", "/data.json", "/events"):
            assert get(address, path, headers={"Host": "evil.example:80"})[0] == 403
        assert get(address, "/", headers={"Host": "localhost:8080"})[0] == 200


def test_events_bring_what_a_run_has_written_since(tmp_path):
    writer = Writer(tmp_path, 0)
    writer.start()
    writer.metric(1.0, step=1)
    follower = RunFollower(tmp_path, MOST_LINES)
    with serving(follower.poll) as address:
        host, _, port = address.rpartition(":")
        with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as call:
            call.request("GET", "/events")
            answer = call.getresponse()
            assert answer.headers["content-type"].startswith("text/event-stream")

            def update():
                while True:
                    text = answer.readline().decode()
                    if text.startswith("data: "):
                        return json.loads(text.removeprefix("data: "))

            assert table(update(), "nodes")[0][2] == "1"
            writer.metric(2.0, step=77)
            assert table(update(), "nodes")[0][2] == "77"


def test_a_browser_that_has_the_newest_page_gets_the_next_one_first(tmp_path):
    """It names what it has in the address, and after a lost connection as the id of the last event."""
    writer = Writer(tmp_path, 0)
    writer.start()
    writer.metric(1.0, step=1)
    runs = [read_run(tmp_path)]

    @contextmanager
    def events(path, headers):
        with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as call:
            call.request("GET", path, headers=headers)
            yield call.getresponse()

    def update(answer):
        lines = []
        while not lines or not lines[-1].startswith("data: "):
            lines.append(answer.readline().decode().strip())
        return lines[-2].removeprefix("id: "), json.loads(lines[-1].removeprefix("data: "))

    with serving(lambda: runs[-1]) as address:
        host, _, port = address.rpartition(":")
        (have,) = re.findall(r'data-have="(\w+)"', get(address)[2])
        with events("/events", {}) as answer:
            first, page = update(answer)
        assert (first, table(page, "nodes")[0][2]) == (have, "1")
        with events(f"/events?have={have}", {}) as answer:
            assert answer.readline() == b":\n"
            writer.metric(2.0, step=77)
            runs.append(read_run(tmp_path))
            second, page = update(answer)
        assert table(page, "nodes")[0][2] == "77"
        with events(f"/events?have={have}", {"Last-Event-ID": second}) as answer:
            assert answer.readline() == b":\n"
        with events(f"/events?have={second}", {"Last-Event-ID": have}) as answer:
            assert table(update(answer)[1], "nodes")[0][2] == "77"


def test_a_run_that_cannot_be_read_any_more_is_shown_as_it_was_with_the_reason(tmp_path):
    run = read_run(text_run(tmp_path))
    calls = []

    def read():
        calls.append(1)
        if len(calls) > 1:
            raise UserError("h:1: the hub does not answer")
        return run

    with serving(read) as address:
        until(lambda: "does not answer" in get(address)[2], "the reason")
        assert table(json.loads(get(address, "/data.json")[2]), "times")


def test_elsewhere_a_reader_needs_a_token_over_tls(tmp_path):
    keys = tmp_path / "keys"
    make_keys(keys, hosts=["0.0.0.0", "127.0.0.1"], readers=["eve"])
    run = read_run(text_run(tmp_path))
    token = (keys / "eve" / "token").read_text().strip()
    context = ssl.create_default_context(cafile=str(keys / "hub" / "ca.crt"))
    with serving(lambda: run, "0.0.0.0:0", keys / "hub") as address:
        place = f"127.0.0.1:{address.rpartition(':')[2]}"
        basic = base64.b64encode(f"any:{token}".encode()).decode()
        status, headers, text = get(place, context=context)
        assert status == 401
        assert headers["www-authenticate"].startswith("Basic")
        assert "known" not in text
        for wrong in ("Bearer x", "Basic !!", f"Bearer {token[:-4]}AAAA", "Digest x", "Bearer"):
            assert get(place, "/data.json", context=context, headers={"Authorization": wrong})[0] == 401
        for right in (f"Bearer {token}", f"Basic {basic}"):
            assert get(place, context=context, headers={"Authorization": right})[0] == 200
        (keys / "hub" / "revoked").write_text(f"eve {1 << 62}\n")
        status, _, text = get(place, context=context, headers={"Authorization": f"Bearer {token}"})
        assert (status, "revoked" in text) == (401, True)
        with pytest.raises((http.client.HTTPException, OSError)):
            get(place, headers={"Authorization": f"Bearer {token}"})  # without TLS


def test_no_token_key_or_secret_url_of_the_run_is_shown(tmp_path):
    run_dir = full_run(tmp_path)
    make_keys(run_dir / "keys", hosts=["127.0.0.1"], readers=["eve"])
    secrets = [path.read_text() for path in run_dir.glob("keys/**/*") if path.is_file()]
    secrets = [line for text in secrets for line in text.splitlines() if len(line) > 20]
    for name in ("rejoin/box", "peers/box/key", "servers/s1/signing.key"):
        (run_dir / name).parent.mkdir(parents=True)
        (run_dir / name).write_text(secret := f"secret of {name}")
        secrets.append(secret)
    with (run_dir / "run.toml").open("a") as file:
        for table, key in (("alerts", "webhook"), ("traces", "endpoint"), ("rollout.vllm", "server")):
            secrets.append(url := f"https://user:word@{table}.example/path")
            file.write(f'[{table}]\n{key} = "{url}"\n')
    with serving(RunFollower(run_dir, MOST_LINES).poll) as address:
        shown = "".join(get(address, path)[2] for path in ("/", "/data.json"))
    shown += file_page(contents(read_run(run_dir)))
    assert len(secrets) > 20
    assert [secret for secret in secrets if secret in shown or "user:word" in shown] == []


# -- command line


def refused(capsys, *words):
    assert main(list(words)) == 2
    (said,) = capsys.readouterr().err.splitlines()
    return said


def test_wrong_places_and_addresses_get_one_line(tmp_path, capsys):
    run_dir = str(text_run(tmp_path))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "not a run directory" in refused(capsys, "view", str(empty))
    assert "not a run directory" in refused(capsys, "view", str(tmp_path / "missing"))
    for listen in (
        "8080",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:x",
        "127.0.0.1:70000",
        "127.0.0.1:-1",
        ":80",
    ):
        assert "HOST:PORT" in refused(capsys, "view", run_dir, "--listen", listen)
    assert "--keys" in refused(capsys, "view", run_dir, "--listen", "0.0.0.0:0")
    said = refused(capsys, "view", run_dir, "--listen", "0.0.0.0:0", "--keys", str(empty))
    assert "server.crt" in said
    assert "--listen" in refused(
        capsys, "view", run_dir, "--listen", "no-such-host.invalid:80", "--keys", str(empty)
    )
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        said = refused(capsys, "view", run_dir, "--listen", f"127.0.0.1:{used.getsockname()[1]}")
        assert "in use" in said
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    assert place in refused(capsys, "view", place)  # no hub is there


BROKEN = {
    "empty files": [b""],
    "no JSON": [b"\x00\xff garbage\n" * 50],
    "wrong types": [b'{"t": "x", "event": 7, "step": [], "nodes": 3}\n', b"[1, 2]\n", b'"text"\n'],
    "huge numbers": [
        b'{"t": 1e308, "step": 1e400, "tokens": 1e999, "busy_s": -1e300, "event": "round", "id": 1}\n'
    ],
    "a torn line": [b'{"t": 1.0, "step": 1, "tokens": 5}\n{"t": 2.0, "st'],
    "deep nesting": [b"[" * 100_000 + b"\n"],
    "one endless line": [b'{"t": 1.0, "step": 1, "tokens": 1, "x": "' + b"y" * (3 << 20) + b'"}\n'] * 2,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_records_are_skipped_and_the_page_is_written(tmp_path, capsys, kind):
    for folder in ("nodes/0", "hub", "standby"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("metrics", "events"):
            (tmp_path / folder / f"{name}.jsonl").write_bytes(b"".join(BROKEN[kind]))
    (tmp_path / "run.toml").write_text("name = [broken")
    assert main(["plot", str(tmp_path), "--html"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == tmp_path / "plots" / "page.html"
    assert "<h1>" in path.read_text()


def test_a_page_that_cannot_be_written_gets_one_line(tmp_path, capsys):
    run_dir = text_run(tmp_path)
    (run_dir / "plots").write_text("a file")
    assert "cannot write" in refused(capsys, "plot", str(run_dir), "--html")


def test_the_command_serves_until_a_signal(tmp_path):
    run_dir = text_run(tmp_path)
    words = [sys.executable, "-m", "aedit", "view", str(run_dir)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as process:
        try:
            url = process.stdout.readline().split()[0]
            address = url.removeprefix("http://").rstrip("/")
            assert "known" in get(address)[2]
            host, _, port = address.rpartition(":")
            with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as call:
                call.request("GET", "/events")  # a page that is open ends with the server, without noise
                assert call.getresponse().readline().startswith(b"id: ")
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_the_page_of_a_real_hub_shows_what_the_hub_says(tmp_path):
    with ending():
        hub = HubProcess(write_run(tmp_path), tmp_path / "hub")
        node = Client(hub.address, name="box").found()
        node.merged(0)
        assert not node.push(0, base=99).accepted
        with open_source(hub.address) as source, serving(source.history) as address:

            def rows(name):
                page = json.loads(get(address, "/data.json")[2])
                named = [part for each in page["sections"] for part in each["tables"] if part["name"] == name]
                return named[0]["rows"] if named else []

            until(lambda: rows("refused") == [["0 box", "future", "1"]], "the refused push")
            assert rows("pace")[0][1] == "box"
            assert rows("pushes")[0][1] == "3"
            assert rows("hubs")[0][:2] == ["0", "1"]
        node.hub.close()


def url_in(log_file):
    """Return the address of the page in the output of `aedit view`; "" if there is none yet."""
    found = re.search(r"https?://(\S+)/", log_file.read_text() if log_file.exists() else "")
    return found[1] if found else ""


def test_a_hub_serves_the_page_of_its_run_and_starts_it_again_when_it_dies(tmp_path):
    with ending():
        hub = HubProcess(write_run(tmp_path), tmp_path / "run" / "hub", "--hub.view=127.0.0.1:0")
        node = Client(hub.address, name="box").found()
        log_file = tmp_path / "run" / "hub" / "view.log"
        address = until(lambda: url_in(log_file), "the page", limit_s=90)

        def shown(place):
            page = json.loads(get(place, "/data.json")[2])
            parts = [part for each in page["sections"] for part in each["tables"] if part["name"] == "pace"]
            return [row[1] for part in parts for row in part["rows"]]

        def child():
            children = psutil.Process(hub.process.pid).children()
            return next((each for each in children if "view" in each.cmdline()), None)

        until(lambda: shown(address) == ["box"], "the node on the page", limit_s=90)
        log_file.write_text("")
        child().kill()
        again = until(lambda: url_in(log_file), "the page of the next process", limit_s=90)
        assert shown(again) == ["box"]
        page = child()
        node.hub.close()
        hub.kill()
        until(lambda: not page.is_running(), "the end of the page with its hub", limit_s=60)


@pytest.mark.parametrize("where", ["used", "elsewhere", "x"])
def test_a_hub_refuses_an_address_of_the_page_in_one_line(tmp_path, where):
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        place = {"used": f"127.0.0.1:{used.getsockname()[1]}", "elsewhere": "0.0.0.0:0"}.get(where, where)
        words = ["--directory", str(tmp_path / "run" / "hub"), f"--hub.view={place}"]
        command = [sys.executable, "-m", "aedit", "hub", str(write_run(tmp_path)), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 2
    (said,) = done.stderr.strip().splitlines()
    assert "hub.view" in said
    assert {"used": "in use", "elsewhere": "--keys", "x": "HOST:PORT"}[where] in said


def test_a_peer_of_a_swarm_serves_the_page_of_the_swarm(tmp_path):
    with swarm(tmp_path, peers=1, parts=1, copies=1, flags=("--hub.view=127.0.0.1:0",)) as peers:
        address = until(lambda: url_in(peers.folder_of(0) / "view.log"), "the page", limit_s=90)

        def names():
            page = json.loads(get(address, "/data.json")[2])
            return [part["name"] for each in page["sections"] for part in each["tables"]]

        until(lambda: {"peers", "parts"} <= {*names()}, "peers and owners", limit_s=90)
