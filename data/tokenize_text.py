#!/usr/bin/env python3
"""Make shards in the challenge's format, and a tokenizer for them, from any text.

    python data/tokenize_text.py books/ notes.txt --out data/datasets/mine --vocab-size 1024 --val-fraction 0.01
    python data/tokenize_text.py docs.jsonl --out ... --tokenizer data/tokenizers/fineweb_1024_bpe.model --val-docs 1000
    zstdcat dump.zst | python data/tokenize_text.py - --stdin-format jsonl --out ... --vocab-size 4096 --val-docs 1000

A document is the --field of a line of a .jsonl file or of a row of a .parquet file, a .txt file,
or, with --separator, each part of a .txt file. With --caseops the tokenizer is one for lower-case
text with operators (caseops.py), by which --tokenizer recognises it. data/README.md has the rest.

The result does not depend on the number of workers. It is built in the folder .partial of --out,
whose files move to --out when all are complete.
"""

import argparse
import codecs
import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import io
import itertools
import json
import mmap
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import caseops
import shards
import train_gpt
from train_gpt import UserError, require

# isort: split
import numpy as np
import sentencepiece

SUFFIXES = (".txt", ".jsonl", ".parquet")
ENDINGS = ", ".join(SUFFIXES)
CHUNK_BYTES = 1 << 20  # text per task of a worker
PARTIAL = ".partial"  # the folder in --out that holds what is not complete
SPACE = "\u2581"  # SentencePiece's symbol for a space
PAD, BOS, EOS, UNK = 0, train_gpt.BOS, 2, 3  # as in the published tokenizers
FEWEST_PIECES = 4 + 256 + 2  # these four, the bytes, U+2581 and the newline


# ----------------------------------------------------------------------------------------------------------------
# Files -> documents


class Reading(NamedTuple):
    """How documents are found in files."""

    field: str = "text"  # of a JSON line or a parquet row
    separator: str = ""  # between the documents of a text file; empty: one file is one document
    strip: bool = False  # remove white space around documents


class Record(NamedTuple):
    """A document as read from its file: text, or bytes for a worker to decode."""

    where: str
    raw: str | bytes
    is_json: bool = False
    fault: str = ""  # a sentence on a document that is no text


def find_files(inputs: list[Path]) -> list[Path]:
    """The text files in `inputs`, which are files and folders. Raises UserError for anything else."""
    found = []
    for path in inputs:
        if path.is_dir():
            found += search(path)
        else:
            advice = "give a file, a folder, or - for standard input"
            require(path.is_file(), f"{path} does not exist: {advice}")
            known = suffix_of(path) in SUFFIXES
            require(known, f"{path} does not end in {ENDINGS}: rename or convert it")
            found.append(path)
    return found


def search(folder: Path) -> list[Path]:
    """The text files in a folder and its folders, sorted. Prints which other files and which linked
    folders are left out; hidden ones need no word. Raises OSError for an unreadable folder."""

    def stop(error: OSError) -> None:
        raise error

    inside, left_out = [], []
    for place, folders, files in os.walk(folder, onerror=stop):
        folders[:] = (name for name in folders if not name.startswith("."))
        for path in (Path(place, name) for name in folders + files if not name.startswith(".")):
            if suffix_of(path) in SUFFIXES and path.is_file():
                inside.append(path)
            elif path.is_symlink() or not path.is_dir():
                left_out.append(str(path.relative_to(folder)))
    require(inside, f"{folder} has no file that ends in {ENDINGS}: give another folder")
    if left_out:
        names = sorted(left_out)[:9] + [f"{len(left_out) - 9} more"] * (len(left_out) > 9)
        why = f"linked folders, and what does not end in {ENDINGS}"
        print(f"note: left out of {folder} ({why}): {', '.join(names)}", file=sys.stderr)
    return sorted(inside)


def suffix_of(path: Path) -> str:
    return path.suffix.lower()


