"""data/tokenize_text.py and data/inspect_shards.py: exact bytes and disjoint splits."""

import errno
import fcntl
import functools
import hashlib
import io
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import program
import caseops
import inspect_shards
import shards
import tokenize_text
import train_gpt
from caseops import ALLCAPS, CAPNEXT, ESC, LITERALS, TITLE
from conftest import ROOT, assert_mistake, made_lines, start, train_pieces, user_error, write_shard
from tokenize_text import Options, Reading, Record
from train_gpt import BOS, CASE_OPERATORS, UserError

# Letters that a conversion in both directions changes, or whose UTF-8 length it changes.
UNEVEN = "\u00df\u1e9e\u0130\u0131\u017f\u212a\u212b\u2126\u03c2\u01c5\u01c8\u023a\u2c65\u1fbc\u1fb3\u00b5\u2160\u24b6"
# Parts of text whose bytes are easily miscounted, by any tokenizer and normaliser, and all pairs
WORDS = "a A BC NASA iPhone's SpaceX I'LL B2B EE 314 <s> </s> <unk> <pad> <0x41> e\u0301 E\u0301 "
WORDS += "A\u030a H\u0331 \u0627\u0644 \u0939\u093f \u041c\u041e \u0391\u03b8 \u03ae\u03c2 "
WORDS += "\u0391\u03a3 \u0531\u0561 \u1e00\u1e01 \uff21\uff41"
OTHERS = " \n\t\0\x01\x7f\x85\ufeff\ufffd\ufffe\U0010ffff\xa0\u2003\u3000\u200b\u200d\u2581"
OTHERS += "\U0001f600\u2047\xe9\xbd\ufb01\u2168\u4e2d\u10e5\ua9a7"
PARTS = [*WORDS.split(), "   ", "\r\n", "\U0001f468\u200d\U0001f469", *OTHERS]
PARTS += [*CASE_OPERATORS, *LITERALS, *UNEVEN]
TEXTS = ["", "word " * 3000, " ".join(PARTS), *map("".join, itertools.product(PARTS, ["", *PARTS]))]
SPECIAL = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
LINES = made_lines(2400)
DOCUMENTS = ["\n".join(LINES[i : i + 8]) for i in range(0, len(LINES), 8)]


@functools.cache
def tokenizer_bytes(rule: str, vocab_size: int = 600) -> bytes:
    if rule == "caseops":
        coded = list(map(caseops.encode, DOCUMENTS))
        return tokenize_text.train_tokenizer(coded, vocab_size, operators=CASE_OPERATORS)
    return tokenize_text.train_tokenizer(DOCUMENTS, vocab_size, rule)


