"""tools/adopt.py: checkpoints of other scripts compute here what they computed there; all others are
one sentence."""

import io
import json
import math
import os
import re
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

import adopt
import inspect_artifact
import sample
import train_gpt
from conftest import (
    ROOT,
    VOCAB,
    assert_mistake,
    evaluate,
    made,
    noise,
    run,
    user_error,
    variables,
    weights_of,
)

# What no tensor shows, and what they show.
GIVEN = {"ROPE_DIMS": "4", "TRAIN_SEQ_LEN": "32", "TRAIN_BATCH_TOKENS": "256", "EVAL_SEQ_LEN": "32"}
GIVEN |= {"EVAL_STRIDE": "32", "TTT_ENABLED": "0", "DOC_LEN": "0", "TTT_LORA_CHUNK": "32"}
SMALL = {"VOCAB_SIZE": VOCAB, "MODEL_DIM": 32, "NUM_HEADS": 4, "NUM_KV_HEADS": 2}
SIZES = {"2135": SMALL, "published": SMALL | {"NUM_LAYERS": 5, "MLP_MULT": 45 / 32}}
SIZES["published"] |= {"BIGRAM_VOCAB_SIZE": 64, "BIGRAM_DIM": 8}


def as_file(record: str) -> str:
    return str(ROOT / "records" / f"{record}.env")


def model_of(record: str) -> train_gpt.GPT:
    """A model of a published configuration at a small size, every weight of which matters."""
    sizes = {name: str(value) for name, value in SIZES[record].items()}
    hp = train_gpt.Hyperparameters.from_env(variables(record) | GIVEN | sizes)
    model = noise(made(hp, train_gpt.load_attention("math")))
    with torch.no_grad():
        for table in (model.tok_emb, *([model.bigram_emb] if hp.bigram_vocab_size else [])):
            table.copy_(table.bfloat16())
    return model


def foreign(record: str, banked: bool = True, model=None) -> dict[str, torch.Tensor]:
    """The state dict of that model in another script's names, layout and types."""
    model = model or model_of(record)
    w, layers = weights_of(model), model.hp.num_layers
    found = {"tok_emb.weight": w["tok_emb"].bfloat16(), "skip_weights": w["skip_scale"]}
    if record == "2135":
        found |= {"skip_gates": w["skip_gate"], "smear_lambda": w["smear_gate"][:1]}
        found |= {"smear_gate.weight": w["smear_gate"][None, 1:]}
        caps = {f"softcap_{end}": torch.tensor(30.0) for end in ("pos", "neg")}
        own, post = torch.full((layers, 2), 1.1), torch.ones(layers, 2, 2)
        for layer in range(layers - model.hp.lanes_last_n, layers):
            for lane in range(2):
                mix = w["lane_mix"][layer - layers, lane]
                own[layer, lane] = mix[0]
                post[layer, 0, lane], post[layer, 1, lane] = mix[1:]
        found |= {"parallel_resid_lambdas": own, "parallel_post_lambdas": post} | caps
    else:
        found |= {"smear.gate": w["smear_gate"], "bigram.scale": w["bigram_scale"]}
        found |= {"bigram.embed.weight": w["bigram_emb"].bfloat16()}
        found |= {"bigram.proj.weight": w["bigram_proj"]}
    for layer in range(layers):
        at = f"blocks.{layer}."
        for name in ("attn_scale", "mlp_scale", "resid_mix"):
            found[at + name] = w[name][layer]
        found[f"{at}attn.q_gain"] = w["q_gain"][layer]
        if record == "2135":
            found[f"{at}attn.attn_gate_w"] = w["attn_gate"][layer]
    q, out = w["qo_bank"][:layers], w["qo_bank"][layers:]
    k, v = w["kv_bank"][:layers], w["kv_bank"][layers:]
    up, down = w["mlp_bank"][:layers], w["mlp_bank"][layers:].transpose(1, 2).contiguous()
    if banked:
        found |= {"qo_bank": torch.cat((q, out)), "kv_bank": torch.cat((k, v))}
        return found | {"mlp_up_bank": up, "mlp_down_bank": down}
    names = ("attn.c_q", "attn.proj", "attn.c_k", "attn.c_v", "mlp.fc", "mlp.proj")
    for name, matrices in zip(names, (q, out, k, v, up, down), strict=True):
        found |= {f"blocks.{i}.{name}.weight": matrix for i, matrix in enumerate(matrices)}
    return found


