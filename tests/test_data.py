"""Shards, the loader and byte counts: data are read as written, and wrong data are errors."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch

import train_gpt
from conftest import VOCAB, train_pieces, user_error, write_shard
from train_gpt import ByteCounter, Comm, TokenStream, TrainingLoader, read_validation


def loaders(one_rank, size, **changes):
    hp, runtime = one_rank(**changes)
    runtimes = [dataclasses.replace(runtime, comm=Comm(rank, size)) for rank in range(size)]
    return hp, [TrainingLoader(hp, each) for each in runtimes]


@pytest.mark.parametrize("changes, ranks", [({}, 8), ({"TRAIN_BATCH_TOKENS": 192}, 2)])
def test_without_a_shuffle_batches_are_those_of_399(one_rank, changes, ranks):
    """24 rows a step, so each of its 8 ranks has 3; or 6 rows, which are 2 parts of 3, the most of
    8 that divide them. The stream begins again within these steps."""
    hp, (loader,) = loaders(one_rank, 1, SHUFFLE_SEED=0, **changes)
    stream = TokenStream(hp.data_path, "train", hp.vocab_size)
    tokens = stream.read(0, len(stream))
    steps = 3 * len(tokens) // hp.train_batch_tokens
    assert loader.step_rows == 3 * ranks and steps * hp.train_batch_tokens > 2 * len(tokens)
    place, seq_len = 0, hp.train_seq_len
    for step in range(steps):
        batch = []
        for _ in range(ranks):  # each takes the next 3 * T + 1 tokens of an endless stream
            taken = tokens[np.arange(place, place + 3 * seq_len + 1) % len(tokens)]
            batch += [taken[row * seq_len :][: seq_len + 1] for row in range(3)]
            place += 3 * seq_len + 1
        assert (loader.batch(step).numpy() == np.stack(batch)).all(), f"step {step}"


@pytest.mark.parametrize("seed", [0, 7])
def test_a_batch_depends_on_nothing_but_its_number(one_rank, seed):
    """Not on when it is asked for, nor on the ranks: in #399 each span of a rank loses a token."""
    _, (loader,) = loaders(one_rank, 1, SHUFFLE_SEED=seed)
    batches = [loader.batch(step).clone() for step in range(loader.blocks // loader.step_rows + 2)]
    for size in (1, 2, 3, 4):
        _, ranks = loaders(one_rank, size, SHUFFLE_SEED=seed)
        for step in (len(batches) - 1, 1, 0):
            assert torch.equal(torch.cat([rank.batch(step) for rank in ranks]), batches[step])
            assert torch.equal(loader.batch(step), batches[step])


def test_shuffled_epochs_hold_every_row_once(one_rank):
    """Fault D4: #399's seeds did not change the order of the data."""

    def epochs(**changes) -> tuple[TrainingLoader, np.ndarray]:
        """The blocks of two epochs in their order (2, blocks)."""
        _, (loader,) = loaders(one_rank, 1, **changes)
        rows = map(loader.start, range(2 * loader.blocks))
        return loader, np.array([*rows]).reshape(2, -1) // loader.hp.train_seq_len

    assert train_gpt.Hyperparameters().shuffle_seed == 1, "shuffled by default"
    loader, (first, second) = epochs(SHUFFLE_SEED=5)
    blocks = np.arange(loader.blocks)
    assert (np.sort(first) == blocks).all() and (np.sort(second) == blocks).all()
    assert np.ptp(first[: loader.step_rows]) > loader.blocks / 2, "from all over the shards"
    for other in (second, epochs(SHUFFLE_SEED=6)[1][0], epochs(SHUFFLE_SEED=5, SEED=2)[1][0]):
        assert (other != first).any() and (other != blocks).any()


def test_batches_are_ready_ahead(one_rank):
    _, (loader,) = loaders(one_rank, 1)
    for step in range(5):
        loader.batch(step)
    assert list(loader.pending) == [5, 6, 7]
    read = [future.result(timeout=10) for future in loader.pending.values()]
    assert all(torch.equal(loader.read(5 + i), rows) for i, rows in enumerate(read))


def test_byte_pieces_count_one_and_boundaries_nothing(data, monkeypatch):
    """Also fault B29: a leading space after BOS does not count, nor after an unused piece."""
    counter = ByteCounter(str(data / "tokenizer.model"), VOCAB)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data / "tokenizer.model"))
    names = [pieces.id_to_piece(i) for i in range(VOCAB)]
    byte = names.index("<0xE4>")
    spaced = next(i for i in range(VOCAB) if names[i][0] == "\u2581" and len(names[i]) == 3)
    tokens = np.array([byte, byte, spaced, train_gpt.BOS, spaced])
    assert counter.count(tokens).tolist() == [1, 3, 0, 2]
    unused = lambda _, ids: [i == byte for i in ids]  # noqa: E731
    monkeypatch.setattr(sentencepiece.SentencePieceProcessor, "is_unused", unused)
    counter = ByteCounter(str(data / "tokenizer.model"), VOCAB)
    assert counter.count(tokens).tolist() == [0, 2, 0, 2]