PUBLISHED = {"character_coverage": 0.999, "split_digits": True, "add_dummy_prefix": False}
PUBLISHED |= {"normalization_rule_name": "nmt_nfkc", **SPECIAL}
BARE = PUBLISHED | {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS = {"as published": PUBLISHED, "without spaces removed or prefixed": BARE}


@pytest.fixture(scope="module", params=["identity", "caseops", "nmt_nfkc", *KINDS])
def model(request, tmp_path_factory) -> Path:
    """Tokenizers of several kinds: ours with both normalisers, and others."""
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    if request.param in KINDS:
        train_pieces(path, LINES, 600, **KINDS[request.param])
    else:
        path.write_bytes(tokenizer_bytes(request.param))
    return path


def test_all_tokens_of_the_right_tokenizer_come_back(model):
    """Wherever the validation text begins."""
    records = [Record("", text) for text in DOCUMENTS]
    documents = tokenize_text.Encoder(str(model), Reading(strip=True)).encode(records).documents
    tokens = np.concatenate([document.tokens for document in documents])
    for begin in (0, 7, 777, 1003):
        assert train_gpt.reencoded(tokens[begin:], str(model))[0] == 1


def test_bytes_charged_are_the_bytes_that_the_normaliser_keeps(model, request):
    encoder, texts = tokenize_text.Encoder(str(model), Reading()), TEXTS
    kind = request.node.callspec.params["model"]
    if "without" in kind:
        # No prefixed space and none removed: the first space of a document would cost nothing.
        for text in (" a", "\u2581a"):
            with user_error("but the evaluator would count"):
                encoder.encode([Record("", text)])
        texts = [text for text in TEXTS if text[:1] not in (" ", "\u2581")]
    documents, _ = encoder.encode([Record(text, text) for text in texts])
    counter, coder = caseops.ByteCounter(str(model), 600), caseops.Tokenizer(str(model), 600)
    assert (kind == "caseops") == counter.caseops
    for text, document in zip(texts, documents, strict=True):
        tokens, nbytes = document.tokens, document.nbytes
        counted, decoded = counter.count(tokens), coder.decode(tokens[1:].tolist())
        assert (nbytes is not None) == counter.caseops
        assert tokens[0] == BOS
        assert counted.sum() == len(decoded.encode()) == document.size, text
        assert nbytes is None or (nbytes[1:] == counted).all(), text
        assert document.lost == len(text.encode()) - document.size, text
        assert document.changed == (decoded != text), text
        # Our tokenizers change nothing but U+2581, which SentencePiece takes for a space
        assert decoded == text or "\u2581" in text or kind not in ("identity", "caseops"), text


def test_a_tokenizer_that_would_count_other_bytes_is_refused(tmp_path):
    """Without byte fallback, by NFKC, or with a space more at the end of each document. Nor is one
    taken that begins documents with another token."""
    path = tmp_path / "t.model"

    def trained(**options) -> str:
        train_pieces(path, LINES, 400, **options)
        return str(path)

    records = [Record("line 2", b"\xff"), Record("line 3", "\u4e2d")]  # the first is no text
    with user_error("line 3 has 3 bytes, but the evaluator would count 0"):
        tokenize_text.Encoder(trained(byte_fallback=False, **SPECIAL), Reading()).encode(records)
    with user_error("t.model adds a space to the end of a text"):
        train_gpt.ByteCounter(trained(treat_whitespace_as_suffix=True, **SPECIAL), 400)
    with user_error("t.model has 400 pieces and token 2 as BOS, but .* starts with token 1"):
        tokenize_text.adopt_tokenizer(Path(trained(bos_id=2, eos_id=1)), tmp_path / "copy.model")
    texts = map(caseops.encode, DOCUMENTS)
    path.write_bytes(tokenize_text.train_tokenizer([*texts], 400, "nmt_nfkc", CASE_OPERATORS))
    encoder = tokenize_text.Encoder(str(path), Reading())
    assert encoder.encode([Record("", "plain Text")]).documents[0].size == 10
    with user_error("line 7 is not restored by CaseOps|line 7 has 3 bytes, but"):
        encoder.encode([Record("line 7", "H\u0331")])


@pytest.mark.parametrize("vocab_size", [262, 263, 2000])
def test_tokenizers_of_any_size(vocab_size, tmp_path):
    (tmp_path / "t.model").write_bytes(tokenize_text.train_tokenizer(DOCUMENTS, vocab_size))
    pieces = shards.load_tokenizer(tmp_path / "t.model")
    assert pieces.vocab_size() == vocab_size and (pieces.bos_id(), pieces.eos_id()) == (1, 2)
    # Pieces of their own
    assert {pieces.piece_to_id("\u2581"), pieces.piece_to_id("\n")}.isdisjoint({pieces.unk_id()})
    assert sum(map(pieces.is_byte, range(vocab_size))) == 256
    encoder = tokenize_text.Encoder(str(tmp_path / "t.model"), Reading())
    assert encoder.encode([Record("", text) for text in TEXTS]).documents


# ---- CaseOps -------------------------------------------------------------------------------------
def test_the_grammar_of_caseops():
    for text, coded in (
        ("all lower, 1st caf\u00e9", "all lower, 1st caf\u00e9"),
        ("The end. I am A", f"{TITLE}the end.{TITLE} i am{TITLE} a"),
        ("the NASA probe", f"the{ALLCAPS} nasa probe"),
        ("a  B\tC\nDE", f"a {TITLE} b\t{TITLE}c\n{ALLCAPS}de"),
        ("SpaceX iPhone", f"{TITLE}space{CAPNEXT}x i{CAPNEXT}phone"),
        ("PDFs of UTF8", f"{TITLE}p{CAPNEXT}d{CAPNEXT}fs of{ALLCAPS} utf8"),
        ("DON'T (Or)", f"{ALLCAPS}don'{TITLE}t ({TITLE}or)"),
        ("\u00c9COLE \u039f\u03a3", f"{ALLCAPS}\u00e9cole{ALLCAPS} \u03bf\u03c3"),
        ("Stra\u00dfeN \u0130X", f"{TITLE}stra\u00dfe{CAPNEXT}n \u0130{TITLE}x"),
        (f"a{TITLE} {ESC}B", f"a{ESC}{LITERALS[0]} {ESC}{LITERALS[3]}{TITLE}b"),
        (LITERALS, LITERALS),
        (" a", f"{ESC} a"),
        (" A", f"{TITLE} a"),
        ("  A", f"{ESC} {TITLE} a"),
    ):
        assert caseops.encode(text) == coded and caseops.decode(coded) == text


def check_caseops(text: str) -> None:
    """A round trip, no capital that has a pair, and as many bytes without the operators."""
    coded = caseops.encode(text)
    assert caseops.decode(coded) == text and caseops.PAIRS.keys().isdisjoint(coded)
    rest = coded.translate(dict.fromkeys(map(ord, CASE_OPERATORS)))
    assert len(rest.encode(errors="surrogatepass")) == len(text.encode(errors="surrogatepass"))


def test_caseops_of_every_short_text():
    """All texts of up to 5 characters of every kind that the grammar distinguishes."""
    kinds = f"aB1 \u00df{TITLE}{ALLCAPS}{ESC}{LITERALS[3]}"
    for length in range(6):
        for characters in itertools.product(kinds, repeat=length):
            check_caseops("".join(characters))


def test_caseops_of_every_character():
    """Lone surrogates included, between and beside letters; those with a case also alone."""
    everything = list(map(chr, range(0x110000)))
    check_caseops("".join(everything))
    for template in ("a{}B", "AB{}c"):
        check_caseops("".join(template.format(character) for character in everything[:0x20000]))
    for character in everything:
        if not character.upper() == character.lower() == character.title() == character:
            for context in ("{}", " {}", "a{}", "AB{}", "{}ab", "{}AB"):
                check_caseops(context.format(character))


def test_an_operator_that_applies_to_nothing_is_removed():
    """A model may produce any sequence of pieces."""
    coded = f"{TITLE}{ALLCAPS} 1{CAPNEXT}\u00df{ESC}a{TITLE}  b{ESC}"
    assert caseops.decode(coded) == " 1\u00dfa  b"
    for characters in itertools.product(f"{CASE_OPERATORS}ab 1", repeat=5):
        assert set(CASE_OPERATORS).isdisjoint(caseops.decode("".join(characters)))


def test_the_pairs_of_letters_never_change():
    """They are part of the format of shards that exist."""
    assert not set(UNEVEN) & {*caseops.PAIRS, *caseops.PAIRS.values()}
    assert len(set(caseops.PAIRS.values())) == len(caseops.PAIRS) == 633
    digest = hashlib.sha256("".join(itertools.chain(*caseops.PAIRS.items())).encode()).hexdigest()
    assert digest.startswith("b43ab5202c0718d2")


def test_operators_are_pieces_of_no_bytes_and_elsewhere_text(tmp_path):
    """Other tokenizers keep their counts, even with these characters among their pieces."""
    path = tmp_path / "t.model"
    path.write_bytes(tokenizer_bytes("caseops"))
    pieces, counter = shards.load_tokenizer(path), caseops.ByteCounter(str(path), 600)
    assert list(map(pieces.piece_to_id, CASE_OPERATORS)) == [4, 5, 6, 7] and counter.caseops
    texts = map(pieces.id_to_piece, range(600))
    assert sum(not set(text).isdisjoint(CASE_OPERATORS) for text in texts) == 4
    the = pieces.piece_to_id("\u2581the")
    assert counter.count(np.array([BOS, the, 4, the, 7, the, BOS])).tolist() == [3, 0, 4, 0, 4, 0]
    tokenizer = caseops.Tokenizer(str(path), 600)
    ids = tokenizer.encode("The NASA probe.")
    assert tokenizer.decode(ids) == "The NASA probe." and 4 in ids, "TITLE is a piece"
    for symbols in ("x" + CASE_OPERATORS, CASE_OPERATORS[::-1], CASE_OPERATORS[:3] + "x"):
        path.write_bytes(tokenize_text.train_tokenizer(DOCUMENTS, 400, operators=symbols))
        counter, lengths = caseops.ByteCounter(str(path), 400), [len(s.encode()) for s in symbols]
        assert not counter.caseops and counter.length[4:][: len(symbols)].tolist() == lengths


def test_the_bytes_of_caseops_are_those_of_the_sidecar(source, tmp_path, env, capsys):
    """The script does not guess them, not even with our manifest."""
    out = tmp_path / "out"
    build(source, out, caseops=True, shard_tokens=1000)
    knobs = env(DATA_PATH=out, TOKENIZER_PATH=out / "tokenizer.model")
    hp = train_gpt.Hyperparameters.from_env(knobs)
    stream = train_gpt.TokenStream(out, "val", hp.vocab_size)
    tokens = stream.read(0, len(stream))
    nbytes = np.append(0, train_gpt.count_bytes(hp, tokens, print))
    by_document = np.add.reduceat(nbytes, np.flatnonzero(tokens == BOS))
    assert by_document.tolist() == [len(text.encode()) for text in DOCUMENTS[:5]]
    for path in out.glob("fineweb_val_bytes_*.bin"):
        path.unlink()
    with user_error("has CaseOps operators, but .* so the bytes are unknown: make the shards"):
        train_gpt.count_bytes(hp, tokens, print)
    # As beside the published shards, whose tokenizer has the same operators
    (out / "manifest.json").unlink()
    shards.write_shard(out / "fineweb_val_bytes_000000.bin", np.full(len(tokens), 3))
    assert (train_gpt.count_bytes(hp, tokens, print) == 3).all()
    assert inspect_shards.inspect(out, out / "tokenizer.model", 1) == []
    printed = capsys.readouterr().out
    assert "operators of another grammar (README.md): no bytes and samples" in printed
    assert "by fineweb_val_bytes_*.bin, which the score uses" in printed


# ---- Sources and splits --------------------------------------------------------------------------
def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "\n")


