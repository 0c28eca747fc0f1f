"""Prefix cache: keys, values and features of blocks of tokens, for samples that begin with the same tokens.

A block is `BLOCK_TOKENS` tokens together with all tokens before them. Its key is (policy version, serial
number of the block before it, its token ids), so that equal keys mean equal texts: a lookup compares token
ids, and a collision of hashes cannot return the state of another text. A text that several samples share is
stored once. Blocks are evicted in the order of their last use, the end of a text before its beginning.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

BLOCK_TOKENS = 16
KEY_BYTES = 1024
"""Upper bound of the memory of a block besides its tensors."""

_Key = tuple[int, int, bytes]
"""Policy version, serial number of the block before (0 at the beginning of a text), token ids."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixBlock:
    """State of `BLOCK_TOKENS` tokens after those of other blocks, as copies."""

    key: _Key
    serial: int
    kv: Tensor
    """(layers, 2, key/value heads, BLOCK_TOKENS, head size)."""
    features_Tf: Tensor | None
    """None if no drafter and no sink needs features."""

    @property
    def num_bytes(self) -> int:
        """Return the memory of the block in bytes."""
        features = 0 if self.features_Tf is None else self.features_Tf.nbytes
        return KEY_BYTES + self.kv.nbytes + features


class PrefixCache:
    """Blocks of texts whose samples ran on this engine, up to a number of bytes.

    A block counts as used after all blocks that follow it, and is evicted after them. So a stored block can
    always be reached from the beginning of its text.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Make an empty cache.

        Args:
            limit_bytes: Upper limit of `num_bytes`; 0 stores nothing.
        """
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[_Key, PrefixBlock] = OrderedDict()  # the least recently used first
        self._num_made = self._num_lookups = self._num_hits = self._num_hit_tokens = self._num_evicted = 0

    @property
    def is_on(self) -> bool:
        """Return true if blocks are stored."""
        return self.limit_bytes > 0

    def find(self, tokens: Sequence[int], version: int) -> list[PrefixBlock]:
        """Return the stored blocks that these tokens begin with. The lookup does not count as a use."""
        found: list[PrefixBlock] = []
        serial = 0
        for chunk in _chunks(tokens):
            block = self._blocks.get((version, serial, chunk))
            if block is None:
                break
            found.append(block)
            serial = block.serial
        return found

    def record_lookup(self, blocks: Sequence[PrefixBlock]) -> None:
        """Count a lookup that gave these blocks, and mark them as used."""
        self._num_lookups += 1
        self._num_hits += bool(blocks)
        self._num_hit_tokens += len(blocks) * BLOCK_TOKENS
        self._mark_used([block.key for block in blocks])

    def insert(
        self,
        known: Sequence[PrefixBlock],
        tokens: Sequence[int],
        version: int,
        read: Callable[[int, int], tuple[Tensor, Tensor | None]],
    ) -> None:
        """Store the blocks of a text that are not stored yet, as many as the limit allows.

        Other blocks are evicted, but none of the same text.

        Args:
            known: Result of `find` for these tokens.
            tokens: Tokens whose state exists. The last ones that do not fill a block are ignored.
            version: Version of the policy that computed the state.
            read: Returns copies of the keys and values, and of the features, of the tokens from the first
                index up to the second.
        """
        keys = [block.key for block in known]
        kept = set(keys)
        self._mark_used(keys)
        serial = known[-1].serial if known else 0
        for i, chunk in enumerate(_chunks(tokens)[len(known) :], len(known)):
            kv, features_Tf = read(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)
            self._num_made += 1
            block = PrefixBlock((version, serial, chunk), self._num_made, kv, features_Tf)
            if not self._make_room(block.num_bytes, kept):
                break
            self._blocks[block.key] = block
            self.num_bytes += block.num_bytes
            keys.append(block.key)
            kept.add(block.key)
            serial = block.serial
        self._mark_used(keys)

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()
        self.num_bytes = 0

    def status(self) -> dict[str, object]:
        """Return memory use and counts.

        `hits` of the `lookups` found at least one block, together `hit_tokens` tokens.
        """
        return {
            "bytes": self.num_bytes,
            "limit_bytes": self.limit_bytes,
            "blocks": len(self._blocks),
            "lookups": self._num_lookups,
            "hits": self._num_hits,
            "hit_tokens": self._num_hit_tokens,
            "evicted_blocks": self._num_evicted,
        }

    def _make_room(self, num_bytes: int, kept: set[_Key]) -> bool:
        """Evict until `num_bytes` more fit; return false if only blocks of the set `kept` are left."""
        while self.num_bytes + num_bytes > self.limit_bytes:
            oldest = next(iter(self._blocks), None)
            if oldest is None or oldest in kept:
                return False
            self.num_bytes -= self._blocks.pop(oldest).num_bytes
            self._num_evicted += 1
        return True

    def _mark_used(self, keys: Sequence[_Key]) -> None:
        """Mark the first blocks of a text as used, so that the first of them is evicted last."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def _chunks(tokens: Sequence[int]) -> list[bytes]:
    """Return the token ids of all whole blocks."""
    data, size = array("q", tokens).tobytes(), BLOCK_TOKENS * array("q").itemsize
    return [data[end - size : end] for end in range(size, len(data) + 1, size)]
