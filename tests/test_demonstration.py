"""The demonstration: its settings (tools/demo_settings.py) on imitated machines, its data and its report."""

import ast
import json
import os
import re
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import sentencepiece

import program
import demo_corpus
import demo_settings
import report
import shards
import tokenize_text
import train_gpt
from conftest import ROOT, VOCAB, assert_mistake, made_lines, run, user_error, write_shard


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Sixty files with indentation, tabs and rare characters, and some that must be left out."""
    folder = tmp_path_factory.mktemp("library")
    source = [4 * (i % 3) * " " + line for i, line in enumerate(made_lines(1200))]
    for i in range(60):
        rare = f"\tx{i} = 'caf\u00e9 \u4e2d \U0001f600'\r\n"
        text = "\n".join(["  ", *source[i * 20 : i * 20 + 20], rare])
        (folder / f"m{i:02d}.py").write_text(text, newline="")
    shutil.copy(folder / "m07.py", folder / "m08.py")
    (folder / "latin.py").write_bytes(b"# caf\xe9\n")
    (folder / "nul.py").write_text("a\0b")
    (folder / "test").mkdir()
    (folder / "test" / "t.py").write_text("left_out = 1")
    return folder


@pytest.fixture(scope="module")
def built(library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "data"
    return folder, demo_corpus.build(folder, library, val_bytes=4000)


def test_corpus_is_exact_and_split_by_document(built, library):
    folder, line = built
    texts = demo_corpus.documents(library)
    assert "m07.py" in texts and not {"latin.py", "test/t.py"} & set(texts)
    assert "made in" in line
    held_out = demo_corpus.held_out(texts, 4000)
    expected = [texts[name].encode() for name in held_out]
    assert max(map(len, expected)) <= 1000, "no long file dominates the validation text"
    own, vocabulary = str(folder / "tokenizer.model"), demo_corpus.VOCAB_SIZE
    counter = train_gpt.ByteCounter(own, vocabulary)
    tokens = train_gpt.read_shard(folder / "fineweb_val_000000.bin")
    found = report.validation(str(folder), own, vocabulary)
    assert found == (len(tokens), b"".join(expected))
    assert counter.count(tokens).sum() == len(found[1])
    assert (tokens == train_gpt.BOS).sum() == len(held_out)
    # Fault B29: each U+2581 of a piece is 1 byte of text, not 3
    pieces = sentencepiece.SentencePieceProcessor(model_file=own)
    run_of_four = pieces.piece_to_id("\u2581" * 4)
    assert run_of_four != pieces.unk_id(), "the tokenizer has learnt indentation"
    assert counter.count(np.array([pieces.piece_to_id("\n"), run_of_four])) == [4]


def test_corpus_is_made_once(built, library, tmp_path):
    data, texts = tmp_path / "data", tmp_path / "texts"  # a run of another test reads `built`
    shutil.copytree(built[0], data)
    shutil.copytree(library, texts)
    with shards.locked(data):  # another program may read or check them
        assert demo_corpus.build(data, texts, val_bytes=4000).startswith("already there")
    (texts / "m00.py").write_text("changed = 1\n")
    assert demo_corpus.build(data, texts, val_bytes=4000).startswith("made in")


OTHER = "holds something else than the demonstration's data"


def test_only_data_of_the_demonstration_are_replaced(library, tmp_path):
    (tmp_path / "mine").mkdir()
    file, inside = tmp_path / "notes.txt", tmp_path / "mine" / "notes.txt"
    for target, mine, said in ((file, file, "is a file"), (inside.parent, inside, OTHER)):
        mine.write_text("mine")
        with user_error(said):
            demo_corpus.build(target, library, val_bytes=4000)
        assert mine.read_text() == "mine"


@pytest.mark.parametrize("moved", ["", "fineweb_train_000000.bin", "tokenizer.model", "foreign"])
@pytest.mark.parametrize("tool", ["demo_corpus", "tokenize_text"])
def test_only_a_killed_build_of_the_demonstration_is_repeated(
    built, library, tmp_path, monkeypatch, tool, moved
):
    """The manifest is the last file to move. A killed build may have moved no file, and shards of
    the same names may lie there since."""
    partial = shutil.copytree(built[0], tmp_path / tokenize_text.PARTIAL)
    manifest = shards.read_manifest(partial)
    manifest["made_by"] |= {"tool": f"data/{tool}.py"}
    (partial / "manifest.json").write_text(json.dumps(manifest))
    if moved == "foreign":
        write_shard(tmp_path / "fineweb_train_000000.bin", np.arange(9))
    elif moved:
        (partial / moved).rename(tmp_path / moved)
    monkeypatch.setattr(demo_corpus, "make", lambda *_: "made")
    repeated = not moved or (tool == "demo_corpus" and moved != "foreign")
    with nullcontext() if repeated else user_error("holds something else"):
        assert demo_corpus.build(tmp_path, library) == "made"


@pytest.mark.parametrize("name", ["fineweb_train_000000", "fineweb_train_000009", "tokenizer"])
def test_foreign_files_beside_the_manifest_are_kept(built, library, tmp_path, name):
    folder = shutil.copytree(built[0], tmp_path / "data")
    path = next(folder.glob(f"{name}.*"), folder / f"{name}.bin")
    write_shard(path, np.arange(9))
    with user_error(f"{OTHER}: choose another folder"):
        demo_corpus.build(folder, library, val_bytes=5000)
    assert len(train_gpt.read_shard(path)) == 9


@pytest.fixture(scope="module")
def demonstrated(built, env, tmp_path_factory):
    """A tiny run on the demonstration's data: (data, folder of the run)."""
    folder = tmp_path_factory.mktemp("run")
    knobs = dict(VOCAB_SIZE=1024, RUN_ID="demo", TRAIN_LOG_EVERY=2, VAL_LOSS_EVERY=4)
    places = dict(DATA_PATH=built[0], TOKENIZER_PATH=built[0] / "tokenizer.model")
    run([ROOT / "train_gpt.py"], env(**knobs, **places), folder)
    return built[0], folder


