"""The canonical mask refuses exactly the pairs of pieces that the tokenizer never emits."""

import dataclasses
import unicodedata

import numpy as np
import pytest
import sentencepiece
import torch

import legality
import train_gpt
from conftest import ROOT, evaluator, made, noise, train_pieces, user_error
from train_gpt import BOS

# The encoder then sees a text as it is.
VERBATIM = {"normalization_rule_name": "identity", "add_dummy_prefix": False}
VERBATIM |= {"remove_extra_whitespaces": False, "character_coverage": 1.0}
# Equal letters make merges of equal scores overlap, so the leftmost decides.
REPEATED = ["aaaa aaa abababab baab bbbb abba aabaab bab" * 3, "aaaaaaa bbbbbb ababa" * 3] * 20


def words() -> list[str]:
    return (ROOT / "docs" / "log.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    "lines, size, options",
    [
        (words(), 600, {}),
        (words(), 420, {"user_defined_symbols": ["\ue001", "th"], "split_digits": True}),
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
    train_pieces(path, words(), 420, hard_vocab_limit=False, character_coverage=0.99)
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
    train_pieces(path, words(), 420, hard_vocab_limit=False, model_type="unigram")
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
def test_refused_tokens_have_no_probability_and_targets_more(scored, changes):
    """Each target's probability is divided by what the allowed tokens have together."""
    plain, model = scored(**changes)
    masked, _ = scored(CANONICAL_MASK=1, **changes)
    assert plain.val.refused is None and masked.val.refused.any()
    for one in (plain, masked):
        one.score(one.windows())
    gain = plain.nats[:-1] - masked.nats[:-1]
    assert gain.min() > -1e-5 and gain.max() > 0.01
    ids = masked.val.tokens[None, :24].long()
    allowed = model(ids).softmax(-1).masked_fill(masked.val.refused[ids], 0)
    probabilities = model(ids, refused=masked.val.refused).softmax(-1)
    torch.testing.assert_close(probabilities, allowed / allowed.sum(-1, keepdim=True))


@pytest.mark.parametrize("mode", ["sgd", "lora"])
def test_test_time_training_learns_with_the_mask(scored, mode, monkeypatch):
    """Every forward gets it, those that learn too."""
    rates = {"TTT_LR": 0.05, "TTT_LORA_LR": 0.01, "TTT_CHUNK_TOKENS": 300, "TTT_LORA_CHUNK": 24}
    scorer, model = scored(CANONICAL_MASK=1, TTT_ENABLED=1, TTT_MODE=mode, **rates)
    masks, forward = [], scorer.forward
    noted = lambda *a, **how: masks.append(how["refused"]) or forward(*a, **how)  # noqa: E731
    scorer.forward, noted.requires_grad_ = noted, forward.requires_grad_
    {"sgd": train_gpt.ttt_sgd, "lora": train_gpt.ttt_lora}[mode](model, scorer)
    assert scorer.nats[:-1].isfinite().all()
    assert len(masks) > 3 and all(mask is scorer.val.refused for mask in masks)


def test_text_with_a_refused_pair_turns_the_mask_off(one_rank, data, tmp_path):
    """As of a tokenizer that samples, or of shards whose tokens were changed."""
    hp, runtime = one_rank(CANONICAL_MASK=1)
    refused = train_gpt.refused_pairs(hp.tokenizer_path)
    tokens = train_gpt.TokenStream(hp.data_path, "val", hp.vocab_size)
    text = tokens.read(0, len(tokens)).copy()
    text[5:7] = np.argwhere(refused)[0]
    count = refused[text[:-1], text[1:]].sum()
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt.TokenStream, "read", lambda *_: text)
        val = train_gpt.read_validation(hp, runtime.device, lines.append)
    assert val.refused is None and count
    what = f"it would refuse {count} targets of the validation text"
    assert lines == [f"note: CANONICAL_MASK is off: {what}"]


@pytest.mark.parametrize("way", [{}, {"TTT_ENABLED": 1, "TTT_MODE": "lora", "TTT_LORA_CHUNK": 24}])
def test_the_masked_score_keeps_the_conditions(one_rank, way):
    """C1 to C4."""
    hp, runtime = one_rank(CANONICAL_MASK=1, **way)
    hp = dataclasses.replace(hp, vocab_size=64)
    model = noise(made(hp, runtime.attend))
    evaluate = legality.evaluator_of(train_gpt, hp, runtime, model)
    assert legality.probe_all(train_gpt, hp, evaluate) == ""
    assert evaluate(legality.random_stream(legality.TARGETS, 64, BOS)).isfinite().all()
