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
    """Join the run that the configuration describes, train, leave. Exit codes: 0 done, 2 a person must
    act."""
    options = _options()
    config = load(options.config, []).config
    from aedit.launch.build import build
    from aedit.launch.train import train
    from aedit.launch.world import join_world, leave_world

    ranks = options.ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    run_dir = Path(config.dir) / config.name
    try:
        world = join_world(config.device, ranks, config.edit.timeout_s)
        directory = run_dir / "nodes" / str(world.node)
        _log_to(directory, _attempt(options.attempt))
        with build(
            config, world, run_dir, _attempt(options.attempt), _slowdown(config, world.node, options)
        ) as node:
            train(node)
    except UserError as error:
        return _tell(run_dir, error)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        leave_world()
    return 0


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


def _attempt(first: int) -> int:
    return first + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


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


def _tell(run_dir: Path, error: UserError) -> int:
    print(f"aedit: {error}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