@pytest.fixture
def source(tmp_path) -> Path:
    """A file of the documents."""
    write_lines(tmp_path / "docs.jsonl", DOCUMENTS)
    return tmp_path / "docs.jsonl"


def documents_of(path: Path, reading: Reading) -> list[str]:
    files = tokenize_text.find_files([path])
    records = (record for file in files for record in tokenize_text.records(file, reading))
    return [tokenize_text.text_of(record, reading) for record in records]


def test_every_format_gives_the_same_documents(source, tmp_path):
    (tmp_path / "all.txt").write_text("\n%%\n".join(DOCUMENTS))
    parquet.write_table(pyarrow.table({"text": DOCUMENTS}), tmp_path / "docs.parquet")
    for path in (source, tmp_path / "all.txt", tmp_path / "docs.parquet"):
        assert documents_of(path, Reading(separator="\n%%\n")) == DOCUMENTS
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / "folder" / ("deep" if i % 2 else "") / f"{i:04d}.txt").write_text(text)
    assert sorted(documents_of(tmp_path / "folder", Reading())) == sorted(DOCUMENTS)
    # A byte order mark is no text at the start of a file
    lines = '{"text": "caf\u00e9"}\n{"text": "\ufeffy"}'
    for name, texts in (("a.txt", [lines]), ("a.jsonl", ["caf\u00e9", "\ufeffy"])):
        (tmp_path / name).write_text(lines, encoding="utf-8-sig")
        assert documents_of(tmp_path / name, Reading()) == texts


