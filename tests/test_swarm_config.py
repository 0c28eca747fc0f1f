"""Tests the configuration of a swarm, and how a peer is told of the first others."""

import pytest

from aedit.launch.config.config import RunConfig
from aedit.launch.config.load import load, parse
from aedit.launch.config.machine import of_this_machine
from aedit.launch.config.swarm import SwarmConfig
from aedit.launch.local.join import joined_to
from aedit.launch.swarm import introduction
from aedit.launch.swarm.introduction import introduced, make_discovery
from aedit.proto.swarm.peer_file import PeerFile
from aedit.types import UserError

SWARM = '[swarm]\ndiscovery = "file"\n'


def test_a_swarm_is_a_run_in_which_nodes_push_and_land_on_arrival():
    config = parse(SWARM, "here")
    assert config.has_hub
    assert config.edit.landing == "arrival"
    assert not RunConfig().has_hub


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SWARM + '[hub]\naddress = "h:1"', "hub.address must be empty in a swarm"),
        (SWARM + '[hub]\nstandby = "h:1"', "hub.standby must be empty in a swarm"),
        (SWARM + '[hub]\nparent = "h:1"', "hub.parent must be empty in a swarm"),
        (SWARM + "[hub]\nmetrics_port = 9000", "hub.metrics_port has no effect in a swarm"),
        (SWARM + '[prompts]\nsource = "a.b:c"', "prompts.source must be empty in a swarm"),
        (SWARM + "parts = 0", r"swarm.parts must be in \[1, 64\]"),
        (SWARM + "copies = 8", r"swarm.copies must be in \[1, 7\]"),
        (SWARM + "lease_s = 400", r"swarm.lease_s must be in \[2, 300\]"),
        (SWARM + 'listen = "nowhere"', "swarm.listen must be HOST:PORT, or empty for a client"),
        (SWARM + 'listen = "0.0.0.0:0"', "swarm.announce must name this machine"),
        (SWARM + 'allow = ["ab"]', "swarm.allow must be 64 hexadecimal digits"),
    ],
)
def test_what_cannot_be_in_a_swarm_is_named(text, said):
    with pytest.raises(UserError, match=said):
        parse(text, "here")


def test_a_key_of_a_swarm_without_one_has_no_effect(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[swarm]\nparts = 2\n")
    with pytest.raises(UserError, match=r"swarm.parts.*has no effect.*swarm.discovery"):
        load(path, [], strict=True)


def test_where_a_peer_listens_and_whom_it_knows_belong_to_its_machine():
    told = parse(SWARM + 'listen = "10.0.0.1:7000"\npeers = "a:1"\nparts = 2', "here")
    own = of_this_machine(told).swarm
    assert (own.listen, own.peers, own.parts) == (SwarmConfig().listen, "", 2)


def test_an_announced_host_takes_the_place_of_the_one_that_is_listened_at():
    swarm = SwarmConfig(discovery="file", listen="0.0.0.0:7000", announce="peer.example")
    assert swarm.reached_at("0.0.0.0:7000") == "peer.example:7000"
    assert swarm.reached_at("") == ""
    assert SwarmConfig().reached_at("127.0.0.1:1") == "127.0.0.1:1"


def test_peers_may_be_addresses_a_file_or_nothing_yet(tmp_path):
    swarm = SwarmConfig(discovery="file")

    def found(peers):
        discovery = make_discovery(swarm, peers, directory=tmp_path, run="r")
        assert isinstance(discovery, PeerFile)
        return tuple(discovery.found())

    listed = tmp_path / "peers.txt"
    listed.write_text("c:3\n# nobody\nd:4\n")
    assert found("a:1,b:2") == ("a:1", "b:2")
    assert found(str(listed)) == ("c:3", "d:4")


def test_a_file_of_peers_introduces_a_node_that_joins(tmp_path, monkeypatch):
    listed = tmp_path / "peers.txt"
    listed.write_text("a:1\nb:2\n")
    assert introduced(str(listed)) == ("a:1", "b:2")
    monkeypatch.setattr(introduction, "_LIMIT_S", 0.0)
    listed.write_text("# nobody\n")
    with pytest.raises(UserError, match="no peer was found within 0 s"):
        introduced(str(listed))


def test_a_file_of_peers_that_is_not_there_is_named_at_once(tmp_path):
    with pytest.raises(UserError, match=r"missing\.txt: no such file; give HOST:PORT"):
        introduced(str(tmp_path / "missing.txt"))


def test_a_node_joins_by_the_first_peer_in_the_file_that_answers(tmp_path):
    listed = tmp_path / "peers.txt"
    listed.write_text("127.0.0.1:1\n127.0.0.1:2\n")
    asked = []

    def greet(address):
        asked.append(address)
        if address.endswith(":1"):
            raise UserError("nobody listens there")
        return "the configuration"

    assert joined_to(str(listed), greet) == ("127.0.0.1:2", "the configuration")
    assert asked == ["127.0.0.1:1", "127.0.0.1:2"]
    assert joined_to("h:7", lambda place: place) == ("h:7", "h:7")
