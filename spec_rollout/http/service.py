"""State that all routes share: the engine's host, the tokenizer, limits, figures."""

import asyncio
import time
from dataclasses import dataclass, field
from itertools import count

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.http.errors import ApiError
from aedit.spec_rollout.http.feeds import Bridge
from aedit.spec_rollout.http.fields import Fields
from aedit.spec_rollout.http.limits import HttpLimits
from aedit.spec_rollout.http.metrics import HttpMetrics
from aedit.spec_rollout.http.running import Running
from aedit.spec_rollout.http.text_codec import TextCodec
from aedit.spec_rollout.server import EngineHost


@dataclass(slots=True, eq=False, kw_only=True)
class Service:
    """One policy, served over HTTP."""

    host: EngineHost
    line: str
    """Line of the host whose policy is served."""
    codec: TextCodec
    model: str
    """Name of the model for clients."""
    eos: tuple[int, ...]
    """Tokens that end an answer."""
    limits: HttpLimits = field(default_factory=HttpLimits)
    metrics: HttpMetrics = field(default_factory=HttpMetrics)
    created_s: int = field(default_factory=lambda: int(time.time()))
    num_buffered_bytes: int = 0
    """Bytes of bodies that are being read and parsed."""
    running: Running = field(default_factory=Running)
    _groups: "count[int]" = field(default_factory=lambda: count(1 << 62))
    _bridge: Bridge | None = None

    @property
    def engine(self) -> Engine:
        """Return the engine, for its constants."""
        return self.host.engine(self.line)

    @property
    def max_tokens(self) -> int:
        """Return the upper limit of prompt and answer in tokens."""
        return self.engine.target.max_tokens

    def bridge(self) -> Bridge:
        """Return the bridge of the running event loop."""
        if self._bridge is None:
            self._bridge = Bridge(asyncio.get_running_loop())
        return self._bridge

    def next_group(self) -> int:
        """Return a number for samples with one prompt."""
        return next(self._groups)

    def check_model(self, fields: Fields) -> None:
        """Check the name of the model in a request, which may be absent.

        Raises:
            ApiError: There is no such model.
        """
        name = fields.text("model", self.model)
        if name != self.model:
            message = f"there is no model {name[:128]!r} here: use {self.model!r}, or see /v1/models"
            raise ApiError(404, message, param="model", code="model_not_found")
