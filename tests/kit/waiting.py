"""Waiting for another thread or process, with a deadline and a name."""

import time

LIMIT_S = 60.0
LONGEST_LOOK_S = 0.02


def until(ask, what, limit_s=LIMIT_S, look_s=0.005):
    """Ask until the answer is true, and return it. Fails with `what` after `limit_s`.

    A question may be a call of another process: it is asked less often the longer the wait lasts, unless
    `look_s` is 0.
    """
    began = time.monotonic()
    while not (found := ask()):
        waited_s = time.monotonic() - began
        assert waited_s < limit_s, f"waited {limit_s:g} s for {what}"
        time.sleep(look_s and max(look_s, min(waited_s / 20, LONGEST_LOOK_S)))
    return found
