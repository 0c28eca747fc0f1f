"""Tests the accounts of samples against independent counts: rewards and spies of the test itself."""

import contextlib
import csv
import json
import random
import shutil
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import text_nodes
from kit.rl_hub import NodeThread, hub_of
from kit.rl_nodes import config_of
from zlib_ng.zlib_ng import crc32

from aedit.async_sgd.hub import HubState
from aedit.async_sgd.journal import Journal, Ledger, Payload, Store
from aedit.async_sgd.journal.encoding import encode_records
from aedit.async_sgd.rules import Accepted, Founded, Joined, Leased, Led, Left, Push, Refused
from aedit.launch.cli import main
from aedit.launch.data.order import samples_at
from aedit.launch.hub import accounts_line, journal_facts, read_accounts
from aedit.launch.node import objective
from aedit.launch.node.rl_groups import GroupStream
from aedit.launch.node.train import TrainingNode
from aedit.launch.records import (
    JournalFacts,
    Lease,
    PositionLog,
    SampleVerdict,
    accounts_of,
    ranges_of,
    read_positions,
)
from aedit.launch.records.accounts import _compared
from aedit.proto.codecs import codec
from aedit.types import Layout, TensorLayout, UnitLayout, UserError

RL = {"drafter__kind": "off", "checkpoint__every": 0, "rl__groups": 2, "rl__group_size": 3}


def run_dir_of(config):
    return Path(config.dir) / config.name


def positions_with(accounts, *verdicts):
    return set(np.flatnonzero(np.isin(accounts.verdict, verdicts)).tolist())


# -- ranges


@given(st.lists(st.integers(0, 60), max_size=40))
def test_ranges_hold_exactly_the_positions_in_their_order(positions):
    ranges = ranges_of(np.array(positions, np.int64))
    assert [p for start, end, *stride in ranges for p in range(start, end, *stride)] == positions


def test_the_draws_of_a_node_of_many_are_one_range():
    assert ranges_of(np.arange(3, 3003, 5)) == [[3, 2999, 5]]
    assert ranges_of(np.arange(3, 3003)) == [[3, 3003]]


# -- reinforcement learning, with and without a hub


@pytest.fixture
def trained(monkeypatch):
    """Return how often each position was trained, by node, as the stream of groups gives them out."""
    found, original = defaultdict(Counter), GroupStream.trained

    def follow(stream, count):
        groups = original(stream, count)
        found[threading.current_thread().name].update(group.position for group in groups)
        return groups

    monkeypatch.setattr(GroupStream, "trained", follow)
    return found


def test_groups_that_a_hub_has_leased_to_two_nodes_are_accounted_for_as_their_rewards_have_seen_them(
    tmp_path, trained, monkeypatch
):
    seen = tmp_path / "seen.jsonl"
    monkeypatch.setenv("REWARDS_FILE", str(seen))
    keys = {"reward__functions": ("kit.rl_rewards:written",), "rl__dynamic_sampling": True}
    config = config_of(tmp_path, train__steps=10, **keys, **RL)
    hub = hub_of(config)
    both_are_there = threading.Barrier(2, timeout=60.0)
    nodes = [NodeThread(config, hub, name, lambda _: both_are_there.wait()) for name in ("a", "b")]
    for node in nodes:
        node.start()
    for node in nodes:
        node.end()
    accounts = accounts_of(read_positions(run_dir_of(config)), None)
    expected = trained["a"] + trained["b"]
    assert accounts.disagreements == []
    assert positions_with(accounts, SampleVerdict.ONCE) == set(expected)
    assert set(expected.values()) == {1}
    by_name = {name: set(counts) for name, counts in trained.items()}
    for total in accounts.nodes.values():
        assert total.trained == total.accepted == len(by_name[total.name]) > 0
    # What the reward function was given and has returned, call by call: one call is one group. Calls with
    # other numbers of texts are evaluations, and the example on which a function is tried.
    calls = [json.loads(line) for line in seen.read_text().splitlines()]
    calls = [call for call in calls if len(call["texts"]) == 3]
    written = Counter((tuple(call["rewards"]), len(call["texts"])) for call in calls)
    assert Counter((group.rewards, len(group.lengths)) for group in accounts.groups) == written
    replaced = sum(len(set(call["rewards"])) == 1 for call in calls)
    assert sum(group.replaced for group in accounts.groups) == replaced > 0
    for group in (g for g in accounts.groups if g.replaced):
        assert accounts.reason(group.position) == "replaced: all rewards are equal"
    assert [each.what for each in accounts.bias] == ["length", "reward"]


