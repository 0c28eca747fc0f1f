"""Tests failover on real hub processes: no acknowledged push is lost, and no term has two leaders."""

import signal
import time
from contextlib import contextmanager, suppress

import pytest
from kit.hub_processes import Client, HubProcess, HubRefused, HubUnreachable, ending, status
from kit.waiting import until
from test_standby import STANDBY, attached, pair, voting

from aedit.launch.hub.folder import pushes_of

TWO = 'standby = "127.0.0.1:0,127.0.0.1:0"'


@contextmanager
def stopped(*hubs):
    """Suspend hub processes, as a machine does that is swapping or cut off."""
    for hub in hubs:
        hub.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for hub in hubs:
            hub.process.send_signal(signal.SIGCONT)


def pushes(directory):
    return {(push.node, push.unit, push.seq) for push in pushes_of(directory)}


def leads(address):
    """Return whether a node could join there."""
    client = Client(address, "curious")
    try:
        client.join()
    except (HubRefused, HubUnreachable):
        return False
    finally:
        client.hub.close()
    return True


def elected(nodes, *hubs):
    """Let nodes offer their votes to the hubs in turn until one leads; return that one."""

    def look():
        for hub in hubs:
            for node in nodes:
                with suppress(HubRefused, HubUnreachable):
                    if node.vote(hub.address).leads and all(n.vote(hub.address).leads for n in nodes):
                        return hub
        time.sleep(0.05)
        return None

    return until(look, "a leader")


@pytest.mark.slow
def test_a_standby_that_was_not_waited_for_does_not_lead(tmp_path):
    """It lacks pushes that were acknowledged while it was stopped."""
    _, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        attached(node)
        with stopped(standby):
            with voting(node):
                assert node.push(0).accepted
            until(lambda: primary.events("standby_lost"), "the event")
            assert node.push(1).accepted
            primary.kill()
        assert not pushes(standby.directory) >= set(node.accepted)
        for _ in range(3):
            assert not node.vote(standby.address).leads
        standby.kill()
        forced = HubProcess(tmp_path / "run.toml", standby.directory, "--standby", "--force-lead")
        assert leads(forced.address)
        assert node.go_to(forced.address).term > 1000
        assert "does not answer" in forced.log.read_text()


@pytest.mark.slow
def test_of_two_standbys_one_leads_and_the_other_follows_it(tmp_path):
    """Both are asked at once, again and again, and no term has two leaders."""
    toml, primary, first = pair(tmp_path, TWO)
    second = HubProcess(toml, tmp_path / "run" / "standby_2", "--standby", "--standby-number", "2")
    with ending():
        nodes = [Client(primary.address).found(), Client(primary.address, "b")]
        nodes[1].join()
        until(lambda: nodes[0].status()["in_sync"] == 2, "both standbys")
        for node in nodes:
            node.merged(0)
        primary.kill()
        leader = elected(nodes, first, second)
        other = second if leader is first else first
        assert not leads(other.address)
        for node in nodes:
            node.go_to(leader.address)
            node.merged(0)
        until(lambda: nodes[0].status()["in_sync"] == 1, "the other standby")
        assert status(other.address)["follows"] == leader.address
        leader.kill()
        assert elected(nodes, other) is other
        for node in nodes:
            node.go_to(other.address)
            node.merged(0)
        kept = pushes(other.directory)
        terms = [{event["term"] for event in hub.events("lead")} for hub in (primary, first, second)]
    assert kept >= {one for node in nodes for one in node.accepted}
    assert not any(one & two for one in terms for two in terms if one is not two)


def test_a_single_hub_asks_nobody(tmp_path):
    toml, primary, standby = pair(tmp_path)
    with ending():
        standby.kill()
        node = Client(primary.address).found()
        node.merged(0)
        primary.kill()
        again = HubProcess(toml, primary.directory)
        assert node.go_to(again.address).term == 2
        node.merged(0)
    assert STANDBY in toml.read_text()
