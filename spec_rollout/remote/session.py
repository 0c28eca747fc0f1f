"""The samples of one server, from the rank's request to the release of what the server has generated.

Used by one thread, without network and clock. Both sides speak rollouts.proto: messages of the rank and
of the server go in; messages for both come out of `to_rank` and `to_server`.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout.audit import HeldRollout, Origin, is_signed
from aedit.spec_rollout.engine import EngineSpeed
from aedit.spec_rollout.remote.report_checks import GivenSample, Violation, add_tokens, check_end
from aedit.spec_rollout.sampling import SampleKey, TokenDecoder

WINDOW_S = 0.5
"""Shortest time over which tokens are counted."""


SHORT_S = 0.05
"""Shortest time that counts if all samples end before."""


HOPE_S = 10.0
"""Time without samples after which a server is taken as twice as fast, so that it is not left for ever."""


WEIGHT = 0.3
"""Weight of the newest window in the mean."""


class MeasuredSpeed:
    """Seconds per token of a sample, as seen here.

    What a server says about itself is used for one thing only: how its time divides into a part per step and
    a part per sample. A server that promises more than it does gets no samples for it.
    """

    def __init__(self) -> None:
        self._token_s: float | None = None
        self._live = 1.0
        self._shape = (1.0, 0.0)
        self._tokens, self._began_s, self._live_s = 0, math.nan, 0.0
        self._seen_s = math.nan
        self._used_s = math.inf

    def claim(self, fixed_s: float, row_s: float) -> None:
        """Note the times of a step that the server names."""
        if all(math.isfinite(value) and value >= 0 for value in (fixed_s, row_s)) and fixed_s + row_s > 0:
            self._shape = (fixed_s, row_s)

    def advance(self, now_s: float, live: int, tokens: int = 0) -> None:
        """Note the time, with `live` samples decoded until now, and tokens that have arrived."""
        if not live and not tokens:
            self._end(now_s)
            if now_s - self._used_s > HOPE_S and self._token_s is not None:
                self._token_s, self._used_s = self._token_s / 2, now_s
            return
        self._used_s = now_s
        if math.isnan(self._began_s):
            self._begin(now_s)
            return  # tokens of the time before, of which nothing is known
        self._live_s += live * (now_s - self._seen_s)
        self._seen_s = now_s
        self._tokens += tokens
        passed_s = now_s - self._began_s
        if passed_s < WINDOW_S or not self._live_s:
            return
        if self._tokens:
            self._take(self._live_s / self._tokens, self._live_s / passed_s)
            self._begin(now_s)
        elif self._token_s is None or self._live_s > self._token_s:
            # Nothing has come for longer than a token should take: it is at least as slow as this.
            self._token_s, self._live = self._live_s, self._live_s / passed_s

    def speed(self) -> EngineSpeed | None:
        """Return the speed; None before the first measurement."""
        if self._token_s is None:
            return None
        fixed, row = self._shape
        scale = self._token_s / (fixed + row * self._live)
        return EngineSpeed(fixed * scale, row * scale, row * scale)

    def _begin(self, now_s: float) -> None:
        """Begin a window."""
        self._tokens, self._began_s, self._live_s, self._seen_s = 0, now_s, 0.0, now_s

    def _end(self, now_s: float) -> None:
        """End a window early, as no samples are left; a very short one tells nothing."""
        if self._tokens and now_s - self._began_s > SHORT_S and self._live_s:
            self._take(self._live_s / self._tokens, self._live_s / (now_s - self._began_s))
        self._tokens, self._began_s = 0, math.nan

    def _take(self, token_s: float, live: float) -> None:
        weight = WEIGHT if self._token_s is not None else 1.0
        self._token_s = (1 - weight) * (self._token_s or 0.0) + weight * token_s
        self._live = (1 - weight) * self._live + weight * live


RETURN_S = 1.0
"""Longest wait for the last tokens of a sample that the server is to return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Facts about a server, as it gave them when the connection was opened."""

    name: str
    rows: int
    room: int
    """Most samples that it takes."""
    public_key: bytes
    origin: Origin
    """Names that its signatures contain."""


@dataclass(slots=True, eq=False)
class Held:
    """A sample that waits for its release."""

    sample: GivenSample
    rollout: HeldRollout
    answers_removal: bool = False
    """The rank has asked for it back."""
    is_stalled: bool = False
    """It was taken back because the server did not advance it."""


class Session:
    """State of a connection to one server."""

    def __init__(
        self,
        facts: ServerFacts,
        to_rank: Callable[[pb.ToTrainer], None],
        to_server: Callable[[pb.ToServer], None],
        *,
        vocabulary: int,
        decoder: Callable[[], TokenDecoder | None] = lambda: None,
    ) -> None:
        self.facts, self.to_rank = facts, to_rank
        self.versions: set[int] = set()
        """Policy versions that the server was given."""
        self.given: dict[SampleKey, GivenSample] = {}
        """Samples that the server has, in the order of their requests."""
        self.held: list[Held] = []
        """Samples that wait for their release, oldest first."""
        self.speed = MeasuredSpeed()
        self.num_tokens = self.num_samples = self.num_passes = 0
        self.num_delivered = 0
        """Tokens of the server that the rank has got."""
        self.num_moved = self.num_taken_back = 0
        """Samples that the rank has taken away before their end, and those that it got back otherwise."""
        self.ending = False
        """The server is about to leave."""
        self.refuses_for_s = 0.0
        """Time for which it takes no more samples, set by its last refusal."""
        self.changed = False
        """There is something that the rank does not know yet."""
        self._to_server, self._vocabulary, self._decoder = to_server, vocabulary, decoder
        self._is_gone = False
        self._dropped: set[SampleKey] = set()
        self._returning: dict[SampleKey, float] = {}
        """Seconds since the server was asked to return a sample, until it answers. What it sends about one
        that is no longer given is not used."""
        self._again: dict[SampleKey, GivenSample] = {}
        """Samples whose keys the server has still to return."""

    @property
    def live(self) -> int:
        """Return the number of samples that the server decodes at a time now."""
        return min(self.facts.rows, len(self.given))

    @property
    def draining(self) -> bool:
        """Return whether nothing more comes that could release what is held."""
        return not self.given or any(each.answers_removal or each.is_stalled for each in self.held)

    @property
    def overdue(self) -> tuple[SampleKey, float] | None:
        """Return the oldest request to return a sample that has no answer, and its age; None without one."""
        return next(iter(self._returning.items()), None)

    def take_back_stalled(self, passed_s: float, stalled_s: float) -> bool:
        """Count the time of each sample and request; take samples back that do not advance.

        Args:
            passed_s: Seconds since the last call.
            stalled_s: Seconds without a token after which a sample continues elsewhere.

        Returns:
            Whether there were any.
        """
        for key in self._returning:
            self._returning[key] += passed_s
            if self._returning[key] > RETURN_S and key in self.given:
                self._take_back(self.given[key], answers_removal=True)
        for sample in (waiting := [*self.given.values(), *self._again.values()]):
            sample.still_s += passed_s
        stalled = [each for each in waiting if each.still_s > stalled_s]
        for sample in stalled:
            if self._again.pop(sample.key, None) is not None:
                self.num_taken_back += 1
                self._return(sample, is_stalled=True)
            elif sample.key in self.given:
                self._ask_back(sample.key)
                self._take_back(sample, is_stalled=True)
        return bool(stalled)

    def add(self, request: pb.Add) -> None:
        """Give the server a sample of the rank.

        One whose key the server has still to return, as it was cancelled, waits for that.
        """
        sample = GivenSample.of(request, self._decoder)
        if sample.key in self._returning:
            self._again[sample.key] = sample
        else:
            self._give(sample)

    def _give(self, sample: GivenSample) -> None:
        self.given[sample.key] = sample
        self._dropped.discard(sample.key)
        self._to_server(pb.ToServer(add=sample.request))

    def remove(self, message: pb.Remove) -> None:
        """Take a sample back, as the rank wants; with `drop` its tokens are of no use.

        Without an answer of the server within `RETURN_S` it continues after the tokens that are here.
        """
        key = message.rollout, message.sample
        if self._again.pop(key, None) is not None:
            self._say_removed(key, found=True)
            return
        if message.drop:
            self._dropped.add(key)
            self.held = [each for each in self.held if each.sample.key != key]
        if key in self.given:
            self._ask_back(key)
            if message.drop:
                self._take_back(self.given[key], answers_removal=True)
        else:
            self._answer_removal(key)

    def handle(self, message: pb.ToTrainer, now_s: float) -> None:
        """Take what the server has sent.

        Raises:
            Violation: No honest server sends it.
        """
        kind = message.WhichOneof("message")
        if kind is None:
            return
        if kind == "figures":
            self.ending = self.ending or message.figures.ending
            self.speed.claim(message.figures.fixed_s, message.figures.row_s)
            return
        if kind not in ("tokens", "ended", "removed", "rejected"):
            raise Violation(f"a message of kind {kind} after the first one")
        found: Any = getattr(message, kind)
        key = found.rollout, found.sample
        sample = self.given.get(key)
        if kind == "removed":
            self._removed(key, sample, found, now_s)
        elif sample is None and key not in self._returning:
            raise Violation(f"a report on sample {key[0]}/{key[1]}, which it does not have")
        elif sample is None:
            return  # it was taken back meanwhile
        elif kind == "tokens":
            self.speed.advance(now_s, self.live, len(found.tokens))
            add_tokens(sample, found, self._vocabulary, self.versions)
            sample.still_s = 0.0
            self.num_tokens += len(found.tokens)
            self.changed = True
        elif kind == "ended":
            self._ended(sample, found, now_s)
        else:
            refuses_s = 60.0 if found.final else 1.0
            self.refuses_for_s = max(self.refuses_for_s, refuses_s, found.retry_after_s)
            self._take_back(sample)

    def progress(self) -> list[tuple[int, int, int]]:
        """Return (rollout, sample, tokens) that the server has drawn and the rank has not got."""
        waiting = [*self.given.values(), *(each.sample for each in self.held)]
        return [(*sample.key, sample.num_drawn) for sample in waiting if sample.num_drawn]

    def hold_unfinished(self) -> None:
        """Hold the unfinished samples of a server that has gone, as far as it has drawn them.

        The rank takes them back at the message of the end.
        """
        self._is_gone = True
        for sample in list(self.given.values()):
            self._take_back(sample)

    def release(self, released: Sequence[Held]) -> None:
        """Deliver these held samples to the rank, as far as they were not cancelled since."""
        for each in [each for each in self.held if each in released]:
            self.held.remove(each)
            self._deliver(each)

    def return_held(self, returned: Sequence[Held]) -> None:
        """Give the rank held samples back without the server's tokens, which cannot be judged."""
        for each in [each for each in self.held if each in returned]:
            self.held.remove(each)
            self._return(each.sample, answers_removal=each.answers_removal)
            self.num_taken_back += 1

    def discard(self) -> int:
        """Forget all that the server has drawn and that was not delivered; return the number of samples."""
        count = len(self.given) + len(self.held) + len(self._again)
        self.num_taken_back += count
        for kept in (self.given, self._again, self.held):
            kept.clear()
        return count

    def _ask_back(self, key: SampleKey) -> None:
        self._returning[key] = 0.0
        self._to_server(pb.ToServer(remove=pb.Remove(rollout=key[0], sample=key[1])))

    def _ended(self, sample: GivenSample, found: pb.Ended, now_s: float) -> None:
        check_end(sample, found)
        rollout = self._rollout(sample)
        statement = rollout.statement_of(self.facts.origin)
        if not is_signed(statement, found.signature, self.facts.public_key):
            raise Violation("a signature that does not fit what it has sent")
        self.speed.advance(now_s, self.live)
        del self.given[sample.key]
        self.num_samples += 1
        self.num_passes += sample.passes
        if sample.key not in self._dropped:
            signed = statement.SerializeToString(deterministic=True)
            self.held.append(Held(sample, replace(rollout, statement=signed, signature=found.signature)))
        if sample.key in self._returning:
            self._answer_removal(sample.key)

    def _removed(self, key: SampleKey, sample: GivenSample | None, found: pb.Removed, now_s: float) -> None:
        if self._returning.pop(key, None) is None or (sample is not None and not found.found):
            raise Violation(f"a wrong answer to the request to return sample {key[0]}/{key[1]}")
        self.speed.advance(now_s, self.live)
        if sample is not None:
            self._take_back(sample, answers_removal=True)
        if key in self._again:
            self._give(self._again.pop(key))

    def _answer_removal(self, key: SampleKey) -> None:
        """Tell the rank that the server has not the sample any more; after its tokens, if they are held."""
        held = next((each for each in self.held if each.sample.key == key), None)
        if held is None:
            self._say_removed(key, found=False)
        else:
            held.answers_removal = True

    def _take_back(
        self, sample: GivenSample, *, answers_removal: bool = False, is_stalled: bool = False
    ) -> None:
        """Take a sample from the server; its tokens go to the rank when they are released."""
        del self.given[sample.key]
        self.num_moved += answers_removal
        self.num_taken_back += not answers_removal
        if sample.key in self._dropped or not sample.num_drawn:
            self._dropped.discard(sample.key)
            self._return(sample, answers_removal=answers_removal, is_stalled=is_stalled)
        else:
            self.held.append(Held(sample, self._rollout(sample), answers_removal, is_stalled))

    def _deliver(self, held: Held) -> None:
        sample = held.sample
        (rollout, number), new = sample.key, slice(sample.start, None)
        self.num_delivered += sample.num_drawn
        self.changed = True
        self.to_rank(
            pb.ToTrainer(
                tokens=pb.Tokens(
                    rollout=rollout,
                    sample=number,
                    start=sample.start,
                    tokens=sample.tokens[new],
                    logprobs=sample.logprobs[new],
                    versions=sample.versions[new],
                    top_logprobs=json.dumps(sample.top).encode() if sample.top else b"",
                )
            )
        )
        if not sample.finish_reason:
            self._return(sample, answers_removal=held.answers_removal, is_stalled=held.is_stalled)
            return
        ended = pb.Ended(
            rollout=rollout, sample=number, finish_reason=sample.finish_reason, passes=sample.passes
        )
        self.to_rank(pb.ToTrainer(ended=ended))
        if held.answers_removal:
            self._say_removed(sample.key, found=False)

    def _return(
        self, sample: GivenSample, *, answers_removal: bool = False, is_stalled: bool = False
    ) -> None:
        """Give a sample back to the rank; `is_stalled`: it is not to come again."""
        if self._is_gone:
            return
        if answers_removal:
            self._say_removed(sample.key, found=True)
            return
        rollout, number = sample.key
        reason = "the server did not advance it in time" if is_stalled else "the server has returned it"
        self.to_rank(
            pb.ToTrainer(
                rejected=pb.Rejected(rollout=rollout, sample=number, reason=reason, final=is_stalled)
            )
        )

    def _say_removed(self, key: SampleKey, *, found: bool) -> None:
        self.to_rank(pb.ToTrainer(removed=pb.Removed(rollout=key[0], sample=key[1], found=found)))

    def _rollout(self, sample: GivenSample) -> HeldRollout:
        return HeldRollout(
            server=self.facts.name,
            public_key=self.facts.public_key,
            key=sample.key,
            prompt=tuple(sample.request.prompt),
            sampling=sample.request.sampling,
            tokens=tuple(sample.tokens),
            logprobs=tuple(sample.logprobs),
            versions=tuple(sample.versions),
            start=sample.start,
            finish_reason=sample.finish_reason,
        )
