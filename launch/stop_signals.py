"""The signals that ask a process to end."""

import signal
import threading
from types import FrameType


class StopSignals:
    """Catches the first SIGINT or SIGTERM, which asks for the end; the second one ends the process."""

    def __init__(self) -> None:
        """Catch them, in the main thread; in another one `asked` is set by others only."""
        self.asked = threading.Event()
        self.by_hand = False
        """True after SIGINT (Ctrl-C), which often reaches the nodes too; a supervisor sends SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._caught)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.by_hand = number == signal.SIGINT
        self.asked.set()
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, signal.SIG_DFL)
