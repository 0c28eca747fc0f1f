"""Tests the layer drafter against a plain recomputation over the whole history, in float64."""

import copy

import pytest
import torch
from kit.rollouts import prefilled
from test_draft_layer import causal, checksum, layer_for, policy
from transformers import LlamaConfig, LlamaForCausalLM

from aedit.spec_rollout.drafters import OFF, DraftLayer, LayerDrafter, RowStart, StepUpdate, parse_arm
from aedit.spec_rollout.model import Target

V, D = 40, 24


class Sample:
    """Sample of a random policy: its tokens, a feature for each but the last, its noise."""

    def __init__(self, seed, count, temperature=1.0, width=D):
        self.random = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(V, (count,), generator=self.random).tolist()
        self.features = self.some_features(count - 1, width)
        self.noise = -torch.rand(200, V, generator=self.random, dtype=torch.float64).log().neg().log()
        self.temperature = temperature
        self.forgotten = 0

    def some_features(self, count, width=None):
        width = width or self.features.shape[1]
        return torch.randn(count, width, generator=self.random, dtype=torch.float64)

    def says(self, count):
        """Return the next tokens, with the features of those before them."""
        tokens = torch.randint(V, (count,), generator=self.random).tolist()
        features = self.some_features(count)
        self.tokens += tokens
        self.features = torch.cat([self.features, features])
        return tokens, features


class World:
    """Drafter and the rows it follows."""

    def __init__(self, layer, model, **options):
        self.layer, self.model, self.samples, self.seed = layer, model, [], 0
        self.ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        self.drafter = LayerDrafter(layer, self.ends, rows=6, max_tokens=100, **options)

    def begin(self, *counts, temperatures=(1.0,), row=None):
        """Begin samples of so many tokens in the next rows, or in `row`, whose own sample has ended."""
        begun = []
        for i, count in enumerate(counts):
            self.seed += 1
            width = self.layer.shape.feature_size
            sample = Sample(self.seed, count, temperatures[i % len(temperatures)], width)
            at = len(self.samples) if row is None else row
            self.samples[at : at + 1] = [sample]
            begun.append(RowStart(at, -1, list(sample.tokens), sample.features, count))
        self.drafter.begin(begun)

    def update(self, *counts):
        said = [sample.says(n) for sample, n in zip(self.samples, counts, strict=True)]
        longest = max(counts)
        padded = [torch.cat([f, f.new_zeros(longest - len(f), f.shape[1])]) for _, f in said]
        self.drafter.update(StepUpdate([tokens for tokens, _ in said], torch.stack(padded)))

    def end(self, row):
        """End the sample of a row; the last row takes its place."""
        self.drafter.end(row)
        last = len(self.samples) - 1
        sample = self.samples.pop()
        if row != last:
            self.samples[row] = sample
            self.drafter.move(last, row)

    def at(self, rows, first, count):
        pieces = [self.samples[row].noise[f : f + count] for row, f in zip(rows, first, strict=True)]
        return torch.stack(pieces)

    def propose(self, arm):
        temperatures = torch.tensor([sample.temperature for sample in self.samples])
        return self.drafter.propose(parse_arm(arm), len(self.samples), self, temperatures)

    def logits(self, sample, drafted):
        """Return the logits after these drafted tokens and the guessed features, over the whole history.

        `drafted`: the tokens, with the guessed feature of the one before each.
        """
        features = [sample.features[sample.forgotten :], *[feature[None] for _, feature in drafted]]
        tokens = [*sample.tokens[1 + sample.forgotten :], *[token for token, _ in drafted]]
        first = sample.forgotten
        with torch.no_grad():
            if self.layer.shape.taps:
                features[0] = self.layer.reduce(features[0])
            embedded = self.ends[0][torch.tensor(tokens)][None]
            positions = torch.arange(first, first + len(tokens))[None]
            guessed, _ = self.layer(torch.cat(features)[None], embedded, positions, causal(len(tokens)))
            return (guessed[0, -1] @ self.ends[1].T) / (sample.temperature or 1.0), guessed[0, -1]

    def rank(self, sample, logits, depth):
        """Return the scores that rank the children of a node at this depth."""
        warm = sample.temperature > 0
        return logits + sample.noise[len(sample.tokens) + depth] if warm else logits

    def chain(self, sample, depth):
        """Return the expected draft as (tokens, scores, log-probabilities)."""
        drafted, scores, score, logqs = [], [], 0.0, []
        for j in range(depth):
            logits, guessed = self.logits(sample, drafted)
            token = self.rank(sample, logits, j).argmax().item()
            logqs.append(torch.log_softmax(logits, -1))
            score += logqs[-1][token].item()
            drafted.append((token, guessed))
            scores.append(score)
        return [token for token, _ in drafted], scores, torch.stack(logqs)

    def tree(self, sample, arm):
        """Return the expected nodes as {path: score}; paths are tuples of tokens."""
        frontier, nodes = [((), 0.0, [])], {}
        for level in range(arm.depth):
            grown = []
            for path, score, drafted in frontier:
                logits, guessed = self.logits(sample, drafted)
                logq = torch.log_softmax(logits, -1)
                for token in self.rank(sample, logits, level).argsort(descending=True)[: arm.width].tolist():
                    more = score + logq[token].item()
                    grown.append(((*path, token), more, [*drafted, (token, guessed)]))
            nodes |= {path: score for path, score, _ in grown}
            frontier = sorted(grown, key=lambda node: -node[1])[: arm.width]
        return dict(sorted(nodes.items(), key=lambda node: -node[1])[: arm.nodes])

    def check(self, arm):
        """Check the draft for all rows against a plain recomputation."""
        draft, arm = self.propose(arm), parse_arm(arm)
        assert draft.counts_B is None
        for row, sample in enumerate(self.samples):
            if arm.is_chain:
                tokens, scores, _ = self.chain(sample, arm.depth)
                assert draft.tokens_BN[row].tolist() == tokens, f"row {row}"
                assert draft.scores_BN[row].tolist() == pytest.approx(scores, abs=1e-5)
            else:
                wanted = self.tree(sample, arm)
                paths = paths_of(draft, row)
                assert set(paths) == set(wanted), f"row {row}"
                expected = [wanted[path] for path in paths]
                assert draft.scores_BN[row].tolist() == pytest.approx(expected, abs=1e-5)
        return draft


