"""Tests a hub from a plain loop, with any module: five lines, a real hub process, and the errors."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit.hub_journal import by_name, check_journal
from kit.hub_process import real_hub
from kit.waiting import until
from torch import nn

from aedit.edit import HubExchange, LayerSync, OwnPace
from aedit.edit.hub_join import HubNodeOptions
from aedit.launch.cli import main
from aedit.launch.hub import anchors_of
from aedit.proto.rpc import HubClient, StatusRequest
from aedit.types import UserError

pytestmark = pytest.mark.filterwarnings("ignore:buffers of this model change")

LIMIT_S = 60.0
HUB = """
name = "test"
[outer]
kind = "average"
lr = 1.0
[edit]
every = 3
timeout_s = 60
penalty = { clip = "none" }
[hub]
address = "127.0.0.1:0"
endless = true
weights = "uniform"
codec = "fp32"
heartbeat_s = 0.05
expire_s = 5.0
lease_samples = 8
staleness = { rule = "constant" }
push_filter = { threshold = 1e9, cosine = false, clip = 1e9 }
"""
"""Without tables for model and data. Every push moves the anchor by exactly its values."""


class Net(nn.Module):
    """Small CNN with running statistics, of no transformers class."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.norm, self.head = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Linear(12, 2)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_((p * 256).round() / 256)  # fp32 adds such numbers without rounding

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


def join(address, model, name="a", **options):
    made = HubNodeOptions(name=name, agent="thread", **options)
    return HubExchange.of(address, model, made, 7)


def move(model, rng):
    """Take an inner step by numbers that fp32 adds without rounding; return what it added, by name."""
    moved = {
        name: torch.randint(-512, 512, p.shape, generator=rng) / 1024 for name, p in model.named_parameters()
    }
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(moved[name])
    return moved


def steps(sync, rng, count, each=lambda: None):
    """Take scripted steps; return the sum of what they added, by name."""
    total = {name: torch.zeros_like(p) for name, p in sync.model.named_parameters()}
    for _ in range(count):
        each()
        sync.model(torch.ones(2, 1, 4, 4))
        total = {name: total[name] + moved for name, moved in move(sync.model, rng).items()}
        sync.step()
    return total


def node(address, name, seed, count, *, each=lambda: None, **options):
    model = Net(seed)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = LayerSync.of(model, inner, exchange=join(address, model, name, **options))
    with sync:
        return steps(sync, torch.Generator().manual_seed(seed), count, each)


def anchors(address):
    """Return what a node that joins now takes over, by name."""
    model = Net(99)
    with LayerSync.of(model, torch.optim.SGD(model.parameters()), exchange=join(address, model, "reader")):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def status(address):
    client = HubClient(address, call_timeout_s=5.0)
    try:
        return json.loads(client.status(StatusRequest()).json)
    finally:
        client.close()


def check_books(hub, moved):
    """Check that all that the nodes have added was merged once, and that a new node gets those anchors."""
    folder = hub.folder / "hub"
    pushed, kept = by_name(folder, check_journal(folder)), by_name(folder, anchors_of(folder))
    found = anchors(hub.address)
    for name in dict(Net(1).named_parameters()):
        torch.testing.assert_close(-torch.from_numpy(pushed[name]).float(), sum(t[name] for t in moved))
        assert torch.equal(found[name], torch.tensor(kept[name])), name


def test_nodes_of_ones_own_loop_with_any_module_learn_together_and_the_hub_says_how(tmp_path):
    """One node founds the run, the other joins late with other weights; the hub is killed in between."""
    with real_hub(tmp_path, HUB) as hub:
        model = Net(1)
        first = join(hub.address, model, "one")
        sync = LayerSync.of(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=first)
        assert (sync.config.every, sync.config.landing, sync.config.timeout_s) == (3, "arrival", 60)
        assert isinstance(sync.schedule, OwnPace)
        rng, moved = torch.Generator().manual_seed(1), []
        with sync, ThreadPoolExecutor(1) as pool:
            moved.append(steps(sync, rng, 4))
            other = pool.submit(node, hub.address, "two", 2, 30)
            moved.append(steps(sync, rng, 10))
            hub.kill()
            moved.append(steps(sync, rng, 10))
            hub.start()
            moved.append(steps(sync, rng, 10))
            moved.append(other.result(LIMIT_S))
        check_books(hub, moved)
        told = status(hub.address)
        assert {member["state"] for member in told["nodes"]} == {"gone: left"}
        assert (told["total_steps"], told["total_tokens"]) == (34 + 30, 7 * (34 + 30))


