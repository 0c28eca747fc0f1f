"""What hubs have promised, and the check of every promise, by the bytes on the simulated disks."""

from collections import defaultdict

from aedit.async_sgd.journal import segment_numbers, segment_path
from aedit.async_sgd.replication.replica import is_quorum
from kit.failover.world import Violation

LATE_S = 2.0
"""Longest time from a confirmation to the acknowledgement that it allows."""


class Accounts:
    """Votes, elections and acknowledgements of all hubs. Each method raises Violation for a broken rule."""

    def __init__(self):
        self.hubs = []
        self.forgiven = 0
        """A voter of which there are two processes, which may not have met: each may support a hub."""
        self.votes = {}
        """Term and proposer that a voter has supported last, by voter."""
        self.supporters = defaultdict(set)
        """Voters that have supported a proposer, by term and proposer."""
        self.elected, self.leaders, self.elected_by = {}, {}, {}
        """By term, number and proposer of the hub that has led, and number of the one that has acknowledged
        something; voters of each leader, by its number and term."""
        self.pushes = {}
        """Highest acknowledged push, by name of the node."""
        self.count = 0
        self.bytes = {}
        """Acknowledged bytes of the newest segments, by segment."""
        self.replicas = ()
        """Identities of the hubs that had to have them."""
        self.is_excused = False
        """A fault has taken more from the disks than the protocol can bear."""
        self.replaced_s = float("-inf")
        """When the files of a hub were last replaced: it may have confirmed what is acknowledged now."""
        self.removing = None
        """Number of a hub that has removed a part of a journal since the last check."""

    # --- votes and elections

    def supports(self, host, voter, proposer, term):
        """A voter supports one process of one hub in a term, and none of a lower term afterwards.

        host: that the voter runs on.
        proposer: identity, and number of the process.
        """
        key = (voter, host.number) if voter == self.forgiven else voter
        before = self.votes.get(key, (0, proposer))
        if (term, proposer) != before and term <= before[0]:
            raise Violation(f"{voter} supports {proposer} in term {term}, and supported {before[::-1]}")
        self.votes[key] = term, proposer
        self.supporters[term, proposer].add(voter)

    def leads(self, host, leading, configs):
        """A term has one leader, which a quorum has elected, and which has everything that was acknowledged.

        configs: of its journal when it was elected.
        """
        term, identity = leading.ledger.hub.state.term, leading.leadership.identity
        proposer = identity, leading.leadership._replica._process
        self.supports(host, identity, proposer, term)
        self.elected_by[host.number, term] = self._supporters_of(leading)
        if configs and not is_quorum(configs[-1], self.supporters[term, proposer]):
            raise Violation(f"hub {host.number} leads term {term} without a quorum of {configs[-1]}")
        first = self.elected.setdefault(term, (host.number, proposer))
        if first != (host.number, proposer):
            if first[1] == proposer or not self.forgiven:
                raise Violation(f"hubs {first[0]} and {host.number} have both led term {term}")
            self.excuse(always=True)  # each by another quorum, which share the voter of two processes
        if term == max(*self.elected, *self.leaders, term):
            self.check_leader(host, leading)

    def check_leader(self, host, leading, by=None):
        """A leader has everything that was acknowledged, the last push by the hub `by`.

        But for what one of two processes has confirmed or agreed to, if the other one has elected it.
        """
        try:
            self._check_leader(host, leading)
        except Violation:
            elected_by = self.elected_by.get((host.number, leading.ledger.hub.state.term), ())
            twins = [hub for hub in self.hubs if hub is not host and hub.identity == self.forgiven]
            has_agreed = by is not None and self.forgiven in self._supporters_of(by.process._leading)
            has_all = by in twins or any(map(self._holds, twins))
            is_of_twin = self.forgiven in elected_by and (has_all or has_agreed)
            if not (is_of_twin or (self.forgiven and self.is_excused)):
                raise
            self.excuse(always=True)

    def _supporters_of(self, leading):
        identity, process = leading.leadership.identity, leading.leadership._replica._process
        return self.supporters[leading.ledger.hub.state.term, (identity, process)]

    def _check_leader(self, host, leading):
        state = leading.ledger.hub.state
        for name, seq in self.pushes.items():
            has = state.members[state.names[name]].received.get(0, 0) if name in state.names else 0
            if has < seq:
                raise Violation(f"hub {host.number} leads term {state.term} and lacks push {seq} of {name}")
        found = {number: _segment(host, number) for number in self.bytes}
        if not all(data is None or data.startswith(self.bytes[number]) for number, data in found.items()):
            raise Violation(f"hub {host.number} leads term {state.term} and has other bytes before the end")

    # --- acknowledgements

    def acknowledges(self, host, head, receipt):
        """What is acknowledged is on the disk of every replica that counts, and at every later leader."""
        leading = host.process._leading
        state, configs = leading.ledger.hub.state, leading.leadership._replica.configs
        term, name = state.term, state.members[head.who.node].name
        first = self.leaders.setdefault(term, host.number)
        if first != host.number and not self.is_excused:
            raise Violation(f"hubs {first} and {host.number} have both acknowledged under term {term}")
        others = (self.hubs[number] for number in {*self.leaders.values()} - {host.number})
        if host.identity == self.forgiven and any(other.identity == self.forgiven for other in others):
            self.excuse(always=True)  # two processes of one voter lead, each with a journal of its own
        self.pushes[name] = max(head.seq, self.pushes.get(name, 0))
        self.count += 1
        newest = max(self.leaders)
        for other in self.hubs:
            if other.process and (later := other.process._leading) and later.ledger.hub.state.term >= newest:
                other.check_term(later)
                self.check_leader(other, later, host)
        if term < newest:
            return  # what it had confirmed by a majority before it was paused, say, has the later leader
        self.replicas = configs[0].replicas
        for number in [number for number in self.bytes if number < receipt.segment - 1]:
            del self.bytes[number]
        if len(self.bytes.get(receipt.segment, b"")) < receipt.offset:
            self.bytes[receipt.segment] = bytes(_segment(host, receipt.segment)[: receipt.offset])
        if receipt.segment - 1 in self.bytes:
            self.bytes[receipt.segment - 1] = bytes(_segment(host, receipt.segment - 1) or b"")
        if host.world.now < self.replaced_s + LATE_S:
            self.excuse()
        for replica in {replica for config in configs for replica in config.replicas}:
            having = [hub for hub in self.hubs if hub.identity == replica]
            if having and not any(map(self._has_durably, having)):
                lacking = having[0].number
                raise Violation(f"hub {host.number} acknowledges in term {term} what hub {lacking} lacks")

    def confirms(self, host, request):
        """A follower has nothing that its leader can lose."""
        segment = host.disk.names.get(str(segment_path(host.directory, request.segment)))
        if not host.is_unreliable and segment is not None and len(segment.stable) < request.offset:
            raise Violation(f"hub {host.number} can lose what a follower has confirmed to it")

    def _has_durably(self, host):
        """Return whether a disk would have what was acknowledged after a power loss.

        It may have it set aside: its hub cannot be elected then before it has as much again.
        """
        has_aside = any("/set_aside/" in name for name in host.disk.names)
        if host.is_unreliable or (has_aside and self._holds(host)):
            return True
        disk, saved = host.disk, sum(segment_numbers(host.directory, "snapshot")[-1:])
        found = {number: str(segment_path(host.directory, number)) for number in self.bytes}
        return all(
            number < saved or ((inode := disk.stable.get(found[number])) and inode.stable.startswith(data))
            for number, data in self.bytes.items()
        )

    # --- ends and losses

    def lacks(self, number, reason):
        """A hub ends as it lacks what was acknowledged: only where that is so, or a copy of it has the rest.

        Nobody else may have that yet, and it cannot reach what is at its own address.
        """
        if not (self.is_excused or self.hubs[number].identity == self.forgiven):
            raise Violation(f"hub {number}: {reason}")

    def refuses_folder(self, number, reason):
        """A hub refuses its folder: only a fault of the disk may be the cause."""
        is_expected = self.is_excused or self.hubs[number].is_unreliable
        if not is_expected and "make room" not in reason:
            raise Violation(f"hub {number}: {reason}")

    def excuse(self, *, always=False):
        """Expect nothing of what was acknowledged, unless a majority has it still."""
        if always or (self.bytes and not self._majority_has()):
            self.is_excused = True
            self.bytes.clear()
            self.pushes.clear()

    def check_copies(self):
        """Raise Violation if a hub has just removed what neither its leader nor a majority has now."""
        number, self.removing = self.removing, None
        leading = [host for host in self.hubs if host.process and host.process._leading]
        leading += [self.hubs[self.leaders[term]] for term in sorted(self.leaders)[-1:]]
        if not any(map(self._holds, (self.hubs[number], *leading))) and not self._majority_has():
            raise Violation(f"hub {number} has deleted what was acknowledged: no leader or majority has it")

    def note_removal(self, number, name):
        """Note that a hub is about to remove a file, or a part of it."""
        if name.startswith("journal-") and self.removing is None and self._holds(self.hubs[number]):
            self.removing = number

    def _majority_has(self):
        holding = {host.identity for host in self.hubs if self._holds(host)} & set(self.replicas)
        return 2 * len(holding) > len(self.replicas)

    def is_whole(self, host):
        """Return whether a hub has what was acknowledged in place, and all that it has ever confirmed."""
        follows = host.standby
        lacks = follows is not None and follows._extent < follows._leadership.seen
        return not lacks and self._holds(host, is_aside=False)

    def _holds(self, host, *, is_aside=True):
        """Return whether a disk has what was acknowledged, in place or (`is_aside`) set aside."""
        saved = segment_numbers(host.directory, "snapshot")[-1:]
        return all(
            number < sum(saved) or any(found.startswith(data) for found in _all_of(host, number, is_aside))
            for number, data in self.bytes.items()
        )


def _segment(host, number):
    inode = host.disk.names.get(str(segment_path(host.directory, number)))
    return None if inode is None else inode.data


def _all_of(host, number, is_aside=True):
    """Yield the contents of a segment on a disk: its own, and (`is_aside`) those that were set aside."""
    path = segment_path(host.directory, number)
    own = _segment(host, number)
    if own is not None:
        yield own
    for name, inode in host.disk.names.items() if is_aside else ():
        if "/set_aside/" in name and f"/{path.name}" in name:
            _, _, start = name.partition(".from-")
            if not start:
                yield inode.data
            elif own is not None:
                yield own[: int(start)] + inode.data
