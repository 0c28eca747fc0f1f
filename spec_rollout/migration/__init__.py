"""Migration of samples between engines."""