def test_leased_positions_go_to_one_node_each_and_unused_ones_to_the_next(tmp_path):
    drawn = {"one": [], "two": [], "three": []}  # positions trained on, by node
    with real_hub(tmp_path, HUB) as hub:

        def train(name, seed, count, fail_at=10**9):
            model = Net(seed)
            exchange = join(hub.address, model, name, num_samples=10)
            sync = LayerSync.of(model, torch.optim.SGD(model.parameters()), exchange=exchange)

            def each():
                if sync.steps == fail_at:
                    exchange.lease(2)
                    raise KeyboardInterrupt  # the second round is under way
                sync.finish()
                drawn[name] += exchange.lease(2).tolist()

            with sync:
                steps(sync, torch.Generator().manual_seed(seed), count, each)

        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(train, "two", 2, 9)
            with pytest.raises(KeyboardInterrupt):
                train("one", 1, 10**9, fail_at=6)
            other.result(LIMIT_S)
        until(lambda: not any(m["leased_samples"] for m in status(hub.address)["nodes"]), "all to have left")
        assert status(hub.address)["total_steps"] == 6 + 9
        train("three", 3, 12)
    # Every position once, without a gap but for what the last lease of "three" has left.
    trained = [position for positions in drawn.values() for position in positions]
    assert len(trained) == 2 * (6 + 9 + 12)
    assert sorted(trained) == list(range(len(trained)))


def test_a_run_that_has_used_up_its_budget_says_so_and_leases_nothing_more(tmp_path):
    config = HUB.replace("endless = true", "").replace("[edit]", "[train]\nsteps = 6\n[edit]")
    with real_hub(tmp_path, config) as hub:
        model = Net()
        exchange = join(hub.address, model, num_samples=10)
        sync = LayerSync.of(model, torch.optim.SGD(model.parameters()), exchange=exchange)
        with sync:
            while not exchange.finished:
                positions = exchange.lease(1)
                steps(sync, torch.Generator().manual_seed(0), 1)
            assert sync.steps >= 6
            while len(positions):
                positions = exchange.lease(100)


@pytest.mark.parametrize(
    ("options", "change", "what"),
    [
        ({}, lambda model: setattr(model, "head", nn.Linear(12, 3)), r"another model: .*head"),
        ({"num_samples": 5}, lambda model: None, "1 training samples, b has 5"),
        ({}, lambda model: model.conv.requires_grad_(False), "another model"),
    ],
)
def test_another_model_or_corpus_than_the_runs_is_one_error(tmp_path, options, change, what):
    with real_hub(tmp_path, HUB) as hub:
        node(hub.address, "a", 1, 1)
        model = Net()
        change(model)
        sync = LayerSync.of(
            model, torch.optim.SGD(model.parameters()), exchange=join(hub.address, model, "b", **options)
        )
        with pytest.raises(ValueError, match=what), sync:
            raise AssertionError("it must not get in")


def test_a_wrong_address_is_one_error(monkeypatch):
    monkeypatch.setattr("aedit.proto.rpc.client.HELLO_LIMIT_S", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ValueError, match=address):
            join(address, Net())
    with pytest.raises(ValueError, match=r"192\.0\.2\.1:7000 is another machine: pass keys="):
        join("192.0.2.1:7000", Net())
    for wrong in ("localhost", "localhost:99999", "192.0.2.1", ":7000"):
        with pytest.raises(ValueError, match="expected the hub's HOST:PORT"):
            join(wrong, Net())


def test_a_sync_of_another_model_than_was_joined_with_is_refused_though_the_sizes_agree(tmp_path):
    with real_hub(tmp_path, HUB) as hub:
        exchange = join(hub.address, Net(), "a")
        try:
            other = nn.Module()
            for name, child in Net().named_children():
                other.add_module(f"my_{name}", child)
            with pytest.raises(ValueError, match=r"my_conv.*exchange was made for.*conv"):
                LayerSync.of(other, torch.optim.SGD(other.parameters()), exchange=exchange)
        finally:
            exchange.close()


