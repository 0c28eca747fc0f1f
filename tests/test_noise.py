"""Tests the keyed noise: the published generator, one number for each token at a position."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from aedit.spec_rollout.sampling import LARGE_VOCABULARY, NoiseKeys, RowNoise, gumbel
from aedit.spec_rollout.sampling import noise as module
from aedit.spec_rollout.sampling.noise import _arrivals, _between_0_and_1, num_arrivals, philox, uniforms
from aedit.spec_rollout.sampling.noisy_argmax import noisy_argmax

WORD = 0xFFFFFFFF


def long(*values):
    return torch.tensor(values)


def reference_philox(counter, key):
    """Compute Philox4x32-10 with Python's integers, as in the paper."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_the_generator_is_philox_by_the_vectors_of_its_authors(counter, key, words):
    counter, key, words = ([int(word, 16) for word in text.split()] for text in (counter, key, words))
    assert [int(word) for word in philox([long(word) for word in counter], key)] == words
    assert reference_philox(counter, key) == words


def expected_arrivals(rollout, sample, position, vocabulary):
    """Return tokens and times of all arrivals by the definition, in Python's integers and floats."""
    tokens, times, now = [], [], 0.0
    for block in range(vocabulary // 256 if vocabulary >= 16_384 else 0):
        counter = [2**31 + block, position, (rollout >> 32) & WORD, (sample >> 32) & WORD]
        first, second, third, _ = reference_philox(counter, [rollout & WORD, sample & WORD])
        now += -math.log((third + 0.5) / 2**32) / vocabulary
        tokens.append((first * 2**32 + second) * vocabulary // 2**64)
        times.append(now)
    return tokens, times


def expected_gumbel(rollout, sample, position, token, vocabulary):
    """Compute one number by the definition, in Python's integers and floats."""
    tokens, times = expected_arrivals(rollout, sample, position, vocabulary)
    if token in tokens:
        return -math.log(times[tokens.index(token)])
    counter = [token // 4, position, (rollout >> 32) & WORD, (sample >> 32) & WORD]
    bits = reference_philox(counter, [rollout & WORD, sample & WORD])[token % 4]
    return -math.log((times[-1] if times else 0.0) - math.log((bits + 0.5) / 2**32))


def test_each_number_is_a_function_of_rollout_sample_position_and_token():
    rollouts, samples = [3, -1, (5 << 32) + 7], [0, 2**63 - 1, 1 << 33]
    positions = [[0, 1], [77, 1000], [2**32 - 1, 4]]
    made = gumbel(long(*rollouts), long(*samples), torch.tensor(positions), 10, torch.float64)
    wanted = [
        [[expected_gumbel(r, s, p, v, 10) for v in range(10)] for p in places]
        for r, s, places in zip(rollouts, samples, positions, strict=True)
    ]
    np.testing.assert_allclose(made.numpy(), wanted, rtol=1e-12)


@pytest.mark.parametrize("vocabulary", [LARGE_VOCABULARY - 1, LARGE_VOCABULARY, 50_257])
def test_in_a_large_vocabulary_a_token_has_its_first_arrival_or_what_remains_after_the_last(vocabulary):
    keys = [(-1, 2**63 - 1, 77), ((5 << 32) + 7, 1 << 33, 2**32 - 1)]
    if vocabulary >= LARGE_VOCABULARY:  # and one with a token that arrives twice
        arrived = ((p, expected_arrivals(0, 0, p, vocabulary)[0]) for p in range(200))
        keys.append(next((0, 0, p) for p, tokens in arrived if len(set(tokens)) < len(tokens)))
    for key in keys:
        tokens, times = expected_arrivals(*key, vocabulary)
        asked = np.array([*tokens, *range(0, vocabulary, 1 + vocabulary // 40), vocabulary - 1])
        wanted = [expected_gumbel(*key, token, vocabulary) for token in asked.tolist()]
        rollout, sample, position = key
        made = gumbel(long(rollout), long(sample), long(position)[None], vocabulary, torch.float64)[0, 0]
        np.testing.assert_allclose(made[torch.from_numpy(asked)].numpy(), wanted, rtol=1e-12)
        one = NoiseKeys(*(np.full(len(asked), number) for number in key))
        np.testing.assert_allclose(one.gumbel_of(asked, vocabulary, torch.float64), wanted, rtol=1e-12)
        assert (made > -math.log(times[-1] if times else 1e-12) - 1e-9).sum() == len(set(tokens))


def test_ids_that_share_their_low_words_do_not_share_their_noise():
    rollouts, samples = long(1, 1 + (1 << 32), 1, 0), long(0, 0, 1 << 32, 1)
    rows = gumbel(rollouts, samples, torch.zeros(4, 1, dtype=torch.long), 16)
    assert len({tuple(row) for row in rows[:, 0].tolist()}) == 4


def test_below_the_large_vocabularies_a_token_has_the_same_noise_in_each():
    small, large = (gumbel(long(4), long(2), long(9)[None], size) for size in (6, LARGE_VOCABULARY - 1))
    assert torch.equal(small, large[..., :6])


def test_the_noise_is_gumbel_and_the_uniforms_are_uniform_and_independent_of_it():
    ids, positions = torch.arange(200), torch.arange(50).expand(200, 50)
    noise = gumbel(ids, ids + 1000, positions, 8).double()
    both = uniforms(ids, ids + 1000, positions)
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-3
    assert stats.kstest(both.flatten().numpy(), "uniform").pvalue > 1e-3
    columns = torch.cat((noise, both), dim=-1).flatten(0, 1).T
    apart = torch.corrcoef(columns) - torch.eye(10)
    assert apart.abs().max() < 5 / math.sqrt(10_000)


def test_the_noise_of_a_large_vocabulary_is_gumbel_and_independent_between_tokens():
    """The number of tokens above a level is binomial if they are independent: compare its whole histogram."""
    num, vocabulary = 600, 16_411
    noise = gumbel(7, 8, torch.arange(num)[None], vocabulary, torch.float64)[0].numpy()
    assert stats.kstest(noise[:100].ravel(), "gumbel_r").pvalue > 1e-3
    # Most levels are those of tokens with arrivals, whose noise is above 5 to 6.
    for level in (-0.5, 2.0, 4.5, 5.3, 5.55, 5.8, 7.0, 9.0):
        counts = (noise > level).sum(1)
        share = -math.expm1(-math.exp(-level))
        assert stats.binomtest(int(counts.sum()), num * vocabulary, share).pvalue > 1e-3, level
        expected = stats.binom(vocabulary, share)
        edges = np.unique(expected.ppf([0.1, 0.3, 0.5, 0.7, 0.9]))
        found = np.bincount(np.searchsorted(edges, counts), minlength=len(edges) + 1)
        cells = np.diff([0.0, *expected.cdf(edges), 1.0])
        assert stats.chisquare(found, cells * num).pvalue > 1e-3, level
    ranks = np.exp(-np.exp(-noise[:, [0, 1, 2, 3, 4, 8000, 16_410]]))
    apart = np.corrcoef(np.vstack((ranks.T, np.roll(ranks[:, 0], 1)))) - np.eye(8)
    assert np.abs(apart).max() < 5 / math.sqrt(num)


@pytest.mark.parametrize("vocabulary", [LARGE_VOCABULARY, 50_257, 3 << 30])
def test_arrivals_mark_all_tokens_equally_often(vocabulary):
    """Thirty-two bits would mark every third of 3 * 2**30 tokens twice as often as the others."""
    words = [torch.from_numpy(np.random.default_rng(i).integers(0, 1 << 32, 60_000)) for i in range(4)]
    marked = _arrivals(words, vocabulary)[0].numpy()
    assert marked.min() >= 0
    assert marked.max() < vocabulary
    assert stats.kstest((marked + 0.5) / vocabulary, "uniform").pvalue > 1e-3
    for parts in (3, 16):
        assert stats.chisquare(np.bincount(marked % parts, minlength=parts)).pvalue > 1e-3


def test_tokens_of_a_large_vocabulary_are_drawn_with_their_probabilities():
    num, vocabulary = 20_000, 16_387
    x_V = torch.zeros(vocabulary)
    x_V[0], x_V[77], x_V[-40:] = (math.log(vocabulary / parts) for parts in (3, 9, 100))
    drawn = []
    for first in range(0, num, 500):
        keys = NoiseKeys(np.full(500, 5), np.full(500, -9), np.arange(first, first + 500))
        drawn.append(noisy_argmax(x_V.expand(500, 1, -1), keys))
    tokens = torch.cat(drawn).ravel().numpy()
    # Two likely tokens, forty with some more than their share, and the others in ten ranges.
    kinds = 10 * np.arange(vocabulary) // vocabulary
    kinds[[0, 77]], kinds[-40:] = (10, 11), 12
    wanted = np.bincount(kinds, weights=x_V.double().softmax(0).numpy())
    assert stats.chisquare(np.bincount(kinds[tokens], minlength=13), wanted * num).pvalue > 1e-3


def test_the_extreme_bits_give_finite_noise():
    ends = _between_0_and_1(long(0, WORD))
    assert 0 < ends[0] < ends[1] < 1
    assert torch.isfinite(-(-ends.log()).float().log()).all()


def begun(vocabulary=10, **more):
    noise = RowNoise(4, vocabulary, **more)
    for row in range(4):
        noise.begin(row, 100 + row, 7 * row)
    return noise


def direct(row, first, count, vocabulary=10):
    positions = torch.arange(first, first + count)[None]
    return gumbel(long(100 + row), long(7 * row), positions, vocabulary)[0]


@pytest.mark.parametrize("row_bytes", [1, 4 << 20])
def test_rows_get_the_same_numbers_in_any_order_and_any_amount(row_bytes):
    noise = begun(row_bytes=row_bytes)
    asked = [
        (0, 5),
        (3, 1),
        (60, 9),
        (62, 4),
        (200, 70),
        (7, 8),
        (1000, 1),
        (6, 1),
        (127, 2),
        (120, 8),
        (15, 2),
    ]
    for i, (first, count) in enumerate(asked * 2):
        row = i % 4
        assert torch.equal(noise.at([row], [first], count)[0], direct(row, first, count)), (first, count)
        rows, firsts = [(row + 2) % 4, row, (row + 1) % 4], [first + 3, first, 2 * first]
        for got, r, f in zip(noise.at(rows, firsts, count), rows, firsts, strict=True):
            assert torch.equal(got, direct(r, f, count)), (r, f, count)


@pytest.mark.parametrize("at_once", [1, 700, 1 << 16])
def test_however_many_blocks_are_made_at_once_they_are_the_same(at_once, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    noise = begun()
    for first in (0, 60, 5):
        rows, firsts = [3, 0, 2, 1], [first, 500, first + 64, first + 7]
        for got, row, start in zip(noise.at(rows, firsts, 7), rows, firsts, strict=True):
            assert torch.equal(got, direct(row, start, 7))


def test_a_draft_that_is_accepted_whole_has_its_noise_computed_once(monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    noise, made = begun(), []
    ring = noise._gumbel
    make = ring._make
    ring._make = lambda *ids: made.append(ids[2].numel()) or make(*ids)
    for length in (3, 8, 13):  # drafts of four tokens and the one after them
        assert torch.equal(noise.at([0], [length + 1], 4)[0], direct(0, length + 1, 4))
        assert torch.equal(noise.at([0], [length], 5)[0], direct(0, length, 5))
    assert sum(made) == 4 + 5 + 5 + 5, "but for the first position, at which the verification begins"


def test_rows_that_lack_different_amounts_all_get_what_they_lack(monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    noise = begun()
    noise.at([0], [0], 4)
    for got, row in zip(noise.at([1, 0], [0, 0], 5), (1, 0), strict=True):
        assert torch.equal(got, direct(row, 0, 5))


def test_the_uniforms_of_rows_are_those_of_their_samples():
    noise = begun()
    for first, count in [(300, 4), (126, 6), (0, 1), (5, 200)]:
        positions = torch.arange(first, first + count).expand(2, count)
        wanted = uniforms(long(103, 101), long(21, 7), positions)
        assert torch.equal(noise.uniforms([3, 1], [first, first], count), wanted)


def test_a_row_that_moves_takes_its_noise_along_and_its_old_number_can_begin_again():
    noise = begun()
    noise.at([3], [0], 8)
    noise.end(1)
    noise.move(3, 1)
    assert torch.equal(noise.at([1], [4], 8)[0], direct(3, 4, 8))
    with pytest.raises(ValueError, match="has no sample"):
        noise.at([3], [4], 1)
    noise.begin(3, 101, 7)
    assert torch.equal(noise.at([3], [4], 8)[0], direct(1, 4, 8))
    assert torch.equal(noise.at([1], [4], 8)[0], direct(3, 4, 8))


def test_a_row_that_moves_ends_what_was_there_and_leaves_nothing_behind():
    noise = begun()
    noise.at([1], [0], 8)
    noise.move(3, 1)
    with pytest.raises(ValueError, match="has no sample"):
        noise.at([3], [0], 1)


def test_an_engine_in_inference_mode_may_have_made_the_noise_outside_of_it_or_inside():
    with torch.inference_mode():
        noise = begun()
    wanted = noise.at([0], [0], 3).clone()
    with torch.inference_mode():
        noise.at([0], [900], 3)
        assert torch.equal(noise.at([0], [0], 3), wanted)


def test_ids_that_do_not_fit_are_refused():
    noise = RowNoise(1, 8)
    with pytest.raises(ValueError, match="rollout must fit into 64 bits"):
        noise.begin(0, 1 << 63, 0)
    with pytest.raises(ValueError, match="vocabulary must be"):
        RowNoise(1, 0)


def test_what_is_kept_for_a_row_is_bounded():
    assert kept_bytes(2, 512) == 2 * (128 * 512 * 4 + 256 * 2 * 8)
    assert 8 << 20 < kept_bytes(1, 150_000) < 10 << 20


def kept_bytes(rows, vocabulary):
    """Return the memory of both rings; each is allocated when it is first used."""
    noise = RowNoise(rows, vocabulary)
    assert noise.num_bytes == 0
    noise.begin(0, 0, 0)
    noise.at([0], [0], 1)
    noise.uniforms([0], [0], 1)
    return noise.num_bytes


@pytest.mark.parametrize("vocabulary", [1000, LARGE_VOCABULARY + 3])
def test_noise_without_a_ring_is_that_of_the_ring(vocabulary):
    noise = begun(vocabulary)
    for row, first in [(3, 0), (0, 65), (1, 2**32 - 9)]:
        keys = noise.keys([row], [first], np.arange(8)[None])
        tokens = np.array([0, 1, 2, 3, 4, 500, 998, vocabulary - 1])
        if num_arrivals(vocabulary):
            tokens[1::2] = keys.arrivals(vocabulary)[0][1::2, 7]
        for dtype in (torch.float32, torch.float64):
            positions = torch.arange(first, first + 8)[None]
            wanted = gumbel(long(100 + row), long(7 * row), positions, vocabulary, dtype)[0]
            wanted = wanted[torch.arange(8), torch.from_numpy(tokens)]
            assert torch.equal(keys.gumbel_of(tokens, vocabulary, dtype), wanted)
            if dtype == torch.float32:
                assert torch.equal(noise.at([row], [first], 8)[0, torch.arange(8), tokens], wanted)
    noise.end(2)
    with pytest.raises(ValueError, match="row 2 has no sample"):
        noise.keys([2], [0], np.arange(1)[None])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_the_same_bits_and_the_same_noise_to_the_last_place():
    counter = [torch.arange(5)[:, None] * 77_777_777 + i for i in range(4)]
    for here, there in zip(
        philox(counter, (1, WORD)), philox([c.cuda() for c in counter], (1, WORD)), strict=True
    ):
        assert torch.equal(here, there.cpu())
    for vocabulary in (1000, LARGE_VOCABULARY + 3):
        check_gpu(begun(vocabulary), begun(vocabulary, device="cuda"))


def check_gpu(here, there):
    for first, count in [(0, 5), (60, 9), (200, 70)]:
        rows, firsts = [0, 2, 3], [first, first + 1, 2 * first]
        wanted, got = (noise.at(rows, firsts, count) for noise in (here, there))
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-6, atol=1e-6)
        wanted, got = (noise.uniforms(rows, firsts, count) for noise in (here, there))
        assert torch.equal(got.cpu(), wanted)