def test_documents_between_separators(tmp_path):
    path = tmp_path / "a.txt"
    for letters in ("", *map("".join, itertools.product("ab", repeat=6))):
        for mark in ("", "\ufeff"):
            path.write_text(mark + letters)
            for separator in ("a", "aa", "aba", "abab"):
                assert documents_of(path, Reading(separator=separator)) == letters.split(separator)


def test_what_a_folder_leaves_out_is_named(tmp_path, capsys):
    """Hidden files are no text of the user's."""
    folder, texts = tmp_path / ".in", ["B.JSONL", "d.parquet/g.txt", "f.TXT"]
    others = "c.jsonl.gz d.json .ipynb_checkpoints/a.txt ._a.jsonl .b.json"
    for name in texts + others.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "x"}')
    (folder / "linked").symlink_to(folder / "d.parquet")
    (folder / "broken.txt").symlink_to("nothing")
    found = tokenize_text.find_files([folder])
    assert [str(path.relative_to(folder)) for path in found] == texts
    told = capsys.readouterr().err
    assert told.startswith(f"note: left out of {folder} (linked folders, and what does not end in ")
    assert told.endswith("): broken.txt, c.jsonl.gz, d.json, linked\n")
    assert documents_of(folder / "B.JSONL", Reading()) == ["x"]
    for number in range(7):
        (folder / f"x{number}").touch()
    tokenize_text.find_files([folder])
    assert capsys.readouterr().err.endswith(", x3, x4, 2 more\n")


def test_a_row_that_is_no_text_is_one_bad_document(tmp_path):
    """Bytes are text if they are UTF-8, in a column of text or of bytes."""
    texts = pyarrow.array([b"caf\xc3\xa9", b"\xff", None, b"x"], pyarrow.binary())
    table = pyarrow.table({"raw": texts, "text": texts.view(pyarrow.string())})
    parquet.write_table(table, tmp_path / "a.parquet")
    for field in ("raw", "text"):
        found = []
        for record in tokenize_text.records(tmp_path / "a.parquet", Reading(field)):
            try:
                found.append(tokenize_text.text_of(record, Reading(field)))
            except UserError as error:
                found.append(str(error).partition("a.parquet, ")[2])
        bytes_and_none = "row 2 is not UTF-8 text (invalid start byte): convert it"
        assert found[:2] == ["caf\u00e9", bytes_and_none] and found[3:] == ["x"]
        assert found[2] == f"row 3: column {field!r} holds NoneType, not text: set --field"


FRACTION = {"val_docs": 0, "val_fraction": 0.2}


def build(source: Path, out: Path, **options) -> tokenize_text.Tally:
    options = Options(**{"vocab_size": 400, "val_docs": 5, **options})
    with shards.locked(out), tokenize_text.new_folder(out, False) as folder:
        return tokenize_text.build([source], folder, options, Reading())


def decoded(folder: Path, split: str) -> list[str]:
    pieces = shards.load_tokenizer(folder / "tokenizer.model")
    coder = caseops.Tokenizer(str(folder / "tokenizer.model"), pieces.vocab_size())
    documents = inspect_shards.SplitReport(folder, split).documents()
    return [coder.decode(tokens.tolist()) for tokens in documents]