def paths_of(draft, row):
    """Return the tokens on the way to each node."""
    paths = []
    for token, parent in zip(draft.tokens_BN[row].tolist(), draft.parents_BN[row].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def world(family="llama", *, taps=0, **options):
    model = policy(family)
    return World(layer_for(model, taps=taps), model, **options)


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3"])
def test_chains_of_ragged_rows_are_those_of_a_plain_recomputation(family):
    rows = world(family)
    rows.begin(9, 4, 17, temperatures=(1.0, 0.0, 0.7))
    rows.check("layer:4")
    for counts in ([1, 1, 1], [3, 1, 5], [1, 4, 2]):
        rows.update(*counts)
        rows.check("layer:4")


# The last one verifies all that has grown, so that no mistake hides in nodes that are not picked.
@pytest.mark.parametrize("arm", ["layer:1x3x3", "layer:3x2x5", "layer:2x4x20", "layer:4x3x30"])
def test_trees_of_ragged_rows_are_those_of_a_plain_recomputation(arm):
    rows = world("qwen3")
    rows.begin(9, 4, 17, temperatures=(1.0, 0.0, 0.7))
    rows.check(arm)
    rows.update(2, 1, 4)
    draft = rows.check(arm)
    assert (draft.parents_BN < torch.arange(draft.tokens_BN.shape[1])).all()


def test_one_row_alone_is_drafted_as_in_a_batch():
    rows = world()
    rows.begin(12)
    for count in (1, 3, 1):
        rows.check("layer:5")
        rows.update(count)
    rows.check("layer:4x2x6")


def test_what_was_only_drafted_does_not_outlive_its_draft():
    rows = world()
    rows.begin(9, 6)
    rows.check("layer:8")
    rows.update(1, 2)
    rows.check("layer:5x3x9")
    rows.update(2, 1)
    rows.check("layer:2")
    rows.update(1, 1)
    rows.check("layer:8")


def test_a_drafter_that_was_off_catches_up_with_all_it_has_missed():
    rows = world()
    rows.begin(9, 4, 6)
    rows.update(1, 1, 1)
    rows.check("layer:3")
    for _ in range(5):
        rows.update(1, 3, 1)
    rows.end(0)  # the third sample moves into row 0
    rows.update(2, 1)
    rows.begin(11)
    for _ in range(4):
        rows.update(1, 2, 1)
    rows.check("layer:4")
    rows.update(1, 2, 1)
    rows.check("layer:3x2x4")


def test_off_costs_a_place_in_a_list_and_no_computation(monkeypatch):
    rows = world()
    calls = []
    enter = rows.drafter._runner.write_pairs
    monkeypatch.setattr(rows.drafter._runner, "write_pairs", lambda *given: calls.append(1) or enter(*given))
    rows.begin(9, 4, 6)
    for _ in range(10):
        rows.update(1, 1, 1)
    rows.end(1)
    assert not calls
    rows.check("layer:1")
    assert calls


def test_rows_move_end_and_begin_while_it_drafts():
    rows = world()
    rows.begin(9, 4, 6, 12, temperatures=(1.0, 0.7))
    rows.check("layer:3")
    rows.update(1, 2, 3, 4)
    rows.end(1)
    rows.check("layer:3")
    rows.update(1, 1, 1)
    rows.end(2)  # the last row: no row moves
    rows.check("layer:2x2x4")
    rows.update(2, 1)
    rows.drafter.end(0)
    rows.begin(7, row=0)
    rows.check("layer:3")
    rows.begin(5)
    rows.update(1, 1, 1)
    rows.check("layer:3")


def test_a_prompt_of_one_token_is_drafted_for_and_then_forgotten():
    rows = world()
    rows.begin(1, 5)
    draft = rows.propose("layer:3")
    assert ((draft.tokens_BN >= 0) & (draft.tokens_BN < V)).all()
    assert draft.tokens_BN[1].tolist() == rows.chain(rows.samples[1], 3)[0]
    rows.update(2, 1)
    rows.check("layer:3")


def test_what_waits_is_bounded_and_a_row_goes_on_with_what_it_still_has():
    rows = world(window=4)
    rows.begin(30, 9, 3)
    for sample in rows.samples:
        sample.forgotten = max(0, len(sample.tokens) - 1 - 4)
    rows.check("layer:2")
    for _ in range(20):
        rows.update(1, 2, 1)
        assert rows.drafter._backlog.num_pairs <= 6 * 4
    for row, sample in enumerate(rows.samples):
        sample.forgotten = rows.drafter._backlog.rows[row].first
        assert 4 <= len(sample.tokens) - sample.forgotten <= 2 * 8
    rows.check("layer:3")
    rows.update(1, 2, 1)
    rows.check("layer:3x2x4")
    rows.end(1)
    rows.end(1)
    rows.update(1)
    rows.check("layer:3")


def test_three_taps_are_fused_and_guesses_take_their_place():
    rows = world(taps=3)
    rows.begin(9, 4)
    rows.check("layer:3")
    rows.update(2, 1)
    rows.check("layer:3x2x4")


def test_new_weights_draft_from_the_next_proposal_on():
    rows = world()
    rows.begin(9)
    rows.check("layer:3")
    other = layer_for(rows.model)
    rows.drafter.replace(other, version=7)
    assert rows.drafter.version == 7
    rows.layer = other
    rows.end(0)
    rows.begin(9, 5)
    rows.check("layer:3")
    narrow = LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=32, num_attention_heads=4))
    with pytest.raises(ValueError, match="another shape"):
        rows.drafter.replace(DraftLayer.of(narrow.config), version=8)
    assert rows.drafter.version == 7


