"""Tests where rollouts end: at stop tokens, stop strings and their length, at any place in a draft."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rollouts import Flips, Insider, decode_plainly, prompts_of, tiny_policy
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import REPLACEMENT, StopStrings

WORDS = ["a", "b", "ab", "ba", " ", " a", "stop", "st", "op", "\n", "<", ">", "</s>"]


PARTS = sorted({bytes([byte]) for byte in "\u00e9\u4e2d\U0001f600".encode()})


def tokenizer_of(pieces):
    """Return a byte-level tokenizer of these tokens, as GPT-2's, some of which are parts of a character."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    vocabulary = {"".join(characters[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    assert len(vocabulary) == len(pieces)
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False)


def decoded(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def first_end(tokenizer, tokens, strings, at_least=0):
    """Return the number of tokens at which one of the strings is complete, at the earliest after `at_least`.

    Found by decoding the whole text every time.
    """
    before = ""
    for i in range(1, len(tokens) + 1):
        text = decoded(tokenizer, tokens[:i]).rstrip(REPLACEMENT)
        ends = [at + len(s) for s in strings for at in range(len(text)) if text.startswith(s, at)]
        if i >= at_least and any(end > len(before) for end in ends):
            return i
        before = text
    return None


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of([word.encode() for word in WORDS] + PARTS)


NUM_TOKENS = len(WORDS) + len(PARTS)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, NUM_TOKENS - 1), max_size=14),
    before=st.lists(st.integers(0, len(WORDS) - 1), max_size=7),
    strings=st.lists(
        st.sampled_from(["stop", "ab", "aba", "</s>", " a", "\u00e9", "a\u4e2d", "\n\n"]),
        min_size=1,
        max_size=3,
    ),
)
def test_a_string_ends_where_decoding_everything_shows_it(tokenizer, tokens, before, strings):
    stops = StopStrings(strings, tokenizer, before)
    found = next((i for i, token in enumerate(tokens, 1) if stops.completes(token)), None)
    assert found == first_end(tokenizer, tokens, strings)


def test_a_string_may_lie_across_tokens_and_a_character_across_bytes(tokenizer):
    def ends(text_tokens, *strings):
        stops = StopStrings(strings, tokenizer)
        return [stops.completes(token) for token in text_tokens]

    word = WORDS.index
    assert ends([word("st"), word("op"), word("a")], "stop") == [False, True, False]
    assert ends([word("a"), word("ba")], "ab") == [False, True]
    character = [len(WORDS) + PARTS.index(bytes([byte])) for byte in "\u4e2d".encode()]
    assert ends(character, "\u4e2d") == [False, False, True]
    assert ends([*character[:2], word("a")], REPLACEMENT) == [False, False, True]


class Letters:
    """Tokenizer whose tokens are one or two letters."""

    letters = [chr(ord("A") + i) for i in range(26)] + [chr(ord("a") + i) for i in range(26)]

    def decode(self, tokens, *, skip_special_tokens, clean_up_tokenization_spaces):
        assert not skip_special_tokens
        assert not clean_up_tokenization_spaces
        return "".join(
            self.letters[token] if token < 52 else self.letters[token - 52] * 2 for token in tokens
        )


def engine_of(policy, texts, *arms):
    target = Target.of(policy, rows=3, max_tokens=48, nodes=12)
    return Engine(target, drafters={"layer": Insider(texts)}, chooser=Flips(*arms), tokenizer=Letters())


@pytest.fixture(scope="module")
def said():
    """Return a policy, prompts, and its tokens for each prompt when nothing stops it."""
    policy, prompts = tiny_policy(seed=6), prompts_of(6, seed=6, max_new_tokens=20)
    return policy, prompts, decode_plainly(policy, prompts)


@pytest.mark.parametrize("arms", [["off"], ["layer:8"], ["layer:4x3x12", "layer:2"]])
@pytest.mark.parametrize("at_least", [0, 9])
def test_a_rollout_ends_with_the_token_that_completes_a_string(said, arms, at_least):
    (policy, free, whole), letters = said, Letters()
    texts = [[*prompt.tokens, *tokens] for prompt, tokens in zip(free, whole, strict=True)]
    read = [decoded(letters, tokens) for tokens in whole]
    strings = tuple({read[0][6:9], read[1][11:13], read[2][3:5]})
    asked = prompts_of(6, seed=6, max_new_tokens=20, min_new_tokens=at_least, stop_strings=strings)
    engine = engine_of(policy, texts, *arms)
    rollouts = {rollout.prompt.sample: rollout for rollout in engine.generate(asked)}
    for i, tokens in enumerate(whole):
        end = first_end(letters, tokens, strings, at_least)
        assert rollouts[i].tokens == tokens[:end]
        assert rollouts[i].finish_reason == ("stop" if end else "length")
        assert len(rollouts[i].logprobs) == len(rollouts[i].versions) == len(rollouts[i].tokens)
    assert {rollout.finish_reason for rollout in rollouts.values()} == {"stop", "length"}
    assert engine.status()["tokens"] == sum(len(rollout.tokens) for rollout in rollouts.values())


def test_a_moved_sample_ends_where_it_would_have_ended(said):
    policy, letters, tokens = said[0], Letters(), said[2][0]
    strings = (decoded(letters, tokens)[7:10],)
    (asked,) = prompts_of(1, seed=6, max_new_tokens=20, stop_strings=strings)
    end = first_end(letters, tokens, strings)
    for steps in range(end - 3, end):
        here, there = engine_of(policy, [], "off"), engine_of(policy, [], "off")
        rollout = here.add(asked)
        for _ in range(steps):
            here.step()
        moved = there.add(here.remove(rollout))
        list(there.generate([]))
        assert (moved.tokens, moved.finish_reason) == (tokens[:end], "stop")


def test_a_stop_token_in_the_middle_of_an_accepted_draft_is_the_last_token(said):
    policy, free, tokens = said[0], said[1][0], said[2][0][:8]
    stop = next(i for i in range(2, 7) if tokens[i] not in tokens[:i])
    (asked,) = prompts_of(1, seed=6, max_new_tokens=8, stop_tokens=(tokens[stop],))
    insider = Insider([[*free.tokens, *tokens]], honesty=1.0)
    target = Target.of(policy, rows=1, max_tokens=48)
    engine = Engine(target, drafters={"layer": insider}, chooser=Flips("layer:8"))
    rollout = engine.add(asked)
    step = engine.step()
    assert (step.accepted, step.counts, step.finished) == ((7,), (stop + 1,), (rollout,))
    assert (rollout.tokens, rollout.finish_reason, rollout.passes) == (tokens[: stop + 1], "stop", 1)
    assert engine.status()["tokens"] == stop + 1
    assert engine.running == []
