"""Waiting for another thread or process, with a deadline and a name."""

import time

LIMIT_S = 60.0


def until(ask, what, limit_s=LIMIT_S, look_s=0.005):
    """Ask until the answer is true, and return it. Fails with `what` after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not (found := ask()):
        assert time.monotonic() < deadline, f"waited {limit_s:g} s for {what}"
        time.sleep(look_s)
    return found
