"""Tests that two replicas that were started from copies of one folder are noticed, and only one counts."""

import json
import shutil
from types import SimpleNamespace

import grpc
import pytest
from kit.hub_processes import Client, HubProcess, HubRefused, ending, hello, status, write_run
from kit.swarm import key_of
from kit.waiting import until

from aedit.launch.hub.standby import Confirmer
from aedit.launch.records.hub_records import HubSample
from aedit.launch.views.tables import hub_table
from aedit.proto.rpc import HubUnreachable, PortClosed, Proposal, identity_of, proposal_out
from aedit.proto.rpc import hub_pb2 as pb

LIMIT_S = 60.0


def test_a_standby_of_a_copied_folder_is_named_on_both_sides_and_does_not_count(tmp_path):
    toml = write_run(tmp_path, 'standby = "127.0.0.1:0"')
    primary = HubProcess(toml, tmp_path / "run" / "hub")
    with ending():
        node = Client(primary.address).found()
        standby = HubProcess(toml, tmp_path / "run" / "standby", "--standby")
        until(lambda: node.status()["in_sync"] == 1, "the standby", LIMIT_S)
        node.merged(0)
        copied = tmp_path / "run" / "copied"
        shutil.copytree(standby.directory, copied)
        (copied / "address").unlink()
        twin = HubProcess(toml, copied, "--standby")
        said = until(lambda: status(twin.address)["twins"], "the twin to be refused", LIMIT_S)
        assert f"{twin.address} and {standby.address} are one replica" in said[0]
        assert "delete votes.json in its folder" in said[0]
        assert "\n" not in said[0]
        told = until(lambda: node.status()["twins"], "the leader to say so", LIMIT_S)
        assert told == [f"{twin.address} and {standby.address}"]
        until(lambda: primary.events("twin"), "the event", LIMIT_S)
        assert [one["addresses"] for one in primary.events("twin")] == [[standby.address, twin.address]]
        shown = " ".join(map(str, hub_table(HubSample.of(status(twin.address)))))
        assert f"started from copies of one folder: {said[0]}" in shown
        key = key_of(9)
        asked = proposal_out(Proposal(2, 0, identity_of(key.public), (9, 9), (9, 9, 9)), key)
        with pytest.raises(HubRefused, match=r"no vote: .* are one replica"):
            Client(twin.address).hub.propose(pb.ProposeRequest(run="run", proposal=asked))
        assert not hello(twin.address).HasField("promise"), "none that starts leaves the votes to it"
        assert hello(standby.address).HasField("promise")
        before = json.loads((standby.directory / "votes.json").read_text())["me"]
        assert node.push(1).accepted, "the standby that was there first counts"
        assert node.status()["in_sync"] == 1
        twin.kill()
        (copied / "votes.json").unlink()
        again = HubProcess(toml, copied, "--standby")
        until(lambda: status(again.address)["follows"], "it to follow", LIMIT_S)
        assert json.loads((copied / "votes.json").read_text())["me"] != before


def test_a_hub_of_a_copied_folder_does_not_lead_the_term_of_the_other(tmp_path):
    """Found: both led one term, with one identity."""
    toml = write_run(tmp_path, 'standby = "127.0.0.1:0"')
    primary = HubProcess(toml, tmp_path / "run" / "hub")
    with ending():
        node = Client(primary.address).found()
        node.merged(0)
        copied = tmp_path / "run" / "standby"
        shutil.copytree(primary.directory, copied)
        (copied / "address").unlink()
        twin = HubProcess(toml, copied, "--standby")
        assert twin.process.wait(LIMIT_S) == 2
        said = twin.log.read_text().strip().splitlines()[-1]
        assert f"{primary.address} leads this run under term 1" in said
        assert "Delete votes.json" in said
        (copied / "votes.json").unlink()
        again = HubProcess(toml, copied, "--standby")
        until(lambda: node.status()["in_sync"] == 1, "it to follow as another standby", LIMIT_S)
        assert status(again.address)["follows"] == primary.address


def test_a_copy_of_a_standby_gives_no_vote_while_no_hub_leads(tmp_path):
    """Found in simulation: two copies of one register voted for two hubs in one term."""
    toml = write_run(tmp_path, 'standby = "127.0.0.1:0,127.0.0.1:0"')
    primary = HubProcess(toml, tmp_path / "run" / "hub")
    with ending():
        node = Client(primary.address).found()
        standby = HubProcess(toml, tmp_path / "run" / "standby", "--standby")
        until(lambda: node.status()["in_sync"] == 1, "the standby", LIMIT_S)
        primary.kill()
        copied = tmp_path / "run" / "standby_2"
        shutil.copytree(standby.directory, copied)
        (copied / "address").unlink()
        twin = HubProcess(toml, copied, "--standby", "--standby-number", "2")
        assert f"{twin.address} and {standby.address} are one replica" in status(twin.address)["twins"][0]
        key = key_of(9)
        asked = proposal_out(Proposal(2, 0, identity_of(key.public), (9, 9), (9, 9, 9)), key)
        with pytest.raises(HubRefused, match=r"no vote: .* are one replica"):
            Client(twin.address).hub.propose(pb.ProposeRequest(run="run", proposal=asked))


@pytest.mark.parametrize(
    ("answer", "votes"),
    [
        (pb.HelloReply(promise=pb.Answer(voter=7)), False),
        (pb.HelloReply(promise=pb.Answer(voter=8)), True),
        (pb.HelloReply(), True),
        (PortClosed("b:1"), True),
        (HubUnreachable("b:1"), False),
        (None, False),
    ],
)
def test_a_hub_votes_again_once_the_other_process_of_its_identity_has_ended_or_gives_no_vote(answer, votes):
    """Found in simulation: each of two left the votes to the other, and no hub could be elected."""
    made = Confirmer(None, SimpleNamespace(identity=7), None, lambda: 0.0)
    made.twin, made.twin_at = "b:1 and a:1 are one replica", "b:1"
    made.take_hellos({"b:1": answer, "c:1": pb.HelloReply()} if answer else {"c:1": pb.HelloReply()})
    assert (not made.twin) == votes
    refused = HubRefused(grpc.StatusCode.ALREADY_EXISTS, "a:1 and b:1 are one replica")
    made.answered(refused)
    made.take_hellos({"b:1": pb.HelloReply()})
    assert made.twin, "a leader that counts the other one has decided"
