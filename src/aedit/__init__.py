"""Asynchronous decentralized training: local SGD between nodes of unequal speed, with or without a hub.

The names below are the public API, with those of `aedit.edit`, `aedit.async_sgd`, `aedit.proto` and
`aedit.spec_rollout`; each is imported when it is first used.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit import async_sgd, edit, proto, spec_rollout
    from aedit.clock import VirtualClock
    from aedit.edit import (
        EditCallback,
        EditConfig,
        EverySeconds,
        EverySteps,
        HubExchange,
        LayerSync,
        LightningCallback,
        MeanExchange,
        PenaltyConfig,
    )
    from aedit.proto.transports import TorchTransport

__version__ = "0.1.0"

__all__ = [
    "EditCallback",
    "EditConfig",
    "EverySeconds",
    "EverySteps",
    "HubExchange",
    "LayerSync",
    "LightningCallback",
    "MeanExchange",
    "PenaltyConfig",
    "TorchTransport",
    "VirtualClock",
    "async_sgd",
    "edit",
    "proto",
    "spec_rollout",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
