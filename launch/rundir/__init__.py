"""The run directory: preparation, metrics and event records, and their reader. Imports no torch."""
