"""Load many mutated artifacts in a process with little memory, and print what happened as a line of
JSON.

    python tests/fuzz_artifact.py 10000

Most mutations get correct checksums, so that they reach the checks behind them.
"""

import io
import json
import random
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import train_gpt
from conftest import TINY, made, weights_of


def mutate(blob: bytes, draw: random.Random) -> bytes:
    """A file damaged, truncated, stretched or forged in one of several ways."""
    kind = draw.randrange(8)
    if kind < 3:  # the ZIP file itself
        body = bytearray(blob)
        if kind == 0:  # of which the ends hold its structure
            place = draw.choice((draw.randrange(300), -draw.randrange(1, 300)))
            body[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del body[draw.randrange(len(body)) :]
        else:
            body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)
        return bytes(body)
    arrays = {name: array.tobytes() for name, array in np.load(io.BytesIO(blob)).items()}
    if kind < 5:  # noise in one array, or bytes removed or inserted
        name = draw.choice(("codes", "values"))
        array = arrays[name] = bytearray(arrays[name])
        place, count = draw.randrange(len(array)), draw.randrange(1, 40)
        if draw.random() < 0.5:
            array[place] = draw.randrange(256)
        else:
            removed, inserted = (count if draw.random() < 0.5 else 0 for _ in range(2))
            array[place : place + removed] = draw.randbytes(inserted)
    else:  # another header, which is JSON
        header = json.loads(arrays["header"])
        forge(header, draw)
        text = bytearray(json.dumps(header).encode())
        if kind == 7:  # or almost JSON
            text[draw.randrange(len(text))] = draw.randrange(256)
        arrays["header"] = text
    if draw.random() < 0.05:
        del arrays[draw.choice(list(arrays))]
    file = io.BytesIO()
    np.savez(file, **{name: np.frombuffer(array, np.uint8) for name, array in arrays.items()})
    return file.getvalue()


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
