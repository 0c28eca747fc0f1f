"""Check objects that the configuration names by import path."""

from aedit.launch.config.config import RunConfig
from aedit.types import UserError, imported, is_import_path


def check_imports(config: RunConfig, *, node: bool = False) -> None:
    """Raise UserError if an object that the configuration names by import path cannot be used.

    node: check only what a node of a hub needs: codecs and policy loss. Outer optimizer and merge rule run in
    the hub.
    """
    codec = ("num_bytes", "encode_slice", "decode")
    named: list[tuple[str, str, tuple[str, ...]]]
    named = [("hub.codec", config.hub.codec, codec), ("hub.codec_down", config.hub.codec_down, codec)]
    named.append(("rl.loss", config.rl.loss, ()))
    if not node:
        named += [("outer.kind", config.outer.kind, ("init", "update")), ("hub.merge", config.hub.merge, ())]
    for key, value, methods in named:
        if is_import_path(value):
            try:
                imported(value, key, methods)
            except ValueError as error:
                raise UserError(
                    f"{error}; install the module here, or add its folder to PYTHONPATH"
                ) from None
