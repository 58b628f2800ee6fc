"""Shards, the loader, bytes: what is read is what was written, and wrong data cannot be used unnoticed."""

import numpy as np
import pytest
import sentencepiece
import torch
from conftest import VOCAB, write_shard

import train_gpt
from train_gpt import ByteCounter, Ranks, TokenStream, TrainingLoader, UserError, Validation


def whole_stream(hp) -> np.ndarray:
    stream = TokenStream(hp.data_path, "train", hp.vocab_size)
    return np.concatenate([np.array(shard) for shard in stream.shards])


def loaders(one_rank, size, **changes):
    import dataclasses

    hp, runtime = one_rank(**changes)
    return hp, [TrainingLoader(hp, dataclasses.replace(runtime, ranks=Ranks(rank, size))) for rank in range(size)]


def test_batches_are_the_stream_in_order(one_rank):
    hp, (loader,) = loaders(one_rank, 1)
    tokens = whole_stream(hp)
    rows = torch.cat([loader.batch(step) for step in range(3)]).numpy().astype(np.int64)
    for i, row in enumerate(rows):
        assert (row == tokens[i * 32 : i * 32 + 33]).all(), "a row is T tokens and the target of its last one"


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_share_the_batch_that_one_rank_has(one_rank, size, seed):
    """The data of a step do not depend on the number of ranks (in #399 they do: each span loses a token)."""
    _, (alone,) = loaders(one_rank, 1, SHUFFLE_SEED=seed)
    _, several = loaders(one_rank, size, SHUFFLE_SEED=seed)
    for step in (0, 1, 40):
        assert torch.equal(torch.cat([loader.batch(step) for loader in several]), alone.batch(step))


def test_loader_is_endless_and_repeatable(one_rank):
    hp, (loader,) = loaders(one_rank, 1)
    per_step = hp.train_batch_tokens // hp.train_seq_len
    late = [loader.batch(step).clone() for step in range(loader.epoch_rows // per_step + 2)]
    assert torch.equal(loader.batch(1), late[1]), "batch number 1 is the same whenever it is asked for"
    first_again = loader.epoch_rows % per_step
    rows = late[loader.epoch_rows // per_step]
    assert torch.equal(rows[first_again:], late[0][: per_step - first_again]), "after the last row comes the first"


def test_shuffled_epochs_hold_every_row_once(one_rank):
    hp, (loader,) = loaders(one_rank, 1, SHUFFLE_SEED=5)
    epochs = [[loader._permuted(epoch, i) for i in range(loader.epoch_rows)] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(loader.epoch_rows))
    assert epochs[0] != epochs[1] != list(range(loader.epoch_rows))
    _, (other,) = loaders(one_rank, 1, SHUFFLE_SEED=6)
    assert [other._permuted(0, i) for i in range(loader.epoch_rows)] != epochs[0]


def test_bytes_by_the_rule_equal_the_text(data):
    """Every document's bytes are those of its text; a leading space after BOS is not charged (fault B29)."""
    counter = ByteCounter(str(data / "tokenizer.model"), VOCAB)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data / "tokenizer.model"))
    for text in ("plain words", "x", "two  spaces", "caf\u00e9 \u4e2d\u6587 \U0001f600", "tab\there", "return train_gpt(1.5)"):
        tokens = np.array([train_gpt.BOS, *pieces.encode(text)], dtype=np.uint16)
        assert counter.count(tokens).sum() == len(pieces.decode(tokens[1:].tolist()).encode())


def test_byte_pieces_count_one_and_boundaries_nothing(data):
    counter = ByteCounter(str(data / "tokenizer.model"), VOCAB)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data / "tokenizer.model"))
    byte, spaced = pieces.piece_to_id("<0xE4>"), next(i for i in range(VOCAB) if pieces.id_to_piece(i).startswith("\u2581") and len(pieces.id_to_piece(i)) == 3)
    assert counter.count(np.array([byte, byte])) == [1]
    assert counter.count(np.array([byte, spaced])) == [3] and counter.count(np.array([train_gpt.BOS, spaced])) == [2]
    assert counter.count(np.array([spaced, train_gpt.BOS])) == [0]


