"""Generations of a part of a swarm, which are the upper bits of its terms.

A part whose replicas are all lost is founded again, with a new journal. Each founding is a lineage: its terms
are above all terms of earlier generations, so that whoever meets both follows the newer one. Two peers that
found one generation, which their votes exclude, would have terms of different lineages as well.
"""

from hashlib import sha256

MOST_GENERATIONS = 2**20
_COUNT_BITS, _FOUNDER_BITS, _VERSION_BITS = 20, 12, 32


def generation(term: int) -> int:
    """Return how often the part had been founded again when this term began."""
    return term >> (_COUNT_BITS + _FOUNDER_BITS)


def lineage(term: int) -> int:
    """Return the number of the founding that the term belongs to; 0 for the first one."""
    return term >> _COUNT_BITS


def last_term_before(generation: int, founder: bytes) -> int:
    """Return the number below the first term of a lineage. 0 in generation 0.

    founder: Names the peer that founds it.
    """
    mark = int.from_bytes(sha256(founder).digest()[:2], "big") >> (16 - _FOUNDER_BITS) if generation else 0
    return (generation << _FOUNDER_BITS | mark) << _COUNT_BITS


def term_text(term: int) -> str:
    """Return the term for people: `3`, or `2:3` for the third one of generation 2."""
    count = term & ((1 << _COUNT_BITS) - 1)
    return f"{generation(term)}:{count}" if generation(term) else str(term)


def stamp(generation: int, version: int) -> int:
    """Return the age of an anchor as one number, greater for a newer anchor; 0 for none."""
    return generation << _VERSION_BITS | version if version else 0


def generation_of(stamp: int) -> int:
    """Return the generation of the part that made the anchor."""
    return stamp >> _VERSION_BITS


def version_of(stamp: int) -> int:
    """Return the version of the anchor, as its generation counted them."""
    return stamp & ((1 << _VERSION_BITS) - 1)
