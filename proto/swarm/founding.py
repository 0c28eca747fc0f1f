"""Founding a part anew that has no owner and elects none: who may do it. No clock, socket or file.

A peer re-creates a lost part once more than half of the peers that were present under its last owner have
voted for it, in their signed cards; every peer can verify the count. Where too few are left, an operator lets
one peer found it: such a forced founding is valid without votes, and of several the highest one counts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from aedit.proto.rpc import MOST_GENERATIONS, last_term_before, lineage
from aedit.proto.swarm.card import FOUNDER_BYTES, Founding

_MOST_AHEAD = 16
"""Generations that others may claim beyond those that are known here: a false card does not use them up."""
MOST_FORCED = MOST_GENERATIONS // 2
"""Highest generation of a forced founding: a false card leaves the others to the votes."""


def mark(key: bytes) -> bytes:
    """Return the bytes that name a peer as a candidate."""
    return key[:FOUNDER_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """Knowledge and promises of a peer about one part. On disk before its card says so."""

    members: frozenset[bytes] = frozenset()
    """Keys of the peers that could host the part when it last had an owner: most of them must agree."""
    generation: int = 0
    """Highest one in which it has voted, or whose founding it has accepted."""
    candidate: bytes = b""
    """Whom it lets found that generation, see `mark`: one peer per generation."""
    accepted: int = 0
    """Generation of the founding that counts here; 0: the part as the run began it."""
    founder: bytes = b""
    """Mark of the peer that has founded it."""
    begun: int = 0
    """Generation that this peer has founded itself: it does so once."""
    is_forced: bool = False
    """Whether it knows of any forced founding. Then its card names the founding that counts here, which is
    valid without a majority."""
    has_forced: bool = False
    """Whether this peer has founded the part by force, which it does once."""

    @property
    def term_above(self) -> int:
        """Return the number below the first term of the founding that counts."""
        return last_term_before(self.accepted, self.founder)

    def counts(self, term: int) -> bool:
        """Return whether a replica that knows this term is of the founding that counts; 0: it knows none."""
        return term == 0 or lineage(term) == lineage(self.term_above)

    @property
    def say(self) -> Founding:
        """Return what the card of this peer says about the part."""
        return Founding(
            generation=self.generation,
            candidate=self.candidate,
            members=len(self.members),
            forced=self.accepted if self.is_forced else 0,
            founder=self.founder if self.is_forced else b"",
        )

    def is_below(self, founding: tuple[int, bytes]) -> bool:
        """Return whether the founding is above the one that counts: its terms are, as nodes compare them."""
        return _place(*founding) > _place(self.accepted, self.founder)

    def followed(self, generation: int, founder: bytes) -> "Register":
        """Return the register once this founding counts. A vote in a later generation stays."""
        known = replace(self, accepted=generation, founder=founder)
        if generation < self.generation:
            return known
        return replace(known, generation=generation, candidate=founder)


def with_owner(register: Register, hosts: Collection[bytes], lately: Collection[bytes]) -> Register:
    """Return the register once the part was seen to have an owner.

    A member that has gone stays one for a while, so that peers that are cut off together are not taken out
    one by one; and a minority takes no member out.

    Args:
        register: Its present one.
        hosts: Live peers that can host the part.
        lately: Peers that were so of late.
    """
    here = register.members.intersection(hosts)
    is_majority = 2 * len(here) > len(register.members)
    kept = register.members.intersection(lately) if is_majority else register.members
    return replace(register, members=kept.union(hosts))


def with_agreed(register: Register, says: Mapping[bytes, Founding], hosts: Collection[bytes]) -> Register:
    """Return the register with the highest founding on which most members have agreed, or that was forced.

    Peers that follow a forced founding are the members from then on: the person has given up the others. Who
    comes back must follow it and all later ones, and who has agreed on another one meanwhile must tell them.

    Args:
        register: Its present one.
        says: What live peers say that can host the part, by key.
        hosts: All live peers that can. To a peer that has come since the part was lost these are the members.
    """
    members = register.members or frozenset(hosts)
    needed = max((len(members), *(say.members for say in says.values()))) // 2 + 1
    votes: dict[tuple[int, bytes], int] = {}
    for key in members.intersection(says):
        choice = says[key].generation, says[key].candidate
        votes[choice] = votes.get(choice, 0) + 1
    agreed = {one for one, count in votes.items() if count >= needed}
    by_force = {(say.forced, say.founder) for say in says.values() if 0 < say.forced <= MOST_FORCED}
    known = replace(register, is_forced=register.is_forced or bool(by_force))
    above = [one for one in agreed | by_force if register.is_below(one)]
    if not above:
        return known
    newest = max(above, key=lambda one: _place(*one))
    after = known.followed(*newest)
    return after if newest in agreed else replace(after, members=frozenset(hosts))


def with_vote(
    register: Register, me: bytes, ranked: Sequence[bytes], says: Mapping[bytes, Founding]
) -> Register:
    """Return the register of a peer that has missed the part for long enough: it may vote now.

    Args:
        register: Its present one.
        me: Key of this peer. One that has never seen an owner of the part does not vote.
        ranked: Live peers that can host the part, those that should keep it first.
        says: What these say, by key.
    """
    able = [key for key in ranked if key in register.members]
    able.sort(key=lambda key: mark(key) == register.founder)  # who has not managed it comes last
    if me not in able:
        return register
    claimed = {key: says[key].generation for key in able if key in says and says[key].candidate == mark(key)}
    stand = {key: at for key, at in claimed.items() if at > register.generation}
    if stand:
        candidate = max(stand, key=lambda key: (stand[key], -able.index(key)))
        return replace(register, generation=stand[candidate], candidate=mark(candidate))
    if able[0] != me:
        return register
    known = max((says[key].generation for key in able if key in says), default=0)
    following = max(register.generation, min(known, register.generation + _MOST_AHEAD)) + 1
    if following >= MOST_GENERATIONS:
        return register
    return replace(register, generation=following, candidate=mark(me))


def with_force(
    register: Register, me: bytes, says: Mapping[bytes, Founding], hosts: Collection[bytes]
) -> Register:
    """Return the register of a peer that a person lets found the part, without the votes of others.

    It is the present one if the generations are used up.

    Args:
        register: Its present one.
        me: Key of this peer, which may have come since the part was lost.
        says: What live peers say that can host the part, by key.
        hosts: All live peers that can: the members from now on.
    """
    claimed = [generation for say in says.values() for generation in (say.generation, say.forced)]
    known = (one for one in claimed if one < MOST_FORCED)
    following = max(register.generation, register.accepted, *known) + 1
    if following > MOST_FORCED:
        return register
    after = replace(register.followed(following, mark(me)), is_forced=True, has_forced=True)
    return replace(after, members=frozenset(hosts) | {me})


def founds_now(register: Register, me: bytes) -> bool:
    """Return whether this peer is to found the part now."""
    return register.founder == mark(me) and register.begun < register.accepted


def _place(generation: int, founder: bytes) -> tuple[int, bytes]:
    """Return the place of a founding in the order of all."""
    return last_term_before(generation, founder), founder
