"""A drafter without weights: what has followed the same words before, in the prompt, in the row's own text
and in other samples of the group (TLT's model-free drafter; samples of one prompt are alike).

The history of a group is two automata: new text goes into the younger; when that has half of the window, the
older is forgotten. A row is read by the younger and compared with the older.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aedit.spec_rollout.drafters.automaton import ROOT, Automaton
from aedit.spec_rollout.drafters.drafts import Arm, Begun, Draft, Noise, Taken
from aedit.spec_rollout.model.host_to_device import sent
from aedit.types import check

DOUBT = 4.0
"""What followed c times out of n has probability c / (n + DOUBT / length): long matches are believed
sooner."""

OVERLAP = 32
"""Tokens of a growing text that are read again by the automaton that takes over."""

Guess = tuple[int, int, float]
"""Token, parent (a node, or -1), log-probability of the path."""


@dataclass(slots=True)
class History:
    """What is remembered of a group."""

    young: Automaton = field(default_factory=Automaton)
    old: Automaton = field(default_factory=Automaton)
    generation: int = 0
    """How often the young one has become the old one."""

    def age(self, most: int) -> None:
        """Forgets the old one once the young one has read so many tokens."""
        if self.young.num_tokens >= most:
            self.old, self.young = self.young, Automaton()
            self.generation += 1

    @property
    def num_bytes(self) -> int:
        return self.young.num_bytes + self.old.num_bytes


@dataclass(slots=True)
class Text:
    """One row: where it is in its group's history."""

    history: History
    generation: int
    state: int = ROOT
    """In the young automaton, which has read it."""
    old_state: int = ROOT
    old_length: int = 0
    """In the old automaton, which it is compared with."""
    tail: list[int] = field(default_factory=list)
    """Its newest tokens, at least `OVERLAP` if there are."""

    def begin(self, tokens: list[int]) -> None:
        """All that there is of the text. What another sample has read already (the prompt) is not counted
        twice."""
        self.state, known = self.history.young.read_again(tokens)
        for token in tokens[known:]:
            self.state = self.history.young.read(self.state, token)
        for token in tokens:
            self._compare(token)
        self.tail = tokens[-OVERLAP:]

    def take(self, tokens: Sequence[int]) -> None:
        if self.generation != self.history.generation:
            self._change()
        for token in tokens:
            self.state = self.history.young.read(self.state, token)
            self._compare(token)
        self.tail += tokens
        if len(self.tail) > 4 * OVERLAP:
            del self.tail[:-OVERLAP]

    def match(self) -> tuple[Automaton, int, int]:
        """The longest suffix that something has followed: automaton, state, length."""
        if self.generation != self.history.generation:
            self._change()
        young, old = self.history.young, self.history.old
        state, length = young.continued(self.state, young.length(self.state))
        old_state, old_length = old.continued(self.old_state, self.old_length)
        return (young, state, length) if length >= old_length else (old, old_state, old_length)

    def _compare(self, token: int) -> None:
        self.old_state, self.old_length = self.history.old.follow(self.old_state, self.old_length, token)

    def _change(self) -> None:
        """The automaton that has read this text is the old one now, or forgotten."""
        old, young = self.history.old, self.history.young
        only_one = self.history.generation == self.generation + 1
        self.old_state, self.old_length = (self.state, old.length(self.state)) if only_one else (ROOT, 0)
        self.state = ROOT
        for token in self.tail[-OVERLAP:]:
            self.state = young.read(self.state, token)
            if not only_one:
                self._compare(token)
        self.generation = self.history.generation


