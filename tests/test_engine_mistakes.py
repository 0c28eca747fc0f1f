"""Tests that comparison with plain decoding detects engine faults, put in one at a time.

Faults in the verification of drafts are in test_verify_mutants.py.
"""

from types import SimpleNamespace

import pytest
import torch
from kit.engine_mutants import (
    Mistakes,
    a_token_too_few_is_kept_in_the_cache,
    a_token_too_many_is_kept_in_the_cache,
    an_end_inside_of_an_accepted_run_is_not_seen,
    the_embedding_is_an_older_policy_s,
)
from kit.rollouts import FLIPS, KINDS, Insider, decode_plainly, engine_of, samples, tiny_policy, tokens_of

from aedit.spec_rollout.engine import rows
from aedit.spec_rollout.engine import verification as verdict
from aedit.spec_rollout.engine.rows import RunningSample
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import RowNoise

mistake = Mistakes()
mistake(a_token_too_few_is_kept_in_the_cache)
mistake(a_token_too_many_is_kept_in_the_cache)
mistake(an_end_inside_of_an_accepted_run_is_not_seen)
mistake(the_embedding_is_an_older_policy_s)


@mistake
def a_sample_goes_on_behind_its_length(patch):
    def wrong(self, tokens):
        new = len(self.rollout.tokens) + len(tokens)
        return len(tokens), "length" if new >= self.rollout.prompt.sampling.max_new_tokens else ""

    patch.setattr(RunningSample, "find_end", wrong)


@mistake
def the_noise_is_that_of_the_root_s_position(patch):
    patch.setattr(verdict._VerifyPass, "_first", lambda self: self.lengths)


@mistake
def the_noise_of_a_tree_goes_by_node_and_not_by_depth(patch):
    depths = verdict.node_depths

    def wrong(parents_BN, depth):
        right = depths(parents_BN, depth)
        return torch.arange(right.shape[1]).clamp(max=depth).expand_as(right)

    patch.setattr(verdict, "node_depths", wrong)


@mistake
def the_path_of_a_tree_stays_where_it_was_in_the_cache(patch):
    patch.setattr(Target, "keep_path", lambda *_: None)


@mistake
def a_row_moves_without_its_cache(patch):
    patch.setattr(Target, "move_row", lambda *_: None)


@mistake
def a_row_moves_without_its_noise(patch):
    patch.setattr(RowNoise, "move", lambda *_: None)


@mistake
def a_shared_prompt_is_shared_but_for_a_token(patch):
    copy_row = Target.copy_row
    patch.setattr(Target, "copy_row", lambda self, a, b, length: copy_row(self, a, b, length - 1))


@mistake
def how_to_draw_is_not_looked_up_again_when_rows_change(patch):
    right = rows.RowSampling.of
    first = {}

    def wrong(asked, *rest):
        return first.setdefault(len(asked), right(asked, *rest))

    patch.setattr(rows, "RowSampling", SimpleNamespace(of=wrong))


@mistake
def a_shortest_length_is_not_counted_inside_a_draft(patch):
    right = verdict.warp_logits

    def wrong(logits, sampling, drawn=None):
        return right(logits, sampling, None if drawn is None else drawn[:, :1].expand_as(drawn))

    patch.setattr(verdict, "warp_logits", wrong)


@mistake
def the_policy_is_asked_at_another_temperature(patch):
    right = verdict.warp_logits
    patch.setattr(verdict, "warp_logits", lambda logits, *rest: right(logits * 0.9, *rest))


@pytest.fixture(scope="module")
def world():
    policy, mixed = tiny_policy(), samples(KINDS)
    plain = decode_plainly(policy, mixed)
    return policy, mixed, plain, [[*p.tokens, *tokens] for p, tokens in zip(mixed, plain, strict=True)]


def test_without_a_mistake_nothing_is_seen(world):
    policy, mixed, plain, texts = world
    assert tokens_of(engine_of(policy, 3, Insider(texts, honesty=0.7), *FLIPS), mixed) == plain


@pytest.mark.parametrize("name", mistake)
def test_a_mistake_is_seen(world, name, monkeypatch):
    policy, mixed, plain, texts = world
    mistake[name](monkeypatch)
    try:
        made = tokens_of(engine_of(policy, 3, Insider(texts, honesty=0.7), *FLIPS), mixed)
    except (AssertionError, RuntimeError, ValueError, IndexError):
        return
    assert made != plain
