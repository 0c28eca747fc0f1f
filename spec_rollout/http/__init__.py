"""HTTP server of one policy: routes of OpenAI's interface, of token-in token-out clients, and for control.

`aedit serve` calls it; begin with `make_app` in `app.py` and follow one request.

- `app.py`: the public application, its errors, authentication and figures; the tokenizer's routes.
- `completions.py`, `chat.py`, `token_generate.py`: the routes that generate; `control.py`: pause and weights.
- `fields.py`: requests as pydantic models; `service.py`: shared state, bodies, and feeds from the engine.
- `generation.py`: a request from submission to its answer.
- `answers.py`: growing text and log-probabilities; `text_codec.py`: the tokenizer.
- `server.py`: the server's thread, its limits and connections; `errors.py`: errors in OpenAI's form.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.http.app import make_app
    from aedit.spec_rollout.http.control import control_routes
    from aedit.spec_rollout.http.server import HttpLimits, HttpServer
    from aedit.spec_rollout.http.service import HttpService
    from aedit.spec_rollout.http.text_codec import TextCodec

__all__ = [
    "HttpLimits",
    "HttpServer",
    "HttpService",
    "TextCodec",
    "control_routes",
    "make_app",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
