"""HTTP: routes of OpenAI's interface, of token-in token-out clients, and for control."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.http.app import make_app
    from aedit.spec_rollout.http.control import control_routes
    from aedit.spec_rollout.http.server import HttpServer
    from aedit.spec_rollout.http.service import Service
    from aedit.spec_rollout.http.text_codec import TextCodec

__all__ = [
    "HttpServer",
    "Service",
    "TextCodec",
    "control_routes",
    "make_app",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