def test_validation_counts_every_target(one_rank):
    hp, runtime = one_rank()
    val, stream = Validation(hp, runtime.device), TokenStream(hp.data_path, "val", VOCAB)
    assert val.targets == len(stream) - 1 == len(val.nbytes)


def broken_shard(folder, kind):
    path = folder / "fineweb_train_000000.bin"
    tokens = np.arange(4, 300, dtype=np.uint16)
    if kind == "magic":
        write_shard(path, tokens, magic=1)
    elif kind == "version":
        write_shard(path, tokens, version=2)
    elif kind == "longer":
        write_shard(path, tokens, count=len(tokens) - 1)
    elif kind == "shorter":
        write_shard(path, tokens, count=len(tokens) + 1)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "no tokens":
        write_shard(path, tokens[:0])
    elif kind == "folder":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    "kind, part",
    [("magic", "20240520"), ("version", "version 2"), ("longer", "promises 295"), ("shorter", "promises 297"), ("empty", "header"),
     ("no tokens", "promises 0"), ("folder", "Is a directory")],
)  # fmt: skip
def test_wrong_shards_are_named(tmp_path, kind, part):
    path = broken_shard(tmp_path, kind)
    with pytest.raises(UserError) as error:
        TokenStream(str(tmp_path), "train", VOCAB)
    assert str(path) in str(error.value) and part in str(error.value)


def test_token_outside_the_vocabulary_is_named(tmp_path, one_rank):
    tokens = np.full(2000, 5, dtype=np.uint16)
    tokens[900] = VOCAB
    write_shard(tmp_path / "fineweb_train_000000.bin", tokens)
    _, (loader,) = loaders(one_rank, 1, DATA_PATH=tmp_path)
    loader.batch(0)
    with pytest.raises(UserError, match=f"000000.bin holds token {VOCAB}.*VOCAB_SIZE"):
        loader.batch(1)


def test_too_little_data_is_named(tmp_path, one_rank):
    write_shard(tmp_path / "fineweb_train_000000.bin", np.full(32, 5))
    with pytest.raises(UserError, match="TRAIN_SEQ_LEN=32"):
        loaders(one_rank, 1, DATA_PATH=tmp_path)
    write_shard(tmp_path / "fineweb_val_000000.bin", np.full(32, 5))
    hp, runtime = one_rank(DATA_PATH=tmp_path)
    with pytest.raises(UserError, match="EVAL_SEQ_LEN=32"):
        Validation(hp, runtime.device)


def test_batch_that_ranks_cannot_share_is_named(one_rank):
    with pytest.raises(UserError, match=r"TRAIN_BATCH_TOKENS=768 .* 5 ranks .* multiple of 160"):
        loaders(one_rank, 5)


def test_tokenizer_errors(tmp_path, data, monkeypatch):
    with pytest.raises(UserError, match="TOKENIZER_PATH=.*nowhere.* not a file"):
        ByteCounter(str(tmp_path / "nowhere"), VOCAB)
    with pytest.raises(UserError, match=f"{VOCAB} pieces, but VOCAB_SIZE=1024"):
        ByteCounter(str(data / "tokenizer.model"), 1024)
    (tmp_path / "noise.model").write_bytes(b"\x00\x01noise")
    with pytest.raises(UserError, match="not a SentencePiece model"):
        ByteCounter(str(tmp_path / "noise.model"), VOCAB)
    monkeypatch.setattr(sentencepiece.SentencePieceProcessor, "piece_to_id", lambda self, piece: self.unk_id())
    with pytest.raises(UserError, match=r"U\+2581"):
        ByteCounter(str(data / "tokenizer.model"), VOCAB)
