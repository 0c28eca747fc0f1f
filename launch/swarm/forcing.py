"""Parts that a person lets this peer found without a vote: `aedit peer --force-found`."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence

from aedit.launch.config import SwarmConfig
from aedit.launch.swarm.foundings import Foundings
from aedit.proto.swarm import MOST_FORCED, PeerCard, candidates
from aedit.types import UserError, printable

OPTION = "--force-found"


def check_forcing(swarm: SwarmConfig, parts: Sequence[int], *, founds: bool) -> None:
    """Raise UserError if a peer of this swarm cannot found these parts by force.

    Args:
        swarm: Of the run.
        parts: Numbers of the parts.
        founds: The peer is to begin the run.
    """
    if not parts:
        return
    if founds:
        raise UserError(
            f"{OPTION}: --found begins a run, in which no part is lost yet; remove one of the two"
        )
    if not swarm.listen:
        raise UserError(
            f"{OPTION}: swarm.listen is empty: a client keeps no part; name an address, or use another peer"
        )
    if parts[-1] >= swarm.parts:
        raise UserError(f"{OPTION}: there is no part {parts[-1]}: they are numbered 0 to {swarm.parts - 1}")


class Forcing:
    """Founds parts by force, once no owner of them was known for long enough."""

    def __init__(
        self,
        parts: Sequence[int],
        foundings: Foundings,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Leave out the parts that this peer has founded by force before.

        A supervisor repeats the option with every start: the part must not be founded anew by that.

        Args:
            parts: Numbers of the parts, ascending.
            foundings: What this peer knows about them.
            wait_s: Time in which a live owner would have been heard of.
            clock: Monotonic, in seconds.
        """
        self._foundings, self._clock, self._at_s = foundings, clock, clock() + wait_s
        self._parts = [part for part in parts if not foundings.register(part).has_forced]
        for part in sorted(set(parts) - set(self._parts)):
            _tell(
                f"{OPTION}: part {part} was founded here by force before; not again."
                " If it is lost once more, give the option to another peer, which may be a new one"
            )
        if self._parts:
            numbers = ", ".join(map(str, self._parts))
            _tell(f"{OPTION}: looking for an owner of part {numbers} for {wait_s:g} s")

    def look(self, live: Mapping[bytes, PeerCard]) -> None:
        """Found the parts if it is time. `Foundings.look` has taken these cards before.

        Raises UserError if one has an owner, and OSError.
        """
        for part in self._parts:
            if owner := self._foundings.owner(part):
                raise UserError(
                    f"{OPTION}: part {part} is owned by {owner}, which is live: nothing was founded;"
                    " start this peer without the option"
                )
        if self._clock() < self._at_s:
            return
        for part in self._parts:
            self._found(part, live)
        self._parts = []

    def _found(self, part: int, live: Mapping[bytes, PeerCard]) -> None:
        before = self._foundings.register(part)
        after = self._foundings.force(part, live)
        if after == before:
            raise UserError(f"{OPTION}: part {part}: {MOST_FORCED} generations are used up")
        known = [say.members for card in live.values() if (say := card.foundings.get(part))]
        names = ", ".join(sorted(printable(live[key].name) for key in candidates(live)))
        _tell(
            f"{OPTION}: part {part} is founded here in generation {after.accepted}, without a vote\n"
            f"  live peers that can keep it: {names}; {max(known, default=0)} knew it when it had an owner\n"
            "  it goes on from the newest anchors of live nodes: pushes that were merged after these are"
            " lost, and the momentum of the outer optimizer\n"
            "  a peer that comes back keeps its old replica aside: what it has acknowledged since is lost\n"
            "  do this at one peer only: of two that do, one sets aside what it has founded"
        )


def _tell(text: str) -> None:
    print(f"aedit peer: {text}", file=sys.stderr, flush=True)
