"""A-EDiT: asynchronous, decentralised training. Import submodules; this package holds no code."""

__version__ = "0.1.0"
