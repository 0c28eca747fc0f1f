"""Drafter without weights: continuations of the same suffix in earlier text of the group.

This is TLT's model-free drafter (arXiv:2511.16665): it searches the prompt, the row's own text and other
samples of the group, as samples of one prompt resemble each other. The history of a group is two automata.
New text goes into the younger one; when that has half of the window, the older one is dropped. A row's text
is appended to the younger one and only matched against the older one.
"""

import heapq
import math
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from aedit.spec_rollout.drafters.drafts import Arm, Draft, Noise, RowStart, StepUpdate
from aedit.spec_rollout.model import to_device
from aedit.types import PositiveInt, Range, checked

SMOOTHING = 4.0
"""A continuation seen c times out of n has probability c / (n + SMOOTHING / length), which trusts long
matches sooner."""
OVERLAP = 32
"""Last tokens of a growing text that are appended to a new automaton."""
DraftNode = tuple[int, int, float]
"""Token, parent (a node, or -1), log-probability of the path."""


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


@dataclass(slots=True)
class GroupHistory:
    """Texts of one group."""

    young: Automaton = field(default_factory=Automaton)
    old: Automaton = field(default_factory=Automaton)
    generation: int = 0
    """Number of rotations so far."""
    ended: "deque[RowText]" = field(default_factory=deque)
    """Ended texts with unread tokens."""

    def rotate(self, most: int) -> None:
        """Drop the old automaton and start a new one if the young one has `most` tokens."""
        if self.young.num_tokens >= most:
            self.old, self.young = self.young, Automaton()
            self.generation += 1

    def end(self, text: "RowText", most: int) -> None:
        """Keep an ended text until it is read; of all of them, the last ones with `most` unread tokens."""
        if text.num_unread:
            self.ended.append(text)
            num_unread = sum(each.num_unread for each in self.ended)
            while num_unread - self.ended[0].num_unread >= most:
                num_unread -= self.ended.popleft().num_unread

    @property
    def num_bytes(self) -> int:
        """Return the memory of both automata in bytes."""
        return self.young.num_bytes + self.old.num_bytes


ROOT = 0
"""State of the empty string."""


@dataclass(slots=True)
class RowText:
    """Text of one row and its states in the group's history.

    Tokens are only stored until a draft is requested: an automaton without requests must cost nothing.
    """

    history: GroupHistory
    generation: int
    start: list[int]
    """Text at its begin; empty once it is read."""
    unread: list[int] = field(default_factory=list)
    """Later tokens that are not read yet."""
    state: int = ROOT
    """State in the young automaton, to which the text is appended."""
    old_state: int = ROOT
    old_length: int = 0
    """State and length of the match in the old automaton."""
    tail: list[int] = field(default_factory=list)
    """Last read tokens, at least `OVERLAP` if there are as many."""

    @property
    def num_unread(self) -> int:
        """Return the number of tokens that are not read yet."""
        return len(self.start) + len(self.unread)

    def append(self, tokens: Sequence[int], most: int) -> None:
        """Append tokens without reading them. Of more than 2 * `most` unread ones the last `most` remain."""
        self.unread += tokens
        if len(self.unread) > 2 * most:
            self.start, self.unread = self.unread[-most:], []

    def read_start(self, most: int) -> None:
        """Read the text's begin into the group's history, which is rotated at `most` tokens."""
        if self.start:
            self._begin(self.start)
            self.start = []
            self.history.rotate(most)

    def read(self, most: int) -> None:
        """Read all unread tokens."""
        self.read_start(most)
        tokens, self.unread = self.unread, []
        for first in range(0, len(tokens), OVERLAP):
            self._update(tokens[first : first + OVERLAP])
            self.history.rotate(most)

    def _begin(self, tokens: list[int]) -> None:
        """Read the whole text so far. A prefix of a known text (the prompt) is not counted again."""
        self.generation, self.old_state, self.old_length = self.history.generation, ROOT, 0
        self.state, num_known = self.history.young.longest_prefix(tokens)
        for token in tokens[num_known:]:
            self.state = self.history.young.append(self.state, token)
        for token in tokens:
            self._match_old(token)
        self.tail = tokens[-OVERLAP:]

    def _update(self, tokens: Sequence[int]) -> None:
        """Read new tokens."""
        if self.generation != self.history.generation:
            self._follow_rotation()
        for token in tokens:
            self.state = self.history.young.append(self.state, token)
            self._match_old(token)
        self.tail += tokens
        if len(self.tail) > 4 * OVERLAP:
            del self.tail[:-OVERLAP]

    def match(self) -> tuple[Automaton, int, int]:
        """Return the longest suffix that has a continuation: automaton, state, length."""
        if self.generation != self.history.generation:
            self._follow_rotation()
        young, old = self.history.young, self.history.old
        state, length = young.longest_continued(self.state, young.length(self.state))
        old_state, old_length = old.longest_continued(self.old_state, self.old_length)
        return (young, state, length) if length >= old_length else (old, old_state, old_length)

    def _match_old(self, token: int) -> None:
        self.old_state, self.old_length = self.history.old.advance_match(
            self.old_state, self.old_length, token
        )

    def _follow_rotation(self) -> None:
        """Move to the new automata after the history was rotated."""
        old, young = self.history.old, self.history.young
        only_one = self.history.generation == self.generation + 1
        self.old_state, self.old_length = (self.state, old.length(self.state)) if only_one else (ROOT, 0)
        self.state = ROOT
        for token in self.tail[-OVERLAP:]:
            self.state = young.append(self.state, token)
            if not only_one:
                self._match_old(token)
        self.generation = self.history.generation


