"""Tests the rollouts that a rank keeps for views: which ones, what they say, and how the page shows them."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from kit.drafters import engine_of, fresh
from kit.plain_grpo import Recording
from kit.rl_nodes import config_of, run
from kit.rollouts import KINDS, samples, tiny_policy
from test_page import EVIL, Tables
from test_views import full_run

from aedit.launch.records import KeptRollout, KeptToken, RolloutStore, RunFollower, read_rollouts
from aedit.launch.views.page.contents import contents
from aedit.launch.views.page.html import file_page, live_page


def numbers(folder):
    return sorted(int(path.stem) for path in folder.glob("*.json"))


def offer(store, steps, clock, folder, every_s=1.0):
    """Offer a group at each step; return the numbers that were kept after each."""
    seen = []
    for step in steps:
        clock[0] += every_s
        if store.wants(step):
            store.add({"step": step})
        seen.append(numbers(folder))
    return seen


def test_a_store_is_bounded_even_and_has_the_newest(tmp_path):
    clock = [0.0]
    seen = offer(RolloutStore(tmp_path, 8, lambda: clock[0]), range(1000), clock, tmp_path)
    assert seen[7] == list(range(8))
    assert max(map(len, seen)) == 8
    for count, kept in enumerate(seen, 1):
        *even, newest = kept
        assert kept[0] == 0
        assert count - 1 - newest <= 10  # seconds, at a group a second
        gaps = {after - before for before, after in itertools.pairwise(even)}
        assert len(gaps) <= 1  # every n-th
        assert all(gap & (gap - 1) == 0 for gap in gaps)
        assert len(kept) >= min(count, 4)  # half of the places are used


def test_the_newest_group_is_written_after_ten_seconds_only(tmp_path):
    clock, store = [0.0], RolloutStore(tmp_path, 2, lambda: clock[0])
    written = []
    for step in range(100):
        clock[0] += 0.25
        if store.wants(step):
            store.add({"step": step})
            written.append(step)
    assert len(written) <= 100 * 0.25 / 10 + 8  # the evenly spaced ones are 0, 1, 2, 4, 8, 16, 32, 64


def test_a_store_of_nothing_writes_nothing(tmp_path):
    store = RolloutStore(tmp_path / "x", 0)
    assert not store.wants(0)
    assert not (tmp_path / "x").exists()


def test_a_resumed_run_removes_the_groups_of_steps_that_it_repeats(tmp_path):
    clock = [0.0]
    offer(RolloutStore(tmp_path, 4, lambda: clock[0]), range(20), clock, tmp_path, every_s=10.0)
    assert numbers(tmp_path) == [0, 8, 16, 19]
    (tmp_path / "00000008.json").write_text("{torn")
    (tmp_path / "mine.json").write_text("kept")
    again = RolloutStore(tmp_path, 4, lambda: clock[0])
    assert again.wants(17)
    again.add({"step": 17})
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "00000000.json",
        "00000016.json",
        "00000017.json",
        "mine.json",
    ]


def test_an_engine_knows_which_tokens_were_drafted():
    policy = tiny_policy()
    engine = engine_of(policy, 4, ("layer:4", "off", "layer:2"), layer=fresh(policy), suffix=False)
    for prompt in samples(KINDS)[:6]:
        engine.add(prompt)
    lengths, expected, finished = {}, {}, []
    while engine.running or engine.waiting:
        before = {id(each): (each, len(each.tokens)) for each in engine.running}
        ended = engine.step().finished
        for each, length in before.values():
            # All tokens of a pass but the last one were proposed, unless the rollout has ended among them.
            new = range(length, len(each.tokens))
            lengths.setdefault(each.prompt.key, []).append(len(new))
            expected.setdefault(each.prompt.key, set()).update(new[:-1])
        finished += ended
    assert len(finished) == 6
    assert any(rollout.drafted for rollout in finished)
    for rollout in finished:
        assert rollout.knows_drafted
        last = len(rollout.tokens) - 1
        assert set(rollout.drafted) - {last} == expected.get(rollout.prompt.key, set()) - {last}
    assert not replace(finished[0], passes=finished[0].passes + 5).knows_drafted


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the directory of a node that has trained, and all groups of its batches."""
    config = config_of(tmp_path_factory.mktemp("kept"), drafter__kind="suffix", rl__keep_rollouts=64)
    recording = Recording()
    run(config, recording.watch)
    return config, recording


