"""bench/: what its programs compute beside times."""

import sys

import pytest
import torch

from conftest import ROOT
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