def test_a_last_token_is_only_a_target():
    """It begins no document. The first token begins one, whatever it is."""
    B = train_gpt.BOS
    val = train_gpt.Validation(np.array([5, 5, B, 6, B]), np.ones(4), torch.device("cpu"))
    assert val.documents.tolist() == [0, 2] and val.spans().tolist() == [[0, 2], [2, 4]]


@pytest.fixture
def folder(data, tmp_path) -> Path:
    """A copy of the data, whose headers name no tokenizer."""
    for path in shutil.copytree(data, tmp_path / "data").glob("*.bin"):
        write_shard(path, train_gpt.read_shard(path).copy())
    return tmp_path / "data"


LORA = {"TTT_ENABLED": 1, "TTT_MODE": "lora", "TTT_LORA_CHUNK": 8}


@pytest.mark.parametrize("knobs", [{"DOC_ATTENTION": 1}, LORA])
def test_documents_need_starts(one_rank, folder, knobs):
    """Without them these knobs would change nothing, and a user would not know."""
    for shard in train_gpt.shard_paths(folder, "val"):
        tokens = np.array(train_gpt.read_shard(shard))
        write_shard(shard, np.where(tokens == train_gpt.BOS, 5, tokens))
    for changes, found in (
        ({}, "the first validation tokens"),
        (knobs, "does not mark where they"),
    ):
        hp, runtime = one_rank(DATA_PATH=folder, **changes)
        with user_error(found):
            read_validation(hp, runtime.device)


def test_a_sidecar_has_the_bytes_and_is_not_text(one_rank, folder):
    hp, runtime = one_rank(DATA_PATH=folder)
    without = read_validation(hp, runtime.device)
    tokens, lines = without.targets + 1, []
    exact, middle = np.arange(tokens) % 7, tokens // 3  # other shards than the tokens'
    first, second = (folder / f"fineweb_val_bytes_00000{i}.bin" for i in (0, 1))
    write_shard(first, exact[:middle])
    write_shard(second, exact[middle:])
    found = read_validation(hp, runtime.device, lines.append)
    used = f"note: fineweb_val_bytes_*.bin says {exact[1:].sum()} bytes, which the score uses"
    assert lines == [used] and found.nbytes.tolist() == exact[1:].tolist()
    assert torch.equal(found.tokens, without.tokens)
    assert found.total_bytes == exact[1:].sum() != without.total_bytes
    for rest, error in (
        (exact[middle:-1], f"{tokens - 1} numbers up to 6, not the bytes of the {tokens} tokens"),
        (np.append(exact[middle:], 1), f"{tokens + 1} numbers up to 6, not the bytes"),
        (exact[middle:] + (1 << 15), f"{tokens} numbers up to 32774"),
    ):
        write_shard(second, rest)
        with user_error(error):
            read_validation(hp, runtime.device)


def test_flash_attention_3_never_joins_documents():
    """More than there is room for are an error, not one long document."""
    document = torch.arange(128)[None].clamp(max=16)
    assert train_gpt.cu_seqlens(document).tolist()[:18] == [*range(17), 128]
    with pytest.raises(RuntimeError, match="out of bounds"):
        train_gpt.cu_seqlens(torch.arange(128)[None].clamp(max=17))


