"""FUSED_MLP: the kernel against the plain form in Triton's interpreter, where the plain form is
taken, and what ptxas makes of the kernel for an H100 (`-m h100`). The interpreter needs `pip
install triton`, on any Linux."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys

import pytest
import torch

import h100
import pack_code
import train_gpt
from conftest import ROOT, made, noise
from test_h100 import MISSING, VERSIONS


def start(*arguments, python=sys.executable, **variables) -> str:
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    command = [python, ROOT / "tests" / "fused_mlp.py", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def older(package: str, release: tuple[int, int]) -> bool:
    return tuple(map(int, importlib.metadata.version(package).split(".")[:2])) < release


@pytest.mark.skipif(sys.platform != "linux", reason="there are wheels of Triton for Linux only")
@pytest.mark.skipif(
    sys.platform == "linux" and older("triton", (3, 7)) and not older("numpy", (2, 4)),
    reason="the interpreter of Triton before 3.7 needs numpy before 2.4",
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernel_equals_the_plain_form(packed, tmp_path):
    """Output and all gradients, for sizes that no tile divides. Errors are relative to float64. In
    float32 both forms differ from it by the rounding of sums, a few 1e-7. In bf16 both round hidden
    units, their gradient and results (2^-9 at most each); the plain form rounds the product before
    the activation too, so it is the limit. Triton reads the kernel's source, which a packed script
    has in no file."""
    script = ROOT / "train_gpt.py"
    if packed:
        source = pack_code.without_comments(script.read_bytes())
        script = tmp_path / "packed.py"
        script.write_bytes(pack_code.pack(source))
    cases = json.loads(start(script, "cpu", TRITON_INTERPRET=1))
    assert cases.pop("closed gate") == [0.0] * 4, "not NaN"
    assert len(cases) == 6
    for name, found in cases.items():
        for fused, plain in zip(found["fused"], found["plain"], strict=True):
            assert fused < (1e-6 if "float32" in name else plain), (name, found)


def test_only_plain_forwards_are_fused(hyperparameters):
    """Calibration needs the inputs of every matrix, and low-rank changes their outputs."""
    hp = hyperparameters(NUM_LAYERS=2)
    model = noise(made(hp, train_gpt.load_attention("math")))
    ids = torch.randint(3, hp.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))
    plain = model(ids)
    calls = []
    model.fused_mlp = lambda *given: calls.append(tuple(t.shape for t in given)) or 0 * given[0]
    assert not torch.equal(model(ids), plain)
    assert calls == [((2, 16, 32), (2, 16, 1), (96, 32), (32, 96))] * 2
    hook = train_gpt.Calibration(model, 32)
    assert torch.equal(model(ids, observe=hook.observe), plain) and hook.sums["up"].norm() > 0
    adapter = {"mlp.a": torch.ones(2, 2, 1, 32), "mlp.b": torch.zeros(2, 2, 32, 1)}
    assert torch.equal(model(ids, adapter=adapter), plain) and len(calls) == 2


@pytest.mark.h100
@pytest.mark.skipif(not VERSIONS, reason=MISSING)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_kernel_compiles_for_an_h100(version, tmp_path):
    """One graph, tensor cores (wgmma) and TMA, no spilled register."""
    python, driver = h100.environment(h100.HOME, version)
    folders = {"PRETENDED_H100_LOG": "log", "TRITON_CACHE_DIR": "triton"}
    folders |= {"TORCHINDUCTOR_CACHE_DIR": "inductor"}  # torch sets it in this process
    variables = h100.preloaded(driver) | {name: tmp_path / one for name, one in folders.items()}
    start(ROOT / "train_gpt.py", "cuda", python=python, **variables)
    log = (tmp_path / "log").read_text()
    lines = re.findall(r"(?m)^triton\tfused_mlp\t(\d+)\t(\d+)", log)
    assert len(lines) == 2  # forward and backward
    assert all(0 < int(registers) <= 255 and spilled == "0" for registers, spilled in lines), lines
    kernels = [path.read_text() for path in (tmp_path / "triton").rglob("fused_mlp.ptx")]
    assert len(kernels) == 2
    for ptx in kernels:
        assert all(
            x in ptx for x in (".target sm_90a", "wgmma.mma_async", "cp.async.bulk.tensor.2d")
        )
