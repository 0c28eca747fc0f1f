"""Restore a node of a hub that reconnects, from its last checkpoint and the hub's newest anchors."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from aedit.edit import LayerSync, snapshot
from aedit.launch.node.checkpoint import NodeCheckpoints
from aedit.launch.node.resume import Resumed, check_facts, resumed_alone, training_state
from aedit.system import write_atomically

NAME = "name"


def known_directory(run_dir: Path, name: str) -> Path | None:
    """Return the directory of the node with this name on this machine, None if it has none."""
    found = [path.parent for path in run_dir.glob(f"nodes/*/{NAME}") if path.read_text() == name]
    return found[0] if found else None


def remember(directory: Path, name: str) -> None:
    """Write the node's name into its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / NAME, name)


def rejoin(sync: LayerSync, checkpoints: NodeCheckpoints, facts: dict[str, Any]) -> Resumed | None:
    """Restore inner optimizer, error feedback and counters from the newest checkpoint.

    Return None without one.

    The hub then provides the parameters. All ranks of the node together, before they join. Raises UserError
    if the checkpoint has other properties (`facts`) or cannot be read.
    """
    marks = checkpoints.marks()
    if not marks:
        return None
    mark = marks[-1]
    meta = checkpoints.meta(mark)
    check_facts(meta["facts"], facts, checkpoints.path(mark))
    snapshot.blank(sync, meta["sync"])
    state = training_state(sync)
    state["sync"] = {name: tensor.clone() for name, tensor in state["sync"].items()}
    checkpoints.load(mark, state)
    set_optimizer_state_dict(sync.model, sync.optimizers.outermost, state["inner"])
    torch.set_rng_state(state["rng"])
    snapshot.restore(sync, state["sync"], meta["sync"])
    return resumed_alone(mark, meta, order=None)