def test_only_their_own_tokenizer_gives_the_tokens_back(data, other_tokenizer):
    own = str(data / "tokenizer.model")
    stream = TokenStream(data, "train", VOCAB)
    tokens = stream.read(0, len(stream))
    begins = np.flatnonzero(tokens == train_gpt.BOS)
    assert len(tokens) > 30_000 and begins[0] == 0
    share = lambda text, path=own: train_gpt.reencoded(text, path)[0]  # noqa: E731
    # What a cut spoils is left out: the end of the first 20,000, the start of the first document.
    for text in (tokens, tokens[begins[9] + 2 :], tokens[: begins[begins > 500][0]]):
        assert share(text) == 1
    # Tokens without text (unknown, end of a document) need not come back, and short documents are
    # enough to tell tokenizers apart.
    words = np.flatnonzero(ByteCounter(own, VOCAB).spaced[tokens])
    pieces = sentencepiece.SentencePieceProcessor(model_file=own)
    space = tokens == pieces.piece_to_id("\u2581")
    words = words[~space[words] & ~space[words - 1]][::2]
    marked = np.insert(tokens, words, np.resize([0, 2], len(words)))
    assert share(marked) > 0.9999
    for text in (tokens, marked):
        assert 0.05 < share(text, other_tokenizer) < 0.9


def test_another_tokenizer_of_the_same_size_is_refused(one_rank, folder, other_tokenizer):
    """It has other bytes per token, so the score would be wrong."""
    shard = folder / "fineweb_val_000000.bin"
    tokens = train_gpt.read_shard(shard).copy()
    tokens[20:22] = 5  # as from a tokenizer that is almost the same
    for changes in ({"TOKENIZER_PATH": other_tokenizer}, {}):
        hp, runtime = one_rank(DATA_PATH=folder, **changes)
        with user_error(r"^\d+\.\d\d% of the first .*/tokenizer.model.* give the tokenizer that"):
            read_validation(hp, runtime.device)
        # Their own tokenizer may give other tokens as well (BPE dropout).
        entry = {"sha256": train_gpt.sha256_of(hp.tokenizer_path), "canonical": False}
        (folder / "manifest.json").write_text(json.dumps({"tokenizer": entry}))
        read_validation(hp, runtime.device)
        (folder / "manifest.json").unlink()
        write_shard(shard, tokens)


def test_bytes_of_single_characters_are_proven_by_a_sha256_alone(one_rank, tmp_path):
    """Without merges every text comes back: a Greek tokenizer counts twice the bytes."""
    letters = np.random.default_rng(1).choice(list("abcdefgh "), 20_000, p=[0.11] * 8 + [0.12])
    text = "".join(letters).split()
    greek = [word.translate({97 + i: 0x3B1 + i for i in range(8)}) for word in text]
    for name, words in (("own", text), ("other", greek)):
        train_pieces(tmp_path / f"{name}.model", words, 268)
    own, other = (str(tmp_path / f"{name}.model") for name in ("own", "other"))
    pieces = sentencepiece.SentencePieceProcessor(model_file=own)
    tokens = [train_gpt.BOS, *pieces.encode(" ".join(text))]
    names = "train_000000", "val_000000", "val_000001"
    train, val, more = (tmp_path / f"fineweb_{name}.bin" for name in names)

    def bytes_and_notes(tokenizer):
        hp, runtime = one_rank(DATA_PATH=tmp_path, TOKENIZER_PATH=tokenizer, VOCAB_SIZE=268)
        lines = []
        return read_validation(hp, runtime.device, lines.append).total_bytes, lines

    write_shard(val, tokens)
    (right, noted), (wrong, noted_too) = map(bytes_and_notes, (own, other))
    assert wrong > 1.5 * right and noted == noted_too
    assert [note[:47] for note in noted] == ["note: THE BYTES ARE UNPROVEN: 100% of the first"]
    digest, manifest = train_gpt.sha256_of(own), tmp_path / "manifest.json"
    for prove, where in (
        (lambda: manifest.write_text(json.dumps({"tokenizer": {"sha256": digest}})), manifest),
        (lambda: manifest.unlink() or write_shard(val, tokens, tokenizer=digest), val),
        (lambda: write_shard(train, tokens, tokenizer=digest) or write_shard(val, tokens), train),
        # Of two validation shards one may be of another tokenizer.
        (lambda: train.unlink() or write_shard(more, tokens[1:], tokenizer=digest), more),
    ):
        prove()
        found, noted_now = bytes_and_notes(own)
        assert where == more or found == right
        assert noted_now == (noted if where in (train, more) else [])
        with user_error(f"other.model is not the tokenizer that made .* its sha256 in {where}"):
            bytes_and_notes(other)


