"""Tests that buffers such as the running statistics of BatchNorm are equal on all nodes after a round."""

import warnings
from copy import deepcopy

import pytest
import torch
from kit.deferred import Late
from kit.hubs import Hub, HubLink, hub_node
from kit.nodes import in_threads
from torch import nn

from aedit.async_sgd.rules import Average
from aedit.edit import EditConfig, EverySteps, LayerSync, MeanExchange, PenaltyConfig

PLAIN = PenaltyConfig(weights="uniform", detector="off", clip=None)


class Normed(nn.Module):
    """Model with BatchNorm in two blocks, a constant table, and a float64 statistic of the root's own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self._block(5), self._block(8)])
        self.last = nn.Linear(8, 1)
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
        self.register_buffer("table", torch.rand(4), persistent=False)
        self.register_buffer("norm", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))

    @staticmethod
    def _block(width):
        return nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.Tanh())

    def forward(self, x):
        if self.training:
            self.norm += x.double().square().mean()
            self.seen += len(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


with torch.random.fork_rng():
    torch.manual_seed(0)
    FIRST = Normed()


def normed():
    return deepcopy(FIRST)


def data_of(node, count):
    """Return `count` inputs whose mean and spread depend on the node, so that statistics differ."""
    rng = torch.Generator().manual_seed(node)
    return [torch.randn(6, 5, generator=rng) * (1 + node) + node for _ in range(count)]


def loss(model, x):
    return (model(x) - x.sum(-1, keepdim=True)).square().mean()


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def apart(ours, theirs):
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def train(model, transport, data, *, every=3, after=lambda sync, step: None, outer=None, **config):
    """Train `model` as a node; return what `after` returned after each step."""
    inner, noted = torch.optim.SGD(model.parameters(), lr=0.01), []
    exchange = MeanExchange(transport, outer=outer or Average(), penalty=PLAIN)
    config = EditConfig(**{"every": every, **config})
    schedule = EverySteps(every // config.fragments)
    sync = LayerSync.of(model, inner, exchange=exchange, schedule=schedule, config=config)
    with sync:
        for step, batch in enumerate(data, 1):
            loss(model, batch).backward()
            inner.step()
            inner.zero_grad()
            sync.step()
            noted.append(after(sync, step))
    return noted


def test_at_a_round_statistics_are_the_mean_and_counters_those_of_the_first_node():
    """The oracle is plain torch: each node's buffers after three steps, then their mean."""
    plain = []
    for node in range(3):
        model = normed()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in data_of(node, 3):
            inner.zero_grad()
            loss(model, batch).backward()
            inner.step()
        plain.append(buffers(model))

    def landed(sync, step):
        sync.finish()
        return buffers(sync.model)

    for noted in in_threads(3, lambda t, n: train(normed(), t, data_of(n, 3), after=landed)):
        for name, found in noted[2].items():
            every = [mine[name] for mine in plain]
            if found.is_floating_point() and name not in ("mask", "table"):
                mean = torch.stack([value.double() for value in every]).mean(0)
                assert (found.double() - mean).abs().max() <= 1e-6 * mean.abs().max(), name
                assert not torch.equal(every[0], every[1])
            else:
                assert torch.equal(found, every[0]), name


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"landing": "arrival"},
        {"landing": "arrival", "fragments": 3},
        {"warmup_steps": 4},
        {"warmup_steps": "all"},
    ],
)
def test_nodes_end_with_equal_buffers_and_equal_outputs_in_evaluation(config):
    counts = [7, 7, 7] if config.get("warmup_steps") == "all" else [7, 4, 9]
    models = [normed() for _ in counts]
    models[1].norm += 5.0  # begin apart

    def job(transport, n):
        train(models[n], Late(transport, n), data_of(n, counts[n]), **config)
        models[n].eval()
        return models[n](torch.ones(2, 5)).detach(), buffers(models[n])

    (out, held), *others = in_threads(3, job)
    for other_out, other_held in others:
        assert torch.equal(out, other_out)
        assert apart(held, other_held) == []
    assert held["blocks.0.1.running_mean"].abs().min() > 0


class First(nn.Module):
    """Model whose first changed module has no parameters, so no unit lands before it.

    Two passes share a backward.
    """

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        return self.layer(self.norm(x)) + self.layer(self.norm(x.flip(0) + 1))


@pytest.mark.parametrize("landing", ["forward", "arrival"])
def test_buffers_never_land_between_a_forward_pass_and_its_backward(landing):
    def job(transport, n):
        model = First()
        train(model, Late(transport, n), data_of(n, 12), every=2, landing=landing)
        return buffers(model)

    ours, theirs = in_threads(2, job)
    assert apart(ours, theirs) == []


