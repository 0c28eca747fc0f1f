"""Checks of the sizes that every target takes."""

from collections.abc import Sequence


def check_sizes(rows: int, max_tokens: int, nodes: int) -> None:
    """Check that a target can have these sizes.

    Raises:
        ValueError: One is too small.
    """
    if rows < 1 or max_tokens < 2 or nodes < 0:
        raise ValueError(
            f"rows, max_tokens, nodes must be at least 1, 2, 0, got {rows}, {max_tokens}, {nodes}"
        )


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Check that the tapped layers exist.

    Raises:
        ValueError: One does not.
    """
    if wrong := [tap for tap in taps if not 0 <= tap < num_layers]:
        raise ValueError(f"taps {wrong} do not exist: this model has the layers 0 to {num_layers - 1}")
