"""bench/: what its programs compute beside times."""

import json
import sys

import pytest
import torch

from conftest import ROOT, TINY, run
from train_gpt import Hyperparameters

sys.path.insert(0, str(ROOT / "bench"))

import flops
import scaling


def test_flops_of_the_record():
    """228.49 MFLOP per token, forward and backward, counted by hand for the published shape."""
    assert abs(flops.flops_per_token(Hyperparameters(), 2048) / 1e6 - 228.49) < 0.01


def test_flops_of_a_window():
    """A window whose positions are all scored costs the forward of its tokens; fewer scored positions cost less."""
    hp = Hyperparameters()
    whole = flops.window_flops(hp, 2048, 2048)
    assert whole == pytest.approx(2048 * flops.flops_per_token(hp, 2048) / 3)
    assert 0.8 * whole < flops.window_flops(hp, 2048, 64) < whole


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
