"""Tests the configuration of a swarm, and how a peer is told of the first others."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from aedit.launch.cli import main
from aedit.launch.config import (
    PEER_EXCHANGES,
    Placement,
    RunConfig,
    SwarmConfig,
    load,
    of_this_machine,
    parse_config,
)
from aedit.launch.processes.join_run import joined_to
from aedit.launch.swarm import PeerOptions, initial_peers, introduced, peer
from aedit.launch.swarm.initial_peers import make_discovery
from aedit.proto.swarm import PeerFile
from aedit.types import UserError

SWARM = '[swarm]\ndiscovery = "file"\n'


def test_a_swarm_is_a_run_in_which_nodes_push_and_land_on_arrival():
    config = parse_config(SWARM, "here")
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
        parse_config(text, "here")


AVERAGES = '[swarm]\ndiscovery = "hivemind"\nexchange = "hivemind"\n'
TIMED = '[edit]\nschedule = "seconds"\nevery = 10\n'


def test_a_swarm_that_averages_owns_nothing_and_lands_on_arrival():
    config = parse_config(AVERAGES + TIMED, "here")
    assert config.swarm.on
    assert not config.has_hub
    assert not config.swarm.has_parts
    assert config.edit.landing == "arrival"
    assert parse_config(AVERAGES + TIMED + 'landing = "forward"', "here").edit.landing == "forward"
    assert not RunConfig().swarm.on


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (AVERAGES.replace('y = "hivemind"', 'y = "file"') + TIMED, 'swarm.discovery must be "hivemind" with'),
        (AVERAGES + TIMED + "[hub]\nquorum = 2", "hub must be left out with swarm.exchange"),
        (AVERAGES, 'edit.schedule must be "seconds" with swarm.exchange'),
        (AVERAGES + TIMED.replace("10", "9"), r"edit.every must be at least 10 \(s\) with swarm.exchange"),
        (AVERAGES + TIMED + "fragments = 2", "edit.fragments must be 1 with swarm.exchange"),
        (AVERAGES + TIMED + "warmup_steps = 5", "edit.warmup_steps must be 0 with swarm.exchange"),
        (AVERAGES + TIMED + "offload = true", "edit.offload must be false with swarm.exchange"),
        (AVERAGES + TIMED + "[local]\nranks = 2", "local.ranks must be 1 with swarm.exchange"),
        (AVERAGES + 'announce = "h"\n' + TIMED, "swarm.listen must name a port with swarm.announce"),
        (AVERAGES + TIMED + '[outer]\nkind = "heloco"', "outer.kind needs a hub"),
        (AVERAGES + TIMED + '[prompts]\nsource = "a.b:c"', "prompts.source must be empty in a swarm"),
        (AVERAGES + "averaging_s = 5.0\n" + TIMED, r"swarm.averaging_s must be in \[15, 3600\]"),
        (SWARM + 'exchange = "all"', "swarm.exchange"),
    ],
)
def test_what_cannot_be_averaged_by_hivemind_is_named(text, said):
    with pytest.raises(UserError, match=said):
        parse_config(text, "here")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--swarm.listen", ""], "swarm.listen: empty makes a client, which nobody can call"),
        (["--swarm.peers", "10.0.0.1:7000"], "'10.0.0.1:7000' is not the address of a peer"),
        (["--nodes", "2", "--master", "h:1"], "--nodes, --master: no effect in a swarm"),
        (["--insecure"], "--keys, --insecure: no effect with swarm.exchange"),
    ],
)
def test_a_start_that_cannot_average_is_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch, flags, said):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(AVERAGES + TIMED)
    assert main(["run", str(path), "--dry-run", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--swarm.peers", "10.0.0.1:7000"],
            "enter theirs with aedit join 10.0.0.1:7000, or",
        ),
        (["--swarm.listen", "127.0.0.1:7000", "--local", "3"], "each of the 3 peers of --local needs a port"),
        (["--swarm.listen", ""], "swarm.listen: empty makes a client, which keeps no part"),
    ],
)
def test_a_start_that_cannot_begin_a_swarm_is_one_line_and_exit_code_2(
    tmp_path, capsys, monkeypatch, flags, said
):
    """Found: with swarm.peers, a second run began beside the first one, and nothing said so."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(SWARM)
    assert main(["run", str(path), "--dry-run", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("listen", "address", "words", "said"),
    [
        ("127.0.0.1:0", "127.0.0.1:7000", {}, "in another terminal: aedit join 127.0.0.1:7000"),
        (
            "10.0.0.1:7000",
            "10.0.0.1:7000",
            {"insecure": True},
            "on its machine: aedit join 10.0.0.1:7000 --swarm.listen ITS_ADDRESS:7000 --insecure",
        ),
        (
            "10.0.0.1:7000",
            "10.0.0.1:7000",
            {"keys": Path("keys")},
            "on its machine: aedit join 10.0.0.1:7000 --swarm.listen ITS_ADDRESS:7000 --keys keys",
        ),
    ],
)
def test_a_run_names_the_whole_command_that_adds_a_node(listen, address, words, said):
    config = parse_config(SWARM + f'listen = "{listen}"\n', "here")
    exchange = PEER_EXCHANGES[config.swarm.exchange]
    assert exchange.how_to_join(config, Placement(**words), address) == said


def test_averaging_without_the_extra_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(AVERAGES + TIMED)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["run", "run.toml", "--dry-run"]) == 2
    assert "needs hivemind: pip install 'aedit[swarm]'" in capsys.readouterr().err


