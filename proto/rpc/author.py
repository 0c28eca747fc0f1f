"""Authors of lines of policy versions: the caller that opened a line, known by a secret in the metadata.

A rank draws a secret for each pair of line and server, and sends it with `Generate`, `Offer` and `Put`. The
server binds the line to the first one. Another server that knows the name of the line cannot write into it
here, as it was given another secret.
"""

import hmac
import secrets

from aedit.proto.rpc.call_context import CallContext

AUTHOR = "aedit-author"
"""Name in the metadata of a call."""
SECRET_CHARS = 64


def new_secret() -> str:
    """Return a new secret for one line at one server."""
    return secrets.token_hex(SECRET_CHARS // 2)


def author_metadata(secret: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call by the author of a line."""
    return ((AUTHOR, secret),)


def secret_of(context: CallContext) -> str:
    """Return the caller's secret; empty if there is none, or more than one."""
    found = [value for key, value in context.invocation_metadata() or () if key == AUTHOR]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else ""


def is_author(known: str, given: str) -> bool:
    """Return whether the caller has the secret to which a line is bound."""
    # Time must not tell how many characters were right.
    return len(known) == SECRET_CHARS and hmac.compare_digest(known.encode(), given.encode())
