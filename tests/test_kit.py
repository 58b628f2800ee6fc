"""The kit around the script: demonstration data and report, plots, download, run.sh."""

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, TINY, run

import train_gpt

for folder in ("demo", "records", "data"):
    sys.path.insert(0, str(ROOT / folder))

import corpus
import download_fineweb
import plot_loss
import report


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Sixty files with indentation, tabs, rare characters; some that must be left out."""
    folder = tmp_path_factory.mktemp("library")
    source = (ROOT / "train_gpt.py").read_text().splitlines()
    for i in range(60):
        text = "\n".join(source[i * 20 : i * 20 + 20]) + f"\n\tx{i} = 'caf\u00e9 \u4e2d \U0001f600'\r\n"
        (folder / f"m{i:02d}.py").write_text("  \n" + text, newline="")
    (folder / "m08.py").write_bytes((folder / "m07.py").read_bytes())
    (folder / "latin.py").write_bytes(b"# caf\xe9\n")
    (folder / "nul.py").write_text("a\0b")
    (folder / "test").mkdir()
    (folder / "test" / "t.py").write_text("left_out = 1")
    return folder


@pytest.fixture(scope="module")
def built(library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    first = corpus.build(folder, library, val_bytes=4000)
    return folder, first


def test_corpus_is_exact_and_split_by_document(built, library):
    folder, line = built
    texts = corpus.documents(library)
    assert "m07.py" in texts and not {"latin.py", "nul.py", "test/t.py"} & set(texts)
    training, validation = corpus.split(texts, 4000)
    assert not set(training) & set(validation) and len(training) + len(validation) == len(texts)
    assert "m08.py" not in texts, "the same text under a second name"
    counter = train_gpt.ByteCounter(str(folder / "tokenizer.model"), corpus.VOCAB_SIZE)
    tokens = train_gpt.read_shard(folder / "fineweb_val_000000.bin")
    text = (folder / "val.txt").read_bytes()
    assert counter.count(tokens).sum() == len(text) == sum(len(t.encode()) for t in validation)
    assert (tokens == train_gpt.BOS).sum() == len(validation) and "made in" in line


def test_spaces_within_a_piece_are_bytes_each(built):
    """Fault B29: a run of spaces is one piece of U+2581s, each of which is 1 byte of text and not 3."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(built[0] / "tokenizer.model"))
    run_of_four = pieces.piece_to_id("\u2581" * 4)
    assert run_of_four != pieces.unk_id(), "the tokenizer has learnt indentation"
    counter = train_gpt.ByteCounter(str(built[0] / "tokenizer.model"), corpus.VOCAB_SIZE)
    assert counter.count(np.array([pieces.piece_to_id("\n"), run_of_four])) == [4]


def test_corpus_is_made_once(built, library):
    assert corpus.build(built[0], library, val_bytes=4000).startswith("already there")
    assert corpus.build(built[0], library, val_bytes=5000).startswith("made in")


def test_tokenizer_that_changes_the_text_is_noticed(library, tmp_path, monkeypatch):
    honest = corpus.encode
    monkeypatch.setattr(corpus, "encode", lambda texts, pieces: honest([text.replace("    ", " ") for text in texts], pieces))
    with pytest.raises(train_gpt.UserError, match="the tokenizer changed the text"):
        corpus.build(tmp_path, library, val_bytes=4000)


