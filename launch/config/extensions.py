"""Check objects that the configuration names by import path: each is run once before anything starts."""

from collections.abc import Callable

from aedit.launch.config.config import RunConfig
from aedit.types import UserError, imported, is_import_path

_NUMPY = "NumPy arrays, which it gets in a hub"
_TORCH = "torch tensors, which it gets in a node"


def check_imports(config: RunConfig, *, node: bool = False) -> None:
    """Raise UserError if an object that the configuration names by import path cannot be used.

    Each one is imported and called once with small arrays of the kind that it gets in the run: NumPy's in a
    hub, torch tensors in a node. What imports torch is imported only for a run that names such an object.

    node: check only what a node of a hub needs: codecs and policy loss. Outer optimizer and merge rule run in
    the hub, or in a peer of a swarm that others can reach.
    """
    hub, codec = config.hub, ("num_bytes", "encode_slice", "decode")
    _check("hub.codec", hub.codec, codec, _NUMPY, lambda: _try_codec(hub.codec))
    _check("hub.codec_down", hub.codec_down, codec, _NUMPY, lambda: _try_codec(hub.codec_down))
    _check("rl.loss", config.rl.loss, (), _TORCH, lambda: _try_loss(config))
    if not node or (config.swarm.has_parts and config.swarm.listen):
        arrays = _NUMPY if config.has_hub else _TORCH
        _check("outer.kind", config.outer.kind, ("init", "update"), arrays, lambda: _try_outer(config))
        _check("hub.merge", hub.merge, (), _NUMPY, lambda: _try_merge(hub.merge))


def _check(key: str, path: str, methods: tuple[str, ...], arrays: str, attempt: Callable[[], None]) -> None:
    if not is_import_path(path):
        return
    try:
        imported(path, key, methods)
    except ValueError as error:
        raise UserError(f"{error}; install the module here, or add its folder to PYTHONPATH") from None
    try:
        attempt()
    except Exception as error:  # of code that is not ours
        reason = " ".join(str(error).removeprefix(f"{key}: {path} ").split()) or type(error).__name__
        where = type(error).__name__ if not isinstance(error, ValueError) else "refused"
        raise UserError(f"{key}: {path}, called with {arrays}: {where}: {reason}") from None


def _try_codec(path: str) -> None:
    from aedit.proto.codecs import try_codec

    try_codec(path)


def _try_loss(config: RunConfig) -> None:
    from aedit.spec_rollout.rl import LossSettings, try_loss

    try_loss(config.rl.loss, LossSettings.of(config.rl))


def _try_outer(config: RunConfig) -> None:
    import numpy as np

    from aedit.async_sgd.rules import make_outer, try_outer

    anchor = np.linspace(-1, 1, 5, dtype=np.float32)
    outer, look_ahead = make_outer(config.outer), config.outer.look_ahead
    if config.has_hub:
        try_outer(outer, anchor, look_ahead=look_ahead)
    else:
        import torch

        try_outer(outer, torch.from_numpy(anchor), look_ahead=look_ahead)


def _try_merge(path: str) -> None:
    from aedit.async_sgd.rules import try_merge

    try_merge(path)
