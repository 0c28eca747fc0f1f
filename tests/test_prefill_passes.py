"""Tests prefill of many rows at once against the model's own forward of each text, in float64."""

import random

import pytest
import torch
from kit.rollouts import prefilled
from test_target import FAMILIES, close, drawn, made, own

from aedit.spec_rollout.model import Target, prefill
from aedit.spec_rollout.model.prefill import Segment, plan_passes

COUNTS = [5, 33, 6, 1, 60, 5, 31]


@pytest.fixture(params=["one pass", "many passes"])
def passes(request, monkeypatch):
    """Select whether limits of memory split the work."""
    if request.param == "many passes":
        monkeypatch.setattr(prefill, "ACTIVATION_BYTES", 20 * 4 * 32 * 8)
        monkeypatch.setattr(prefill, "MASK_BYTES", 8 * 400)


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("name", FAMILIES)
def test_ragged_rows_at_once_are_each_as_the_models_own(name):
    model = made(name)
    target = Target.of(model, rows=8, max_tokens=70)
    texts = [drawn(count + 2, seed=count) for count in COUNTS]
    rows = [6, 0, 3, 2, 7, 1, 5]
    found = target.prefill([Segment(r, 0, t[:-2].tolist()) for r, t in zip(rows, texts, strict=True)])
    for text, hidden in zip(texts, found, strict=True):
        close(hidden, own(model, text[:-2])[1])
    in_order = sorted(zip(rows, texts, strict=True))
    for row, text in in_order:
        target.move_row(row, in_order.index((row, text)), len(text) - 2)
    steps = torch.stack([text[-2:] for _, text in in_order])
    logits, _ = target.step(steps, [len(text) - 2 for _, text in in_order])
    for ours, (_, text) in zip(logits, in_order, strict=True):
        close(ours, own(model, text)[0][-2:])


@pytest.mark.usefixtures("passes")
def test_rows_that_go_on_and_rows_that_begin_are_computed_together():
    model = made()
    target = Target.of(model, rows=7, max_tokens=70)
    texts = [drawn(count, seed=count) for count in COUNTS]
    starts = [2, 30, 0, 0, 20, 4, 0]
    target.prefill(
        [Segment(i, 0, t[:n].tolist()) for i, (t, n) in enumerate(zip(texts, starts, strict=True))]
    )
    segments = [Segment(i, n, t[n:].tolist()) for i, (t, n) in enumerate(zip(texts, starts, strict=True))]
    for hidden, text, start in zip(target.prefill(segments), texts, starts, strict=True):
        close(hidden, own(model, text)[1][start:])


def test_no_tokens_have_no_features():
    target = Target.of(made(), rows=2, max_tokens=20)
    none, some = target.prefill([Segment(1, 3, []), Segment(0, 0, [1, 2])])
    assert (none.shape, some.shape, none.dtype) == ((0, 32), (2, 32), torch.float64)
    assert target.prefill([]) == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("masks_first", [False, True])
def test_passes_cover_each_token_once_in_order_and_within_the_limits(seed, masks_first):
    rng = random.Random(seed)
    max_tokens, max_scores = rng.randint(16, 60), rng.randint(300, 3000)
    segments = [
        Segment(i, rng.choice([0, 0, rng.randint(1, 90)]), range(rng.randint(0, 150))) for i in range(12)
    ]
    covered = {i: [] for i in range(12)}
    for pieces in plan_passes(segments, max_tokens, max_scores, masks_first):
        assert sum(piece.count for piece in pieces) <= max_tokens
        assert len({piece.row for piece in pieces}) == len(pieces), "a piece reads what a pass before wrote"
        for piece in pieces:
            covered[piece.segment] += piece.tokens
            assert piece.start == segments[piece.segment].start + piece.tokens[0]
            if piece.start or masks_first:
                assert piece.count <= 16 or piece.count * piece.end <= max_scores
    assert [covered[i] for i in range(12)] == [list(segment.tokens) for segment in segments]


def test_a_pass_is_as_large_as_memory_allows():
    segments = [Segment(i, 0, range(16)) for i in range(64)]
    assert len(list(plan_passes(segments, 1024, 1000, False))) == 1
    assert len(list(plan_passes(segments, 160, 1000, False))) == 7


def test_prefill_of_new_tokens_does_not_touch_other_rows():
    target = Target.of(made(), rows=3, max_tokens=40)
    target.prefill([Segment(i, 0, drawn(20, seed=i).tolist()) for i in range(3)])
    before = [target.read_kv(row, 40) for row in range(3)]
    prefilled(target, drawn(10, seed=9), 1, start=7)
    after = [target.read_kv(row, 40) for row in range(3)]
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert torch.equal(before[1][:, :, :, :7], after[1][:, :, :, :7])
    assert torch.equal(before[1][:, :, :, 17:], after[1][:, :, :, 17:])
