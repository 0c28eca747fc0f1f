"""Tests by counts of work that features are collected where a trainer uses the node's waits, only there."""

from kit.tiny_policies import policy

from aedit.spec_rollout import Engine, OnlineConfig, OnlineDrafter, Prompt, Sampling, make_target
from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import OFF
from aedit.spec_rollout.training.windows import PATIENCE, RETRY_VERSIONS, NoTraining, UseOfFeatures


class Trainer(NoTraining):
    """Trainer stand-in: the test says how long it waited and computed, and reads the policies it got."""

    def __init__(self):
        super().__init__()
        self.idle_s, self.cpu_s, self.versions = 0.0, 0.0, []

    @property
    def used_s(self):
        return self.cpu_s

    def status(self):
        return super().status() | {"state": "waiting", "idle_s": self.idle_s}

    def update_policy(self, policy, version):
        self.versions.append(version)


class Node:
    """An engine whose policy moves before each batch."""

    def __init__(self, trainer=None):
        self.model = policy()
        target = make_target(self.model, rows=4, max_tokens=16)
        online = OnlineDrafter.of(target, config=OnlineConfig(memory_bytes=2**20, max_share=1.0, train=False))
        if trainer is not None:
            online._trainer = trainer
        self.engine, self.online, self.copies = Engine(target, chooser=Fixed(OFF)), online, 0
        self.engine.sink = online.sink
        copy = online.sink._copy

        def counted(features):
            self.copies += 1
            return copy(features)

        online.sink._copy = counted

    def batch(self, samples=4):
        """Generate with new weights; return the samples that the ring got and the copies that were made."""
        version = self.engine.version + 1
        self.engine.update_weights({n: 1.001 * t for n, t in self.model.state_dict().items()}, version)
        self.online.after_update()
        begun, copies = self.online.sink.ring.status()["begun"], self.copies
        sampling = Sampling(max_new_tokens=4)
        asked = [
            Prompt(tokens=(i % 40, 1), rollout=100 * version + i, sampling=sampling) for i in range(samples)
        ]
        list(self.engine.generate(asked))
        return self.online.sink.ring.status()["begun"] - begun, self.copies - copies


def test_a_node_that_never_waits_stops_to_collect_and_begins_with_its_first_wait():
    trainer = Trainer()
    node = Node(trainer)
    collected = [node.batch() for _ in range(PATIENCE + 3)]
    assert [begun for begun, _ in collected] == [4] * (PATIENCE - 1) + [0] * 4
    assert [copies for _, copies in collected[-4:]] == [0] * 4
    assert len(trainer.versions) == PATIENCE - 1, "nor is the policy copied"
    kept = node.online.sink.ring.status()["versions"]
    assert max(kept) == trainer.versions[-1], "a late wait finds the samples of the trainer's policy"
    trainer.idle_s += 5.0
    assert node.batch()[0] == 4
    assert trainer.versions[-1] == node.engine.version


def test_a_trainer_that_is_off_never_asks_for_features():
    node = Node()
    for _ in range(PATIENCE):
        with node.online.window("round"):
            node.batch(samples=1)
    assert node.batch() == (0, 0)


def test_a_drafter_of_other_nodes_is_compared_and_adopted_on_a_node_that_never_waits():
    node = Node()
    for _ in range(PATIENCE):
        node.batch(samples=1)
    assert node.batch() == (0, 0)
    shared = {name: value.clone() for name, value in node.online.tensors().items()}
    node.online.take_shared(shared)
    begun, copies = node.batch(samples=80)
    assert begun == 80
    assert copies > 0
    assert node.online.adopt(), "equal is not worse"
    assert node.batch() == (0, 0)


def test_the_patience_covers_the_longest_time_without_a_wait():
    use = UseOfFeatures(patience=3)
    assert [use.next_version(0.0, 0.0, t) for t in range(5)] == [True, True, False, False, False]
    assert use.next_version(2.0, 0.5, 6.0), "a wait"
    assert [use.next_version(2.0, 0.5, 6.0 + t) for t in range(1, 12)] == [True] * 9 + [False] * 2


def test_waits_that_are_too_short_to_learn_in_do_not_count():
    use = UseOfFeatures(patience=2)
    assert use.next_version(0.0, 0.0, 0.0)
    assert not use.next_version(0.01, 0.01, 100.0), "a ten-thousandth of the time"
    assert use.next_version(0.02, 0.02, 101.0), "a hundredth"
    assert use.next_version(1.02, 1.0, 9999.0), "a second"


def test_waits_that_the_trainer_does_not_use_end_the_collection_and_attempts_grow_rare():
    use, shares = UseOfFeatures(), []
    for _ in range(5):
        taken = [_next(use) for _ in range(400)]
        shares.append(sum(taken) / 400)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] < 0.25
    assert shares[-1] <= RETRY_VERSIONS / 400
    use.next_version(use._idle_s + 1.0, use._used_s + 0.2, use._began_s + 1.0)
    assert all(_next(use) for _ in range(PATIENCE - 1)), "a used wait"


def test_a_trainer_that_rests_by_its_own_choice_keeps_its_features():
    kept = [0, 0]
    for rests in (False, True):
        use = UseOfFeatures(patience=2)
        kept[rests] = sum(use.next_version(5.0 * t, 0.0, 10.0 * t, rests=rests) for t in range(1, 100))
    assert kept[True] == 99
    assert kept[False] < 60


def _next(use):
    """Return the answer for a version of 0.1 s with a wait of 5 ms, of which nothing was used."""
    return use.next_version(use._idle_s + 0.005, use._used_s, use._began_s + 0.1)