def test_weights_that_are_trained_on_do_not_change_those_that_draft():
    rows = world()
    rows.begin(9)
    before = rows.chain(rows.samples[0], 4)[0]
    with torch.no_grad():
        for parameter in rows.layer.parameters():
            parameter.zero_()
    assert rows.propose("layer:4").tokens_BN[0].tolist() == before


def test_the_policy_s_ends_are_read_where_they_are_and_never_written():
    rows = world()
    before = checksum(rows.model)
    rows.begin(9, 5)
    rows.check("layer:4")
    rows.drafter.replace(layer_for(rows.model), version=1)
    assert checksum(rows.model) == before
    rows.layer = layer_for(rows.model)
    rows.drafter.replace(rows.layer, version=2)
    with torch.no_grad():
        for end in rows.ends:
            end.add_(torch.randn_like(end))
    while rows.samples:
        rows.end(0)
    rows.begin(8, 6)
    rows.check("layer:4")


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_in_rejection_mode_it_says_what_each_token_was_drawn_from(temperature):
    rows = world(mode="rejection")
    rows.begin(9, 5, temperatures=(temperature,))
    draft = rows.check("layer:3")
    for row, sample in enumerate(rows.samples):
        tokens, _, logq = rows.chain(sample, 3)
        if temperature == 0:
            logq = torch.full_like(logq, -torch.inf)
            logq[range(3), tokens] = 0.0
        torch.testing.assert_close(draft.logq_BNV[row], logq.float())