def records(path: Path, reading: Reading) -> Iterator[Record]:
    """The documents of one file, in order."""
    with train_gpt.as_user_error(f"cannot read {path}", "check the file", OSError):
        if suffix_of(path) == ".parquet":
            yield from _parquet(path, reading.field)
            return
        with open(path, "rb") as file:
            if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:  # else it is left out
                file.seek(0)
            if suffix_of(path) == ".jsonl":
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield Record(f"{path}, line {number}", line, True)
            elif not reading.separator:
                yield Record(str(path), file.read())
            else:
                yield from _parts(path, file, reading.separator.encode())


def _parts(path: Path, file: io.BufferedReader, separator: bytes) -> Iterator[Record]:
    """A memory map is searched, as a text may be larger than the memory."""
    start, size = file.tell(), os.fstat(file.fileno()).st_size
    text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    for number in itertools.count(1):
        stop = text.find(separator, start)
        yield Record(f"{path}, document {number}", text[start : stop if stop >= 0 else size])
        if stop < 0:
            return
        start = stop + len(separator)


def _parquet(path: Path, field: str) -> Iterator[Record]:
    from pyarrow import ArrowException, parquet

    unreadable = f"{path} is not a readable parquet file"
    with (
        train_gpt.as_user_error(unreadable, "give another one", ArrowException),
        parquet.ParquetFile(path) as table,
    ):
        names = table.schema_arrow.names
        advice = f"set --field to one of {', '.join(names)}"
        require(field in names, f"{path} has no column {field!r}: {advice}")
        batches = table.iter_batches(columns=[field], batch_size=256)
        values = itertools.chain.from_iterable(batch.column(0) for batch in batches)
        for number, value in enumerate(values, 1):
            where, fault = f"{path}, row {number}", ""
            try:
                text = value.as_py()  # str, or the bytes of a column without a type of text
            except UnicodeError as error:
                text, fault = "", f"{where} is not UTF-8 text ({error.reason}): convert it"
            if not isinstance(text, str | bytes):
                kind = type(text).__name__
                fault = f"{where}: column {field!r} holds {kind}, not text: set --field"
            yield Record(where, "" if fault else text, fault=fault)


def text_of(record: Record, reading: Reading) -> str:
    """The document's text. Raises UserError if it has none."""
    where, text, is_json, fault = record
    require(not fault, fault)
    try:
        if isinstance(text, bytes):
            text = text.decode()
        entry = json.loads(text) if is_json else {}
    except UnicodeError as error:
        raise UserError(f"{where} is not UTF-8 text ({error.reason}): convert it") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}): fix or remove that line") from error
    if is_json:
        fields = entry.items() if isinstance(entry, dict) else ()
        texts = {name: value for name, value in fields if isinstance(value, str)}
        names = ", ".join(list(texts)[:9])
        advice = f"set --field to one of {names}, or" if texts else "fix or"
        missing = f"{where} has no text in a field {reading.field!r}"
        require(reading.field in texts, f"{missing}: {advice} remove that line")
        text = texts[reading.field]
    if lone := re.search("[\ud800-\udfff]", text):
        half = f"{where} has half of a character (the lone surrogate {lone[0]!r})"
        raise UserError(f"{half}: fix or remove that line")
    return text.strip() if reading.strip else text


def chunked(files: list[Path], reading: Reading) -> Iterator[list[Record]]:
    """The documents of all files in order, in lists of about CHUNK_BYTES."""
    chunk, size = [], 0
    for record in itertools.chain.from_iterable(records(path, reading) for path in files):
        chunk.append(record)
        size += len(record.raw)
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


# ----------------------------------------------------------------------------------------------------------------
# Documents -> tokens, in worker processes


def kept(normalised: str, prefixed: bool = True) -> str:
    """The text behind the output of a normaliser, which may prefix a space."""
    return normalised.removeprefix(SPACE * prefixed).replace(SPACE, " ")


