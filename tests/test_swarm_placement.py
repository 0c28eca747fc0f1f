"""Tests rendezvous placement: balance against the binomial law, and what moves when a peer comes or goes."""

import hashlib
from collections import Counter

import numpy as np
import pytest
from kit.swarm import card_of, key_of
from scipy import stats

from aedit.proto.swarm import candidates, hosts_of, ranking

PEERS = 1000
PARTS = 64
COPIES = 3


def keys_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.bytes(32) for _ in range(count)]


def hosts(keys, parts=PARTS):
    return {part: hosts_of("run", part, keys, COPIES) for part in range(parts)}


def test_a_score_is_a_sha256_over_purpose_run_part_and_key():
    signed = b"aedit placement 1\n" + hashlib.sha256(b"run").digest() + b"\0\0\0\5"
    scores = {hashlib.sha256(signed + key).digest(): key for key in keys_of(50)}
    assert ranking("run", 5, keys_of(50)) == tuple(scores[score] for score in sorted(scores, reverse=True))


def test_a_ranking_depends_on_run_and_part_and_not_on_the_order_of_the_keys():
    keys = keys_of(50)
    assert ranking("run", 1, keys) == ranking("run", 1, keys[::-1]) == ranking("run", 1, frozenset(keys))
    assert len({ranking("run", 1, keys), ranking("run", 2, keys), ranking("other", 1, keys)}) == 3
    assert sorted(ranking("run", 1, keys)) == sorted(keys)
    assert hosts_of("run", 1, keys, 3) == ranking("run", 1, keys)[:3]
    assert hosts_of("run", 1, keys[:2], 3) == ranking("run", 1, keys[:2])
    assert hosts_of("run", 1, [], 3) == ()


@pytest.mark.parametrize(("peers", "parts"), [(PEERS, 400), (20, PARTS * 30)])
def test_parts_are_spread_over_peers_as_by_independent_draws(peers, parts):
    """Each part is at a peer with probability copies / peers, so a peer's number of parts is binomial."""
    keys = keys_of(peers)
    load = Counter(key for found in hosts(keys, parts).values() for key in found)
    counts = np.array([load[key] for key in keys])
    law = stats.binom(parts, COPIES / peers)
    assert counts.sum() == parts * COPIES
    assert counts.max() <= law.isf(1e-4 / peers)
    assert counts.var() == pytest.approx(law.var(), rel=5 * (2 / peers) ** 0.5)
    owners = Counter(found[0] for found in hosts(keys, parts).values())
    assert max(owners.values()) <= stats.binom(parts, 1 / peers).isf(1e-4 / peers)


def test_a_joining_peer_moves_the_parts_in_whose_first_places_it_comes_and_no_others():
    keys = keys_of(PEERS + 1)
    before, after, new = hosts(keys[:-1]), hosts(keys), keys[-1]
    moved = {part for part in before if before[part] != after[part]}
    assert moved == {part for part in after if new in after[part]}
    for part in moved:
        assert tuple(key for key in after[part] if key != new) == before[part][:-1]
    assert len(moved) <= stats.binom(PARTS, COPIES / (PEERS + 1)).isf(1e-6)


def test_a_leaving_peer_moves_only_its_own_parts_and_only_one_copy_of_each():
    keys = keys_of(PEERS)
    before = hosts(keys)
    gone = before[0][0]
    after = hosts([key for key in keys if key != gone])
    moved = {part for part in before if before[part] != after[part]}
    assert moved == {part for part in before if gone in before[part]}
    for part in moved:
        kept = tuple(key for key in before[part] if key != gone)
        assert after[part][: len(kept)] == kept
    assert after[0][0] == before[0][1]  # the second of the ranking is the next owner


def test_clients_and_peers_that_leave_are_no_candidates():
    peers = [card_of(key_of(1)), card_of(key_of(2), address=""), card_of(key_of(3), leaving=True)]
    assert candidates({card.public_key: card for card in peers}) == {key_of(1).public}
