"""The knobs: declared once, with the record's defaults, with roles, and with errors that name the variable."""

import contextlib
import dataclasses
import shlex

import pytest
import torch

import train_gpt
from conftest import variables
from train_gpt import Hyperparameters, UserError, knobs_with

COMMAND = """NUM_LAYERS=11 BIGRAM_VOCAB_SIZE=2048 XSA_LAST_N=4 EMA_ENABLED=1 EMA_DECAY=0.997 SWA_ENABLED=0
    ROPE_DIMS=16 LN_SCALE=1 LATE_QAT=1 QAT_THRESHOLD=0.1 MUON_WD=0.04 ADAM_WD=0.04 MATRIX_LR=0.025
    SCALAR_LR=0.025 TIED_EMBED_LR=0.035 MUON_MOMENTUM=0.99 MUON_MOMENTUM_WARMUP_START=0.92
    MUON_MOMENTUM_WARMUP_STEPS=1500 WARMDOWN_ITERS=3000 ITERATIONS=9000 MAX_WALLCLOCK_SECONDS=600
    EVAL_STRIDE=64 SEED=1337"""

CHALLENGE_NAMES = """DATA_PATH TOKENIZER_PATH VOCAB_SIZE RUN_ID SEED TRAIN_BATCH_TOKENS TRAIN_SEQ_LEN EVAL_SEQ_LEN
    VAL_BATCH_SIZE VAL_LOSS_EVERY TRAIN_LOG_EVERY ITERATIONS WARMUP_STEPS WARMDOWN_ITERS MAX_WALLCLOCK_SECONDS MODEL_DIM
    NUM_HEADS NUM_KV_HEADS MLP_MULT TIE_EMBEDDINGS ROPE_BASE LOGIT_SOFTCAP QK_GAIN_INIT BIGRAM_DIM GRAD_CLIP_NORM
    MUON_BACKEND_STEPS BETA1 BETA2 ADAM_EPS TIED_EMBED_INIT_STD SWA_EVERY"""


def command() -> dict[str, str]:
    return dict(word.split("=") for word in shlex.split(COMMAND))


def test_defaults_are_the_record_run():
    """Fault D1: #399 needed 23 variables for its record. Here its command changes nothing."""
    assert Hyperparameters.from_env(command()) == Hyperparameters()


def test_the_published_run_is_one_set_of_variables():
    """published.env holds #399's command and every knob whose default differs from #399 here."""
    assert command().items() <= variables("published").items()
    ours, hp = Hyperparameters(), Hyperparameters.from_env(variables("published"))
    differing = {f.name for f in dataclasses.fields(hp) if getattr(hp, f.name) != getattr(ours, f.name)}
    assert {name.upper() for name in differing} == set(variables("published")) - set(command())
    assert (hp.mlp_slope, hp.skip_gates, hp.muon_eq, hp.muon_coeffs) == (0, False, False, "quintic")
    shape = (hp.train_batch_tokens, hp.train_seq_len, hp.model_dim, hp.num_heads, hp.num_kv_heads)
    assert shape == (786_432, 2048, 512, 8, 4)
    assert (hp.grad_clip_norm, hp.mlp_mult, hp.logit_softcap, hp.vocab_size) == (0.3, 3.0, 30.0, 1024)


def test_the_frontier_configuration_is_a_model_that_fits_an_artifact():
    """As many weights as a count by hand gives; no variable repeats a default, and none is unknown."""
    hp = Hyperparameters.from_env(variables("frontier"))
    differing = {f.name.upper() for f in dataclasses.fields(hp) if getattr(hp, f.name) != f.default}
    assert differing | {"LOOP_FIRST", "LOOP_LAYERS", "LOOP_START"} == set(variables("frontier"))
    assert sum(tensor.numel() for tensor in train_gpt.outline(hp).values()) == 35_942_026


def test_challenge_names_are_knobs():
    names = {f.name.upper() for f in dataclasses.fields(Hyperparameters)}
    assert set(CHALLENGE_NAMES.split()) | set(command()) <= names


