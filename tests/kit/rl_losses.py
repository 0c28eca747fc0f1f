"""Policy losses of tests."""

import torch

from aedit.spec_rollout.rl import find_loss

SEEN = []
"""Inputs of all calls, in order, detached."""


def spy(inputs, settings):
    """Return the default loss, and keep the inputs."""
    found = {name: getattr(inputs, name) for name in inputs.__slots__}
    SEEN.append(
        {name: value.detach().clone() if torch.is_tensor(value) else value for name, value in found.items()}
    )
    return find_loss("dppo-tv")(inputs, settings)