def key_of(text: str) -> bytes:
    """A 16-byte hash of a normalised document."""
    return hashlib.sha256(text.encode()).digest()[:16]


class Document(NamedTuple):
    """A tokenized document."""

    tokens: np.ndarray  # (n,) uint16, BOS first
    nbytes: np.ndarray | None  # (n,) of the tokens, if the tokenizer has operators
    key: bytes
    size: int  # bytes that the evaluator counts
    lost: int  # bytes that the normaliser removed
    changed: bool  # by the normaliser


class Encoded(NamedTuple):
    """The documents of a chunk in order, and sentences on bad ones."""

    documents: list[Document]
    bad: list[str]


class Encoder:
    """A tokenizer with the evaluator's byte counts."""

    def __init__(self, tokenizer: str, reading: Reading):
        self.pieces = sentencepiece.SentencePieceProcessor(model_file=tokenizer)
        self.counter = caseops.ByteCounter(tokenizer, self.pieces.vocab_size())
        self.reading = reading
        self.prefixed = self.pieces.normalize("a").startswith(SPACE)

    def encode(self, chunk: list[Record]) -> Encoded:
        """Tokenize a chunk, without what is no text. Raises UserError for wrong counts of bytes."""
        texts, places, bad = [], [], []
        for record in chunk:
            try:
                texts.append(text_of(record, self.reading))
                places.append(record.where)
            except UserError as error:
                bad.append(str(error))
        operators = self.counter.caseops
        normalised = [self._plain(text) for text in texts]
        sources = [caseops.encode(text) for text in normalised] if operators else texts
        encoded = self.pieces.encode(sources)
        documents = []
        for where, raw, text, source, ids in zip(
            places, texts, normalised, sources, encoded, strict=True
        ):
            tokens = np.array([BOS, *ids], dtype=np.uint16)
            nbytes = np.insert(self.counter.count(tokens), 0, 0)
            charged, size = int(nbytes.sum()), len(text.encode())
            require(
                charged == size,
                f"{where} has {size} bytes, but the evaluator would count {charged}: use another "
                "tokenizer (data/README.md has the requirements), or --strip if white space around "
                "documents is the cause",
            )
            require(
                not operators or caseops.decode(self._plain(source)) == text,
                f"{where} is not restored by CaseOps: the tokenizer's normaliser must be identity",
            )
            sidecar = nbytes if operators else None
            lost = len(raw.encode()) - size
            documents.append(Document(tokens, sidecar, key_of(text), size, lost, raw != text))
        return Encoded(documents, bad)

    def _plain(self, text: str) -> str:
        """The text after the tokenizer's normaliser."""
        return kept(self.pieces.normalize(text), self.prefixed)


encoder = functools.cache(Encoder)  # one for each process


def encode_chunk(tokenizer: str, reading: Reading, chunk: list[Record]) -> Encoded:
    """Tokenize a chunk in a worker process."""
    return encoder(tokenizer, reading).encode(chunk)


