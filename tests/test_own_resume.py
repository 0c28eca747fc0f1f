"""Tests checkpoint and resume in a plain loop: a crash and a resume give the bits of no crash."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit.hub_process import real_hub
from kit.nodes import batches, loss, parameters, tower
from test_own_hub_loop import HUB, Net, check_books, join, steps
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from aedit import EverySteps, LayerSync, MeanExchange
from aedit.async_sgd import Average, DelayedNesterov, Nesterov
from aedit.edit import EditConfig
from aedit.proto import MemoryWorld

pytestmark = [
    pytest.mark.filterwarnings("ignore:buffers of this model change"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class Crash(Exception):
    """Ends a node in the middle of its training."""


def train(model, transport, data, *, outer, warmup, directory=None, crash=False, resume=False):
    """Train one node; return its parameters and the anchors' state.

    With `directory` it saves after step 5; with `crash` it ends after step 7; with `resume` it goes on from
    its file.
    """
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    exchange = MeanExchange(transport, outer=outer)
    config = EditConfig(warmup_steps=warmup)
    sync = LayerSync.of(model, inner, exchange=exchange, schedule=EverySteps(2), config=config)
    state, done = {"model": model, "inner": Inner(model, inner), "sync": sync}, 0
    if resume:
        dcp.load(state, checkpoint_id=directory, no_dist=True)
        done = sync.steps
    with sync:
        for batch in data[done:]:
            loss(model, batch).backward()
            inner.step()
            inner.zero_grad()
            sync.step()
            if directory and sync.steps == 5 and not resume:
                sync.finish()
                dcp.save(state, checkpoint_id=directory, no_dist=True)
            if crash and sync.steps == 7:
                raise Crash
    return parameters(model), {name: t.clone() for name, t in sync.state_dict().items()}


class Inner:
    """Model and optimizer state by parameter name, as torch's own tools expect."""

    def __init__(self, model, inner):
        self.model, self.inner = model, inner

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.inner)

    def load_state_dict(self, state):
        set_optimizer_state_dict(self.model, self.inner, state)


def together(nodes, **options):
    """Return what two nodes on threads return; nodes: per node, its own options."""
    world = MemoryWorld(len(nodes), timeout_s=20)
    models = [tower(i + 1) for i in range(len(nodes))]  # here: threads share one random generator

    def run(i):
        transport = world.node(i)
        try:
            return train(models[i], transport, batches(i, 12), **options, **nodes[i])
        except Crash:
            return None
        finally:
            transport.close()

    with ThreadPoolExecutor(len(nodes)) as pool:
        return [f.result(60) for f in [pool.submit(run, i) for i in range(len(nodes))]]


@pytest.mark.parametrize(
    ("outer", "warmup"), [(Average(), 0), (Nesterov(), 3), (DelayedNesterov(delay=3), 0), (Nesterov(), 6)]
)
def test_a_crash_and_a_resume_give_the_same_bits_as_no_crash(tmp_path, outer, warmup):
    """The checkpoint is in the middle of a local phase, or of the warm-up."""
    expected = together([{}, {}], outer=outer, warmup=warmup)
    folders = [{"directory": tmp_path / str(i)} for i in range(2)]
    together([folder | {"crash": True} for folder in folders], outer=outer, warmup=warmup)
    resumed = together([folder | {"resume": True} for folder in folders], outer=outer, warmup=warmup)
    for (ours, ours_state), (theirs, theirs_state) in zip(resumed, expected, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert ours_state.keys() == theirs_state.keys()
        pairs = {name: (ours_state[name], theirs_state[name]) for name in theirs_state}
        unequal = [
            n for n, (a, b) in pairs.items() if not torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))
        ]
        assert unequal == []


def test_nodes_that_resume_from_different_rounds_say_so(tmp_path):
    options = {"outer": Average(), "warmup": 0}
    together([{"directory": tmp_path / str(i)} for i in range(2)], **options)
    with pytest.raises(ValueError, match="node 0 resumes after round 2 and node 1 after round 0: load"):
        together([{"directory": tmp_path / "0", "resume": True}, {}], **options)


def alone(model=None, **options):
    model = model or tower()
    exchange = MeanExchange(MemoryWorld(1).node(0), **options)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return LayerSync.of(model, inner, exchange=exchange, schedule=EverySteps(2))


def test_a_state_that_does_not_fit_is_one_error():
    saved = alone().state_dict()
    with pytest.raises(ValueError, match=r"anchor/.* is of shape .* in the checkpoint and missing here"):
        alone(Net()).load_state_dict({**alone(Net()).state_dict(), "anchor/nothing": torch.ones(2)})
    with pytest.raises(ValueError, match="missing in the checkpoint"):
        alone(Net()).load_state_dict(saved)
    sync = alone()
    with pytest.raises(ValueError, match="before `with sync:`"), sync:
        sync.load_state_dict(saved)


def test_a_state_in_the_middle_of_a_round_is_refused():
    sync = alone()
    with sync:
        sync.step()
        sync.model(torch.ones(1, 5))
        sync.step()
        with pytest.raises(ValueError, match=r"call sync\.finish\(\) before"):
            sync.state_dict()
        sync.finish()
        assert sync.state_dict()["progress"].tolist() == [2, 1, 1, 2, 1, 2]


@pytest.mark.parametrize("name", ["e3m0", "ternary", "topk"])
def test_a_node_of_a_hub_resumes_with_what_only_it_knows(tmp_path, name):
    """It rejoins under its name, with its counters and its codec's residuals; anchors come from the hub."""
    config = HUB.replace('codec = "fp32"', f'codec = "{name}"\ncodec_down = "{name}"')
    with real_hub(tmp_path, config) as hub:
        model = Net(1)
        sync = LayerSync.of(
            model, torch.optim.SGD(model.parameters()), exchange=join(hub.address, model, "one")
        )
        with suppress(Crash), sync:
            steps(sync, torch.Generator().manual_seed(1), 9)
            sync.finish()
            saved = copy.deepcopy(sync.state_dict())
            raise Crash
        again = Net(2)
        exchange = join(hub.address, again, "one")
        back = LayerSync.of(again, torch.optim.SGD(again.parameters()), exchange=exchange)
        back.load_state_dict(saved)
        assert back.steps == 9
        residuals = {name: value for name, value in back.state_dict().items() if "residual" in name}
        assert residuals
        assert any(value.any() for value in residuals.values())
        assert all(torch.equal(value, saved[name]) for name, value in residuals.items())
        with back:
            assert exchange.node == 0
            steps(back, torch.Generator().manual_seed(2), 4)
        assert back.steps == 13


def test_a_hub_node_that_resumes_loses_nothing_that_was_pushed(tmp_path):
    with real_hub(tmp_path, HUB) as hub:
        moved = []
        state = None
        for seed in (1, 2):
            model = Net(seed)
            exchange = join(hub.address, model, "one")
            sync = LayerSync.of(model, torch.optim.SGD(model.parameters()), exchange=exchange)
            if state:
                sync.load_state_dict(state)
            with sync:
                moved.append(steps(sync, torch.Generator().manual_seed(seed), 5))
                sync.finish()
                state = copy.deepcopy(sync.state_dict())
        check_books(hub, moved)
