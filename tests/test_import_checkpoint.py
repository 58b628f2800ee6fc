"""tools/import_checkpoint.py: checkpoints of other scripts compute here what they computed there; all others are
one sentence."""

import argparse
import copy
import io
import json
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import conformance
import conftest
import import_checkpoint
import inspect_artifact
import sample
import train_gpt
from conftest import ROOT, VOCAB, assert_mistake, evaluate, noise, run, user_error, weights_of
from test_export import rezipped

TOOL = ROOT / "tools" / "import_checkpoint.py"
# What no tensor shows, and what they show.
GIVEN = {"ROPE_DIMS": "4", "TRAIN_SEQ_LEN": "32", "TRAIN_BATCH_TOKENS": "256", "EVAL_SEQ_LEN": "32"}
GIVEN |= {"EVAL_STRIDE": "32", "TTT_ENABLED": "0", "DOC_LEN": "0", "TTT_LORA_CHUNK": "32"}
SMALL = {"VOCAB_SIZE": VOCAB, "MODEL_DIM": 32, "NUM_HEADS": 4, "NUM_KV_HEADS": 2}
SIZES = {"2135": SMALL, "399": SMALL | {"NUM_LAYERS": 5, "MLP_MULT": 45 / 32}}
SIZES["399"] |= {"BIGRAM_VOCAB_SIZE": 64, "BIGRAM_DIM": 8}
ONE = torch.ones(1)
EMPTY = import_checkpoint.Adopted({}, {}, [], {}, {}, {})


def as_file(record: str) -> str:
    return str(ROOT / "configs" / f"{record}.env")


def small(record: str, **changes) -> dict[str, str]:
    """The knobs of a published configuration at a small size."""
    knobs = conftest.variables(record) | GIVEN | SIZES[record] | changes
    return {name: str(value) for name, value in knobs.items()}


def model_of(record: str) -> train_gpt.GPT:
    """Its model, every weight of which matters."""
    hp = train_gpt.Hyperparameters.from_env(small(record))
    return as_saved(noise(conftest.made(hp, train_gpt.load_attention("math"))))


def as_saved(model: train_gpt.GPT) -> train_gpt.GPT:
    """With the tables in bf16."""
    with torch.no_grad():
        for table in (model.tok_emb, *([model.bigram_emb] if model.hp.bigram_vocab_size else [])):
            table.copy_(table.bfloat16())
    return model


def foreign(record: str, banked: bool = True, model=None) -> dict[str, torch.Tensor]:
    """The state dict of that model in another script's names, layout and types."""
    model = model or model_of(record)
    w, layers = weights_of(model), model.hp.num_layers
    found = {"tok_emb.weight": w["tok_emb"].bfloat16(), "skip_weights": w["skip_scale"]}
    of_layers = {name: w[name] for name in ("attn_scale", "mlp_scale", "resid_mix")}
    of_layers["attn.q_gain"] = w["q_gain"]
    if record == "2135":
        lanes = range(layers - model.hp.lanes_last_n, layers)
        own, post = torch.full((layers, 2), 1.1), torch.ones(layers, 2, 2)
        own[lanes], post[lanes] = w["lane_mix"][:, :, 0], w["lane_mix"][:, :, 1:].mT
        found |= {"parallel_resid_lambdas": own, "parallel_post_lambdas": post}
        found |= {"skip_gates": w["skip_gate"], "smear_lambda": w["smear_gate"][:1]}
        found |= {"smear_gate.weight": w["smear_gate"][None, 1:]}
        found |= {f"softcap_{end}": torch.tensor(30.0) for end in ("pos", "neg")}
        of_layers["attn.attn_gate_w"] = w["attn_gate"]
    else:
        found |= {"smear.gate": w["smear_gate"], "bigram.scale": w["bigram_scale"]}
        found |= {"bigram.embed.weight": w["bigram_emb"].bfloat16()}
        found |= {"bigram.proj.weight": w["bigram_proj"]}
    up, down = w["mlp_bank"][:layers], w["mlp_bank"][layers:].mT.contiguous()
    if banked:
        found |= {"qo_bank": w["qo_bank"], "kv_bank": w["kv_bank"]}
        found |= {"mlp_up_bank": up, "mlp_down_bank": down}
    else:
        names = (f"{name}.weight" for name in ("attn.c_q", "attn.proj", "attn.c_k", "attn.c_v"))
        of_layers |= zip(names, (*w["qo_bank"].chunk(2), *w["kv_bank"].chunk(2)), strict=True)
        of_layers |= {"mlp.fc.weight": up, "mlp.proj.weight": down}
    for name, tensor in of_layers.items():
        found |= {f"blocks.{layer}.{name}": part for layer, part in enumerate(tensor)}
    return found


