"""Tests that a part of a swarm is founded again when all its replicas are lost for good: real processes."""

import json
from contextlib import ExitStack

import numpy as np
import pytest
from kit.agents import node, order, plan
from kit.swarm_processes import swarm
from kit.waiting import until

from aedit.proto.agent import replicas_of_parts
from aedit.types import Verdict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LIMIT_S = 480.0
FLAGS = ("--swarm.lease_s=30", "--swarm.lost_s=60", "--hub.expire_s=60")
"""On a busy machine a peer is silent for seconds: replicas would move all the time, or count as lost. A push
waits for that of the other node for a minute before it is merged alone."""
CALLS = {"call_timeout_s": 10.0, "expire_s": 60.0}


def push(links, unit, seq, base):
    """Let all nodes push, and return the answers."""
    for link in links:
        order(link, unit, seq, 0.5, base)
    return [until(lambda one=one: one.answer(unit, seq), f"push {seq}", LIMIT_S) for one in links]


def nodes(stack, file):
    """Return two nodes that have not joined, with what the peer of a machine writes for them."""
    addresses = replicas_of_parts(file, 60.0)
    plans = [plan(addresses, name=name, run="run", replicas=str(file), **CALLS) for name in "ab"]
    return [stack.enter_context(node(one)) for one in plans]


def keepers(stack, made):
    """Return the numbers of the peers that keep part 0, once nodes have joined and left, and none is surplus.

    Before a node breaks ties there is no configuration of two replicas, and a third peer keeps its own.
    """

    def numbers():
        return [int(folder.parent.name.removeprefix("peer-")) for folder in made.replicas(0)]

    links = nodes(stack, made.folder_of(0) / "replicas.json")
    assert [link.join(LIMIT_S) for link in links] == [(1, 1), (1, 1)]
    until(made.settled, "all replicas of each part", LIMIT_S)
    until(lambda: len(numbers()) == made.copies, "no other replicas", LIMIT_S)
    for link in links:
        link.leave(LIMIT_S)
    return numbers()


@pytest.mark.parametrize("copies", [2, 3])
def test_a_part_goes_on_from_the_newest_anchor_when_its_replicas_are_lost_for_good(tmp_path, copies):
    """All of two copies, or of three copies so many that the last one cannot be elected."""
    with ExitStack() as stack:
        made = stack.enter_context(swarm(tmp_path, peers=5, parts=2, copies=copies, flags=FLAGS))
        lost = keepers(stack, made)[:2]
        file = made.folder_of(next(number for number in range(5) if number not in lost)) / "replicas.json"
        links = nodes(stack, file)
        assert len([link.join(LIMIT_S) for link in links]) == 2
        for seq in (1, 2):
            assert {(a.verdict, a.version) for a in push(links, 0, seq, seq)} == {(Verdict.MERGED, seq + 1)}
        newest = links[0].anchors[0].copy()
        late = lost[0]
        made.kill(late)
        made.lose(lost[1])
        answers = push(links, 0, 3, 3)
        assert {answer.verdict for answer in answers} == {Verdict.REFUSED}, "their nodes keep them"
        assert all(np.array_equal(link.anchors[0], newest) for link in links)
        assert {answer.version for answer in answers} == {1}
        after = push(links, 0, 4, 1)
        assert {(answer.verdict, answer.version) for answer in after} == {(Verdict.MERGED, 2)}
        assert np.array_equal(links[0].anchors[0], links[1].anchors[0])
        assert not np.array_equal(links[0].anchors[0], newest)
        live = [made.folder_of(number) for number in range(5) if number not in lost]
        found = [json.loads((folder / "foundings.json").read_text())["0"] for folder in live]
        assert {(one["accepted"], one["founder"]) for one in found} == {(1, found[0]["founder"])}
        assert sum(one["begun"] for one in found) == 1
        events = [line for path in tmp_path.glob("peers/*/part_0/events.jsonl") for line in path.open()]
        told = [json.loads(line) for line in events if json.loads(line)["event"] == "goes_on_from"]
        assert [(one["unit"], one["version"]) for one in told] == [(0, 3)]
        # A replica that was given up for lost comes back: it is kept aside, and the part goes on without it.
        made.again(late)
        aside = made.folder_of(late) / "lost_part_0_1" / "part.json"
        until(aside.exists, "the old replica to be kept aside", LIMIT_S)
        assert {one.verdict for one in push(links, 0, 5, 2)} == {Verdict.MERGED}


def test_a_person_founds_a_part_when_most_peers_are_gone_for_good(tmp_path):
    """Two of five are left, with the nodes: one more peer founds the part, once, and old ones follow it.

    It would not while the part has an owner.
    """
    with ExitStack() as stack:
        made = stack.enter_context(swarm(tmp_path, peers=5, parts=2, copies=2, flags=FLAGS))
        late, gone = keepers(stack, made)
        third, *left = (number for number in range(5) if number not in (late, gone))
        links = nodes(stack, made.folder_of(left[0]) / "replicas.json")
        assert len([link.join(LIMIT_S) for link in links]) == 2
        assert {(a.verdict, a.version) for a in push(links, 0, 1, 1)} == {(Verdict.MERGED, 2)}
        newest = links[0].anchors[0].copy()
        refused = made.add("--force-found=0")
        assert made.processes[refused].wait(LIMIT_S) == 2
        said = (made.folder_of(refused) / "output.log").read_text()
        assert "aedit: --force-found: part 0 is owned by peer-" in said
        made.kill(late), made.kill(third), made.lose(gone)

        def registers(*numbers):
            texts = [(made.folder_of(number) / "foundings.json").read_text() for number in numbers]
            return [json.loads(text)["0"] for text in texts]

        until(lambda: all(one["generation"] for one in registers(*left)), "votes of the two", LIMIT_S)
        assert {one["accepted"] for one in registers(*left)} == {0}
        founder = made.add("--force-found=0")
        answers = push(links, 0, 2, 2)
        assert {(answer.verdict, answer.version) for answer in answers} == {(Verdict.REFUSED, 1)}
        assert all(np.array_equal(link.anchors[0], newest) for link in links)
        assert {(a.verdict, a.version) for a in push(links, 0, 3, 1)} == {(Verdict.MERGED, 2)}
        found = [(one["accepted"], one["founder"]) for one in registers(founder, *left)]
        assert len(set(found)) == 1
        assert [one["begun"] for one in registers(founder, *left)] == [found[0][0], 0, 0]
        told = (made.folder_of(founder) / "output.log").read_text()
        assert f"--force-found: part 0 is founded here in generation {found[0][0]}, without a vote" in told
        # The command again, as a supervisor gives it.
        made.kill(founder)
        made.again(founder)
        # Of the old part come back its owner or follower, and one that has only known it.
        made.again(late), made.again(third)
        until((made.folder_of(late) / "lost_part_0_1" / "part.json").exists, "the old replica aside", LIMIT_S)
        assert {one.verdict for one in push(links, 0, 4, 2)} == {Verdict.MERGED}
        until(
            lambda: len({one["founder"] for one in registers(*left, founder, late, third)}) == 1,
            "all",
            LIMIT_S,
        )
        assert [(one["accepted"], one["founder"]) for one in registers(founder, *left)] == found
        assert (
            "was founded here by force before; not again"
            in (made.folder_of(founder) / "output.log").read_text()
        )
        assert not list(made.folder_of(founder).glob("lost_part_0_*"))