def test_buffers_that_are_equal_keep_their_bits_and_are_never_sent():
    class Watched:
        def __init__(self, transport):
            self.transport, self.sent = transport, []

        def channel(self, name=None):
            return self

        def weighted_mean(self, key, value, weight):
            self.sent.append(key)
            return self.transport.weighted_mean(key, value, weight)

        def __getattr__(self, name):
            return getattr(self.transport, name)

    transports = {}

    def job(transport, n):
        model, transports[n] = normed(), Watched(transport)
        model.eval()
        with torch.no_grad():
            model.table.mul_(1 / 3)  # three of it are not three times it in fp32
        before = buffers(model)
        train(model, transports[n], data_of(n, 6))
        assert apart(before, buffers(model)) == []

    in_threads(3, job)
    assert transports[0].sent
    assert not [key for key in transports[0].sent if "buffers" in key]


def test_a_node_with_a_nan_does_not_spoil_the_statistics_of_others():
    def after(sync, step):
        if step == 2 and sync.exchange.transport.node == 1:
            sync.model.blocks[0][1].running_var.fill_(float("nan"))
        sync.finish()
        return buffers(sync.model)

    ours, theirs, third = in_threads(3, lambda t, n: train(normed(), t, data_of(n, 3), after=after))
    assert theirs[1]["blocks.0.1.running_var"].isnan().all()
    assert apart(ours[2], theirs[2]) == apart(ours[2], third[2]) == []
    assert ours[2]["blocks.0.1.running_var"].isfinite().all()
    expected = (trained_alone(0, 3) + trained_alone(2, 3)) / 2
    assert torch.allclose(ours[2]["blocks.0.1.running_var"], expected)


def test_the_statistics_of_a_node_that_the_round_distrusts_have_no_part_in_the_mean():
    """Node 2's last gradient is NaN: its parameters are, its buffers are not. Oracle: plain torch."""

    def job(transport, node):
        model, calls = normed(), []

        def spoil(grad):
            calls.append(grad)
            return grad * float("nan") if node == 2 and len(calls) == 3 else grad

        model.last.bias.register_hook(spoil)
        return train(model, transport, data_of(node, 3), after=landed_buffers)

    for noted in in_threads(3, job):
        for name in ("norm", "blocks.0.1.running_var", "blocks.1.1.running_mean"):
            alone = [buffers_alone(node, 3)[name].double() for node in range(3)]
            assert torch.allclose(noted[2][name].double(), (alone[0] + alone[1]) / 2, rtol=1e-5)
            assert not torch.allclose(sum(alone) / 3, (alone[0] + alone[1]) / 2, rtol=1e-2)


def test_counters_are_those_of_the_first_node_whose_buffers_are_finite():
    """Each node has seen another number of samples, and a buffer of node 0 is NaN at the round."""

    def job(transport, node):
        model, data = normed(), data_of(node, 3)
        if node == 0:
            model.last.register_forward_pre_hook(lambda last, x: model.norm.fill_(float("nan")) and None)
        data = [torch.cat([x] * (1 + node)) for x in data]
        return train(model, transport, data, after=landed_buffers)

    for noted in in_threads(3, job):
        assert noted[2]["seen"] == 3 * 2 * 6, "node 1's: 3 steps of 12 samples"


def buffers_alone(node, steps):
    """Return the buffers of plain training."""
    model = normed()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in data_of(node, steps):
        inner.zero_grad()
        loss(model, batch).backward()
        inner.step()
    return buffers(model)


def trained_alone(node, steps):
    model = normed()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in data_of(node, steps):
        inner.zero_grad()
        loss(model, batch).backward()
        inner.step()
    return model.blocks[0][1].running_var


def test_a_node_without_steps_takes_the_statistics_of_the_others():
    counts = [6, 3]

    def job(transport, n):
        model = normed()
        train(model, transport, data_of(n, counts[n]))
        return buffers(model)

    ours, theirs = in_threads(2, job)
    assert apart(ours, theirs) == []

    def alone(transport, n):
        model = normed()
        train(model, transport, data_of(0, 6))
        return buffers(model)

    first = in_threads(1, alone)[0]
    assert torch.equal(ours["seen"], first["seen"]), "the counter of the first node, which stepped"


def test_a_table_of_another_length_on_one_node_stays_where_it_is():
    """The case is a rotary table that has grown with the context and is not part of the state dict."""

    def job(transport, n):
        model = normed()
        model.table = torch.arange(4.0 + n)
        train(model, transport, data_of(n, 4))
        return buffers(model)

    ours, theirs = in_threads(2, job)
    assert apart({n: b for n, b in ours.items() if n != "table"}, theirs) == []
    assert torch.equal(ours["table"], torch.arange(4.0))
    assert torch.equal(theirs["table"], torch.arange(5.0))


def test_persistent_buffers_of_other_shapes_are_refused_by_name():
    def job(transport, n):
        model = normed()
        model.mask = torch.zeros(3, 3 + n)
        with pytest.raises(ValueError, match="buffer mask: node"):
            train(model, transport, [])

    in_threads(2, job)


