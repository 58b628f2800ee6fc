"""data/tokenize_text.py and data/inspect_shards.py: exact bytes and disjoint splits."""

import errno
import fcntl
import functools
import hashlib
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

import program
import caseops
import inspect_shards
import shards
import tokenize_text
import train_gpt
import warm_python
from caseops import ALLCAPS, CAPNEXT, ESC, LITERALS, TITLE
from conftest import ROOT, assert_mistake, made_lines, start, train_pieces, user_error, write_shard
from tokenize_text import Options, Reading, Record
from train_gpt import BOS, CASE_OPERATORS, UserError

# Letters that a conversion in both directions changes, or whose UTF-8 length it changes.
UNEVEN = "\u00df\u1e9e\u0130\u0131\u017f\u212a\u212b\u2126\u03c2\u01c5\u01c8\u023a\u2c65\u1fbc\u1fb3\u00b5\u2160\u24b6"
# Text whose bytes are easily miscounted, by any tokenizer and normaliser.
# fmt: off
ADVERSARIAL = {
    "leading space": " begins with a space", "leading spaces": "   begins with three", "trailing": "ends so  ",
    "spaces": "runs  of   spaces    between", "only spaces": "     ", "one space": " ", "one letter": "x",
    "newlines": "\n\na\n b\n", "crlf": "a line\r\nand another\r\n", "tabs": "\ta\t\tb\t", "nul": "a\0b\0\0c",
    "emoji": "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 ok",
    "scripts": "\u4e2d\u6587 \u0627\u0644\u0639 \u0939\u093f\u0928 \u10e5\u10d0 \ua9a7",
    "combining": "e\u0301 A\u030a \ufb01 \u2168 \u00bd", "u+2581": "\u2581a\u2581\u2581b \u2581",
    "only u+2581": "\u2581", "spaces of all kinds": "a\u00a0b\u2003c\u3000d\u200be",
    "controls": "a\x01b\x7f\x85\ufeffc", "specials": "<s> </s> <unk> <pad> <0x41> \u2047", "long": "word " * 3000,
    "empty": "", "replacement": "\ufffd\ufffe\U0010ffff", "digits": "0123456789 3.14159",
    "source": "def f(x):\n\treturn  x  # \u00e9",
    "capital": "A", "space and capital": " A", "spaces and capital": "  A",
    "cases": "The NASA McDonald of SpaceX's iPhone PDFs I'LL B2B eE Ee EE", "u+2581 and capitals": "\u2581A\u2581BC dE",
    "operators": f"{CASE_OPERATORS} {CASE_OPERATORS}A{TITLE}a{ESC}{LITERALS} {ESC} A", "literals": f"{LITERALS}A",
    "cased scripts": "\u041c\u041e\u0421 \u0391\u03b8\u03ae\u03c2 \u0391\u03a3 \u0531\u0561 \u1e00\u1e01 \uff21\uff41",
    "uneven cases": "Stra\u00dfe STRA\u1e9eE I " + UNEVEN,
    "marks between letters": "E\u0301COLE \u00c9cole h\u0331H\u0331 A\u200dB",
}
# fmt: on
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


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_bytes_charged_are_the_bytes_that_the_normaliser_keeps(model, name, request):
    """The evaluator's count equals the bytes of the decoded text."""
    encoder = tokenize_text.Encoder(str(model), Reading())
    text = ADVERSARIAL[name]
    if "without" in request.node.callspec.id and text[:1] in (" ", "\u2581"):
        # No prefixed space and none removed: the first space of a document would cost nothing.
        with user_error("but the evaluator would count"):
            encoder.encode([Record(name, text)])
        return
    (document,), _ = encoder.encode([Record(name, text)])
    tokens, nbytes = document.tokens, document.nbytes
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    counter = caseops.ByteCounter(str(model), pieces.vocab_size())
    coder = caseops.Tokenizer(str(model), pieces.vocab_size())
    decoded = coder.decode(tokens[1:].tolist())
    assert tokens[0] == BOS
    assert counter.count(tokens).sum() == len(decoded.encode()) == document.size
    assert (nbytes is not None) == counter.caseops
    assert nbytes is None or nbytes.sum() == document.size
    assert document.lost == len(text.encode()) - len(decoded.encode())
    assert document.changed == (decoded != text)
    if request.node.callspec.params["model"] in ("identity", "caseops") and "\u2581" not in text:
        # Our tokenizers change nothing but U+2581, which SentencePiece takes for a space
        assert decoded == text


