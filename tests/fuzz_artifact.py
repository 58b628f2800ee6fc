"""Load many mutated artifacts in a process with little memory, and print a line of JSON.

    python tests/fuzz_artifact.py 10000

Most mutations get correct checksums, so that they reach the checks behind them.
"""

import io
import json
import math
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
from conftest import TINY, exported, made, weights_of


def mutate(blob: bytes, draw: random.Random) -> bytes:
    """A file damaged, truncated, stretched or forged in one of several ways."""
    kind = draw.randrange(8)
    if kind < 3:  # the ZIP file itself, of which the ends hold its structure
        end = draw.choice((draw.randrange(300), -draw.randrange(1, 300)))
        place = end if kind == 0 else draw.randrange(len(blob))
        body = bytearray(blob)
        body[place] ^= 1 << draw.randrange(8)
        return bytes(body) if kind < 2 else blob[:place]
    arrays = {name: bytearray(array) for name, array in np.load(io.BytesIO(blob)).items()}
    if kind < 5:  # noise in one array, or bytes removed or inserted
        array = arrays[draw.choice(("codes", "values"))]
        place, count = draw.randrange(len(array)), draw.randrange(1, 40)
        removed, inserted = draw.choice(((1, 1), (1, 1), (count, count), (count, 0), (0, count)))
        array[place : place + removed] = draw.randbytes(inserted)
    else:  # another header, which is JSON
        header = json.loads(arrays["header"])
        forge(header, draw)
        text = arrays["header"] = bytearray(json.dumps(header).encode())
        if kind == 7:  # or almost JSON
            text[draw.randrange(len(text))] = draw.randrange(256)
    if draw.random() < 0.05:
        del arrays[draw.choice(list(arrays))]
    file = io.BytesIO()
    np.savez(file, **{name: np.frombuffer(array, np.uint8) for name, array in arrays.items()})
    return file.getvalue()


def forge(value, draw: random.Random) -> None:
    """Replace or remove one place of a JSON value."""
    key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
    old = value[key]
    if isinstance(old, dict | list) and old and draw.random() < 0.9:
        return forge(old, draw)
    number = int(old) if isinstance(old, int | float) or str(old).isdecimal() else 1
    numbers = [0, -1, 1, number + 1, number * 2, number // 2, 1 << 31, 10**12, 10**400, 1e300]
    others = [math.nan, "", "x", None, True, [], {}, [[[[1]]]]]
    value[key] = draw.choice([*numbers, *map(str, numbers), *others])
    if draw.random() < 0.1:
        del value[key]


def main() -> None:
    files, draw = int(sys.argv[1]), random.Random(7)
    outcomes, sentences, slowest, blobs = Counter(), Counter(), 0.0, []
    for coder in train_gpt.CODERS:
        knobs = {name: str(value) for name, value in (TINY | {"COMPRESSOR": coder}).items()}
        hp = train_gpt.Hyperparameters.from_env(knobs)
        metadata = {"training": {"steps": 3}}
        blobs.append(exported(weights_of(made(hp, seed=1)), hp, metadata=metadata))
        train_gpt.load_artifact(blobs[-1])
    path = Path(tempfile.mkdtemp(), "f")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status").read_text()
    space = 1024 * int(re.search(r"VmSize:\s+(\d+)", status)[1]) + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    for number in range(files):
        path.write_bytes(mutate(blobs[number % len(blobs)], draw))
        began = time.process_time()
        try:
            read, _ = train_gpt.read_artifact(str(path), {})
            with train_gpt.reading_artifact(path):
                train_gpt.load_artifact(read)
            outcomes["loaded"] += 1
        except train_gpt.UserError as error:
            outcomes["refused"] += 1
            sentences[re.sub(r"[\d.]+|\(.*\)|'.*'", "#", str(error))[:70]] += 1
        slowest = max(slowest, time.process_time() - began)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) / 1024
    found = {"files": files, **outcomes, "sentences": sentences}
    print(json.dumps(found | {"slowest_cpu_seconds": slowest, "peak_growth_mib": growth}))


if __name__ == "__main__":
    main()
