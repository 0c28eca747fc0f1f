"""Norms of `transformers` in float64, which by themselves round to float32 also in a float64 model."""

import functools

import torch


def normalize_exactly(model):
    """Make the RMSNorm classes of the model normalize float64 inputs in float64, and return the model.

    The classes are changed, not the instances: an engine refuses an instance with a forward of its own.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            _patch(type(module))
    return model


def _patch(kind):
    narrow = kind.forward
    if hasattr(narrow, "__wrapped__"):
        return

    @functools.wraps(narrow)
    def forward(self, x):
        if x.dtype != torch.float64:
            return narrow(self, x)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    kind.forward = forward
