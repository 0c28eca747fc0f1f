"""Agents and a real hub that is killed at any moment: what was pushed is in the anchors, once."""

import threading

import numpy as np
from agents import node, order, plan, until
from hub_processes import HubProcess, ending

from aedit.launch.provenance import source_digest
from aedit.proto.link import Verdict

RUN = """
name = "test"
dir = "{dir}"
[train]
steps = 100000
[edit]
every = 10
landing = "arrival"
[outer]
kind = "average"
lr = 1.0
[hub]
address = "127.0.0.1:0"
standby = "{standby}"
weights = "uniform"
codec = "fp32"
beat_s = 0.1
expire_s = 3.0
[hub.staleness]
rule = "constant"
[hub.screen]
threshold = 1e9
cosine = false
"""
ROUNDS, KILLS = 12, 3


def start_hub(directory, standby=""):
    (directory / "run.toml").write_text(RUN.format(dir=directory, standby=standby))
    return HubProcess(directory / "run.toml", directory / "hub")


def member(address, name, **changes):
    settings = {"code": source_digest(), "beat_s": 0.1, "expire_s": 3.0, "samples_per_step": 2}
    return plan([address], name=name, **(settings | changes))


def train(link, seed, merged, reached):
    """Push whole numbers, whose sums fp32 holds exactly; what is refused goes with the next push."""
    rng = np.random.default_rng(seed)
    versions = list(link.join(30))
    kept = [np.zeros_like(v) for v in link.outbox]
    for seq in range(1, ROUNDS + 1):
        for unit in (0, 1):
            kept[unit] += rng.integers(-8, 9, kept[unit].size)
            order(link, unit, seq, kept[unit], versions[unit])
        for unit in (0, 1):
            answer = until(lambda u=unit, s=seq: link.answer(u, s), "an answer", deadline_s=60)
            assert answer.version >= versions[unit]
            versions[unit] = answer.version
            if answer.verdict == Verdict.MERGED:
                merged[unit] += kept[unit]
                kept[unit][:] = 0
        reached[seed] = seq
    link.leave(30)


def test_a_hub_that_is_killed_again_and_again_has_every_push_once(tmp_path):
    hub = start_hub(tmp_path)
    address, first = hub.address, [np.zeros(22, np.float32), np.ones(5000, np.float32)]
    made = [member(address, name) for name in "ab"]
    with node(made[0], mode="process", start=first) as one, node(made[1], start=first) as two:
        merged = [[np.zeros_like(v) for v in first] for _ in range(2)]
        reached = [0, 0]
        threads = [
            threading.Thread(target=train, args=(link, i, merged[i], reached))
            for i, link in enumerate((one, two))
        ]
        for thread in threads:
            thread.start()
        for kill in range(KILLS):
            until(lambda k=kill: reached[0] > 3 * k, "the rounds before the kill", deadline_s=60)
            hub.kill()
            hub = start_hub(tmp_path)
            assert hub.address == address
        with ending(hub):
            for thread in threads:
                thread.join(90)
            assert not any(thread.is_alive() for thread in threads)
            with node(member(address, "c"), start=[0, 0]) as third:
                third.join(30)
                for unit in (0, 1):
                    wanted = first[unit] - merged[0][unit] - merged[1][unit]
                    assert np.array_equal(third.anchors[unit], wanted)
    assert merged[0][0].any()
    assert merged[1][1].any()