def test_a_peer_that_averages_keeps_no_parts(tmp_path):
    config = parse_config(AVERAGES + TIMED, "here")
    with pytest.raises(UserError, match="has no parts to keep: a peer is a node"):
        peer(config, PeerOptions(directory=tmp_path, name="a"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--force-found", "2"], "--force-found: there is no part 2: they are numbered 0 to 1"),
        (["--force-found", "0,7"], "--force-found: there is no part 7"),
        (["--force-found=-1"], "--force-found: expected numbers of parts, such as 1 or 0,3, got '-1'"),
        (["--force-found", "0,"], "--force-found: expected numbers of parts"),
        (["--force-found", "1", "--found"], "--force-found: --found begins a run"),
        (["--force-found", "1", "--swarm.listen", ""], "swarm.listen is empty: a client keeps no part"),
    ],
)
def test_what_a_peer_cannot_found_by_force_is_one_line_and_exit_code_2(
    tmp_path, capsys, monkeypatch, words, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(SWARM + "parts = 2\n")
    assert main(["peer", "run.toml", "--directory", str(tmp_path / "peer"), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "peer").exists(), "nothing has begun"


def test_a_key_of_a_swarm_without_one_has_no_effect(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[swarm]\nparts = 2\n")
    with pytest.raises(UserError, match=r"swarm.parts.*has no effect.*swarm.discovery"):
        load(path, [], strict=True)


def test_where_a_peer_listens_and_whom_it_knows_belong_to_its_machine():
    told = parse_config(
        SWARM + 'listen = "0.0.0.0:7000"\nannounce = "first"\npeers = "a:1"\nparts = 2', "here"
    )
    own = of_this_machine(told).swarm
    assert (own.listen, own.announce, own.peers, own.parts) == (SwarmConfig().listen, "", "", 2)


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
    monkeypatch.setattr(initial_peers, "_LIMIT_S", 0.0)
    listed.write_text("# nobody\n")
    with pytest.raises(UserError, match="no peer was found within 0 s"):
        introduced(str(listed))


def test_a_join_to_a_run_that_averages_by_hivemind_is_one_line_with_the_command(capsys, monkeypatch):
    """Found: it was told that nobody is listed there, and no more."""
    empty = SimpleNamespace(found=list, state="", close=lambda: None)
    monkeypatch.setattr(initial_peers, "DhtDiscovery", lambda settings: empty)
    monkeypatch.setattr(initial_peers, "_LIMIT_S", 0.0)
    place = "/ip4/10.0.0.1/tcp/7000/p2p/12D3Koo"
    assert main(["join", place]) == 2
    error = capsys.readouterr().err
    assert 'swarm.exchange = "hivemind"' in error
    assert f"aedit run CONFIG --swarm.peers {place}\n" in error
    assert error.count("\n") == 1


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


def test_a_hub_does_not_name_the_programs_that_its_nodes_start():
    told = parse_config(
        'rl.engine = "vllm"\nrollout.vllm.python = "/tmp/evil"\nrollout.vllm.speculative.method = "x"', "here"
    )
    own = of_this_machine(told)
    assert (own.rl.engine, own.rollout) == ("vllm", RunConfig().rollout)
