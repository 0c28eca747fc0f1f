"""Second implementation of EDiT in float64 NumPy and plain loops: the oracle of the tests.

It is written from the equations and imports nothing of the package. N nodes change the parameters of a unit
by given amounts between two rounds; the oracle computes the anchors.
"""

from dataclasses import dataclass, field

import numpy as np

MIN_SIGMA = 0.1
RECENT = 5


@dataclass(frozen=True)
class Rules:
    weights: str = "scale-free"
    temperature: float = 1.0
    step_weight: float = 0.0
    detector: str = "robust"
    threshold: float = 3.5
    warmup_rounds: int = 4
    window: int = 16
    ema: float = 0.02
    patience: int = 3
    clip: float | None = 10.0
    lr: float = 0.8
    momentum: float = 0.85


@dataclass
class Detector:
    """One node's history of the norms of one unit."""

    rules: Rules
    believed: list = field(default_factory=list)
    mean: float = 0.0
    var: float = 0.0
    suspects: int = 0

    def trusts(self, norm):
        if not np.isfinite(norm):
            return False
        if self._is_outlier(norm):
            self.suspects += 1
            if self.suspects < self.rules.patience:
                return False
            self.believed, self.mean, self.var = [], 0.0, 0.0
        self.suspects = 0
        if norm > 0:
            self._learn(norm)
        return True

    def score(self, norm):
        """Return the number of standard deviations above the history."""
        if self.rules.detector == "ema":
            return (norm - self.mean) / max(self.var**0.5, 1e-12)
        logs = np.log(self.believed[-self.rules.window :])
        steps = np.diff(logs)
        sigma = np.sqrt(np.sum(steps**2) / len(steps) / 2) * (1 + 1 / len(steps))
        return (np.log(norm) - np.median(logs[-RECENT:])) / max(sigma, MIN_SIGMA)

    def _is_outlier(self, norm):
        if self.rules.detector == "off" or len(self.believed) < self.rules.warmup_rounds or norm == 0:
            return False
        return self.score(norm) > self.rules.threshold

    def _learn(self, norm):
        a = self.rules.ema if self.believed else 1.0
        off = norm - self.mean
        self.mean += a * off
        self.var = (1 - a) * (self.var + a * off * off)
        self.believed.append(norm)


@dataclass(frozen=True)
class Landed:
    """State of one unit after one round."""

    anchor: np.ndarray
    norms: np.ndarray
    trusted: np.ndarray
    weights: np.ndarray
    scale: float

    @property
    def rolled_back(self):
        return not self.trusted.any()

    @property
    def effective_nodes(self):
        return 0.0 if self.rolled_back else 1 / np.sum(self.weights**2)


def mix(norms, trusted, steps, rules):
    """Return the weight of every node: EDiT's eq. 3 over the trusted ones."""
    w, shares = np.zeros(len(norms)), np.zeros(len(norms))
    if not trusted.any():
        return w
    G = norms[trusted]
    scores = {
        "uniform": lambda: np.zeros(len(G)),
        "paper": lambda: -G / rules.temperature,
        "scale-free": lambda: -(G / np.median(G) - 1) / rules.temperature,
    }[rules.weights]()
    w[trusted] = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    shares[trusted] = steps[trusted] / steps[trusted].sum()
    return (1 - rules.step_weight) * w + rules.step_weight * shares


def edit(start, moves_RND, steps_RN, rules):
    """Return the history of one unit: `Landed` after each of R rounds. D numbers move on N nodes.

    start: the first anchor. moves_RND: what the inner steps of each interval added on each node.
    """
    rounds, nodes = steps_RN.shape
    anchor, u = start.astype(np.float64), np.zeros(len(start))
    detectors = [Detector(rules) for _ in range(nodes)]
    history = []
    for r in range(rounds):
        local = [anchor + moves_RND[r, n].astype(np.float64) for n in range(nodes)]
        D = [anchor - theta for theta in local]
        norms = np.array([np.sqrt(np.sum(d * d)) for d in D])
        trusted = np.array([detectors[n].trusts(norms[n]) for n in range(nodes)]) & (steps_RN[r] > 0)
        w = mix(norms, trusted, steps_RN[r].astype(np.float64), rules)
        scale = 1.0
        if trusted.any():
            mean = sum(w[n] * D[n] for n in range(nodes) if trusted[n])
            if rules.clip is not None:
                scale = min(1.0, rules.clip / max(np.sqrt(np.sum(mean * mean)), 1e-30))
            u = rules.momentum * u + scale * mean
            anchor = anchor - rules.lr * (scale * mean + rules.momentum * u)
        history.append(Landed(anchor, norms, trusted, w, scale))
    return history
