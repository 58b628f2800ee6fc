"""tools/pack_code.py and tools/inspect_artifact.py."""

import ast
import random
import re

import numpy as np
import pytest
import torch

import inspect_artifact
import pack_code
import train_gpt
from conftest import ROOT, assert_mistake, exported, made, run, user_error, weights_of

SOURCE = (ROOT / "train_gpt.py").read_bytes()
PACK = ROOT / "tools" / "pack_code.py"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "train_gpt.py"
    result = run([PACK, "-o", path], {}, path.parent)
    assert f"{path.stat().st_size:,} bytes, packed from {len(SOURCE):,}" in result.stdout
    return path


@pytest.fixture(scope="module")
def stripped():
    return pack_code.without_comments(SOURCE)


def test_a_packed_script_of_other_source_is_refused(packed, tmp_path):
    """It would train what train_gpt.py was."""
    assert run([PACK, "--check", packed], {}, tmp_path).stdout == ""
    (tmp_path / "old.py").write_bytes(pack_code.pack(b"x = 1"))
    part = "old.py: it is not today's train_gpt.py: run `python tools/pack_code.py -o packed.py`"
    assert_mistake([PACK, "--check", "old.py"], tmp_path, part)
    assert [path.name for path in tmp_path.iterdir()] == ["old.py"]


def test_the_packed_script_repeats_the_plain_one(packed, stripped, env, tmp_path):
    """The log begins with the source that is in the packed file, and counts that file. A checkpoint
    notes the source. Another one, as the plain script has, is a note, not an error."""
    assert packed.stat().st_size < 45_000, "a fifth of the plain one"
    knobs = env(TRAIN_LOG_EVERY=1, CHECKPOINT_EVERY=6, RESUME="auto")

    def log_of(script, name: str) -> str:
        run([script], {**knobs, "RUN_ID": name}, tmp_path)
        return (tmp_path / "logs" / f"{name}.txt").read_text(encoding="utf-8")

    plain, log = log_of(ROOT / "train_gpt.py", "plain"), log_of(packed, "p")
    form = r"(?m)^(?:step:\d+/\d+|final_\w+_exact) .*?(?=(?: (?:train|eval)_time:|$))"
    figures = re.findall(form, plain)  # losses and scores
    assert len(figures) >= 14 and re.findall(form, log) == figures
    assert f"Code size: {packed.stat().st_size} bytes\n" in log
    assert log.startswith(stripped.decode() + "\n" + "=" * 100)
    assert "EVAL_STRIDE=64" in run([packed, "--help"], {}, tmp_path).stdout
    (tmp_path / "logs" / "p.jsonl").unlink()  # as if it had been killed before its end
    log = log_of(ROOT / "train_gpt.py", "p")
    assert log.count("\nresumed: step:12 ") == 1
    assert log.count("\nnote: train_gpt.py has changed since this checkpoint\n") == 1


def test_the_source_comes_back_byte_for_byte(packed, stripped, tmp_path):
    code = packed.read_bytes()
    assert pack_code.readable_source(code) == stripped
    assert pack_code.readable_source(SOURCE) == SOURCE
    run([PACK, packed, "-o", "again.py"], {}, tmp_path)
    assert (tmp_path / "again.py").read_bytes() == code


# ---- Comments and docstrings ---------------------------------------------------------------------
def test_the_stripped_script_has_only_the_first_docstring(stripped):
    """Which is all that it reads, so that it is the same program."""
    text = stripped.decode()
    readers = r"\b(__doc__|getdoc|getsource|getsourcelines|getcomments)\b"
    assert re.findall(readers, text) == ["__doc__"]
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    assert len(nodes) > 150
    assert [type(node) for node in nodes if ast.get_docstring(node)] == [ast.Module]
    assert ast.get_docstring(ast.parse(text), clean=False) == train_gpt.__doc__


@pytest.mark.parametrize(
    "source, expected",
    [
        ("# a\nx = '# no'  # yes\n", "x = '# no'\n"),
        ("'''One.'''\n\n\nx = 1\n", '"""One."""\nx = 1\n'),
        ("class A: 'a'  # b\n", "class A:\n    pass\n"),
        ("def f():\n    'a'\n    'b'\n    return 1\n", "def f():\n    return 1\n"),
        ("def f():\n    x = 1\n    'b'\n", "def f():\n    x = 1\n    'b'\n"),
        ("x = '\u00e9'\n", "x = '\u00e9'\n"),
    ],
)
def test_what_is_removed(source, expected):
    assert pack_code.without_comments(source.encode()).decode() == expected
    assert pack_code.without_comments(expected.encode()).decode() == expected


@pytest.mark.parametrize("source", [b"x = = 1\n", b"x = 1\0\n"])
def test_what_is_no_python_is_refused(source):
    with user_error("comments cannot be removed .*: correct the script"):
        pack_code.without_comments(source)
    assert not pack_code.is_current(source)


def test_another_program_is_refused(monkeypatch):
    monkeypatch.setattr(pack_code.ast, "unparse", lambda _: "x = 2")
    with user_error("another program"):
        pack_code.without_comments(b"x = 1  # a")