def test_report(demonstrated):
    data, folder = demonstrated
    command = [ROOT / "tools" / "report.py", "logs/demo.jsonl", "logs/demo.npz"]
    result = run(command, {"EVAL_SEQ_LEN": "32", "EVAL_STRIDE": "8"}, folder)
    history = report.read_events(folder / "logs" / "demo.jsonl")
    events = {event["event"]: event for event in history}
    text = report.validation(str(data), str(data / "tokenizer.model"), 1024)
    rows = {row[0]: row[1] for row in report.table(events, *text)}
    assert rows["all tokens equally likely"] > 3 and 1 < rows["xz -9e"] < 8
    assert f"{rows['artifact, sliding windows']:.4f}" in result.stdout
    begun = ast.literal_eval(re.search(r"sample from the prompt (.+):", result.stdout)[1])
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
    """A line from 3 to 1 goes from the upper left to the lower right; equal losses are one row."""
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
    own = str(data / "tokenizer.model"), VOCAB
    count, text = report.validation(str(data), *own)
    parts = [train_gpt.read_shard(data / f"fineweb_val_00000{i}.bin") for i in (0, 1)]
    assert count == sum(map(len, parts))
    counter = train_gpt.ByteCounter(*own)
    # A document continues in the second shard
    assert len(text) == counter.count(np.concatenate(parts)).sum()
    part = parts[0][5:24]
    write_shard(tmp_path / "fineweb_val_000000.bin", part)
    count, text = report.validation(str(tmp_path), *own)
    assert (count, len(text)) == (19, counter.count(np.append(train_gpt.BOS, part)).sum())


def test_report_of_an_unfinished_run(demonstrated, tmp_path):
    _, folder = demonstrated
    lines = (folder / "logs" / "demo.jsonl").read_text().splitlines()
    for text in ("\n".join(lines[:3]), "", "{}", "[1]", '{"event": 1}'):
        (tmp_path / "x.jsonl").write_text(text)
        part = "cannot read" if len(text) < 99 else "did not finish"
        assert_mistake([ROOT / "tools" / "report.py", "x.jsonl", "x.xz"], tmp_path, part)


