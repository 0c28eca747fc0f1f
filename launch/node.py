"""One process of a node: `torchrun --nproc-per-node 8 -m aedit.launch.node run.toml`."""

import argparse
import os
import sys
import traceback
from pathlib import Path

from aedit.launch.config import RunConfig
from aedit.launch.load import load
from aedit.types import UserError


def main() -> int:
    """Join the run that the configuration describes, train, leave. Exit code 2: a person must act."""
    options = _options()
    try:
        _join_and_train(load(options.config, []).config, options)
    except UserError as error:
        print(f"aedit: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _join_and_train(config: RunConfig, options: argparse.Namespace) -> None:
    # Only now: a bad configuration is refused before seconds go into importing torch.
    from aedit.launch.build import build
    from aedit.launch.train import train
    from aedit.launch.world import join_world, leave_world

    ranks = options.ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    attempt = options.attempt + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    run_dir = Path(config.dir) / config.name
    world = join_world(config.device, ranks, config.edit.timeout_s)
    try:
        _log_to(run_dir / "nodes" / str(world.node), attempt)
        with build(config, world, run_dir, attempt, _slowdown(config, world.node, options)) as node:
            train(node)
    finally:
        leave_world()


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
    return parser.parse_args()


def _slowdown(config: RunConfig, node: int, options: argparse.Namespace) -> float:
    known = options.local and node < len(config.local.slowdown)
    return config.local.slowdown[node] if known else 1.0


def _log_to(directory: Path, attempt: int) -> None:
    """From here on stdout and stderr, also of libraries, go to the node's log."""
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


if __name__ == "__main__":
    sys.exit(main())
