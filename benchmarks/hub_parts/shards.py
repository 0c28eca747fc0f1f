"""Calculate what the hubs of a model of 70 B parameters need, from measured rates. Part of `benchmarks.hub`.

Nothing of this size is run. Several hubs own the units i with i % n == k (`hub.address = "A,B,..."`).
"""

from dataclasses import dataclass

BLOCKS, WIDTH, HIDDEN, VOCABULARY, KEYS = 80, 8192, 28_672, 128_256, 1024
"""Of Llama 3 70B (arXiv:2407.21783): blocks, width, width of the feed-forward layer, tokens, keys' width."""

BYTES_UP, BYTES_DOWN, BYTES_KEPT, BYTES_MERGED = 2, 4, 8, 12
"""Per parameter: a push in bf16; an anchor; anchor and momentum; the new arrays of a merge."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of one core."""

    path_gb_s: float
    """GB of fp32 from a push to the anchor: check and merge."""
    wire_gb_s: float
    """GB over gRPC to or from the hub."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Load of the hub with the most work, in a round in which each node pushes and pulls each unit once."""

    hubs: int
    params: int
    memory_gb: float
    push_s: float
    merge_s: float
    pull_s: float

    @property
    def core_s(self) -> float:
        """Return the time of a round on one core."""
        return self.push_s + self.merge_s + self.pull_s


def unit_sizes() -> list[int]:
    """Return the parameters of each unit: the blocks, and the unit `rest` with embedding and head."""
    attention = 2 * WIDTH * WIDTH + 2 * WIDTH * KEYS
    block = attention + 3 * WIDTH * HIDDEN + 2 * WIDTH
    return [block] * BLOCKS + [2 * VOCABULARY * WIDTH + WIDTH]


def largest(hubs: int, nodes: int, rates: Rates) -> Shard:
    """Return what the hub with the most parameters of so many hubs needs."""
    sizes = unit_sizes()
    own = max((sizes[k::hubs] for k in range(hubs)), key=sum)
    params = sum(own)
    return Shard(
        hubs,
        params,
        memory_gb=1e-9 * (BYTES_KEPT * params + BYTES_MERGED * max(own)),
        push_s=1e-9 * BYTES_UP * params * nodes / rates.wire_gb_s,
        merge_s=1e-9 * BYTES_DOWN * params * nodes / rates.path_gb_s,
        pull_s=1e-9 * BYTES_DOWN * params * nodes / rates.wire_gb_s,
    )


def hubs_for(round_s: float, nodes: int, rates: Rates) -> int | None:
    """Return the least number of hubs of one core each for a round in `round_s`; None if none is enough."""
    counts = range(1, len(unit_sizes()) + 1)
    return next((n for n in counts if largest(n, nodes, rates).core_s <= round_s), None)
