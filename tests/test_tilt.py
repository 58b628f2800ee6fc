"""The n-gram tilt: hints from earlier targets alone, one softmax, and every final score has it."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import legality
import train_gpt
from conftest import made, noise

WAYS = {
    "sliding": {},
    "banded": dict(EVAL_MODE="banded", EVAL_SEQ_LEN=8, EVAL_STRIDE=8, MICRO_BATCH_TOKENS=40),
    "sgd": dict(TTT_ENABLED=1, TTT_CHUNK_TOKENS=40, TTT_LR=0.05),
    "lora": dict(TTT_ENABLED=1, TTT_MODE="lora", TTT_LORA_CHUNK=24, TTT_LORA_LR=0.05),
}
STREAM = legality.random_stream(legality.TARGETS, 32, train_gpt.BOS)


def repetitive(seed: int) -> np.ndarray:
    """Five texts of 20 tokens, over and over, with a wrong token now and then."""
    random = np.random.default_rng(seed)
    texts = random.integers(0, 4, size=(5, 20))
    stream = texts[random.integers(5, size=100)].ravel()
    return np.where(random.random(2000) < 0.01, random.integers(0, 4, size=2000), stream)


def test_hints_do_not_depend_on_hashes(monkeypatch):
    """Not if all were equal: they only leave out what occurs once. tests/test_conformance.py has the
    hints of the published program."""
    for number, size in enumerate((2000, 2000, 2000, 300, 16, 15, 1)):
        targets = repetitive(number)[:size].astype(np.int32)
        found = train_gpt.ngram_hints(targets)
        with monkeypatch.context() as patch:
            patch.setattr(train_gpt.np, "flatnonzero", lambda flags: np.arange(len(flags)))
            assert train_gpt.ngram_hints(targets).tolist() == found.tolist()
        share, wrong = np.mean(found >= 0), (found != targets)[found >= 0].any()
        assert 0.3 < share < 0.95 and wrong if size >= 300 else not share


@pytest.fixture
def evaluator(one_rank):
    """A function of knobs: (hyperparameters, a function of tokens (n + 1,): their losses (n,))."""

    def make(comm=None, **changes):
        hp, runtime = one_rank(NUM_LAYERS=1, XSA_LAST_N=1, **changes)
        hp = dataclasses.replace(hp, vocab_size=32)
        runtime = dataclasses.replace(runtime, comm=comm or runtime.comm)
        return legality.evaluator_of(train_gpt, hp, runtime, noise(made(hp, runtime.attend)))

    return make


@pytest.mark.parametrize("mask", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_every_score_has_the_hints_and_training_has_not(evaluator, way, mask):
    """Without a hint a loss is the same bit for bit, also after the model has learned."""
    knobs = WAYS[way] | {"CANONICAL_MASK": mask}
    plain, tilted = (evaluator(**knobs, NGRAM_TILT=on)(STREAM) for on in (0, 1))
    targets = STREAM[1:].numpy()
    hints = train_gpt.ngram_hints(targets)
    right, wrong, none = (torch.tensor(x) for x in (hints == targets, hints >= 0, hints < 0))
    wrong &= ~right
    assert right.sum() > 10 and wrong.any()
    assert torch.equal(plain[none], tilted[none])
    chance = (-plain[right]).exp()
    expected = plain[right] + (1 + chance * math.expm1(2.625)).log() - 2.625
    torch.testing.assert_close(tilted[right], expected, rtol=1e-4, atol=1e-5)
    change = tilted[wrong] - plain[wrong]
    assert (change >= 0).all() and (change < 2.625).all()


@pytest.mark.parametrize("way", ["sliding", "banded"])
def test_ranks_agree(evaluator, way):
    ranks = (train_gpt.Comm(rank, size) for rank, size in ((0, 1), (0, 2), (1, 2)))
    one, *two = (evaluator(comm, **WAYS[way], NGRAM_TILT=1)(STREAM) for comm in ranks)
    assert all(nats.isnan().any() for nats in two)
    torch.testing.assert_close(sum(nats.nan_to_num(0) for nats in two), one)


def test_a_tilt_that_cheats_is_caught(evaluator, monkeypatch):
    """Counts of what comes later break C1, and a loss without the new softmax C2."""
    evaluate, hints = evaluator(NGRAM_TILT=1), train_gpt.ngram_hints
    late = lambda targets: hints(np.tile(targets, 2))[len(targets) :]  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "ngram_hints", late)
        assert legality.future(evaluate, STREAM, 32, legality.CUTS).startswith("C1: ")
        assert legality.truncation(evaluate, STREAM, legality.CUTS).startswith("C1: ")
    monkeypatch.setattr(train_gpt.math, "expm1", lambda nats: 0.0)
    for probed in (44, 50):  # what `legality.probe_all` probes
        assert legality.distribution(evaluate, STREAM[:60], 32, (probed,)).startswith("C2: ")
