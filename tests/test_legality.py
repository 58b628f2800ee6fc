"""The probes of tools/legality.py pass for our evaluations and catch evaluators that cheat."""

import dataclasses
import math
from unittest import mock

import pytest
import torch

import legality
import train_gpt
from conftest import PARTS, ROOT, made, noise, run
from train_gpt import BOS

TILT = {"NGRAM_TILT": 1, "CANONICAL_MASK": 1}
BANDED = dict(EVAL_MODE="banded", EVAL_SEQ_LEN=8, EVAL_STRIDE=8)  # blocks score 8
LEARNING = dict(ATTN_WINDOW=5, TTT_ENABLED=1)
WAYS = {
    "plain": dict(EVAL_STRIDE=32),
    "sliding": {},
    "parts": PARTS | TILT,
    "banded": BANDED | TILT | dict(MICRO_BATCH_TOKENS=40),
    "banded windows": BANDED | dict(MICRO_BATCH_TOKENS=28, ATTN_WINDOW=3),
    "sgd": LEARNING | TILT | dict(TTT_CHUNK_TOKENS=40, TTT_LR=0.05),
    "lora": LEARNING | TILT | dict(TTT_MODE="lora", TTT_LORA_CHUNK=24, TTT_LORA_LR=0.05),
}
TARGETS, CUTS = legality.TARGETS, legality.CUTS


@pytest.fixture
def setting(one_rank):
    """A function: (way) -> (evaluator for the probes, tokens (n + 1,), hyperparameters)."""

    def make(way, together=False, **changes):
        hp, runtime = one_rank(**{**WAYS[way], **changes})
        # C2 evaluates once for each token of the vocabulary
        hp = dataclasses.replace(hp, vocab_size=32)
        model = noise(made(hp, runtime.attend))
        evaluate = legality.evaluator_of(train_gpt, hp, runtime, model, together)
        return evaluate, legality.random_stream(TARGETS, hp.vocab_size, BOS), hp

    return make


@pytest.mark.parametrize("way", WAYS)
def test_no_probe_finds_a_fault(setting, way):
    evaluate, tokens, hp = setting(way)
    assert legality.probe_all(train_gpt, hp, evaluate) == ""
    kinds = {kind for kind, _ in legality.spied(train_gpt, evaluate, tokens)}
    assert ("learn" in kinds) == (way in ("sgd", "lora"))


@pytest.mark.parametrize("way, rate", [("sgd", "ttt_lr"), ("lora", "ttt_lora_lr")])
def test_a_rate_by_the_length_of_the_text_is_caught(setting, way, rate):
    """But for the number of chunks of SGD, as in #461."""
    evaluate, _, hp = setting(way)

    def by_length(model, evaluator):
        changed = {rate: getattr(hp, rate) * evaluator.val.targets / TARGETS}
        evaluator.hp = dataclasses.replace(evaluator.hp, **changed)

    fault = legality.probe_all(train_gpt, hp, lambda tokens: evaluate(tokens, by_length))
    assert fault.startswith("C1: ") and "when the stream ends after target" in fault


# ---- Evaluators that cheat -----------------------------------------------------------------------
def chunk_sees_itself(model, evaluator):
    """Each chunk of a banded pass sees all its keys, also those behind a query."""
    full = lambda q, k, *_: torch.ones(1, 1, q.size(1), k.size(1)).bool()  # noqa: E731
    model.attend = mock.patch.object(train_gpt, "attention_mask", full)(model.attend)


def peeking(model, evaluator):
    """Attention sees one position ahead."""
    attend = model.attend
    ahead = lambda x: torch.cat((x[:, 1:], x[:, -1:]), dim=1)  # noqa: E731
    model.attend = lambda q, k, v, *seen: attend(q, k, ahead(v), *seen)


PEEKING = [(way, peeking) for way in ("sliding", "plain", "banded")]