def test_a_lost_a_doubled_and_a_foreign_record_are_noticed(tmp_path, trained):
    config = config_of(tmp_path, train__steps=6, edit__every=2, **RL)
    node = NodeThread(config, hub_of(config), "a")
    node.start()
    node.end()
    path = run_dir_of(config) / "nodes" / "0" / "positions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert accounts_of(read_positions(run_dir_of(config)), None).disagreements == []

    def with_lines(changed):
        path.write_text("".join(changed))
        return accounts_of(read_positions(run_dir_of(config)), None)

    for kind in ("trained", "round", "open", "group"):
        at = next(i for i, line in enumerate(lines) if json.loads(line)["event"] == kind)
        doubled = with_lines([*lines[: at + 1], *lines[at:]])
        assert doubled.disagreements, f"a doubled {kind}"
        if kind != "group":  # a group that is not recorded was not rewarded, as far as can be known
            assert with_lines([*lines[:at], *lines[at + 1 :]]).disagreements, f"a lost {kind}"
        if kind == "trained":
            assert doubled.count(SampleVerdict.TWICE) == len(json.loads(lines[at])["positions"]) or (
                doubled.count(SampleVerdict.TWICE) > 0
            )


# -- text, without a hub


class Killed(Exception):
    """The death of a node in the test process."""


def test_steps_that_a_resume_has_undone_do_not_count_and_their_samples_are_trained_once(
    tmp_path, monkeypatch
):
    config = text_nodes.config_of(
        tmp_path, train__steps=20, checkpoint__every=1, edit__every=4, edit__warmup_steps=3
    )
    drawn = []
    batch, inner_step = objective.batch, TrainingNode.inner_step

    def followed(samples, indices):
        drawn.append(list(map(int, indices)))
        return batch(samples, indices)

    steps = {}

    def stepped(node):
        inner_step(node)
        steps[node.sync.steps] = drawn.pop()  # a step that is taken again replaces the undone one
        if node.sync.steps == 13 and not stepped.killed:
            stepped.killed = True
            raise Killed

    stepped.killed = False
    monkeypatch.setattr(objective, "batch", followed)
    monkeypatch.setattr(TrainingNode, "inner_step", stepped)
    with pytest.raises(Killed):
        text_nodes.run(config)
    text_nodes.run(config, attempt=2)
    run_dir = run_dir_of(config)
    (run_dir / "run.toml").touch()
    accounts = read_accounts(run_dir)
    (first, second) = read_positions(run_dir)[0]
    assert first.step == 0 < second.step <= 13
    assert accounts.disagreements == []
    once = np.array(sorted(positions_with(accounts, SampleVerdict.ONCE)))
    num_samples = len(text_nodes_samples(config))
    counted = Counter(samples_at(once, num_samples, config.seed).tolist())
    assert counted == Counter(index for indices in steps.values() for index in indices)
    assert len(steps) == 20
    assert accounts.count(SampleVerdict.TWICE) == accounts.count(SampleVerdict.NOT_COUNTED) == 0
    undone = [piece for piece in accounts.pieces if "went back to step" in piece.reason]
    assert sum(piece.trained.last - piece.trained.first + 1 for piece in undone) == 14 - second.step
    assert "no record is missing" in accounts_line(run_dir)


def text_nodes_samples(config):
    from aedit.launch.data import load_corpus, load_tokenizer

    return load_corpus(config.data, load_tokenizer(config.data), run_dir_of(config) / "data").train


def test_a_run_that_was_killed_for_good_has_samples_that_do_not_count(tmp_path, monkeypatch):
    config = text_nodes.config_of(tmp_path, train__steps=20, checkpoint__every=0, edit__every=4)
    inner_step = TrainingNode.inner_step

    def stepped(node):
        if node.sync.steps == 10:
            node.positions.flush()  # a second has passed
            raise Killed
        inner_step(node)

    monkeypatch.setattr(TrainingNode, "inner_step", stepped)
    with pytest.raises(Killed):
        text_nodes.run(config)
    accounts = accounts_of(read_positions(run_dir_of(config)), None)
    in_rounds = 4 * (
        8 if accounts.count(SampleVerdict.ONCE) > 16 else 4
    )  # the second round may not have landed
    assert accounts.count(SampleVerdict.ONCE) == in_rounds
    assert accounts.count(SampleVerdict.NOT_COUNTED) == 40 - in_rounds
    assert accounts.reason(39) == "its round has not landed"


