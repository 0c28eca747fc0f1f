"""The hub process: `aedit hub`, its folder, standby and uplink. Imports no torch."""

import aedit.proto as proto  # first: it sets environment variables of gRPC before gRPC is loaded

__all__ = ["proto"]
