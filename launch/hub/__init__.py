"""The hub process: `aedit hub`, its folder, standby and uplink. Imports no torch."""

import aedit.proto as proto  # first: it has a word to say before gRPC is loaded

__all__ = ["proto"]
