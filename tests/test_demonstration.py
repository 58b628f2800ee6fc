"""The demonstration's data and its report."""

import ast
import re

import numpy as np
import pytest
import sentencepiece

import demo_corpus
import report
import train_gpt
from conftest import ROOT, TINY, VOCAB, assert_mistake, run, user_error, write_shard


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Sixty files with indentation, tabs and rare characters, and some that must be left out."""
    folder = tmp_path_factory.mktemp("library")
    source = (ROOT / "train_gpt.py").read_text().splitlines()
    for i in range(60):
        rare = f"\tx{i} = 'caf\u00e9 \u4e2d \U0001f600'\r\n"
        text = "\n".join([*source[i * 20 : i * 20 + 20], rare])
        (folder / f"m{i:02d}.py").write_text("  \n" + text, newline="")
    (folder / "m08.py").write_bytes((folder / "m07.py").read_bytes())
    (folder / "latin.py").write_bytes(b"# caf\xe9\n")
    (folder / "nul.py").write_text("a\0b")
    (folder / "test").mkdir()
    (folder / "test" / "t.py").write_text("left_out = 1")
    return folder


@pytest.fixture(scope="module")
def built(library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "data"
    first = demo_corpus.build(folder, library, val_bytes=4000)
    return folder, first


def test_corpus_is_exact_and_split_by_document(built, library):
    folder, line = built
    texts = demo_corpus.documents(library)
    assert "m07.py" in texts
    assert not {"latin.py", "test/t.py"} & set(texts)
    held_out = demo_corpus.held_out(texts, 4000)
    expected = b"".join(texts[name].encode() for name in held_out)
    counter = train_gpt.ByteCounter(str(folder / "tokenizer.model"), demo_corpus.VOCAB_SIZE)
    tokens = train_gpt.read_shard(folder / "fineweb_val_000000.bin")
    found = report.validation(str(folder), str(folder / "tokenizer.model"))
    assert found == (len(tokens), expected)
    assert counter.count(tokens).sum() == len(expected)
    assert (tokens == train_gpt.BOS).sum() == len(held_out)
    assert "made in" in line
    # Fault B29: each U+2581 of a piece is 1 byte of text, not 3
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    run_of_four = pieces.piece_to_id("\u2581" * 4)
    assert run_of_four != pieces.unk_id(), "the tokenizer has learnt indentation"
    assert counter.count(np.array([pieces.piece_to_id("\n"), run_of_four])) == [4]
    # No long file dominates the validation text
    assert max(len(texts[name].encode()) for name in held_out) <= 1000


def test_corpus_is_made_once(built, library):
    assert demo_corpus.build(built[0], library, val_bytes=4000).startswith("already there")
    (library / "m00.py").write_text("changed = 1\n")
    assert demo_corpus.build(built[0], library, val_bytes=4000).startswith("made in")


def test_only_data_of_the_demonstration_are_replaced(library, tmp_path):
    (tmp_path / "mine").mkdir()
    file, inside = tmp_path / "notes.txt", tmp_path / "mine" / "notes.txt"
    for target, mine in ((file, file), (inside.parent, inside)):
        mine.write_text("mine")
        with user_error("holds something else than the demonstration's data"):
            demo_corpus.build(target, library, val_bytes=4000)
        assert mine.read_text() == "mine"


@pytest.fixture(scope="module")
def demonstrated(built, tmp_path_factory):
    """A tiny run on the demonstration's data: (data, folder of the run)."""
    folder = tmp_path_factory.mktemp("run")
    knobs = {**TINY, "DATA_PATH": built[0], "TOKENIZER_PATH": built[0] / "tokenizer.model"}
    knobs |= {"VOCAB_SIZE": 1024, "RUN_ID": "demo", "TRAIN_LOG_EVERY": 2, "VAL_LOSS_EVERY": 4}
    result = run([ROOT / "train_gpt.py"], {k: str(v) for k, v in knobs.items()}, folder)
    assert result.returncode == 0, result.stderr
    return built[0], folder


