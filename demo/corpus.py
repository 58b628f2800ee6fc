#!/usr/bin/env python3
"""Make the demonstration's data from text that every machine has: Python's own library sources and documentation.

    python demo/corpus.py demo_data

One file of the standard library, or one topic of its documentation, is one document. Some files, chosen by a hash of
their names, are held out for validation. Written to the folder:

    fineweb_train_000000.bin, fineweb_val_000000.bin   shards in the challenge's format (the names are part of it)
    tokenizer.model                                    a SentencePiece BPE model of 1,024 pieces, trained on the spot
    val.txt                                            the validation text, for comparing with other compressors
    stamp.json                                         what the above was made from; if it still holds, nothing is done
"""

import argparse
import hashlib
import io
import json
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt

VOCAB_SIZE = 1024
VERSION = 2  # of the recipe: a folder made by another one is made anew
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
SAMPLE_BYTES = 1_500_000  # what the tokenizer learns from; more takes longer and hardly changes 1,024 pieces


def documents(library: Path) -> dict[str, str]:
    """Texts by name, in the order of names: every source file of the library, every topic of the documentation."""
    texts = {}
    for path in library.rglob("*.py"):
        name = path.relative_to(library)
        if SKIPPED.isdisjoint(name.parts):
            try:
                texts[str(name)] = path.read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue  # a few sources are in older encodings on purpose
    try:
        from pydoc_data.topics import topics

        texts |= {f"topic {name}": text for name, text in topics.items()}
    except ImportError:
        pass  # some distributions leave the topics out
    # The evaluator charges no space after the start of a document, so a document must not begin with one. Some topics
    # have several names: each text is kept once, lest it be trained on under one name and held out under another.
    kept = {text.strip() + "\n": name for name, text in sorted(texts.items(), reverse=True) if text.strip() and "\0" not in text}
    return {name: text for text, name in sorted(kept.items(), key=lambda item: item[1])}


def split(texts: dict[str, str], val_bytes: int) -> tuple[list[str], list[str]]:
    """(training, validation) texts: names in the order of their hashes are held out until val_bytes are reached."""
    held_out, size = set(), 0
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        length = len(texts[name].encode())
        if size < val_bytes and length <= val_bytes // 4:  # no single long file makes up the validation text
            held_out.add(name)
            size += length
    return [t for n, t in texts.items() if n not in held_out], [texts[name] for name in sorted(held_out)]


def train_tokenizer(texts: list[str], path: Path) -> sentencepiece.SentencePieceProcessor:
    """A BPE model that changes nothing of the text: no normalisation, bytes for rare characters, newline a piece."""
    step = max(1, sum(map(len, texts)) // SAMPLE_BYTES)
    lines = [line for text in texts[::step] for line in text.splitlines() if line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=VOCAB_SIZE, byte_fallback=True,
        character_coverage=0.9995, normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, user_defined_symbols=["\n"], minloglevel=2, num_threads=2,
    )  # fmt: skip
    train_gpt.write_atomic(path, model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def encode(texts: list[str], pieces: sentencepiece.SentencePieceProcessor) -> np.ndarray:
    """All documents, each after a BOS, as one array of uint16."""
    return np.concatenate([np.array([train_gpt.BOS, *ids], dtype=np.uint16) for ids in pieces.encode(texts, num_threads=2)])


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write tokens (n,) uint16 in the format that `train_gpt.read_shard` describes."""
    header = np.zeros(train_gpt.SHARD_HEADER_INTS, dtype="<i4")
    header[:3] = train_gpt.SHARD_MAGIC, train_gpt.SHARD_VERSION, len(tokens)
    train_gpt.write_atomic(path, header.tobytes() + tokens.astype("<u2").tobytes())


def build(folder: Path, library: Path, val_bytes: int) -> str:
    """Make everything in `folder`, unless it is there. Returns a line that says what there is."""
    texts = documents(library)
    digest = hashlib.sha256("\0".join(f"{name}\0{text}" for name, text in texts.items()).encode()).hexdigest()
    made_from = {"version": VERSION, "val_bytes": val_bytes, "texts": digest}
    stamp = folder / "stamp.json"
    if stamp.exists() and (found := json.loads(stamp.read_text()))["made_from"] == made_from:
        return f"already there: {found['summary']}"
    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    training, validation = split(texts, val_bytes)
    if not training or not validation:
        raise train_gpt.UserError(f"{library} holds {len(texts)} texts, too few for training and validation: "
                                  "use a complete Python installation")
    pieces = train_tokenizer(training, folder / "tokenizer.model")
    counter = train_gpt.ByteCounter(str(folder / "tokenizer.model"), VOCAB_SIZE)
    counts = {}
    for name, part in (("train", training), ("val", validation)):
        tokens, size = encode(part, pieces), sum(len(text.encode()) for text in part)
        charged = int(counter.count(tokens).sum())
        if charged != size:
            raise train_gpt.UserError(f"the {name} text has {size} bytes, but the evaluator would charge {charged}: "
                                      "the tokenizer changed the text")
        write_shard(folder / f"fineweb_{name}_000000.bin", tokens)
        counts[name] = f"{name} {len(part)} documents, {len(tokens):,} tokens, {size:,} bytes ({size / len(tokens):.2f} a token)"
    train_gpt.write_atomic(folder / "val.txt", "".join(validation).encode())
    summary = "; ".join(counts.values())
    train_gpt.write_atomic(stamp, json.dumps({"made_from": made_from, "summary": summary}).encode())
    return f"made in {time.perf_counter() - started:.0f} s: {summary}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sources", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder of the library's sources")
    parser.add_argument("--val-bytes", type=int, default=150_000, help="about so many bytes are held out")
    arguments = parser.parse_args()
    try:
        print("demonstration data", build(arguments.folder, arguments.sources, arguments.val_bytes))
    except train_gpt.UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
