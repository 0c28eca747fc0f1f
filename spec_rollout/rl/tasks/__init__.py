"""Generators of problems that need no download."""
