"""Coupled sampling: counter-based noise, distributions, verification, stop rules."""
