"""The Lightning callback, against plain torch: two nodes, a crash and a resume, and a hub."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit.hubs import Hub, HubLink, anchors_of
from kit.local_sgd import furthest, local_sgd
from torch import nn

lightning = pytest.importorskip("lightning.pytorch")

from aedit import EditConfig, EverySteps, HubExchange, LayerSync, MeanExchange, PenaltyConfig  # noqa: E402
from aedit.async_sgd import Average, Nesterov  # noqa: E402
from aedit.edit import LightningCallback  # noqa: E402
from aedit.proto import MemoryWorld  # noqa: E402

PLAIN = PenaltyConfig(weights="uniform", detector="off", clip=None)
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


class Module(lightning.LightningModule):
    """A regression with plain SGD, or Adam."""

    def __init__(self, seed, adam=False):
        super().__init__()
        torch.manual_seed(seed)
        self.adam = adam
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.body(x)

    def training_step(self, batch, index):
        return loss(self, batch)

    def validation_step(self, batch, index):
        self.log("val", loss(self, batch))

    def configure_optimizers(self):
        return (
            torch.optim.AdamW(self.parameters(), lr=0.01)
            if self.adam
            else torch.optim.SGD(self.parameters(), lr=0.1)
        )


def loss(model, x):
    return (model(x) - x.sum(-1, keepdim=True)).square().mean()


def data(node, count=8):
    rng = torch.Generator().manual_seed(node)
    return [torch.randn(4, 5, generator=rng) for _ in range(count)]


def fit(model, callback, batches, tmp, **options):
    settings = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "default_root_dir": tmp}
    settings |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    ckpt, more = options.pop("ckpt_path", None), options.pop("more", [])
    trainer = lightning.Trainer(callbacks=[callback, *more], **(settings | options))
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer.fit(model, loader, ckpt_path=ckpt, weights_only=False)


def together(models, job):
    world = MemoryWorld(len(models), timeout_s=20)

    def run(i):
        transport = world.node(i)
        try:
            return job(i, models[i], transport)
        finally:
            transport.close()

    with ThreadPoolExecutor(len(models)) as pool:
        return [f.result(60) for f in [pool.submit(run, i) for i in range(len(models))]]


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_nodes_train_as_local_sgd_in_plain_torch(tmp_path, accumulate):
    def node(i, model, transport):
        callback = LightningCallback(
            exchange=MeanExchange(transport, outer=Average(), penalty=PLAIN), schedule=EverySteps(2)
        )
        fit(model, callback, data(i), tmp_path / str(i), accumulate_grad_batches=accumulate)
        return parameters(model), callback.sync.steps

    results = together([Module(1), Module(2)], node)
    assert [steps for _, steps in results] == [8 // accumulate] * 2
    assert all(torch.equal(results[0][0][name], results[1][0][name]) for name in results[0][0])
    if accumulate == 1:
        assert furthest(results[0][0], local_sgd(Module(1), [data(0), data(1)], loss, every=2)) < 1e-6


def test_a_resume_from_a_lightning_checkpoint_gives_the_bits_of_no_crash(tmp_path):
    def node(resume):
        def run(i, model, transport):
            callback = LightningCallback(
                exchange=MeanExchange(transport, outer=Nesterov()), schedule=EverySteps(3)
            )
            path = tmp_path / f"{i}.ckpt"
            options = {"ckpt_path": path} if resume else {"more": [Save(path)]}
            fit(model, callback, data(i), tmp_path / str(i), max_epochs=2, **options)
            return parameters(model)

        return run

    expected = together([Module(1, True), Module(2, True)], node(False))
    resumed = together([Module(3, True), Module(4, True)], node(True))
    for ours, theirs in zip(resumed, expected, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Save(lightning.Callback):
    """Saves after the first epoch, in the middle of a local phase."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def test_a_node_of_a_hub_pushes_all_that_it_has_learned(tmp_path):
    model, plain = Module(1), Module(1)
    hub = Hub()
    exchange = HubExchange(HubLink(hub, model))
    callback = LightningCallback(
        exchange=exchange, config=EditConfig(every=3, landing="arrival", timeout_s=5)
    )
    fit(model, callback, data(0), tmp_path)
    expected = local_sgd(plain, [data(0)], loss, every=1)
    assert furthest(parameters(model), expected) < 1e-6
    assert furthest(anchors_of(hub, callback.sync), expected) < 1e-6


def test_a_callback_serves_one_fit(tmp_path):
    callback = LightningCallback(exchange=MeanExchange(MemoryWorld(1).node(0)), schedule=EverySteps(2))
    fit(Module(1), callback, data(0, 2), tmp_path)
    with pytest.raises(ValueError, match="serves one fit"):
        fit(Module(1), callback, data(0, 2), tmp_path)
    assert isinstance(callback.sync, LayerSync)