@checked()
class SuffixDrafter:
    """`drafts.Drafter` for the arms `suffix:...`.

    It drafts continuations of the longest suffix of a row's text, the most frequent one first, the lowest
    token among equals. It needs no features, temperature or noise; its drafts are certain (a point mass).
    """

    needs_features = False

    def __init__(
        self,
        *,
        window: Annotated[int, Range(least=2 * OVERLAP)] = 16384,
        groups: PositiveInt = 256,
        min_match: PositiveInt = 2,
        device: str = "cpu",
    ) -> None:
        """Make a drafter.

        Args:
            window: Upper limit of the kept tokens of a group; at least half of them are kept.
            groups: Number of groups whose history is kept, the most recently used ones.
            min_match: Number of tokens that must match before anything is drafted.
            device: Device of the drafts.

        Raises:
            ValueError: A value is too small.
        """
        self._half, self._groups, self._min_match = window // 2, groups, min_match
        self._device = torch.device(device)
        self._histories: dict[int, GroupHistory] = {}
        self._texts: dict[int, RowText] = {}

    def begin(self, rows: Sequence[RowStart]) -> None:
        """Add samples that start in these rows."""
        for row in rows:
            history = self._history(row.group)
            self._texts[row.row] = RowText(history, history.generation, list(row.tokens[-self._half :]))

    def update(self, update: StepUpdate) -> None:
        """Append the tokens of one step."""
        for row, tokens in enumerate(update.tokens):
            self._texts[row].append(tokens, self._half)

    def move(self, source: int, target: int) -> None:
        """Rename row `source` to `target`, whose sample has ended."""
        self._texts[target] = self._texts.pop(source)

    def end(self, row: int) -> None:
        """Remove the sample of `row`."""
        text = self._texts.pop(row)
        text.history.end(text, self._half)

    def propose(self, arm: Arm, rows: int, noise: Noise, temperature_B: Tensor) -> Draft:
        """Return a draft (see `Drafter.propose`)."""
        self._read_all()
        nodes = [self._draft(self._texts[row], arm) for row in range(rows)]
        rest = [arm.nodes - len(guess) for guess in nodes]
        tokens = [[g[0] for g in guess] + [0] * more for guess, more in zip(nodes, rest, strict=True)]
        scores = [[g[2] for g in guess] + [-math.inf] * m for guess, m in zip(nodes, rest, strict=True)]
        parents = [[g[1] for g in guess] + [-1] * more for guess, more in zip(nodes, rest, strict=True)]
        counts = [len(guess) for guess in nodes]
        return Draft(
            tokens_BN=to_device(tokens, self._device, torch.int64),
            parents_BN=None if arm.is_chain else to_device(parents, self._device),
            counts_B=to_device(counts, self._device, torch.int64),
            scores_BN=to_device(scores, self._device, torch.float32),
        )

    def draft_row(self, row: int, arm: Arm) -> list[DraftNode]:
        """Return the nodes of one row, at most `arm.nodes`, parents first; empty without a match."""
        self._read_all()
        return self._draft(self._texts[row], arm)

    def _draft(self, text: RowText, arm: Arm) -> list[DraftNode]:
        automaton, state, length = text.match()
        if arm.is_chain:
            return self._draft_chain(automaton, state, length, arm.depth)
        return self._draft_tree(automaton, state, length, arm)

    def forget_group(self, group: int) -> None:
        """Drop the history of a group. Its running rows continue with a history of their own."""
        self._histories.pop(group, None)

    @property
    def num_bytes(self) -> int:
        """Return the memory of all histories in bytes."""
        live = [text.history for text in self._texts.values()]
        return sum({id(h): h.num_bytes for h in (*self._histories.values(), *live)}.values())

    def _read_all(self) -> None:
        """Read all texts of the groups that have a row."""
        for text in self._texts.values():
            while text.history.ended:
                text.history.ended.popleft().read(self._half)
        for text in self._texts.values():
            text.read_start(self._half)
        for text in self._texts.values():
            text.read(self._half)

    def _history(self, group: int) -> GroupHistory:
        """Return the history of a group and mark it as most recently used."""
        history = self._histories.pop(group, None) or GroupHistory()
        if group >= 0:
            self._histories[group] = history
            if len(self._histories) > self._groups:
                del self._histories[next(iter(self._histories))]
        return history

    def _draft_chain(self, automaton: Automaton, state: int, length: int, depth: int) -> list[DraftNode]:
        nodes: list[DraftNode] = []
        score = 0.0
        while len(nodes) < depth and length >= self._min_match:
            token, state, log = _ranked_continuations(automaton, state, length)[0]
            score += log
            nodes.append((token, len(nodes) - 1, score))
            state, length = automaton.longest_continued(state, length + 1)
        return nodes

    def _draft_tree(self, automaton: Automaton, state: int, length: int, arm: Arm) -> list[DraftNode]:
        """Grow a tree best-first by the score of the path, with `arm.width` continuations per node."""
        nodes: list[DraftNode] = []
        heap: list[tuple[float, int, int, int, int, int, int]] = []

        def expand(parent: int, depth: int, score: float, state: int, length: int) -> None:
            state, length = automaton.longest_continued(state, length)
            if length >= self._min_match and depth < arm.depth:
                for token, target, log in _ranked_continuations(automaton, state, length)[: arm.width]:
                    heapq.heappush(heap, (-score - log, parent, token, target, length, depth, 0))

        expand(-1, 0, 0.0, state, length)
        while heap and len(nodes) < arm.nodes:
            minus, parent, token, target, length, depth, _ = heapq.heappop(heap)
            nodes.append((token, parent, -minus))
            expand(len(nodes) - 1, depth + 1, -minus, target, length + 1)
        return nodes


def _ranked_continuations(automaton: Automaton, state: int, length: int) -> list[tuple[int, int, float]]:
    """Return continuations, most frequent first: token, its state, log-probability."""
    found = automaton.continuations(state)
    count = automaton.count
    if len(found) == 1:
        token, target = found[0]
        frequency = count(target)
        return [(token, target, math.log(frequency / (frequency + SMOOTHING / length)))]
    by_count = sorted((-count(target), token, target) for token, target in found)
    total = SMOOTHING / length - sum(minus for minus, _, _ in by_count)
    return [(token, target, math.log(-minus / total)) for minus, token, target in by_count]


MAX_LINKS = 64
"""Number of suffixes, longest first, that one occurrence is counted for. Only repetitions of one token or of
a few have more. The limit bounds the cost per token; short suffixes of such texts are counted too rarely."""
NO_STATE = -1
