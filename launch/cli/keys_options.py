"""Options of `aedit keys`."""

import argparse
from pathlib import Path


def add_keys_options(keys: argparse.ArgumentParser) -> None:
    """Add the options to the command."""
    keys.add_argument("out", metavar="DIR", type=Path, help="folder for them")

    def several(flag: str, metavar: str, does: str) -> None:
        keys.add_argument(
            f"--{flag}", metavar=metavar, action="append", default=[], help=f"{does}; repeatable"
        )

    several("host", "NAME", "host name or IP of the hub; not for a swarm")
    several("node", "NAME", "name of a node")
    several("server", "NAME=HOST[,HOST]", "rollout server, and hosts at which trainers reach it")
    several("standby", "NAME=HOST[,HOST]", "standby, and hosts at which nodes reach it")
    several("peer", "NAME=HOST[,HOST]", "peer of a swarm, and hosts at which other peers reach it")
    several("reader", "NAME", "who may look at the run and copy its model, and nothing else")
    several("revoke", "NAME", "end the keys in DIR/NAME, at a running hub too; without other options")
