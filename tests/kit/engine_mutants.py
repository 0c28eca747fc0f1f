"""Mistakes an engine can make however it verifies: each is put into ours, one at a time, and must be seen."""

import torch

from aedit.spec_rollout.engine.rows import Live
from aedit.spec_rollout.model.target import Target


class Mistakes(dict):
    """Functions by their names as words; to be used as a decorator."""

    def __call__(self, function):
        self[function.__name__.replace("_", " ")] = function
        return function


def a_token_too_few_is_kept_in_the_cache(patch):
    _keep(patch, -1)


def a_token_too_many_is_kept_in_the_cache(patch):
    _keep(patch, 1)


def _keep(patch, more):
    take = Live.take

    def wrong(self, tokens, *rest):
        take(self, tokens, *rest)
        self.length += more * (len(tokens) > 1)

    patch.setattr(Live, "take", wrong)


def an_end_inside_of_an_accepted_run_is_not_seen(patch):
    end_of = Live.end_of
    patch.setattr(Live, "end_of", lambda self, tokens: (len(tokens), end_of(self, tokens[-1:])[1]))


def the_embedding_is_an_older_policy_s(patch):
    """As after an update that has not come through, or under a drafter's that was loaded over it."""
    right = Target.embedding.fget

    def older(self):
        now = right(self)
        before = torch.randn(now.shape, generator=torch.Generator().manual_seed(0)).to(now.dtype)
        return 0.7 * (now + now.std() * before)

    patch.setattr(Target, "embedding", property(older))