@pytest.mark.parametrize("caseops", [False, True])
def test_shards_hold_the_documents(source, tmp_path, caseops, monkeypatch, capsys):
    """A given tokenizer makes them again, with any number of workers; one for CaseOps is recognised
    by its operators."""
    out = tmp_path / "out"
    tally = build(source, out, caseops=caseops, shard_tokens=1000)
    manifest = shards.read_manifest(out)
    assert manifest["splits"] == tally.splits and manifest["tokenizer"]["caseops"] is caseops
    for split, texts in (("val", DOCUMENTS[:5]), ("train", DOCUMENTS[5:])):
        assert decoded(out, split) == texts
        assert tally.splits[split]["bytes"] == sum(len(text.encode()) for text in texts)
    files = sorted(manifest["files"].items())
    counts = [entry["tokens"] for name, entry in files if "train" in name]
    assert len(counts) > 3 and set(counts[:-1]) == {1000}
    assert sum(counts) == tally.splits["train"]["tokens"]
    assert any("val_bytes" in name for name in manifest["files"]) is caseops
    monkeypatch.setattr(tokenize_text, "CHUNK_BYTES", 3000)
    given = {"tokenizer": out / "tokenizer.model", "workers": 3}
    build(source, tmp_path / "again", shard_tokens=1000, **given)
    assert shards.read_manifest(tmp_path / "again")["tokenizer"] == manifest["tokenizer"]
    for name in manifest["files"]:
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()
        assert train_gpt.tokenizer_of(out / name) == manifest["tokenizer"]["sha256"]
    capsys.readouterr()
    assert inspect_shards.inspect(out, None, 1) == []
    printed = capsys.readouterr().out
    assert f"{tally.splits['train']['bytes']:,} bytes" in printed
    assert f"{DOCUMENTS[0][:30]!r}"[1:-1] in printed
    names = {path.name for path in out.iterdir()}
    assert names == {*manifest["files"], "manifest.json", "tokenizer.model"}


def test_a_fraction_does_not_depend_on_the_order(source, tmp_path):
    found = []
    for texts in (DOCUMENTS, DOCUMENTS[::-1]):
        write_lines(source, texts)
        split, out = tokenize_text.Split(**FRACTION), tmp_path / str(len(found))
        sample = tokenize_text.sample_texts([source], Reading(), "identity", split, 1 << 30)
        build(source, out, **FRACTION)
        # The sample in its order, or the tokenizer may depend on it
        found.append((sorted(decoded(out, "val")), sample))
    assert found[0] == found[1] and 0.08 < len(found[0][0]) / len(DOCUMENTS) < 0.35


def test_a_small_sample_has_no_document_of_validation(source):
    """The first documents are in validation, whether the sample has them or not."""
    first, size = len(DOCUMENTS) // 3, source.stat().st_size // 4
    share = size / source.stat().st_size * 2**32
    lines = source.read_bytes().splitlines(keepends=True)[first : len(DOCUMENTS)]
    chosen = [json.loads(line)["text"] for line in lines if zlib.crc32(line) <= share]
    split = tokenize_text.Split(first, 0)
    found = tokenize_text.sample_texts([source], Reading(), "identity", split, size)
    assert found == sorted(chosen) and 5 < len(found) < len(lines)


@pytest.mark.parametrize("rule, options", [("identity", {}), ("nmt_nfkc", FRACTION)])
def test_no_document_on_both_sides(source, tmp_path, rule, options):
    """Not even documents that are equal only after normalisation."""
    again = [text.replace("\n", " \n  ") if rule == "nmt_nfkc" else text for text in DOCUMENTS]
    write_lines(source, DOCUMENTS + again)
    tally = build(source, tmp_path / "out", normalizer=rule, **options)
    train, val = (decoded(tmp_path / "out", split) for split in ("train", "val"))
    assert not set(train) & set(val) and len(set(val)) == len(val) and tally.repeated == len(val)
    assert inspect_shards.inspect(tmp_path / "out", None, 0) == []


def test_a_tokenizer_is_not_trained_on_validation(source, tmp_path):
    write_lines(source, [f"{'zqzq' * 50} {i}" for i in range(20)] + DOCUMENTS)
    for val_docs, known in ((20, False), (1, True)):
        build(source, tmp_path / str(val_docs), val_docs=val_docs)
        pieces = shards.load_tokenizer(tmp_path / str(val_docs) / "tokenizer.model")
        assert (pieces.piece_to_id("zq") != pieces.unk_id()) == known


# ---- The folder that is written ------------------------------------------------------------------
MADE = ["fineweb_train_000000.bin", "fineweb_val_000000.bin", "manifest.json", "tokenizer.model"]


def put(out: Path, force: bool = True, text: str = "new") -> None:
    """What a build does with its files."""
    with shards.locked(out), tokenize_text.new_folder(out, force) as folder:
        for name in MADE:
            (folder / name).write_text(text)


def test_a_folder_that_has_a_manifest_is_complete(tmp_path, monkeypatch):
    """A failed build changes nothing. The old manifest goes first, and the new one comes last."""
    out, replace, moved = tmp_path / "made" / "out", Path.replace, []
    put(out)
    with user_error("failed"), shards.locked(out), tokenize_text.new_folder(out, True) as folder:
        (folder / MADE[0]).write_text("half")
        raise UserError("failed")
    assert {path.name: path.read_text() for path in out.iterdir()} == dict.fromkeys(MADE, "new")

    def seen(path, target):
        assert not (out / "manifest.json").exists()
        moved.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", seen)
    put(out)
    assert sorted(moved) == MADE and [path.name for path in out.parent.iterdir()] == ["out"]