def test_over_a_hub_changing_buffers_are_named_once():
    model, hub = normed(), Hub()
    sync, inner = hub_node(model, HubLink(hub, model), schedule=EverySteps(2))
    with warnings.catch_warnings(record=True) as told, sync:
        warnings.simplefilter("always")
        for batch in data_of(0, 8):
            loss(model, batch).backward()
            inner.step()
            inner.zero_grad()
            sync.step()
    messages = [str(each.message) for each in told if "buffers" in str(each.message)]
    assert len(messages) == 1
    assert "norm" in messages[0]
    assert "update_bn" in messages[0]
    assert "mask" not in messages[0]


def test_sharded_nodes_start_equal_and_end_with_equal_buffers(world):
    results = world.run("tests/dist_jobs/buffer_jobs.py", "train_apart", size=4, args={"ranks": 2})
    for started, ended, _ in results[1:]:
        assert apart(started, results[0][0]) == []
        assert apart(ended, results[0][1]) == []
    means = torch.stack([mine for _, _, mine in results]).mean(0)
    assert torch.allclose(results[0][1]["0.1.running_mean"], means, atol=1e-6)


def test_a_node_that_has_not_stepped_has_no_part_in_the_mean():
    found = in_threads(2, lambda t, n: train(normed(), t, data_of(n, [3, 0][n]), after=landed_buffers))
    assert torch.allclose(found[0][2]["blocks.0.1.running_var"], trained_alone(0, 3))


def test_buffers_are_equal_where_the_warm_up_ends():
    found = in_threads(
        2, lambda t, n: train(normed(), t, data_of(n, 3), after=landed_buffers, warmup_steps=3, every=99)
    )
    assert apart(found[0][1], found[1][1]) != []
    assert apart(found[0][2], found[1][2]) == []


def landed_buffers(sync, step):
    sync.finish()
    return buffers(sync.model)


class Lazy(nn.Module):
    """Layers that make buffers when they first run, and replace one of them at each run."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 1)
        self.register_buffer("mean", None)

    def forward(self, x):
        x = self.first(x)
        if self.training:
            if self.mean is None:
                self.mean = x.detach().mean(0)
            self.mean.lerp_(x.detach().mean(0), 0.5)
            if not hasattr(self, "count"):
                self.register_buffer("count", torch.zeros((), dtype=torch.long))
                self.register_buffer("width", torch.zeros(5, dtype=torch.float64), persistent=False)
            self.count += 1
            self.width = self.width + x.detach().double().std(0)
        return self.last(x - (0 if self.mean is None else self.mean))


@pytest.mark.parametrize("landing", ["forward", "arrival"])
@pytest.mark.parametrize("counts", [(8, 8), (0, 8), (3, 8)])
def test_buffers_made_in_the_first_forward_pass_are_exchanged_and_made_where_they_are_missing(
    landing, counts
):
    torch.manual_seed(0)
    start = Lazy()

    def job(transport, n):
        model = deepcopy(start)
        ended = train(model, transport, data_of(n, counts[n]), every=3, landing=landing)
        assert ended is not None
        return model.eval(), model(torch.ones(2, 5)).detach()

    found = in_threads(2, job)
    (ours, output), (theirs, other) = found
    assert torch.equal(output, other)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, buffer in theirs.named_buffers():
        assert torch.equal(buffer, dict(ours.named_buffers())[name]), name
        assert buffer.dtype == dict(ours.named_buffers())[name].dtype


@torch.no_grad()
def meet(models):
    """Make parameters and floating-point buffers of `models` their means."""
    for same in zip(*([*m.parameters(), m.mean, m.width] for m in models), strict=True):
        mean = torch.stack([t.detach() for t in same]).mean(0)
        for t in same:
            t.copy_(mean)


def test_a_buffer_that_is_made_later_becomes_the_mean_of_the_nodes_at_each_round():
    torch.manual_seed(0)
    start, data = Lazy(), [data_of(n, 4) for n in range(2)]

    def job(transport, n):
        model = deepcopy(start)
        train(model, transport, data[n], every=2)
        return model

    plain = [deepcopy(start) for _ in data]
    inners = [torch.optim.SGD(model.parameters(), lr=0.01) for model in plain]
    for step in range(4):
        for model, inner, mine in zip(plain, inners, data, strict=True):
            inner.zero_grad()
            loss(model, mine[step]).backward()
            inner.step()
        meet(plain) if step % 2 else None
    for model in in_threads(2, job):
        assert torch.allclose(model.mean, plain[0].mean, atol=1e-6)
        assert torch.allclose(model.width, plain[0].width)
        assert int(model.count) == 4


def test_over_a_hub_a_buffer_that_is_made_later_and_changes_is_named():
    model, hub = Lazy(), Hub()
    sync, inner = hub_node(model, HubLink(hub, model), schedule=EverySteps(2))
    with warnings.catch_warnings(record=True) as told, sync:
        warnings.simplefilter("always")
        for batch in data_of(0, 8):
            loss(model, batch).backward()
            inner.step()
            inner.zero_grad()
            sync.step()
    assert ["mean" in str(each.message) for each in told if "buffers" in str(each.message)] == [True]