def begin_worker() -> None:
    """Leave Ctrl-C to the main process: a worker that it ends would print a traceback or hold a
    queue's lock. End with the main process, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def in_workers(function: Callable, items: Iterator, workers: int) -> Iterator:
    """`map(function, items)` in worker processes, in order, with few pending items."""
    with concurrent.futures.ProcessPoolExecutor(workers, initializer=begin_worker) as pool:
        pending = collections.deque()
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > 3 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except concurrent.futures.process.BrokenProcessPool as error:
            fewer = "use fewer --workers" if workers > 1 else "cut the longest documents"
            died = "a worker process died, perhaps out of memory"
            raise UserError(f"{died}: {fewer}, or free memory") from error
        finally:
            pool.shutdown(cancel_futures=True)


# ----------------------------------------------------------------------------------------------------------------
# Training a tokenizer


class Split:
    """Assigns to validation the first `val_docs` documents, or a fraction by their hashes."""

    def __init__(self, val_docs: int, val_fraction: float):
        self.val_docs = val_docs
        self.bound = int(val_fraction * 2**64)
        self.val_keys: set[bytes] = set()

    def side(self, key: bytes) -> str:
        """ "train" or "val"; "" for a document that is already in validation."""
        if key in self.val_keys:
            return ""
        if len(self.val_keys) < self.val_docs or int.from_bytes(key[:8]) < self.bound:
            self.val_keys.add(key)
            return "val"
        return "train"


def normaliser_options(rule: str, prefix: bool = True) -> dict:
    """How our tokenizers treat white space. Each document is prefixed with a space, which the
    evaluator does not count after BOS, so bytes are exact even if a document begins with spaces.
    CaseOps needs no prefix: it marks a space at the beginning."""
    removed = rule != "identity"
    return dict(add_dummy_prefix=prefix, remove_extra_whitespaces=removed, escape_whitespaces=True)


def sample_texts(
    files: list[Path], reading: Reading, rule: str, split: Split, sample_bytes: int, skip_bad=0
) -> list[str]:
    """About `sample_bytes` of training documents, chosen by their checksums, so order does not
    matter. Bad ones are left out if `skip_bad` allows any."""
    normaliser = sentencepiece.SentencePieceNormalizer(rule_name=rule, **normaliser_options(rule))
    share = min(1.0, sample_bytes / max(1, sum(path.stat().st_size for path in files))) * 2**32
    chosen = []
    for record in itertools.chain.from_iterable(records(path, reading) for path in files):
        raw = record.raw if isinstance(record.raw, bytes) else record.raw.encode()
        if zlib.crc32(raw) <= share or len(split.val_keys) < split.val_docs:
            try:
                text = kept(normaliser.normalize(text_of(record, reading)))
            except UserError as error:
                require_allowed(str(error), 1, min(1, skip_bad))  # they are counted later
                continue
            if text and split.side(key_of(text)) == "train":
                chosen.append(text)
    none = f"the sample of --sample-bytes {sample_bytes} has no document for training"
    advice = "raise it, or lower --val-docs or --val-fraction"
    require(chosen or share == 2**32, f"{none}: {advice}")
    if not chosen:
        raise nothing_left("train", len(split.val_keys))
    return sorted(chosen)


def require_allowed(sentence: str, bad: int, skip_bad: int) -> None:
    """Raise UserError for the last of so many bad documents unless all may be skipped."""
    advice = "or skip up to N such documents with --skip-bad N"
    require(bad <= skip_bad, f"{sentence}; {advice}")


def nothing_left(split: str, documents: int) -> UserError:
    """The error that all documents are in the other split."""
    left = f"no document was left for {split}, as all {documents} are in the other split"
    change = "set --val-docs or a higher --val-fraction"
    if split == "train":
        change = f"set --val-docs below {documents} or a lower --val-fraction"
    if not documents:
        return UserError("no document was left: the files are empty, give other ones")
    return UserError(f"{left}: {change}, give more text, or use --separator to split it")


def train_tokenizer(
    texts: list[str], vocab_size: int, rule: str = "identity", operators: str = ""
) -> bytes:
    """A SentencePiece BPE model with byte fallback, single digits, and pieces for U+2581 and,
    unless the normaliser `rule` replaces it, newline. `operators` (`train_gpt.CASE_OPERATORS` if
    `texts` has them) become pieces 4 to 7. At most half of the vocabulary is for single characters;
    rarer ones become bytes. Raises UserError if the vocabulary cannot be filled."""
    fewest = FEWEST_PIECES + len(operators)
    require(
        vocab_size >= fewest,
        f"--vocab-size {vocab_size} is too small: 4 control pieces, {len(operators)} operators, 256 "
        f"bytes, space and newline make {fewest}",
    )
    counts = collections.Counter(itertools.chain.from_iterable(texts))
    alphabet, seen, total = [], 0, sum(counts.values())
    for character, count in counts.most_common((vocab_size - fewest) // 2):
        if seen < 0.9995 * total and character not in "\0\n" + operators:
            alphabet.append(character)
        seen += count
    runs = re.compile(f"[ {re.escape(''.join(alphabet))}]{{1,16000}}")
    model = io.BytesIO()
    failed = f"a tokenizer of {vocab_size} pieces cannot be trained on this text"
    with train_gpt.as_user_error(failed, "give more text or a smaller --vocab-size", RuntimeError):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(run for text in texts for run in runs.findall(text)),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=1.0,
            split_digits=True,
            max_sentence_length=1 << 20,
            normalization_rule_name=rule,
            allow_whitespace_only_pieces=True,
            # Other rules make it a space
            user_defined_symbols=[*operators, *("\n" if rule == "identity" else "")],
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            minloglevel=2,
            **normaliser_options(rule, prefix=not operators),
        )
    return model.getvalue()


def adopt_tokenizer(path: Path, copy: Path) -> None:
    """Copy the tokenizer at `path`. Raises UserError if it does not fit the challenge's format."""
    pieces = shards.load_tokenizer(path)
    shards.write_file(copy, path.read_bytes())
    bos, size = pieces.bos_id(), pieces.vocab_size()
    require(
        bos == BOS and size <= 65536,
        f"--tokenizer {path} has {size} pieces and token {bos} as BOS, but in the challenge's "
        f"format every document starts with token {BOS} and tokens are below 65536",
    )


