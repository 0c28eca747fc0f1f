"""Tests that nodes go on when the hub of their units is lost with its disk and is founded again."""

import hashlib
import json
import shutil
from contextlib import ExitStack
from itertools import pairwise

import numpy as np
from kit.agents import exchange, node, order, plan
from kit.leading_hub import leading_hub
from kit.waiting import until

from aedit.proto.agent import Progress
from aedit.proto.rpc import last_term_before
from aedit.types import Verdict

FIRST = [np.arange(size, dtype=np.float32) + 100 * unit for unit, size in enumerate((22, 5000))]
DIGESTS = [hashlib.sha256(anchor.tobytes()).hexdigest() for anchor in FIRST]
MORE = f"""
quorum = 1
grace = 0.0
heartbeat_s = 0.05
push_filter = {{ threshold = 1e9, cosine = false }}
anchors_sha256 = {DIGESTS}
"""
"""The first anchors of the run are named; those that nodes bring later are others."""
AGAIN = last_term_before(1, b"k" * 32)


def hub_at(folder, address="", **changes):
    """Return a context with a hub that leads, at the address of an earlier one."""
    (folder / "hub").mkdir(parents=True)
    if address:
        (folder / "hub" / "address").write_text(address)
    return leading_hub(folder, MORE, **changes)


def nodes(stack, address, names="ab"):
    links = [stack.enter_context(node(plan([address], name=name, run="run"))) for name in names]
    return links, [link.join(20.0) for link in links]


def all_have_told(hub, count):
    """Wait until so many nodes have said what they have, and let the hub decide."""
    found = hub.leading.ledger.hub.recovery_anchors
    until(lambda: len(found._stamps) == count, "all nodes")
    found._gather_s = 0.0


def events(folder, name):
    lines = (folder / "hub" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def lost(tmp_path, stack, address_of):
    """Lose a hub whose node `a` has version 3 of unit 0, and `b` version 1; return what `a` has of it."""
    with hub_at(tmp_path / "one") as hub:
        address_of.append(hub.address)
        (a, b), _ = nodes(stack, hub.address)
        for seq in (1, 2):
            answer = exchange(a, 0, seq, 0.5, seq)
            assert (answer.version, answer.verdict) == (seq + 1, Verdict.MERGED)
        newest = a.anchors[0].copy()
        assert not np.array_equal(b.anchors[0], newest)
    shutil.rmtree(tmp_path / "one")
    return a, b, newest


def test_a_part_that_was_lost_goes_on_from_the_newest_anchor_of_any_node(tmp_path):
    address = []
    with ExitStack() as stack:
        a, b, newest = lost(tmp_path, stack, address)
        order(b, 0, 1, 0.25, 1)  # on its way while there is no hub
        with hub_at(tmp_path / "two", address[0], above=AGAIN) as hub:
            all_have_told(hub, 2)
            first = until(lambda: b.answer(0, 1), "the answer to a push that was measured from the old part")
            assert first.verdict == Verdict.REFUSED, "its node keeps it"
            assert np.array_equal(b.anchors[0], newest)
            assert hub.leading.ledger.hub.state.term == AGAIN + 1
            until(lambda: len(events(tmp_path / "two", "goes_on_from")) == 2, "both units")
            told = {e["unit"]: (e["version"], e["name"]) for e in events(tmp_path / "two", "goes_on_from")}
            assert (told[0], told[1][0]) == ((3, "a"), 1)
            # The one that has brought it measures anew, too: its trainer has an old number.
            assert exchange(a, 0, 3, 0.125, 3).verdict == Verdict.REFUSED
            answers = [exchange(a, 0, 4, 0.5, 1), exchange(b, 0, 2, 0.5, 1)]
            assert {answer.verdict for answer in answers} == {Verdict.MERGED}
            until(lambda: hub.leading.ledger.hub.state.units[0].version == 3, "both are merged")
            last = exchange(a, 0, 5, 0.0, answers[0].version)
            assert np.array_equal(a.anchors[0], hub.leading.ledger.hub.anchor(0)[1])
            assert last.verdict == Verdict.MERGED


def test_the_one_with_the_newest_anchor_need_not_be_the_first_to_come(tmp_path):
    address = []
    with ExitStack() as stack:
        _, _, newest = lost(tmp_path, stack, address)
        with hub_at(tmp_path / "two", address[0], above=AGAIN) as hub:
            all_have_told(hub, 2)
            until(lambda: hub.leading.ledger.hub.state.is_founded, "a first anchor of each unit")
            assert np.array_equal(hub.leading.ledger.hub.anchor(0)[1], newest)
            late, versions = nodes(stack, hub.address, "c")
            assert versions == [(1, 1)]
            assert np.array_equal(late[0].anchors[0], newest)


def test_later_versions_that_nobody_has_are_named_by_the_nodes_that_were_told_of_them(tmp_path, caplog):
    """Found: nobody said how much was lost with the part."""
    with ExitStack() as stack:
        with hub_at(tmp_path / "one") as hub:
            address = hub.address
            (a, b), _ = nodes(stack, address)
            for seq in (1, 2):
                assert exchange(a, 0, seq, 0.5, seq).version == seq + 1
            seen, before = hub.leading.ledger.hub.clocks.seen, 0.0
            for _ in range(2):  # the second heartbeat shows that the answer to the one before has come
                before = until(lambda t=before: (now := seen[b.node]) > t and now, "a heartbeat")
            a.leave(10.0)
        shutil.rmtree(tmp_path / "one")
        with hub_at(tmp_path / "two", address, above=AGAIN) as hub:
            all_have_told(hub, 1)
            until(lambda: len(events(tmp_path / "two", "goes_on_from")) == 2, "both units")
            found = {e["unit"]: (e["version"], e["lost"]) for e in events(tmp_path / "two", "goes_on_from")}
    assert found == {0: (1, [["b", 2]]), 1: (1, [])}
    assert "unit 0: nodes were told of later versions, which are lost: b of 2" in caplog.messages


def test_samples_that_were_handed_out_are_handed_out_to_nobody_else(tmp_path):
    with ExitStack() as stack:
        with hub_at(tmp_path / "one") as hub:
            address = hub.address
            made = [plan([address], name=name, run="run", samples_per_step=1) for name in "ab"]
            links = [stack.enter_context(node(one)) for one in made]
            assert [link.join(20.0) for link in links] == [(1, 1), (1, 1)]
            until(lambda: all(link.leases() for link in links), "leases")
            before = [list(link.leases()) for link in links]
        with hub_at(tmp_path / "two", address, above=AGAIN) as hub:
            all_have_told(hub, 2)
            until(lambda: hub.leading.ledger.hub.state.is_founded, "a first anchor of each unit")
            for link in links:  # enough to want more
                link.tell(Progress(steps=30, tokens=300, used=30, drawn=30))
            until(
                lambda: all(len(link.leases()) > len(old) for link, old in zip(links, before, strict=True)),
                "more",
            )
            blocks = sorted(block for link in links for block in link.leases())
            assert all(end <= start for (_, end), (start, _) in pairwise(blocks)), blocks
