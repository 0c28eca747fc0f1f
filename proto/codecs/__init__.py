"""Encodings of a unit's numbers: fp32, bf16, int8, 4 bits and top-k. NumPy only."""
