"""tools/pack_code.py and tools/inspect_artifact.py."""

import random
import re
import sys

import numpy as np
import pytest

import train_gpt
from conftest import ROOT, made, run, weights_of

sys.path.insert(0, str(ROOT / "tools"))

import inspect_artifact
import pack_code

SOURCE = (ROOT / "train_gpt.py").read_bytes()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "train_gpt.py"
    result = run([ROOT / "tools" / "pack_code.py", "-o", path], {}, path.parent)
    assert result.returncode == 0, result.stderr
    assert f"{path.stat().st_size:,} bytes, packed from {len(SOURCE):,}" in result.stdout
    return path


def test_the_packed_script_runs(packed, tmp_path):
    helps = [run([path, "--help"], {}, tmp_path) for path in (ROOT / "train_gpt.py", packed)]
    assert helps[1].returncode == 0, helps[1].stderr
    assert helps[1].stdout == helps[0].stdout
    assert "EVAL_STRIDE=64" in helps[1].stdout


def test_the_packed_script_is_small_and_counted(packed, env, tmp_path):
    """The code size in the log is that of the file that runs, and the log begins with the readable source."""
    assert packed.stat().st_size < len(SOURCE) / 3
    result = run([packed], env(RUN_ID="p"), tmp_path)
    assert result.returncode == 0, result.stderr
    log = (tmp_path / "logs" / "p.txt").read_bytes()
    assert f"Code size: {packed.stat().st_size} bytes\n".encode() in log
    assert log.startswith(SOURCE + b"\n" + b"=" * 100)


def test_the_source_comes_back_byte_for_byte(packed):
    code = packed.read_bytes()
    assert pack_code.readable_source(code) == SOURCE
    assert pack_code.readable_source(SOURCE) == SOURCE
    assert pack_code.pack(SOURCE) == code, "packing is deterministic"
    found = {"__file__": str(packed), "__name__": "submitted"}
    exec(compile(code, str(packed), "exec"), found)
    assert found["SOURCE"] == SOURCE, "the packed script itself unpacks the same source"
    assert found["Hyperparameters"].__module__ == "submitted"


def test_packing_a_packed_script_changes_nothing(packed, tmp_path):
    result = run([ROOT / "tools" / "pack_code.py", packed, "-o", "again.py"], {}, tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "again.py").read_bytes() == packed.read_bytes()


@pytest.mark.parametrize("module", ["bz2", "lzma"])
def test_both_compressors_are_read(module, monkeypatch):
    source = b'text = "\xc3\xa9"  # ' + b"x" * 1000
    compress = pack_code.COMPRESS[module]
    monkeypatch.setattr(pack_code, "COMPRESS", {module: compress})
    code = pack_code.pack(source)
    assert f"import {module};".encode() in code
    assert pack_code.readable_source(code) == source
    found = {"__file__": "x"}
    exec(compile(code, "x", "exec"), found)
    assert found["text"] == "\u00e9"


def test_every_byte_survives_a_python_string():
    """The characters that need an escape, before and after each other and before digits."""
    special = bytes((0, 10, 13, 26, 34, 39, 48, 55, 56, 92, 110, 120, 133, 255))
    pairs = bytes(value for a in special for b in special for c in special for value in (a, b, c))
    for blob in (pairs, bytes(range(256)) * 2, random.Random(0).randbytes(100_000)):
        found = {}
        exec(b"# coding: latin-1\nblob = '" + pack_code.literal(blob) + b"'.encode('latin-1')\n", found)
        assert found["blob"] == blob


def test_damaged_packing_is_refused():
    code = pack_code.pack(SOURCE)
    middle = len(code) // 2
    for damaged in (code[:-60], code[:middle] + code[middle + 50 :], code[:middle] + b"a" * 50 + code[middle + 50 :]):
        with pytest.raises(ValueError, match="the packed script"):
            pack_code.readable_source(damaged)


def test_a_small_file_cannot_fill_the_memory():
    bomb = pack_code.pack(bytes(pack_code.MAX_SOURCE_BYTES + 1))
    assert len(bomb) < 100_000
    with pytest.raises(ValueError, match="exceeds"):
        pack_code.readable_source(bomb)


@pytest.mark.parametrize(
    "arguments, part",
    [(["nothing.py"], "cannot read nothing.py"), (["-o", "/dev/null/x"], "cannot write /dev/null/x")],
)
def test_pack_errors(arguments, part, tmp_path):
    result = run([ROOT / "tools" / "pack_code.py", *arguments], {}, tmp_path)
    assert result.returncode == 1
    assert part in result.stderr and "Traceback" not in result.stderr


# Inspection of an artifact


def test_inspection(hyperparameters, tmp_path):
    hp = hyperparameters()
    blob = train_gpt.pack_artifact(
        weights_of(made(hp, seed=1)), hp, metadata={"training": {"steps": 12}}, step_scale=1.5
    )
    (tmp_path / "a.xz").write_bytes(blob)
    result = run([ROOT / "tools" / "inspect_artifact.py", "a.xz"], {}, tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert f"{len(blob)} bytes" in lines[0]
    assert '"steps": 12' in result.stdout and '"model_dim": 32' in result.stdout
    assert re.search(r"^  coder: \"ans\"$", result.stdout, re.M)
    entries = train_gpt.open_artifact(blob)[2]
    for (kind, name, _, size), (_, codes, values) in zip(entries, train_gpt.decode_artifact(blob), strict=True):
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        if codes is None:
            assert line.endswith(f" {2 * values.numel()}   before compression")
            continue
        shape, bits, clip, entropy, coded, nbytes = line.split()[1:]
        assert shape == "x".join(map(str, codes.shape))
        assert (int(bits), float(clip), int(nbytes)) == (kind.bits, 1.5 * kind.clip, size)
        assert float(entropy) == pytest.approx(inspect_artifact.order0_entropy(codes) / codes.size, abs=1e-4)
        assert float(coded) == pytest.approx(8 * size / codes.size, abs=1e-4)
    parts = [int(word.strip(",")) for word in lines[-1].split() if word.strip(",").isdigit()]
    assert sum(parts) == len(blob) and len(parts) == 3


def test_inspection_errors(tmp_path):
    (tmp_path / "noise.xz").write_bytes(b"noise" * 100)
    for name, part in (
        ("nothing.xz", "artifact nothing.xz cannot be used: No such file"),
        ("noise.xz", "noise.xz cannot"),
    ):
        result = run([ROOT / "tools" / "inspect_artifact.py", name], {}, tmp_path)
        assert result.returncode == 1
        assert part in result.stderr and "Traceback" not in result.stderr


def test_entropy_is_per_matrix():
    codes = np.array([[[0, 1], [1, 0]], [[3, 3], [3, 3]]], dtype=np.int16)
    assert inspect_artifact.order0_entropy(codes) == 4.0  # one bit per code of the first matrix, none of the second
