"""The file by which a peer lets a replica in a hub's folder rest before it gives it up."""

from pathlib import Path


def resting_file(folder: Path) -> Path:
    """Return the file that makes the replica in this folder rest while it is there."""
    return folder / "resting"
