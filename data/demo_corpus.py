#!/usr/bin/env python3
"""Make the demonstration's data from text that is on every machine: Python's standard library and
its documentation.

    python data/demo_corpus.py demo_data

A source file of the library or a topic of the documentation is one document. Validation documents
are chosen by a hash of their names. data/tokenize_text.py trains a tokenizer of 1,024 pieces and
writes the shards. If the manifest shows that the folder has the same texts, nothing is done.
"""

import hashlib
import json
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import shards
import tokenize_text
from train_gpt import require

VOCAB_SIZE = 1024
LIBRARY = Path(sysconfig.get_path("stdlib"))
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def documents(library: Path) -> dict[str, str]:
    """Texts by name: source files of the library and topics of its documentation."""
    texts = {}
    for path in library.rglob("*.py"):
        name = path.relative_to(library)
        if SKIPPED.isdisjoint(name.parts):
            try:
                texts[str(name)] = path.read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue  # a few sources use older encodings on purpose
    try:
        from pydoc_data.topics import topics

        texts |= {f"topic {name}": text for name, text in topics.items()}
    except ImportError:
        pass  # some distributions leave the topics out
    return dict(sorted(texts.items()))


def held_out(texts: dict[str, str], val_bytes: int) -> list[str]:
    """Names of the validation documents: those with the lowest hashes, up to val_bytes in total."""
    chosen, size = [], 0
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        length = len(texts[name].encode())
        # No long file dominates the validation text
        if size < val_bytes and length <= val_bytes // 4:
            chosen.append(name)
            size += length
    return sorted(chosen)


def build(folder: Path, library: Path = LIBRARY, val_bytes: int = 150_000) -> str:
    """Make the data in `folder` unless it exists. Returns a description of it. Raises UserError."""
    texts = documents(library)
    joined = "\0".join(f"{name}\0{text}" for name, text in texts.items())
    digest = hashlib.sha256(joined.encode()).hexdigest()
    made_by = {"tool": "data/demo_corpus.py", "val_bytes": val_bytes, "sha256_of_texts": digest}
    manifest = shards.read_manifest(folder)
    if manifest and manifest.get("made_by") == made_by:
        return f"already there: {json.dumps(manifest['splits'])}"
    with shards.locked(folder):
        # It moves last: a build that was killed meanwhile leaves it where it was written
        manifest = manifest or shards.read_manifest(folder / tokenize_text.PARTIAL)
        before = manifest.get("made_by") if manifest else None
        ours = isinstance(before, dict) and before.get("tool") == made_by["tool"]
        replaced = (ours and as_listed(folder, manifest)) or not tokenize_text.content(folder)
        other = f"{folder} holds something else than the demonstration's data"
        require(replaced, f"{other}: choose another folder")
        return make(folder, texts, val_bytes, made_by)


def as_listed(folder: Path, manifest: dict) -> bool:
    """Whether all shards in `folder`, and its tokenizer, are those of the manifest."""
    known = {**manifest["files"], "tokenizer.model": manifest["tokenizer"]}
    found = [*folder.glob("fineweb_*.bin"), *folder.glob("tokenizer.model")]
    there = {path.name: shards.file_sha256(path) for path in found}
    return all(digest == known.get(name, {}).get("sha256") for name, digest in there.items())


def make(folder: Path, texts: dict[str, str], val_bytes: int, made_by: dict) -> str:
    """Make the data in a locked folder. Returns a description of it. Raises UserError."""
    started = time.perf_counter()
    first = held_out(texts, val_bytes)
    few = f"the library has {len(texts)} texts, too few: use a complete Python installation"
    require(0 < len(first) < len(texts), few)
    names = first + [name for name in texts if name not in set(first)]
    with tempfile.TemporaryDirectory() as temporary, tokenize_text.new_folder(folder, True) as new:
        path = Path(temporary, "documents.jsonl")
        path.write_text("".join(json.dumps({"text": texts[name]}) + "\n" for name in names))
        chosen = {"vocab_size": VOCAB_SIZE, "val_docs": len(first), "workers": program.cores()}
        options, reading = tokenize_text.Options(**chosen), tokenize_text.Reading()
        tally = tokenize_text.build([path], new, options, reading, made_by=made_by)
    return f"made in {time.perf_counter() - started:.0f} s\n" + "\n".join(tally.lines())


def main() -> None:
    parser = program.parser(__doc__)
    parser.add_argument("folder", type=Path, help="folder to write")
    print("demonstration data", build(parser.parse_args().folder))


if __name__ == "__main__":
    program.run_program(main)