# ----------------------------------------------------------------------------------------------------------------
# Tokens -> shards


class Tally:
    """Counts of documents, tokens and bytes."""

    def __init__(self):
        zeros = {"documents": 0, "tokens": 0, "bytes": 0}
        self.splits = {"train": collections.Counter(zeros), "val": collections.Counter(zeros)}
        self.empty = self.repeated = self.bad = self.changed = self.lost = 0

    def lines(self) -> Iterator[str]:
        """The counts as text."""
        for split, counts in self.splits.items():
            rate = f"{counts['bytes'] / max(1, counts['tokens']):.3f} per token"
            figures = ", ".join(f"{count:,} {name}" for name, count in counts.items())
            yield f"{split}: {figures} ({rate})"
        bad = f", {self.bad:,} bad" * bool(self.bad)
        yield f"skipped documents: {self.repeated:,} also in validation, {self.empty:,} empty{bad}"
        changed = f"{self.changed:,} documents, {self.lost:,} bytes removed"
        yield f"changed by the tokenizer's normaliser: {changed}"


def write_shards(
    encoded: Iterator[Encoded], folder: Path, tokenizer: str, split: Split, most: int, skip_bad: int
) -> tuple[Tally, dict[str, dict]]:
    """Split documents and write them in shards of at most `most` tokens. Returns (counts, entries
    of the manifest). Raises UserError for more than `skip_bad` bad documents."""
    tally = Tally()
    names = ("train", "val", "val_bytes")
    writers = {name: shards.ShardWriter(folder, name, most, tokenizer) for name in names}
    for chunk in encoded:
        for sentence in chunk.bad:
            tally.bad += 1
            require_allowed(sentence, tally.bad, skip_bad)
            print(f"skipped: {sentence}", file=sys.stderr)
        for document in chunk.documents:
            tally.changed += document.changed
            tally.lost += document.lost
            side = split.side(document.key) if document.size else ""
            if side:
                writers[side].add(document.tokens)
                if side == "val" and document.nbytes is not None:
                    writers["val_bytes"].add(document.nbytes)
                length = len(document.tokens)
                tally.splits[side].update(documents=1, tokens=length, bytes=document.size)
            elif document.size:
                tally.repeated += 1
            else:
                tally.empty += 1
    files = {}
    for name, writer in writers.items():
        writer.close()
        if not writer.files and name in tally.splits:
            raise nothing_left(name, sum(counts["documents"] for counts in tally.splits.values()))
        files |= writer.files
    return tally, files