def test_a_tokenizer_that_would_count_other_bytes_is_refused(tmp_path):
    """Without byte fallback, by NFKC, or with a space more at the end of each document."""
    path = tmp_path / "t.model"
    train_pieces(path, LINES, 300, byte_fallback=False, **SPECIAL)
    records = [Record("line 2", b"\xff"), Record("line 3", "\u4e2d")]  # the first is no text
    with user_error("line 3 has 3 bytes, but the evaluator would count 0"):
        tokenize_text.Encoder(str(path), Reading()).encode(records)
    texts, path = list(map(caseops.encode, DOCUMENTS)), tmp_path / "caseops.model"
    path.write_bytes(tokenize_text.train_tokenizer(texts, 400, "nmt_nfkc", CASE_OPERATORS))
    encoder = tokenize_text.Encoder(str(path), Reading())
    assert encoder.encode([Record("", "plain Text")]).documents[0].size == 10
    with user_error("line 7 is not restored by CaseOps|line 7 has 3 bytes, but"):
        encoder.encode([Record("line 7", "H\u0331")])
    path = tmp_path / "suffix.model"
    train_pieces(path, LINES, 400, treat_whitespace_as_suffix=True, **SPECIAL)
    with user_error("suffix.model adds a space to the end of a text"):
        train_gpt.ByteCounter(str(path), 400)


@pytest.mark.parametrize("vocab_size", [262, 263, 2000])
def test_tokenizers_of_any_size(vocab_size, tmp_path):
    (tmp_path / "t.model").write_bytes(tokenize_text.train_tokenizer(DOCUMENTS, vocab_size))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "t.model"))
    assert pieces.vocab_size() == vocab_size and (pieces.bos_id(), pieces.eos_id()) == (1, 2)
    # Pieces of their own
    assert {pieces.piece_to_id("\u2581"), pieces.piece_to_id("\n")}.isdisjoint({pieces.unk_id()})
    assert sum(map(pieces.is_byte, range(vocab_size))) == 256
    encoder = tokenize_text.Encoder(str(tmp_path / "t.model"), Reading())
    assert encoder.encode([Record("", text) for text in ADVERSARIAL.values()]).documents


# ---- CaseOps -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text, coded",
    [
        ("all lower, 1st caf\u00e9", "all lower, 1st caf\u00e9"),
        ("The end", f"{TITLE}the end"),
        ("I am A", f"{TITLE}i am{TITLE} a"),
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
    ],
)
def test_the_grammar_of_caseops(text, coded):
    assert caseops.encode(text) == coded and caseops.decode(coded) == text


def check_caseops(text: str) -> None:
    """A round trip, no capital that has a pair, and as many bytes without the operators."""
    coded = caseops.encode(text)
    assert caseops.decode(coded) == text
    assert caseops.PAIRS.keys().isdisjoint(coded)
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
    generator = random.Random(1)
    for _ in range(1000):
        text = caseops.decode("".join(generator.choices(f"{CASE_OPERATORS}ab 1", k=20)))
        assert set(CASE_OPERATORS).isdisjoint(text)


def test_the_pairs_of_letters_never_change():
    """They are part of the format of shards that exist."""
    assert not set(UNEVEN) & {*caseops.PAIRS, *caseops.PAIRS.values()}
    assert len(set(caseops.PAIRS.values())) == len(caseops.PAIRS) == 633
    digest = hashlib.sha256("".join(itertools.chain(*caseops.PAIRS.items())).encode()).hexdigest()
    assert digest.startswith("b43ab5202c0718d2")


def test_operators_are_pieces_of_no_bytes(tmp_path):
    (tmp_path / "t.model").write_bytes(tokenizer_bytes("caseops"))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "t.model"))
    counter = caseops.ByteCounter(str(tmp_path / "t.model"), pieces.vocab_size())
    assert list(map(pieces.piece_to_id, CASE_OPERATORS)) == [4, 5, 6, 7] and counter.caseops
    texts = map(pieces.id_to_piece, range(pieces.vocab_size()))
    assert sum(not set(text).isdisjoint(CASE_OPERATORS) for text in texts) == 4
    the = pieces.piece_to_id("\u2581the")
    assert counter.count(np.array([BOS, the, 4, the, 7, the, BOS])).tolist() == [3, 0, 4, 0, 4, 0]


def test_operators_elsewhere_are_text(tmp_path):
    """Other tokenizers keep their counts, even with these characters among their pieces."""
    for symbols in ("x" + CASE_OPERATORS, CASE_OPERATORS[::-1], CASE_OPERATORS[:3] + "x"):
        model = tmp_path / f"{len(symbols)}{symbols[0] == 'x'}.model"
        model.write_bytes(tokenize_text.train_tokenizer(DOCUMENTS, 400, operators=symbols))
        counter = caseops.ByteCounter(str(model), 400)
        assert not counter.caseops
        lengths = [len(symbol.encode()) for symbol in symbols]
        assert counter.length[4 : 4 + len(symbols)].tolist() == lengths


