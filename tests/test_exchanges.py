"""Tests that an exchange that derives from none of the package's is driven and saved like them."""

import torch
from kit.nodes import batches, in_threads, loss, parameters, tower

from aedit.async_sgd.rules import Nesterov
from aedit.edit import EditConfig, Exchange, LayerSync, MeanExchange, snapshot


class Foreign:
    """Exchange with only the names of the Exchange protocol; a MeanExchange inside answers."""

    _NAMES = frozenset(name for name in dir(Exchange) if not name.startswith("_"))
    asynchronous = False

    def __init__(self, transport):
        self._mean = MeanExchange(transport, outer=Nesterov(lr=0.7, momentum=0.6))

    def __getattr__(self, name):
        if name not in self._NAMES:
            raise AttributeError(f"{name} is not in the Exchange protocol")
        return getattr(self._mean, name)


def node(model, transport):
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    config = EditConfig(every=3)
    return LayerSync.of(model, inner, exchange=Foreign(transport), config=config)


def steps(sync, data):
    for batch in data:
        loss(sync.model, batch).backward()
        sync.inner.step()
        sync.inner.zero_grad()
        sync.step()


def test_a_foreign_exchange_is_saved_and_restored_to_the_same_bits():
    models = [tower(0), tower(0)]
    resumed = [tower(7), tower(8)]  # other weights: everything must come from the checkpoint
    data = [batches(seed, 12) for seed in range(2)]

    def job(transport, i):
        sync = node(models[i], transport)
        with sync:
            steps(sync, data[i][:7])
            sync.finish()
            numbers = snapshot.numbers(sync, [])
            tensors = {name: t.clone() for name, t in snapshot.tensors(sync).items()}
            weights = {name: t.clone() for name, t in models[i].state_dict().items()}
            steps(sync, data[i][7:])
        again = node(resumed[i], transport)
        again.model.load_state_dict(weights)
        assert snapshot.blank(again, numbers).keys() == tensors.keys()
        assert snapshot.restore(again, tensors, numbers) == []
        with again:
            steps(again, data[i][7:])
        assert again.total_steps == sync.total_steps == 24
        return parameters(models[i]), parameters(resumed[i])

    for through, again in in_threads(2, job):
        for name, value in through.items():
            assert torch.equal(value, again[name]), name
