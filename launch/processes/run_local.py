"""`aedit run`: start this machine's nodes under torchrun, show their progress, and report the outcome."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import psutil

from aedit import traces
from aedit.child import Child
from aedit.launch.config import (
    PEER_EXCHANGES,
    JoinOptions,
    Placement,
    RunConfig,
    check_memory,
    least_parameters,
    ranks_per_node,
    trains_on_cpu,
    warnings,
)
from aedit.launch.data import check_data, check_rewards, check_source
from aedit.launch.processes.cluster import NODE_PROGRAM, Cluster, torchrun_command
from aedit.launch.records import (
    claimed,
    error_of,
    failure_in,
    has_trained,
    indices_of,
    next_attempt,
    prepare,
    refusal_in,
)

Watch = Callable[[Path, int, Callable[[], bool]], None]

LEAVE_LIMIT_S = 120.0
"""Longest time of the nodes to finish the step, land and save after Ctrl-C or SIGTERM."""

AGAIN_S = 3.0
"""Pause before torchrun that has not ended, with new workers or with none, is ended again."""

REFUSED_LIMIT_S = 10.0
"""Longest time of the other nodes to leave after one has reported a UserError."""

POLL_S = 0.2


def run(
    config: RunConfig,
    placement: Placement,
    program: tuple[str, ...] = NODE_PROGRAM,
    watch: Watch | None = None,
    membership: JoinOptions | None = None,
) -> int:
    """Train until the end, a failure or a signal; return the exit code.

    Raises UserError or RunFailed as soon as a node reports one, and RunFailed if a process that the nodes
    need has failed more often than `restarts`.

    0: done. 1: a node failed more often than `restarts`. 130, 143: stopped by Ctrl-C or SIGTERM.
    """
    for warning in warnings(config, placement):
        _say(f"warning: {warning}")
    ranks = ranks_per_node(config, placement)
    run_dir = Path(config.dir) / config.name
    with contextlib.nullcontext() if membership else claimed(run_dir, placement.node):
        run_toml = prepare(config, membership.name if membership else "")
        attempt = next_attempt(run_dir)
        watcher = Watcher()
        with (
            watcher.listening(),
            _start(config, placement, attempt, program, membership, run_toml) as child,
        ):
            watcher.child = child
            _watch(watch, run_dir, 0 if membership else placement.nodes, watcher.supervise)
            output = child.output()
            code = child.exit_code()
            failed = child.failed() if isinstance(child, Cluster) and membership is None else None
    nodes = tuple(range(placement.nodes)) if placement.local else (placement.node,)
    if membership is not None:
        nodes = indices_of(run_dir, membership.name)
    nodes = nodes if failed is None else (failed,)
    if watcher.signals:
        name = "at once" if len(watcher.signals) > 1 else "as asked"
        late = f"; the nodes did not save within {LEAVE_LIMIT_S:.0f} s" if watcher.overdue else ""
        _say(f"stopped {name}{late}; the same command continues from the newest checkpoint")
        return 128 + watcher.signals[0]
    if code == 0:
        if placement.node == 0:
            from aedit.launch.hub import accounts_line
            from aedit.launch.views import report

            print(report(run_dir, [("samples", accounts_line(run_dir))]))
        if not has_trained(run_dir, nodes):
            _say("the run was already complete; raise train.steps or train.seconds, or choose another --name")
        return 0
    if message := refusal_in(output):
        raise error_of(message)
    _say(failure_in(run_dir, nodes, ranks, attempt, output))
    return 1


def _start(
    config: RunConfig,
    placement: Placement,
    attempt: int,
    program: tuple[str, ...],
    membership: JoinOptions | None,
    run_toml: Path,
) -> Child | Cluster:
    run_dir = run_toml.parent
    if config.swarm.on or (config.hub.address and membership is None):
        cluster = Cluster(config, placement, run_toml, attempt, program, membership)
        here = f"hub at {cluster.address}"
        how = f"in another terminal: aedit join {cluster.address}"
        if config.swarm.on:
            here = "swarm"
            how = PEER_EXCHANGES[config.swarm.exchange].how_to_join(config, placement, cluster.address)
        _say(f"{here}; to add a node, {how}")
        return cluster
    command = torchrun_command(run_toml, config, placement, attempt, program, membership)
    log = f"launch_{membership.name}.log" if membership else "launch.log"
    return Child(command, run_dir / log)


class Watcher:
    """Supervisor of torchrun while a view shows progress; passes signals on to the nodes."""

    def __init__(self) -> None:
        self.child: Child | Cluster | None = None
        """The processes of the run; None before the start is complete, which a signal then ends."""
        self._signalled: set[int] = set()
        self._ended_at: float | None = None
        self._deadline = float("inf")
        self._refused = False
        self.signals: list[int] = []
        self.overdue = False

    def supervise(self) -> bool:
        """Restart, end and signal processes as far as it is time for that; return whether the nodes run.

        The view calls this several times a second.
        """
        assert self.child is not None
        self.child.look()
        if not self.child.running():
            return False
        if self.signals:
            self._end_new_workers(self.child)
        elif not self._refused and refusal_in(self.child.output()):
            self._refused = True
            self._deadline = time.monotonic() + REFUSED_LIMIT_S
            self.child.terminate()
        if time.monotonic() > self._deadline:
            self.overdue = True
            self.child.kill()
        return True

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals until the block ends."""
        names = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup
            names.append(signal.SIGHUP)
        before = {name: signal.signal(name, self._caught) for name in names}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        self._deadline = time.monotonic() + LEAVE_LIMIT_S
        if self.child is None:  # noted above, as an exception is lost where Python ignores exceptions
            _say("stopped before the run has begun")
            raise SystemExit(128 + number)
        if len(self.signals) > 1:
            _say("stopping at once")
            self.child.kill()
            return
        _say("finishing the step, landing, saving; Ctrl-C again stops at once")
        # Signal the workers directly: torchrun would give them only 30 s before it kills them.
        # A signal between fork and exec of a worker would be lost.
        for worker in filter(_is_itself, self.child.workers()):
            self._signalled.add(worker.pid)
            with contextlib.suppress(OSError):
                os.kill(worker.pid, signal.SIGTERM)

    def _end_new_workers(self, child: Child | Cluster) -> None:
        """End workers that started after the signal.

        A worker without a handler dies of the signal, and torchrun then starts another.
        """
        newcomers = any(worker.pid not in self._signalled for worker in child.workers())
        now = time.monotonic()
        # A signal that reaches torchrun while it starts can be lost. Newcomers have nothing to save.
        is_due = self._ended_at is None or now > self._ended_at + AGAIN_S
        if is_due and (newcomers or not self._signalled):
            self._ended_at = now
            child.terminate()


