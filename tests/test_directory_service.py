"""Tests the directory of a real hub: who may say what, and bans that survive the hub and its standby."""

import json

import grpc
import pytest
from kit.hub_processes import Client, HubProcess, HubRefused, ending, status, until, write_run
from kit.servers import Announcer

from aedit.launch.cli.keys import make_keys
from aedit.proto.rpc import DirectoryClient, HubClient, client_keys, make_accusation
from aedit.proto.rpc import directory_pb2 as pb

KEY = b"k" * 32


def refusal(call):
    with pytest.raises(HubRefused) as caught:
        call()
    return caught.value


def code(call):
    return refusal(call).code.name


def test_servers_announce_themselves_are_listed_accused_and_banned_and_a_restart_keeps_the_ban(tmp_path):
    toml = write_run(tmp_path)
    hub = HubProcess(toml, tmp_path / "hub")
    with ending():
        node, alpha, beta = Client(hub.address), Announcer(hub.address), Announcer(hub.address, "beta")
        first = alpha.announce(tokens_per_s=50.0)
        assert (first.lease_s, first.banned, first.finished) == (60.0, False, False)
        beta.announce(address="127.0.0.1:7002")
        listed = alpha.client.servers()
        assert [(card.name, card.address) for card in listed] == [
            ("alpha", "127.0.0.1:7001"),
            ("beta", "127.0.0.1:7002"),
        ]
        assert listed[0].public_key == alpha.public_key
        assert listed[0].process not in (0, 11)  # who knew it could withdraw the server
        assert not listed[0].signature

        thief = Announcer(hub.address)
        assert code(thief.announce) == "ALREADY_EXISTS"
        copied = pb.ServerCard(name="gamma", address="127.0.0.1:1", process=5)
        copied.run, copied.public_key, copied.signature = "run", alpha.public_key, b"x" * 64
        announce = HubClient(hub.address, call_timeout_s=5.0).call
        told = refusal(lambda: announce("Directory/Announce", copied, pb.AnnounceReply))
        assert "not signed" in str(told)
        assert code(lambda: thief.client.withdraw("alpha", listed[0].process)) == "PERMISSION_DENIED"
        other = DirectoryClient([hub.address], "another run", call_timeout_s=5.0)
        assert "leads the run 'run'" in str(refusal(other.servers))

        assert code(lambda: beta.accuse(node.who, alpha)) == "NOT_FOUND"  # not a member
        node.join()
        assert "is not JSON" in str(refusal(lambda: beta.accuse(node.who, alpha, b"{")))
        assert "is not JSON" in str(refusal(lambda: beta.accuse(node.who, alpha, b"[" * 2048)))
        assert "JSON object" in str(refusal(lambda: beta.accuse(node.who, alpha, b"[1]")))
        assert "at most 2048" in str(refusal(lambda: beta.accuse(node.who, alpha, b"9" * 2049)))
        assert "256" in str(refusal(lambda: beta.accuse(node.who, alpha, reason="\n")))
        assert code(lambda: beta.accuse(node.who, alpha, session=1)) == "ABORTED"
        assert code(lambda: beta.accuse(node.who, alpha, public_key=b"y" * 32)) == "NOT_FOUND"
        assert alpha.listed() == ["alpha", "beta"]

        assert beta.accuse(node.who, alpha, b'{"margin": NaN, "place": 7}')
        assert beta.listed() == ["beta"]
        assert "accused by 1 of 1 nodes (node): margin" in alpha.announce().reason
        beta.client.withdraw("beta", 11)
        assert beta.listed() == []
        told = status(hub.address)
        assert [(one["name"], one["state"]) for one in told["servers"]] == [
            ("alpha", "banned"),
            ("beta", "gone: left"),
        ]
        assert told["servers"][0]["evidence"] == {"margin": None, "place": 7}
        assert [one["name"] for one in told["nodes"]] == ["node"]

        hub.kill()
        again = HubProcess(toml, tmp_path / "hub")
        assert again.address == hub.address
        assert alpha.announce().banned
        assert not beta.announce().banned
        assert beta.listed() == ["beta"]
        assert [event["server"] for event in again.events("banned")] == ["alpha"]
        assert [event["evidence"]["place"] for event in again.events("accused")] == [7]


def test_an_accusation_fits_whatever_the_server_has_put_into_it():
    """A server that lies at length could otherwise not be banned."""
    speaker = {"node": 4, "session": 9}
    evidence = {"key": [3, 1], "place": 7, "versions": [2**63 + i for i in range(500)]}
    made = make_accusation("alpha", KEY, "it said \x1b[2J\n" + "x" * 999, evidence, **speaker)
    assert made.reason == "it said ?[2J?" + "x" * (256 - 13)
    assert json.loads(made.evidence) == {"key": [3, 1], "place": 7}
    assert (made.node, made.session, made.server, made.public_key) == (4, 9, "alpha", KEY)
    assert make_accusation("alpha", KEY, "", {"all": "y" * 9000}, **speaker).evidence == b"{}"
    assert make_accusation("alpha", KEY, "", {}, **speaker).reason


@pytest.mark.slow
def test_a_ban_follows_to_the_standby_and_so_do_the_servers(tmp_path):
    toml = write_run(tmp_path, 'standby = "127.0.0.1:0"')
    primary = HubProcess(toml, tmp_path / "run" / "hub")
    standby = HubProcess(toml, tmp_path / "run" / "standby", "--standby")
    with ending():
        node = Client(primary.address).found()
        until(lambda: node.status()["standby"], "the standby")
        alpha, beta = (
            Announcer(primary.address, name, standby=standby.address) for name in ("alpha", "beta")
        )
        assert code(Announcer(standby.address).announce) == "FAILED_PRECONDITION"
        alpha.announce()
        beta.announce()
        assert beta.accuse(node.who, alpha)
        primary.kill()
        node.elect(standby.address)
        assert beta.listed() == []  # nobody has announced itself there yet
        assert not beta.announce().banned
        assert alpha.announce().banned
        assert beta.listed() == ["beta"]


def test_a_server_has_the_name_of_its_certificate(tmp_path):
    keys = tmp_path / "keys"
    make_keys(keys, ["127.0.0.1"], ["alpha", "beta"])
    toml = write_run(tmp_path, "certificates = true")
    hub = HubProcess(toml, tmp_path / "hub", f"--keys={keys / 'hub'}")
    with ending():
        alpha = Announcer(hub.address, "alpha", client_keys(keys / "alpha"))
        beta = Announcer(hub.address, "beta", client_keys(keys / "beta"))
        alpha.announce()
        beta.announce()
        told = refusal(lambda: beta.announce(name="alpha", process=12))
        assert told.code is grpc.StatusCode.PERMISSION_DENIED
        assert "the certificate is for 'beta'" in str(told)
        assert code(lambda: beta.client.withdraw("alpha", 11)) == "PERMISSION_DENIED"
        assert alpha.listed() == ["alpha", "beta"]
        again = Announcer(hub.address, "alpha", client_keys(keys / "alpha"))  # it has lost its own key
        again.announce(process=13)
        assert alpha.client.servers()[0].public_key == again.public_key
