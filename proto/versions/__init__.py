"""Policy versions: manifests, patches, the memory of several versions, and the service `Versions`. No torch.

A line is a sequence of versions with one author. The author publishes:

    layout = VersionLayout(Layout((UnitLayout("rest", (TensorLayout("w", (2, 3)),)),)), "bf16")
    store = VersionStore(layout, ring=8)
    store.publish("run", serial=1, units={"rest": patterns(fp32_values, "bf16")})

and either serves the store (followers of the line ask with `newest`, which waits, and `fetch`)

    core = VersionsCore(store, may_author=lambda line, caller: False)
    server = Server([versions_service(core)], "127.0.0.1:0")

    client = VersionsClient(server.address)
    manifest = client.newest("run", after=have, wait_s=20.0)
    receiving = Receiving(their_store, manifest)    # their_store.open("run") was called
    client.fetch(receiving)                         # or another client: it goes on where this one ended
    receiving.finish()                              # from now on it is in their_store, which may serve it

or gives its versions to a server, whose `may_author` admits it and whose `arrived` is then called:

    client.give(store, "my-line", 1, secret)       # the secret of proto/rpc/identity.py

The values of a version, as bit patterns by unit:

    with their_store.hold("run", 1) as units:
        units["rest"]                               # numpy, uint16 for bf16
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