# ---- The packed form -----------------------------------------------------------------------------
def test_a_packed_script_is_executed():
    source = b'text = "\xc3\xa9"  # ' + b"x" * 1000
    code = pack_code.pack(source)
    assert pack_code.readable_source(code) == source
    found = {"__file__": "x"}
    exec(compile(code, "x", "exec"), found)
    assert found["text"] == "\u00e9"


def test_every_byte_survives_a_python_string():
    noise = b"\4" + random.Random(0).randbytes(30_000)
    for blob in (b"B" + bytes(range(256)) * 2, b"\xff" * 99, b"]" + bytes(99), noise):
        digits, found = pack_code.literal(blob), {}
        assert not set(digits) & set(b"\0\n\r'\\"), "these would need an escape"
        exec(pack_code.HEAD + digits + pack_code.TAIL.partition(b"\n")[0] + b"\n", found)
        assert found["n"] == int.from_bytes(blob, "big")
        assert pack_code.from_literal(digits) == blob


def test_what_is_not_a_packed_source_is_refused(packed):
    """Damaged, or a file that would run anything but its source."""
    code = packed.read_bytes()
    before, after = code[: len(code) // 2], code[len(code) // 2 + 50 :]
    for damaged in (code[:-60], before + after, before + b"a" * 50 + after):
        with pytest.raises(ValueError, match="the packed script"):
            pack_code.readable_source(damaged)
    code = pack_code.pack(b"x = 1")
    for hidden in (b"'+open('secret').read()+'", b"\\x41", b"\n", b"\r", b"\0"):
        with pytest.raises(ValueError, match="cannot be decompressed"):
            pack_code.readable_source(code.replace(b" in '", b" in '" + hidden))


def test_a_packed_file_takes_neither_much_memory_nor_long(monkeypatch):
    bomb = pack_code.pack(bytes(pack_code.MAX_SOURCE_BYTES + 1))
    assert len(bomb) < 100_000
    with pytest.raises(ValueError, match="exceeds"):
        pack_code.readable_source(bomb)
    monkeypatch.setattr(pack_code, "MAX_DIGITS", 1000)
    with user_error("the compressed script exceeds"):
        pack_code.pack(random.Random(0).randbytes(1000))
    longer = pack_code.pack(b"x = 1").replace(b" in '", b" in '" + b"a" * 1000)
    with pytest.raises(ValueError, match="more than"):
        pack_code.readable_source(longer)


# ---- Inspection of an artifact -------------------------------------------------------------------
def test_inspection(hyperparameters, tmp_path):
    hp = hyperparameters()
    metadata = {"training": {"steps": 12}, "expected_loss": {"q": 0.00025, "tok_emb": 0.001}}
    metadata["tokenizer_sha256"] = "0" * 64  # as in every artifact of a run
    blob = exported(weights_of(made(hp, seed=1)), hp, metadata=metadata)
    (tmp_path / "a.xz").write_bytes(blob)
    told = run([ROOT / "tools" / "inspect_artifact.py", "a.xz"], {}, tmp_path).stdout
    lines, words = told.splitlines(), " ".join(told.split())  # paths decide where lines end
    assert f"{len(blob)} bytes" in lines[0] and '  coder: "ans"' in lines
    assert '"steps": 12' in words and '"MODEL_DIM": "32"' in words
    streams = train_gpt.open_artifact(blob)[2]
    for kind, name, view in train_gpt.artifact_tensors(train_gpt.load_artifact(blob)):
        line, *values = [line for line in lines if line.split()[:1] == [name]]
        if kind is None:
            assert line.endswith(f" {2 * view.numel()}  before compression")
            assert name == "resid_mix" or values
            continue
        codes = train_gpt.decode_ans(streams[name], tuple(view.shape))
        shape, *bits, nbytes = line.split()[1:5]
        assert line.split()[5:] == {"q": ["0.2500"], "tok_emb": ["1.0000"]}.get(name, [])
        assert shape == "x".join(map(str, codes.shape)) and int(nbytes) == len(streams[name])
        total = inspect_artifact.order0_entropy(codes), 8 * len(streams[name])
        expected = [n / codes.size for n in total]
        assert list(map(float, bits)) == pytest.approx(expected, abs=1e-4)
    gain, scale = torch.arange(4.0).view(2, 2), torch.tensor([[1.0] * 20, [3.0] * 19 + [6.0]])
    found = inspect_artifact.learned("q_gain", gain) + inspect_artifact.learned("a", scale)
    expected = "0 0 2, 1 1 3, mean 1 3.15, min 1 3, max 1 6"  # a column per layer
    for line, (label, *values) in zip(found, map(str.split, expected.split(", ")), strict=True):
        assert line.split()[1:] == [label, *(f"{float(value):.4f}" for value in values)]
    parts = [int(word.strip(",")) for word in lines[-2].split() if word.strip(",").isdigit()]
    assert sum(parts) == len(blob) and len(parts) == 3
    bits = 8 * len(blob) / sum(w.numel() for w in train_gpt.meta_parameters(hp).values())
    assert lines[-1] == f"  {bits:.2f} bits per weight, expected loss of rounding 0.0013 nats"


def test_entropy_is_per_matrix():
    codes = np.array([[[0, 1], [1, 0]], [[3, 3], [3, 3]]], dtype=np.int16)
    # One bit per code of the first matrix, none of the second
    assert inspect_artifact.order0_entropy(codes) == 4.0
