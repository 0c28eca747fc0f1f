"""Alerts of a run: states that need attention, as events, at trackers and at a webhook.

`Alerts` of a node look at its loss, mismatch, rewards, accepted pushes and disk; those of a hub at its disk
and the pushes of all nodes. An alert is recorded once when its state begins (`alert`), and once when it ends
(`alert_over`).
"""

import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from shutil import disk_usage
from statistics import median
from typing import Any

from aedit.launch.config import AlertConfig
from aedit.launch.records.records import RLMetric

LEAST_SILENCE_S = 30.0
"""Shortest time without an accepted push that is an alert."""
USUAL_OF = 32
"""Latest intervals between accepted pushes of which the median counts."""
POST_S = 10.0
MOST_POSTS = 64
"""Messages that wait for the webhook; further ones are dropped."""


@dataclass(slots=True)
class NodeWatch:
    """Newest states of a node, from its own lines of metrics or from its reports to a hub."""

    config: AlertConfig
    _has_loss: bool = False
    """Whether the node has had a finite loss."""
    _before: RLMetric | None = None
    _rl: RLMetric | None = None
    """State after the newest rollouts, and before them."""

    def alerts(self, loss: float, rl: RLMetric | None) -> dict[str, str]:
        """Return the alerts of a line by kind, with their texts.

        Args:
            loss: Newest training loss; a value that is not finite is one after a finite loss.
            rl: State of the node's reinforcement learning, if there is one.
        """
        self._has_loss = self._has_loss or isfinite(loss)
        found = {} if isfinite(loss) or not self._has_loss else {"loss": "the training loss is not finite"}
        if rl is None:
            return found
        if self._rl is None or rl.rollouts > self._rl.rollouts:
            self._before, self._rl = self._rl, rl
        if self.config.mismatch_kl and rl.mismatch_kl > self.config.mismatch_kl:
            bound = f"alerts.mismatch_kl = {self.config.mismatch_kl:g}"
            found["mismatch"] = f"mismatch of engine and trainer {rl.mismatch_kl:.2e}, above {bound}"
        new, failed = self._newest("rollouts"), self._newest("excluded")
        if new > 0 and failed >= new:
            found["rewards"] = f"all rewards of the newest {new:,.0f} rollouts have failed"
        return found

    def _newest(self, name: str) -> float:
        before = 0.0 if self._before is None else float(getattr(self._before, name))
        return float(getattr(self._rl, name)) - before


def of_disk(config: AlertConfig, folder: Path) -> dict[str, str]:
    """Return the alert of a disk with less free space than its bound."""
    try:
        free = disk_usage(folder).free
    except OSError:
        return {}
    if not free < config.disk_bytes:
        return {}
    return {"disk": f"{free:,} bytes free, below alerts.disk_bytes = {config.disk_bytes:,}"}


@dataclass(slots=True)
class AcceptedPushes:
    """Times of accepted pushes, from a total that is looked at now and then."""

    config: AlertConfig
    _total: int = -1
    _last_s: float = nan
    _intervals_s: list[float] = field(default_factory=list)

    def alerts(self, total: int, now_s: float, *, expected: bool) -> dict[str, str]:
        """Return the alert that no push was accepted for `alerts.intervals` of the usual intervals.

        Args:
            total: Pushes accepted so far.
            now_s: Time in seconds.
            expected: False while no node is there or the run is over; such a time does not count.
        """
        if total != self._total or not expected:
            if total > self._total >= 0 and isfinite(self._last_s) and expected:
                interval_s = (now_s - self._last_s) / (total - self._total)
                self._intervals_s = [*self._intervals_s[1 - USUAL_OF :], interval_s]
            self._total, self._last_s = total, now_s
            return {}
        if not self.config.intervals or not self._intervals_s:
            return {}
        silent_s, usual_s = now_s - self._last_s, median(self._intervals_s)
        if silent_s < max(LEAST_SILENCE_S, self.config.intervals * usual_s):
            return {}
        return {"pushes": f"no push was accepted for more than {self.config.intervals} usual intervals"}


class Webhook:
    """Sends JSON to a URL in a thread of its own. A failure is reported once and harms nothing."""

    def __init__(self, url: str, failed: Callable[[str], None]) -> None:
        """Send to `url`; empty: nowhere. failed: receives the reason of the first failure in a row."""
        self._url, self._failed = url, failed
        self._waiting: queue.Queue[bytes] = queue.Queue(MOST_POSTS)
        if url:
            threading.Thread(target=self._run, name="webhook", daemon=True).start()

    def send(self, values: Mapping[str, Any]) -> None:
        """Send the values, or drop them if too many wait."""
        if self._url and not self._waiting.full():
            self._waiting.put_nowait(json.dumps(values).encode())

    def _run(self) -> None:
        was_failed = False
        while True:
            body = self._waiting.get()
            try:
                headers = {"content-type": "application/json", "user-agent": "aedit"}
                request = urllib.request.Request(self._url, body, headers, method="POST")
                with urllib.request.urlopen(request, timeout=POST_S):
                    was_failed = False
            except (OSError, ValueError) as error:  # the URL may contain a secret and is not named
                reason = error.code if isinstance(error, urllib.error.HTTPError) else type(error).__name__
                if not was_failed:
                    self._failed(f"alerts.webhook: {reason}")
                was_failed = True


