"""Asynchronous decentralized training: local SGD between nodes of unequal speed, with or without a hub.

The names below are the public API, with those of `aedit.edit`, `aedit.async_sgd`, `aedit.proto` and
`aedit.spec_rollout`; each is imported when it is first used.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit import async_sgd, edit, proto, spec_rollout
    from aedit.clock import VirtualClock
    from aedit.edit.config import EditConfig, PenaltyConfig
    from aedit.edit.hf import EditCallback
    from aedit.edit.hub_exchange import HubExchange
    from aedit.edit.lightning import LightningCallback
    from aedit.edit.mean_exchange import MeanExchange
    from aedit.edit.schedule import EverySeconds, EverySteps
    from aedit.edit.sync import LayerSync
    from aedit.proto.transports.c10d import TorchTransport

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
    __getattr__, __dir__ = exports(
        "aedit",
        {
            "EditCallback": "aedit.edit.hf",
            "EditConfig": "aedit.edit.config",
            "EverySeconds": "aedit.edit.schedule",
            "EverySteps": "aedit.edit.schedule",
            "HubExchange": "aedit.edit.hub_exchange",
            "LayerSync": "aedit.edit.sync",
            "LightningCallback": "aedit.edit.lightning",
            "MeanExchange": "aedit.edit.mean_exchange",
            "PenaltyConfig": "aedit.edit.config",
            "TorchTransport": "aedit.proto.transports.c10d",
            "VirtualClock": "aedit.clock",
            "async_sgd": "aedit.async_sgd",
            "edit": "aedit.edit",
            "proto": "aedit.proto",
            "spec_rollout": "aedit.spec_rollout",
        },
    )
