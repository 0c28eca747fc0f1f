"""The hub process: journal, snapshots, standby, and gRPC around `aedit.async_sgd.hub`. Imports no torch."""

import aedit.proto as proto  # first: it has a word to say before gRPC is loaded

__all__ = ["proto"]