@pytest.mark.parametrize(
    "variable, value, part",
    [
        ("NUM_LAYERS", "eleven", "not a whole number"),
        ("MATRIX_LR", "fast", "not a number"),
        ("MATRIX_LR", "nan", "not a finite number"),
        ("EMA_ENABLED", "maybe", "not a switch, 0 or 1"),
        ("NUM_LAYERS", "0", "below its minimum 1"),
        ("VOCAB_SIZE", "70000", "above its maximum 65536"),
        ("COMPRESSOR", "zip", "not one of ans, lzma"),
        ("NUM_HEADS", "7", "MODEL_DIM=512"),
        ("NUM_KV_HEADS", "3", "NUM_HEADS=8"),
        ("ROPE_DIMS", "66", "at most MODEL_DIM / NUM_HEADS = 64"),
        ("XSA_LAST_N", "12", "NUM_LAYERS=11"),
        ("TRAIN_BATCH_TOKENS", "1000", "TRAIN_SEQ_LEN=2048"),
        ("SHORT_SEQ_PARTS", "3", "TRAIN_SEQ_LEN=2048"),
        ("EVAL_STRIDE", "4096", "EVAL_SEQ_LEN=2048"),
        ("SWA_ENABLED", "1", "EMA_ENABLED=1"),
        ("BIGRAM_VOCAB_SIZE", "1", "has only the bucket for starts: set 0 or at least 2"),
        ("TIE_EMBEDDINGS", "0", "not supported: the head is the token embedding; unset it"),
    ],
)
def test_impossible_values_name_the_variable(variable, value, part):
    with pytest.raises(UserError) as error:
        Hyperparameters.from_env({variable: value})
    assert variable in str(error.value) and part in str(error.value)


def test_every_knob_has_a_role():
    """The role decides what the artifact stores and what may change on resume, so each knob has exactly one."""
    found = {knob.name: knob.metadata["role"] for knob in train_gpt.KNOBS}
    assert set(found.values()) == set(train_gpt.ROLES)
    assert knobs_with(*train_gpt.ROLES) == tuple(found)
    assert sorted(name for role in train_gpt.ROLES for name in knobs_with(role)) == sorted(found)
    with pytest.raises(AssertionError):
        train_gpt.knob(1, "a knob of an unknown role", "decoration")


def test_no_other_knob_changes_the_shape_of_the_model(hyperparameters):
    """A knob that does without having the role "model" would make artifacts that cannot be loaded."""

    def shapes(hp):
        with torch.device("meta"):
            return {name: p.shape for name, p in train_gpt.GPT(hp, None, torch.float32).named_parameters()}

    hp = hyperparameters()
    others = [knob for knob in train_gpt.KNOBS if knob.metadata["role"] != "model" and knob.type is not str]
    for name in (knob.name for knob in others):
        old = getattr(hp, name)
        for value in (not old,) if isinstance(old, bool) else (2 * old, old // 2, old + 1):
            with contextlib.suppress(UserError):  # an impossible value
                assert shapes(dataclasses.replace(hp, **{name: value})) == shapes(hp), name


def test_odd_head_dimension_is_refused():
    with pytest.raises(UserError, match="rotary"):
        Hyperparameters.from_env({"MODEL_DIM": "24", "NUM_HEADS": "8", "NUM_KV_HEADS": "4", "ROPE_DIMS": "0"})


@pytest.mark.parametrize(
    "wrong, right", [("NUM_LAYER", "NUM_LAYERS"), ("EMA_DECY", "EMA_DECAY"), ("ITERATION", "ITERATIONS")]
)
def test_misspelt_knob_is_reported(wrong, right, one_rank, tmp_path, monkeypatch, capsys):
    hp, runtime = one_rank()
    others = {"PATH": "/bin", "HOME": "/", "RANK": "0", "LOGNAME": "me"}
    monkeypatch.setattr(train_gpt.os, "environ", {wrong: "9", right: "1", **others})
    train_gpt.Log(hp, train_gpt.Comm(), tmp_path).header(hp, runtime)
    (sentence,) = [line for line in capsys.readouterr().out.splitlines() if "is not a knob" in line]
    assert wrong in sentence and right in sentence


def test_description_marks_what_differs():
    lines = Hyperparameters.from_env({"NUM_LAYERS": "9"}).describe().splitlines()
    assert "* NUM_LAYERS=9" in lines and "  MODEL_DIM=512" in lines
    assert sum(line.startswith("*") for line in lines) == 1
    assert len(lines) == len(dataclasses.fields(Hyperparameters))


def test_help_lists_every_knob_without_data_or_gpu(script):
    result = script(arguments=("--help",), DATA_PATH="/nowhere")
    assert result.returncode == 0
    for field in dataclasses.fields(Hyperparameters):
        assert field.metadata["text"] and f"  {field.name.upper()}=" in result.stdout
