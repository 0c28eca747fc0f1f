"""What the trainer's process does over and over: follow the policy, learn, publish, save."""

import time

from aedit.spec_rollout.idle.checkpoint import Checkpoints
from aedit.spec_rollout.idle.publishing import all_finite
from aedit.spec_rollout.idle.trainer_memory import Desk, State, Training, Word

NOTHING_TO_LEARN_S = 0.02
"""Until it looks again."""


class TrainerLoop:
    """The process's only loop. It may be stopped and continued between any two instructions."""

    def __init__(self, desk: Desk, training: Training, let_at_s: float = 0.0) -> None:
        """let_at_s: processor time that the process had used when it was first let run: no window's."""
        self._let_at_s = let_at_s
        self._desk, self._board, self._training = desk, desk.board, training
        self._checkpoints = Checkpoints(desk.plan.checkpoint) if desk.plan.checkpoint else None
        self._saved_at_s = time.process_time()
        self._policy, self._version = 0, 0

    def begin(self) -> None:
        """Take the policy's head, and go on where an earlier process has stopped. Raises RuntimeError if the
        shared memory holds nothing to begin from."""
        self._follow()
        given = self._desk.drafter.last_good()
        if self._policy == 0 or given is None:
            raise RuntimeError("the shared memory holds no whole drafter or no whole policy to begin from")
        self._training.begin(given.tensors)
        self._resume()

    def turn(self) -> bool:
        """One microbatch and what follows from it; whether there was anything to learn."""
        self._follow()
        learned = self._training.microbatch()
        if learned:
            self._count(Word.STEPS)
            self._publish()
            self._save()
        self._tell(learned)
        return learned

    def _resume(self) -> None:
        if self._checkpoints is None:
            return
        try:
            state = self._checkpoints.load()
            if state:
                self._training.resume(state)
        except ValueError as error:
            # What was published is still good.
            self._board.trouble = str(error)

    def _follow(self) -> None:
        policy = self._desk.policy.newest(self._policy)
        if policy is not None:
            self._policy, self._version = policy.number, policy.version
            self._training.follow(policy.tensors, policy.version)

    def _publish(self) -> None:
        better = self._training.to_publish()
        if better is None:
            return
        if all_finite(better):
            self._desk.drafter.publish(better, self._version)
            self._count(Word.PUBLISHED)
        else:
            self._count(Word.REFUSED)

    def _save(self) -> None:
        if self._checkpoints is None:
            return
        now_s = time.process_time()
        is_due = now_s - self._saved_at_s >= self._desk.plan.checkpoint_every_s
        if is_due and self._checkpoints.save(self._training.state()):
            self._saved_at_s = now_s
        self._board.words[Word.CHECKPOINTS] = self._checkpoints.written
        self._board.words[Word.CHECKPOINTS_FAILED] = self._checkpoints.failed
        if self._checkpoints.failed:
            self._board.trouble = self._checkpoints.error

    def _tell(self, learned: bool) -> None:
        if learned:
            self._board.tell(self._training.figures())
        words = self._board.words
        words[Word.STATE] = State.TRAINING if learned else State.NOTHING_TO_LEARN
        words[Word.CPU_US] = round(1e6 * (time.process_time() - self._let_at_s))
        self._count(Word.BEATS)

    def _count(self, word: Word) -> None:
        self._board.words[word] += 1
