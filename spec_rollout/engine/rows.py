"""Who is in which row of the engine: samples begin, move together and end.

The live rows are always the first ones: where a sample ends, the next of the queue begins in its place, or
the last row moves into it. Whoever keeps something by row (cache, noise, drafters, the feature sink) is told
of every change.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aedit.spec_rollout.drafters.drafts import Begun, By, Drafter, FeatureSink
from aedit.spec_rollout.model.host_to_device import sent
from aedit.spec_rollout.model.target import Target
from aedit.spec_rollout.sampling.distribution import RowSampling
from aedit.spec_rollout.sampling.noise import RowNoise
from aedit.spec_rollout.sampling.samples import Finish, KeptKV, Prompt, Rollout
from aedit.spec_rollout.sampling.stops import StopStrings, Tokenizer

READ_AGAIN = 64
"""Of a text whose keys and values came along, so many tokens are computed again where somebody asks for
features: a drafter begins with those of the last ones."""


@dataclass(slots=True)
class Live:
    """A sample in its row."""

    rollout: Rollout
    length: int
    """Tokens whose keys and values are in the row: all but the last."""
    last: int
    """The token that goes through the policy next."""
    stops: StopStrings | None
    prompt_features: Tensor | None
    """Of all prompt tokens but the last, for others of the group; None where nobody asks for features, or
    they stayed on another engine."""

    @property
    def most_to_come(self) -> int:
        """New tokens that the sample may still get."""
        return self.rollout.prompt.sampling.max_new_tokens - len(self.rollout.tokens)

    def end_of(self, tokens: Sequence[int]) -> tuple[int, Finish]:
        """How many of these next tokens belong to the rollout, and why it ends with the last of them."""
        sampling, num_tokens = self.rollout.prompt.sampling, len(self.rollout.tokens)
        for i, token in enumerate(tokens, 1):
            completed = self.stops is not None and self.stops.completes(token)
            if token in sampling.stop_tokens or (completed and num_tokens + i >= sampling.min_new_tokens):
                return i, "stop"
            if num_tokens + i >= sampling.max_new_tokens:
                return i, "length"
        return len(tokens), ""

    def take(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """What one pass of the policy has drawn, and the rollout keeps."""
        rollout = self.rollout
        rollout.tokens += tokens
        rollout.logprobs += logprobs
        rollout.versions += [version] * len(tokens)
        rollout.passes += 1
        self.length += len(tokens)
        self.last = tokens[-1]


class Rows:
    """The live samples by row, those that wait for one, and what is kept for them."""

    def __init__(
        self, target: Target, noise: RowNoise, drafters: Mapping[By, Drafter], tokenizer: Tokenizer | None
    ) -> None:
        self.target, self.noise, self.drafters, self.tokenizer = target, noise, dict(drafters), tokenizer
        self.sink: FeatureSink | None = None
        self.live: list[Live] = []
        self.waiting: deque[Rollout] = deque()
        self.num_prefilled = 0
        """Tokens that were computed when samples began."""
        self.num_carried = 0
        """Tokens that were not, as their keys and values came along."""
        self._sampling: RowSampling | None = None
        self._some_greedy = False

    @property
    def want_features(self) -> bool:
        return bool(self.drafters) or self.sink is not None

    @property
    def sampling(self) -> RowSampling:
        """How the rows 0..B-1 draw."""
        if self._sampling is None:
            asked = [live.rollout.prompt.sampling for live in self.live]
            self._sampling = RowSampling.of(asked, self.target.vocabulary, self.target.device)
            self._some_greedy = any(sampling.temperature == 0 for sampling in asked)
        return self._sampling

    @property
    def mixed_temperature_B(self) -> Tensor | None:
        """None if no row is greedy."""
        sampling = self.sampling
        return sampling.temperature_B if self._some_greedy else None

    @property
    def most_to_come(self) -> int:
        """New tokens that some live sample may still get, at least 1."""
        return max(each.most_to_come for each in self.live)

    @property
    def feature_bytes(self) -> int:
        """Prompt features that are kept for samples that share the prompt."""
        held = [each.prompt_features for each in self.live if each.prompt_features is not None]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
        return sum(storages.values())

    def fill(self) -> None:
        """Those that wait begin, as long as there are rows."""
        num_free = self.target.rows - len(self.live)
        if self.waiting and num_free:
            first = len(self.live)
            self._begin(range(first, first + min(num_free, len(self.waiting))))

    def end(self, rows: Sequence[int], finished: bool) -> None:
        """These rows (ascending) have ended; finished: with their text, not to go on elsewhere."""
        for row in rows:
            self._forget(row, finished)
        num_next = min(len(rows), len(self.waiting))
        self._begin(rows[:num_next])
        for row in reversed(rows[num_next:]):
            self._close(row)

    def kept(self, row: int) -> KeptKV:
        """A copy of what the policy has computed of a row's sample."""
        return KeptKV(self.target.kv_of(row, self.live[row].length), self.target.version)

    def begin_again(self) -> None:
        """All that was computed for the live rows is made anew, by the policy as it is now."""
        for row in range(len(self.live)):
            self._forget(row, finished=False)
        rollouts = [live.rollout for live in self.live]
        self.live = []
        self.waiting.extendleft(reversed(rollouts))
        self._begin(range(len(rollouts)))

    def _begin(self, rows: Iterable[int]) -> None:
        """The next that wait take these rows, which are free or follow the last one."""
        begun = [self._enter(row, self.waiting.popleft()) for row in rows]
        if not begun:
            return
        self._sampling = None
        for drafter in self.drafters.values():
            drafter.begin(begun)
        if self.sink is not None:
            self.sink.begin(begun, self.target.version)

    def _enter(self, row: int, rollout: Rollout) -> Begun:
        """Compute what the policy must know of all tokens but the last."""
        prompt = rollout.prompt
        tokens, num_prompt = [*prompt.tokens, *rollout.tokens], len(prompt.tokens)
        carried, rollout.kv = self._carried(row, tokens, rollout.kv), None
        features_Tf = self._read_again(row, tokens) if carried else self._prefill(row, prompt, tokens)
        self.noise.begin(row, prompt.rollout, prompt.sample)
        has_all = self.want_features and len(features_Tf) == len(tokens) - 1
        kept = features_Tf[: num_prompt - 1] if has_all else None
        self.live[row : row + 1] = [Live(rollout, len(tokens) - 1, tokens[-1], self._stops(rollout), kept)]
        return Begun(row, prompt.group, tokens, features_Tf, num_prompt)

    def _stops(self, rollout: Rollout) -> StopStrings | None:
        """What looks for the sample's stop strings, having read what there is."""
        strings = rollout.prompt.sampling.stop_strings
        if not strings or self.tokenizer is None:
            return None
        stops = StopStrings(strings, self.tokenizer, rollout.prompt.tokens)
        for token in rollout.tokens:
            stops.completes(token)
        return stops

    def _carried(self, row: int, tokens: Sequence[int], kept: KeptKV | None) -> bool:
        """Whether the row has now what the sample brought along: it must be of this very policy."""
        if kept is None or kept.version != self.target.version or kept.num_tokens != len(tokens) - 1:
            return False
        try:
            self.target.put_kv(row, kept.kv)
        except ValueError:
            return False
        self.num_carried += kept.num_tokens
        return True

    def _read_again(self, row: int, tokens: Sequence[int]) -> Tensor:
        """Features of the last tokens, where somebody asks for them, of a row whose keys and values came."""
        if not self.want_features:
            return self._no_features()
        start = max(0, len(tokens) - 1 - READ_AGAIN)
        return self._compute(row, tokens[start:-1], start)

    def _prefill(self, row: int, prompt: Prompt, tokens: Sequence[int]) -> Tensor:
        """Fill the row's cache with all tokens but the last; their features, where somebody asks for them."""
        parts, start = [self._no_features()], 0
        source = self._same_prompt(prompt)
        if source is not None:
            start = len(prompt.tokens) - 1
            if source != row:
                self.target.copy_row(source, row, start)
            kept = self.live[source].prompt_features
            parts += [kept] if kept is not None else []
        if start < len(tokens) - 1:
            parts.append(self._compute(row, tokens[start:-1], start))
        return torch.cat(parts) if self.want_features else parts[0]

    def _compute(self, row: int, tokens: Sequence[int], start: int) -> Tensor:
        self.num_prefilled += len(tokens)
        return self.target.prefill(sent(tokens, self.target.device), row, start)

    def _no_features(self) -> Tensor:
        return torch.empty(0, self.target.feature_size, dtype=self.target.dtype, device=self.target.device)

    def _same_prompt(self, prompt: Prompt) -> int | None:
        """A row in which this prompt has been computed: of a sample of its group that is live, or that has
        just ended and whose row nobody has taken."""
        if prompt.group < 0:
            return None
        for row, live in enumerate(self.live):
            other = live.rollout.prompt
            has_features = live.prompt_features is not None or not self.want_features
            if other.group == prompt.group and other.tokens == prompt.tokens and has_features:
                return row
        return None

    def _forget(self, row: int, finished: bool) -> None:
        for drafter in self.drafters.values():
            drafter.end(row)
        if self.sink is not None:
            self.sink.end(row, finished)
        self.noise.end(row)

    def _close(self, row: int) -> None:
        """The last row moves into this one, which has ended."""
        self._sampling = None
        last = self.live.pop()
        source = len(self.live)
        if row == source:
            return
        self.live[row] = last
        self.target.move_row(source, row, last.length)
        self.noise.move(source, row)
        for drafter in self.drafters.values():
            drafter.move(source, row)
        if self.sink is not None:
            self.sink.move(source, row)
