"""Tests that the memory of keys and values follows the tokens in use: pages of rows, and blocks of a pool."""

import mmap
import random
import re
import resource
import sys
from pathlib import Path

import pytest
import torch
from kit.rollouts import Flips, prefilled, tiny_policy
from test_draft_layer import layer_for
from test_target import close, drawn, made, own

from aedit.spec_rollout.drafters import LayerDrafter
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.engine.rows import EngineLimits
from aedit.spec_rollout.model import KVMemory, KVMemoryError, Target, kv_storage, make_target
from aedit.spec_rollout.model import cache as cache_module
from aedit.spec_rollout.model.kv_storage import KVBlocks, KVRows, KVSizes
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.system import use_huge_pages

CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")


def committed(tensor, kind="Anonymous"):
    """Return the bytes that the operating system has committed for the mapping of a tensor."""
    at, found = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(bounds[1], 16) <= at < int(bounds[2], 16)
        elif found and line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the tensor has no mapping")


@linux
def test_the_bytes_of_rows_are_those_that_the_system_commits():
    sizes = KVSizes(layers=2, rows=4, heads=3, slots=5000, head_dim=16)
    before = KVRows(sizes, torch.float32, CPU)
    storage = KVRows(sizes, torch.float32, CPU)
    start = committed(storage.tensor)
    for row, count in ((0, 1), (1, 64), (2, 65), (3, 1000)):
        storage.write(row, 0, torch.ones(2, 2, 3, count, 16))
        assert committed(storage.tensor) - start == storage.kv_bytes
    pages = 1 + 1 + 2 + 16
    assert storage.kv_bytes == 2 * 2 * 3 * pages * mmap.PAGESIZE
    assert storage.kv_bytes_reserved == 2 * 2 * 3 * 4 * 79 * mmap.PAGESIZE
    storage.release(3)
    assert storage.kv_bytes == 2 * 2 * 3 * 4 * mmap.PAGESIZE
    assert committed(storage.tensor) - start == storage.kv_bytes
    assert storage.read(3, 0, 1000).abs().sum() == 0
    assert storage.read(2, 0, 65).eq(1).all()
    for row in range(3):
        storage.release(row)
    assert committed(storage.tensor) - start == storage.kv_bytes == before.kv_bytes == 0


@linux
def test_sixteen_rows_of_32_k_tokens_of_a_7b_shape_take_what_was_written():
    """The room is 256 GiB of address space in bf16, the layers of Llama 2 7B."""
    sizes = KVSizes(layers=32, rows=16, heads=32, slots=32 << 10, head_dim=128)
    storage = KVRows(sizes, torch.bfloat16, CPU)
    assert storage.kv_bytes_reserved == 256 << 30
    start = committed(storage.tensor)
    storage.write(7, 0, torch.ones(32, 2, 32, 20, 128, dtype=torch.bfloat16))
    assert storage.kv_bytes == 32 * 2 * 32 * 2 * mmap.PAGESIZE == 16 << 20
    assert committed(storage.tensor) - start == storage.kv_bytes