def content(out: Path) -> set[str]:
    """The names in a folder, without that of a build and of ext4's own folder in a new disk."""
    return {path.name for path in out.iterdir()} - {PARTIAL, "lost+found"}


@contextlib.contextmanager
def new_folder(out: Path, force: bool) -> Iterator[Path]:
    """An empty folder in `out`, which is locked. If the body succeeds, its files replace the shards
    of `out`, else it is removed; a build that is killed leaves it to the next one. What cannot be
    moved stays there. Raises UserError if `out` has files, unless `force`."""
    there = f"--out {out} exists already: choose another folder, or --force to replace its shards"
    require(force or not content(out), there)
    partial = out / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    with train_gpt.writing(partial):
        partial.mkdir()
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    with train_gpt.writing(out):
        # A folder with a manifest is complete
        for old in (out / shards.MANIFEST, *out.glob("fineweb_*.bin")):
            old.unlink(missing_ok=True)
        for path in sorted(partial.iterdir(), key=lambda path: path.name == shards.MANIFEST):
            path.replace(out / path.name)
        partial.rmdir()


class Options(NamedTuple):
    """How documents become shards."""

    tokenizer: Path | None = None  # None: train one
    vocab_size: int = 1024  # of a trained tokenizer
    normalizer: str = "identity"
    caseops: bool = False  # it is for text with operators
    sample_bytes: int = 50_000_000  # text to train it on
    val_docs: int = 0  # see Split
    val_fraction: float = 0.0
    shard_tokens: int = shards.SHARD_TOKENS
    workers: int = 1
    skip_bad: int = 0  # most documents without text


def build(
    files: list[Path],
    folder: Path,
    options: Options,
    reading: Reading,
    *,
    progress: Callable = lambda chunks: chunks,
    made_by: dict | None = None,
) -> Tally:
    """Make tokenizer.model, shards and manifest.json in the empty `folder` from the documents of
    `files`. `progress` wraps the iterator of chunks; `made_by` is the manifest's entry on the origin
    of the data (default: the options that determine the documents). Raises UserError."""
    side = {"val_docs": options.val_docs, "val_fraction": options.val_fraction}
    model = folder / "tokenizer.model"
    if options.tokenizer:
        adopt_tokenizer(options.tokenizer, model)
    else:
        sampling = options.normalizer, Split(**side), options.sample_bytes, options.skip_bad
        texts = sample_texts(files, reading, *sampling)
        operators = ""
        if options.caseops:
            texts = list(map(caseops.encode, texts))
            operators = train_gpt.CASE_OPERATORS
        made = train_tokenizer(texts, options.vocab_size, options.normalizer, operators)
        shards.write_file(model, made)
    work = functools.partial(encode_chunk, str(model), reading)
    encoded = in_workers(work, progress(chunked(files, reading)), options.workers)
    tokenizer = shards.tokenizer_entry(model, folder)
    tokenizer["caseops"] = Encoder(str(model), reading).counter.caseops
    writing = tokenizer["sha256"], Split(**side), options.shard_tokens, options.skip_bad
    tally, entries = write_shards(encoded, folder, *writing)
    made_by = made_by or {"tool": "tokenize_text.py", **side, **reading._asdict()}
    facts = {"made_by": made_by, "tokenizer": tokenizer, "splits": tally.splits}
    shards.write_manifest(folder, **facts, files=entries)
    return tally


def progress_bar(files: list[Path]) -> Callable:
    """A function that wraps an iterator of chunks with a progress bar."""
    from tqdm import tqdm

    compressed = any(suffix_of(path) == ".parquet" for path in files)
    total = None if compressed else sum(path.stat().st_size for path in files)

    def shown(chunks: Iterator[list[Record]]) -> Iterator[list[Record]]:
        with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
            for chunk in chunks:
                yield chunk
                bar.update(sum(len(record.raw) for record in chunk))

    return shown