def _is_itself(worker: psutil.Process) -> bool:
    """Return whether the worker runs its own program, no longer that of the process that forked it."""
    with contextlib.suppress(psutil.Error):
        parent = worker.parent()
        return parent is None or parent.cmdline() != worker.cmdline()
    return False


def _watch(watch: Watch | None, run_dir: Path, nodes: int, alive: Callable[[], bool]) -> None:
    try:
        from aedit.launch import views  # here: it takes long

        (watch or views.watch)(run_dir, nodes, alive)
    except Exception as error:
        _say(f"the live view failed ({error!r}); the run continues, see {run_dir}")
    while alive():
        time.sleep(POLL_S)


def _say(text: str) -> None:
    # No print, which a signal handler may interrupt. A closed terminal must not stop the run.
    with contextlib.suppress(OSError):
        os.write(2, f"aedit: {text}\n".encode())


def preflight(config: RunConfig, placement: Placement) -> None:
    """Raise UserError if data are missing or too short, or the model cannot fit into this machine's memory.

    Of a run with rewards, files of problems must exist, and each reward function must work in a first call.
    Errors that these checks cannot detect are reported when the nodes start.
    """
    traces.check_package(config.traces.endpoint)
    if config.prompts.source:
        check_source(config.prompts.source)
        check_rewards(config)
    else:
        check_data(config.data)
    num_params = least_parameters(config)
    if num_params is not None and trains_on_cpu(config):
        check_memory(config, num_params, nodes=nodes_here(placement))


def nodes_here(placement: Placement) -> int:
    """Return the number of nodes that run on this machine."""
    return placement.nodes if placement.local else 1