def text_of(tokens):
    """Return the text of ids of the tokenizer `byte`."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def test_kept_rollouts_say_what_the_loop_has_trained(trained):
    config, recording = trained
    found = RunFollower(Path(config.dir) / config.name).rollouts(64)
    assert len(found) == config.train.steps * config.rl.group_size
    by_step = {}
    for each in found:
        by_step.setdefault(each.step, []).append(each)
    assert sorted(by_step) == list(range(config.train.steps))
    for step, groups in enumerate(recording.batches):
        first = groups[0]
        mean = sum(reward for *_, reward in first) / len(first)
        assert len({each.position for each in by_step[step]}) == 1
        for each in by_step[step]:
            prompt, tokens, logprobs, versions, reward = first[each.sample]
            assert [token.id for token in each.tokens] == tokens
            assert [token.logprob for token in each.tokens] == pytest.approx(logprobs, abs=1e-5)
            assert [token.version for token in each.tokens] == versions
            assert [token.text for token in each.tokens] == [text_of([token]) for token in tokens]
            assert each.completion == text_of(tokens)
            assert each.prompt == text_of(prompt)
            assert each.reward == pytest.approx(reward)
            assert each.values == {"kit.rl_rewards:digits": pytest.approx(reward)}
            assert each.advantage == pytest.approx(reward - mean)  # rl.advantage = "mean"
            assert all(token.drafted is not None for token in each.tokens)


def kept(**changes):
    tokens = tuple(
        KeptToken(id=i, text=text, logprob=-float(i), version=3, drafted=i == 1)
        for i, text in enumerate(("a", "<b>", "\n"))
    )
    values = {"node": 1, "rank": 0, "t": 61.0, "step": 5, "position": 9, "sample": 2, "prompt": "2+2="}
    values |= {
        "completion": "a<b>\n",
        "tokens": tokens,
        "num_tokens": 3,
        "reward": 0.5,
        "values": {"exact": 1.0},
    }
    values |= {"advantage": -0.25, "finish_reason": "stop", "servers": ()}
    return KeptRollout(**(values | changes))


@pytest.mark.parametrize("write_page", [file_page, live_page])
def test_the_page_shows_rollouts_and_their_tokens(tmp_path, write_page):
    page = contents(RunFollower(full_run(tmp_path)).poll())
    text = write_page(page, [kept(), kept(node=0, reward=float("nan"))])
    assert "reward 0.5, advantage -0.250, 3 tokens, stop" in text
    assert "rewards: exact 1.000; policy versions: 3 (3 tokens); drafted: 1 of 3" in text
    assert '<s class="p1" title="1: -1.000, version 3, drafted">&lt;b&gt;</s>' in text
    assert "<h3>Completion</h3><pre>\na&lt;b&gt;\n</pre>" in text
    found = [values for tag, values in Tables(text).tags if tag == "details"]
    assert [(each["data-node"], each["data-reward"], each["data-length"]) for each in found] == [
        ("1", "0.5", "3"),
        ("0", "", "3"),
    ]


def test_hostile_completions_stay_text(tmp_path):
    page = contents(RunFollower(full_run(tmp_path)).poll())
    token = KeptToken(id=1, text=EVIL, logprob=-1.0, version=1, drafted=None)
    evil = {"prompt": EVIL, "completion": EVIL, "values": {EVIL: 1.0}, "finish_reason": EVIL}
    parsed = Tables(live_page(page, [kept(**evil, tokens=(token,), servers=((0, EVIL),))]))
    assert "img" not in {tag for tag, _ in parsed.tags}
    assert len([tag for tag, _ in parsed.tags if tag == "script"]) == 3
    assert not [name for _, found in parsed.tags for name in found if name.startswith("on")]


BROKEN = (b"", b"[]", b"{}", b"\xff", b'{"rollouts": [{}]}', b"[" * 100_000, b'{"rollouts": 7, "t": "x"}')


def test_broken_files_are_skipped(tmp_path):
    folder = tmp_path / "nodes" / "0" / "rollouts" / "0"
    folder.mkdir(parents=True)
    for number, content in enumerate(BROKEN):
        (folder / f"{number:08d}.json").write_bytes(content)
    (folder / "x.json").write_text("{}")
    (tmp_path / "nodes" / "evil").mkdir()
    assert read_rollouts(tmp_path, 10) == []
    line = {"t": 1.0, "step": 1, "position": 0, "prompt": "p", "rollouts": []}
    one = {
        "sample": 0,
        "completion": "c",
        "ids": [1],
        "texts": ["c"],
        "logprobs": [None],
        "versions": [[1, 0, 10**12]],
    }
    one |= {"drafted": None, "num_tokens": 1, "reward": None, "values": {}, "advantage": None}
    one |= {"finish_reason": "stop", "servers": []}
    (folder / "00000099.json").write_text(json.dumps(line | {"rollouts": [one]}))
    (found,) = read_rollouts(tmp_path, 10)
    assert found.tokens[0].drafted is None