def test_shard_round_trip(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    corpus.write_shard(tmp_path / "a.bin", tokens)
    assert (train_gpt.read_shard(tmp_path / "a.bin") == tokens).all()


@pytest.fixture(scope="module")
def demonstrated(built, tmp_path_factory):
    """A tiny run on the demonstration's data: (data, folder of the run)."""
    folder = tmp_path_factory.mktemp("run")
    knobs = {**TINY, "DATA_PATH": built[0], "TOKENIZER_PATH": built[0] / "tokenizer.model", "VOCAB_SIZE": 1024, "RUN_ID": "demo",
             "TRAIN_LOG_EVERY": 2, "VAL_LOSS_EVERY": 4}
    result = run([ROOT / "train_gpt.py"], {k: str(v) for k, v in knobs.items()}, folder)
    assert result.returncode == 0, result.stderr
    return built[0], folder


def test_report(demonstrated):
    data, folder = demonstrated
    result = run([ROOT / "demo" / "report.py", data, "logs/demo.jsonl", "final_model.int6.xz", "--tokens", "5"], {"EVAL_SEQ_LEN": "32", "EVAL_STRIDE": "8"}, folder)
    assert result.returncode == 0, result.stderr
    rows = {row[0]: row[1] for row in report.table(report.read_events(folder / "logs" / "demo.jsonl"), data)}
    assert rows["all tokens equally likely"] > 3 and 1 < rows["xz -9e"] < 8
    assert f"{rows['artifact, sliding windows']:.4f}" in result.stdout and "a sample, begun with 'def __init__(self, '" in result.stdout


def test_report_of_an_unfinished_run(demonstrated, tmp_path):
    data, folder = demonstrated
    lines = (folder / "logs" / "demo.jsonl").read_text().splitlines()
    (tmp_path / "cut.jsonl").write_text("\n".join(lines[:3]))
    for log, part in (("cut.jsonl", "did not come to its end"), ("none.jsonl", "cannot read")):
        result = run([ROOT / "demo" / "report.py", data, tmp_path / log, "x.xz"], {}, tmp_path)
        assert result.returncode == 1 and part in result.stderr and "Traceback" not in result.stderr


def test_plot(demonstrated, tmp_path):
    log = demonstrated[1] / "logs" / "demo.jsonl"
    found = plot_loss.read_run(log)
    assert [step for step, _, _ in found["val"]] == [0, 4, 8, 12] and len(found["train"]) == 11
    plot_loss.draw({"a": found, "b": found}, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "empty.jsonl").write_text(json.dumps({"event": "start"}))
    with pytest.raises(SystemExit, match="no training step"):
        plot_loss.read_run(tmp_path / "empty.jsonl")


def test_download_places_what_was_fetched(data, tmp_path):
    snapshot = tmp_path / "hub" / "datasets"
    shards = snapshot / "datasets" / "fineweb10B_sp1024"
    shards.mkdir(parents=True)
    for name in ("fineweb_train_000000.bin", "fineweb_train_000001.bin", "fineweb_val_000000.bin"):
        (shards / name).write_bytes((data / name).read_bytes())
    (snapshot / "tokenizers").mkdir()
    (snapshot / "tokenizers" / "fineweb_1024_bpe.model").write_bytes((data / "tokenizer.model").read_bytes())
    for _ in range(2):  # the second time everything is there
        assert download_fineweb.place(tmp_path / "hub", "sp1024", tmp_path / "data") == (2, 1)
    assert len(list((tmp_path / "data" / "datasets" / "fineweb10B_sp1024").iterdir())) == 3
    hp = train_gpt.Hyperparameters()
    assert (tmp_path / hp.tokenizer_path).exists() and (tmp_path / hp.data_path).is_dir(), "where the script looks by default"
    with pytest.raises(train_gpt.UserError, match="no train shards of fineweb10B_sp4096"):
        download_fineweb.place(tmp_path / "hub", "sp4096", tmp_path / "data")
    (shards / "fineweb_train_000000.bin").write_bytes(b"cut")
    with pytest.raises(train_gpt.UserError, match="fetch it again"):
        download_fineweb.place(tmp_path / "hub", "sp1024", tmp_path / "data")


def test_download_patterns():
    assert download_fineweb.patterns("sp1024", 2) == [
        "datasets/datasets/fineweb10B_sp1024/fineweb_train_000000.bin", "datasets/datasets/fineweb10B_sp1024/fineweb_train_000001.bin",
        "datasets/datasets/fineweb10B_sp1024/fineweb_val_*.bin", "datasets/tokenizers/*",
    ]  # fmt: skip


@pytest.mark.parametrize("arguments, status, part", [(["--help"], 0, "./run.sh test"), (["tset"], 2, "./run.sh test")])
def test_run_sh_usage(arguments, status, part, tmp_path):
    result = subprocess.run([ROOT / "run.sh", *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == status and part in result.stdout + result.stderr
