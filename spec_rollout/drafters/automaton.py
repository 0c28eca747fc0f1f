"""A suffix automaton: every text that it has read, by what has followed what.

A state stands for strings that end at the same places of the texts; its longest string has `length` tokens,
and its link leads to the state of the longest suffix that ends at more places (Blumer et al., 1985). Reading
a token costs O(1) on average. Most states have one continuation, which lives in two flat arrays; only the
others have a dictionary, so that a token takes about 100 to 200 bytes.
"""

import sys
from array import array

MAX_LINKS = 64
"""Suffixes that one occurrence is counted for, longest first. Only in runs of one token, or of a few, are
there more; their short strings are counted too seldom then, so that a token never costs more."""

ROOT = 0
"""The state of the empty string."""

NO_STATE = -1


class Automaton:
    """Texts, read token by token. Several may grow at a time, each with a state of its own."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Read so far, of all texts."""
        self._length = array("i", [0])
        self._link = array("i", [NO_STATE])
        self._count = array("i", [0])
        self._token = array("i", [NO_STATE])
        self._target = array("i", [NO_STATE])
        self._more: dict[int, dict[int, int]] = {}

    def length(self, state: int) -> int:
        """Tokens of the longest string of the state."""
        return self._length[state]

    def count(self, state: int) -> int:
        """How often the strings of the state have been read."""
        return self._count[state]

    def step(self, state: int, token: int) -> int:
        """The state of the same strings with one more token, or `NO_STATE` if it has never followed them."""
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return NO_STATE if more is None else more.get(token, NO_STATE)

    def advance_match(self, state: int, length: int, token: int) -> tuple[int, int]:
        """After one more token of a text that is only compared: the state and the length of its longest
        suffix that has been read. state and length: the same of before; amortised O(1)."""
        while (found := self.step(state, token)) == NO_STATE:
            state = self._link[state]
            if state == NO_STATE:
                return ROOT, 0
            length = self._length[state]
        return found, length + 1

    def longest_continued(self, state: int, length: int) -> tuple[int, int]:
        """The longest suffix of a string of so many tokens that something has followed: state and length."""
        while self._token[state] == NO_STATE and state != ROOT:
            state = self._link[state]
            length = self._length[state]
        return state, length

    def continuations(self, state: int) -> list[tuple[int, int]]:
        """What has followed: tokens, each with its state."""
        if self._token[state] == NO_STATE:
            return []
        first = (self._token[state], self._target[state])
        more = self._more.get(state)
        return [first] if more is None else [first, *more.items()]

    def append(self, state: int, token: int) -> int:
        """One more token of a text that has been read up to `state` (begins at `ROOT`); where it is now."""
        length = self._length[state] + 1
        existing = self.step(state, token)
        if existing == NO_STATE:
            new = self._append(length)
            self._link[new] = self._add_transitions(state, token, new)
        elif self._length[existing] == length:
            new = existing
        else:
            new = self._split(state, token, existing)
        self.num_tokens += 1
        self._count_occurrence(new)
        return new

    def longest_prefix(self, tokens: list[int]) -> tuple[int, int]:
        """How far a text has been read from its first token on: that state, and the number of tokens."""
        state = ROOT
        for i, token in enumerate(tokens):
            found = self.step(state, token)
            if found == NO_STATE or self._length[found] != i + 1:
                return state, i
            state = found
        return state, len(tokens)

    @property
    def num_bytes(self) -> int:
        """What the arrays and dictionaries take, with the numbers in the dictionaries."""
        arrays = (self._length, self._link, self._count, self._token, self._target)
        flat = sum(sys.getsizeof(numbers) for numbers in arrays)
        branches = sum(sys.getsizeof(more) + 56 * len(more) for more in self._more.values())
        return flat + branches + sys.getsizeof(self._more) + 28 * len(self._more)

    def _append(self, length: int) -> int:
        self._length.append(length)
        self._link.append(ROOT)
        self._count.append(0)
        self._token.append(NO_STATE)
        self._target.append(NO_STATE)
        return len(self._length) - 1

    def _add_transitions(self, state: int, token: int, new: int) -> int:
        """Lets `token` lead to `new` from all suffixes that it never followed; the state `new` links to."""
        while state != NO_STATE:
            existing = self.step(state, token)
            if existing != NO_STATE:
                exact = self._length[existing] == self._length[state] + 1
                return existing if exact else self._split(state, token, existing)
            self._set_transition(state, token, new)
            state = self._link[state]
        return ROOT

    def _split(self, state: int, token: int, existing: int) -> int:
        """Takes the strings that `state` leads to out of `existing`, whose longer ones end at fewer
        places."""
        short = self._append(self._length[state] + 1)
        self._link[short] = self._link[existing]
        self._count[short] = self._count[existing]
        self._token[short] = self._token[existing]
        self._target[short] = self._target[existing]
        if existing in self._more:
            self._more[short] = dict(self._more[existing])
        self._link[existing] = short
        while state != NO_STATE and self.step(state, token) == existing:
            self._set_transition(state, token, short)
            state = self._link[state]
        return short

    def _set_transition(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (token, NO_STATE):
            self._token[state] = token
            self._target[state] = target
        else:
            self._more.setdefault(state, {})[token] = target

    def _count_occurrence(self, state: int) -> None:
        """Counts one occurrence of the state's strings and of their suffixes."""
        count, link = self._count, self._link
        for _ in range(MAX_LINKS):
            count[state] += 1
            state = link[state]
            if state == NO_STATE:
                return
