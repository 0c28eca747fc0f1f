"""Release of held samples: at once, or after an audit in a thread of its own."""

import logging
import queue
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from aedit.spec_rollout.audit import Auditor, AuditVerdict, HeldRollout, WeightReader
from aedit.spec_rollout.remote.session import Held, Session

HOLD_S = 2.0
"""Longest time for which a sample is held without an audit."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AuditDone:
    """Result of one audit for one server."""

    session: Hashable
    held: tuple[Held, ...]
    """The samples that were held when it began and can be judged."""
    verdict: AuditVerdict | None
    """None: no sample was selected."""
    unjudged: tuple[Held, ...] = ()
    """Samples whose policy versions the auditor has not any more."""
    error: str = ""
    """The auditor itself has failed."""


@dataclass(slots=True)
class _Asked:
    """State of the questions about one server."""

    is_busy: bool = False
    held: int = 0
    draining: bool = False
    since_s: float = 0.0
    """Time since which the oldest sample is held."""


class Audits:
    """Asks an auditor about the held samples of servers, one question per server at a time."""

    def __init__(self, auditor: Auditor | None, post: Callable[[AuditDone], None]) -> None:
        """Begin.

        Args:
            auditor: None: everything is released at once.
            post: Takes results, from another thread; `done` then belongs to the caller's thread.
        """
        self._auditor, self._post = auditor, post
        self._asked: dict[Hashable, _Asked] = {}
        self._jobs: queue.SimpleQueue[Callable[[Auditor], None] | None] = queue.SimpleQueue()
        if auditor is not None:
            threading.Thread(target=self._work, args=(auditor,), name="audit", daemon=True).start()

    def publish(self, version: int, read: WeightReader) -> None:
        """Tell the auditor of a new policy version."""
        if self._auditor is not None:
            self._jobs.put(lambda auditor: auditor.publish(version, read))

    def accuse(self, server: str) -> None:
        """Tell the auditor that a server was found to lie elsewhere."""
        if self._auditor is not None:
            self._jobs.put(lambda auditor: auditor.accuse(server))

    def consider(self, name: Hashable, session: Session, now_s: float) -> None:
        """Release what is held, or ask the auditor if there is a new question. name: of the session."""
        if self._auditor is None:
            session.release(session.held)
            return
        asked = self._asked.setdefault(name, _Asked())
        if not session.held:
            asked.held, asked.since_s = 0, now_s
            return
        draining = session.draining or now_s - asked.since_s > HOLD_S
        if asked.is_busy or (len(session.held), draining) == (asked.held, asked.draining):
            return
        asked.is_busy, asked.held, asked.draining = True, len(session.held), draining
        held, server = tuple(session.held), session.facts.name
        self._jobs.put(lambda auditor: self._post(_audit(auditor, name, server, held, draining)))

    def done(self, name: Hashable, now_s: float) -> None:
        """Note that the result of the last question has been used."""
        asked = self._asked.get(name)
        if asked is not None:
            asked.is_busy, asked.held, asked.since_s = False, 0, now_s

    def forget(self, name: Hashable) -> None:
        """Forget a session that has ended."""
        self._asked.pop(name, None)

    def _work(self, auditor: Auditor) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job(auditor)
            except Exception as error:
                log.exception("the audit has failed")
                self._post(
                    AuditDone(None, (), None, error=f"the audit has failed: {type(error).__name__}: {error}")
                )
                return


def _audit(
    auditor: Auditor, name: Hashable, server: str, held: tuple[Held, ...], draining: bool
) -> AuditDone:
    """Return the first decision about one of the samples; not final if there is none about any of them."""
    unjudged = tuple(each for each in held if not auditor.can_judge(each.rollout))
    held = tuple(each for each in held if each not in unjudged)
    rollouts: list[HeldRollout] = [each.rollout for each in held]
    verdict = None
    while rollouts:
        place = auditor.select(server, rollouts, draining=draining)
        if place is None:
            break
        verdict = auditor.check(rollouts.pop(place))
        if verdict.is_final:
            break
    return AuditDone(name, held, verdict, unjudged)