def test_shards_that_cannot_be_moved_are_kept(tmp_path):
    (tmp_path / MADE[0]).write_text("old")
    (tmp_path / "tokenizer.model" / "a").mkdir(parents=True)
    with user_error("cannot write"):
        put(tmp_path)
    assert [path.read_text() for path in tmp_path.rglob(MADE[0])] == ["new"]


def test_force_replaces_shards_only(tmp_path, monkeypatch):
    """Not the text, not a link, and not the place, which can be a mount point."""
    place = tmp_path / "place"
    (place / ".partial" / "old").mkdir(parents=True)  # as after a kill
    (place / "lost+found").mkdir()  # as on a new disk
    put(place, force=False)
    (tmp_path / "link").symlink_to(place)
    for name in ("a.txt", "fineweb_train_000099.bin", "fineweb_val_bytes_000000.bin"):
        (place / name).write_text("old")
    before = place.stat().st_ino
    monkeypatch.chdir(place)
    for out in (tmp_path / "link", Path("."), place):
        with user_error("--out .* exists already.*--force"):
            put(out, force=False)
        put(out, text=str(out))
        assert (place / MADE[0]).read_text() == str(out)
    assert (tmp_path / "link").is_symlink() and place.stat().st_ino == before
    assert {path.name for path in place.iterdir()} == {"a.txt", "lost+found", *MADE}
    with user_error("a.txt is a file: choose a folder"):
        put(place / "a.txt")


def test_one_program_writes_to_a_folder(tmp_path, monkeypatch, capsys):
    out, said = tmp_path / "out", "error: another program writes to out: "
    with shards.locked(out):
        for command in (f"tokenize_text.py a.txt --out out {SMALL} {ONE}", "demo_corpus.py out"):
            assert_mistake(f"{ROOT}/data/{command}".split(), tmp_path, said)
        # As if the folder were made meanwhile
        with monkeypatch.context() as patch, user_error("another program writes to"):
            patch.setattr(Path, "exists", lambda path: False)
            with shards.locked(out):
                pass
        assert out.is_dir()
    assert not out.exists(), "it is free, and was new"
    without_locks = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(fcntl, "flock", without_locks)
    out.mkdir()
    with shards.locked(out):
        told = capsys.readouterr().err
        assert told.startswith(f"note: {out} cannot be locked (No locks available): let no other")
    assert out.exists()


WAITS = """
import os, sys, time
sys.path[:0] = {path}
import program, shards, tokenize_text
from pathlib import Path
def items():
    yield 1
    print(os.getpid(), flush=True)
    time.sleep(60)
def main():
    with shards.locked(Path("out")), tokenize_text.new_folder(Path("out"), False):
        list(tokenize_text.in_workers(abs, items(), 3))
program.run_program(main)
"""


@pytest.mark.usefixtures("nothing_is_left_running")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_main_process_ends_all(tmp_path, number):
    """Its workers end with it. What is not complete is removed by the next build."""
    code = WAITS.format(path=[str(ROOT), str(ROOT / "data")])
    process = start(["-c", code], {}, tmp_path)
    os.kill(int(process.stdout.readline()), number)
    _, told = process.communicate(timeout=100)
    assert (process.returncode, told) == (-number, "")
    (tmp_path / "out" / ".partial" / "begun").touch()
    with tokenize_text.new_folder(tmp_path / "out", False) as folder:
        assert not list(folder.iterdir())


