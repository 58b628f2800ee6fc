"""Load many mutated artifacts in a process with little memory, and print what happened as a line of
JSON.

    python tests/fuzz_artifact.py 10000

Most mutations get a correct checksum, so that they reach the checks behind it.
"""

import hashlib
import json
import random
import re
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt
from conftest import TINY, made, weights_of

HEADER = len(train_gpt.ARTIFACT_MAGIC) + 6


def mutate(blob: bytes, draw: random.Random) -> bytes:
    """A file damaged, truncated, stretched or forged in one of several ways."""
    body, kind = bytearray(blob[:-32]), draw.randrange(8)
    (length,) = struct.unpack_from("<I", body, HEADER - 4)
    if kind == 0:  # noise in the streams
        for _ in range(draw.choice((1, 1, 3, 30))):
            body[draw.randrange(HEADER + length, len(body))] = draw.randrange(256)
    elif kind == 1:  # noise anywhere
        body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)
    elif kind == 2:
        del body[draw.randrange(len(body)) :]
    elif kind == 3:  # bytes removed or inserted
        place, count = draw.randrange(HEADER, len(body)), draw.randrange(1, 40)
        removed, inserted = (count if draw.random() < 0.5 else 0 for _ in range(2))
        body[place : place + removed] = draw.randbytes(inserted)
    else:  # another header, which is JSON
        header = json.loads(body[HEADER : HEADER + length])
        forge(header, draw)
        text = json.dumps(header).encode()
        if kind == 7:  # or almost JSON
            text = bytearray(text)
            text[draw.randrange(len(text))] = draw.randrange(256)
        body[HEADER - 4 : HEADER + length] = struct.pack("<I", len(text)) + bytes(text)
    sealed = bytes(body) + hashlib.sha256(body).digest()
    return sealed if draw.random() < 0.9 else bytes(body) + blob[-32:]


def forge(value, draw: random.Random) -> None:
    """Replace or remove one place of a JSON value."""
    while True:
        key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        if isinstance(value[key], dict | list) and value[key] and draw.random() < 0.9:
            value = value[key]
            continue
        old = value[key]
        number = old if isinstance(old, int | float) else 1
        sizes = (
            0,
            -1,
            1,
            number + 1,
            number * 2,
            number // 2 or 1,
            1 << 31,
            10**12,
            10**400,
            1e300,
            float("nan"),
        )
        value[key] = draw.choice((*sizes, "", "x", None, True, [], {}, [[[[1]]]]))
        if draw.random() < 0.1:
            del value[key]
        return


def main() -> None:
    files = int(sys.argv[1])
    draw = random.Random(7)
    outcomes = Counter()
    sentences = Counter()
    slowest = 0.0
    knobs = {name: str(value) for name, value in TINY.items()}
    blobs = []
    for coder in train_gpt.CODERS:
        hp = train_gpt.Hyperparameters.from_env(knobs | {"COMPRESSOR": coder})
        model = made(hp, seed=1)
        blobs.append(
            train_gpt.pack_artifact(weights_of(model), hp, metadata={"training": {"steps": 3}})
        )
        train_gpt.load_artifact(blobs[-1])
    path = Path(tempfile.mkdtemp(), "f")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    space = (
        int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024
    )
    resource.setrlimit(resource.RLIMIT_AS, (space + (1 << 30), space + (1 << 30)))
    for number in range(files):
        blob = mutate(blobs[number % len(blobs)], draw)
        began = time.process_time()
        try:
            path.write_bytes(blob)
            read, _ = train_gpt.read_artifact(str(path), {})
            with train_gpt.reading_artifact(path):
                train_gpt.load_artifact(read)
            outcomes["loaded"] += 1
        except train_gpt.UserError as error:
            outcomes["refused"] += 1
            sentences[re.sub(r"[\d.]+|\(.*\)|'.*'", "#", str(error))[:70]] += 1
        slowest = max(slowest, time.process_time() - began)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) / 1024
    found = {
        "files": files,
        **outcomes,
        "slowest_cpu_seconds": slowest,
        "peak_growth_mib": growth,
        "sentences": sentences,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