@pytest.mark.parametrize("way, cheat", [*PEEKING, ("banded", chunk_sees_itself)])
def test_a_look_ahead_is_caught(setting, way, cheat):
    longer = dict(EVAL_SEQ_LEN=16, MICRO_BATCH_TOKENS=80) if cheat is chunk_sees_itself else {}
    evaluate, tokens, hp = setting(way, **longer)
    peeks = lambda t: evaluate(t, cheat)  # noqa: E731
    assert legality.future(peeks, tokens, hp.vocab_size, CUTS).startswith("C1")
    assert legality.truncation(peeks, tokens, CUTS).startswith("C1")


def test_a_look_at_the_next_token_alone_is_caught():
    """The loss of target t may depend on tokens[: t + 2], so on itself, and not on tokens[t + 2]."""
    tokens = legality.random_stream(TARGETS, 64, BOS)
    honest = lambda t: t.cumsum(0)[1:].double()  # noqa: E731
    ahead = lambda t: torch.cat((t[2:], t[-1:])).double()  # noqa: E731
    future = lambda f: legality.future(f, tokens, 64, CUTS)  # noqa: E731
    for probe in (future, lambda f: legality.truncation(f, tokens, CUTS)):
        assert probe(honest) == ""
        assert probe(ahead).startswith(f"C1: the loss of target {CUTS[0]} changes")


def test_probabilities_are_positive_and_sum_to_one():
    for first, last in ((0.1, 0.4), (0.1, 0.3), (0.1, 0.5), (0.0, 0.5)):
        chances = torch.tensor([first, 0.2, 0.3, last]).double()
        evaluate = lambda t, chances=chances: -chances.log()[t[1:]]  # noqa: E731
        fault = legality.distribution(evaluate, torch.zeros(5, dtype=torch.int64), 4, (2,))
        right = (first, last) == (0.1, 0.4)
        assert fault.startswith("C2: the probabilities of target 2 sum") != right, fault


def test_false_probabilities_and_losses_are_caught(setting):
    evaluate, tokens, hp = setting("sliding")

    def cheating(change):
        def cheat(model, evaluator):
            evaluator.forward = lambda *given, **named: change(model(*given, **named))

        return lambda t: evaluate(t, cheat)

    def twice(model, evaluator):
        score = evaluator.score
        evaluator.score = lambda *given: (score(*given), score(*given))

    likely = cheating(lambda nats: nats * 0.1)  # as if a cache gave every target a high probability
    sums = legality.distribution(likely, tokens[:60], hp.vocab_size, (3, 50))
    assert sums.startswith("C2")
    events = legality.spied(train_gpt, lambda t: evaluate(t, twice), tokens)
    assert "scored twice" in legality.order(events, TARGETS)
    forgetful = cheating(lambda nats: nats.masked_fill(nats > 5, math.nan))
    assert legality.complete(forgetful, tokens).startswith("C4")


def test_learning_before_scoring_is_caught(setting):
    evaluate, tokens, hp = setting("sgd")

    def early(model, evaluator):
        score, parameters = evaluator.score, list(model.parameters())

        def train_first(windows, *rest):
            begin = int(windows[1].min()) // hp.ttt_chunk_tokens * hp.ttt_chunk_tokens
            if begin + hp.ttt_chunk_tokens < TARGETS:
                gradients = train_gpt.sgd_gradients(evaluator, begin)
                parts = gradients.split([p.numel() for p in parameters])
                for p, part in zip(parameters, parts, strict=True):
                    p.detach().sub_(part.view_as(p), alpha=0.05)
            score(windows, *rest)

        evaluator.score = train_first

    cheating = lambda t: evaluate(t, early)  # noqa: E731
    assert legality.order(legality.spied(train_gpt, cheating, tokens), TARGETS).startswith("C3")
    assert legality.future(cheating, tokens, hp.vocab_size, CUTS).startswith("C1")


def test_documents_that_learn_from_later_ones_are_caught(setting, monkeypatch):
    """A goes on in the order of the stream. Backwards, a document would know a later one."""
    evaluate, tokens, hp = setting("lora")
    spans = train_gpt.Validation.spans
    backwards = mock.patch.object(train_gpt.Validation, "spans", lambda val: spans(val)[::-1])
    monkeypatch.setattr(train_gpt, "ttt_lora", backwards(train_gpt.ttt_lora))
    assert legality.future(evaluate, tokens, hp.vocab_size, CUTS).startswith("C1")
    events = legality.spied(train_gpt, evaluate, tokens)
    assert "after an update that followed later ones" in legality.order(events, TARGETS)