# -- verdicts against the journal, by hand


def facts(**changed):
    """Return the journal of two nodes, each of 10 steps of two samples in one push of two units."""
    base = JournalFacts(
        watermark=60,
        unused=((40, 60),),
        leases=(Lease(0, 0, 20), Lease(1, 20, 40), Lease(0, 40, 60)),
        is_whole=True,
        names={0: "a", 1: "b"},
        steps={0: 20, 1: 20},
        pushes={(node, unit): {1: 10} for node in (0, 1) for unit in (0, 1)},
        since={},
        renumbered=(),
        numbers={(node, unit): 1 for node in (0, 1) for unit in (0, 1)},
        refusals={},
    )
    return replace(base, **changed)


def written(directory, node, attempts):
    """Write the records of a node: the events of each attempt."""
    folder = directory / "nodes" / str(node)
    folder.mkdir(parents=True)
    for number, events in enumerate(attempts, 1):
        log = PositionLog(folder)
        log.start(attempt=number, node=node, kind="text", step=0, units=[[0, 2]], leases=True, warmup=0)
        for name, *arguments in events:
            getattr(log, name)(*arguments)
        log.close()


def steps(first, start, count=10):
    return [("trained", first + i, [start + 2 * i, start + 2 * i + 1]) for i in range(count)]


def opened(number, step=10, round_id=1):
    return ("opened", round_id, step, (0, 1), (), (number, number))


def pushed(number):
    return [opened(number), ("ended", 1, 10), ("stop", 10, "done")]


PUSHED = pushed(1)


def test_two_nodes_whose_pushes_were_accepted_agree_with_the_journal(tmp_path):
    written(tmp_path, 0, [[*steps(1, 0), *PUSHED]])
    written(tmp_path, 1, [[*steps(1, 20), *PUSHED]])
    accounts = accounts_of(read_positions(tmp_path), facts())
    assert accounts.disagreements == []
    assert positions_with(accounts, SampleVerdict.ONCE) == set(range(40))
    assert accounts.reason(50) == "leased and not drawn"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"steps": {0: 10, 1: 20}, "pushes": {(0, 0): {1: 10}}},
            "node 0: push 1 of unit 1, of 10 steps, was accepted by its records, and the journal lacks it",
        ),
        ({"steps": {0: 20, 1: 40}}, "node 1: 40 steps in accepted pushes by the journal"),
        (
            {"pushes": facts().pushes | {(1, 0): {1: 9, 2: 1}, (1, 1): {1: 11}}},
            "node 1: push 2 of unit 0 has 1 steps by the journal, and 0 by its records, and 1 more pushes",
        ),
        ({"unused": ()}, "20 positions are used by the journal and in no record, such as 40"),
        ({"watermark": 30, "unused": (), "leases": ()}, "10 trained positions were never leased, such as 30"),
        ({"names": {0: "a"}, "steps": {0: 20}}, "node 1: it has records, and the journal does not know it"),
    ],
    ids=["a lost push", "steps", "pushes of no record", "a lost record", "never leased", "a foreign node"],
)
def test_a_journal_that_says_otherwise_is_a_disagreement(tmp_path, changed, message):
    written(tmp_path, 0, [[*steps(1, 0), *PUSHED]])
    written(tmp_path, 1, [[*steps(1, 20), *PUSHED]])
    found = accounts_of(read_positions(tmp_path), facts(**changed)).disagreements
    assert any(message in text for text in found), found


KILLED = [*steps(1, 0), opened(1)]


def test_a_push_that_counts_as_fewer_steps_than_it_has_is_no_disagreement(tmp_path):
    """A hub lowers a claim of more steps than the time since the last push allows."""
    written(tmp_path, 0, [[*steps(1, 0), *PUSHED]])
    written(tmp_path, 1, [[*steps(1, 20), *PUSHED]])
    lowered = facts().pushes | {(0, 0): {1: 3}}
    accounts = accounts_of(read_positions(tmp_path), facts(steps={0: 13, 1: 20}, pushes=lowered))
    assert accounts.disagreements == []
    assert positions_with(accounts, SampleVerdict.ONCE) == set(range(40))