TOKENS = np.arange(4, 300)


def headed(**wrong):
    return lambda path: write_shard(path, TOKENS, **wrong)


def test_wrong_shards_are_named(tmp_path):
    for spoil, part in (
        (headed(magic=1), "(1, 1, 296), not 1024 + 2 n bytes and (20240520, 1), n"),
        (headed(version=2), "the header (20240520, 2, 296), not"),
        (headed(count=295), "has 1616 bytes and the header (20240520, 1, 295), not"),
        (headed(count=(1 << 31) - 1), "the header (20240520, 1, 2147483647), not"),
        (headed(count=0), "has 1616 bytes and the header (20240520, 1, 0), not"),
        (lambda path: write_shard(path, TOKENS[:0]), "has 1024 bytes and the header (2"),
        (lambda path: path.write_bytes(b""), "not enough values"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "has 1617 bytes and the header"),
        # A loop, which even root cannot read
        (lambda path: path.unlink() or path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.unlink() or path.mkdir(), "Is a directory"),
    ):
        path = tmp_path / "fineweb_train_000000.bin"
        path.unlink(missing_ok=True)
        headed()(path)
        spoil(path)
        with user_error(f"{path}.*{re.escape(part)}"):
            TokenStream(str(tmp_path), "train", VOCAB)


def test_a_shard_that_is_truncated_during_the_run_is_named(tmp_path, one_rank):
    """The mapping of a truncated file would kill the process. A token out of range is named, too."""
    path = tmp_path / "fineweb_train_000000.bin"
    write_shard(path, np.where(np.arange(2000) == 900, VOCAB, 5))
    _, (loader,) = loaders(one_rank, 1, DATA_PATH=tmp_path, SHUFFLE_SEED=0)
    with user_error(f"000000.bin holds token {VOCAB}.*VOCAB_SIZE"):
        loader.batch(1)
    write_shard(path, np.full(500_000, 5))
    _, (loader,) = loaders(one_rank, 1, DATA_PATH=tmp_path)
    loader.batch(0)
    os.truncate(path, 2001)
    for read in (lambda: loader.batch(600), lambda: loader.stream.read(400, 100)):
        with user_error("fineweb_train_000000.bin was truncated during the run"):
            read()
    path.unlink()
    with user_error("cannot read shard .*000000.bin: No such file or directory; restore it"):
        loader.stream.read(400, 100)


def test_no_shard_stays_open(tmp_path):
    """A thousand shards with the usual limit of 1,024 descriptors were a traceback."""
    for number in range(20):
        write_shard(tmp_path / f"fineweb_train_{number:06}.bin", np.full(9, number))
    before = len(os.listdir("/proc/self/fd"))
    stream = TokenStream(str(tmp_path), "train", VOCAB)
    assert (stream.read(0, 180) == np.repeat(range(20), 9)).all()
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_data_that_match_their_manifest_are_used(folder, one_rank):
    files = {path.name: {"bytes": path.stat().st_size} for path in folder.glob("*.bin")}
    tokenizer = {"sha256": train_gpt.sha256_of(folder / "tokenizer.model")}
    (folder / "manifest.json").write_text(json.dumps({"files": files, "tokenizer": tokenizer}))
    hp, runtime = one_rank(DATA_PATH=folder, TOKENIZER_PATH=folder / "tokenizer.model")
    assert read_validation(hp, runtime.device).targets > 0
    other = json.dumps({"files": {}, "tokenizer": {"sha256": "0" * 64}})
    wrong = "manifest.json is not a valid manifest: .*; make or download the data again"
    made = "TOKENIZER_PATH=.*tokenizer.model is not the tokenizer that made the shards"
    broken = ("", "[]", "{}", '{"tokenizer": {"files": []}}', '{"tokenizer": 3}')
    for content, sentence in {other: made, **dict.fromkeys(broken, wrong)}.items():
        (folder / "manifest.json").write_text(content)
        with user_error(sentence):
            read_validation(hp, runtime.device)


