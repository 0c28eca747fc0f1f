"""One node of a run: composition, training loop, checkpoints."""
