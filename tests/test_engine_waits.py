"""Tests that the host waits for the device only to read the result of a step's verification.

It also compares a few elements of the weights before a step: then the device has nothing to do.

Whatever makes the host wait for a GPU is detected on a CPU too: numbers read out of tensors, shapes that
depend on them, and tensors made of Python's numbers (those wait unless they come from pinned memory, as
`sent` makes them).
"""

import sys

import pytest
import torch
from kit.drafters import engine_of, fresh
from kit.rollouts import KINDS, samples, tiny_policy
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from aedit.spec_rollout.choose.arms import real_nodes
from aedit.spec_rollout.drafters import Draft
from aedit.spec_rollout.engine.verification import _to_host, verified_nodes
from aedit.spec_rollout.sampling.noise import _words_on_cpu
from aedit.spec_rollout.sampling.verify import _argmax as largest
from aedit.weights import WeightWatch

READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}
SENDING = "aedit.spec_rollout.model.model_support"
ARMS = ["off", "layer:4", "layer:3x2x6", "layer:1", "suffix:4", "suffix:3x2x6"]


class StallWatch(TorchDispatchMode):
    """Records what waits, by the name of the function that asked for it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        is_mask = name.startswith("index") and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool
            for x in (args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ())
        )
        if name in READS or is_mask or (name == "repeat_interleave" and len(args) == 1):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def watch(monkeypatch):
    mode = StallWatch()
    _device_constructors()  # remembers the functions that it finds at its first call

    def note(owner, name, allowed):
        right = getattr(owner, name)

        def noted(*args, **kwargs):
            caller = sys._getframe(1)
            if (caller.f_globals["__name__"], caller.f_code.co_name) not in allowed:
                mode.seen.append(f"{caller.f_code.co_name}: {name}")
            return right(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    look = WeightWatch.changed

    def unseen(*args, **kwargs):
        with _disable_current_modes():
            return look(*args, **kwargs)

    monkeypatch.setattr(WeightWatch, "changed", unseen)
    verdict = (_to_host.__module__, _to_host.__name__)
    counts = (verified_nodes.__module__, verified_nodes.__name__)  # reads nothing on a device
    on_cpu = {(each.__module__, each.__name__) for each in (largest, _words_on_cpu)}
    allowed = {"tolist": {verdict, counts}, "numpy": on_cpu}
    for name in ("tolist", "numpy", "cpu", "item"):
        note(torch.Tensor, name, allowed.get(name, set()))
    for name in ("tensor", "as_tensor", "from_numpy"):
        note(torch, name, {(SENDING, "to_device"), *on_cpu})
    return mode


def seen_by(watch, policy, arms):
    """Return what waited while samples began, went on and ended."""
    engine = engine_of(policy, 4, arms, layer=fresh(policy), suffix=True)
    for prompt in samples(KINDS):
        engine.add(prompt)
    watch.seen.clear()
    with watch:
        while engine.running or engine.waiting:
            engine.step()
    assert engine.status()["steps"] > 3 * len(arms)
    return set(watch.seen)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(dtype=torch.float32)


def test_counts_of_a_draft_on_a_device_are_not_read():
    """The tensors of the device "meta" have no values: reading one fails."""
    tokens = torch.zeros(3, 4, dtype=torch.int64, device="meta")
    draft = Draft(tokens, None, tokens[:, 0], torch.zeros(3, 4, device="meta"))
    assert verified_nodes(draft) == (4, 4, 4)
    assert real_nodes(draft) == 4


def test_a_step_waits_for_nothing_but_its_verdict(policy, watch):
    assert seen_by(watch, policy, ARMS) == set()


@pytest.mark.parametrize(
    ("place", "wait"),
    [
        (
            "aedit.spec_rollout.engine.verification.accept_path",
            lambda draft, tokens, depth=None: bool((tokens >= 0).all()),
        ),
        (
            "aedit.spec_rollout.engine.verification.node_depths",
            lambda parents, depth=None: parents[parents > 0],
        ),
        ("aedit.spec_rollout.engine.verification.warp_logits", lambda logits, *rest: torch.tensor(0.0)),
        ("aedit.spec_rollout.engine.verification.logprobs", lambda logits, *rest: logits[0, 0, 0].item()),
    ],
)
def test_what_would_wait_is_seen(policy, watch, monkeypatch, place, wait):
    module, _, name = place.rpartition(".")
    module = sys.modules[module]
    right = getattr(module, name)

    def waiting(*args):
        wait(*args)
        return right(*args)

    monkeypatch.setattr(module, name, waiting)
    assert seen_by(watch, policy, ARMS) != set()
