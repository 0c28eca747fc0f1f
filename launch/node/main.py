"""Main function of one process of a node: `torchrun --nproc-per-node 8 -m aedit.launch.node run.toml`."""

import argparse
import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from aedit.launch.config import JoinOptions, RunConfig, load
from aedit.launch.records import FAILED
from aedit.system import no_collections
from aedit.types import RunFailed, UserError

if TYPE_CHECKING:
    from aedit.launch.node.train import TrainingNode
    from aedit.launch.node.world import World


def main() -> int:
    """Train as a process of the run that the configuration describes.

    Return the exit code: 2 for a UserError, 1 for any other error.
    """
    options = _options()
    with contextlib.ExitStack() as at_end:
        launcher = os.dup(2)  # later the log takes its place
        at_end.callback(os.close, launcher)
        try:
            _join_and_train(load(options.config, []).config, options, at_end)
        except UserError as error:
            _refuse(str(error), launcher)
            return 2
        except RunFailed as error:
            _refuse(FAILED + str(error), launcher)
            return 1
        except Exception:
            traceback.print_exc()
            return 1
    return 0


def _refuse(message: str, launcher: int) -> None:
    """Write the message of an error to the launcher and to the log.

    The launcher ends the run with this line. It is written before this process leaves the world: the other
    nodes fail when it leaves, and their failure must not be reported instead.
    """
    line = f"aedit: {message}\n".encode()
    sys.stderr.flush()
    # One write each, as print could mix lines of several processes.
    os.write(launcher, line)
    if not os.path.sameopenfile(launcher, 2):
        os.write(2, line)


def _join_and_train(config: RunConfig, options: argparse.Namespace, at_end: contextlib.ExitStack) -> None:
    # Imported here: an invalid configuration is reported before the slow import of torch.
    with no_collections():
        from aedit.launch.node.build import build
        from aedit.launch.node.world import join_world, leave_world

    ranks = options.ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    attempt = options.attempt + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    run_dir = Path(config.dir) / config.name
    world = join_world(config.device, ranks, config.edit.timeout_s)
    at_end.callback(leave_world)
    if options.hub or config.swarm.on:
        _train_as_member(config, world, run_dir, attempt, options)
        return
    _log_to(run_dir / "nodes" / str(world.node), attempt)
    with build(config, world, run_dir, attempt, _slowdown(config, world.node, options)) as node:
        _train(node)


def _train_as_member(
    config: RunConfig, world: "World", run_dir: Path, attempt: int, options: argparse.Namespace
) -> None:
    """Train as a node of a world of its own, whose index the hub assigns, or as one that averages."""
    from aedit.launch.node.build_averaging import build_averaging
    from aedit.launch.node.build_hub import NodeStartOptions, build_with_hub

    node_options = NodeStartOptions(
        membership=JoinOptions(
            hub=options.hub,
            standby=options.standby,
            replicas=options.replicas,
            name=options.name,
            keys=options.keys,
            insecure=options.insecure,
            prefers=options.prefers,
        ),
        run_dir=run_dir,
        attempt=attempt,
        log_to=_log_to,
        slowdown=_slowdown(config, options.prefers or 0, options),
    )
    built = {"parts": build_with_hub, "hivemind": build_averaging}
    with built[config.swarm.exchange](config, world, node_options) as node:
        _train(node)


def _train(node: "TrainingNode") -> None:
    """Train on what the node's objective is about: text, or rewards of rollouts."""
    from aedit.launch.node.rl_objective import PolicyObjective, train_policy
    from aedit.launch.node.train import train

    if isinstance(node.objective, PolicyObjective):
        train_policy(node, node.objective)
    else:
        train(node)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="aedit.launch.node", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument(
        "--ranks", type=int, default=0, help="processes per node; default: all of this machine"
    )
    parser.add_argument(
        "--attempt", type=int, default=1, help="how often this run has been started, for its logs"
    )
    parser.add_argument("--local", action="store_true", help="all nodes are on this machine: honour [local]")
    parser.add_argument("--hub", default="", help="HOST:PORT of the hub; several split the units")
    parser.add_argument("--standby", default="", help="HOST:PORT of the hub that takes over")
    does = "file in which this machine's peer keeps where the parts of a swarm are"
    parser.add_argument("--replicas", type=Path, help=does)
    parser.add_argument("--name", default="", help="of this node, kept over restarts (with --hub)")
    parser.add_argument("--prefers", type=int, help="index it would like to have (with --hub)")
    parser.add_argument("--keys", type=Path, help="what aedit keys made for this node (with --hub)")
    parser.add_argument("--insecure", action="store_true", help="no TLS to another machine (with --hub)")
    return parser.parse_args()


def _slowdown(config: RunConfig, node: int, options: argparse.Namespace) -> float:
    known = options.local and node < len(config.local.slowdown)
    return config.local.slowdown[node] if known else 1.0


def _log_to(directory: Path, attempt: int) -> None:
    """Redirect stdout and stderr, also of libraries, to the node's log."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        log = os.open(directory / f"attempt_{attempt}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise UserError(f"cannot write to the run directory: {error}") from error
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
