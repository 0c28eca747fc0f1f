"""Objects of a person's own that the configuration names by import path."""

from aedit.launch.config.config import RunConfig
from aedit.types import UserError, imported, is_import_path


def check_imports(config: RunConfig, *, node: bool = False) -> None:
    """Raise UserError if something that the configuration names by import path cannot be used here.

    node: check only what a node of a hub needs, its codecs; outer optimizer and merge rule are the hub's.
    """
    codec = ("num_bytes", "encode_slice", "decode")
    named: list[tuple[str, str, tuple[str, ...]]]
    named = [("hub.codec", config.hub.codec, codec), ("hub.codec_down", config.hub.codec_down, codec)]
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
