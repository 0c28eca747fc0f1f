"""Training of the draft layer: features, packing, losses, gate."""
