"""Tests the ledger of leases of the fault tests: it holds for the hub, and breaks with each broken hub."""

import random

import pytest
from kit.hub_journal import check_leases
from kit.hub_machine import World, config, plan

from aedit.async_sgd.hub.pool import Pool

LEASE = 7
lease, use = Pool.lease, Pool.use


def run_of(seed):
    """Return world and trained positions of a run whose nodes lease, train, report, leave and die."""
    chance, world = random.Random(seed), World(plan(config(lease_samples=LEASE, expire_s=5.0)))
    held, kept = {}, []
    for _ in range(150):
        name = chance.choice("abc")
        if name not in held:
            node = world.join(name)
            held[name] = (node, [])
            continue
        node, blocks = held[name]
        act = chance.random()
        if act < 0.3:
            blocks += [[start, start, end] for start, end in world.lease(node, chance.randrange(1, LEASE))]
        elif act < 0.85 and blocks:
            block = blocks[0]
            upto = chance.randrange(block[1], block[2] + 1)
            kept += range(block[1], upto)
            world.do(world.hub.use(node, [(block[0], upto)]))
            block[1] = upto
            if upto == block[2]:
                del blocks[0]
        elif act > 0.95:
            world.do(world.hub.leave(node))
            del held[name]
    return world, kept


def check(runs):
    for world, kept in runs:
        check_leases(world.journal, world.hub.state.pool, kept)


def test_the_ledger_of_the_hub_holds():
    runs = [run_of(seed) for seed in range(10)]
    check(runs)
    assert min(len(kept) for _, kept in runs) > 50


def forgets_what_comes_back(pool, node):
    pool.leases.pop(node, {})


def gives_back_what_is_used(pool, node):
    blocks = [(start, end) for start, (_, end) in pool.leases.pop(node, {}).items()]
    pool.returned = sorted([*pool.returned, *blocks])


def leaves_on_offer_what_it_leases(pool, node, start, end):
    pool.watermark = max(pool.watermark, end)
    pool.leases.setdefault(node, {})[start] = (start, end)


def leaves_one_out(pool, node, start, end):
    lease(pool, node, start, end)
    pool.watermark += end == pool.watermark


def uses_one_more(pool, node, start, upto):
    use(pool, node, start, upto + 1)


def uses_the_whole_lease(pool, node, start, upto):
    pool.leases.get(node, {}).pop(start, None)


def does_not_note_use(pool, node, start, upto):
    pass


@pytest.mark.parametrize(
    ("method", "broken"),
    [
        ("give_back", forgets_what_comes_back),
        ("give_back", gives_back_what_is_used),
        ("lease", leaves_on_offer_what_it_leases),
        ("lease", leaves_one_out),
        ("use", uses_one_more),
        ("use", uses_the_whole_lease),
        ("use", does_not_note_use),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_hub_with_broken_leases_breaks_the_ledger(method, broken, monkeypatch):
    monkeypatch.setattr(Pool, method, broken)
    runs = [run_of(seed) for seed in range(10)]
    with pytest.raises(AssertionError):
        check(runs)


@pytest.mark.parametrize("change", ["twice", "lost", "foreign"])
def test_trained_positions_that_differ_from_the_journal_break_the_ledger(change):
    world, kept = run_of(0)
    changed = {"twice": [*kept, kept[0]], "lost": kept[1:], "foreign": [*kept, 10**6]}[change]
    with pytest.raises(AssertionError, match="trained twice"):
        check_leases(world.journal, world.hub.state.pool, changed)
