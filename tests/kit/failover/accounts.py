"""What hubs have promised, and the check of every promise, by the bytes on the simulated disks."""

from aedit.async_sgd.journal import segment_numbers, segment_path
from kit.failover.world import Violation


class Accounts:
    """The acknowledgements of all hubs. `check` raises Violation if a promise was broken."""

    def __init__(self):
        self.hubs = []
        self.leaders = {}
        """Number of the hub that has acknowledged something, by term."""
        self.pushes = {}
        """Highest acknowledged push, by name of the node."""
        self.count = 0
        self.bytes = {}
        """Acknowledged bytes of the newest segments, by segment."""
        self.replicas = ()
        """Identities of the hubs that had to have them."""
        self.newest = None
        """(hub, term) of the last acknowledgement."""
        self.is_excused = False
        """A fault has taken more from the disks than the protocol can bear."""
        self.removing = None
        """Number of a hub that has removed a part of a journal since the last check."""

    def acknowledges(self, host, head, receipt):
        leading = host.process._leading
        state = leading.ledger.hub.state
        term, name = state.term, state.members[head.who.node].name
        first = self.leaders.setdefault(term, host.number)
        if first != host.number:
            raise Violation(f"hubs {first} and {host.number} have both acknowledged under term {term}")
        if self.newest != (host.number, term):
            self.check_leader(host)
            self.newest = host.number, term
        self.pushes[name] = max(head.seq, self.pushes.get(name, 0))
        self.count += 1
        config = leading.leadership._replica.configs[0]
        self.replicas = config.replicas
        for number in [number for number in self.bytes if number < receipt.segment - 1]:
            del self.bytes[number]
        data = _segment(host, receipt.segment)
        before = self.bytes.get(receipt.segment, b"")
        if len(before) < receipt.offset:
            self.bytes[receipt.segment] = bytes(data[: receipt.offset])
        if receipt.segment - 1 in self.bytes:
            self.bytes[receipt.segment - 1] = bytes(_segment(host, receipt.segment - 1) or b"")

    def check_leader(self, host):
        """Raise Violation unless a hub that leads has all that was acknowledged."""
        state = host.process._leading.ledger.hub.state
        for name, seq in self.pushes.items():
            has = state.members[state.names[name]].received.get(0, 0) if name in state.names else 0
            if has < seq:
                raise Violation(f"hub {host.number} leads term {state.term} and lacks push {seq} of {name}")
        if not self._has(host):
            raise Violation(f"hub {host.number} leads term {state.term} and has other bytes before the end")

    def lacks(self, number, reason):
        if not self.is_excused:
            raise Violation(f"hub {number}: {reason}")

    def refuses_folder(self, number, reason):
        """A hub refuses its folder: only a fault of the disk may be the cause."""
        host = self.hubs[number]
        if not host.disk_failed and "make room" not in reason:
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
        leading = [*leading, self.hubs[self.newest[0]]] if self.newest else leading
        has_it = any(self._holds(host) for host in (self.hubs[number], *leading))
        if not has_it and not self._majority_has():
            raise Violation(f"hub {number} has deleted what was acknowledged: no leader or majority has it")

    def note_removal(self, number, name):
        """Note that a hub is about to remove a file, or a part of it."""
        if name.startswith("journal-") and self.removing is None and self._holds(self.hubs[number]):
            self.removing = number

    def _majority_has(self):
        holding = [host for host in self.hubs if host.identity in self.replicas and self._holds(host)]
        return 2 * len(holding) > len(self.replicas)

    def _has(self, host):
        return all(
            (found := _segment(host, number)) is None or found.startswith(data)
            for number, data in self.bytes.items()
        )

    def _holds(self, host):
        """Return whether a disk has what was acknowledged, in place or set aside."""
        saved = segment_numbers(host.directory, "snapshot")[-1:]
        return all(
            number < sum(saved) or any(found.startswith(data) for found in _all_of(host, number))
            for number, data in self.bytes.items()
        )


def _segment(host, number):
    inode = host.disk.names.get(str(segment_path(host.directory, number)))
    return None if inode is None else inode.data


def _all_of(host, number):
    """Yield the contents of a segment on a disk: its own, and those that were set aside."""
    path = segment_path(host.directory, number)
    own = _segment(host, number)
    if own is not None:
        yield own
    for name, inode in host.disk.names.items():
        if "/set_aside/" in name and f"/{path.name}" in name:
            _, _, start = name.partition(".from-")
            if not start:
                yield inode.data
            elif own is not None:
                yield own[: int(start)] + inode.data
