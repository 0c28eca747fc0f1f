"""An engine of a worker that refuses the samples of one rollout, whatever its host has checked."""

from aedit.spec_rollout.server import make_engine

REFUSED = 13


def make_refusing(spec):
    engine = make_engine(spec)
    add = engine.add

    def added(prompt):
        if prompt.rollout == REFUSED:
            raise ValueError("this sample is refused")
        return add(prompt)

    engine.add = added
    return engine
