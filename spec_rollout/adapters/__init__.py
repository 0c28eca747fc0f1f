"""Adapters of the engine to trainers of other libraries."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.adapters.trl_worker import TrlWorker, TrlWorkerConfig

__all__ = [
    "TrlWorker",
    "TrlWorkerConfig",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