def test_the_bytes_of_caseops_are_those_of_the_sidecar(sources, tmp_path, env, capsys):
    """The script does not guess them, not even with our manifest."""
    out = tmp_path / "out"
    build(sources, out, caseops=True, shard_tokens=1000)
    knobs = env(DATA_PATH=out, TOKENIZER_PATH=out / "tokenizer.model")
    hp = train_gpt.Hyperparameters.from_env(knobs)
    stream = train_gpt.TokenStream(out, "val", hp.vocab_size)
    tokens = stream.read(0, len(stream))
    nbytes = train_gpt.count_bytes(hp, tokens, print)
    assert nbytes.sum() == sum(len(text.encode()) for text in DOCUMENTS[:5])
    starts = np.flatnonzero(tokens == BOS)
    by_document = np.add.reduceat(np.append(0, nbytes), starts)
    assert by_document.tolist() == [len(text.encode()) for text in DOCUMENTS[:5]]
    files = {path.name for path in out.glob("fineweb_val_bytes_*.bin")}
    assert files and files < shards.read_manifest(out)["files"].keys()
    assert inspect_shards.inspect(out, None, 1) == []
    assert "by fineweb_val_bytes_*.bin, which the score uses" in capsys.readouterr().out
    for name in files:
        (out / name).unlink()
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
@pytest.fixture
def sources(tmp_path) -> dict[str, list]:
    """The same documents in every format."""
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "folder" / "deep").mkdir(parents=True)
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / "folder" / ("deep" if i % 2 else "") / f"{i:04d}.txt").write_text(text)
    lines = [json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(DOCUMENTS)]
    (tmp_path / "docs.jsonl").write_text("".join(lines) + "\n")
    (tmp_path / "all.txt").write_text("\n%%\n".join(DOCUMENTS))
    table = pyarrow.table({"id": list(range(len(DOCUMENTS))), "text": DOCUMENTS})
    parquet.write_table(table, tmp_path / "docs.parquet")
    names = {"jsonl": "docs.jsonl", "txt": "all.txt", "parquet": "docs.parquet", "folder": "folder"}
    return {kind: [tmp_path / name] for kind, name in names.items()}


def documents_of(paths: list[Path], reading: Reading) -> list[str]:
    files = tokenize_text.find_files(paths)
    records = (record for path in files for record in tokenize_text.records(path, reading))
    return [tokenize_text.text_of(record, reading) for record in records]


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet", "folder"])
def test_every_format_gives_the_same_documents(sources, kind):
    found = documents_of(sources[kind], Reading(separator="\n%%\n" if kind == "txt" else ""))
    if kind == "folder":
        assert sorted(found) == sorted(DOCUMENTS)
    else:
        assert found == DOCUMENTS


def test_documents_between_separators(tmp_path):
    """As bytes.split finds them, also those that overlap themselves."""
    path = tmp_path / "a.txt"
    for letters in ("", *map("".join, itertools.product("ab", repeat=6))):
        for mark in ("", "\ufeff"):
            path.write_text(mark + letters)
            for separator in ("a", "aa", "aba", "abab"):
                found = documents_of([path], Reading(separator=separator))
                assert found == letters.split(separator)


def test_what_a_folder_leaves_out_is_named(tmp_path, capsys):
    """Hidden files are no text of the user's."""
    folder = tmp_path / ".in"
    texts = ["B.JSONL", "d.parquet/g.txt", "f.TXT"]
    for name in [
        *texts,
        "c.jsonl.gz",
        "d.json",
        ".ipynb_checkpoints/a.txt",
        "._a.jsonl",
        ".b.json",
    ]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "x"}')
    (folder / "linked").symlink_to(folder / "d.parquet")
    (folder / "broken.txt").symlink_to("nothing")
    found = tokenize_text.find_files([folder])
    assert [str(path.relative_to(folder)) for path in found] == texts
    told = capsys.readouterr().err
    assert told.startswith(f"note: left out of {folder} (linked folders, and what does not end in ")
    assert told.endswith("): broken.txt, c.jsonl.gz, d.json, linked\n")
    assert documents_of([folder / "B.JSONL"], Reading()) == ["x"]
    for number in range(7):
        (folder / f"x{number}").touch()
    tokenize_text.find_files([folder])
    assert capsys.readouterr().err.endswith(", x3, x4, 2 more\n")


def test_a_row_that_is_no_text_is_one_bad_document(tmp_path):
    """Bytes are text if they are UTF-8, in a column of text or of bytes."""
    import pyarrow
    from pyarrow import parquet

    texts = pyarrow.array([b"caf\xc3\xa9", b"\xff", None, b"x"], pyarrow.binary())
    parquet.write_table(
        pyarrow.table({"raw": texts, "text": texts.view(pyarrow.string())}), tmp_path / "a.parquet"
    )
    for field in ("raw", "text"):
        found = []
        for record in tokenize_text.records(tmp_path / "a.parquet", Reading(field)):
            try:
                found.append(tokenize_text.text_of(record, Reading(field)))
            except UserError as error:
                found.append(str(error).partition("a.parquet, ")[2])
        assert found[::3] == ["caf\u00e9", "x"]
        assert found[1].startswith("row 2 is not UTF-8 text (invalid start byte): convert it")
        assert found[2] == f"row 3: column {field!r} holds NoneType, not text: set --field"