@linux
@pytest.mark.parametrize(("heads", "has_any"), [(1, True), (40, True), (3, False)])
def test_memory_of_which_a_quarter_is_in_use_moves_to_huge_pages(heads, has_any, monkeypatch):
    """The oracles are a copy of all rows and what the system has committed, after each of many changes."""
    moved = []  # a system without room for huge pages may refuse any of them

    def move(address, num_bytes):
        moved.append(has_any and use_huge_pages(address, num_bytes))
        return moved[-1]

    monkeypatch.setattr(kv_storage, "use_huge_pages", move)
    monkeypatch.setattr(kv_storage, "LOOK_BYTES", 100_000)
    monkeypatch.setattr(kv_storage, "HUGE_PAGES_AT_ONCE", 2)
    sizes = KVSizes(layers=2, rows=4, heads=heads, slots=9_000 // heads, head_dim=60)
    storage = KVRows(sizes, torch.float32, CPU)
    copy = torch.zeros(2, 2, 4, heads, sizes.slots, 60)
    start, ends, draw, huge = committed(storage.tensor), [0] * 4, random.Random(heads), []
    for _ in range(40):
        row = draw.randrange(4)
        if draw.random() < 0.2:
            storage.release(row)
            copy[:, :, row] = ends[row] = 0
        else:
            count = min(sizes.slots - ends[row], 1 + int(sizes.slots * draw.random() ** 3))
            kv = torch.full((2, 2, heads, count, 60), draw.choice([1.0, 2.0, torch.nan]))
            num_before = len(moved)
            storage.write(row, ends[row], kv)
            assert len(moved) <= num_before + 2, "a few with each pass"
            copy[:, :, row, :, ends[row] : ends[row] + count] = kv
            ends[row] += count
        assert torch.equal(storage.rows.view(torch.int32), copy.view(torch.int32))
        assert committed(storage.tensor) - start == storage.kv_bytes
        huge.append(committed(storage.tensor, "AnonHugePages"))
    assert len(moved) >= 4
    assert any(huge) == any(moved)
    for row in range(4):
        storage.release(row)
    assert committed(storage.tensor) - start == storage.kv_bytes == 0


@pytest.mark.parametrize("layout", ["rows", "blocks"])
def test_a_target_s_bytes_follow_its_rows(layout):
    model = made()
    target = Target.of(model, rows=3, max_tokens=600, nodes=4, kv=KVMemory(layout))
    assert target.kv_bytes == 0
    texts = [drawn(count, seed=count) for count in (40, 300, 90)]
    seen = []
    for row, text in enumerate(texts):
        prefilled(target, text[:-1], row)
        seen.append(target.kv_bytes)
    assert seen == sorted(seen)
    target.release_row(1)
    target.move_row(2, 1, 89)
    assert target.kv_bytes == seen[0] + seen[2] - seen[1]
    logits, _ = target.step(torch.stack([texts[0][-1:], texts[2][-1:]]), [39, 89])
    close(logits[0, 0], own(model, texts[0])[0][-1])
    close(logits[1, 0], own(model, texts[2])[0][-1])
    for row in range(3):
        target.release_row(row)
    assert target.kv_bytes == 0
    close(prefilled(target, texts[1], 2), own(model, texts[1])[1])
    assert 0 < target.kv_bytes <= target.kv_bytes_reserved


@pytest.mark.parametrize("layout", ["rows", "blocks"])
def test_bytes_follow_the_tokens_in_use_over_a_batch_with_a_long_tail(layout):
    """Sixteen samples in six rows; the longest is 40 times as long as most."""
    policy = tiny_policy(seed=1)
    target = Target.of(policy, rows=6, max_tokens=400, nodes=4, kv=KVMemory(layout))
    engine = Engine(target, chooser=Flips("off"), limits=EngineLimits(prefix_cache_bytes=0))
    for i in range(16):
        sampling = Sampling(max_new_tokens=320 if i == 5 else 8, stop_tokens=())
        engine.add(Prompt(tokens=(3, 5, i), rollout=i, sampling=sampling))
    config, seen = policy.config, []
    head_bytes = config.hidden_size // config.num_attention_heads * 8
    planes = 2 * config.num_hidden_layers * config.num_key_value_heads
    unit = mmap.PAGESIZE if layout == "rows" else 16 * head_bytes
    while engine.running or engine.waiting:
        engine.step()
        in_rows = [len(each.prompt.tokens) + len(each.tokens) for each in engine.running]
        used = sum(-(-tokens * head_bytes // unit) for tokens in in_rows)
        assert engine.status()["kv_bytes"] <= planes * unit * used
        assert engine.status()["kv_bytes"] >= planes * unit * (used - len(in_rows))
        seen.append(engine.status()["kv_bytes"])
    assert seen[-1] == 0
    assert max(seen) < target.kv_bytes_reserved / 4


def test_elsewhere_than_on_linux_a_row_takes_all_memory_at_once_and_works(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    model, text = made(), drawn(30)
    target = Target.of(model, rows=2, max_tokens=40)
    assert target.kv_bytes == target.kv_bytes_reserved
    close(prefilled(target, text, 1), own(model, text)[1])
    target.write_kv(1, torch.full_like(target.read_kv(1, 30), torch.nan))
    target.release_row(1)
    assert target.kv_bytes == target.kv_bytes_reserved
    assert not target.read_kv(1, 30).any()


def test_a_released_row_leaves_nothing_that_another_could_read():
    """NaN of one sample in slots that are masked would be NaN in another, as 0 * NaN is NaN."""
    for layout in ("rows", "blocks"):
        target = Target.of(made(), rows=2, max_tokens=200, nodes=4, kv=KVMemory(layout))
        target.write_kv(0, torch.full((3, 2, 2, 200, 8), torch.nan, dtype=torch.float64))
        target.release_row(0)
        for row, count in enumerate((20, 180)):
            prefilled(target, drawn(count, seed=row), row)
        assert target.step(drawn(2, 1), [20, 180])[0].isfinite().all()


@linux
def test_address_space_that_is_refused_says_what_to_lower():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (128 << 30, hard))
    try:
        with pytest.raises(ValueError, match=r"refuses 256.00 GiB of address .*: lower rows or max_tokens"):
            KVRows(KVSizes(32, 16, 32, 32 << 10, 128), torch.bfloat16, CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_model_does_not_take_another_path_because_memory_is_short(monkeypatch):
    """The generic path is for models that the fast one does not support."""

    def refuse(*sizes):
        raise KVMemoryError("lower rows")

    monkeypatch.setattr(cache_module, "KVRows", refuse)
    with pytest.raises(KVMemoryError, match="lower rows"):
        make_target(made(), rows=2, max_tokens=20)


@linux
def test_a_row_of_the_draft_layer_gives_its_memory_back():
    policy = tiny_policy(seed=1)
    target = Target.of(policy, rows=4, max_tokens=3000)
    drafter = LayerDrafter.of(layer_for(policy), target)
    cache = drafter._runner.cache
    start = committed(cache)
    cache.fill_(1.0)
    row_bytes = cache.nbytes // 4
    assert committed(cache) - start >= 4 * row_bytes
    drafter.end(1)
    drafter.move(3, 2)
    left = committed(cache) - start
    assert 2 * row_bytes <= left <= 2 * row_bytes + 4 * mmap.PAGESIZE, (
        "but for the pages at the edges of rows"
    )
    rows = cache.view(4, -1)
    assert rows[0].eq(1).all()
    assert rows[2].eq(1).all()


def test_a_copied_row_shares_blocks_until_one_of_the_two_writes():
    storage = KVBlocks(KVSizes(2, 4, 3, 100, 4), torch.float64, CPU)
    kv = torch.randn(2, 2, 3, 40, 4, dtype=torch.float64)
    storage.write(0, 0, kv)
    block = storage.kv_bytes // 3
    for row in (1, 2):
        storage.copy(0, row, 40)
    assert storage.kv_bytes == 3 * block
    new = torch.randn(2, 2, 3, 1, 4, dtype=torch.float64)
    storage.write(1, 40, new)
    assert storage.kv_bytes == 4 * block, "the last block only was copied"
    storage.write(0, 5, new)
    assert storage.kv_bytes == 5 * block
    assert torch.equal(storage.read(2, 0, 40), kv)
    assert torch.equal(storage.read(1, 0, 41), torch.cat([kv, new], 3))
    assert torch.equal(storage.read(0, 0, 40), torch.cat([kv[..., :5, :], new, kv[..., 6:, :]], 3))
    storage.release(0)
    assert torch.equal(storage.read(2, 0, 40), kv)
    storage.release(2)
    storage.release(1)
    assert storage.kv_bytes == 0


def test_rows_that_part_in_one_call_get_a_block_each_and_the_last_keeps_it():
    storage = KVBlocks(KVSizes(1, 3, 1, 32, 4), torch.float64, CPU)
    storage.write(0, 0, torch.ones(1, 2, 1, 10, 4, dtype=torch.float64))
    block = storage.kv_bytes
    storage.copy(0, 1, 10)
    storage.copy(0, 2, 10)
    storage.reserve([(row, 10, 11) for row in range(3)])
    assert storage.kv_bytes == 3 * block
    assert all(storage.read(row, 0, 10).eq(1).all() for row in range(3))
    for row in range(3):
        storage.release(row)
    assert storage.kv_bytes == 0


def test_blocks_that_are_not_free_are_a_clear_error_and_nothing_has_changed():
    model = made()
    target = Target.of(model, rows=4, max_tokens=60, nodes=3, kv=KVMemory("blocks", num_blocks=5))
    text = drawn(50)
    prefilled(target, text[:-1], 0)
    with pytest.raises(ValueError, match=r"2 more blocks of 16 tokens are needed .* only 1 of 5 are free"):
        prefilled(target, drawn(20), 1)
    close(target.step(text[None, -1:], [49])[0][0], own(model, text)[0][-1:])
    target.release_row(0)
    close(prefilled(target, text, 3), own(model, text)[1])


def test_memory_that_cannot_be_had_is_refused_by_name():
    for kv, words in (
        (KVMemory("blocks", num_blocks=3), "3 blocks of 16 tokens do not hold one row of 64 tokens, .* 4"),
        (KVMemory("rows", num_blocks=3), "got 'rows' with num_blocks 3"),
    ):
        with pytest.raises(ValueError, match=words):
            Target.of(made(), rows=4, max_tokens=60, nodes=3, kv=kv)
    with pytest.raises(ValueError, match='layout must be "auto" or "rows" or "blocks", got "heap"'):
        KVMemory("heap")