# ---- The program ---------------------------------------------------------------------------------
SMALL, GIVEN, ONE = "--vocab-size 280", "--tokenizer t.model", "--val-docs 1"


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A function that runs tokenize_text.py in a folder that has t.model."""
    monkeypatch.chdir(tmp_path)
    Path("t.model").write_bytes(tokenizer_bytes("identity"))

    def go(options: str) -> None:
        monkeypatch.setattr(sys, "argv", ["tokenize_text.py", *shlex.split(options)])
        tokenize_text.main()

    return go


def test_standard_input_and_what_is_printed(tool, tmp_path, monkeypatch, capsys):
    text = "\n\n".join([*DOCUMENTS, "", "caf\u00e9 \u2581"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    (tmp_path / "a.txt").write_text("more")
    options = r"--vocab-size 400 --val-docs 5 --separator '\n\n' --workers 1"
    tool(f"- . --out 'my out' {options}")
    told = capsys.readouterr().out
    assert "val: 5 documents" in told
    assert f"train: {len(DOCUMENTS) - 5 + 2} documents" in told, "each once"
    assert "also in validation, 1 empty\n" in told
    assert "normaliser: 1 documents, 2 bytes removed" in told
    line = told.splitlines()[-1].removeprefix("train on it: ")
    variables = ["DATA_PATH=my out", "TOKENIZER_PATH=my out/tokenizer.model", "VOCAB_SIZE=400"]
    assert shlex.split(line)[:3] == variables and line.endswith("/run.sh")
    # The copy of standard input is gone
    assert {path.name for path in tmp_path.iterdir()} == {"my out", "a.txt", "t.model"}
    assert {path.suffix for path in Path("my out").iterdir()} == {".bin", ".json", ".model"}


def test_workers_are_as_many_as_cores_may_be_used(monkeypatch):
    command = ["tokenize_text.py", "a.txt", "--out", "out", "--vocab-size", "300"]
    monkeypatch.setattr(sys, "argv", [*command, "--val-docs", "1"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 9}, raising=False)
    assert tokenize_text.parse_arguments().workers == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS has none
    assert program.cores() == os.cpu_count()


def test_wrong_text_is_named(tool):
    for name, content, part in (
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', "line 2 has no text in a field 'text': set"),
        ("a.jsonl", b'{"text": 3}\n', "line 1 has no text in a field 'text': fix or remove that"),
        ("a.jsonl", b"[1]\n", "line 1 has no text"),
        ("a.jsonl", b'{"text": "x"\n', "line 1 is not JSON"),
        ("a.jsonl", b'{"text": "\xe9"}\n', "line 1 is not UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1 has half of a character .the lone surrog"),
        ("a.jsonl", b'{"text": "x"}\n' + b"[" * 10**5, "line 2 is not JSON .maximum recursion"),
        ("a.txt", b"caf\xe9", "is not UTF-8.*; or skip up to N such documents with --skip-bad N$"),
        ("a.parquet", b"PAR1nonsense", "is not a readable parquet file"),
        ("a.pdf", b"x", "does not end in"),
        ("a.txt", b"", "no document was left"),
    ):
        Path(name).write_bytes(content)
        start = f"^{name},? " if part.startswith(("line ", "is not")) else ""
        with user_error(start + part):
            tool(f"{name} --out out {GIVEN} {ONE} --workers 1")
        assert not Path("out").exists()


@pytest.mark.parametrize("chunk", [1, 1 << 20])  # bytes: 1 is a document
@pytest.mark.parametrize("model", [SMALL, GIVEN])
def test_bad_documents_are_skipped_on_demand(tool, model, chunk, monkeypatch, capsys):
    """Each is named, and one more than allowed, in all chunks together, ends the job."""
    monkeypatch.setattr(tokenize_text, "CHUNK_BYTES", chunk)
    bad = ['{"text": "\\ud83d"}', "{", '{"txt": "x"}', '{"text": null}']
    lines = [json.dumps({"text": text}) for text in DOCUMENTS]
    Path("docs.jsonl").write_text("\n".join([bad[0], *lines[:9], *bad[1:], *lines[9:]]))
    options = f"docs.jsonl --out out {model} --val-docs 5 --workers 2 --force --skip-bad"
    tool(f"{options} 4")
    told, named = capsys.readouterr()
    assert "also in validation, 0 empty, 4 bad\n" in told
    places = [line.split(" has ")[0].split(" is ")[0] for line in named.splitlines()]
    assert places == [f"skipped: docs.jsonl, line {n}" for n in (1, 11, 12, 13)]
    assert decoded(Path("out"), "val") + decoded(Path("out"), "train") == DOCUMENTS
    with user_error("^docs.jsonl, line 13 has no text in a field 'te"):
        tool(f"{options} 3")


SPLIT = "as all 3 are in the other split: set --val-docs"


@pytest.mark.parametrize(
    "options, part",
    [
        (f"--vocab-size 100 {ONE}", "--vocab-size: 100 is not between 262 and 65536"),
        (f"- - {SMALL} {ONE}", "-, standard input, is given twice"),
        (f"{SMALL} --val-fraction 2", "--val-fraction: 2 is not between 0 and 1"),
        (f"{GIVEN} {ONE} --caseops", "--caseops is for a tokenizer that is trained here: "),
        (f"{SMALL} {ONE} --caseops --normalizer nmt_nfkc", "--caseops is for a tokenizer that is"),
        (f"{GIVEN} --val-docs 9", f"left for train, {SPLIT} below 3 or a lower"),
        (f"{SMALL} --val-docs 9", f"left for train, {SPLIT} below 3 or a lower"),
        (f"{SMALL} --val-fraction 1e-12", f"left for val, {SPLIT} or a higher"),
        (f"{SMALL} --val-fraction 0.1 --sample-bytes 1", "the sample of --sample-bytes 1 has no"),
        # Without reading standard input. No folder can be below a file, also for root
        (f"- {SMALL} {ONE} --out .", "--out . exists already: choose another folder, or --force"),
        (f"- {SMALL} {ONE} --out a.txt/x", "cannot write a.txt/x: Not a directory; free space or"),
        (f"nowhere {SMALL} {ONE}", "nowhere does not exist"),
        (f"empty {SMALL} {ONE}", "empty has no file that ends in .txt"),
        (f"a.parquet {SMALL} {ONE} --field body", "'body': set --field to one of id, text"),
        (f"a.parquet {SMALL} {ONE} --field id", "column 'id' holds int"),
        (f"--tokenizer a.txt {ONE}", "a.txt is not a SentencePiece model"),
        (f"--vocab-size 60000 {ONE}", "a tokenizer of 60000 pieces cannot be trained on this text"),
        (f"--vocab-size 265 {ONE} --caseops", "space and newline make 266"),
    ],
)
def test_wrong_arguments_are_named(tool, options, part, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    Path("a.txt").write_text("|".join(DOCUMENTS[:3]))
    Path("empty").mkdir()
    parquet.write_table(pyarrow.table({"id": [1], "text": ["x"]}), "a.parquet")
    with pytest.raises((UserError, SystemExit)) as ended:
        tool(f"--separator '|' --out out a.txt {options}")
    assert part in f"{ended.value} {capsys.readouterr().err}"


@pytest.mark.parametrize("workers, advice", [(1, "cut the longest"), (2, "use fewer --workers")])
def test_a_worker_that_dies_is_named(source, tmp_path, monkeypatch, workers, advice):
    monkeypatch.setattr(tokenize_text, "encode_chunk", die)
    with user_error(f"a worker process died, perhaps out of memory: {advice}"):
        build(source, tmp_path / "out", workers=workers)


def die(*arguments):
    os._exit(9)


# ---- Inspection ----------------------------------------------------------------------------------
def test_documents_may_continue_in_the_next_shard(tmp_path):
    documents = [[5, 6, 7], [], [8], [9] * 12]
    tokens = np.array([token for document in documents for token in (BOS, *document)])
    for cut in (1, 7, 10, 11, 19):
        for number, part in enumerate(np.split(tokens, [cut])):
            write_shard(tmp_path / f"fineweb_train_{number:06d}.bin", part)
        report = inspect_shards.SplitReport(tmp_path, "train")
        assert [document.tolist() for document in report.documents()] == documents


def test_inspection_of_bad_shards(source, tmp_path, capsys):
    out = tmp_path / "out"
    build(source, out)
    files = {kind: out / f"fineweb_{kind}_000000.bin" for kind in ("train", "val")}
    train, val = (train_gpt.read_shard(path).copy() for path in files.values())
    files["model"] = out / "tokenizer.model"
    good = {kind: path.read_bytes() for kind, path in files.items()}

    def wrong_with(kind: str = "", tokens=None) -> str:
        for name, path in files.items():
            path.write_bytes(good[name])
        if kind == "model":
            files[kind].write_bytes(tokenizer_bytes("nmt_nfkc", 400))
        elif kind:
            write_shard(files[kind], tokens)
        return "; ".join(inspect_shards.inspect(out, None, 1))

    assert wrong_with() == ""
    first = val[: np.flatnonzero(val == BOS)[1]]
    for kind, tokens, part in (
        ("train", [*train[:-1], 6], "train_000000.bin is not the file in"),
        ("train", [*train, *first], "1 training documents that are also in validation"),
        ("train", [*train, BOS, 401], "train_000000.bin holds token 401, but"),
        ("val", [*val, BOS, 401], "val_000000.bin holds token 401, but"),
        ("model", None, "not the tokenizer that made"),
        ("val", [9, *val[1:]], "does not begin with BOS"),
    ):
        assert part in wrong_with(kind, tokens)
    (out / "fineweb_train_000007.bin").write_bytes(good["val"])
    found = wrong_with()
    assert "000007.bin is not in manifest.json" in found
    assert "5 training documents that are also in validation" in found
    (out / "fineweb_train_000007.bin").rename(out / "fineweb_val_000001.bin")
    files["val"].unlink()
    found = "; ".join(inspect_shards.inspect(out, None, 1))
    assert "val_000000.bin is in manifest.json but does not exist" in found
    (out / "fineweb_val_000001.bin").unlink()
    wrong_with("val", [*val[:-1], 6])  # a sentence for each of several faults
    part = "val_000000.bin is not the file in"
    assert_mistake([ROOT / "data" / "inspect_shards.py", out], tmp_path, part)
    with user_error(f"{tmp_path.name} has no fineweb_train_N"):
        inspect_shards.inspect(tmp_path, None)


def test_a_tokenizer_of_other_shards_is_found(data, other_tokenizer, tmp_path, capsys):
    """It has as many pieces, so nothing but the text shows it. tests/test_data.py has all cases."""
    folder = shutil.copytree(data, tmp_path / "data")
    for path in folder.glob("*.bin"):  # as the challenge's, whose headers name none
        write_shard(path, train_gpt.read_shard(path).copy())
    assert inspect_shards.inspect(folder, folder / "tokenizer.model", 1) == []
    assert "note: THE BYTES ARE UNPROVEN: " in capsys.readouterr().out
    command = [ROOT / "data" / "inspect_shards.py", folder, "--tokenizer", other_tokenizer]
    said = f"% of the first validation tokens come back when {other_tokenizer} encodes"
    assert_mistake(command, tmp_path, said)


def test_wrong_manifests_are_named(tmp_path):
    for content in (
        "{",
        '{"format": 2}',
        '{"format": 1, "files": {"../x.bin": {"bytes": 1, "tokens": 1, "sha256": ""}}}',
        '{"format": 1, "files": {"x.bin": {"bytes": "1", "tokens": [], "sha256": ""}}}',
    ):
        (tmp_path / "manifest.json").write_text(content)
        with user_error("manifest.json cannot be read as a manifest"):
            shards.read_manifest(tmp_path)
