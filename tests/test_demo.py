"""tools/demo.py: the demonstration's settings on imitated machines, with the user's own winning."""

import re

import pytest

import demo
import shards
import train_gpt
from conftest import ROOT, run, user_error


@pytest.mark.parametrize("speed, name", [(1.1e13, "large"), (1.09e13, "small")])
def test_the_model_fits_the_machine(speed, name, monkeypatch):
    """DEMO_SIZE overrides the measured speed."""
    monkeypatch.setattr(demo, "forked", lambda calls: speed)
    chosen, sentence = demo.choose_size({}, 2)
    assert chosen == name
    assert f"is {name}: matrix products run at {speed / 1e9:.0f} GFLOP/s" in sentence
    assert demo.choose_size({"DEMO_SIZE": "large"}, 2)[0] == "large"
    with user_error("DEMO_SIZE=huge is not one of small, large"):
        demo.choose_size({"DEMO_SIZE": "huge"}, 2)


@pytest.mark.parametrize(
    "cores, fixed, pairs",
    [
        (1, (None, None), [(1, 1)]),
        (2, (None, None), [(1, 2), (2, 1)]),
        (4, (None, None), [(1, 4), (2, 2), (4, 1)]),
        (64, (None, None), [(1, 64), (2, 32), (4, 16), (8, 8), (8, 4), (8, 2), (8, 1)]),
        (4, (2, None), [(2, 2), (2, 1)]),
        (4, (None, 2), [(1, 2), (2, 2)]),
        (2, (None, 4), [(1, 4)]),
        (4, (3, 5), [(3, 5)]),
    ],
)
def test_candidates_divide_the_eight_sequences_and_use_all_cores(cores, fixed, pairs):
    assert demo.candidates(cores, 8, *fixed) == pairs


@pytest.mark.parametrize(
    "quota, expected",
    [
        ({}, 3),
        ({"cpu.max": "max 100000"}, 3),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
)
def test_cores_are_physical_and_within_the_limits(quota, expected, tmp_path):
    """CPUs 0 and 4 are one core, 1 and 5 another; of the last, one may be used."""
    for cpu, siblings in {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5", 2: "2,6"}.items():
        path = tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(siblings + "\n")
    for name, text in quota.items():
        path = tmp_path / "fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert demo.physical_cores({0, 1, 2, 4, 5}, tmp_path) == expected


def test_the_fastest_pair_is_chosen_and_fixed_ones_are_not_measured(monkeypatch):
    speeds = {(1, 4): 5.0, (2, 2): 7.0, (4, 1): 6.0}
    monkeypatch.setattr(demo, "measure", lambda _, pairs: {pair: speeds[pair] for pair in pairs})
    environ = {name: str(value) for name, value in demo.SIZES["small"].items()}
    chosen, sentence = demo.choose_ranks(environ, 4)
    assert chosen == {"NPROC": "2", "OMP_NUM_THREADS": "2"}
    assert "2 x 2: 7.0, 4 x 1: 6.0, 1 x 4: 5.0; NPROC=2 OMP_NUM_THREADS=2" in sentence
    chosen, sentence = demo.choose_ranks({**environ, "NPROC": "4", "OMP_NUM_THREADS": "3"}, 4)
    assert chosen == {"NPROC": "4", "OMP_NUM_THREADS": "3"}


def test_real_steps_are_timed_by_several_ranks(env):
    """5 ranks cannot share 24 sequences: their speed is 0, and nothing hangs."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import demo, os; "
    code += "print(demo.measure(dict(os.environ), [(1, 1), (2, 1), (5, 1)]))"
    result = run(["-c", code], env(), ROOT, fresh=True)
    found = eval(result.stdout)
    assert found[1, 1] > 0 and found[2, 1] > 0 and found[5, 1] == 0, result.stderr


# Knobs


def test_settings_yield_to_the_users(tmp_path):
    for size in demo.SIZES:
        found = demo.knobs({}, size, tmp_path)
        assert found["DATA_PATH"] == "demo_data"
        assert found["TOKENIZER_PATH"] == "demo_data/tokenizer.model"
        assert train_gpt.Hyperparameters.from_env(found).warmdown_frac == 0.5
    given = {"NUM_LAYERS": "3", "DEMO_SECONDS": "7.5", "RUN_ID": "mine"}
    fewer = demo.knobs(given, "small", tmp_path)
    assert fewer["MAX_WALLCLOCK_SECONDS"] == "7.5" and not {"NUM_LAYERS", "RUN_ID"} & fewer.keys()
    # WARMDOWN_FRAC would replace WARMDOWN_ITERS
    mine = ("WARMDOWN_ITERS", "9"), ("GRID", "SEED=1 WARMDOWN_ITERS=9,10"), ("WARMDOWN_FRAC", "0.1")
    for name, value in mine:
        assert "WARMDOWN_FRAC" not in demo.knobs({name: value}, "small", tmp_path)
    assert "WARMDOWN_FRAC" in demo.knobs({"GRID": "MATRIX_LR=0.1,0.2"}, "small", tmp_path)


def test_each_demonstration_has_a_name_of_its_own(tmp_path):
    """Except in a sweep, which goes on where it was, and for RESUME."""
    expected = ["demo", "demo2", "demo3"]
    for name in expected:
        assert demo.run_id({}, tmp_path) == name
        (tmp_path / f"{name}.txt").touch()
    for environ in ({"SEEDS": "1 2"}, {"GRID": "SEED=1"}, {"RESUME": "auto"}):
        assert demo.run_id(environ, tmp_path) == "demo"


def test_own_data_bring_their_tokenizer(tmp_path):
    def found(**environ):
        chosen = demo.knobs({"DATA_PATH": str(tmp_path), **environ}, "small", tmp_path)
        return [chosen.get(name) for name in ("DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE")]

    with user_error("has no manifest.json that names its tokenizer: set TOKENIZER_PATH and"):
        found()
    assert found(TOKENIZER_PATH="t.model", VOCAB_SIZE="9") == [None, None, None]
    entry = {"path": "../t.model", "sha256": "0", "vocab_size": 400}
    shards.write_manifest(tmp_path, files={}, tokenizer=entry)
    assert found() == [None, f"{tmp_path}/../t.model", "400"]
    assert found(TOKENIZER_PATH="other.model") == [None, None, "400"]


@pytest.mark.parametrize(
    "variable, value, sentence",
    [
        ("DEMO_SECONDS", "abc", "DEMO_SECONDS=abc is not a positive number: set for example"),
        ("DEMO_SECONDS", "inf", "DEMO_SECONDS=inf is not a positive"),
        ("DEMO_SECOND", "30", "DEMO_SECOND is set but is not a knob; did you mean DEMO_SECONDS?"),
        ("NPORC", "2", "NPORC is set but is not a knob; did you mean NPROC?"),
        ("NPROC", "two", "NPROC=two is not a positive number: set for example NPROC=2"),
        ("DATA_PATH", "/nowhere", "DATA_PATH=/nowhere does not exist: set the folder of your"),
        ("RUN_ID", "../x", "RUN_ID=../x is no file name"),
        ("NUM_LAYERS", "no", "NUM_LAYERS='no' is not a whole number"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_measured(
    variable, value, sentence, monkeypatch
):
    environ = {"PATH": "/bin", "DEMO_SIZE": "small", "OMP_NUM_THREADS": "1", variable: value}
    monkeypatch.setattr(demo.os, "environ", environ)
    monkeypatch.setattr(demo, "measure", None)
    monkeypatch.setattr(demo.sys, "argv", ["demo.py"])
    with user_error(f"^{re.escape(sentence)}"):
        demo.main()
