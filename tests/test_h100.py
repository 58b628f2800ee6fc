"""The CUDA path on a device that computes nothing (bench/h100.py): `pytest -m h100`. It runs the
lines that only a GPU reaches, in a CUDA build of torch, and shows that they raise nothing. It says
nothing about numbers or times."""

import json
import re
import subprocess
from pathlib import Path

import pytest

import h100
from conftest import ROOT

VERSIONS = [name for name in h100.CUDA if (h100.HOME / f"venv-{name}" / "bin" / "python").exists()]
MISSING = f"no CUDA build of torch in {h100.HOME}: run python bench/h100.py once"
pytestmark = [pytest.mark.h100, pytest.mark.skipif(not VERSIONS, reason=MISSING)]
KNOBS = {"DEVICE": "cuda", "COMPUTE_DTYPE": "bfloat16", "MODEL_DIM": 64, "EVAL_SEQ_LEN": 64}
KNOBS |= {"GPTQ_BATCHES": 1, "LATE_QAT": 1, "QAT_THRESHOLD": 0.5, "VAL_LOSS_EVERY": 6}


def start(version: str, folder: Path, knobs: dict, *words: str) -> str:
    """Run tests/pretended.py, which must succeed. Returns its output."""
    python, driver = h100.environment(h100.HOME, version)
    program = [python, ROOT / "tests" / "pretended.py", *words]
    options = {"env": h100.preloaded(driver) | knobs, "cwd": folder, "timeout": 600}
    done = subprocess.run(program, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_the_check_of_the_machine(env, tmp_path, version):
    printed = start(version, tmp_path, env(**KNOBS), "check")
    report = json.loads(Path(tmp_path, "logs", "check.json").read_text())
    assert report["works"] and not report["errors"]
    (rank,) = report["ranks"]
    assert rank["machine"]["device"] == "NVIDIA H100 80GB HBM3"
    assert rank["attention"]["ms"].keys() == {"sdpa"}
    assert rank["attention"]["refused"].keys() == {"fa3", "cudnn"}
    assert rank["mlp"]["ms"].keys() == {"plain", "fused"} and not rank["mlp"]["refused"]
    assert re.search(r"(?m)^set:      ATTENTION=sdpa FUSED_MLP=[01]$", printed)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_whole_script(env, tmp_path, version):
    """Training, validation, checkpoints, GPTQ, export, reloading, both windows and both kinds of
    test-time training, a resumed run, and EVAL_ONLY."""

    def run(**changes) -> dict[str, dict]:
        knobs = env(**KNOBS | {"CHECKPOINT_EVERY": 5, "RUN_ID": "pretended"} | changes)
        printed = start(version, tmp_path, knobs)
        for part in ("NVIDIA H100", f"torch {version}", "note: attention cudnn skipped: "):
            assert part in printed
        lines = Path(tmp_path, "logs", f"{knobs['RUN_ID']}.jsonl").read_text().splitlines()
        return {event["event"]: event for event in map(json.loads, lines)}

    first = run(TTT_ENABLED=1)
    assert "attention:sdpa fused_mlp:1" in first["start"]["runtime"]
    kinds = {f"final_int6_{name}_exact" for name in ("roundtrip", "sliding_window", "ttt_sgd")}
    kinds |= {"start", "warmup", "train", "val", "calibration", "checkpoint", "artifact"}
    assert kinds <= first.keys()
    assert first["train"]["step"] == 10 and first["checkpoint"]["step"] == 12
    Path(tmp_path, "logs", "pretended.jsonl").unlink()  # a finished run is refused
    adapted = {"TTT_ENABLED": 1, "TTT_MODE": "lora"}
    second = run(**adapted, RESUME="auto", ITERATIONS=16, FUSED_MLP=0)
    assert "attention:sdpa fused_mlp:0" in second["start"]["runtime"]
    assert second["resumed"]["step"] == 12 and second["checkpoint"]["step"] == 16
    assert "final_int6_ttt_lora_exact" in second
    assert "final_int6_sliding_window_exact" in run(EVAL_ONLY="final_model.npz", RUN_ID="alone")


def test_the_update_and_its_communication():
    """Each way costs something, and 24 matrices cost more launches than three banks."""
    options = {"script": str(ROOT / "train_gpt.py"), "work": "update", "ranks": 8}
    options["knobs"] = {"NUM_LAYERS": "4", "MODEL_DIM": "128"}
    launches = h100.launches_of(h100.trace(h100.HOME, VERSIONS[0], options))
    updates = h100.price_updates(launches)["updates"]
    assert min(updates.values()) > 0 and updates["ours"] < updates["one call each"]
    rows = h100.price_orders(options, launches)["orders"]
    assert rows["ours"]["us"] > rows["ours"]["links"] > 0
