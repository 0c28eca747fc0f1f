"""Suffix automaton with occurrence counts, over several texts that grow token by token.

A state represents strings that end at the same positions of the texts. Its longest string has `length`
tokens, and its suffix link leads to the state of the longest suffix that ends at more positions (Blumer et
al., 1985). Appending a token is amortized O(1). Most states have one continuation, which is stored in two
flat arrays; only the others have a dictionary. A token takes about 100 to 200 bytes.
"""

import sys
from array import array

MAX_LINKS = 64
"""Number of suffixes, longest first, that one occurrence is counted for. Only repetitions of one token or of
a few have more. The limit bounds the cost per token; short suffixes of such texts are counted too rarely."""

ROOT = 0
"""State of the empty string."""

NO_STATE = -1


class Automaton:
    """Suffix automaton of several texts. Each text grows through its own state."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Number of appended tokens of all texts."""
        self._length = array("i", [0])
        self._link = array("i", [NO_STATE])
        self._count = array("i", [0])
        self._token = array("i", [NO_STATE])
        self._target = array("i", [NO_STATE])
        self._more: dict[int, dict[int, int]] = {}

    def length(self, state: int) -> int:
        """Return the length of the longest string of the state, in tokens."""
        return self._length[state]

    def count(self, state: int) -> int:
        """Return how often the strings of the state have occurred."""
        return self._count[state]

    def step(self, state: int, token: int) -> int:
        """Return the state after one more token, or `NO_STATE` if the token never followed these strings."""
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return NO_STATE if more is None else more.get(token, NO_STATE)

    def advance_match(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the longest known suffix of another text after one more token, as (state, length).

        Amortized O(1).

        Args:
            state: State of the longest known suffix before the token.
            length: Length of that suffix.
            token: Next token of the text.
        """
        while (found := self.step(state, token)) == NO_STATE:
            state = self._link[state]
            if state == NO_STATE:
                return ROOT, 0
            length = self._length[state]
        return found, length + 1

    def longest_continued(self, state: int, length: int) -> tuple[int, int]:
        """Return the longest suffix of the state's string that has a continuation, as (state, length)."""
        while self._token[state] == NO_STATE and state != ROOT:
            state = self._link[state]
            length = self._length[state]
        return state, length

    def continuations(self, state: int) -> list[tuple[int, int]]:
        """Return the tokens that have followed the state's strings, each with its state."""
        if self._token[state] == NO_STATE:
            return []
        first = (self._token[state], self._target[state])
        more = self._more.get(state)
        return [first] if more is None else [first, *more.items()]

    def append(self, state: int, token: int) -> int:
        """Append a token to a text that ends at `state`, and return its new state.

        An empty text ends at `ROOT`.
        """
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
        """Return the longest prefix of `tokens` that a known text begins with, as (state, length)."""
        state = ROOT
        for i, token in enumerate(tokens):
            found = self.step(state, token)
            if found == NO_STATE or self._length[found] != i + 1:
                return state, i
            state = found
        return state, len(tokens)

    @property
    def num_bytes(self) -> int:
        """Return the memory of the arrays and dictionaries, with the integers in the dictionaries."""
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
        """Add transitions to `new` from all suffixes that `token` never followed.

        Returns:
            The suffix link of `new`.
        """
        while state != NO_STATE:
            existing = self.step(state, token)
            if existing != NO_STATE:
                exact = self._length[existing] == self._length[state] + 1
                return existing if exact else self._split(state, token, existing)
            self._set_transition(state, token, new)
            state = self._link[state]
        return ROOT

    def _split(self, state: int, token: int, existing: int) -> int:
        """Split the shorter strings, which end at more positions, off `existing` into a new state."""
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
        """Count one occurrence of the state's strings and of their suffixes."""
        count, link = self._count, self._link
        for _ in range(MAX_LINKS):
            count[state] += 1
            state = link[state]
            if state == NO_STATE:
                return
