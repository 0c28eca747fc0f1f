"""One process of a node: `torchrun --nproc-per-node 8 -m aedit.launch.node run.toml`.

A second argument is `NodeOptions` as JSON.
"""

import argparse
import contextlib
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path

from aedit import traces
from aedit.child import from_json
from aedit.launch.config import JoinOptions, NodeOptions, RunConfig, load
from aedit.launch.records import FAILED
from aedit.system import drop_output_without_room, no_collections, show_stacks_on_signal
from aedit.types import RunFailed, UserError


def main() -> int:
    """Train as a process of the run that the configuration describes.

    Return the exit code: 2 for a UserError, 1 for any other error.
    """
    parser = argparse.ArgumentParser(prog="aedit.launch.node", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("options", nargs="?", default="{}", help="NodeOptions as JSON")
    arguments = parser.parse_args()
    options = from_json(NodeOptions, arguments.options)
    show_stacks_on_signal()
    with contextlib.ExitStack() as at_end:
        launcher = os.dup(2)  # later the log takes its place
        at_end.callback(os.close, launcher)
        try:
            _join_and_train(load(arguments.config, []).config, options, at_end)
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


def _join_and_train(config: RunConfig, options: NodeOptions, at_end: contextlib.ExitStack) -> None:
    # Imported here: an invalid configuration is reported before the slow import of torch.
    with no_collections():
        from aedit.launch.node.build import build
        from aedit.launch.node.rl_objective import PolicyObjective, train_policy
        from aedit.launch.node.train import train
        from aedit.launch.node.world import join_world, leave_world

    ranks = options.ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    attempt = options.attempt + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    member = options.membership or (JoinOptions(hub="", name="") if config.swarm.on else None)
    options = replace(options, attempt=attempt, membership=member)
    world = join_world(config.device, ranks, config.edit.timeout_s)
    at_end.callback(leave_world)
    wanted = config.traces
    traces.begin(wanted.endpoint, "node", ratio=wanted.ratio, run=config.name, rank=world.rank)
    at_end.callback(traces.end_traces)
    if member is None:  # others log once they know their index
        _log_to(Path(config.dir) / config.name / "nodes" / str(world.node), attempt)
    with build(config, world, options, _log_to) as node:
        if isinstance(node.objective, PolicyObjective):
            train_policy(node, node.objective)
        else:
            train(node)


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
    drop_output_without_room()


if __name__ == "__main__":
    sys.exit(main())
