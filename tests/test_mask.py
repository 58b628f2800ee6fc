"""The canonical mask refuses exactly the pairs of pieces that the tokenizer never emits."""

import dataclasses
import json
import math
import shutil
import unicodedata

import numpy as np
import pytest
import sentencepiece
import torch

import legality
import train_gpt
from conftest import evaluator, made, made_lines, noise, train_pieces, user_error, write_shard

# The encoder then sees a text as it is.
VERBATIM = {"normalization_rule_name": "identity", "add_dummy_prefix": False}
VERBATIM |= {"remove_extra_whitespaces": False, "character_coverage": 1.0}
# Equal letters make merges of equal scores overlap, so the leftmost decides.
REPEATED = ["aaaa aaa abababab baab bbbb abba aabaab bab" * 3, "aaaaaaa bbbbbb ababa" * 3] * 20


def learned(folder, lines, size, **options):
    """(the pairs of pieces of such a tokenizer that are refused, pieces)."""
    path = folder / "t.model"
    train_pieces(path, lines, size, hard_vocab_limit=False, **options)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return train_gpt.refused_pairs(str(path)), pieces


@pytest.mark.parametrize(
    "lines, size, options",
    [
        (made_lines(2000), 600, {}),
        (made_lines(2000), 420, {"user_defined_symbols": ["\ue001", "th"], "split_digits": True}),
        (REPEATED, 290, {"split_by_whitespace": False}),
    ],
    ids=["words", "symbols", "repeated"],
)
def test_exactly_the_pairs_that_are_never_emitted_are_refused(lines, size, options, tmp_path):
    """All pairs, by encoding them one by one."""
    refused, pieces = learned(tmp_path, lines, size, **VERBATIM, **options)
    ids = [*range(pieces.vocab_size())]
    texts = pieces.id_to_piece(ids)
    symbols = options.get("user_defined_symbols", [])
    special = lambda i: pieces.is_control(i) or pieces.is_unknown(i) or pieces.is_byte(i)  # noqa: E731
    others = [i for i in ids if special(i) or texts[i] in symbols]
    normal = sorted({*ids} - {*others})
    assert len(normal) > 30 and not refused[others].any() and not refused[:, others].any()
    pairs = np.array([(a, b) for a in normal for b in normal])
    encoded = pieces.encode([texts[a] + texts[b] for a, b in pairs])
    never = np.array([found != [*pair] for found, pair in zip(encoded, pairs, strict=True)])
    found = refused[tuple(pairs.T)]
    if not symbols:  # a text that a symbol cuts is another one
        assert (never == found).all()
    assert never[found].all() and refused.sum() > 200


def test_no_pair_of_any_text_is_refused(tmp_path):
    """Text of every script and category, and runs of what merges overlap in."""
    refused, pieces = learned(tmp_path, made_lines(2000), 420, character_coverage=0.99)
    characters = [chr(c) for c in range(32, 0x3000) if unicodedata.category(chr(c)) != "Cs"]
    generator = np.random.default_rng(0)
    texts = ["".join(generator.choice(characters, 200)) for _ in range(50)]
    texts += [part * n for part in ("a", "the", " ", "  th", "--", "\n") for n in range(1, 60)]
    texts += ["".join(generator.choice(list(" etha.n"), 300)) for _ in range(200)]
    for ids in pieces.encode(texts):
        assert not refused[ids[:-1], ids[1:]].any()


def test_a_tokenizer_without_merges_is_an_error(tmp_path):
    with user_error("CANONICAL_MASK=1 needs a BPE model"):
        learned(tmp_path, made_lines(2000), 420, model_type="unigram")


@pytest.fixture
def scored(one_rank):
    """A function of knobs: (evaluator, model)."""

    def make(**changes):
        hp, runtime = one_rank(**changes)
        model, val = noise(made(hp, runtime.attend)), train_gpt.read_validation(hp, runtime.device)
        return evaluator(model, val, hp, runtime, 8), model

    return make


