"""Files of a run's drafter: in the run, and in the folder `drafter` of an exported model."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel

from aedit.launch.cli.places import first_line
from aedit.spec_rollout.drafters import DraftLayer
from aedit.types import UserError

IN_RUN = "nodes/*/drafter.safetensors"
"""Written by each node next to its checkpoints."""
FOLDER, CONFIG, WEIGHTS = "drafter", "config.json", "model.safetensors"


def drafter_of_run(run_dir: Path) -> Path | None:
    """Return the newest file of a drafter in a run directory, or None."""
    found = list(run_dir.glob(IN_RUN))
    return max(found, key=lambda path: path.stat().st_mtime) if found else None


def drafter_beside(policy_dir: Path) -> Path | None:
    """Return the drafter that belongs to the policy of a run or model directory, or None."""
    folder = policy_dir / FOLDER
    return folder if folder.is_dir() else drafter_of_run(policy_dir)


def load_drafter(path: Path, model: PreTrainedModel) -> DraftLayer:
    """Return the draft layer of a file, or of a folder that `write_drafter` wrote.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged, or the drafter was trained for a policy of other sizes.
    """
    if not path.is_dir():
        return DraftLayer.load(path, model)
    layer = DraftLayer.load(path / WEIGHTS, model)
    try:
        sizes = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path / CONFIG}: not a JSON file: {first_line(error)}") from error
    if sizes != json.loads(json.dumps(asdict(layer.shape))):
        raise ValueError(f"{path / CONFIG}: its sizes are not those of {WEIGHTS}")
    return layer


def write_drafter(layer: DraftLayer, folder: Path) -> None:
    """Write configuration and weights into a new folder. Raises OSError."""
    folder.mkdir()
    layer.save(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(asdict(layer.shape), indent=2) + "\n", encoding="utf-8")


def read_for(source: str, path: Path, model: PreTrainedModel) -> DraftLayer:
    """Return the drafter that belongs to a policy, and say so on stderr.

    Raises:
        UserError: It cannot be used.
    """
    try:
        layer = load_drafter(path, model)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{source}: its drafter cannot be used ({first_line(error)}); remove {path}, or give "
            "--drafter none"
        ) from None
    print(f"aedit: {source}: drafts with {path}", file=sys.stderr)
    return layer