def test_a_push_whose_answer_its_node_has_not_seen_counts_if_the_journal_has_it(tmp_path):
    written(tmp_path, 0, [KILLED])
    one = facts(names={0: "a"}, steps={0: 20}, unused=((20, 60),))
    accounts = accounts_of(read_positions(tmp_path), one)
    assert accounts.disagreements == []
    assert positions_with(accounts, SampleVerdict.ONCE) == set(range(20))
    pruned = replace(one, pushes={}, since=one.numbers, is_whole=False)
    assert accounts_of(read_positions(tmp_path), pruned).disagreements == []
    lost = replace(one, numbers={}, steps={0: 0}, pushes={}, unused=((0, 60),))
    accounts = accounts_of(read_positions(tmp_path), lost)
    assert accounts.disagreements == []
    assert positions_with(accounts, SampleVerdict.NOT_COUNTED) == set(range(20))
    assert accounts.reason(3) == "its push did not reach the hub"
    refused = replace(one, steps={0: 0}, pushes={}, refusals={(0, unit, 1): True for unit in (0, 1)})
    accounts = accounts_of(read_positions(tmp_path), refused)
    assert accounts.disagreements == []
    assert accounts.reason(3) == "its push was distrusted"
    dropped_by_a_merge = replace(refused, steps={0: 20}, pushes=one.pushes)
    assert accounts_of(read_positions(tmp_path), dropped_by_a_merge).disagreements == []
    half = replace(one, steps={0: 10}, pushes={(0, 0): {1: 10}}, numbers={(0, 0): 1})
    accounts = accounts_of(read_positions(tmp_path), half)
    assert accounts.disagreements == []
    assert positions_with(accounts, SampleVerdict.ONCE) == set(range(20))
    assert accounts.reason(3) == "its push did not reach the hub, in 1 of 2 units"


@pytest.mark.parametrize("arrived", [True, False])
def test_the_number_of_the_next_push_says_whether_a_killed_process_had_delivered_its_last_one(
    tmp_path, arrived
):
    """The next process has the number of the push again if the hub has not got it."""
    second, third = [*steps(1, 20), *pushed(1 + arrived)], [*steps(1, 40), *pushed(2 + arrived)]
    written(tmp_path, 0, [KILLED, second, third])
    there = {1: 10, 2: 10} | ({3: 10} if arrived else {})
    of_hub = facts(
        names={0: "a"},
        steps={0: 20 * len(there)},
        pushes={(0, unit): there for unit in (0, 1)},
        numbers={(0, unit): len(there) for unit in (0, 1)},
        leases=(Lease(0, 0, 60),),
        unused=() if arrived else ((0, 20),),
    )
    accounts = accounts_of(read_positions(tmp_path), of_hub)
    assert accounts.disagreements == []
    assert positions_with(accounts, SampleVerdict.ONCE) == set(range(0 if arrived else 20, 60))


@pytest.mark.parametrize("renumbered", [(), (0,)])
def test_a_hub_that_gives_the_number_of_an_accepted_push_again_has_lost_it(tmp_path, renumbered):
    """Unless its part was lost and founded again, with another journal."""
    again = [*steps(11, 20), opened(1, 20, 2), ("ended", 2, 20), ("stop", 20, "done")]
    written(tmp_path, 0, [[*steps(1, 0), opened(1), ("ended", 1, 10), *again]])
    one = facts(names={0: "a"}, renumbered=renumbered, unused=((40, 60),))
    text = "node 0: push 1 of unit {} was accepted by its records, and its number is given again"
    expected = [text.format(unit) for unit in (0, 1)] if not renumbered else []
    assert accounts_of(read_positions(tmp_path), one).disagreements == expected


def test_records_of_an_earlier_version_have_no_numbers_and_do_not_disagree(tmp_path):
    written(tmp_path, 0, [[*steps(1, 0), ("opened", 1, 10, (0, 1))]])
    one = facts(names={0: "a"}, steps={0: 20}, unused=((0, 60),))
    accounts = accounts_of(read_positions(tmp_path), one)
    assert accounts.disagreements == []
    assert accounts.reason(3) == "its node ended before an answer, and has not recorded its number"


def test_samples_of_an_accepted_push_that_go_back_are_trained_twice(tmp_path):
    """Node a is killed after its push was accepted and before its heartbeat: b gets its samples again."""
    written(tmp_path, 0, [KILLED])
    written(tmp_path, 1, [[*steps(1, 0), *PUSHED]])
    again = facts(leases=(Lease(0, 0, 20), Lease(1, 0, 20)), watermark=20, unused=())
    accounts = accounts_of(read_positions(tmp_path), again)
    assert accounts.disagreements == []
    assert positions_with(accounts, SampleVerdict.TWICE) == set(range(20))
    assert accounts.leased.tolist() == [2] * 20
    not_yet = facts(leases=(Lease(0, 0, 20),), watermark=20, unused=((0, 20),), names={0: "a"}, steps={0: 20})
    written(tmp_path / "other", 0, [KILLED])
    assert accounts_of(read_positions(tmp_path / "other"), not_yet).unreported == 20


