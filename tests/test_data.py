"""Shards, the loader, bytes: what is read is what was written, and wrong data cannot be used unnoticed."""

import hashlib
import json
import os
import time

import numpy as np
import pytest
import sentencepiece
import torch

import train_gpt
from conftest import VOCAB, write_shard
from train_gpt import ByteCounter, Ranks, TokenStream, TrainingLoader, UserError, Validation


def whole_stream(hp) -> np.ndarray:
    stream = TokenStream(hp.data_path, "train", hp.vocab_size)
    return np.concatenate([np.array(shard) for shard in stream.shards])


def loaders(one_rank, size, **changes):
    import dataclasses

    hp, runtime = one_rank(**changes)
    return hp, [TrainingLoader(hp, dataclasses.replace(runtime, ranks=Ranks(rank, size))) for rank in range(size)]


def test_batches_are_the_stream_in_order(one_rank):
    hp, (loader,) = loaders(one_rank, 1, SHUFFLE_SEED=0)
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
    hp, (loader,) = loaders(one_rank, 1, SHUFFLE_SEED=0)
    per_step = hp.train_batch_tokens // hp.train_seq_len
    late = [loader.batch(step).clone() for step in range(loader.blocks // per_step + 2)]
    assert torch.equal(loader.batch(1), late[1]), "batch number 1 is the same whenever it is asked for"
    first_again = loader.blocks % per_step
    rows = late[loader.blocks // per_step]
    assert torch.equal(rows[first_again:], late[0][: per_step - first_again]), "after the last row comes the first"


def test_shuffled_epochs_hold_every_row_once(one_rank):
    hp, (loader,) = loaders(one_rank, 1, SHUFFLE_SEED=5)
    epochs = [[loader._permuted(epoch, i) for i in range(loader.blocks)] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(loader.blocks))
    assert epochs[0] != epochs[1] != list(range(loader.blocks))
    for changes in (
        {"SHUFFLE_SEED": 6},
        {"SHUFFLE_SEED": 5, "SEED": 2},
    ):  # fault D4: seeds did not tell how much the order of data matters
        _, (other,) = loaders(one_rank, 1, **changes)
        assert [other._permuted(0, i) for i in range(loader.blocks)] != epochs[0]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot be told")
def test_rows_are_announced_before_they_are_read(one_rank, monkeypatch):
    """A disk can then fetch them side by side."""
    calls, pread = [], os.pread
    monkeypatch.setattr(
        os, "posix_fadvise", lambda file, offset, count, what: calls.append(("announced", file, offset, count, what))
    )
    monkeypatch.setattr(
        os,
        "pread",
        lambda file, count, offset: calls.append(("read", file, offset, count)) or pread(file, count, offset),
    )
    _, (loader,) = loaders(one_rank, 1)
    loader.batch(0)
    loader.close()
    first = [call[0] for call in calls].index("read")
    told, read = calls[:first], [call for call in calls[first:] if call[0] == "read"]
    assert len(told) == loader.rows and {call[4] for call in told} == {os.POSIX_FADV_WILLNEED}
    assert {call[1:3] for call in told} <= {call[1:3] for call in read}, "the same places of the same files"


def test_shuffled_rows_come_from_all_over_the_shards(one_rank):
    """A batch of the sequential order is one stretch of text; a shuffled one is spread over the whole stream."""
    hp, (loader,) = loaders(one_rank, 1)
    assert hp.shuffle_seed == 1, "shuffled unless asked otherwise"
    starts = np.array([loader._permuted(0, i) for i in range(hp.train_batch_tokens // hp.train_seq_len)])
    assert starts.min() < loader.blocks / 4 and starts.max() > 3 * loader.blocks / 4 and np.ptp(starts) > len(starts)


@pytest.mark.parametrize("seed", [0, 4])
def test_rows_begin_at_documents_where_they_can(one_rank, seed):
    """With ALIGN_TO_BOS each block gives one row, from the block's first BOS on, or from its start if it has none."""
    hp, (loader,) = loaders(one_rank, 1, ALIGN_TO_BOS=1, SHUFFLE_SEED=seed)
    tokens, per_step, aligned = whole_stream(hp), hp.train_batch_tokens // hp.train_seq_len, 0
    rows = torch.cat([loader.batch(step) for step in range(loader.blocks // per_step)]).numpy()
    for i, row in enumerate(rows):
        block = tokens[loader._permuted(0, i) * 32 :][:32]
        begins = np.flatnonzero(block == train_gpt.BOS)
        start = loader._permuted(0, i) * 32 + (begins[0] if len(begins) else 0)
        start = min(start, len(tokens) - 33)  # the last row must not reach over the end
        assert (row == tokens[start : start + 33]).all()
        aligned += len(begins) > 0 and row[0] == train_gpt.BOS
    assert aligned > 5, "the test data have documents"
    assert loader._row((loader.blocks - 1) * 32).shape == (33,)
    _, several = loaders(one_rank, 3, ALIGN_TO_BOS=1, SHUFFLE_SEED=seed)
    assert torch.equal(torch.cat([part.batch(2) for part in several]), loader.batch(2)), "whatever the number of ranks"


def test_the_next_step_is_all_the_state(one_rank):
    """A new loader asked for step n goes on exactly as the old one does."""
    _, (old,) = loaders(one_rank, 1, SHUFFLE_SEED=9)
    before = [old.batch(step) for step in range(12)]
    _, (new,) = loaders(one_rank, 1, SHUFFLE_SEED=9)
    for step in range(7, 12):
        assert torch.equal(new.batch(step), before[step])


def test_batches_are_ready_ahead(one_rank):
    """While one batch is in use, the next three are read."""
    _, (loader,) = loaders(one_rank, 1)
    for step in range(5):
        loader.batch(step)
    deadline = time.monotonic() + 10
    while loader.ready.qsize() < loader.AHEAD and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [step for step, _ in loader.ready.queue] == [5, 6, 7]
    loader.close()
    assert not loader.thread.is_alive()


def test_bytes_by_the_rule_equal_the_text(data):
    """Every document's bytes are those of its text; a leading space after BOS is not charged (fault B29)."""
    counter = ByteCounter(str(data / "tokenizer.model"), VOCAB)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data / "tokenizer.model"))
    for text in (
        "plain words",
        "x",
        "two  spaces",
        "caf\u00e9 \u4e2d\u6587 \U0001f600",
        "tab\there",
        "return train_gpt(1.5)",
    ):
        tokens = np.array([train_gpt.BOS, *pieces.encode(text)], dtype=np.uint16)
        assert counter.count(tokens).sum() == len(pieces.decode(tokens[1:].tolist()).encode())


def test_byte_pieces_count_one_and_boundaries_nothing(data):
    counter = ByteCounter(str(data / "tokenizer.model"), VOCAB)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data / "tokenizer.model"))
    byte, spaced = (
        pieces.piece_to_id("<0xE4>"),
        next(i for i in range(VOCAB) if pieces.id_to_piece(i).startswith("\u2581") and len(pieces.id_to_piece(i)) == 3),
    )
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
    elif kind == "odd byte":
        write_shard(path, tokens)
        path.write_bytes(path.read_bytes() + b"\0")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "unreadable":
        path.symlink_to(path)  # in circles: what even root cannot read
    elif kind == "no tokens":
        write_shard(path, tokens[:0])
    elif kind == "folder":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    "kind, part",
    [("magic", "20240520"), ("version", "version 2"), ("longer", "promises 295"), ("shorter", "promises 297"), ("empty", "header"),
     ("odd byte", "has 1617 bytes, but its header promises 296 tokens in 1616"), ("unreadable", "cannot read shard"),
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
    _, (loader,) = loaders(one_rank, 1, DATA_PATH=tmp_path, SHUFFLE_SEED=0)
    loader.batch(0)
    with pytest.raises(UserError, match=f"000000.bin holds token {VOCAB}.*VOCAB_SIZE"):
        loader.batch(1)


@pytest.mark.parametrize("change", ["cut short", "rewritten", "replaced", "removed"])
def test_a_shard_that_changes_during_the_run_is_named(tmp_path, one_rank, change):
    """Cut short, it would even kill the process: pages of a mapping beyond the file's end cannot be read."""
    path = tmp_path / "fineweb_train_000000.bin"
    write_shard(path, np.full(500_000, 5))
    _, (loader,) = loaders(one_rank, 1, DATA_PATH=tmp_path)
    loader.batch(0)
    if change == "cut short":
        os.truncate(path, 2000)
    elif change == "rewritten":
        os.utime(path, ns=(0, 0))
    elif change == "replaced":
        write_shard(tmp_path / "new", np.full(500_000, 6))
        os.utime(tmp_path / "new", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
        (tmp_path / "new").rename(path)
    else:
        path.unlink()
    with pytest.raises(UserError, match="fineweb_train_000000.bin has changed or vanished"):
        loader.batch(600)


def test_a_shard_that_is_cut_short_while_it_is_read_is_named(tmp_path):
    """After the look at the file's version, in the middle of reading: a mapping would end the process here."""
    path = tmp_path / "fineweb_train_000000.bin"
    write_shard(path, np.full(500_000, 5))
    stream = train_gpt.TokenStream(tmp_path, "train", VOCAB)
    stream._version = lambda path: stream.versions[0]
    os.truncate(path, 2001)
    with pytest.raises(UserError, match="fineweb_train_000000.bin has changed or vanished"):
        stream.read(400_000, 100)
    with pytest.raises(UserError, match="fineweb_train_000000.bin has changed or vanished"):
        stream.read(400, 100)


def with_manifest(data, folder, **changes):
    """A copy of the data with a manifest."""
    for path in data.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    files = {path.name: {"bytes": path.stat().st_size} for path in folder.glob("*.bin")}
    digest = hashlib.sha256((folder / "tokenizer.model").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"files": files, "tokenizer": {"sha256": digest}, **changes}))
    return {"DATA_PATH": folder, "TOKENIZER_PATH": folder / "tokenizer.model"}


def test_data_as_the_manifest_says_are_used(tmp_path, data, one_rank):
    hp, runtime = one_rank(**with_manifest(data, tmp_path))
    assert Validation(hp, runtime.device).targets > 0


def test_another_tokenizer_of_the_same_size_is_named(tmp_path, data, one_rank):
    hp, runtime = one_rank(**with_manifest(data, tmp_path, tokenizer={"sha256": "0" * 64}))
    with pytest.raises(UserError, match="TOKENIZER_PATH=.*tokenizer.model is not the tokenizer that made the shards"):
        Validation(hp, runtime.device)


def test_a_validation_split_that_is_not_whole_is_named(tmp_path, data, one_rank):
    hp, runtime = one_rank(**with_manifest(data, tmp_path))
    (tmp_path / "fineweb_val_000001.bin").unlink()
    with pytest.raises(UserError, match="fineweb_val_000001.bin is missing"):
        Validation(hp, runtime.device)
    write_shard(tmp_path / "fineweb_val_000001.bin", np.full(3, 5))
    with pytest.raises(UserError, match="fineweb_val_000001.bin is missing or not of"):
        Validation(hp, runtime.device)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"files": [], "tokenizer": {"sha256": ""}}',
        b'{"files": {"fineweb_val_0.bin": 3}, "tokenizer": 3}',
    ],
)
def test_a_broken_manifest_is_named(tmp_path, data, one_rank, content):
    hp, runtime = one_rank(**with_manifest(data, tmp_path))
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(UserError, match="manifest.json cannot be read as a manifest"):
        Validation(hp, runtime.device)


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


def test_files_that_would_fill_the_memory_are_refused(tmp_path, data, one_rank, monkeypatch):
    """Sparse files of any length cost a stranger nothing: sizes are looked at before anything is read."""
    for name, part in (
        ("tokenizer.model", "TOKENIZER_PATH .* over the limit"),
        ("manifest.json", "the manifest .* over the limit"),
    ):
        with open(tmp_path / name, "wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(UserError, match=part):
            train_gpt.check_manifest(str(tmp_path), "") if name == "manifest.json" else ByteCounter(
                str(tmp_path / name), VOCAB
            )
    write_shard(tmp_path / "fineweb_val_000000.bin", np.arange(10), count=(1 << 31) - 1)
    with pytest.raises(UserError, match="its header promises 2147483647 tokens"):
        TokenStream(str(tmp_path), "val", VOCAB)
    hp, runtime = one_rank()
    monkeypatch.setattr(train_gpt, "MAX_VALIDATION", 100)
    with pytest.raises(UserError, match="validation tokens, over the limit of 100"):
        Validation(hp, runtime.device)