@pytest.mark.parametrize("together", [False, True])
def test_chunks_by_the_length_of_a_document_are_caught(setting, monkeypatch, together):
    """An earlier version chose 8 targets for documents of under 256, and 24 for longer ones."""
    evaluate, tokens, hp = setting("lora", together)

    def by_length(hp, length):
        size = 8 if length < 256 else 24
        return [(begin, begin + size) for begin in range(0, length, size)]

    monkeypatch.setattr(train_gpt, "lora_chunks", by_length)
    assert legality.future(evaluate, tokens, hp.vocab_size, CUTS).startswith("C1")


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_batches_of_documents_of_several_lengths(setting, monkeypatch, rows):
    sizes = dict(LORA_BATCH=4, LORA_CHUNKS=((16, 3), (30, 5)), LORA_ROWS=(rows, 2))
    for name, value in sizes.items():
        monkeypatch.setattr(train_gpt, name, value)
    evaluate, tokens, hp = setting("lora", together=True)
    tokens[[40, 60, 75, 90, 130, 150, 170, 175, 240, 270]] = BOS
    assert legality.future(evaluate, tokens, hp.vocab_size, CUTS) == ""
    assert legality.complete(evaluate, tokens) == ""


def test_the_suite_tries_every_way_of_a_run(monkeypatch):
    settings = dict(TTT_ENABLED="False", NUM_LAYERS="11", SHORT_SEQ_PARTS="64", RUN_ID="x")
    learning = settings | {"TTT_ENABLED": "True", "TTT_MODE": "sgd"}
    banded = settings | {"EVAL_MODE": "banded"}
    monkeypatch.setattr(legality, "distribution", lambda *_: "")  # the slowest probe
    assert legality.suite(train_gpt, banded) == ""
    assert legality.suite(train_gpt, banded, chunk_sees_itself).startswith("C1")
    assert legality.suite(train_gpt, settings, peeking).startswith("C1")

    def when(holds):
        return lambda model, scorer: peeking(model, scorer) if holds(scorer) else None

    in_blocks = when(lambda scorer: scorer.window > 32)
    assert "EVAL_SEQ_LEN=16" in legality.suite(train_gpt, banded, in_blocks)
    assert legality.suite(train_gpt, settings, in_blocks) == ""
    in_windows = when(lambda scorer: scorer.hp.attn_window == 5)
    windows = settings | {"ATTN_WINDOW": "256"}
    assert legality.suite(train_gpt, windows, in_windows).startswith("C1")
    assert legality.suite(train_gpt, settings | {"ATTN_WINDOW": "0"}, in_windows) == ""
    learns = when(lambda scorer: scorer.hp.ttt_enabled)
    assert "TTT_ENABLED=1" in legality.suite(train_gpt, learning, learns)
    assert legality.suite(train_gpt, settings, learns) == ""


LEAK = """
plain = Evaluator.__post_init__
def leaking(self):
    plain(self)
    forward, leak = self.forward, 1e-6 * self.val.tokens.sum()
    self.forward = lambda *given, **named: forward(*given, **named) + leak
Evaluator.__post_init__ = leaking
"""


def test_the_program_probes_a_script(tmp_path):
    (tmp_path / "leaks.py").write_text((ROOT / "train_gpt.py").read_text() + LEAK)
    (tmp_path / "other.py").write_text("print(1)")
    for script, status, part in (
        (ROOT / "train_gpt.py", 0, "C1 to C4 hold"),
        ("leaks.py", 1, "changes with tokens after target"),
        ("other.py", 1, "no probe"),
    ):
        result = run([ROOT / "tools" / "legality.py", script], {}, tmp_path, status=status)
        assert part in result.stdout + result.stderr and "Traceback" not in result.stderr
