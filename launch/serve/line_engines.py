"""Engines of a server's lines, with their drafters."""

from dataclasses import dataclass

from aedit.launch.node import StopDecoder, choose_among
from aedit.launch.serve.served_run import ServedRun
from aedit.launch.serve.server_drafter import LayerCopy, ServerDrafter
from aedit.spec_rollout.drafters import Drafter, DrafterKind, SuffixDrafter
from aedit.spec_rollout.engine import Engine


@dataclass(slots=True, eq=False)
class ServedLine:
    """Engine of one line; a `LineEngine`."""

    engine: Engine
    is_trainers: bool
    """Its requests come from a trainer."""
    layer: LayerCopy | None
    drafter: ServerDrafter
    is_closed: bool = False

    @property
    def drafter_version(self) -> int:
        """Return the number of the learned drafter in use; 0 before the first trained one."""
        return 0 if self.layer is None else self.layer.number

    def between_steps(self) -> None:
        """Let the drafter learn from this line, and adopt the newest one."""
        self.drafter.before_step(self)

    def close(self) -> None:
        """Take note that the line is closed."""
        self.is_closed = True


@dataclass(frozen=True, slots=True)
class LineEngines:
    """Makes the engines of lines."""

    run: ServedRun
    drafter: ServerDrafter
    own_line: str

    def make(self, line: str) -> ServedLine:
        """Return a new engine for a line."""
        target = self.run.target()
        drafters: dict[DrafterKind, Drafter] = {}
        layer = self.drafter.copy_for(target)
        if layer is not None:
            drafters["layer"] = layer.drafter
        if self.run.config.drafter.kind in ("suffix", "auto"):
            drafters["suffix"] = SuffixDrafter(device=str(target.device))
        engine = Engine(
            target,
            drafters=drafters,
            chooser=choose_among(drafters, target),
            tokenizer=StopDecoder(self.run.tokenizer),
        )
        return ServedLine(engine, line != self.own_line, layer, self.drafter)