FRACTION = {"val_docs": 0, "val_fraction": 0.2}


def build(sources, out, force=False, **options):
    options = Options(**{"vocab_size": 400, "val_docs": 5, **options})
    return build_of(sources["jsonl"], out, options, force)


def build_of(files, out, options, force=False):
    with shards.locked(out), tokenize_text.new_folder(out, force) as folder:
        return tokenize_text.build(files, folder, options, Reading())


def decoded(folder: Path, split: str) -> list[str]:
    pieces = shards.load_tokenizer(folder / "tokenizer.model")
    coder = caseops.Tokenizer(str(folder / "tokenizer.model"), pieces.vocab_size())
    documents = inspect_shards.SplitReport(folder, split).documents()
    return [coder.decode(tokens.tolist()) for tokens in documents]


@pytest.mark.parametrize("caseops", [False, True])
def test_shards_hold_the_documents(sources, tmp_path, caseops, capsys):
    """A given tokenizer makes them again; one for CaseOps is recognised by its operators."""
    out = tmp_path / "out"
    tally = build(sources, out, caseops=caseops, shard_tokens=1000)
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
    build(sources, tmp_path / "again", tokenizer=out / "tokenizer.model", shard_tokens=1000)
    assert shards.read_manifest(tmp_path / "again")["tokenizer"]["caseops"] is caseops
    for name in manifest["files"]:
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()
    capsys.readouterr()
    assert inspect_shards.inspect(out, None, 1) == []
    printed = capsys.readouterr().out
    assert f"{tally.splits['train']['bytes']:,} bytes" in printed
    assert f"{DOCUMENTS[0][:30]!r}"[1:-1] in printed
    names = {path.name for path in out.iterdir()}
    assert names == {*manifest["files"], "manifest.json", "tokenizer.model"}
    for name in manifest["files"]:
        assert train_gpt.tokenizer_of(out / name) == manifest["tokenizer"]["sha256"]


def test_the_result_does_not_depend_on_the_workers(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_text, "CHUNK_BYTES", 3000)
    for workers in (1, 3):
        build(sources, tmp_path / str(workers), workers=workers, **FRACTION)
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "3" / path.name).read_bytes()


def test_a_fraction_does_not_depend_on_the_order(sources, tmp_path):
    def sample() -> list[str]:
        split = tokenize_text.Split(**FRACTION)
        return tokenize_text.sample_texts(sources["jsonl"], Reading(), "identity", split, 1 << 30)

    texts = sample()
    build(sources, tmp_path / "one", **FRACTION)
    lines = sources["jsonl"][0].read_text().splitlines()
    sources["jsonl"][0].write_text("\n".join(reversed(lines)))
    build(sources, tmp_path / "two", **FRACTION)
    one, two = (sorted(decoded(tmp_path / name, "val")) for name in ("one", "two"))
    assert one == two and 0.08 < len(one) / len(DOCUMENTS) < 0.35
    assert sample() == texts, "in their order, or the tokenizer may depend on it"


def test_a_small_sample_has_no_document_of_validation(sources):
    """The first documents are in validation, whether the sample has them or not."""
    path, first = sources["jsonl"][0], len(DOCUMENTS) // 3
    size = path.stat().st_size // 4
    share = size / path.stat().st_size * 2**32
    lines = path.read_bytes().splitlines(keepends=True)[first : len(DOCUMENTS)]
    chosen = [json.loads(line)["text"] for line in lines if zlib.crc32(line) <= share]
    split = tokenize_text.Split(first, 0)
    found = tokenize_text.sample_texts([path], Reading(), "identity", split, size)
    assert found == sorted(chosen) and 5 < len(found) < len(lines)


@pytest.mark.parametrize("rule, options", [("identity", {}), ("nmt_nfkc", FRACTION)])
def test_no_document_on_both_sides(sources, tmp_path, rule, options):
    """Not even documents that are equal only after normalisation."""
    again = [text.replace("\n", " \n  ") if rule == "nmt_nfkc" else text for text in DOCUMENTS]
    with open(sources["jsonl"][0], "a") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in again)
    tally = build(sources, tmp_path / "out", normalizer=rule, **options)
    train, val = (decoded(tmp_path / "out", split) for split in ("train", "val"))
    assert not set(train) & set(val) and len(set(val)) == len(val) and tally.repeated == len(val)
    assert inspect_shards.inspect(tmp_path / "out", None, 0) == []


