"""Gate in the node itself, for drafters that its trainer has not evaluated: those of other nodes."""

import math

from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.training.batches import newest_held_out
from aedit.spec_rollout.training.feature_reader import FeatureReader
from aedit.spec_rollout.training.feature_ring import Buffer
from aedit.spec_rollout.training.gate import held_out_match
from aedit.spec_rollout.training.losses import PolicyEmbeddings
from aedit.spec_rollout.training.packing import pack_samples

HELD_OUT_TOKENS = 1024
"""Upper limit of the tokens of a comparison: the node computes it between two steps, not in a wait."""
MIN_TOKENS = 32
ROW_PAIRS = 256
TIE = 1e-6
"""Difference of two match rates that rounding explains."""


class LocalGate:
    """Compare two drafters on the held-out samples in a ring of features."""

    def __init__(self, features: Buffer, depth: int) -> None:
        """Make the gate.

        Args:
            features: Memory in which a `FeatureRing` is.
            depth: Length of the chains that are compared.
        """
        self._reader, self._depth = FeatureReader(features), depth

    def is_not_worse(
        self, candidate: DraftLayer, present: DraftLayer, embeddings: PolicyEmbeddings
    ) -> bool | None:
        """Return whether `candidate` matches the policy at least as well as `present`.

        Returns:
            None if there are too few held-out samples of this policy version.
        """
        entries = [entry for entry in self._reader.entries() if entry.version == embeddings.version]
        chosen = newest_held_out(entries, HELD_OUT_TOKENS)
        samples = [sample for entry in chosen if (sample := self._reader.read(entry)) is not None]
        if sum(len(sample.features_MF) for sample in samples) < MIN_TOKENS:
            return None
        device = present.gain.device
        rows = [row.to(device) for row in pack_samples(samples, ROW_PAIRS)]
        if not any(row.num_counted for row in rows):
            return None
        theirs, ours = (
            held_out_match(layer, rows, embeddings, self._depth).rate for layer in (candidate, present)
        )
        return math.isfinite(theirs) and not theirs < ours - TIE
