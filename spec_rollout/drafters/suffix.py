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
from aedit.spec_rollout.drafters.drafts import Arm, Draft, Noise, RowStart, StepUpdate
from aedit.spec_rollout.model.host_to_device import to_device
from aedit.types import check

SMOOTHING = 4.0
"""What followed c times out of n has probability c / (n + DOUBT / length): long matches are believed
sooner."""

OVERLAP = 32
"""Tokens of a growing text that are read again by the automaton that takes over."""

DraftNode = tuple[int, int, float]
"""Token, parent (a node, or -1), log-probability of the path."""


@dataclass(slots=True)
class GroupHistory:
    """What is remembered of a group."""

    young: Automaton = field(default_factory=Automaton)
    old: Automaton = field(default_factory=Automaton)
    generation: int = 0
    """How often the young one has become the old one."""

    def rotate(self, most: int) -> None:
        """Forgets the old one once the young one has read so many tokens."""
        if self.young.num_tokens >= most:
            self.old, self.young = self.young, Automaton()
            self.generation += 1

    @property
    def num_bytes(self) -> int:
        return self.young.num_bytes + self.old.num_bytes


@dataclass(slots=True)
class RowText:
    """One row: where it is in its group's history."""

    history: GroupHistory
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
        self.state, num_known = self.history.young.longest_prefix(tokens)
        for token in tokens[num_known:]:
            self.state = self.history.young.append(self.state, token)
        for token in tokens:
            self._match_old(token)
        self.tail = tokens[-OVERLAP:]

    def update(self, tokens: Sequence[int]) -> None:
        if self.generation != self.history.generation:
            self._follow_rotation()
        for token in tokens:
            self.state = self.history.young.append(self.state, token)
            self._match_old(token)
        self.tail += tokens
        if len(self.tail) > 4 * OVERLAP:
            del self.tail[:-OVERLAP]

    def match(self) -> tuple[Automaton, int, int]:
        """The longest suffix that something has followed: automaton, state, length."""
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
        """The automaton that has read this text is the old one now, or forgotten."""
        old, young = self.history.old, self.history.young
        only_one = self.history.generation == self.generation + 1
        self.old_state, self.old_length = (self.state, old.length(self.state)) if only_one else (ROOT, 0)
        self.state = ROOT
        for token in self.tail[-OVERLAP:]:
            self.state = young.append(self.state, token)
            if not only_one:
                self._match_old(token)
        self.generation = self.history.generation


class SuffixDrafter:
    """Drafts what has followed the longest suffix of a row's text, most frequent first, the lowest token
    among equals. `Arm.drafter == "suffix"`; needs no features, temperature or noise, and its drafts are
    certain.

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
        self._histories: dict[int, GroupHistory] = {}
        self._texts: dict[int, RowText] = {}

    def begin(self, rows: Sequence[RowStart]) -> None:
        half = self._window // 2
        for row in rows:
            history = self._history(row.group)
            text = RowText(history, history.generation)
            text.begin(list(row.tokens[-half:]))
            history.rotate(half)
            self._texts[row.row] = text

    def update(self, update: StepUpdate) -> None:
        for row, tokens in enumerate(update.tokens):
            text = self._texts[row]
            text.update(tokens)
            text.history.rotate(self._window // 2)

    def move(self, source: int, target: int) -> None:
        self._texts[target] = self._texts.pop(source)

    def end(self, row: int) -> None:
        del self._texts[row]

    def propose(self, arm: Arm, rows: int, noise: Noise, temperature_B: Tensor) -> Draft:
        predict_features = [self.draft_row(row, arm) for row in range(rows)]
        rest = [arm.nodes - len(guess) for guess in predict_features]
        tokens = [
            [g[0] for g in guess] + [0] * more for guess, more in zip(predict_features, rest, strict=True)
        ]
        scores = [
            [g[2] for g in guess] + [-math.inf] * m for guess, m in zip(predict_features, rest, strict=True)
        ]
        parents = [
            [g[1] for g in guess] + [-1] * more for guess, more in zip(predict_features, rest, strict=True)
        ]
        counts = [len(guess) for guess in predict_features]
        return Draft(
            tokens_BN=to_device(tokens, self._device, torch.int64),
            parents_BN=None if arm.is_chain else to_device(parents, self._device),
            counts_B=to_device(counts, self._device, torch.int64),
            scores_BN=to_device(scores, self._device, torch.float32),
        )

    def draft_row(self, row: int, arm: Arm) -> list[DraftNode]:
        """The nodes of one row, at most `arm.nodes`, parents first; none if nothing is known."""
        automaton, state, length = self._texts[row].match()
        if arm.is_chain:
            return self._draft_chain(automaton, state, length, arm.depth)
        return self._draft_tree(automaton, state, length, arm)

    def forget_group(self, group: int) -> None:
        """Nothing that has been said in the group so far is used any more; its live rows go on alone."""
        self._histories.pop(group, None)

    @property
    def num_bytes(self) -> int:
        """Of all that is remembered, live rows of no group included."""
        live = [text.history for text in self._texts.values()]
        return sum({id(h): h.num_bytes for h in (*self._histories.values(), *live)}.values())

    def _history(self, group: int) -> GroupHistory:
        """The group's, which is the last to be forgotten from now on."""
        history = self._histories.pop(group, None) or GroupHistory()
        if group >= 0:
            self._histories[group] = history
            if len(self._histories) > self._groups:
                del self._histories[next(iter(self._histories))]
        return history

    def _draft_chain(self, automaton: Automaton, state: int, length: int, depth: int) -> list[DraftNode]:
        predict_features: list[DraftNode] = []
        score = 0.0
        while len(predict_features) < depth and length >= self._min_match:
            token, state, log = _ranked_continuations(automaton, state, length)[0]
            score += log
            predict_features.append((token, len(predict_features) - 1, score))
            state, length = automaton.longest_continued(state, length + 1)
        return predict_features

    def _draft_tree(self, automaton: Automaton, state: int, length: int, arm: Arm) -> list[DraftNode]:
        """Best first by the score of the path, the first `arm.width` continuations of each node."""
        predict_features: list[DraftNode] = []
        heap: list[tuple[float, int, int, int, int, int, int]] = []

        def look(parent: int, depth: int, score: float, state: int, length: int) -> None:
            state, length = automaton.longest_continued(state, length)
            if length >= self._min_match and depth < arm.depth:
                for token, target, log in _ranked_continuations(automaton, state, length)[: arm.width]:
                    heapq.heappush(heap, (-score - log, parent, token, target, length, depth, 0))

        look(-1, 0, 0.0, state, length)
        while heap and len(predict_features) < arm.nodes:
            minus, parent, token, target, length, depth, _ = heapq.heappop(heap)
            predict_features.append((token, parent, -minus))
            look(len(predict_features) - 1, depth + 1, -minus, target, length + 1)
        return predict_features


def _ranked_continuations(automaton: Automaton, state: int, length: int) -> list[tuple[int, int, float]]:
    """What has followed, most frequent first: token, its state, log of its probability."""
    found = automaton.continuations(state)
    count = automaton.count
    if len(found) == 1:
        token, target = found[0]
        frequency = count(target)
        return [(token, target, math.log(frequency / (frequency + SMOOTHING / length)))]
    by_count = sorted((-count(target), token, target) for token, target in found)
    total = SMOOTHING / length - sum(minus for minus, _, _ in by_count)
    return [(token, target, math.log(-minus / total)) for minus, token, target in by_count]