def test_steps_of_a_refused_push_are_in_the_next_one(tmp_path):
    second = [opened(2, 20, 2), ("ended", 2, 21), ("stop", 20, "done")]
    refused = PositionLog.ended
    folder = tmp_path / "nodes" / "0"
    folder.mkdir(parents=True)
    log = PositionLog(folder)
    log.start(attempt=1, node=0, kind="text", step=0, units=[[0, 2]], leases=True, warmup=0)
    for name, *arguments in [*steps(1, 0), opened(1)]:
        getattr(log, name)(*arguments)
    refused(log, 1, 11, refused=(0, 1))
    for name, *arguments in [*steps(11, 20), *second]:
        getattr(log, name)(*arguments)
    log.close()
    one = facts(
        names={0: "a"},
        steps={0: 40},
        numbers={(0, 0): 2, (0, 1): 2},
        pushes={(0, unit): {2: 20} for unit in (0, 1)},
    )
    accounts = accounts_of(read_positions(tmp_path), one)
    assert accounts.disagreements == []
    assert positions_with(accounts, SampleVerdict.ONCE) == set(range(40))
    assert {piece.round for piece in accounts.pieces} == {2}


def test_a_node_whose_records_are_on_another_machine_is_said_to_be_elsewhere(tmp_path):
    written(tmp_path, 0, [[*steps(1, 0), *PUSHED]])
    accounts = accounts_of(read_positions(tmp_path), facts())
    assert accounts.disagreements == []
    assert positions_with(accounts, SampleVerdict.ELSEWHERE) == set(range(20, 40))


# -- bias


def test_a_random_choice_is_no_bias_and_a_choice_by_length_is_one():
    chance = np.random.default_rng(0)
    values = chance.gamma(2.0, 10.0, 400)
    p = [_compared("length", values, chance.permutation(400) < 150).p for _ in range(300)]
    assert 0.02 <= np.mean(np.array(p) < 0.05) <= 0.09
    assert 0.4 <= np.mean(np.array(p) < 0.5) <= 0.6
    short = values <= np.sort(values)[149]
    assert _compared("length", values, short).p < 1e-6


# -- the command


@pytest.fixture
def run_dir(tmp_path):
    """Return the directory of a run of two nodes without a hub's folder."""
    directory = tmp_path / "run"
    written(directory, 0, [[*steps(1, 0), *PUSHED]])
    written(directory, 1, [[*steps(1, 30), *PUSHED]])
    (directory / "run.toml").write_text('name = "run"\n')
    return directory


def test_the_files_have_a_row_for_every_position_and_are_equal(run_dir, tmp_path, capsys):
    assert (
        main(["ledger", str(run_dir), "--csv", f"{tmp_path}/a.csv", "--parquet", f"{tmp_path}/a.parquet"])
        == 0
    )
    out = capsys.readouterr().out
    assert "40 positions drawn: 40 trained once" in out
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    covered = [p for row in rows for p in range(int(row["start"]), int(row["end"]))]
    assert covered == list(range(50))
    verdicts = {row["verdict"] for row in rows if int(row["start"]) in range(20, 30)}
    assert verdicts == {"never"}
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in table] == rows


def test_the_files_are_written_also_for_a_reader_that_ends_early(run_dir, tmp_path):
    files = ["--csv", tmp_path / "a", "--parquet", tmp_path / "b"]
    words = [sys.executable, "-m", "aedit", "ledger", run_dir, *files]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read()
        assert (process.wait(120), said) == (0, b"")
    assert (tmp_path / "a").stat().st_size > 0
    assert (tmp_path / "b").stat().st_size > 0


def test_a_sample_that_was_trained_twice_is_exit_code_1(run_dir, capsys):
    shutil.rmtree(run_dir / "nodes" / "1")
    written(run_dir, 1, [[*steps(1, 10), *PUSHED]])
    assert main(["ledger", str(run_dir)]) == 1
    assert "10 trained twice" in capsys.readouterr().out