def test_what_it_cannot_do_is_refused():
    rows = world(mode="rejection")
    rows.begin(9)
    with pytest.raises(ValueError, match="arm in rejection mode must be a chain, got layer:2x2x4"):
        rows.propose("layer:2x2x4")
    with pytest.raises(ValueError, match=r"must be layer.*, got suffix:2"):
        rows.propose("suffix:2")
    with pytest.raises(ValueError, match=r"must be layer.*, got off"):
        rows.drafter.propose(OFF, 1, rows, torch.ones(1))
    rows.propose("layer:2")
    with pytest.raises(ValueError, match="row 0 has no step since its last draft"):
        rows.propose("layer:2")
    with pytest.raises(ValueError, match="2 rows is requested, but only 1 of them have a sample"):
        rows.drafter.propose(parse_arm("layer:2"), 2, rows, torch.ones(2))
    with pytest.raises(ValueError, match=r"the policy's head must be of shape \(40, 24\)"):
        LayerDrafter(rows.layer, (rows.ends[0], rows.ends[1][1:]), rows=1, max_tokens=9)


@torch.no_grad()
def test_the_feature_of_each_position_meets_the_token_after_it():
    """A real policy's features are recomputed offline from the text alone."""
    model = policy("qwen3")
    target = Target.of(model, rows=2, max_tokens=60)
    rows = World(layer_for(model), model)
    rows.drafter = LayerDrafter.of(rows.layer, target)
    rows.samples = [Sample(seed, count) for seed, count in ((1, 8), (2, 5))]
    prompts = [torch.tensor(sample.tokens) for sample in rows.samples]
    rows.drafter.begin(
        [
            RowStart(i, -1, s.tokens[:], prefilled(target, prompts[i][:-1], i))
            for i, s in enumerate(rows.samples)
        ]
    )
    for accepted in ((0, 2), (3, 1)):
        offline(rows)
        draft = rows.check("layer:3")
        roots = torch.tensor([[sample.tokens[-1]] for sample in rows.samples])
        lengths = [len(sample.tokens) - 1 for sample in rows.samples]
        _, hidden = target.step(torch.cat([roots, draft.tokens_BN], 1), lengths)
        # Some of the drafted tokens are accepted, and one more is drawn.
        emitted = [[*draft.tokens_BN[i, :n].tolist(), 7] for i, n in enumerate(accepted)]
        longest = max(accepted) + 1
        kept = torch.arange(longest) <= torch.tensor(accepted)[:, None]
        for sample, tokens in zip(rows.samples, emitted, strict=True):
            sample.tokens += tokens
        rows.drafter.update(StepUpdate(emitted, hidden[:, :longest] * kept[:, :, None]))
    offline(rows)
    rows.check("layer:3")


def offline(rows):
    for sample in rows.samples:
        tokens = torch.tensor([sample.tokens[:-1]])
        sample.features = rows.model(tokens, output_hidden_states=True).hidden_states[-1][0]


def test_half_precision_drafts_much_like_double():
    model = policy("qwen3")
    exact = World(layer_for(model), model)
    rough = World(copy.deepcopy(exact.layer).bfloat16(), policy("qwen3").bfloat16())
    for rows in (exact, rough):
        rows.begin(9, 5, 12)
    for begun in rough.samples:
        begun.features = begun.features.bfloat16()
    rough.drafter.begin([RowStart(i, -1, s.tokens, s.features) for i, s in enumerate(rough.samples)])
    a, b = (rows.propose("layer:1") for rows in (exact, rough))
    assert (a.tokens_BN == b.tokens_BN).sum() >= 2
    torch.testing.assert_close(a.scores_BN[:, 0], b.scores_BN[:, 0], rtol=0.2, atol=0.3)
