"""Tests the suffix drafter against a search through all texts."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aedit.spec_rollout.drafters import RowStart, StepUpdate, SuffixDrafter, parse_arm
from aedit.spec_rollout.drafters.suffix import MAX_LINKS, NO_STATE, OVERLAP, ROOT, SMOOTHING, Automaton

NOTHING = torch.zeros(0, 4)


class Search:
    """Oracle that finds every place of every text by comparing."""

    def __init__(self):
        self.places = Counter()

    def begin(self, tokens):
        for end in range(1, len(tokens) + 1):
            if tuple(tokens[:end]) not in self.places:
                self.places[tuple(tokens[:end])] = 1

    def read(self, tokens):
        self.places[tuple(tokens)] += 1

    def count(self, words):
        return sum(n for place, n in self.places.items() if place[-len(words) :] == tuple(words))

    def followers(self, words):
        found = Counter()
        for place, n in self.places.items():
            if len(place) > len(words) and place[:-1][len(place) - 1 - len(words) :] == tuple(words):
                found[place[-1]] += n
        return found

    def longest(self, text):
        """Return the longest suffix that has been followed by something, and what followed."""
        for length in range(len(text), 0, -1):
            if found := self.followers(text[-length:]):
                return length, found
        return 0, None

    def line(self, text, depth, min_match):
        """Return the expected chain: tokens and log-probabilities of the path."""
        text, tokens, scores, score = list(text), [], [], 0.0
        length, found = self.longest(text)
        while length >= min_match and len(tokens) < depth:
            token = min(found, key=lambda t: (-found[t], t))
            score += math.log(found[token] / (sum(found.values()) + SMOOTHING / length))
            tokens.append(token)
            scores.append(score)
            matched = [*text[len(text) - length :], token]
            text = matched
            length, found = self.longest(matched)
        return tokens, scores


def begun(row, tokens, group=0):
    return RowStart(row, group, tokens, NOTHING)


def take(drafter, *tokens):
    drafter.update(StepUpdate(tokens, NOTHING))


def guess(drafter, row=0, arm="suffix:4"):
    return [token for token, _, _ in drafter.draft_row(row, parse_arm(arm))]


def count_of(automaton, words):
    state = ROOT
    for word in words:
        state = automaton.step(state, word)
        if state == NO_STATE:
            return 0
    return automaton.count(state)


def substrings(texts):
    return {tuple(t[i:j]) for t in texts for i in range(len(t)) for j in range(i + 1, len(t) + 1)}


small_texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(small_texts, st.data())
def test_every_string_is_counted_as_often_as_it_was_read_however_texts_take_turns(texts, data):
    automaton, search = Automaton(), Search()
    states, done = [ROOT] * len(texts), [0] * len(texts)
    turns = data.draw(st.permutations([i for i, text in enumerate(texts) for _ in text]))
    for i in turns:
        states[i] = automaton.append(states[i], texts[i][done[i]])
        done[i] += 1
        search.read(texts[i][: done[i]])
    for words in substrings(texts):
        assert count_of(automaton, words) == search.count(words)
    assert count_of(automaton, [0, 3]) == 0
    for text, state in zip(texts, states, strict=True):
        found, length = automaton.longest_continued(state, automaton.length(state))
        expected, followers = search.longest(text)
        assert length == expected
        if followers:
            assert {t: automaton.count(s) for t, s in automaton.continuations(found)} == followers


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_a_text_that_is_only_compared_is_matched_by_its_longest_known_suffix(known, text):
    automaton = Automaton()
    state = ROOT
    for token in known:
        state = automaton.append(state, token)
    at, length = ROOT, 0
    strings = substrings([known])
    for end, token in enumerate(text, start=1):
        at, length = automaton.advance_match(at, length, token)
        suffixes = [n for n in range(end + 1) if n == 0 or tuple(text[end - n : end]) in strings]
        assert length == max(suffixes)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=3)), max_size=12),
    st.integers(1, 3),
)
def test_what_is_drafted_is_what_a_search_finds(prompt, steps, min_match):
    drafter, search = SuffixDrafter(min_match=min_match), Search()
    texts = [list(prompt) for _ in range(3)]
    drafter.begin([begun(row, text) for row, text in enumerate(texts)])
    search.begin(prompt)
    for row, tokens in steps:
        taken = [tokens if row == other else [0] for other in range(3)]
        take(drafter, *taken)
        for text, new in zip(texts, taken, strict=True):
            for token in new:
                text.append(token)
                search.read(text)
    for row, text in enumerate(texts):
        tokens, scores = search.line(text, 5, min_match)
        found = drafter.draft_row(row, parse_arm("suffix:5"))
        assert [g[0] for g in found] == tokens
        assert [g[1] for g in found] == list(range(-1, len(tokens) - 1))
        assert [g[2] for g in found] == pytest.approx(scores)


def test_other_samples_of_the_group_say_what_comes_next():
    drafter = SuffixDrafter()
    drafter.begin([begun(0, [1, 2, 3]), begun(1, [1, 2, 3])])
    take(drafter, [7, 8, 9, 7, 8], [7])
    assert guess(drafter, 1) == [8, 9, 7, 8]
    drafter.end(0)
    drafter.move(1, 0)
    assert guess(drafter, 0) == [8, 9, 7, 8]
    drafter.begin([begun(1, [1, 2, 3])])
    assert guess(drafter, 1) == [7, 8, 9, 7]


def test_samples_of_no_group_and_of_other_groups_are_not_heard():
    for groups in ((-1, -1), (0, 1)):
        drafter = SuffixDrafter()
        drafter.begin([begun(0, [1, 2, 3], groups[0]), begun(1, [1, 2, 3], groups[1])])
        take(drafter, [7, 8, 9, 7, 8], [7])
        assert guess(drafter, 1) == []
        assert guess(drafter, 0) == [9, 7, 8, 9]


def test_rows_without_a_match_have_no_nodes():
    drafter = SuffixDrafter()
    drafter.begin([begun(0, [1, 2, 3, 4]), begun(1, [5, 6, 5, 6], 1)])
    draft = drafter.propose(parse_arm("suffix:3"), 2, None, None)
    assert draft.counts_B.tolist() == [0, 3]
    assert draft.tokens_BN.shape == draft.scores_BN.shape == (2, 3)
    assert draft.tokens_BN[1].tolist() == [5, 6, 5]
    assert draft.parents_BN is None
    assert draft.logq_BNV is None
    assert draft.scores_BN[0].tolist() == [-math.inf] * 3


def test_a_tree_has_the_best_paths_with_parents_first():
    drafter = SuffixDrafter()
    drafter.begin([begun(0, [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 8, 9, 1, 2])])
    draft = drafter.propose(parse_arm("suffix:2x2x4"), 1, None, None)
    tokens, parents = draft.tokens_BN[0].tolist(), draft.parents_BN[0].tolist()
    assert (tokens[0], parents[0]) == (5, -1)
    assert {(tokens[p] if p >= 0 else None, t) for t, p in zip(tokens, parents, strict=True)} == {
        (None, 5),
        (5, 6),
        (5, 7),
        (None, 8),
    }
    scores = draft.scores_BN[0].tolist()
    assert scores == sorted(scores, reverse=True)
    assert all(p < n for n, p in enumerate(parents))


def test_a_tree_of_width_one_would_be_the_line():
    drafter = SuffixDrafter()
    drafter.begin([begun(0, [1, 2, 3, 1, 2, 4, 1, 2])])
    arm = parse_arm("suffix:3x2x9")
    best = [g for g in drafter.draft_row(0, arm) if g[0] in (3, 4) and g[1] == -1]
    assert best[0][0] == guess(drafter)[0] == 3


def test_a_group_is_remembered_in_bounded_memory_and_its_oldest_text_goes_first():
    drafter = SuffixDrafter(window=128)
    drafter.begin([begun(0, [1, 2, 3])])
    take(drafter, [900, 901, 902])
    sizes = []
    for start in range(0, 4000, 10):
        take(drafter, list(range(1000 + start, 1010 + start)))
        sizes.append(drafter.num_bytes)
    assert max(sizes[200:]) <= 1.05 * max(sizes[:200])
    drafter.begin([begun(1, [900, 901]), begun(2, [4980, 4981])])
    assert guess(drafter, 1) == []
    assert guess(drafter, 2) == [4982, 4983, 4984, 4985]


def test_a_row_goes_on_when_the_automata_change_places():
    drafter = SuffixDrafter(window=64)
    drafter.begin([begun(0, [1, 2, 3, 10, 11, 12, 13, 14, 15])])
    for _ in range(40):
        take(drafter, [10, 11, 12, 13, 14, 15])
        assert guess(drafter) == [10, 11, 12, 13]


def test_what_a_row_said_before_the_change_is_still_known_to_its_group():
    drafter = SuffixDrafter(window=4 * OVERLAP)
    drafter.begin([begun(0, [1, 2, 3])])
    take(drafter, list(range(100, 100 + 2 * OVERLAP)))
    drafter.begin([begun(1, [1, 2, 3])])
    assert guess(drafter, 1) == [100, 101, 102, 103]


def test_groups_used_last_are_remembered():
    drafter = SuffixDrafter(groups=2)
    for group in (0, 1, 0, 2):
        drafter.begin([begun(0, [1, 2, 3, 4, 5], group)])
        drafter.end(0)
    for group, known in ((0, True), (2, True), (1, False)):
        drafter.begin([begun(0, [1, 2], group)])
        assert bool(guess(drafter)) is known
        drafter.end(0)


def test_a_forgotten_group_begins_anew():
    drafter = SuffixDrafter()
    drafter.begin([begun(0, [1, 2, 3, 4])])
    drafter.forget_group(0)
    drafter.begin([begun(1, [1, 2])])
    assert guess(drafter, 1) == []
    take(drafter, [1, 2], [3])
    assert guess(drafter, 0) == [3, 4, 1, 2]


def test_one_token_over_and_over_is_read_in_bounded_time_and_still_foreseen():
    automaton = Automaton()
    state = ROOT
    for _ in range(10 * MAX_LINKS):
        state = automaton.append(state, 5)
    at, length = automaton.longest_continued(state, automaton.length(state))
    assert length == 10 * MAX_LINKS - 1
    assert [token for token, _ in automaton.continuations(at)] == [5]


@pytest.mark.parametrize("vocabulary", [4, 64, 512, 150_000])
def test_a_token_takes_less_than_300_bytes(vocabulary):
    random = torch.Generator().manual_seed(vocabulary)
    automaton = Automaton()
    state = ROOT
    for token in torch.randint(vocabulary, (6000,), generator=random).tolist():
        state = automaton.append(state, token)
    assert automaton.num_bytes <= 300 * automaton.num_tokens


def test_settings_without_sense_are_refused():
    for wrong in ({"window": 8}, {"groups": 0}, {"min_match": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SuffixDrafter(**wrong)


def test_texts_are_read_when_a_draft_is_requested_and_not_before():
    drafter, text = SuffixDrafter(window=256), [i % 7 for i in range(1000)]
    drafter.begin([RowStart(0, 5, [1, 2, 3], NOTHING), RowStart(1, 5, [1, 2, 3], NOTHING)])
    empty = drafter.num_bytes
    for start in range(0, 1000, 10):
        drafter.update(StepUpdate([text[start : start + 10], text[:1]], NOTHING))
    drafter.end(0)
    drafter.move(1, 0)
    assert drafter.num_bytes == empty
    tokens = [node[0] for node in drafter.draft_row(0, parse_arm("suffix:4"))]
    assert drafter.num_bytes > empty
    assert tokens == [0] * 4
    drafter.begin([RowStart(1, 5, [3, 4, 5], NOTHING)])
    assert [node[0] for node in drafter.draft_row(1, parse_arm("suffix:4"))] == [6, 0, 1, 2]