def test_keys_let_in_their_own_nodes_only(tmp_path, monkeypatch):
    monkeypatch.setattr("aedit.proto.rpc.client.HELLO_LIMIT_S", 3.0)
    for name in ("mine", "theirs"):
        assert main(["keys", str(tmp_path / name), "--host", "127.0.0.1"]) == 0
    keys = tmp_path / "mine"
    with real_hub(tmp_path, HUB, ["--keys", str(keys / "hub")]) as hub:
        node(hub.address, "a", 1, 4, keys=keys / "nodes")
        for wrong in (None, tmp_path / "theirs" / "nodes", tmp_path / "nowhere"):
            with pytest.raises(ValueError, match=r"127\.0\.0\.1|nowhere"):
                join(hub.address, Net(), "b", keys=wrong)


def test_what_a_run_weighs_by_tokens_needs_them(tmp_path):
    config = HUB.replace('"uniform"', '"tokens"')
    wanted = pytest.raises(ValueError, match="tokens_per_step must be above 0")
    with real_hub(tmp_path, config) as hub, wanted:
        HubExchange.of(hub.address, Net(), HubNodeOptions(name="a", agent="thread"))


def test_units_of_another_kind_than_the_runs_are_refused_before_anything_is_sent(tmp_path):
    with real_hub(tmp_path, HUB) as hub:
        model = Net()
        exchange = join(hub.address, model)
        model.conv.requires_grad_(False)
        with pytest.raises(ValueError, match=r"give LayerSync\.of the model that was joined with"):
            LayerSync.of(model, torch.optim.SGD(model.parameters()), exchange=exchange)
        exchange.close()


def test_five_lines_with_the_agent_as_a_process(tmp_path):
    with real_hub(tmp_path, HUB) as hub:
        model = Net(1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = HubExchange.join(hub.address, model, name="a")
        sync = LayerSync.of(model, inner, exchange=exchange)
        with sync:
            moved = steps(sync, torch.Generator().manual_seed(1), 7)
        check_books(hub, [moved])
    assert not [t for t in threading.enumerate() if t.name == "agent"]


def test_a_hub_exchange_that_was_not_joined_leases_nothing():
    from kit.hubs import Hub, HubLink

    exchange = HubExchange(HubLink(Hub(), Net()))
    with pytest.raises(ValueError, match=r"make it with HubExchange\.join"):
        exchange.lease(1)
    assert not issubclass(UserError, ValueError)


def test_a_node_of_two_ranks_joins_as_one_and_both_hear_of_a_wrong_address(tmp_path, world):
    with real_hub(tmp_path, HUB) as hub:
        args = {"address": hub.address, "nowhere": "192.0.2.1:7000", "steps": 7}
        results = world.run("tests/dist_jobs/own_hub_jobs.py", "train_sharded", size=2, args=args)
        told = status(hub.address)
    for wrong, start, total, end, drawn in results:
        assert "is another machine: pass keys=" in wrong
        assert drawn == list(range(21))
        assert all(torch.equal(end[name] - start[name], total[name]) for name in total)
    assert [member["name"] for member in told["nodes"]] == ["sharded"]
    assert told["total_steps"] == 7


def test_a_node_that_has_left_or_is_no_member_yet_is_told_so(tmp_path):
    with real_hub(tmp_path, HUB) as hub:
        model = Net(1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = join(hub.address, model, num_samples=64)
        sync = LayerSync.of(model, inner, exchange=exchange)
        with pytest.raises(ValueError, match="call lease\\(\\) inside `with sync:`"):
            exchange.lease(4)
        with pytest.raises(ValueError, match="has served another LayerSync"):
            LayerSync.of(model, inner, exchange=exchange)
        with sync:
            assert len(exchange.lease(4)) == 4
        with pytest.raises(ValueError, match="has left the run"):
            sync.__enter__()
        with pytest.raises(ValueError, match="has served another LayerSync"):
            LayerSync.of(model, inner, exchange=exchange)