OF_NODE_WITH_HUB = ("disk", "rewards")
"""Alerts that only the node of a hub knows. The hub sends the others to the webhook."""


class HubWatch:
    """Alerts of a hub: no accepted push, its disk, and losses and mismatches that its nodes report."""

    def __init__(self, config: AlertConfig, folder: Path) -> None:
        """Look at a hub whose journal is in `folder`."""
        self._config, self._folder = config, folder
        self._pushes = AcceptedPushes(config)
        self._nodes: dict[int, NodeWatch] = {}

    def alerts(self, now: Mapping[str, Any], now_s: float) -> dict[str, str]:
        """Return the alerts by kind. now: see `hub_status`. now_s: time in seconds."""
        live = [node for node in now["nodes"] if node["live"]]
        self._nodes = {node["node"]: self._nodes.get(node["node"], NodeWatch(self._config)) for node in live}
        accepted = sum(node["accepted"] for node in now["nodes"])
        expected = bool(live) and now["progress"] < 1
        found = self._pushes.alerts(accepted, now_s, expected=expected) | of_disk(self._config, self._folder)
        for node in live:
            loss = nan if node["loss"] is None else node["loss"]
            of_node = self._nodes[node["node"]].alerts(loss, RLMetric.of(node["rl"]))
            found |= {
                f"{kind} of {node['name']}": f"{node['name']}: {text}" for kind, text in of_node.items()
            }
        return found


class Alerts:
    """Active alerts of one process. `update` takes those that hold now."""

    def __init__(
        self,
        config: AlertConfig,
        run: str,
        source: str,
        event: Callable[..., None],
        *,
        posts: Collection[str] | None = None,
    ) -> None:
        """Begin without alerts.

        Args:
            config: Bounds and webhook.
            run: Name of the run, for the webhook.
            source: Node or hub, for the webhook.
            event: Writes an event with fields.
            posts: Kinds that are sent to the webhook; None: all.
        """
        self._run, self._source, self._event, self._posts = run, source, event, posts
        self.active: dict[str, str] = {}
        """Texts by kind."""
        self._webhook = Webhook(config.webhook, lambda reason: event("webhook_failed", reason=reason))

    def update(self, found: Mapping[str, str], **values: Any) -> None:
        """Record what has begun and what is over. values: further fields of the events."""
        begun = {kind: text for kind, text in found.items() if kind not in self.active}
        over = {kind: text for kind, text in self.active.items() if kind not in found}
        self.active = {kind: self.active.get(kind, text) for kind, text in found.items()}
        for event, texts in (("alert", begun), ("alert_over", over)):
            for kind, text in texts.items():
                self._event(event, kind=kind, message=text, **values)
                if self._posts is not None and kind not in self._posts:
                    continue
                said = {"run": self._run, "source": self._source, "kind": kind, "text": text}
                self._webhook.send({**said, "over": event == "alert_over"})


class NodeAlerts:
    """Alerts of a node, looked for with each line of its metrics."""

    def __init__(self, config: AlertConfig, folder: Path, alerts: Alerts) -> None:
        """Look at a node whose records are in `folder`."""
        self._config, self._folder, self._alerts = config, folder, alerts
        self._watch, self._pushes = NodeWatch(config), AcceptedPushes(config)

    def look(self, loss: float, rl: RLMetric | None, step: int, *, accepted: int, spent_s: float) -> None:
        """Record the alerts of a line of metrics; see `NodeWatch.alerts`.

        Args:
            loss: Newest training loss.
            rl: State of the node's reinforcement learning, if there is one.
            step: Inner steps so far.
            accepted: Rounds whose push was accepted so far; without a hub those that have landed.
            spent_s: Seconds of training and waiting so far; evaluations and checkpoints do not count.
        """
        found = self._watch.alerts(loss, rl) | of_disk(self._config, self._folder)
        if self._pushes.alerts(accepted, spent_s, expected=True):
            often = self._config.intervals
            found["pushes"] = f"no push of this node was accepted for more than {often} usual intervals"
        self._alerts.update(found, step=step)