class SuffixDrafter:
    """Drafts what has followed the longest suffix of a row's text, most frequent first, the lowest token
    among equals. `Arm.by == "suffix"`; needs no features, temperature or noise, and its drafts are certain.

    window: tokens remembered of a group; half of them at least. groups: that are remembered, those used last.
    min_match: tokens that must be the same before anything is guessed. ValueError if one is not above 0.
    """

    def __init__(
        self, *, window: int = 16384, groups: int = 256, min_match: int = 2, device: str = "cpu"
    ) -> None:
        check(window >= 2 * OVERLAP, "window", f"must be at least {2 * OVERLAP}", window)
        check(groups > 0, "groups", "must be above 0", groups)
        check(min_match > 0, "min_match", "must be above 0", min_match)
        self._window, self._groups, self._min_match = window, groups, min_match
        self._device = torch.device(device)
        self._histories: dict[int, History] = {}
        self._texts: dict[int, Text] = {}

    def begin(self, rows: Sequence[Begun]) -> None:
        half = self._window // 2
        for row in rows:
            history = self._history(row.group)
            text = Text(history, history.generation)
            text.begin(list(row.tokens[-half:]))
            history.age(half)
            self._texts[row.row] = text

    def take(self, taken: Taken) -> None:
        for row, tokens in enumerate(taken.tokens):
            text = self._texts[row]
            text.take(tokens)
            text.history.age(self._window // 2)

    def move(self, source: int, target: int) -> None:
        self._texts[target] = self._texts.pop(source)

    def end(self, row: int) -> None:
        del self._texts[row]

    def propose(self, arm: Arm, rows: int, noise: Noise, temperature_B: Tensor) -> Draft:
        guesses = [self.guess(row, arm) for row in range(rows)]
        rest = [arm.nodes - len(guess) for guess in guesses]
        tokens = [[g[0] for g in guess] + [0] * more for guess, more in zip(guesses, rest, strict=True)]
        scores = [[g[2] for g in guess] + [-math.inf] * m for guess, m in zip(guesses, rest, strict=True)]
        parents = [[g[1] for g in guess] + [-1] * more for guess, more in zip(guesses, rest, strict=True)]
        counts = [len(guess) for guess in guesses]
        return Draft(
            tokens_BN=sent(tokens, self._device, torch.int64),
            parents_BN=None if arm.is_chain else sent(parents, self._device),
            counts_B=sent(counts, self._device, torch.int64),
            scores_BN=sent(scores, self._device, torch.float32),
        )

    def guess(self, row: int, arm: Arm) -> list[Guess]:
        """The nodes of one row, at most `arm.nodes`, parents first; none if nothing is known."""
        automaton, state, length = self._texts[row].match()
        if arm.is_chain:
            return self._line(automaton, state, length, arm.depth)
        return self._tree(automaton, state, length, arm)

    def forget(self, group: int) -> None:
        """Nothing that has been said in the group so far is used any more; its live rows go on alone."""
        self._histories.pop(group, None)

    @property
    def num_bytes(self) -> int:
        """Of all that is remembered, live rows of no group included."""
        live = [text.history for text in self._texts.values()]
        return sum({id(h): h.num_bytes for h in (*self._histories.values(), *live)}.values())

    def _history(self, group: int) -> History:
        """The group's, which is the last to be forgotten from now on."""
        history = self._histories.pop(group, None) or History()
        if group >= 0:
            self._histories[group] = history
            if len(self._histories) > self._groups:
                del self._histories[next(iter(self._histories))]
        return history

    def _line(self, automaton: Automaton, state: int, length: int, depth: int) -> list[Guess]:
        guesses: list[Guess] = []
        score = 0.0
        while len(guesses) < depth and length >= self._min_match:
            token, state, log = _ranked(automaton, state, length)[0]
            score += log
            guesses.append((token, len(guesses) - 1, score))
            state, length = automaton.continued(state, length + 1)
        return guesses

    def _tree(self, automaton: Automaton, state: int, length: int, arm: Arm) -> list[Guess]:
        """Best first by the score of the path, the first `arm.width` continuations of each node."""
        guesses: list[Guess] = []
        heap: list[tuple[float, int, int, int, int, int, int]] = []

        def look(parent: int, depth: int, score: float, state: int, length: int) -> None:
            state, length = automaton.continued(state, length)
            if length >= self._min_match and depth < arm.depth:
                for token, target, log in _ranked(automaton, state, length)[: arm.width]:
                    heapq.heappush(heap, (-score - log, parent, token, target, length, depth, 0))

        look(-1, 0, 0.0, state, length)
        while heap and len(guesses) < arm.nodes:
            minus, parent, token, target, length, depth, _ = heapq.heappop(heap)
            guesses.append((token, parent, -minus))
            look(len(guesses) - 1, depth + 1, -minus, target, length + 1)
        return guesses


def _ranked(automaton: Automaton, state: int, length: int) -> list[tuple[int, int, float]]:
    """What has followed, most frequent first: token, its state, log of its probability."""
    found = automaton.continuations(state)
    count = automaton.count
    if len(found) == 1:
        token, target = found[0]
        times = count(target)
        return [(token, target, math.log(times / (times + DOUBT / length)))]
    by_count = sorted((-count(target), token, target) for token, target in found)
    total = DOUBT / length - sum(minus for minus, _, _ in by_count)
    return [(token, target, math.log(-minus / total)) for minus, token, target in by_count]
