"""Peers of a run without a central hub: who is there, and which of them host what."""
