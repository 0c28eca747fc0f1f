"""Faults an engine can have with any verification rule.

Each is put in, one at a time, and must be detected.
"""

from dataclasses import replace

import torch

from aedit.spec_rollout.engine.rows import RunningSample
from aedit.spec_rollout.model.families import ModelWeights


class Mistakes(dict):
    """Collection of faults, keyed by their function names as words; used as a decorator."""

    def __call__(self, function):
        self[function.__name__.replace("_", " ")] = function
        return function


def a_token_too_few_is_kept_in_the_cache(patch):
    _keep(patch, -1)


def a_token_too_many_is_kept_in_the_cache(patch):
    _keep(patch, 1)


def _keep(patch, more):
    append = RunningSample.append

    def wrong(self, tokens, *rest):
        append(self, tokens, *rest)
        self.length += more * (len(tokens) > 1)

    patch.setattr(RunningSample, "append", wrong)


def an_end_inside_of_an_accepted_run_is_not_seen(patch):
    find_end = RunningSample.find_end
    patch.setattr(
        RunningSample, "find_end", lambda self, tokens: (len(tokens), find_end(self, tokens[-1:])[1])
    )


def the_embedding_is_an_older_policy_s(patch):
    """Use an outdated embedding, as after a lost update or when a drafter was loaded over it."""
    right = ModelWeights.embed

    def older(self, tokens, positions):
        now = self.embedding
        before = torch.randn(now.shape, generator=torch.Generator().manual_seed(0)).to(now.dtype)
        return right(replace(self, embedding=0.7 * (now + now.std() * before)), tokens, positions)

    patch.setattr(ModelWeights, "embed", older)