def test_report(demonstrated):
    data, folder = demonstrated
    command = [ROOT / "tools" / "report.py", "logs/demo.jsonl", "logs/demo.int6.xz"]
    result = run(command, {"EVAL_SEQ_LEN": "32", "EVAL_STRIDE": "8"}, folder)
    assert result.returncode == 0, result.stderr
    history = report.read_events(folder / "logs" / "demo.jsonl")
    events = {event["event"]: event for event in history}
    text = report.validation(str(data), str(data / "tokenizer.model"))
    rows = {row[0]: row[1] for row in report.table(events, *text)}
    assert rows["all tokens equally likely"] > 3 and 1 < rows["xz -9e"] < 8
    assert f"{rows['artifact, sliding windows']:.4f}" in result.stdout
    begun = ast.literal_eval(re.search(r"a sample, begun with (.+):", result.stdout)[1])
    assert len(begun) > 5 and text[1].decode().strip().startswith(begun)
    printed, _, curve = result.stdout.partition("\n\ntraining loss")
    assert curve.count("*") > 1
    for line, (name, bits) in zip(printed.splitlines()[-5:], list(rows.items())[-5:], strict=True):
        assert line.startswith(f"  {name} ") and f" {bits:.4f}  " in line
    events["start"]["hyperparameters"]["eval_mode"] = "banded"
    with user_error("the log has no event final_int6_banded_exact"):
        report.table(events, *text)
    events["final_int6_banded_exact"] = {"val_bpb": 3.5}
    assert report.table(events, *text)[-1] == ("artifact, banded pass", 3.5, "the score")


def test_loss_curve():
    """A line that falls from 3 to 1 is drawn from the upper left to the lower right; equal losses
    are one row."""
    losses = np.linspace(3, 1, 100)
    events = [{"event": "train", "step": n, "train_loss": x} for n, x in enumerate(losses, 1)]
    title, *rows, axis, steps = report.curve(events, width=10, height=5)
    assert [row.partition("|")[2].find("*") for row in rows] == [0, 2, 4, 6, 8]
    assert rows[0].startswith("    2.91 |") and rows[-1].startswith("    1.09 |")
    assert steps.split() == ["step", "1", "100"]
    flat = report.curve([event | {"train_loss": 2.0} for event in events], width=10, height=5)
    assert "".join(flat).count("*") == 10 and flat[1].endswith("|" + "*" * 10)
    assert report.curve(events[:2]) == []


def test_text_of_own_data(data, tmp_path):
    """All validation shards are used. Text without document starts is whole."""
    tokens, text = report.validation(str(data), str(data / "tokenizer.model"))
    parts = [train_gpt.read_shard(data / f"fineweb_val_00000{i}.bin") for i in (0, 1)]
    assert tokens == sum(map(len, parts))
    counter = train_gpt.ByteCounter(str(data / "tokenizer.model"), VOCAB)
    # A document continues in the second shard
    assert len(text) == counter.count(np.concatenate(parts)).sum()
    write_shard(tmp_path / "fineweb_val_000000.bin", parts[0][5:24])
    count, text = report.validation(str(tmp_path), str(data / "tokenizer.model"))
    assert (
        count == 19 and len(text) == counter.count(np.append(train_gpt.BOS, parts[0][5:24])).sum()
    )


def test_report_of_an_unfinished_run(demonstrated, tmp_path):
    _, folder = demonstrated
    lines = (folder / "logs" / "demo.jsonl").read_text().splitlines()
    for text in ("\n".join(lines[:3]), "", "{}", "[1]", '{"event": 1}'):
        (tmp_path / "x.jsonl").write_text(text)
        part = "cannot read" if len(text) < 99 else "did not finish"
        assert_mistake([ROOT / "tools" / "report.py", "x.jsonl", "x.xz"], tmp_path, part)