def loss(model: train_gpt.GPT) -> float:
    ids = torch.randint(2, VOCAB, (4, 33), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return float(model(ids[:, :-1], ids[:, 1:]))


def imported(path, record: str, **environ: str) -> train_gpt.GPT:
    """The model that adopt.py makes of a file."""
    renamed = adopt.rename(str(path))
    shown = adopt.sizes(str(path), renamed)
    hp, _ = adopt.configure(str(path), shown, as_file(record), GIVEN | environ)
    model = train_gpt.GPT(hp, train_gpt.load_attention("math"), torch.float32)
    model.load_state_dict(adopt.weights_of(str(path), renamed, hp))
    return model


@pytest.mark.parametrize(
    "record, banked, prefix, nested",
    [
        ("published", True, "", False),
        ("published", False, "module._orig_mod.", True),
        ("2135", True, "_orig_mod.module.", False),
        ("2135", False, "", False),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_checkpoint_computes_the_same_loss(tmp_path, record, banked, prefix, nested, suffix):
    model, path = model_of(record), tmp_path / f"final_model{suffix}"
    state = {prefix + name: t for name, t in foreign(record, banked, model).items()}
    if suffix == ".pt":
        torch.save({"model": state, "step": 3} if nested else state, path)
    else:
        safetensors.torch.save_file({name: t.contiguous() for name, t in state.items()}, path)
    found = imported(path, record)
    assert loss(found) == pytest.approx(loss(model), abs=1e-6)
    for name, weight in weights_of(model).items():
        assert torch.equal(getattr(found, name), weight), name


@pytest.mark.parametrize(
    "record, wrong",
    [("published", "SKIP_GATES=1"), ("published", "MLP_SLOPE=0.5"), ("published", "LN_SCALE=0")]
    + [("published", "ROPE_BASE=100"), ("published", "LOGIT_SOFTCAP=20"), ("2135", "MLP_SLOPE=0")]
    + [("2135", "LOOP_FIRST=2"), ("2135", "XSA_LAST_N=4")],
)
def test_a_wrong_configuration_that_fits_has_another_loss(tmp_path, record, wrong):
    torch.save(foreign(record), tmp_path / "a.pt")
    right, found = loss(imported(tmp_path / "a.pt", record)), dict([wrong.split("=")])
    assert abs(loss(imported(tmp_path / "a.pt", record, **found)) - right) > 1e-3


def test_a_width_that_no_quotient_gives():
    """15 / 11 * 11 is below 15."""
    shapes = {"tok_emb": (5, 11), "q_gain": (2, 1), "up": (2, 15, 11), "q": (2, 11, 11)}
    shapes |= {"k": (2, 11, 11)}
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    shown = adopt.sizes("a.pt", adopt.Adopted(tensors, {}, []))
    assert int(float(shown["MLP_MULT"]) * 11) == 15


class Code:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "name, value, part",
    [
        ("x", Code(os.mkdir, "ran"), "it holds more than tensors, posix.mkdir, which was not run"),
        ("x", Code(bytearray, 1 << 40), "more than tensors, __builtin__.bytearray"),
        ("x", 5, "'x' is int, not a tensor"),
        ("ve.scale", torch.ones(1), "has ve.scale, which is no part of a model"),
        ("skip_gates", torch.ones(2, 32), "has skip_gates, but .* no skip_gate; look at SKIP_LERP"),
        ("smear.gate", None, "has no smear.gate or .*, which the model needs; look at SMEAR_T"),
        ("tok_emb.weight", None, "has no tok_emb.weight, or of another shape"),
        ("blocks.1.attn_scale", None, r"blocks\.\*\.attn_scale are not of equal shapes"),
        ("blocks.1.attn_scale", torch.ones(5), r"blocks\.\*\.attn_scale are not of equal"),
        ("smear.gate", torch.full((32,), math.nan), "smear.gate has values that are not finite"),
        ("smear.gate", torch.ones(32).int(), "smear.gate is torch.int32: give the weights before"),
        ("smear.gate", torch.ones(1).expand(1 << 40), "is empty, or larger than the file"),
        ("smear.gate", torch.ones(0), "is empty, or larger than the file"),
        ("qo_bank", torch.ones(9, 32, 32), r"qo_bank has the shape \(9, 32, 32\), not that of"),
        ("qo_bank", torch.ones(8, 32, 32), "but the model's"),
        ("skip_weights", torch.ones(4, 32), "but the model's skip_scale has .*LOOP_VISITS"),
        ("module.smear.gate", torch.ones(32), "has two tensors smear.gate"),
        ("blocks.0.attn.c_q.weight", torch.ones(32, 32), "beside qo_bank: save one form"),
        ("softcap_pos", torch.tensor(28.0), r"softcap_pos is \[28.0\], but .*LOGIT_SOFTCAP=30"),
        ("smear_lambda", torch.ones(1), "smear_lambda and smear_gate.weight: .* both are needed"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_an_odd_tensor_is_named(tmp_path, monkeypatch, name, value, part):
    monkeypatch.chdir(tmp_path)
    state = foreign("published") | {name: value}
    torch.save({name: value for name, value in state.items() if value is not None}, "a.pt")
    with user_error(f"a.pt.*{part}"):
        imported("a.pt", "published")
    assert not Path("ran").exists()


def saved(found, legacy: bool = False) -> bytes:
    """A file of torch.save."""
    file = io.BytesIO()
    torch.save(found, file, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


def compressed(whole: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        parts = zipfile.ZipFile(io.BytesIO(whole))
        for name in parts.namelist():
            file.writestr(name, parts.read(name))
    return packed.getvalue()


@pytest.mark.parametrize(
    "damage, part",
    [
        (lambda whole: whole[: len(whole) // 2], "not a zip file"),
        (lambda _: b"\xfd7zXZ" + bytes(999), "neither a zip"),
        (lambda _: saved({}, legacy=True), "neither a zip"),
        (lambda _: (1 << 40).to_bytes(8, "little") + b'{"a": 1}', "SafetensorError"),
        (compressed, "compressed"),
        (lambda _: saved([1]), "no state dict, but"),
    ],
)
def test_an_odd_file_is_named(tmp_path, damage, part):
    (tmp_path / "a.pt").write_bytes(damage(saved(foreign("published"))))
    with user_error(rf"a\.pt .*{part}"):
        adopt.rename(str(tmp_path / "a.pt"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("theirs") / "final_model.pt"
    torch.save(foreign("published"), path)
    return path


@pytest.mark.parametrize(
    "words, environ, part, status",
    [
        (["--as", as_file("published")], {"NUM_LAYERS": "9"}, "NUM_LAYERS=9 is set, but ", 1),
        (["--as", as_file("2135")], {}, "XSA_LAST_N=11 is not at most NUM_LAYERS=5", 1),
        (["--as", str(ROOT / "run.sh")], {}, "sets no knob of train_gpt.py", 1),
        (["--as", "none.env"], {}, "cannot use none.env", 1),
        (["--as", as_file("published")], {"NPROC": "x"}, "NPROC=x is not a number of proc", 1),
        (["--as", as_file("published")], {"RUN_ID": "old"}, "old is of another run: set", 1),
        (["--as", as_file("published")], {"DATA_PATH": "no"}, "DATA_PATH=no has no fineweb_", 1),
        ([], {}, "required: --as", 2),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, checkpoint, words, environ, part, status):
    (tmp_path / "checkpoints" / "old").mkdir(parents=True)
    command = [ROOT / "tools" / "adopt.py", checkpoint, *words]
    assert_mistake(command, tmp_path, part, status, **GIVEN | environ)
    # What was there stays, and nothing is left.
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["old"]


def test_two_ranks_score_and_export_a_checkpoint(tmp_path, checkpoint, env, one_rank):
    kept = {"DATA_PATH", "TOKENIZER_PATH", "COMPILE", "COMPUTE_DTYPE", "DEVICE", "VAL_BATCH_SIZE"}
    knobs = {name: text for name, text in env().items() if name in kept}
    knobs |= GIVEN | {"RUN_ID": "r", "NPROC": "2"}
    command = [ROOT / "tools" / "adopt.py", checkpoint, "--as", as_file("published")]
    command += ["--their-bpb", 9.5, "--their-bytes", 31000]
    output = run(command, knobs, tmp_path, fresh=True).stdout
    log = (tmp_path / "logs" / "r.jsonl").read_text().splitlines()
    events = {event["event"]: event for event in map(json.loads, log)}
    # The published model's own loss, before the export and first of all.
    model = model_of("published")
    hp, runtime = one_rank(**GIVEN | SIZES["published"])
    text = train_gpt.read_validation(hp, runtime.device)
    expected = evaluate(model, text, hp, runtime, 32).val_loss
    before, after = (events[f"final_{n}_exact"] for n in ("average", "int6_roundtrip"))
    assert before["val_loss"] == pytest.approx(expected, abs=1e-5)
    first = float(re.search(r"val_loss:(\S+)", output)[1])
    assert first == pytest.approx(expected, abs=1e-4)
    assert "ranks:2" in output and events["calibration"]["batches"] == 4
    rows = [line.split() for line in output.splitlines()[-5:]]
    rounding = sum(events["rounding"]["expected_loss"].values())
    found = [before["val_loss"], before["val_loss"] + rounding, after["val_loss"]]
    nats = [float(rows[0][3]), float(rows[1][3]), float(rows[2][3])]
    assert nats == pytest.approx(found, abs=1e-5)
    assert rows[2][-2] == f"{events['artifact']['model_bytes']:,}"
    assert rows[4][0] == "theirs" and rows[4][2] == "9.50000" and rows[4][4] == "31,000"
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_of_torch_save_is_no_artifact(tmp_path, legacy):
    path = tmp_path / "final_model.pt"
    path.write_bytes(saved({"a": torch.ones(3)}, legacy))
    for read in (inspect_artifact.inspection, lambda name: sample.load(name, {})):
        with user_error(f"{path} cannot be used: .*tools/adopt.py for a checkpoint of torch.save"):
            read(str(path))
