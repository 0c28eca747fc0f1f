"""The gRPC services of a hub around its state machine and journal."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.async_sgd.service import messages
    from aedit.async_sgd.service.callers import fingerprint
    from aedit.async_sgd.service.driver import Driver
    from aedit.async_sgd.service.engine import HubWorker
    from aedit.async_sgd.service.hello_responder import HelloResponder, check_part
    from aedit.async_sgd.service.leadership import Leadership
    from aedit.async_sgd.service.lines import Lines, json_line, newest
    from aedit.async_sgd.service.memory import give_back_what_is_freed, keep_one_arena
    from aedit.async_sgd.service.page import Page
    from aedit.async_sgd.service.request_guard import RequestGuard
    from aedit.async_sgd.service.server_directory import DirectorySwitch, ServerDirectory
    from aedit.async_sgd.service.statements import Signer
    from aedit.async_sgd.service.switch import Switch

__all__ = [
    "DirectorySwitch",
    "Driver",
    "HelloResponder",
    "HubWorker",
    "Leadership",
    "Lines",
    "Page",
    "RequestGuard",
    "ServerDirectory",
    "Signer",
    "Switch",
    "check_part",
    "fingerprint",
    "give_back_what_is_freed",
    "json_line",
    "keep_one_arena",
    "messages",
    "newest",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