def _cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def _change(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_cut, "is no record of positions (it is cut off)"),
        (lambda path: path.write_text(""), "no records of positions"),
        (lambda path: path.write_bytes(b"\xff\xfe\n"), "line 1 is no record"),
        (lambda path: path.write_text("[" * 100_000 + "\n"), "line 1 is no record"),
        (_change('"event": "trained", ', ""), "'event' is missing"),
        (_change('"trained"', '"lost and found"'), "event is 'lost and found'"),
        (_change('"node": 0', '"node": 3'), "the directory is that of node 0"),
        (_change('"from": 1', '"from": -1'), "'-1' is no whole number"),
        (_change("[[0, 20]]", "[[0, 1000000000000]]"), "'1000000000000' is no whole number"),
        (_change("[[0, 20]]", "[[20, 0]]"), "[20, 0] is no range"),
        (_change("[[0, 20]]", "[[0, 20, 0]]"), "is no range"),
        (_change("[[0, 20]]", "7"), "line 2 is no record"),
        (_change('"kind": "text"', '"kind": "images"'), "kind is 'images'"),
        (_change('"kind": "text"', '"kind": "rl"'), "mixes two runs"),
        (lambda path: path.unlink(), ""),
    ],
)  # fmt: skip
def test_a_broken_directory_is_one_line_and_exit_code_2(run_dir, capsys, spoil, message):
    path = run_dir / "nodes" / "0" / "positions.jsonl"
    spoil(path)
    if not message or "no records" in message:
        shutil.rmtree(run_dir / "nodes" / "1")
    assert main(["ledger", str(run_dir)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert (message or "no records of positions") in captured.err


@pytest.mark.parametrize(
    "make", [lambda path: path.mkdir(), lambda path: None, lambda path: path.write_text("x")]
)
def test_what_is_no_run_is_one_line_and_exit_code_2(tmp_path, capsys, make):
    make(tmp_path / "it")
    assert main(["ledger", str(tmp_path / "it")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_that_cannot_be_written_and_a_missing_library_are_one_line(
    run_dir, tmp_path, capsys, monkeypatch
):
    assert main(["ledger", str(run_dir), "--csv", str(tmp_path / "no" / "a.csv")]) == 2
    assert "is no directory; create it first" in capsys.readouterr().err
    assert main(["ledger", str(run_dir), "--csv", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["ledger", str(run_dir), "--parquet", str(tmp_path / "a.parquet")]) == 2
    assert (
        capsys.readouterr().err
        == "aedit: --parquet: needs pyarrow: pip install 'aedit[datasets]', or use --csv\n"
    )


def test_hostile_names_do_no_harm(run_dir, capsys, tmp_path):
    path = run_dir / "nodes" / "0" / "positions.jsonl"
    path.write_text(path.read_text().replace('"kind"', '"name": "\\u001b[2J\\u202e[red]", "kind"', 1))
    assert main(["ledger", str(run_dir), "--csv", str(tmp_path / "a.csv")]) == 0
    shown = capsys.readouterr().out + (tmp_path / "a.csv").read_text()
    assert "\x1b" not in shown
    assert "[red]" in shown


def test_a_full_disk_costs_records_and_says_so(tmp_path, monkeypatch):
    log = PositionLog(tmp_path)
    log.start(attempt=1, node=0, kind="text", step=0, units=[[0, 1]], leases=False, warmup=0)
    import os

    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
    log.trained(1, [1, 2])
    log.flush()
    monkeypatch.setattr(os, "write", write)
    log.trained(2, [3, 4])
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "positions.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "lost", "trained"]
    folder = tmp_path / "nodes" / "0"
    folder.mkdir(parents=True)
    shutil.move(tmp_path / "positions.jsonl", folder)
    found = accounts_of(read_positions(tmp_path), None).disagreements
    assert any("1 records could not be written" in text for text in found)


def test_random_lines_are_refused_or_accounted_for(tmp_path):
    """A reader of files that others have written raises UserError, or nothing."""
    written(tmp_path, 0, [[*steps(1, 0), *PUSHED]])
    path = tmp_path / "nodes" / "0" / "positions.jsonl"
    lines, chance = path.read_text().splitlines(), random.Random(0)
    values = [None, True, -1, 0, 1 << 70, 1.5, "x", [], [[0]], [[0, 1]], {}, [[0, 1, 2, 3]], float("nan")]
    for _ in range(400):
        line = json.loads(chance.choice(lines))
        line[chance.choice(list(line))] = chance.choice(values)
        at = chance.randrange(len(lines))
        path.write_text("\n".join([*lines[:at], json.dumps(line), *lines[at + 1 :]]) + "\n")
        with contextlib.suppress(UserError):
            accounts_of(read_positions(tmp_path), chance.choice([None, facts()]))


def test_a_run_without_a_hub_has_no_journal(tmp_path):
    assert journal_facts(tmp_path) is None


# -- the journal


def hub_folder(path, batches, run="name = 'run'\n"):
    """Write the journal of a hub."""
    path.mkdir(parents=True)
    (path / "part.json").write_text("[0, 1]")
    (path / "run.toml").write_text(run)
    journal = Journal(path, 1, fsync=False)
    for batch in batches:
        found = []
        for record in batch:
            if isinstance(record, Accepted):
                values = codec("fp32").encode(np.zeros(4, np.float32))
                data = memoryview(np.frombuffer(bytes(values), np.uint8))
                place = journal.store(data)
                payload = Payload("fp32", 4, crc32(data), *place, data.nbytes)
                record = Accepted(replace(record.push, values=payload))
            found.append(record)
        journal.append(encode_records(found))
    return journal


def push(unit, seq, steps, base=1):
    return Accepted(
        Push(node=0, unit=unit, seq=seq, base=base, steps=steps, tokens=0, values=None, norms=(0.0,))
    )


LAYOUT = Layout(tuple(UnitLayout(f"u{i}", (TensorLayout("w", (4,)),)) for i in range(2)))
BEGUN = [
    [Led(1), Founded(LAYOUT, (), 1000), Joined("a", 0, 7, "", 0.0, 3)],
    [push(0, 1, 0, base=0), push(1, 1, 0, base=0), Leased(0, 0, 40)],
]
PUSHES = [[push(0, 2, 10), push(1, 2, 10)]]


def test_a_push_that_a_dead_hub_had_accepted_counts_if_its_successor_has_it(tmp_path):
    written(tmp_path, 0, [[*steps(1, 0), opened(2)]])
    (tmp_path / "run.toml").write_text("")
    hub_folder(tmp_path / "hub", [*BEGUN, *PUSHES])
    accounts = read_accounts(tmp_path)
    assert accounts.disagreements == []
    assert positions_with(accounts, SampleVerdict.ONCE) == set(range(20))
    assert accounts.leased_to[:40].tolist() == [0] * 40
    # The standby has led since, without the push: nothing of it was acknowledged.
    hub_folder(tmp_path / "standby", [*BEGUN, [Led(2)]])
    accounts = read_accounts(tmp_path)
    assert accounts.disagreements == []
    assert positions_with(accounts, SampleVerdict.NOT_COUNTED) == set(range(20))
    assert accounts.reason(0) == "its push did not reach the hub"
    shutil.rmtree(tmp_path / "standby")
    hub_folder(tmp_path / "standby", [*BEGUN, *PUSHES, [Led(2)]])
    assert read_accounts(tmp_path).count(SampleVerdict.ONCE) == 20


def test_a_journal_that_is_damaged_before_its_end_is_one_line_and_one_that_is_being_written_is_none(
    tmp_path, capsys
):
    written(tmp_path, 0, [[*steps(1, 0), *pushed(2)]])
    (tmp_path / "run.toml").write_text("")
    journal = hub_folder(tmp_path / "hub", [*BEGUN, *PUSHES])
    path = journal.file.path
    whole = path.read_bytes()
    path.write_bytes(whole + b"half a frame")
    assert read_accounts(tmp_path).disagreements == []
    path.write_bytes(whole)
    journal.rotate()
    broken = bytearray(whole)
    broken[-10] ^= 1
    path.write_bytes(broken)
    assert main(["ledger", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "restore the folder" in error


def kept_by_snapshots(folder, journal, records):
    """Write two snapshots of the state after these records, so that the segments before are deleted."""
    state = HubState()
    for record in (record for batch in records for record in batch):
        if isinstance(record, Accepted):
            state.changing(0).accept(record.push)
        else:
            state.apply(record)
        state.units = {}
    for _ in range(2):
        Ledger(SimpleNamespace(state=state), journal, Store(folder, fsync=False)).snapshot()
    assert not (folder / "journal-00000001").exists()


@pytest.mark.parametrize("folder", ["hub", "peers/y/part_0"])
def test_what_a_pruned_journal_does_not_have_is_in_the_records_of_the_nodes(tmp_path, folder):
    """The node was killed twice, once with a push that had arrived; then a snapshot deleted the journal.

    Found in a swarm: no file of events tells of the joins, as the disk of the owner was full, or its folder
    was put back older. The ledger took the push for one that had not arrived.
    """
    second, third = [*steps(1, 20), opened(3)], [*steps(1, 40), *pushed(3)]
    written(tmp_path, 0, [[*steps(1, 0), opened(2)], second, third])
    (tmp_path / "run.toml").write_text("")
    joins = [Joined("a", 0, 9, "", 1.0, 4), Joined("a", 0, 11, "", 2.0, 5)]
    records = [
        *BEGUN,
        *PUSHES,
        [Led(2)],
        [joins[0]],
        [joins[1], Leased(0, 40, 80)],
        [push(0, 3, 10), push(1, 3, 10)],
    ]
    journal = hub_folder(tmp_path / folder, records)
    for pruned in (False, True):
        if pruned:
            kept_by_snapshots(tmp_path / folder, journal, records)
        assert not (tmp_path / folder / "events.jsonl").exists()
        accounts = read_accounts(tmp_path)
        assert accounts.disagreements == []
        found = accounts.verdict.reshape(-1, 20)[:3] == SampleVerdict.ONCE
        assert found.sum(axis=1).tolist() == [20, 0, 20]
        assert accounts.reason(25) == "its push did not reach the hub"


def test_a_snapshot_says_whether_the_newest_push_of_a_killed_node_was_refused(tmp_path):
    written(tmp_path, 0, [[*steps(1, 0), opened(2)]])
    (tmp_path / "run.toml").write_text("")
    refused = [Refused(0, unit, 2, "norm: too long", True, True) for unit in (0, 1)]
    journal = hub_folder(tmp_path / "hub", records := [*BEGUN, refused])
    kept_by_snapshots(tmp_path / "hub", journal, records)
    accounts = read_accounts(tmp_path)
    assert accounts.disagreements == []
    assert accounts.reason(0) == "its push was distrusted"


@pytest.mark.parametrize("is_refused", [True, False])
def test_the_steps_at_the_hub_say_whether_a_push_before_its_journal_was_refused(tmp_path, is_refused):
    """Found: it counted, as no record of its refusal is left, and its samples seemed to be trained twice."""
    killed = [[*steps(1, 0), opened(2)], [*steps(1, 40), opened(4)]]
    written(tmp_path, 0, [killed[0], [*steps(1, 20), *pushed(3)], killed[1]])
    (tmp_path / "run.toml").write_text("")
    refused, newest = ([Refused(0, unit, seq, "stale: x", False, False) for unit in (0, 1)] for seq in (2, 4))
    joined = [Joined("a", 0, 9, "", 1.0, 4), Leased(0, 40, 60)]
    again = [joined, [push(0, 3, 10), push(1, 3, 10)], newest]
    records = [*BEGUN, *([refused] if is_refused else PUSHES), *again]
    kept_by_snapshots(tmp_path / "hub", hub_folder(tmp_path / "hub", records), records)
    accounts = read_accounts(tmp_path)
    assert accounts.disagreements == []
    assert positions_with(accounts, SampleVerdict.ONCE) == set(range(20 * is_refused, 40))
    assert (accounts.reason(0) == "its push was refused") == is_refused


def test_pushes_of_a_node_that_the_hub_has_forgotten_are_not_those_of_the_next_one_with_its_index(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("aedit.async_sgd.hub.state.KEPT_MEMBERS", 0)
    written(tmp_path, 1, [[*steps(1, 0), *pushed(1)]])
    (tmp_path / "run.toml").write_text("")
    of_one = [Accepted(replace(each.push, node=1)) for each in (push(0, 1, 10), push(1, 1, 10))]
    before = [
        Joined("b", 1, 8, "", 0.5, 4),
        *(Refused(1, unit, 1, "stale: x", False, False) for unit in (0, 1)),
    ]
    now = [Left(1, "bye"), Joined("c", 1, 9, "", 1.0, 5), Leased(1, 40, 80)]
    hub_folder(tmp_path / "hub", [*BEGUN, before, now, of_one])
    found = journal_facts(tmp_path)
    assert found.names == {0: "a", 1: "c"}
    assert found.pushes == {(1, 0): {1: 10}, (1, 1): {1: 10}}
    assert (found.refusals, found.renumbered) == ({}, {1})