# ---- Settings, with the user's own winning -------------------------------------------------------
@pytest.mark.parametrize(
    "given, cores, name, expected",
    [
        ({}, 1, "NPROC", "1"),  # as many processes as cores that divide the sequences
        ({}, 2, "NPROC", "2"),
        ({}, 7, "NPROC", "4"),
        ({}, 64, "NPROC", "8"),
        ({"TRAIN_BATCH_TOKENS": "1536"}, 4, "NPROC", "3"),
        ({"NPROC": "3"}, 4, "NPROC", "3"),
        ({}, 2, "DATA_PATH", "demo_data"),
        ({}, 2, "TOKENIZER_PATH", "demo_data/tokenizer.model"),
        ({"MAX_WALLCLOCK_SECONDS": "7.5"}, 2, "MAX_WALLCLOCK_SECONDS", None),
        ({"RUN_ID": "mine"}, 2, "RUN_ID", None),
        ({}, 2, "WARMDOWN_FRAC", "0.5"),
        ({"WARMDOWN_FRAC": "0.1"}, 2, "WARMDOWN_FRAC", None),
        ({"WARMDOWN_ITERS": "9"}, 2, "WARMDOWN_FRAC", None),  # it would be replaced
        ({"GRID": "SEED=1 WARMDOWN_ITERS=9,10", "RUN_SH": "GRID"}, 2, "WARMDOWN_FRAC", None),
        ({"GRID": "MATRIX_LR=0.1,0.2", "RUN_SH": "GRID"}, 2, "WARMDOWN_FRAC", "0.5"),
        ({"NUM_LAYERS": "1"}, 2, "NUM_LAYERS", None),
        ({"NUM_LAYERS": "1"}, 2, "XSA_LAST_N", "1"),  # few layers lower what would exceed them
        ({"NUM_LAYERS": "6"}, 2, "XSA_LAST_N", "2"),
        ({"NUM_LAYERS": "2", "XSA_LAST_N": "1"}, 2, "XSA_LAST_N", None),
    ],
)
def test_settings_follow_the_machine_and_yield_to_the_users(given, cores, name, expected):
    assert demo_settings.settings(given, cores).get(name) == expected


def test_settings_are_printed_byte_for_byte(tmp_path, monkeypatch, capfdbinary):
    """run.sh exports them. A name that is not UTF-8 would be refused or escaped."""
    (folder := tmp_path / "caf\udcff").mkdir()
    entry = {"path": "t.model", "sha256": "0", "vocab_size": 400}
    shards.write_manifest(folder, files={}, tokenizer=entry)
    monkeypatch.setattr(demo_settings.os, "environ", {"DATA_PATH": str(folder)})
    monkeypatch.setattr(demo_settings.sys, "argv", ["demo_settings.py"])
    program.run_program(demo_settings.main)
    assert os.fsencode(f"TOKENIZER_PATH={folder}/t.model\n") in capfdbinary.readouterr().out


def test_each_demonstration_has_a_name_of_its_own(tmp_path):
    """Except in a sweep, which goes on where it was, and for RESUME."""
    for name in ("demo", "demo2", "demo3"):
        assert demo_settings.run_id({}, tmp_path) == name
        (tmp_path / f"{name}.txt").touch()
    for environ in ({"SEEDS": "1 2"}, {"GRID": "SEED=1"}, {"RESUME": "auto"}):
        assert demo_settings.run_id(environ, tmp_path) == "demo"


def test_own_data_bring_their_tokenizer(tmp_path):
    def found(**environ):
        chosen = demo_settings.settings({"DATA_PATH": str(tmp_path), **environ}, 2)
        return [chosen.get(name) for name in ("DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE")]

    with user_error("has no manifest.json that names its tokenizer: set TOKENIZER_PATH and"):
        found()
    assert found(TOKENIZER_PATH="t.model", VOCAB_SIZE="9") == [None, None, None]
    entry = {"path": "../t.model", "sha256": "0", "vocab_size": 400}
    shards.write_manifest(tmp_path, files={}, tokenizer=entry)
    assert found() == [None, f"{tmp_path}/../t.model", "400"]
    assert found(TOKENIZER_PATH="other.model") == [None, None, "400"]


@pytest.mark.parametrize(
    "variable, value, sentence",
    [
        ("DEMO_SECONDS", "5", "DEMO_SECONDS is set but is not a knob; did you mean MAX_WALLCLOCK"),
        ("seeds", "1 2", "seeds is set but is not a knob; did you mean SEEDS?"),
        ("grid", "SEED=1,2", "grid is set but is not a knob; did you mean GRID?"),
        ("nproc", "2", "nproc is set but is not a knob; did you mean NPROC?"),
        ("DATA_PATH", "/nowhere", "DATA_PATH=/nowhere does not exist: set the folder of your"),
        ("RUN_ID", "../x", "RUN_ID=../x must not have a slash"),
        ("NUM_LAYERS", "no", "NUM_LAYERS='no' is not a whole number"),
        ("TRAIN_SEQ_LEN", "0", "TRAIN_SEQ_LEN=0 is not"),
    ],
)
def test_a_mistake_is_named_before_the_data_are_made(variable, value, sentence):
    names = re.search(r'RUN_SH="(.*)"', (ROOT / "run.sh").read_text())[1]
    with user_error(f"^{re.escape(sentence)}"):
        demo_settings.settings({"RUN_SH": names, variable: value}, 2)
