"""Demonstration data and report, and run.sh."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import train_gpt
from conftest import ROOT, TINY, run

sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "data")]

import demo_corpus
import demo_size
import report


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Sixty files with indentation, tabs and rare characters, and some that must be left out."""
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
    assert report.decode(tokens, folder / "tokenizer.model") == expected
    assert counter.count(tokens).sum() == len(expected)
    assert (tokens == train_gpt.BOS).sum() == len(held_out)
    assert "made in" in line
    assert max(len(texts[name].encode()) for name in held_out) <= 1000, "no long file dominates the validation text"


def test_spaces_within_a_piece_are_bytes_each(built):
    """Fault B29: a run of spaces is one piece of U+2581s, and each U+2581 is 1 byte of text, not 3."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(built[0] / "tokenizer.model"))
    run_of_four = pieces.piece_to_id("\u2581" * 4)
    assert run_of_four != pieces.unk_id(), "the tokenizer has learnt indentation"
    counter = train_gpt.ByteCounter(str(built[0] / "tokenizer.model"), demo_corpus.VOCAB_SIZE)
    assert counter.count(np.array([pieces.piece_to_id("\n"), run_of_four])) == [4]


def test_corpus_is_made_once(built, library):
    assert demo_corpus.build(built[0], library, val_bytes=4000).startswith("already there")
    (library / "m00.py").write_text("changed = 1\n")
    assert demo_corpus.build(built[0], library, val_bytes=4000).startswith("made in")


@pytest.fixture(scope="module")
def demonstrated(built, tmp_path_factory):
    """A tiny run on the demonstration's data: (data, folder of the run)."""
    folder = tmp_path_factory.mktemp("run")
    knobs = {
        **TINY,
        "DATA_PATH": built[0],
        "TOKENIZER_PATH": built[0] / "tokenizer.model",
        "VOCAB_SIZE": 1024,
        "RUN_ID": "demo",
        "TRAIN_LOG_EVERY": 2,
        "VAL_LOSS_EVERY": 4,
    }
    result = run([ROOT / "train_gpt.py"], {k: str(v) for k, v in knobs.items()}, folder)
    assert result.returncode == 0, result.stderr
    return built[0], folder


@pytest.mark.parametrize("speed, name", [(2e12, "large"), (1.2e12, "large"), (1.19e12, "small"), (1e9, "small")])
def test_the_demonstration_fits_the_machine(speed, name, monkeypatch):
    """Knobs of both sizes are valid, DEMO_SIZE overrides the measured speed, and the sentence says why."""
    monkeypatch.setattr(demo_size, "product_speed", lambda dtype: speed)
    chosen, sentence = demo_size.choose("")
    assert chosen == name and f"is {name}: matrix products run at {speed / 1e9:.0f} GFLOP/s" in sentence
    for fixed in demo_size.SIZES:
        assert demo_size.choose(fixed)[0] == fixed and "DEMO_SIZE" in demo_size.choose(fixed)[1]
        train_gpt.Hyperparameters.from_env({knob: str(value) for knob, value in demo_size.SIZES[fixed].items()})
    with pytest.raises(train_gpt.UserError, match="DEMO_SIZE=huge is not one of small, large"):
        demo_size.choose("huge")


def test_speed_of_matrix_products_is_positive():
    assert demo_size.product_speed(torch.float32, seconds=0.0) > 0


def test_report(demonstrated):
    data, folder = demonstrated
    command = [ROOT / "tools" / "report.py", data, "logs/demo.jsonl", "final_model.int6.xz", "--tokens", "5"]
    result = run(command, {"EVAL_SEQ_LEN": "32", "EVAL_STRIDE": "8"}, folder)
    assert result.returncode == 0, result.stderr
    history = report.read_events(folder / "logs" / "demo.jsonl")
    events = {event["event"]: event for event in history}
    rows = {row[0]: row[1] for row in report.table(events, data)}
    assert rows["all tokens equally likely"] > 3 and 1 < rows["xz -9e"] < 8
    assert f"{rows['artifact, sliding windows']:.4f}" in result.stdout
    assert "a sample, begun with 'def __init__(self,'" in result.stdout
    printed, _, curve = result.stdout.partition("\n\ntraining loss")
    assert curve.count("*") > 1
    scores = zip(printed.splitlines()[-5:], list(rows.items())[-5:], strict=True)
    assert all(line.startswith(f"  {name} ") and f" {bits:.4f}  " in line for line, (name, bits) in scores)
    events["start"]["hyperparameters"]["eval_mode"] = "banded"
    with pytest.raises(train_gpt.UserError, match="the log has no event final_int6_banded_exact"):
        report.table(events, data)
    events["final_int6_banded_exact"] = {"val_bpb": 3.5}
    assert report.table(events, data)[-1] == ("artifact, banded pass", 3.5, "the score")


def test_loss_curve():
    """A line that falls from 3 to 1 is drawn from the upper left to the lower right; equal losses are one row."""
    events = [{"event": "train", "step": step, "train_loss": 3 - 2 * (step - 1) / 99} for step in range(1, 101)]
    title, *rows, axis, steps = report.curve(events, width=10, height=5)
    assert [row.partition("|")[2].find("*") for row in rows] == [0, 2, 4, 6, 8]
    assert (
        rows[0].startswith("    2.91 |") and rows[-1].startswith("    1.09 |") and steps.split() == ["step", "1", "100"]
    )
    flat = report.curve([event | {"train_loss": 2.0} for event in events], width=10, height=5)
    assert "".join(flat).count("*") == 10 and flat[1].endswith("|" + "*" * 10)
    assert report.curve(events[:2]) == []


def test_report_of_an_unfinished_run(demonstrated, tmp_path):
    data, folder = demonstrated
    lines = (folder / "logs" / "demo.jsonl").read_text().splitlines()
    (tmp_path / "cut.jsonl").write_text("\n".join(lines[:3]))
    for log, part in (("cut.jsonl", "did not finish"), ("none.jsonl", "cannot read")):
        result = run([ROOT / "tools" / "report.py", data, tmp_path / log, "x.xz"], {}, tmp_path)
        assert result.returncode == 1
        assert part in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments, status, part", [(["--help"], 0, "./run.sh test"), (["tset"], 2, "./run.sh test")])
def test_run_sh_usage(arguments, status, part, tmp_path):
    result = subprocess.run([ROOT / "run.sh", *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == status
    assert part in result.stdout + result.stderr
