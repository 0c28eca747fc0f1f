"""Peers of a swarm as real processes, without trainers."""

import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from aedit.launch.hub import anchors_of, replayed
from aedit.launch.swarm import MARK
from kit.commands import Command
from kit.waiting import until

JOINS_S = 60.0

RUN = """
name = "run"
[train]
steps = 100000
[edit]
every = 10
landing = "arrival"
[outer]
kind = "nesterov"
[hub]
address = "{address}"
quorum = "all"
codec = "fp32"
expire_s = 60
"""
SWARM = """
[swarm]
discovery = "file"
parts = {parts}
copies = {copies}
"""


@dataclass
class Swarm:
    """Peers that know each other; the first one begins the run."""

    folder: Path
    peers: int
    parts: int
    copies: int
    flags: tuple = ()
    processes: list = field(default_factory=list)
    words: dict = field(default_factory=dict)

    def start(self):
        toml, addresses = self.folder / "swarm.toml", self.folder / "peers.txt"
        toml.write_text(RUN.format(address="") + SWARM.format(parts=self.parts, copies=self.copies))
        addresses.write_text("")
        for number in range(self.peers):
            folder = self.folder_of(number)
            folder.mkdir(parents=True)
            self.processes.append(self._begun(number))
            until((folder / "address").exists, "a peer", JOINS_S)
            with addresses.open("a") as file:
                file.write((folder / "address").read_text() + "\n")

    def folder_of(self, number):
        return self.folder / "peers" / f"peer-{number}"

    def _begun(self, number):
        folder = self.folder_of(number)
        words = ["peer", str(self.folder / "swarm.toml"), f"--directory={folder}", f"--as=peer-{number}"]
        words += ["--insecure", f"--peers={self.folder}/peers.txt", "--swarm.listen=127.0.0.1:0", *self.flags]
        words += ["--found"] * (number == 0)
        words += self.words.get(number, ())
        return Command(words, folder / "output.log", env=os.environ | {"OMP_NUM_THREADS": "1"})

    def add(self, *words):
        """Start one more peer, with more words in its command, now and when it starts again."""
        number, self.peers = self.peers, self.peers + 1
        self.folder_of(number).mkdir()
        self.words[number] = words
        self.processes.append(self._begun(number))
        return number

    def places(self):
        """Return the places of the parts if all peers agree on them; else ()."""
        found = [path.read_text() for path in self.folder.glob("peers/*/replicas.json")]
        agreed = len(found) == self.peers and len(set(found)) == 1
        return json.loads(found[0])["parts"] if agreed else ()

    def settled(self):
        """Return the places of the parts once each has all copies and the owner that it is to have."""
        places = self.places()
        done = all(
            len(one["replicas"]) == self.copies and one["owner"] == one["first"] != "" for one in places
        )
        return places if done else ()

    def replicas(self, part):
        """Return the folders of all replicas of a part."""
        return sorted(path.parent for path in self.folder.glob(f"peers/*/part_{part}/{MARK}"))

    def kill(self, number):
        """Kill a peer with all its processes."""
        process = psutil.Process(self.processes[number].pid)
        for one in (process, *process.children(recursive=True)):
            one.kill()
        self.processes[number].wait(10)

    def lose(self, number):
        """Kill a peer, and delete its folder."""
        self.kill(number)
        shutil.rmtree(self.folder_of(number))

    def again(self, number):
        """Start a peer again that was killed."""
        (self.folder_of(number) / "address").unlink(missing_ok=True)
        self.processes[number] = self._begun(number)
        until((self.folder_of(number) / "address").exists, "a peer", JOINS_S)

    def introduce(self):
        """Let all peers find each other again, once they are at other addresses."""
        folders = [self.folder_of(number) for number in range(self.peers)]
        (self.folder / "peers.txt").write_text("".join((f / "address").read_text() + "\n" for f in folders))

    def end(self):
        for process in self.processes:
            found = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for one in found:
                one.kill()
            process.kill()
            process.wait(10)


@contextmanager
def swarm(folder, **shape):
    made = Swarm(folder, **shape)
    try:
        made.start()
        yield made
    finally:
        made.end()


def on_disk(folder):
    """Return (version, digest of the anchor) by unit, as the journal in a hub's folder has them."""
    state = replayed(folder).state
    digests = {
        unit: hashlib.sha256(values.tobytes()).hexdigest() for unit, values in anchors_of(folder).items()
    }
    return {unit: (state.units[unit].version, digest) for unit, digest in digests.items()}
