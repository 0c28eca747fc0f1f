"""Peers of a swarm with everything that they host, in this process: real services, and no child process."""

import threading
import time
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

from aedit.child import USER_ERROR, from_json
from aedit.launch.hub.endpoint import HubEndpoint, HubOptions
from aedit.launch.hub.main import _Process
from aedit.launch.swarm import Peer, PeerOptions, hosted_part
from aedit.launch.swarm import run_peer as peer_module
from aedit.proto.swarm import KEY, GossipPlan, ReplicasFile, ranking
from aedit.types import UserError
from kit.swarm import key_of

EVERY_S = 0.05


class HubHere:
    """A hub in this process, in place of the child process with this command line."""

    config = None
    made = ()

    def __init__(self, words, log, *, own):
        endpoint = HubEndpoint.of(HubHere.config, from_json(HubOptions, words[-1]))
        self.process, self.closed = _Process(endpoint, insecure=False), False
        self.process.start()

    def running(self):
        return not (self.closed or self.process.is_over)

    def exit_code(self):
        self.terminate()
        try:
            return self.process.exit_code()
        except UserError:
            return USER_ERROR

    def terminate(self):
        if not self.closed:
            self.closed = True
            self.process.close()

    kill = terminate


class PeersHere:
    """Peers that take their turns in a thread, from `start` on."""

    def __init__(self, folder, config):
        self.folder, self.config, self.peers = folder, config, []
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._turns, daemon=True)
        self.errors = []

    def start(self, count):
        """Start peers whose keys rank in their order for part 0, so that the first one owns it."""
        keys = {key_of(900 + number).public: 900 + number for number in range(count)}
        for number, key in enumerate(ranking(self.config.name, 0, keys)):
            directory = self.folder / f"peer-{number}"
            directory.mkdir()
            (directory / KEY).write_bytes(key_of(keys[key]).private.private_bytes_raw())
        for number in range(count):
            self.add(f"peer-{number}", founds=number == 0)
        self._thread.start()

    def add(self, name, *, founds=False):
        directory = self.folder / name
        directory.mkdir(exist_ok=True)
        known = "" if founds else self.peers[0].address
        made = Peer(self.config, PeerOptions(directory=directory, name=name, peers=known, founds=founds))
        made.start()
        with self._lock:
            self.peers.append(made)
        return made

    def replicas(self, number):
        """Return the path of the file that a peer writes for its node."""
        return self.folder / f"peer-{number}" / "replicas.json"

    def places(self, number, part=0):
        return ReplicasFile(self.replicas(number)).part(part)

    def address(self, number, part=0):
        """Return the HOST:PORT of a replica."""
        return self.hub(number, part)._server.address

    def hub(self, number, part=0):
        """Return the process of a replica."""
        return self.peers[number]._hosted[part]._child.process

    def close(self):
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(10)
        for peer in self.peers:
            peer.close()
        assert self.errors == []

    def _turns(self):
        while not self._ended.is_set():
            with self._lock:
                peers = list(self.peers)
            for peer in peers:
                try:
                    peer.turn()
                except Exception as error:
                    self.errors.append(error)
                    raise
            time.sleep(EVERY_S)


@contextmanager
def peers_here(folder, config, count):
    """Yield peers of a run; the first one founds it."""
    made = PeersHere(folder, config)
    plan = partial(GossipPlan, every_s=EVERY_S)
    with (
        patch.object(hosted_part, "Child", HubHere),
        patch.object(hosted_part, "_AGAIN_S", 0.1),
        patch.object(peer_module, "GossipPlan", plan),
        patch.object(HubHere, "config", config),
    ):
        try:
            made.start(count)
            yield made
        finally:
            made.close()