def loss(model: train_gpt.GPT) -> float:
    ids = torch.randint(2, VOCAB, (4, 33), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return float(model(ids[:, :-1], ids[:, 1:]))


def imported(path, record: str, **environ: str) -> train_gpt.GPT:
    """The model that import_checkpoint.py makes of a file."""
    adopted = import_checkpoint.read(str(path), as_file(record))
    hp = import_checkpoint.configure(str(path), adopted, as_file(record), GIVEN | environ)
    model = train_gpt.GPT(hp, train_gpt.load_attention("math"), torch.float32)
    model.load_state_dict(import_checkpoint.weights_of(str(path), adopted, hp))
    return model


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("banked, prefix", [(True, ""), (False, "module._orig_mod.")])
@pytest.mark.parametrize("record", ["399", "2135"])
def test_a_checkpoint_computes_the_same_loss(tmp_path, record, banked, prefix, suffix):
    model, path = model_of(record), tmp_path / f"final_model{suffix}"
    state = {prefix + name: t for name, t in foreign(record, banked, model).items()}
    if suffix == ".pt":
        torch.save(state if banked else {"model": state, "step": 3}, path)
    else:
        safetensors.torch.save_file({name: t.contiguous() for name, t in state.items()}, path)
    found = imported(path, record)
    assert loss(found) == pytest.approx(loss(model), abs=1e-6)
    for name, weight in weights_of(model).items():
        assert torch.equal(getattr(found, name), weight), name


def test_a_width_that_no_quotient_gives():
    """15 / 11 * 11 is below 15."""
    shapes = dict(tok_emb=(5, 11), q_gain=(2, 1), up=(2, 15, 11), q=(2, 11, 11), k=(2, 11, 11))
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    assert int(float(import_checkpoint.sizes("a.pt", tensors)["MLP_MULT"]) * 11) == 15


def test_all_that_contradicts_a_configuration_is_named_at_once(tmp_path):
    torch.save(foreign("399") | {"skip_gates": torch.ones(2, 32)}, tmp_path / "a.pt")
    smear = "smear.gate of the shape .* but the model's smear_gate has .* look at SMEAR_TOKEN; "
    rest = "it has no blocks.*attn_gate_w, .* look at ATTN_GATE; it has skip_gates, but the model"
    with user_error(smear + rest):
        imported(tmp_path / "a.pt", "399", ATTN_GATE="1", SMEAR_TOKEN="1")


def code(function, *arguments) -> object:
    """Its pickle calls this function."""
    return type("Code", (), {"__reduce__": lambda _: (function, arguments)})()


def test_an_odd_tensor_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    published = foreign("399")
    for name, value, part in (
        ("x", code(os.mkdir, "ran"), "it holds more than tensors, posix.mkdir, which was not run"),
        ("x", code(bytearray, 1 << 40), "more than tensors, __builtin__.bytearray"),
        ("x", 5, "'x' is int, not a tensor"),
        ("ve.scale", ONE, "has ve.scale, which is no part of a model"),
        ("skip_gates", torch.ones(2, 32), "has skip_gates, but .* no skip_gate; look at SKIPS"),
        ("smear.gate", None, "has no smear.gate or .*, which the model needs; look at SMEAR_T"),
        ("tok_emb.weight", None, "has no tok_emb.weight, or of another shape"),
        ("blocks.1.attn_scale", None, r"blocks\.\*\.attn_scale are not of equal shapes"),
        ("blocks.1.attn_scale", torch.ones(5), r"blocks\.\*\.attn_scale are not of equal"),
        ("smear.gate", torch.full((32,), math.nan), "smear.gate has values that are not finite"),
        ("smear.gate", torch.ones(32).int(), "'smear.gate' holds integers, rounded weights: give"),
        ("w", {"q": {"a": torch.ones(3).char()}}, "'w' holds integers, rounded weights: give"),
        ("smear.gate", torch.ones(1).expand(1 << 40), "is empty, or larger than the file"),
        ("smear.gate", torch.ones(0), "is empty, or larger than the file"),
        ("qo_bank", torch.ones(9, 32, 32), r"qo_bank has the shape \(9, 32, 32\), not that of"),
        ("skip_weights", torch.ones(4, 32), "but the model's skip_scale has .*LOOP_VISITS"),
        ("module.smear.gate", torch.ones(32), "has two tensors smear.gate"),
        ("blocks.0.attn.c_q.weight", torch.ones(32, 32), "beside qo_bank: save one form"),
        ("softcap_pos", torch.tensor(28.0), r"softcap_pos is \[28.0\], but .*LOGIT_SOFTCAP=30"),
        ("smear_lambda", torch.ones(1), "smear_lambda and smear_gate.weight: .* both are needed"),
    ):
        state = published | {name: value}
        torch.save({name: value for name, value in state.items() if value is not None}, "a.pt")
        with user_error(f"a.pt.*{part}"):
            imported("a.pt", "399")
        assert not Path("ran").exists()


def saved(found, legacy: bool = False, **options) -> bytes:
    """A file of torch.save."""
    file = io.BytesIO()
    torch.save(found, file, _use_new_zipfile_serialization=not legacy, **options)
    return file.getvalue()


def test_an_odd_file_is_named(tmp_path):
    for damage, part in (
        (lambda whole: whole[: len(whole) // 2], "not a zip file; copy it again if it is trunca"),
        # torch.load reads it.
        (lambda whole: whole.replace(whole[9000:9008], b"otherbit"), "/data/. is damaged: copy"),
        (lambda _: b"\xfd7zXZ" + bytes(999), "neither a zip"),
        (lambda _: saved({}, legacy=True), "neither a zip"),
        (lambda _: (1 << 40).to_bytes(8, "little") + b'{"a": 1}', "SafetensorError"),
        (lambda whole: rezipped(whole, method=8, member="archive/data.pkl"), "compressed"),
        (lambda _: saved([1]), "no state dict, but"),
        (lambda _: saved({"model": {}, "state_dict": {}}), "holds model and state_dict: save one"),
        (lambda _: saved({}, pickle_protocol=4), "its pickle is of protocol 4: torch.save it wi"),
    ):
        (tmp_path / "a.pt").write_bytes(damage(saved(foreign("399"))))
        with user_error(rf"a\.pt .*{part}"):
            import_checkpoint.rename(str(tmp_path / "a.pt"))


def test_a_missing_package_is_no_fault_of_the_file(tmp_path, monkeypatch):
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError):
        import_checkpoint.rename(str(tmp_path / "a.safetensors"))


def test_weights_that_may_be_rounded_are_noted():
    kinds = sum(import_checkpoint.BANKS.values(), ())
    tensors = {kind: torch.randn(2, 4, 2048) for kind in kinds}
    assert import_checkpoint.doubts(tensors) == []
    for change, part in (
        (torch.Tensor.bfloat16, "are torch.bfloat16, but fp32"),
        (lambda t: t.mul(2).round(), "are rounded already"),
    ):
        [note] = import_checkpoint.doubts(tensors | {"up": change(tensors["up"])})
        assert note.startswith(f"note: the matrices up {part}")


def test_export_and_scores_of_the_file_are_left_out():
    def configured(path: str, **environ: str) -> train_gpt.Hyperparameters:
        return import_checkpoint.configure("a.pt", EMPTY, path, environ)

    hp = configured(as_file("399"), EVAL_SEQ_LEN="512")
    assert (hp.target_bytes, hp.rounding, hp.eval_stride) == (16_000_000, "sensitivity", 512)
    hp = configured(as_file("399"), EVAL_STRIDE="64", GPTQ_BATCHES="7")
    assert (hp.eval_stride, hp.gptq_batches) == (64, 7)
    hp = configured(as_file("2135"))
    assert not (hp.ttt_enabled or hp.ngram_tilt)
    default = train_gpt.Hyperparameters()
    for path in (ROOT / "configs").glob("*.env"):  # all that changes a score without TTT
        hp = configured(str(path))
        for name in train_gpt.knobs_with("score"):
            if not name.startswith(("ttt_", "data_path", "tokenizer_path", "eval_")):
                assert getattr(hp, name) == getattr(default, name), (path, name)


def test_across_documents_is_as_published():
    golden = conformance.Golden("399")
    case = next(case for case in golden.facts["cases"] if case["bos"])
    hp = golden.knobs(case["knobs"])
    model, ids = golden.model(hp, {}), golden.ids(case, hp.vocab_size)
    for _ in range(2):
        with torch.no_grad():
            with import_checkpoint.across_documents(model):
                across = model(ids[:, :-1], ids[:, 1:])
            found = across, model(ids[:, :-1], ids[:, 1:])
        expected = case["across_documents"]["loss"], case["loss"]
        assert tuple(map(float, found)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_calibration_fits_a_cpu(monkeypatch, ranks):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    device = lambda name: torch.device(name.replace("auto", "cpu"))  # noqa: E731
    monkeypatch.setattr(train_gpt, "choose_device", device)
    for record, given, tokens in (
        ("399", {}, 16_384),
        ("399", {"TRAIN_BATCH_TOKENS": "8192"}, 8192),
        ("399", {"TRAIN_SEQ_LEN": "3072"}, 15_360 if ranks == 1 else 12_288),
        ("2135", {}, 16_384),
        ("2135", {"TRAIN_SEQ_LEN": "16384"}, ranks * 16_384),  # a row each
        ("399", {"DEVICE": "cuda"}, 786_432),
    ):
        hp = import_checkpoint.configure("a.pt", EMPTY, as_file(record), given)
        assert hp.train_batch_tokens == tokens
        assert "TRAIN_SEQ_LEN" in given or hp.device == "cuda" or hp.train_seq_len == 2048


def test_the_beginning_of_a_text():
    tokens = np.array([1, 5, 6, 1, 7, 8, 1], dtype=np.uint16)
    whole = train_gpt.Validation(tokens, np.arange(6), torch.device("cpu"))
    whole.refused, whole.hints = torch.zeros(3, 3), torch.arange(6)
    short = import_checkpoint.beginning(whole, 4)
    assert (short.tokens.tolist(), short.nbytes.tolist()) == ([1, 5, 6, 1, 7], [0, 1, 2, 3])
    assert (short.targets, short.total_bytes, short.documents.tolist()) == (4, 6, [0, 3])
    assert short.refused is whole.refused and short.hints is whole.hints
    for count in (6, None):
        assert import_checkpoint.beginning(whole, count) is whole


@pytest.fixture(scope="module")
def trained(data) -> train_gpt.GPT:
    """A model that has learned something: its loss is below that of guessing."""
    model = model_of("399")
    ids = train_gpt.TokenStream(str(data), "train", VOCAB).read(0, 64 * 33).astype("int64")
    ids = torch.from_numpy(ids).view(64, 33)
    optimizer = torch.optim.Adam(model.requires_grad_(True).parameters(), 0.01)
    for _ in range(10):
        optimizer.zero_grad()
        model(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
    return as_saved(model)


@pytest.fixture(scope="module")
def checkpoint(trained, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("theirs") / "final_model.pt"
    torch.save(foreign("399", model=trained), path)
    return path


AS, BIG = f"--as {as_file('399')}", as_file("2135")
NO_AS = "is no checkpoints/RUN_ID/step_N.npz: for another script's give --as FILE"


@pytest.mark.parametrize(
    "name, words, environ, part",
    [
        ("pt", AS, {"NUM_LAYERS": "9"}, "NUM_LAYERS=9 is set, but "),
        ("pt", f"--as {BIG}", {}, f"not at most NUM_LAYERS=5; XSA_LAST_N is of {BIG}, which"),
        ("pt", f"--as {ROOT}/run.sh", {}, "sets no knob of train_gpt.py: give a file like con"),
        ("pt", "--as none.env", {}, "cannot use none.env"),
        ("pt", AS, {"NPROC": "x"}, "NPROC=x is not a number of proc"),
        ("pt", AS, {"TARGET_BYTES": "1"}, "counts the code: give --bytes"),
        ("pt", f"{AS} --bytes 9,0", {}, "--bytes: 0 is not a whole number above 0"),
        ("pt", f"{AS} --bytes 9,8", {"ROUNDING": "399"}, "399 has one size: give one of --by"),
        ("pt", "", {}, NO_AS),
        ("r.npz", "", {}, NO_AS),
        ("step_00000030.npz", AS, {}, "has its knobs: leave out"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, checkpoint, own, name, words, environ, part):
    [path] = [checkpoint] if name == "pt" else own.rglob(name)
    status = 2 if "9,0" in words else 1
    assert_mistake([TOOL, path, *words.split()], tmp_path, part, status, **GIVEN | environ)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "environ, part",
    [
        ({"RUN_ID": "old"}, "RUN_ID=old is used by an earlier run"),
        ({"DATA_PATH": "no"}, "DATA_PATH=no has no fineweb_"),
        ({"RUN_ID": "small"}, "--bytes 1: TARGET_BYTES="),
        ({"TOKENIZER_PATH": ""}, "is not the tokenizer that made the shards, by its sha256"),
    ],
)
def test_a_mistake_ends_it_before_the_work(
    tmp_path, checkpoint, knobs, other_tokenizer, environ, part
):
    environ = {name: text or other_tokenizer for name, text in environ.items()}
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "old.jsonl").write_text('{"event": "finished"}\n')
    command = [TOOL, checkpoint, *AS.split(), "--tokens", 64, "--bytes", "1,1000000"]
    assert_mistake(command, tmp_path, part, **knobs | environ | {"GPTQ_BATCHES": "0"})
    small = environ.get("RUN_ID") == "small"
    assert (tmp_path / "final_model.npz").exists() == small  # known after the work only
    assert not list(tmp_path.rglob("*.partial"))


@pytest.fixture
def knobs(env) -> dict[str, str]:
    kept = {"DATA_PATH", "TOKENIZER_PATH", "COMPUTE_DTYPE", "DEVICE", "VAL_BATCH_SIZE"}
    return {name: text for name, text in env().items() if name in kept} | GIVEN


def test_weights_worse_than_guessing_are_an_error(tmp_path, knobs):
    """As with another text, tokenizer or configuration. Nothing is calibrated."""
    torch.save(foreign("399"), tmp_path / "a.pt")
    data = " and ".join(f"{name}_PATH={knobs[f'{name}_PATH']}" for name in ("DATA", "TOKENIZER"))
    part = f"nats per token, and guessing loses 5.9915: check that {data} are those of its training"
    command, knobs = [TOOL, "a.pt", *AS.split()], knobs | {"RUN_ID": "r"}
    assert_mistake(command, tmp_path, f"{part}, and that --as ", **knobs)
    assert "calibrating" not in (tmp_path / "logs" / "r.txt").read_text()


@pytest.mark.parametrize("mask, tilt", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_mask_and_tilt_do_not_change_what_is_compared_with_theirs(run_of, trained, mask, tilt):
    """Before the export; what is compared with the artifact has them."""
    changes = small("399", ROUNDING="sensitivity", GPTQ_BATCHES=0, EVAL_STRIDE=16)
    run = run_of(val=True, **changes | {"CANONICAL_MASK": mask, "NGRAM_TILT": tilt})
    lines, events, path = [], {}, Path("logs", "r.npz")
    path.parent.mkdir()

    def log(line, event="", **fields):
        lines.append(line)
        events[event] = fields

    run.log, log.path, log.artifact = log, path, path
    log.stage = log.finish = lambda *_: None
    arguments = argparse.Namespace(as_file="399.env", bytes=[10**6])
    import_checkpoint.compare(run, weights_of(trained), {"steps": 0}, arguments, [path])
    without = copy.copy(run.val)
    without.refused = without.hints = None
    loss_of = lambda text: evaluate(trained, text, run.hp, run.runtime, 32).val_loss  # noqa: E731
    plain, own = loss_of(without), loss_of(run.val)
    with import_checkpoint.across_documents(trained):
        across = loss_of(without)
    losses = {name: fields.get("val_loss") for name, fields in events.items()}
    assert losses["final_average_exact"] == pytest.approx(plain, abs=1e-6)
    assert losses["final_average_across_documents_exact"] == pytest.approx(across, abs=1e-6)
    assert losses.get("final_average_mask_or_tilt_exact", plain) == pytest.approx(own, abs=1e-6)
    assert (abs(own - plain) > 1e-5) == bool(mask or tilt)
    *_, shown = lines
    assert "\nrounded, sliding window " in shown
    nats, _, _, _, found, _ = re.search(r"rounded +(.*)", shown)[1].split()  # nothing is expected
    assert float(found) == pytest.approx(float(nats) - own, abs=2e-5)


def test_two_ranks_score_and_export_a_checkpoint(tmp_path, checkpoint, trained, knobs, one_rank):
    command = [TOOL, checkpoint, *AS.split()]
    output = run(command, knobs | {"RUN_ID": "r", "NPROC": "2"}, tmp_path, fresh=True).stdout
    log = (tmp_path / "logs" / "r.jsonl").read_text().splitlines()
    events = {event["event"]: event for event in map(json.loads, log)}
    # The published model's own loss, before the export and first of all.
    hp, runtime = one_rank(**GIVEN | SIZES["399"])
    text = train_gpt.read_validation(hp, runtime.device)
    expected = evaluate(trained, text, hp, runtime, 32).val_loss
    with import_checkpoint.across_documents(trained):
        across = evaluate(trained, text, hp, runtime, 32).val_loss
    names = ("average", "average_across_documents", "int6_roundtrip")
    losses = [events[f"final_{name}_exact"]["val_loss"] for name in names]
    assert losses[:2] == pytest.approx([expected, across], abs=2e-6)
    assert "ranks:2" in output and events["calibration"]["batches"] == 4
    found = {line[:24].strip(): line[24:].split() for line in output.splitlines()}
    labels = ("before the export", "before, across documents", "rounded")
    assert [float(found[label][0]) for label in labels] == pytest.approx(losses, abs=1e-5)
    _, _, size, _, *costs, _ = found["rounded"]
    nbytes, code = events["artifact"]["model_bytes"], train_gpt.CODE_BYTES
    assert size == f"{nbytes:,}"
    rounding = sum(events["rounding"]["expected_loss"].values())
    assert list(map(float, costs)) == pytest.approx([rounding, losses[2] - losses[0]], abs=1e-5)
    assert "final_int6_sliding_window_exact" not in events  # the same as in rows
    assert re.search(r"note: \d+ tokens are scored: below 65536 a loss says little", output)
    parts = f"weights {size} and code {code:,} bytes, {nbytes + code:,} of 16,000,000 bytes"
    assert f" bits per byte, {parts}" in output
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "final_model.npz"}


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_of_torch_save_is_no_artifact(tmp_path, legacy):
    path = tmp_path / "final_model.pt"
    path.write_bytes(saved({"a": torch.ones(3)}, legacy))
    for read in (inspect_artifact.inspection, lambda name: sample.load(name, {})):
        with user_error(f"{path} cannot be used: .*tools/import_checkpoint.py for a checkpoint of"):
            read(str(path))


@pytest.fixture(scope="module")
def own(env, tmp_path_factory) -> Path:
    """The folder of a masked and tilted run of ours with checkpoints, in the finest steps."""
    folder = tmp_path_factory.mktemp("own")
    knobs = {"RUN_ID": "r", "CHECKPOINT_EVERY": 30, "EMA_DECAY": 0.8, "ITERATIONS": 30}
    knobs |= {"CANONICAL_MASK": 1, "NGRAM_TILT": 1, "EVAL_STRIDE": 32, "TARGET_BYTES": 0}
    run([ROOT / "train_gpt.py"], env(**knobs), folder)
    return folder


@pytest.fixture
def last(own, tmp_path):
    """A function that changes a copy of that run's checkpoint, given its metadata and tensors."""

    def make(change=lambda metadata, tensors: None) -> str:
        metadata, tensors = train_gpt.read_checkpoint(own / "checkpoints/r/step_00000030.npz")
        change(metadata, tensors)
        np.savez(tmp_path / "step.npz", metadata=json.dumps(metadata), **tensors)
        return str(tmp_path / "step.npz")

    return make


def own_weights(path: str, **environ: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """(weights, notes) of a checkpoint of ours."""
    adopted = import_checkpoint.read(path, "")
    hp = import_checkpoint.configure(path, adopted, "", environ)
    return import_checkpoint.weights_of(path, adopted, hp), adopted.notes


def test_a_run_of_ours_is_exported_at_several_sizes(own, tmp_path):
    """Without any variable. At its own size it is the run's artifact, bit for bit, and does not see
    the first: the model shares small weights with the optimizer, and loads each artifact."""
    command = [TOOL, own / "checkpoints/r/step_00000030.npz", "--bytes", "16000,1000000"]
    output = run(command, {"RUN_ID": "a"}, tmp_path).stdout
    paths = own / "logs" / "r.jsonl", tmp_path / "logs" / "a.jsonl"
    theirs, found = ([*map(json.loads, path.read_text().splitlines())] for path in paths)

    def every(events: list[dict], kind: str, *fields: str) -> list:
        return [[event[name] for name in fields] for event in events if event["event"] == kind]

    score = "val_loss", "val_bpb"
    [before] = every(found, "final_average_exact", *score)
    losses = every(found, "final_int6_roundtrip_exact", *score)
    assert [before] == every(theirs, "final_average_exact", *score)
    assert losses[1:] == every(theirs, "final_int6_roundtrip_exact", *score)
    artifacts = [np.load(path) for path in (own / "logs/r.npz", tmp_path / "logs/a-1000000.npz")]
    for name in ("codes", "values"):
        assert np.array_equal(*(artifact[name] for artifact in artifacts))
    lines = [line.split() for line in output.splitlines() if line.startswith("rounded ")]
    rounding = every(found, "rounding", "bits_per_weight", "expected_loss")
    sizes = every(found, "artifact", "model_bytes")
    for line, loss, (bits, expected), [size] in zip(lines, losses, rounding, sizes, strict=True):
        assert line[3:5] == [f"{size:,}", f"{bits:.2f}"]
        costs = [sum(expected.values()), loss[0] - before[0], loss[1] - before[1]]
        assert [float(text) for text in line[5:]] == pytest.approx(costs, abs=1e-5)
    assert 10 * float(lines[1][6]) < float(lines[0][6]) > 0.003
    assert "across documents" not in output and "train_gpt.py wrote it" not in output


def test_without_samples_an_average_is_of_initial_weights(last):
    """As of an SWA before its first: the run exports its last weights."""
    for samples, kind in ((30, "average"), (0, "weight")):
        path = last(lambda metadata, _, samples=samples: metadata.update(samples=samples))
        weights, [note] = own_weights(path)
        assert note == f"step 30: the {kind} of each parameter"
        _, tensors = train_gpt.read_checkpoint(Path(path))
        for name, weight in weights.items():
            assert torch.equal(weight, tensors[f"{name}.{kind}"]), name


def test_lanes_of_all_layers_leave_out_none(last):
    """The note is of another script."""

    def change(metadata, tensors):
        metadata["hyperparameters"]["lanes_last_n"], metadata["source_sha256"] = 3, "0"
        tensors["lane_mix.average"] = torch.ones(3, 2, 3)

    weights, (_, note) = own_weights(last(change))
    assert weights["lane_mix"].eq(1).all()
    assert note.startswith("note: another or a packed train_gpt.py wrote it")


def test_knobs_of_a_run_and_of_this_one(last):
    adopted = import_checkpoint.read(last(), "")
    environ = {"TRELLIS_STATES": "0", "GPTQ_BATCHES": "7"}
    hp = import_checkpoint.configure("a.npz", adopted, "", environ)
    assert (hp.run_id, hp.checkpoint_every, hp.target_bytes) == ("", "", 16_000_000)
    assert (hp.eval_stride, hp.canonical_mask, hp.compute_dtype) == (32, True, "float32")
    assert (hp.num_layers, hp.trellis_states, hp.gptq_batches) == (3, 0, 7)
    assert (hp.train_batch_tokens, hp.ema_enabled) == (768, False)


def then(**knobs):
    """The run had these knobs."""
    return lambda metadata, _: metadata["hyperparameters"].update(knobs)


def having(**tensors):
    """The checkpoint has these averages."""
    return lambda _, state: state.update({f"{name}.average": t for name, t in tensors.items()})


LACKS = "has no {}, which the model needs; look at {}"


def test_a_checkpoint_from_before_2026_11_29_is_read(last):
    own_weights(last(then(deterministic=False)))


def test_an_odd_checkpoint_of_ours_is_named(last):
    for change, environ, part in (
        (lambda m, _: m.update(version=7), {}, "altered or of another version: version 7; copy"),
        (lambda m, _: m.pop("samples"), {}, "cannot be used: KeyError: 'samples'; use the script"),
        (then(ropes=0), {}, "this script has no knob ROPES; use"),
        (then(num_heads="x"), {}, "NUM_HEADS='x' is not a .*step.npz"),
        (then(), {"NUM_LAYERS": "9"}, "NUM_LAYERS=9 is set, but .* has 3: unset it"),
        (then(), {"XSA_LAST_N": "5"}, "XSA_LAST_N=5 is set, but .* has 2: unset it"),
        (then(attn_gate=True), {}, LACKS.format("attn_gate", "ATTN_GATE")),
        (then(mudd=True), {}, LACKS.format("mudd_in", "MUDD; .* mudd_out, .* look at MUDD$")),
        (having(new=ONE), {}, "has new, but the model has no new; look"),
        (having(q_gain=ONE), {}, r"q_gain of the shape \(1,\), but the"),
        (lambda _, t: t.pop("qo_bank.average"), {}, "cannot be used: KeyError: 'qo_bank'; use the"),
    ):
        with user_error(part):
            own_weights(last(change), **environ)
