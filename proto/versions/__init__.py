"""Policy versions: the weights of a policy as a sequence with one author, called a line. No torch.

- `store`: the last versions of several lines; begin here. `manifest`: the hashes of a version's units
- `patch`: bit patterns of a unit, and transfers that make them from those of another version
- `client`, `service`: a reader asks with `newest`, which waits, and `fetch`; an author `give`s to a server
- `receiving`: a version that arrives, from one sender after another: `store.open(line)`, then
  `Receiving(store, manifest)`, `client.fetch(receiving)` and `receiving.finish()`

`store.hold(line, serial)` gives the values, NumPy arrays of bit patterns by unit. Called by `spec_rollout`
and `launch`.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.proto.versions.client import VersionsClient
    from aedit.proto.versions.manifest import Manifest, VersionLayout
    from aedit.proto.versions.patch import PATTERNS, Patterns, patterns
    from aedit.proto.versions.receiving import Receiving
    from aedit.proto.versions.service import VersionsCore, versions_service
    from aedit.proto.versions.store import LineUnknown, VersionStore

__all__ = [
    "PATTERNS",
    "LineUnknown",
    "Manifest",
    "Patterns",
    "Receiving",
    "VersionLayout",
    "VersionStore",
    "VersionsClient",
    "VersionsCore",
    "patterns",
    "versions_service",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