def between(low: float, high: float) -> Callable:
    """A function that parses a number in these bounds, as the type of an argument."""

    def number(word: str) -> float:
        value = type(high)(word)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{word} is not between {low} and {high}")
        return value

    return number


def parse_arguments() -> argparse.Namespace:
    """The options. Ends the program with a message if one is out of bounds or does not fit another."""
    parser = program.parser(__doc__)
    add, count, yes = parser.add_argument, program.count, {"action": "store_true"}
    add("inputs", nargs="+", help="files, folders, or - for standard input")
    add("--out", type=Path, required=True, help="folder of shards, tokenizer and manifest to write")
    model = parser.add_mutually_exclusive_group(required=True).add_argument
    model("--vocab-size", type=between(FEWEST_PIECES, 65536), help="train a tokenizer of N pieces")
    model("--tokenizer", type=Path, help="use this SentencePiece model")
    text = "of a trained tokenizer: no change (default), or the challenge's NFKC and single spaces"
    add("--normalizer", choices=("identity", "nmt_nfkc"), help=text)
    add("--caseops", **yes, help="train one for lower-case text with operators for capitals")
    side = parser.add_mutually_exclusive_group(required=True).add_argument
    side("--val-docs", type=count, help="the first N documents are validation")
    side("--val-fraction", type=between(0, 1.0), help="about this fraction of them, by hash")
    add("--field", help="of JSON lines and parquet files (default: %(default)s)")
    add("--separator", help=r"of the documents in a text file; \n is a newline")
    add(
        "--skip-bad",
        type=between(0, 1 << 40),
        help="skip and name up to N documents that are not text",
    )
    add("--strip", **yes, help="remove white space around documents")
    add("--stdin-format", choices=("txt", "jsonl"), default="txt", help="of standard input")
    add("--sample-bytes", type=count, help="text to train a tokenizer on (%(default)s)")
    add("--shard-tokens", type=between(1, 1 << 30), help="tokens per shard (%(default)s)")
    add("--workers", type=count, help="processes (default: %(default)s)")
    add("--force", **yes, help="replace the shards in --out")
    parser.set_defaults(**Options(workers=program.cores())._asdict(), **Reading()._asdict())
    arguments = parser.parse_args()
    if arguments.caseops and (arguments.tokenizer or arguments.normalizer != "identity"):
        needs = "it needs --vocab-size and the identity normalizer"
        parser.error(f"--caseops is for a tokenizer that is trained here: {needs}")
    if arguments.inputs.count("-") > 1:
        parser.error("-, standard input, is given twice")
    return arguments


@contextlib.contextmanager
def spooled(inputs: list[str], stdin_format: str, folder: Path) -> Iterator[list[Path]]:
    """The inputs as paths. Standard input becomes a file, as a training reads it twice."""
    spool = folder / f"stdin.{stdin_format}"
    if "-" in inputs:
        with train_gpt.writing(spool), open(spool, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
    yield [spool if name == "-" else Path(name) for name in inputs]
    spool.unlink(missing_ok=True)


def main() -> None:
    arguments = parse_arguments()
    out = arguments.out
    options = Options(**{name: getattr(arguments, name) for name in Options._fields})
    reading = Reading(arguments.field, arguments.separator.replace("\\n", "\n"), arguments.strip)
    with (
        shards.locked(out),
        new_folder(out, arguments.force) as folder,
        spooled(arguments.inputs, arguments.stdin_format, folder) as inputs,
    ):
        files = find_files(inputs)
        tally = build(files, folder, options, reading, progress=progress_bar(files))
    print(*tally.lines(), sep="\n")
    vocab_size = shards.read_manifest(out)["tokenizer"]["vocab_size"]
    places = out, out / "tokenizer.model", ROOT / "run.sh"
    data, model, start = (shlex.quote(str(path)) for path in places)
    print(f"train on it: DATA_PATH={data} TOKENIZER_PATH={model} VOCAB_SIZE={vocab_size} {start}")


if __name__ == "__main__":
    program.run_program(main)
