"""Secret by which a hub knows that a node that joins again is the same one."""

import os
import secrets
from pathlib import Path

from aedit.types import UserError

_BYTES = 16


def rejoin_secret(path: Path | None) -> str:
    """Return the secret that `path` keeps, made at the first call; a new one for each call with None.

    In hexadecimal digits. Only the owner can read the file. Raises UserError if it cannot be written or read.
    """
    new = secrets.token_hex(_BYTES)
    if path is None:
        return new
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            beside = path.with_name(f"{path.name}.new")
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(new)
            os.replace(beside, path)
        kept = path.read_text(encoding="utf-8").strip()
        if len(bytes.fromhex(kept)) != _BYTES:
            raise ValueError(f"{len(kept)} characters")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; choose another --dir") from None
    except ValueError as error:
        raise UserError(f"{path} holds no secret of a node ({error}): remove it") from None
    return kept
