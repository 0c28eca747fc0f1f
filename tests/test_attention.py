"""Tests attention over the cache against a softmax in float64 that is written out, one query at a time."""

import pytest
import torch
from kit.exact_norms import normalize_exactly
from kit.rollouts import prefilled
from test_target import SIZES, TREES, close, drawn, made, own, path_to
from transformers import MistralConfig, MistralForCausalLM

from aedit.spec_rollout.model import KVMemory, Target
from aedit.spec_rollout.model import cache as cache_module
from aedit.spec_rollout.model.cache import KVCache
from aedit.spec_rollout.model.kv_storage import KVSizes, kv_extents
from aedit.spec_rollout.model.layers import AttentionSpec, LayerShape
from aedit.spec_rollout.model.prefill import Piece, PrefillAttention

HEADS, KV_HEADS, SIZE = 6, 2, 4
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}
SPECS = [
    AttentionSpec(0.5),
    AttentionSpec(0.3, window=1),
    AttentionSpec(0.7, window=4, softcap=2.0),
    AttentionSpec(0.4, softcap=1.5),
    AttentionSpec(0.2, window=100),
]


def explicit(spec, query_Hh, keys_CKh, values_CKh, distances_C):
    """Return the attention output of one query over keys at these distances in positions, (H * h)."""
    outputs = []
    for head in range(HEADS):
        keys, values = (x[:, head // (HEADS // KV_HEADS)] for x in (keys_CKh, values_CKh))
        scores = (keys @ query_Hh[head]) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * (scores / spec.softcap).tanh()
        weights = scores.exp() * (distances_C < (spec.window or 10**9))
        outputs.append((weights / weights.sum()) @ values)
    return torch.cat(outputs)


def filled_cache(rows, slots, layout, dtype=torch.float64):
    """Return a cache with random keys and values in all slots."""
    sizes = KVSizes(len(SPECS), rows, KV_HEADS, slots, SIZE)
    storage = KVMemory(layout).storage(sizes, torch.empty(0, dtype=dtype))
    cache = KVCache(SPECS, LayerShape(HEADS, KV_HEADS, SIZE), storage)
    for row in range(rows):
        cache.write_kv(row, torch.randn(len(SPECS), 2, KV_HEADS, slots, SIZE, dtype=dtype))
    return cache


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["rows", "blocks"])
@pytest.mark.parametrize("tree", [None, TREES], ids=["chain", "tree"])
@pytest.mark.parametrize("min_saved", [0, 10**9])
def test_scale_window_and_softcap_of_each_layer_are_those_written_out(tree, min_saved, layout, dtype):
    torch.manual_seed(0)
    lengths, q = [7, 2, 12], 8
    cache = filled_cache(3, 24, layout, dtype)
    ancestors = None
    if tree is not None:
        paths = [[path_to(parents, node) for node in range(-1, 7)] for parents in tree]
        ancestors = torch.zeros(3, q, q, dtype=torch.bool)
        for row in range(3):
            for i, path in enumerate(paths[row]):
                ancestors[row, i, path] = True
    else:
        paths = [[list(range(i + 1)) for i in range(q)]] * 3
    step = cache.prepare(torch.tensor(lengths), q, kv_extents(lengths, q, min_saved), ancestors)
    for layer, spec in enumerate(SPECS):
        queries, keys, values = (torch.randn(3, q, n, SIZE, dtype=dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
        ours = step.attend(layer, *(x.flatten(0, 1) for x in (queries, keys, values))).view(3, q, -1)
        for row, length in enumerate(lengths):
            past_k, past_v = cache.read_kv(row, length)[layer].transpose(1, 2).double()
            for i, path in enumerate(paths[row]):
                distances = torch.arange(length + len(path)).flip(0)
                seen = torch.cat([past_k, keys[row, path]]), torch.cat([past_v, values[row, path]])
                expected = explicit(spec, queries[row, i].double(), *seen, distances)
                close(ours[row, i].double(), expected, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("min_saved", [0, 10**9])
@pytest.mark.parametrize("large", [0, 10**9])
def test_one_new_token_of_each_row_attends_as_written_out(dtype, large, min_saved, monkeypatch):
    monkeypatch.setattr(cache_module, "L2_BYTES", 0)
    monkeypatch.setattr(cache_module, "LARGE_VALUES", large)
    torch.manual_seed(0)
    lengths, cache = [7, 2, 12], filled_cache(3, 24, "rows", dtype)
    step = cache.prepare(torch.tensor(lengths), 1, kv_extents(lengths, 1, min_saved))
    has_sums = dtype != torch.float64 and not large
    assert [view.values is not None for view in step.views] == [has_sums] * (1 if min_saved else 3)
    for layer, spec in enumerate(SPECS):
        queries, keys, values = (torch.randn(3, n, SIZE, dtype=dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
        ours = step.attend(layer, queries, keys, values)
        for row, length in enumerate(lengths):
            seen = cache.read_kv(row, length + 1)[layer].transpose(1, 2).double()
            close(seen[0, -1], keys[row].double(), 0)
            expected = explicit(spec, queries[row].double(), *seen, torch.arange(length + 1).flip(0))
            close(ours[row].double(), expected, TOLERANCES[dtype])


@pytest.mark.parametrize("layout", ["rows", "blocks"])
def test_prefill_of_ragged_rows_attends_as_written_out(layout):
    torch.manual_seed(0)
    cache = filled_cache(5, 60, layout)
    past = [cache.read_kv(row, 60) for row in range(5)]
    sizes = [(3, 0, 9), (1, 0, 40), (0, 0, 7), (4, 12, 5), (2, 3, 1)]
    pieces = [Piece(i, row, start, range(count)) for i, (row, start, count) in enumerate(sizes)]
    step = PrefillAttention(cache, pieces)
    assert len(step.parts) < len(pieces), "the short first pieces are one group"
    total = sum(count for *_, count in sizes)
    for layer, spec in enumerate(SPECS):
        queries, keys, values = (
            torch.randn(total, n, SIZE, dtype=torch.float64) for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        ours, at = step.attend(layer, queries, keys, values), 0
        for row, start, count in sizes:
            new = slice(at, at + count)
            all_k, all_v = (
                torch.cat([old.transpose(0, 1), x[new]])
                for old, x in zip(past[row][layer, :, :, :start], (keys, values), strict=True)
            )
            close(cache.read_kv(row, start + count)[layer].transpose(1, 2), torch.stack([all_k, all_v]), 0)
            for i in range(count):
                n = start + i + 1
                seen = all_k[:n], all_v[:n], torch.arange(n).flip(0)
                close(ours[at + i], explicit(spec, queries[at + i], *seen), 1e-12)
            at += count


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_sliding_window_is_that_of_transformers_in_prefill_and_step(window):
    model = made()
    slid = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).to(torch.float64).eval()
    slid.load_state_dict(model.state_dict())
    normalize_exactly(slid)
    target = Target.of(model, rows=1, max_tokens=40)
    specs = [AttentionSpec(8**-0.5, window=window)] * 3
    target.cache = KVCache(specs, target.weights.shape, target.cache.storage)
    text = drawn(22)
    theirs = own(slid, text)
    close(prefilled(target, text[:9], 0), theirs[1][:9])
    close(prefilled(target, text[9:10], 0, 9), theirs[1][9:10])
    close(prefilled(target, text[10:17], 0, 10), theirs[1][10:17])
    close(target.step(text[None, 17:], [17])[0][0], theirs[0][17:])
