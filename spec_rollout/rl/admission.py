"""Admission of new rollouts: the pace at which generation may run ahead of training."""


def capacity(
    *, max_running: int, running: int, accepted: int, version: int, staleness: int, batch: int
) -> int:
    """Return the number of samples that may start now, 0 or more.

    min(max_running - running, (eta + v + 1) B - (accepted + running)), AReaL, arXiv:2505.24298, section 5.1.
    If batches are made in the order in which samples start, each sample is trained at most eta versions after
    it started, and none is dropped for its age: at most (eta + v + 1) B samples start up to version v, so
    each of them is in one of the batches up to number eta + v. In the order of finishing there is no such
    bound: a long sample can be overtaken any number of times.

    Args:
        max_running: Samples that can run at a time.
        running: Samples that have started and have not finished.
        accepted: Samples that have finished since the start of the run, trained ones included.
        version: Policy versions so far (v): batches that have been trained.
        staleness: Versions by which a sample may be older than the weights that it trains (eta).
        batch: Samples of a batch (B).
    """
    return max(0, min(max_running - running, (staleness + version + 1) * batch - (accepted + running)))
