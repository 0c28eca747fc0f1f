"""Tests HeLoCo against the paper's equations in float64, alone and through the state machine of a hub."""

import numpy as np
import pytest
from kit.hub_machine import LAYOUT, World, config, plan, values

from aedit.async_sgd.rules import OuterConfig
from aedit.async_sgd.rules.outer import AGREES, CONFIDENCE, MOST_TAKEN, heloco_coefficients
from aedit.launch.config import RunConfig

LR, MU = 0.9, 0.8


def corrected(D, m, k):
    """Return the corrected block, in the letters of arXiv:2606.00271."""
    if not np.linalg.norm(D) or not np.linalg.norm(m):
        return D
    u, v = D / np.linalg.norm(D), m / np.linalg.norm(m)
    c = float(u @ v)
    conf = np.linalg.norm(D) / (np.linalg.norm(D) + CONFIDENCE * np.linalg.norm(m))
    if c >= AGREES:
        return D
    if c < 0:
        beta = min(k * -c * conf, MOST_TAKEN)
        return D - beta * c * np.linalg.norm(D) * v
    share = min(k * (1 - c) * conf, 1.0)
    turned = (1 - share) * u + share * v
    return np.linalg.norm(D) * turned / np.linalg.norm(turned)


@pytest.mark.parametrize("cosine", [-1.0, -0.9, -0.3, 0.01, 0.2, 0.49, 0.6, 1.0])
@pytest.mark.parametrize("k", [0.0, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("length", [0.01, 1.0, 30.0])
def test_the_coefficients_are_those_of_the_equations(cosine, k, length):
    rng = np.random.default_rng(3)
    v, w = np.linalg.qr(rng.normal(size=(50, 2)))[0].T
    m, D = 2.0 * v, length * (cosine * v + np.sqrt(1 - cosine**2) * w)
    a, b = heloco_coefficients(D @ D, m @ m, D @ m, k)
    np.testing.assert_allclose(a * D + b * m, corrected(D, m, k), rtol=1e-9, atol=1e-12)
    if cosine >= 0:
        np.testing.assert_allclose(np.linalg.norm(a * D + b * m), length)
    assert cosine >= 0 or (a * D + b * m) @ m >= D @ m - 1e-9  # contradicts less, and never the other way
    assert cosine >= 0 or (a * D + b * m) @ m <= 1e-9


def test_without_a_direction_there_is_nothing_to_correct():
    assert heloco_coefficients(0.0, 1.0, 0.0, 1.0) == (1.0, 0.0)
    assert heloco_coefficients(1.0, 0.0, 0.0, 1.0) == (1.0, 0.0)
    assert heloco_coefficients(float("inf"), 1.0, 1.0, 1.0) == (1.0, 0.0)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_hub_takes_the_papers_steps_tensor_by_tensor(nodes):
    """With one node each merge is a round; with two each arrival is half of one."""
    outer = OuterConfig(kind="heloco", lr=LR, momentum=MU, correction=2.0)
    made = World(plan(config(), outer=outer))
    for node in range(nodes):
        made.join(f"node{node}")
    made.found()
    s = 1 / nodes
    decay, ends = MU**s, np.cumsum([tensor.numel for tensor in LAYOUT.units[0].tensors])[:-1]
    theta, m = np.zeros(8), np.zeros(8)
    rng, changed = np.random.default_rng(5), 0
    for number in range(12):
        D = rng.normal(size=8).astype(np.float32)
        made.push(number % nodes, D)
        made.settle()
        blocks = zip(np.split(D.astype(np.float64), ends), np.split(m, ends), strict=True)
        better = np.concatenate([corrected(x, y, 2.0) for x, y in blocks])
        changed += not np.allclose(better, D)
        m = decay * m + (1 - MU) * s * better
        theta = theta - LR * (s * better + MU * (1 - decay) / (1 - MU) * m)
        np.testing.assert_allclose(values(made), theta, rtol=1e-4, atol=1e-5)
    assert changed >= 6
    assert made.replayed().anchor(0)[1].tobytes() == made.hub.anchor(0)[1].tobytes()


def test_without_a_hub_it_is_refused():
    with pytest.raises(ValueError, match=r"outer\.kind needs a hub"):
        RunConfig(outer=OuterConfig(kind="heloco"))