def test_data_that_give_no_batch_are_named(tmp_path, one_rank):
    with user_error("TRAIN_BATCH_TOKENS=768 is not a multiple of 160, so 5"):
        loaders(one_rank, 5)
    write_shard(tmp_path / "fineweb_train_000000.bin", np.full(32, 5))
    with user_error("TRAIN_SEQ_LEN=32"):
        loaders(one_rank, 1, DATA_PATH=tmp_path)
    write_shard(tmp_path / "fineweb_val_000000.bin", np.full(32, 5))
    hp, runtime = one_rank(DATA_PATH=tmp_path)
    with user_error("EVAL_SEQ_LEN=32"):
        read_validation(hp, runtime.device)


def test_tokenizer_errors(tmp_path, data, monkeypatch):
    own, noise = str(data / "tokenizer.model"), tmp_path / "noise.model"
    noise.write_bytes(b"\x00\x01noise")
    for path, size, part in (
        (tmp_path / "nowhere", VOCAB, "cannot load TOKENIZER_PATH=.*nowhere: No such file"),
        (own, 1024, f"{VOCAB} pieces, but VOCAB_SIZE=1024"),
        (noise, VOCAB, "cannot load .*; set it to the shards' SentencePiece model"),
        ("/dev/zero", VOCAB, "TOKENIZER_PATH=/dev/zero has 0 pieces"),  # an artifact names it
    ):
        with user_error(part):
            ByteCounter(str(path), size)
    processor = sentencepiece.SentencePieceProcessor
    monkeypatch.setattr(processor, "piece_to_id", lambda self, piece: self.unk_id())
    with user_error(r"U\+2581"):
        ByteCounter(own, VOCAB)


def test_files_that_would_fill_the_memory_are_refused(tmp_path):
    """A sparse file can have any length, so sizes are checked before anything is read."""
    for name, use in (
        ("a.npz", lambda path: train_gpt.read_artifact(str(path), {})),
        ("tokenizer.model", lambda path: ByteCounter(str(path), VOCAB)),
        ("manifest.json", lambda path: train_gpt.check_manifest(str(path.parent), "")),
    ):
        with open(tmp_path / name, "wb") as file:
            file.truncate(1 << 40)
        with user_error(f"{name} has 1099511627776 bytes, over the limit of .* the wrong file"):
            use(tmp_path / name)
    # A forged checkpoint may be packed to a thousandth of its size
    path, metadata = tmp_path / "step.npz", json.dumps({"version": train_gpt.CHECKPOINT_VERSION})
    np.savez_compressed(path, metadata=metadata, tok_emb=np.zeros(1 << 20))
    with user_error("step.npz is truncated, .*: its arrays are larger than the file; copy or"):
        train_gpt.read_checkpoint(path)


def test_the_log_has_the_error_that_ended_the_start(script, tmp_path):
    """An earlier run's log gets none."""
    result = script(RUN_ID="a", EVAL_SEQ_LEN=1_000_000, status=1)
    log = (tmp_path / "logs" / "a.txt").read_text()
    assert "too few for EVAL_SEQ_LEN" in result.stderr and log.endswith(f"\n{result.stderr}")
    (tmp_path / "logs" / "a.jsonl").write_text('{"event": "finished"}\n')
    assert "is used by an earlier run" in script(RUN_ID="a", status=1).stderr
    assert (tmp_path / "logs" / "a.txt").read_text() == log
