"""The first member of a run: it describes the model, and the configuration may fix what it must say."""

from hashlib import sha256

from aedit.async_sgd.hub.denied import Denied
from aedit.async_sgd.hub.state import HubState
from aedit.async_sgd.rules import Founded, HubConfig
from aedit.types import model_sha256


def founded(state: HubState, described: Founded, config: HubConfig) -> Founded:
    """Return the record of the first node's description. Raises Denied if the run cannot have this model."""
    layout = described.layout
    names = [unit.name for unit in layout.units]
    if not names or len(set(names)) != len(names) or any(unit.numel < 1 for unit in layout.units):
        raise Denied(
            "different", "a layout has at least one unit, each with a name of its own and parameters"
        )
    part, parts = state.part
    if state.apart.issuperset(names[part::parts]):  # a budget counts steps of the model: it would not end
        raise Denied(
            "different",
            f"hub process {part} of {parts} would own no unit of the model: give hub.address fewer addresses",
        )
    if described.num_samples < 1:
        raise Denied("different", "there are no training samples")
    digest = model_sha256(layout, described.facts, described.num_samples)
    if config.model_sha256 and digest != config.model_sha256:
        raise Denied("different", f"this model is {digest}, and hub.model_sha256 is {config.model_sha256}")
    if config.anchors_sha256 and len(config.anchors_sha256) != len(names):
        wanted = len(config.anchors_sha256)
        raise Denied("different", f"this model has {len(names)} units, and hub.anchors_sha256 is of {wanted}")
    return described


def check_first_anchor(config: HubConfig, unit: int, data: memoryview) -> None:
    """Raise ValueError if these bytes, fp32, are not the first anchor that the configuration names."""
    wanted = config.anchors_sha256[unit] if config.anchors_sha256 else ""
    if wanted and (found := sha256(data).hexdigest()) != wanted:
        raise ValueError(f"first anchor of unit {unit} is {found}, and hub.anchors_sha256 names {wanted}")
