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
    path = tmp_path / "t.model"
    train_pieces(path, lines, size, hard_vocab_limit=False, **VERBATIM, **options)
    refused = train_gpt.refused_pairs(str(path))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = list(range(pieces.vocab_size()))
    texts = pieces.id_to_piece(ids)
    special = [pieces.is_control, pieces.is_unknown, pieces.is_byte]
    symbols = options.get("user_defined_symbols", [])
    normal = [i for i in ids if not any(is_it(i) for is_it in special) and texts[i] not in symbols]
    others = sorted(set(ids) - set(normal))
    assert len(normal) > 30 and not refused[others].any() and not refused[:, others].any()
    pairs = [(a, b) for a in normal for b in normal]
    encoded = pieces.encode([texts[a] + texts[b] for a, b in pairs])
    never = np.array([found != list(pair) for found, pair in zip(encoded, pairs, strict=True)])
    if not symbols:  # a text that a symbol cuts is another one
        assert (never == refused[tuple(np.transpose(pairs))]).all()
    assert never[refused[tuple(np.transpose(pairs))]].all() and refused.sum() > 200


def test_no_pair_of_any_text_is_refused(tmp_path):
    """Text of every script and category, and runs of what merges overlap in."""
    path = tmp_path / "t.model"
    train_pieces(path, made_lines(2000), 420, hard_vocab_limit=False, character_coverage=0.99)
    refused = train_gpt.refused_pairs(str(path))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    characters = [chr(c) for c in range(32, 0x3000) if unicodedata.category(chr(c)) != "Cs"]
    generator = np.random.default_rng(0)
    texts = ["".join(generator.choice(characters, 200)) for _ in range(50)]
    texts += [part * n for part in ("a", "the", " ", "  th", "--", "\n") for n in range(1, 60)]
    texts += ["".join(generator.choice(list(" etha.n"), 300)) for _ in range(200)]
    for ids in pieces.encode(texts):
        assert not refused[ids[:-1], ids[1:]].any()


def test_a_tokenizer_without_merges_is_an_error(tmp_path):
    path = tmp_path / "t.model"
    train_pieces(path, made_lines(2000), 420, hard_vocab_limit=False, model_type="unigram")
    with user_error("CANONICAL_MASK=1 needs a BPE model"):
        train_gpt.refused_pairs(str(path))


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
    plain, model = scored(**changes)
    masked, _ = scored(CANONICAL_MASK=1, **changes)
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
def test_test_time_training_learns_with_the_mask(scored, mode, monkeypatch):
    """Every forward gets it, those that learn too."""
    rates = {"TTT_LR": 0.05, "TTT_LORA_LR": 0.01, "TTT_CHUNK_TOKENS": 300, "TTT_LORA_CHUNK": 24}
    knobs = {"CANONICAL_MASK": 1, "NUM_LAYERS": 1, "XSA_LAST_N": 1, "TTT_ENABLED": 1, **rates}
    scorer, model = scored(TTT_MODE=mode, **knobs)
    masks, forward = [], scorer.forward
    noted = lambda *a, **how: masks.append(how["refused"]) or forward(*a, **how)  # noqa: E731
    scorer.forward, noted.requires_grad_ = noted, forward.requires_grad_
    noted.parameters = forward.parameters
    {"sgd": train_gpt.ttt_sgd, "lora": train_gpt.ttt_lora}[mode](scorer)
    assert scorer.nats[:-1].isfinite().all()
    assert len(masks) > 3 and all(mask is scorer.val.refused for mask in masks)


def test_only_the_manifest_turns_the_mask_off_and_a_refused_target_has_a_loss(
    scored, one_rank, data, tmp_path
):
    """A refused pair at the end of the text turned the mask off for all targets (C1)."""
    folder = shutil.copytree(data, tmp_path / "data")
    shard = sorted(folder.glob("fineweb_val_*.bin"))[-1]
    tokens = train_gpt.read_shard(shard).copy()
    refused = train_gpt.refused_pairs(str(folder / "tokenizer.model"))
    tokens[-2:] = np.argwhere(refused)[0]
    digest = train_gpt.sha256_of(folder / "tokenizer.model")
    write_shard(shard, tokens, tokenizer=digest)
    losses, lines = [], []
    for path in (data, folder):
        scorer, model = scored(CANONICAL_MASK=1, DATA_PATH=path)
        scorer.score(scorer.windows())
        losses.append(scorer.nats[:-1])
    assert torch.equal(losses[0][:-2], losses[1][:-2])
    plain, _ = scored(DATA_PATH=folder)
    plain.score(plain.windows())
    assert 13 < losses[1][-1] - plain.nats[-2] <= math.log(1e6) + 1e-4
    knobs = {"CANONICAL_MASK": 1, "DATA_PATH": folder}
    train_gpt.read_validation(*one_rank(**knobs)[:1], torch.device("cpu"), lines.append)
    for canonical in (True, False):
        entry = {"tokenizer": {"sha256": digest, "canonical": canonical}}
        (folder / "manifest.json").write_text(json.dumps(entry))
        val = train_gpt.read_validation(one_rank(**knobs)[0], torch.device("cpu"), lines.append)
        assert (val.refused is not None) == canonical
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
