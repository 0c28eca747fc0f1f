"""A CNN with BatchNorm, trained by nodes of a hub in a loop of one's own.

aedit hub examples/hub.toml --directory OUT/hub    # once, in a terminal of its own
python examples/hub_cnn.py HOST:PORT NAME          # as many as you like, at any time; Ctrl-C leaves
"""

import sys

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from aedit import HubExchange, LayerSync

NUM_SAMPLES, BATCH, STEPS = 4096, 32, 120


def images(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return samples of the run's data: 8 x 8 images of a bright row or column, and which it is."""
    x, y = torch.empty(len(positions), 1, 8, 8), torch.empty(len(positions), dtype=torch.long)
    for i, position in enumerate(positions.tolist()):
        random = torch.Generator().manual_seed(position % NUM_SAMPLES)
        x[i] = 0.5 * torch.randn(1, 8, 8, generator=random)
        y[i], where = torch.randint(8, (2,), generator=random) % torch.tensor([2, 8])
        (x[i, 0] if y[i] else x[i, 0].T)[where] += 2.0
    return x, y


def make_model() -> nn.Module:
    """Return a small CNN."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 2),
    )  # fmt: skip


def main(address: str, name: str, keys: str | None = None) -> None:
    """Train on the samples that the hub leases to this node."""
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    exchange = HubExchange.join(address, model, name=name, keys=keys, num_samples=NUM_SAMPLES)
    sync = LayerSync.of(model, inner, exchange=exchange)
    with sync:
        try:
            while sync.steps < STEPS:
                x, y = images(torch.from_numpy(exchange.lease(BATCH)))
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                inner.step()
                inner.zero_grad()
                exchange.loss = loss.item()
                sync.step()
        except KeyboardInterrupt:
            print("leaving: what was learned since the last push is pushed")

    # Running statistics do not travel over a hub: they are computed anew for the final parameters.
    update_bn([images(torch.arange(i, i + 64))[0] for i in range(0, 512, 64)], model)
    model.eval()
    x, y = images(torch.arange(512, 1024))
    right = (model(x).argmax(1) == y).float().mean().item()
    print(f"{name}: {sync.steps} steps, accuracy {100 * right:.1f} %")


if __name__ == "__main__":
    main(*sys.argv[1:])
