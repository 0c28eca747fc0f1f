"""Ed25519 keys of rollout servers and peers: a file for the private one, and signatures."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

KEY_BYTES = 32
"""Length of a private key and of a public key."""
SIGNATURE_BYTES = 64


class SigningKey:
    """Ed25519 key of a server or peer."""

    def __init__(self, private: bytes | None = None) -> None:
        """Use the 32 private bytes; None draws a new key.

        Raises:
            ValueError: There are more or fewer bytes.
        """
        if private is None:
            self._key = Ed25519PrivateKey.generate()
            return
        if len(private) != KEY_BYTES:
            raise ValueError(f"a private key has {KEY_BYTES} bytes, got {len(private)}")
        self._key = Ed25519PrivateKey.from_private_bytes(private)

    @classmethod
    def kept(cls, path: Path) -> "SigningKey":
        """Return the key in a file; make the file, readable by its owner only, if there is none.

        Raises:
            ValueError: The file does not contain a key.
            OSError: It cannot be read or written.
        """
        if not path.exists():
            _create(path, cls()._key.private_bytes_raw())
        try:
            return cls(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}; delete it for a new key") from None

    @property
    def public(self) -> bytes:
        """Return the 32 public bytes."""
        return self._key.public_key().public_bytes_raw()

    @property
    def private(self) -> Ed25519PrivateKey:
        """Return the key itself."""
        return self._key


def is_signed_by(public_key: bytes, signature: bytes, signed: bytes) -> bool:
    """Return whether the owner of `public_key` has signed exactly these bytes."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, signed)
    except (InvalidSignature, ValueError):  # ValueError: not the length of a key
        return False
    return True


def _create(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, whole; keep the file of another process that was faster."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(file.name, path)