def test_a_tokenizer_is_not_trained_on_validation(sources, tmp_path):
    texts = [f"{'zqzq' * 50} {i}" for i in range(20)]
    lines = [json.dumps({"text": text}) for text in texts + DOCUMENTS]
    sources["jsonl"][0].write_text("\n".join(lines))
    for val_docs, known in ((20, False), (1, True)):
        out = tmp_path / str(val_docs)
        build(sources, out, val_docs=val_docs)
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
        assert (pieces.piece_to_id("zq") != pieces.unk_id()) == known


def test_a_failed_build_leaves_nothing(sources, tmp_path):
    out = tmp_path / "made" / "out"
    build(sources, out, shard_tokens=1000)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with user_error("no document was left for train"):
        build(sources, out, val_docs=10_000, tokenizer=out / "tokenizer.model", force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_folder_that_has_a_manifest_is_complete(sources, tmp_path, monkeypatch):
    """The old one goes first, and the new one comes last."""
    out, replace, moved = tmp_path / "out", Path.replace, []
    build(sources, out)

    def seen(path, target):
        if target.parent == out:
            assert not (out / "manifest.json").exists()
            moved.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", seen)
    build(sources, out, tokenizer=out / "tokenizer.model", shard_tokens=1 << 20, force=True)
    assert sorted(moved) == sorted(path.name for path in out.iterdir()) and len(moved) == 4


def test_shards_that_cannot_be_moved_are_kept(tmp_path):
    (tmp_path / "fineweb_val_000000.bin").write_text("old")
    (tmp_path / "tokenizer.model" / "a").mkdir(parents=True)
    with user_error("cannot write"), tokenize_text.new_folder(tmp_path, True) as folder:
        for name in ("tokenizer.model", "fineweb_val_000000.bin"):
            (folder / name).write_text("new")
    assert [path.read_text() for path in tmp_path.rglob("fineweb_val_000000.bin")] == ["new"]


SMALL = ["--vocab-size", 280]
TOKENIZER = ["--tokenizer", "t.model"]


def run_tool(*arguments, stdin: str = "", cwd=None) -> subprocess.CompletedProcess:
    command = [warm_python.python(), ROOT / "data" / "tokenize_text.py", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=cwd)


def test_standard_input_and_what_is_printed(tmp_path):
    out = tmp_path / "my out"
    text = "\n\n".join([*DOCUMENTS, "", "caf\u00e9 \u2581"])
    options = ["--vocab-size", 400, "--val-docs", 5, "--separator", r"\n\n", "--workers", 1]
    (tmp_path / "a.txt").write_text("more")
    result = run_tool("-", ".", "--out", out, *options, stdin=text, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "val: 5 documents" in result.stdout
    assert f"train: {len(DOCUMENTS) - 5 + 2} documents" in result.stdout, "each once"
    assert "also in validation, 1 empty" in result.stdout
    assert "normaliser: 1 documents, 2 bytes removed" in result.stdout
    line = result.stdout.splitlines()[-1].removeprefix("train on it: ")
    variables = [f"DATA_PATH={out}", f"TOKENIZER_PATH={out}/tokenizer.model", "VOCAB_SIZE=400"]
    assert shlex.split(line)[:3] == variables and line.endswith("/run.sh")
    # The copy of standard input is gone
    assert {path.name for path in tmp_path.iterdir()} == {"my out", "a.txt"}
    assert {path.suffix for path in out.iterdir()} == {".bin", ".json", ".model"}


def test_a_wrong_place_is_named_before_standard_input_is_read(tmp_path, monkeypatch):
    (tmp_path / "mine").touch()
    command = ["tokenize_text.py", "-", "--out", str(tmp_path), "--vocab-size", "400"]
    monkeypatch.setattr(sys, "argv", [*command, "--val-docs", "1"])
    monkeypatch.setattr(sys, "stdin", None)
    with user_error("exists already: choose another folder, or --force to replace its shards"):
        tokenize_text.main()


def test_one_program_writes_to_a_folder(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    text = tmp_path / "a.txt"
    text.write_text("one")
    with shards.locked(out):
        said = "error: another program writes to out: "
        for command in (
            ["tokenize_text.py", text, "--out", "out", *SMALL, "--val-docs", 1],
            ["demo_corpus.py", "out"],
        ):
            assert_mistake([ROOT / "data" / command[0], *command[1:]], tmp_path, said)
        # As if the folder were made meanwhile
        with monkeypatch.context() as patch, user_error("another program writes to"):
            patch.setattr(Path, "exists", lambda path: False)
            with shards.locked(out):
                pass
        assert out.is_dir()
    assert not out.exists(), "it is free, and was new"

    def without_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    out.mkdir()
    with shards.locked(out):
        assert capsys.readouterr().err == (
            f"note: {out} cannot be locked (No locks available): let no other program write there\n"
        )
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


def test_workers_are_as_many_as_cores_may_be_used(monkeypatch):
    command = ["tokenize_text.py", "a.txt", "--out", "out", "--vocab-size", "300"]
    monkeypatch.setattr(sys, "argv", [*command, "--val-docs", "1"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 9}, raising=False)
    assert tokenize_text.parse_arguments().workers == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS has none
    assert program.cores() == os.cpu_count()


@pytest.mark.parametrize(
    "name, content, part",
    [
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', "line 2 has no text in a field 'text': set"),
        ("a.jsonl", b'{"text": 3}\n', "line 1 has no text in a field 'text': fix or remove that"),
        ("a.jsonl", b"[1]\n", "line 1 has no text"),
        ("a.jsonl", b'{"text": "x"\n', "line 1 is not JSON"),
        ("a.jsonl", b'{"text": "\xe9"}\n', "line 1 is not UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1 has half of a character .the lone surrog"),
        ("a.jsonl", b'{"text": "x"}\n' + b"[" * 10**5, "line 2 is not JSON .maximum recursion"),
        ("a.txt", b"caf\xe9", "is not UTF-8.*; or skip up to N such documents with --skip-bad N$"),
        ("a.parquet", b"PAR1nonsense", "not a readable parquet file"),
        ("a.pdf", b"x", "does not end in"),
        ("a.txt", b"", "no document was left"),
    ],
)
def test_wrong_text_is_named(tmp_path, name, content, part):
    (tmp_path / "t.model").write_bytes(tokenizer_bytes("identity"))
    (tmp_path / name).write_bytes(content)
    path = tmp_path / name
    start = f"^{re.escape(str(path))},? " if part.startswith(("line ", "is not")) else ""
    with user_error(start + part):
        files = tokenize_text.find_files([path])
        options = Options(tokenizer=tmp_path / "t.model", val_docs=1)
        build_of(files, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("chunk", [1, 1 << 20])  # bytes: 1 is a document
@pytest.mark.parametrize("model", [["--vocab-size", "280"], ["--tokenizer", "t.model"]])
def test_bad_documents_are_skipped_on_demand(tmp_path, model, chunk, monkeypatch, capsys):
    """Each is named, and one more than allowed, in all chunks together, ends the job."""
    monkeypatch.setattr(tokenize_text, "CHUNK_BYTES", chunk)
    monkeypatch.chdir(tmp_path)
    Path("t.model").write_bytes(tokenizer_bytes("identity"))
    bad = ['{"text": "\\ud83d"}', "{", '{"txt": "x"}', '{"text": null}']
    lines = [json.dumps({"text": text}) for text in DOCUMENTS]
    Path("docs.jsonl").write_text("\n".join([bad[0], *lines[:9], *bad[1:], *lines[9:]]))

    def tokenize(skipped):
        options = ["--val-docs", "5", "--workers", "2", "--skip-bad", skipped, "--force"]
        command = ["tokenize_text.py", "docs.jsonl", "--out", "out", *model, *options]
        monkeypatch.setattr(sys, "argv", command)
        tokenize_text.main()

    tokenize("4")
    told, named = capsys.readouterr()
    assert "also in validation, 0 empty, 4 bad\n" in told
    places = [line.split(" has ")[0].split(" is ")[0] for line in named.splitlines()]
    assert places == [f"skipped: docs.jsonl, line {n}" for n in (1, 11, 12, 13)]
    assert decoded(Path("out"), "val") + decoded(Path("out"), "train") == DOCUMENTS
    with user_error("^docs.jsonl, line 13 has no text in a field 'te"):
        tokenize("3")


@pytest.mark.parametrize(
    "name, texts",
    [
        ("a.txt", ["caf\u00e9\n\ufeffy"]),
        ("b.txt", ["caf\u00e9", "\ufeffy"]),
        ("a.jsonl", ["caf\u00e9", "\ufeffy"]),
    ],
)
def test_a_byte_order_mark_is_no_text(tmp_path, name, texts):
    """Only at the start of a file."""
    lines = [json.dumps({"text": t}) for t in texts] if name == "a.jsonl" else texts
    (tmp_path / name).write_text("\n".join(lines), encoding="utf-8-sig")
    reading = Reading(separator="\n" if name == "b.txt" else "")
    assert documents_of([tmp_path / name], reading) == texts


def given(model: Path):
    return build_of([model.with_name("docs.jsonl")], model.parent / "out", Options(tokenizer=model))


@pytest.mark.parametrize(
    "call, part",
    [
        (lambda folder: tokenize_text.find_files([folder / "nowhere"]), "nowhere does not exist"),
        (lambda folder: tokenize_text.find_files([folder / "empty"]), "no file that ends in .txt"),
        (lambda folder: documents_of([folder / "docs.parquet"], Reading("body")), "one of id, te"),
        (lambda folder: documents_of([folder / "docs.parquet"], Reading("id")), "'id' holds int"),
        (lambda folder: given(folder / "noise.model"), "noise.model is not a SentencePiece model"),
        (lambda folder: given(folder / "bos.model"), "token 2 as BOS, but .* starts with token 1"),
        (lambda _: tokenize_text.train_tokenizer(["a"], 261), "make 262"),
        (lambda _: tokenize_text.train_tokenizer(["a"], 60_000), "60000 pieces cannot be trained"),
        (lambda _: tokenize_text.train_tokenizer(["a"], 265, operators=CASE_OPERATORS), "make 266"),
    ],
)
def test_wrong_files_and_vocabularies_are_named(sources, tmp_path, call, part):
    (tmp_path / "empty").mkdir()
    (tmp_path / "noise.model").write_bytes(b"noise")
    train_pieces(tmp_path / "bos.model", LINES, 400, bos_id=2, eos_id=1)
    with user_error(part):
        call(tmp_path)


NO_TRAIN = "left for train, as all 3 are in the other split: set --val-docs below 3 or a lower"
NO_VAL = "left for val, as all 3 are in the other split: set --val-docs or a higher"


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["--vocab-size", 100, "--val-docs", 1], "--vocab-size: 100 is not between 262 and 65536"),
        (["-", "-", *SMALL, "--val-docs", 1], "-, standard input, is given twice"),
        ([*SMALL, "--val-fraction", 2], "--val-fraction: 2 is not between 0 and 1"),
        ([*TOKENIZER, "--val-docs", 1, "--caseops"], "--caseops is for a tokenizer that is traine"),
        ([*SMALL, "--val-docs", 1, "--caseops", "--normalizer", "nmt_nfkc"], "--caseops is for a"),
        ([*TOKENIZER, "--val-docs", 100_000], NO_TRAIN),
        ([*SMALL, "--val-docs", 100_000], NO_TRAIN),
        ([*SMALL, "--val-fraction", 1e-12], NO_VAL),
        ([*SMALL, "--val-fraction", 0.1, "--sample-bytes", 1], "the sample of --sample-bytes 1"),
    ],
)
def test_wrong_arguments_are_named(arguments, part, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("t.model").write_bytes(tokenizer_bytes("identity"))
    Path("a.txt").write_text("|".join(DOCUMENTS[:3]))
    command = ["tokenize_text.py", "a.txt", *arguments, "--separator", "|", "--out", "out"]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    with pytest.raises((UserError, SystemExit)) as ended:
        tokenize_text.main()
    assert part in f"{ended.value} {capsys.readouterr().err}"


def die(*arguments):
    os._exit(9)


@pytest.mark.parametrize("workers, advice", [(1, "cut the longest"), (2, "use fewer --workers")])
def test_a_worker_that_dies_is_named(sources, tmp_path, monkeypatch, workers, advice):
    monkeypatch.setattr(tokenize_text, "encode_chunk", die)
    with user_error(f"a worker process died, perhaps out of memory: {advice}"):
        build(sources, tmp_path / "out", workers=workers)


def test_force_replaces_shards_only(sources, tmp_path, monkeypatch):
    """Not the text, not a link, and not the place, which can be a mount point."""
    place = tmp_path / "place"
    (place / ".partial" / "old").mkdir(parents=True)  # as after a kill
    (place / "lost+found").mkdir()  # as on a new disk
    build(sources, place)
    (tmp_path / "link").symlink_to(place)
    (place / "a.txt").write_text("one")
    for name in ("fineweb_train_000099.bin", "fineweb_val_bytes_000000.bin"):
        (place / name).write_bytes(b"old")
    before = place.stat().st_ino
    monkeypatch.chdir(place)
    for out in (tmp_path / "link", Path(".")):
        with user_error("--out .* exists already.*--force"):
            build(sources, out)
        build(sources, out, force=True)
    build(sources, place, force=True)
    assert (tmp_path / "link").is_symlink() and place.stat().st_ino == before
    assert sorted(path.name for path in place.iterdir()) == [
        "a.txt",
        "fineweb_train_000000.bin",
        "fineweb_val_000000.bin",
        "lost+found",
        "manifest.json",
        "tokenizer.model",
    ]
    with user_error("a.txt is a file: choose a folder"):
        build(sources, place / "a.txt", force=True)


@pytest.mark.parametrize("name", ["a.txt", "-"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, name):
    """No folder can be below a file, also for root."""
    (tmp_path / "a.txt").write_text("one|two")
    out = tmp_path / "a.txt" / "out"
    source = tmp_path / name if name != "-" else name
    result = run_tool(source, "--out", out, "--vocab-size", 300, "--val-docs", 1, stdin="one")
    assert result.returncode == 1 and result.stderr.startswith(f"error: cannot write {out}: ")
    assert result.stderr.endswith("; free space or choose a writable folder\n")


# ---- Inspection ----------------------------------------------------------------------------------
@pytest.mark.parametrize("cut", [1, 7, 10, 11, 19])
def test_documents_may_continue_in_the_next_shard(tmp_path, cut):
    documents = [[5, 6, 7], [], [8], [9] * 12]
    tokens = np.array([token for document in documents for token in (BOS, *document)])
    for number, part in enumerate(np.split(tokens, [cut])):
        if len(part):
            write_shard(tmp_path / f"fineweb_train_{number:06d}.bin", part)
    report = inspect_shards.SplitReport(tmp_path, "train")
    assert [document.tolist() for document in report.documents()] == documents


def test_inspection_of_bad_shards(sources, tmp_path, capsys):
    out = tmp_path / "out"
    build(sources, out)
    val = out / "fineweb_val_000000.bin"
    files = dict(train=out / "fineweb_train_000000.bin", val=val, model=out / "tokenizer.model")
    good = {kind: path.read_bytes() for kind, path in files.items()}

    def wrong_after(**changes) -> str:
        for kind, path in files.items():
            path.write_bytes(changes.get(kind, good[kind]))
        return "; ".join(inspect_shards.inspect(out, None, 1))

    assert wrong_after() == ""
    tokens = train_gpt.read_shard(val)
    repeated = with_tokens(good["train"], tokens[: np.flatnonzero(tokens == BOS)[1]])
    for part, changes in {
        "train_000000.bin is not the file in": {"train": good["train"][:-2] + b"\x06\x00"},
        "1 training documents that are also in validation": {"train": repeated},
        "train_000000.bin holds token 401, but": {"train": with_tokens(good["train"], [BOS, 401])},
        "val_000000.bin holds token 401, but": {"val": with_tokens(good["val"], [BOS, 401])},
        "not the tokenizer that made": {"model": tokenizer_bytes("nmt_nfkc", 400)},
        "does not begin with BOS": {"val": good["val"][:1024] + b"\x09\x00" + good["val"][1026:]},
    }.items():
        assert part in wrong_after(**changes)
    wrong_after()
    (out / "fineweb_train_000007.bin").write_bytes(good["val"])
    found = wrong_after()
    assert "000007.bin is not in manifest.json" in found
    assert "5 training documents that are also in validation" in found
    (out / "fineweb_train_000007.bin").rename(out / "fineweb_val_000001.bin")
    val.unlink()
    found = "; ".join(inspect_shards.inspect(out, None, 1))
    assert "val_000000.bin is in manifest.json but does not exist" in found
    (out / "fineweb_val_000001.bin").unlink()
    wrong_after(val=good["val"][:-2] + b"\x06\x00")  # a sentence for each of several faults
    (tmp_path / "in").mkdir()
    part = "val_000000.bin is not the file in"
    assert_mistake([ROOT / "data" / "inspect_shards.py", out], tmp_path, part)
    with user_error("in has no fineweb_train_N"):
        inspect_shards.inspect(tmp_path / "in", None)


def test_a_tokenizer_of_other_shards_is_found(data, other_tokenizer, tmp_path, capsys):
    """It has as many pieces, so nothing but the text shows it. tests/test_data.py has all cases."""
    folder, other = shutil.copytree(data, tmp_path / "data"), Path(other_tokenizer)
    own = folder / "tokenizer.model"
    assert inspect_shards.inspect(folder, own, 1) == []
    assert "note: " not in capsys.readouterr().out
    for path in folder.glob("*.bin"):  # as the challenge's, whose headers name none
        write_shard(path, train_gpt.read_shard(path).copy())
    assert inspect_shards.inspect(folder, own, 1) == []
    assert "note: THE BYTES ARE UNPROVEN: " in capsys.readouterr().out
    command = [ROOT / "data" / "inspect_shards.py", folder, "--tokenizer", other]
    said = f"% of the first validation tokens come back when {other} encodes"
    assert_mistake(command, tmp_path, said)
    entry = {"path": "tokenizer.model", "sha256": shards.file_sha256(own)}
    shards.write_manifest(folder, files={}, tokenizer=entry)
    assert inspect_shards.inspect(folder, None, 1) == []
    assert "note: " not in capsys.readouterr().out


def with_tokens(shard: bytes, more) -> bytes:
    tokens = np.append(np.frombuffer(shard, "<u2", offset=1024), np.array(more, dtype=np.uint16))
    header = np.array([train_gpt.SHARD_MAGIC, 1, len(tokens)], dtype="<i4").tobytes()
    return header + bytes(1012) + tokens.tobytes()


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"format": 2}',
        b'{"format": 1, "files": {"../x.bin": {"bytes": 1, "tokens": 1, "sha256": ""}}}',
        b'{"format": 1, "files": {"x.bin": {"bytes": "1", "tokens": [], "sha256": ""}}}',
    ],
)
def test_wrong_manifests_are_named(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with user_error("manifest.json cannot be read as a manifest"):
        shards.read_manifest(tmp_path)
