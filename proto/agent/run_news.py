"""News of the run from all hub processes: those of the first one, and what the others know besides."""

from dataclasses import dataclass, field, replace

from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.rpc import lineage
from aedit.types import News


@dataclass(frozen=True, slots=True)
class _Past:
    """The state of the run when part 0 was founded again."""

    round: int = 0
    total_steps: int = 0
    total_tokens: int = 0
    elapsed_s: float = 0.0
    progress: float = 0.0


@dataclass(slots=True)
class RunNews:
    """The run as a trainer is told of it. It never goes back, also if part 0 of a swarm begins anew."""

    news: pb.News = field(default_factory=pb.News)
    """News of hub process 0."""
    _of_parts: dict[int, pb.News] = field(default_factory=dict)
    _past: _Past = _Past()

    def heard(self, part: int, news: pb.News) -> None:
        """Take the news of a hub process."""
        if part == 0 and self.news.term and lineage(news.term) != lineage(self.news.term):
            now = self.current()
            self._past = _Past(now.round, now.total_steps, now.total_tokens, now.elapsed_s, now.progress)
        self._of_parts[part] = news
        self.news = news if part == 0 else self.news

    def current(self) -> News:
        """Return the news for the trainer.

        A part that was founded again counts from zero: then the past here and the other parts tell more.
        """
        told = _news(self.news)
        if not lineage(self.news.term):
            return told
        past, others = self._past, list(self._of_parts.values())
        progress = max(min(1.0, past.progress + told.progress), *(one.progress for one in others))
        return replace(
            told,
            round=past.round + told.round,
            total_steps=max(past.total_steps + told.total_steps, *(one.total_steps for one in others)),
            total_tokens=max(past.total_tokens + told.total_tokens, *(one.total_tokens for one in others)),
            elapsed_s=max(past.elapsed_s + told.elapsed_s, *(one.elapsed_s for one in others)),
            progress=progress,
            finished=progress >= 1.0 or told.finished,
        )


def _news(news: pb.News) -> News:
    return News(
        age_s=0.0,
        round=news.round,
        pace_steps=news.pace_steps,
        nodes=news.nodes,
        total_steps=news.total_steps,
        total_tokens=news.total_tokens,
        elapsed_s=news.elapsed_s,
        progress=news.progress,
        finished=news.finished,
        evaluates=news.evaluates,
    )
