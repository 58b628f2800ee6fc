"""Write shards, and the manifest of a folder of shards (docs/formats.md)."""

import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt
from train_gpt import UserError

# isort: split
import numpy as np

MANIFEST = "manifest.json"
FORMAT = 1
SHARD_TOKENS = 100_000_000  # as in the published shards


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make `folder`, and keep other programs of data/ from writing to it. A new folder that stays
    empty is removed. Raises UserError if another one writes there."""
    new = not folder.exists()
    train_gpt.require(new or folder.is_dir(), f"{folder} is a file: choose a folder")
    with train_gpt.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:  # until this process and its workers end
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            busy = f"another program writes to {folder}"
            raise UserError(f"{busy}: wait for it, or choose another folder") from error
        except OSError as error:  # some network file systems have no locks
            said = f"{folder} cannot be locked ({error.strerror})"
            print(f"note: {said}: let no other program write there", file=sys.stderr)
        try:
            yield
        finally:
            if new:
                with contextlib.suppress(OSError):  # it has files
                    folder.rmdir()
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically. Raises UserError if it cannot be written."""
    with train_gpt.replacing(path) as partial:
        partial.write_bytes(content)


def write_shard(path: Path, tokens: np.ndarray, tokenizer: str = "") -> dict:
    """Write tokens (n,) in the format of `train_gpt.read_shard`, made with the tokenizer of this
    sha256. Returns the file's entry in the manifest."""
    header = np.zeros(train_gpt.SHARD_HEADER // 4, dtype="<i4")
    header[:3] = train_gpt.SHARD_MAGIC, train_gpt.SHARD_VERSION, len(tokens)
    header[3:11] = np.frombuffer(bytes.fromhex(tokenizer or 64 * "0"), "<i4")
    words = np.ascontiguousarray(tokens, dtype="<u2").data.cast("B")
    data = b"".join((header.tobytes(), words))
    write_file(path, data)
    return {"bytes": len(data), "tokens": len(tokens), "sha256": hashlib.sha256(data).hexdigest()}


class ShardWriter:
    """Writes a stream of tokens, made with the tokenizer of this sha256, as shards of one split;
    all but the last have `shard_tokens` tokens."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, tokenizer: str):
        self.folder, self.split, self.tokenizer = folder, split, tokenizer
        self.buffer = np.empty(shard_tokens, dtype=np.uint16)
        self.used = 0
        self.files: dict[str, dict] = {}

    def add(self, tokens: np.ndarray) -> None:
        """Append tokens (n,). A document may continue in the next shard."""
        while len(tokens):
            taken = tokens[: len(self.buffer) - self.used]
            self.buffer[self.used : self.used + len(taken)] = taken
            self.used += len(taken)
            tokens = tokens[len(taken) :]
            if self.used == len(self.buffer):
                self.close()

    def close(self) -> None:
        """Write the tokens in the buffer."""
        if self.used:
            name = f"fineweb_{self.split}_{len(self.files):06d}.bin"
            tokens = self.buffer[: self.used]
            self.files[name] = write_shard(self.folder / name, tokens, self.tokenizer)
            self.used = 0


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokenizer_entry(path: Path, folder: Path) -> dict:
    """The manifest's entry for the tokenizer at `path`, with its path relative to `folder`."""
    name, size = Path(os.path.relpath(path, folder)).as_posix(), load_tokenizer(path).vocab_size()
    return {"path": name, "sha256": file_sha256(path), "vocab_size": size}


def write_manifest(folder: Path, **entries) -> None:
    """Write the manifest of `folder` with these entries."""
    text = json.dumps({"format": FORMAT, **entries}, indent=1) + "\n"
    write_file(folder / MANIFEST, text.encode())


def read_manifest(folder: Path) -> dict | None:
    """The manifest of `folder`, or None if it has none. Raises UserError if it is invalid."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    advice = "make or download the data again"
    with train_gpt.as_user_error(f"{path} cannot be read as a manifest", advice, Exception):
        manifest = json.loads(path.read_bytes())
        form = manifest["format"]
        train_gpt.require(form == FORMAT, f"format {form} instead of {FORMAT}")
        for name, entry in manifest["files"].items():
            types = {type(entry[key]) for key in ("bytes", "tokens", "sha256")}
            known = Path(name).name == name and types <= {int, str}
            train_gpt.require(known, f"invalid entry {name!r}")
    return manifest


def load_tokenizer(path: Path) -> train_gpt.sentencepiece.SentencePieceProcessor:
    """The SentencePiece model at `path`. Raises UserError if there is none."""
    wrong, advice = f"{path} is not a SentencePiece model", "give another file"
    with train_gpt.as_user_error(wrong, advice, RuntimeError, OSError):
        return train_gpt.sentencepiece.SentencePieceProcessor(model_file=str(path))


def problems(folder: Path, manifest: dict, hashes: bool = True) -> list[str]:
    """A sentence on each shard that is not as in the manifest, or that a manifest of shards lacks.
    Reads every byte, or without `hashes` only headers and sizes."""
    listed = manifest["files"]
    found = [fault_of(folder / name, entry, hashes) for name, entry in listed.items()]
    names = {path.name for path in folder.glob("fineweb_*.bin")} if listed else set()
    for name in sorted(names - listed.keys()):
        found.append(f"{folder / name} is not in {MANIFEST}, but would be read: remove it")
    return list(filter(None, found))


def fault_of(path: Path, entry: dict, hashes: bool) -> str:
    """A sentence on a shard that is not as its entry in the manifest says; else ""."""
    if not path.exists():
        return f"{path} is in {MANIFEST} but does not exist"
    try:
        train_gpt.read_shard(path)
    except UserError as error:
        return str(error)
    if (size := path.stat().st_size) != entry["bytes"]:
        return f"{path} has {size} bytes, but {MANIFEST} says {entry['bytes']}"
    if hashes and file_sha256(path) != entry["sha256"]:
        return f"{path} is not the file in {MANIFEST}: its sha256 differs"
    return ""
