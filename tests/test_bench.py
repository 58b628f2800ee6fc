"""bench/: what its programs compute beside times."""

import importlib.util
import json
import sys

import pytest
import sympy
import torch
from torch._inductor.dependencies import MemoryDep
from torch.utils._sympy.functions import FloorDiv, Identity, ModularIndexing

import train_gpt
from conftest import ROOT, TINY, run
from train_gpt import Hyperparameters

sys.path.insert(0, str(ROOT / "bench"))

import flops
import h100
import scaling


def test_flops_of_the_record():
    """228.49 MFLOP per token, forward and backward, counted by hand for the published shape."""
    assert abs(flops.flops_per_token(Hyperparameters(), 2048) / 1e6 - 228.49) < 0.01


@pytest.mark.parametrize("visits", [1, 3])
def test_flops_of_a_window(visits):
    """A window whose positions are all scored costs the forward of its tokens; fewer scored positions cost less."""
    hp = Hyperparameters(loop_visits=visits)
    whole = flops.window_flops(hp, 2048, 2048)
    assert whole == pytest.approx(2048 * flops.flops_per_token(hp, 2048) / 3)
    assert 0.8 * whole < flops.window_flops(hp, 2048, 64) < whole


def test_flops_of_depth_recurrence():
    """Each visit costs what a layer costs: 3 layers visited three times instead of once add 6 of 11."""
    once, thrice = (flops.flops_per_token(Hyperparameters(loop_visits=visits), 2048) for visits in (1, 3))
    head = 6 * (1024 * 512 + 512 * 128)
    assert (thrice - head) / (once - head) == pytest.approx(17 / 11)


def test_peak_of_a_cpu_is_unknown():
    assert flops.peak_flops(torch.device("cpu")) is None


def test_the_model_of_a_step():
    """One rank does not communicate, and the update of W ranks has 1 / W of the work where W divides the rows."""
    hp = Hyperparameters(num_layers=8)  # 16 rows per bank
    machine = {"token": 1e-6, "flops": 1e12, "floor": 0.0, "alpha": (0.0,), "beta": (float("inf"),)}
    one, sixteen = (scaling.modelled(hp, machine, ranks, 1000) for ranks in (1, 16))
    assert one["communication"] == 0
    assert one["passes"] == pytest.approx(1e-3)
    assert sixteen["update"] == pytest.approx(one["update"] / 16)
    ring = machine | {"alpha": (2.0,), "beta": (4.0,)}
    assert scaling.collective(ring, 40, 2, 4) == 2 * 6 + 40 * 2 * 3 / 4 / 4
    tree = machine | {"alpha": (2.0, 5.0), "beta": (4.0, 8.0)}
    assert scaling.collective(tree, 40, 1, 16) == 5 * 8 + 40 * 15 / 16 / 8


@pytest.mark.parametrize("program", ["step", "eval"])
def test_another_version_of_the_script_is_compared(program, tmp_path):
    """Here the other version is a copy of this one, so both evaluations give the same loss."""
    (tmp_path / "other.py").write_bytes((ROOT / "train_gpt.py").read_bytes())
    knobs = {name: str(value) for name, value in TINY.items()}
    options = ["--against", tmp_path / "other.py", "--rounds", 2, *(["--windows", 8] if program == "eval" else [])]
    result = run([ROOT / "bench" / f"{program}.py", *options], knobs, tmp_path)
    assert result.returncode == 0, result.stderr
    other, this = json.loads(result.stdout.splitlines()[-1])["against"]
    assert (other["variant"], other["ratio"]) == (str(tmp_path / "other.py"), 1.0)
    assert this["median_ms"] > 0 and this["ratio"] > 0
    assert this.get("nats") == other.get("nats")


def test_what_is_not_another_version_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    for name, part in (("broken.py", "cannot be imported"), ("none.py", "is not a Python file")):
        result = run([ROOT / "bench" / "step.py", "--against", tmp_path / name], {}, tmp_path)
        assert result.returncode == 1
        assert part in result.stderr and "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def tracer():
    """bench/pretended_h100/trace.py, which runs under the pretended driver."""
    path = ROOT / "bench" / "pretended_h100" / "trace.py"
    specification = importlib.util.spec_from_file_location("pretended_trace", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_a_slice_counts_as_a_slice(tracer):
    """Reads of a buffer of 1,000 rows of 96: a third of each row, overlapping parts, everything, all by one row."""
    row, column = sympy.symbols("row column", integer=True)

    def read(index, *sizes):
        return MemoryDep("buffer", index, (row, column), tuple(map(sympy.Integer, sizes)))

    third = read(96 * row + Identity(column) + 32, 1000, 32)
    assert tracer.footprint([third], 96_000) == 32_000
    assert tracer.footprint([third, read(96 * row + column + 48, 1000, 32)], 96_000) == 48_000
    assert tracer.footprint([third, read(96 * row + column, 1000, 96)], 96_000) == 96_000
    assert tracer.footprint([read(column, 1000, 96)], 96_000) == 96
    # One loop over the first two heads of 16 of every row.
    head = read(96 * FloorDiv(row, 2) + 16 * ModularIndexing(row, 1, 2) + column, 2000, 16)
    assert tracer.footprint([head, third], 96_000) == 32_000 + 32_000
    assert tracer.footprint([read(sympy.Mod(row, 7), 1000, 96)], 96_000) == 96_000  # not affine: the whole buffer


def test_costs_of_a_log():
    """A kernel or product costs the larger of bytes and operations, attention its formula."""
    log = [
        "note\tpart\tforward",
        "note\tkernel\t0",
        "triton\ttriton_poi_fused_mul_3\t40\t8",
        "product\t4096\t4096\t4096\t1\t14,14,14",
        "note\tattention\tforward\t2\t1024\t8\t64\t4",
        "note\tpart\tbackward",
        "copy\td2d\t1000",
        "copy\th2d\t1000",
    ]
    kernels = [{"name": "triton_poi_fused_mul_3", "bytes": 3.35e9, "flops": 1.58e12, "sizes": "{'x': 1024}"}]
    found = {"facts": {"peak_mib": 7, "graph_breaks": 0, "torch": "2.9.1"}, "kernels": kernels, "log": log}
    launches = h100.launches_of(found)
    kernel, product, attention, inside, outside = launches
    assert kernel["name"] == "poi_fused_mul x:1024" and h100.seconds(kernel) == pytest.approx(2e-3)
    assert h100.seconds(product) == pytest.approx(2 * 4096**3 / h100.FLOPS)
    assert attention["flops"] == 2 * 2 * 8 * 1024**2 * 64 and attention["bytes"] == 2 * 2 * 1024 * 64 * (16 + 8)
    assert (inside["part"], inside["bytes"], outside["bytes"]) == ("backward", 2000, 1000)
    assert h100.seconds(outside) == pytest.approx(1000 / h100.HOST_LINK)
    result = h100.totals(found, launches)
    assert result["launches"] == 5 and result["spilled_kernels"] == 1 and result["triton_gb"] == 3.35
    assert result["step_ms"] == pytest.approx(1e3 * sum(map(h100.seconds, launches)), abs=1e-3)


def test_the_model_of_a_gpu_refuses_what_is_no_knob():
    with pytest.raises(train_gpt.UserError, match="'LAYERS' is not KNOB=VALUE"):
        h100.parse_knobs(["NUM_LAYERS=3", "LAYERS"])