@pytest.mark.parametrize("changes", [{}, {"EVAL_MODE": "banded", "EVAL_SEQ_LEN": 8}])
def test_the_odds_of_refused_tokens_are_a_millionth(scored, changes):
    (plain, model), (masked, _) = (scored(CANONICAL_MASK=on, **changes) for on in (0, 1))
    assert plain.val.refused is None and masked.val.refused.any()
    for one in (plain, masked):
        one.score(one.windows())
    gain = plain.nats[:-1] - masked.nats[:-1]
    assert gain.min() > -1e-5 and gain.max() > 0.01
    ids = masked.val.tokens[None, :24].long()
    odds = model(ids).double().softmax(-1) * (1 - (1 - 1e-6) * masked.val.refused[ids].double())
    probabilities = model(ids, refused=masked.val.refused).double().softmax(-1)
    torch.testing.assert_close(probabilities, odds / odds.sum(-1, keepdim=True), rtol=1e-5, atol=0)


@pytest.mark.parametrize("mode", ["sgd", "lora"])
def test_test_time_training_learns_with_the_mask(scored, mode):
    """Every forward gets it, those that learn too."""
    knobs = {"CANONICAL_MASK": 1, "NUM_LAYERS": 1, "XSA_LAST_N": 1, "TTT_ENABLED": 1}
    knobs |= {"TTT_LR": 0.05, "TTT_LORA_LR": 0.01, "TTT_CHUNK_TOKENS": 300, "TTT_LORA_CHUNK": 24}
    scorer, model = scored(TTT_MODE=mode, **knobs)
    masks, forward = [], scorer.forward
    noted = lambda *a, **how: masks.append(how["refused"]) or forward(*a, **how)  # noqa: E731
    for name in ("parameters", "named_parameters", "requires_grad_"):
        setattr(noted, name, getattr(forward, name))
    scorer.forward = noted
    getattr(train_gpt, f"ttt_{mode}")(scorer)
    assert scorer.nats[:-1].isfinite().all()
    assert len(masks) > 3 and all(mask is scorer.val.refused for mask in masks)


def test_only_the_manifest_turns_the_mask_off_and_a_refused_target_has_a_loss(
    scored, hyperparameters, data, tmp_path
):
    """A refused pair at the end of the text turned the mask off for all targets (C1)."""
    folder = shutil.copytree(data, tmp_path / "data")
    shard = sorted(folder.glob("fineweb_val_*.bin"))[-1]
    tokens, pieces = train_gpt.read_shard(shard).copy(), folder / "tokenizer.model"
    refused, digest = train_gpt.refused_pairs(str(pieces)), train_gpt.sha256_of(pieces)
    tokens[-2:] = np.argwhere(refused)[0]
    write_shard(shard, tokens, tokenizer=digest)
    losses, lines = [], []
    knobs = {"CANONICAL_MASK": 1, "DATA_PATH": folder}
    for one in ({"CANONICAL_MASK": 1}, knobs, {"DATA_PATH": folder}):
        scorer, _ = scored(**one)
        scorer.score(scorer.windows())
        losses.append(scorer.nats[:-1])
    before, masked, plain = losses
    assert torch.equal(before[:-2], masked[:-2])
    assert 13 < masked[-1] - plain[-1] <= math.log(1e6) + 1e-4
    hp = hyperparameters(**knobs)
    read = lambda: train_gpt.read_validation(hp, torch.device("cpu"), lines.append)  # noqa: E731
    assert read().refused is not None
    for canonical in (True, False):
        entry = {"tokenizer": {"sha256": digest, "canonical": canonical}}
        (folder / "manifest.json").write_text(json.dumps(entry))
        assert (read().refused is not None) == canonical
    targets = refused[tokens[:-1], tokens[1:]].sum()
    count = f"note: CANONICAL_MASK refuses {targets} targets: 13.8 nats more for each"
    off = "note: CANONICAL_MASK is off: manifest.json says canonical: false"
    assert lines == [count, count, off]


def test_a_mask_that_follows_from_the_validation_text_is_caught(one_rank, monkeypatch):
    """It breaks C1. tests/test_legality.py probes the honest one."""
    hp, runtime = one_rank(CANONICAL_MASK=1, NUM_LAYERS=1, XSA_LAST_N=1)
    hp = dataclasses.replace(hp, vocab_size=64)
    evaluate = legality.evaluator_of(train_gpt, hp, runtime, noise(made(hp, runtime.attend)))
    read = train_gpt.read_validation

    def deciding(hp, device, log=print):
        val = read(hp, device, log)
        if val.refused[val.tokens[:-1].long(), val.tokens[1:].long()].any():
            val.refused = None
        return val

    monkeypatch.setattr(train_gpt, "read_validation", deciding)
    assert "C1: " in legality.probe_all(train_gpt, hp, evaluate)
