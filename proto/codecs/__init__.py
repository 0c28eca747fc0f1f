"""Encodings of a unit's numbers. NumPy only.

- `codecs`: the interface, fp32, bf16, int8, 4 bits, ternary, and error feedback; begin here
- `blocks`, `topk`: scales of blocks, and the largest values of each block

Called by `proto.agent`, `proto.versions`, `async_sgd` and `launch`.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.proto.codecs.blocks import to_bf16
    from aedit.proto.codecs.codecs import Codec, Feedback, Floats, Payload, codec, slices, try_codec

__all__ = [
    "Codec",
    "Feedback",
    "Floats",
    "Payload",
    "codec",
    "slices",
    "to_bf16",
    "try_codec",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
