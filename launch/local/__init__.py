"""Processes on this machine: `aedit run`, `aedit join`, local clusters and the dry run."""
