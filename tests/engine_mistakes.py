"""Mistakes an engine can make however it verifies: each is put into ours, one at a time, and must be seen."""

from aedit.spec_rollout.rows import Live


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
