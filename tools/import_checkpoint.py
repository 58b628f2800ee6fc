#!/usr/bin/env python3
"""Score a checkpoint, export it at several sizes, and print what rounding costs.

    python tools/import_checkpoint.py checkpoints/RUN/step_00007000.npz --bytes 15900000,13400000
    python tools/import_checkpoint.py final_model.pt --as configs/399.env

A checkpoint of train_gpt.py has its knobs. Its average, if it has one, is exported as by its run: the
batches after its last step calibrate.

final_model.pt is what #399, #549, #2135 and their relatives write before they round: torch.save of a
state dict, or the same as a safetensors file. --as is a file of variables with what no tensor shows
(docs/configurations.md has the list). Set DATA_PATH and TOKENIZER_PATH to its data. It is first
scored without mask and tilt: compare that with "DIAGNOSTIC post_ema" in its script's log. The
script's SmearGate and BigramHash look across the start of a document, ours do not, so both losses
are given. If neither is yours, --as is not what the script computes.

Nothing in a checkpoint is executed. Variables of the environment override its knobs. The weights are
scored in rows of EVAL_SEQ_LEN tokens without overlap; a loss above that of guessing is an error.
Then they are calibrated on training shards, exported for each of --bytes, and scored again, by NPROC
ranks (default: one per GPU). EVAL_STRIDE=64, EVAL_MODE=banded and TTT_ENABLED=1 add a score each. On
a CPU use --tokens 65536; it calibrates on at most 16384 tokens a batch there, in rows of at most
2048, unless you set TRAIN_BATCH_TOKENS and TRAIN_SEQ_LEN.

In the table "expected" and "found" are the nats per token that rounding costs, as the export expects
and as scored in rows. Its bytes are of weights, without code.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import math
import os
import pickletools
import re
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import launch
import train_gpt
from lib import runs
from train_gpt import Hyperparameters, Tensors, UserError, Validation, as_user_error, require

# isort: split
import torch
from torch import Tensor

# Other scripts' banks (L or 2L, out, in), and the kinds of matrices in them, each of all layers.
BANKS = {
    "qo_bank": ("q", "out"),
    "kv_bank": ("k", "v"),
    "mlp_up_bank": ("up",),
    "mlp_down_bank": ("down",),
}
# Names in blocks.LAYER, matrices as (out, in), and ours of all layers.
LAYERS = {
    "attn.c_q.weight": "q",
    "attn.proj.weight": "out",
    "attn.c_k.weight": "k",
    "attn.c_v.weight": "v",
    "mlp.fc.weight": "up",
    "mlp.proj.weight": "down",
    "attn_scale": "attn_scale",
    "mlp_scale": "mlp_scale",
    "resid_mix": "resid_mix",
    "attn.q_gain": "q_gain",
    "attn.attn_gate_w": "attn_gate",
}
OTHERS = {
    "tok_emb.weight": "tok_emb",
    "bigram.embed.weight": "bigram_emb",
    "bigram.proj.weight": "bigram_proj",
    "bigram.scale": "bigram_scale",
    "smear.gate": "smear_gate",
    "skip_weights": "skip_scale",
    "skip_gates": "skip_gate",
}
# Two tensors each that are one of ours: (1) and (1, 12); (L, lane) and (L, source, lane).
JOINED = {
    "smear_gate": ("smear_lambda", "smear_gate.weight"),
    "lane_mix": ("parallel_resid_lambdas", "parallel_post_lambdas"),
}
CAPS = ("softcap_pos", "softcap_neg")  # ()
# Knobs that decide whether the model has a parameter of ours, and its shape.
KNOBS_OF = {"smear_gate": "SMEAR_TOKEN", "skip_gate": "SKIPS", "lane_mix": "LANES_LAST_N"}
KNOBS_OF |= {"skip_scale": "NUM_LAYERS, LOOP_VISITS and LOOP_LAYERS", "attn_gate": "ATTN_GATE"}
KNOBS_OF |= {"mlp_gate": "MLP_GATE", "mudd_in": "MUDD", "mudd_out": "MUDD"}
# Knobs of the export, and of the final passes beside rows without overlap.
EXPORT = ("ROUNDING", "GPTQ_BATCHES", "TRELLIS_STATES", "COMPRESSOR")
PASSES = ("EVAL_STRIDE", "EVAL_MODE", "TTT_ENABLED")
# Of these --as's are left out: the export and the scores are ours.
OURS = (*EXPORT, *PASSES, "TARGET_BYTES", "CANONICAL_MASK", "NGRAM_TILT")
# No step is taken, and the weights are an average already.
FINISHED = {"MAX_WALLCLOCK_SECONDS": "0", "EMA_ENABLED": "0", "SWA_ENABLED": "0"}
FINISHED |= {"RESUME": "", "CHECKPOINT_EVERY": "", "EVAL_ONLY": ""}
# Four of them are the fewest tokens, 50,000, that calibrate well (docs/quantiser.md), and a bit more.
CPU_BATCH = 16_384
CPU_ROW = 2048
FEW = 65_536  # tokens: a standard error of 0.01 nats, if a token deviates by 2.5 (estimated)
BEFORE_ROUNDING = "give the final_model.pt that the script writes before it rounds"
NESTED = ("model", "state_dict", "model_state_dict")  # of checkpoints with more than weights
# What torch.save's pickle of a state dict names.
PLAIN = r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch \w+Storage"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Adopted(NamedTuple):
    """What a file holds, in our names."""

    tensors: Tensors  # matrices (L, out, in) by kind; all others by parameter
    names: dict[str, str]  # another script's name of each
    notes: list[str]  # on what is left out
    shown: dict[str, str]  # knobs that no variable may contradict
    given: dict[str, str]  # other knobs of ours
    facts: dict[str, object]  # about the training, for the artifact


def read_file(path: str) -> dict:
    """The contents of a file, of which nothing is executed; tensors are views. Raises UserError."""
    with open(path, "rb") as file:
        head = file.read(9)
    load_file = None
    if head[8:] == b"{":  # a missing package is no fault of the file
        from safetensors.torch import load_file
    advice = f"copy it again if it is truncated, else {BEFORE_ROUNDING}"
    with as_user_error(f"{path} cannot be used", advice, Exception):
        if load_file:
            return load_file(path)
        require(head.startswith(b"PK"), "it is neither a zip file of torch.save nor safetensors")
        require_plain(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def require_plain(path: str) -> None:
    """Raise an error unless a zip file holds tensors of torch.save and nothing that could run or
    unpack to more than the file. torch.load(weights_only=True) would call bytearray(10**12)."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        texts = [member for member in members if member.filename.endswith("/data.pkl")]
        require(len(texts) == 1 and len(set(names)) == len(names), "it is not of torch.save")
        stored = {member.compress_type for member in members} == {zipfile.ZIP_STORED}
        require(stored and texts[0].file_size < 1 << 24, "its parts are compressed or too large")
        damaged = archive.testzip()  # torch.load does not look at checksums
        require(not damaged, f"its part {damaged} is damaged: copy it again")
        text = archive.read(texts[0])
    protocol = next((argument for code, argument, _ in pickletools.genops(text)), 0)
    require(protocol in (2, 3), f"its pickle is of protocol {protocol}: torch.save it with 2")
    objects = [
        str(argument or code.name).replace(" ", ".")
        for code, argument, _ in pickletools.genops(text)
        if code.name in ("GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")
        and not re.fullmatch(PLAIN, str(argument))
    ]
    require(
        not objects,
        f"it holds more than tensors, {', '.join(objects[:3])}, which was not run: save the "
        "state dict alone",
    )


def is_rounded(value: object) -> bool:
    """Whether integer tensors are in it, as in what other scripts export."""
    if isinstance(value, dict):
        return any(map(is_rounded, value.values()))
    return isinstance(value, Tensor) and value.dtype not in FLOATS


def read_tensors(path: str) -> tuple[Tensors, list[str]]:
    """(the tensors of a file by name, without prefixes of DDP and torch.compile; notes). Raises
    UserError unless all are finite, and as large as the file says."""
    notes, found = [], read_file(path)
    require(isinstance(found, dict), f"{path} holds no state dict, but {type(found).__name__}")
    nested = [key for key in NESTED if isinstance(found.get(key), dict)]
    if nested:
        others = ", ".join(str(key) for key in found if key != nested[0])
        require(len(nested) == 1, f"{path} holds {' and '.join(nested)}: save one of them alone")
        notes.append(f"reading {nested[0]!r}; left out: {others or 'nothing'}")
        found = found[nested[0]]
    tensors, room = {}, 2 * os.path.getsize(path)
    for full, tensor in found.items():
        require(
            not is_rounded(tensor),
            f"{path}: {full!r} holds integers, rounded weights: {BEFORE_ROUNDING}",
        )
        require(
            isinstance(tensor, Tensor) and tensor.layout == torch.strided,
            f"{path}: {full!r} is {type(tensor).__name__}, not a tensor: save the state dict alone",
        )
        words = [word for word in str(full).split(".") if word not in ("module", "_orig_mod")]
        name = ".".join(words)
        require(name not in tensors, f"{path} has two tensors {name}, one with a prefix: save one")
        room -= tensor.numel() * tensor.element_size()
        require(
            tensor.numel() and room >= 0,
            f"{path}: {name} of shape {tuple(tensor.shape)} is empty, or larger than the file",
        )
        require(tensor.isfinite().all(), f"{path}: {name} has values that are not finite")
        tensors[name] = tensor.detach()
    return tensors, notes


def rename(path: str) -> Adopted:
    """The tensors of another script's file in our names. Raises UserError for a tensor that is not known."""
    tensors, notes = read_tensors(path)
    found, names, layers = {}, {}, collections.defaultdict(dict)

    def put(ours: str, theirs: str, tensor: Tensor) -> None:
        require(ours not in found, f"{path} has {theirs} beside {names.get(ours)}: save one form")
        found[ours], names[ours] = tensor, theirs

    for name, tensor in tensors.items():
        of_layer = re.fullmatch(r"blocks\.(\d{1,3})\.(.+)", name)
        if of_layer and of_layer[2] in LAYERS:
            layers[of_layer[2]][int(of_layer[1])] = tensor
        elif name in BANKS:
            kinds = BANKS[name]
            require(
                tensor.dim() == 3 and len(tensor) % len(kinds) == 0,
                f"{path}: {name} has the shape {tuple(tensor.shape)}, not that of a bank",
            )
            for kind, part in zip(kinds, tensor.chunk(len(kinds)), strict=True):
                put(kind, name, part)
        elif name in OTHERS:
            put(OTHERS[name], name, tensor)
        else:
            require(
                name in (*sum(JOINED.values(), ()), *CAPS),
                f"{path} has {name}, which is no part of a model of train_gpt.py: its architecture "
                "cannot be computed here",
            )
    for name, parts in layers.items():
        of_all = f"blocks.*.{name}"
        shapes = {part.shape for part in parts.values()}
        require(
            len(shapes) == 1 and sorted(parts) == list(range(len(parts))),
            f"{path}: {of_all} are not of equal shapes, one for each layer",
        )
        put(LAYERS[name], of_all, torch.stack([parts[layer] for layer in range(len(parts))]))
    for ours, parts in JOINED.items():
        given = [tensors[name].float() for name in parts if name in tensors]
        if given:
            named = " and ".join(parts)
            with as_user_error(f"{path}: {named}", "both are needed", ValueError, RuntimeError):
                first, second = given
                joined = torch.cat((first[:, None], second), dim=1)
            put(ours, named, joined.mT if ours == "lane_mix" else joined[0])
    found |= {name: tensors[name] for name in CAPS if name in tensors}
    facts = {"steps": 0, "train_seconds": 0.0, "weights": "adopted"}
    return Adopted(found, names, notes, sizes(path, found), {}, facts)


def sizes(path: str, tensors: Tensors) -> dict[str, str]:
    """The knobs that tensors show. Raises UserError if one of these tensors is missing."""

    def size(name: str, axis: int) -> int:
        shape = getattr(tensors.get(name), "shape", ())
        require(
            len(shape) > axis,
            f"{path} has no {theirs(name)}, or of another shape: give the final_model.pt of a "
            "script of the challenge",
        )
        return shape[axis]

    dim, heads, hidden = size("tok_emb", 1), size("q_gain", 1), size("up", 1)
    mult = hidden / dim
    found = {
        "VOCAB_SIZE": size("tok_emb", 0),
        "NUM_LAYERS": size("q", 0),
        "MODEL_DIM": dim,
        "NUM_HEADS": heads,
        "NUM_KV_HEADS": size("k", 1) * heads // dim,
        "MLP_MULT": mult if int(mult * dim) == hidden else math.nextafter(mult, math.inf),
        "BIGRAM_VOCAB_SIZE": 0,
    }
    if "bigram_emb" in tensors:
        found["BIGRAM_VOCAB_SIZE"] = size("bigram_emb", 0)
        found["BIGRAM_DIM"] = size("bigram_emb", 1)
    return {name: str(value) for name, value in found.items()}


def read_own(path: str) -> Adopted:
    """A checkpoint of train_gpt.py, with the weights that its run would export. Raises UserError."""
    metadata, tensors = train_gpt.read_checkpoint(Path(path))
    with as_user_error(f"{path} cannot be used", "use the script that wrote it", Exception):
        then, step = metadata["hyperparameters"], metadata["step"]
        then.pop("deterministic", None)  # a knob before 2026-11-29, of GPUs only
        roles = {knob.name: knob.metadata["role"] for knob in train_gpt.KNOBS}
        unknown = " ".join(sorted(then.keys() - roles.keys())).upper()
        require(not unknown, f"this script has no knob {unknown}")
        shown, given = {}, {}
        for name, value in then.items():
            ours, role = name.upper(), roles[name]
            if role == "model" and ours not in EXPORT:
                shown[ours] = str(value)
            elif ours in EXPORT or (role != "run" and ours not in PASSES):
                given[ours] = str(value)
        # Without samples the average is of the initial weights.
        kind = "average" if metadata["samples"] else "weight"
        ends = f".{kind}"
        found = {name.removesuffix(ends): t for name, t in tensors.items() if name.endswith(ends)}
        views = {name: found.get(name, v) for _, name, v in train_gpt.artifact_tensors(found)}
        notes = [f"step {step}: the {kind} of each parameter"]
        if metadata["source_sha256"] != train_gpt.SOURCE_SHA256:
            notes.append("note: another or a packed train_gpt.py wrote it; this one computes all")
        facts = {"steps": step, "train_seconds": round(metadata["seconds"], 1), "weights": kind}
        return Adopted(views, {}, notes, shown, given, facts)


def read(path: str, as_file: str) -> Adopted:
    """The checkpoint, ours or another script's. Raises UserError."""
    with open(path, "rb") as file:  # in a ZIP file the name of the first entry begins at byte 30
        own = file.read(42)[30:] == b"metadata.npy"
    require(not (own and as_file), f"{path} has its knobs: leave out --as {as_file}")
    require(
        own or as_file,
        f"{path} is no checkpoints/RUN_ID/step_N.npz: for another script's give --as FILE",
    )
    return read_own(path) if own else rename(path)


def theirs(ours: str) -> str:
    """The names of a parameter or matrix of ours in other scripts, for a sentence."""
    known = [bank for bank, kinds in BANKS.items() if ours in kinds]
    known += [f"blocks.*.{name}" for name, own in LAYERS.items() if own == ours]
    known += [name for name, own in OTHERS.items() if own == ours]
    known += [" and ".join(parts) for own, parts in JOINED.items() if own == ours]
    return " or ".join(known) or ours


def configure(path: str, adopted: Adopted, as_file: str, environ: dict) -> Hyperparameters:
    """The knobs of --as, of the environment and of the checkpoint. Raises UserError."""
    shown, given = adopted.shown, adopted.given
    if as_file:
        given = {name: text for name, text in program.read_env(as_file).items() if name not in OURS}
    require(
        "TARGET_BYTES" not in environ,
        "TARGET_BYTES counts the code: give --bytes, of weights alone",
    )
    for knob in train_gpt.KNOBS:
        name = knob.name.upper()
        if name in shown and name in environ:
            here, there = train_gpt.parse(knob, environ), train_gpt.parse(knob, shown)
            require(here == there, f"{name}={here} is set, but {path} has {there}: unset it")
    merged = given | environ | shown | FINISHED
    merged.setdefault("EVAL_STRIDE", merged.get("EVAL_SEQ_LEN", str(Hyperparameters.eval_seq_len)))
    try:
        hp = Hyperparameters.from_env(merged)
        train_gpt.meta_parameters(hp)  # refuses one that is too large
    except UserError as error:
        source = dict.fromkeys(given, f"{as_file or path}, which the environment overrides")
        source |= dict.fromkeys(environ, "the environment") | dict.fromkeys(shown, path)
        names = [name for name in re.findall(r"(\w+)=", str(error)) if name in source]
        origins = [f"{name} is of {source[name]}" for name in dict.fromkeys(names)]
        raise UserError("; ".join((str(error), *origins))) from error
    if train_gpt.choose_device(hp.device).type == "cpu":
        if hp.compile == "auto":  # compiling would take longer than the scores
            hp = dataclasses.replace(hp, compile="0")
        if "TRAIN_SEQ_LEN" not in environ:  # scores of one row of 16,384 take 4 GB a layer
            hp = dataclasses.replace(hp, train_seq_len=min(hp.train_seq_len, CPU_ROW))
        if "TRAIN_BATCH_TOKENS" not in environ:
            rows = train_gpt.launched("WORLD_SIZE", 1) * hp.train_seq_len  # one for each rank
            tokens = min(hp.train_batch_tokens, rows * max(1, CPU_BATCH // rows))
            hp = dataclasses.replace(hp, train_batch_tokens=tokens)
    return hp


def doubts(tensors: Tensors) -> list[str]:
    """Notes on matrices that may not be those before rounding."""
    found = collections.defaultdict(list)
    for name in sum(BANKS.values(), ()):
        rows = tensors[name][:, 0].float()  # one of each layer
        if tensors[name].element_size() < 4:  # long rows of bf16 have few distinct values
            found[f"{tensors[name].dtype}, but fp32 in those scripts"].append(name)
        elif sum(len(row.unique()) for row in rows) <= 0.6 * rows.numel():
            found["rounded already: few values of a row are distinct"].append(name)
    return [f"note: the matrices {' '.join(names)} are {what}" for what, names in found.items()]


def weights_of(path: str, adopted: Adopted, hp: Hyperparameters) -> Tensors:
    """All weights of the model of `hp` in fp32, by parameter. Raises UserError unless every tensor
    has its place, and every parameter its tensor."""
    rest, notes = dict(adopted.tensors), adopted.notes
    for name in [name for name in CAPS if name in rest]:
        value = rest.pop(name).flatten().tolist()
        require(
            value == [hp.logit_softcap],
            f"{path}: {name} is {value}, but the model has one cap, LOGIT_SOFTCAP="
            f"{hp.logit_softcap:g}",
        )
        notes.append(f"left out: {name}, which is LOGIT_SOFTCAP={hp.logit_softcap:g}")
    before = hp.num_layers - hp.lanes_last_n
    if before and hp.lanes_last_n and len(rest.get("lane_mix", ())) == hp.num_layers:
        rest["lane_mix"] = rest["lane_mix"][before:]
        notes.append(f"left out: {before} rows of {theirs('lane_mix')}, of layers without lanes")
    shapes = {name: like.shape for name, like in train_gpt.meta_parameters(hp).items()}
    weights, faults = {name: torch.zeros(shape) for name, shape in shapes.items()}, []
    for _, name, view in train_gpt.artifact_tensors(weights):
        view = weights.get(name, view)
        look = f"; look at {KNOBS_OF[name]}" if name in KNOBS_OF else ""
        shape, tensor = view.shape, rest.pop(name, None)
        if tensor is None:
            missing = theirs(name) if adopted.names else name
            faults.append(f"no {missing}, which the model needs{look}")
        elif tensor.shape == shape:
            view.copy_(tensor)
        else:
            found = f"{adopted.names.get(name, name)} of the shape {tuple(tensor.shape)}"
            faults.append(f"{found}, but the model's {name} has {tuple(shape)}{look}")
    for name in rest:
        look = KNOBS_OF.get(name, "the script that wrote it")
        missing = f"but the model has no {name}; look at {look}"
        faults.append(f"{adopted.names.get(name, name)}, {missing}")
    require(not faults, f"{path} has {'; it has '.join(faults)}")
    notes += doubts(adopted.tensors)
    return weights


@contextlib.contextmanager
def across_documents(model: train_gpt.GPT) -> Iterator[None]:
    """Let SmearGate and BigramHash look across the start of a document, as in #399 and #2135."""

    def embed(ids: Tensor, projection: train_gpt.Matrix | None) -> Tensor:
        with mock.patch.object(train_gpt, "BOS", -1):  # attention's documents stay
            return train_gpt.GPT.embed(model, ids, projection)

    with mock.patch.object(model, "embed", embed):
        yield


def beginning(val: Validation, tokens: int | None) -> Validation:
    """The validation text, or its first targets."""
    if tokens is None or tokens >= val.targets:
        return val
    ids = val.tokens[: tokens + 1].cpu().numpy()
    short = Validation(ids, val.nbytes[:tokens], val.tokens.device)
    short.refused, short.hints = val.refused, val.hints
    return short


def put(run: train_gpt.Run, weights: Tensors) -> None:
    """Let the run's weights be these. Collective."""
    for name, tensor in run.optimizer.owned.items():
        run.optimizer.scatter(name, tensor, weights[name])
    run.optimizer.sync_banks()


class Row(NamedTuple):
    """A row of the table."""

    label: str
    nats: float  # per token
    before: float | None = None  # the nats without rounding
    size: int | None = None  # bytes of the weights
    expected: float | None = None  # nats that rounding should cost


def scored(
    run: train_gpt.Run, forward: Callable, val: Validation, label: str, event: str
) -> train_gpt.Score:
    """The score of the weights as they are, in rows without overlap. Logs it."""
    make_scorer = functools.partial(train_gpt.Evaluator, forward, val, run.hp, run.runtime)
    score = train_gpt.final_passes(run.hp)["roundtrip"].run(make_scorer, run.log, label)
    score.log(run.log, f"final_average_{event}exact")
    return score


def score_before(run: train_gpt.Run, as_file: str) -> tuple[list[Row], float]:
    """(rows, nats for a bit per byte) of the weights as they are. Those of another script, with
    --as, without mask and tilt and, if a document starts within a row, also across documents.
    Raises UserError if guessing is better."""
    hp, plain = run.hp, copy.copy(run.val)
    if as_file:
        plain.refused = plain.hints = None
    score = scored(run, run.eval_forward, plain, "before the export", "")
    guess = math.log(hp.vocab_size)
    require(
        score.val_loss < guess,
        f"the weights lose {score.val_loss:.4f} nats per token, and guessing loses {guess:.4f}: "
        f"check that DATA_PATH={hp.data_path} and TOKENIZER_PATH={hp.tokenizer_path} are those of "
        f"its training{as_file and f', and that --as {as_file} is its configuration'}",
    )
    rows = [Row("before the export", score.val_loss)]
    if as_file and (run.val.documents % hp.eval_seq_len).any():
        with across_documents(run.model):  # not compiled: the graph has our embedding
            score = scored(run, run.model, plain, "across documents", "across_documents_")
        rows.append(Row("before, across documents", score.val_loss))
    if as_file:
        rows_of = f"rows of EVAL_SEQ_LEN={hp.eval_seq_len} tokens without overlap"
        run.log(f"compare with DIAGNOSTIC post_ema in your log: both are of {rows_of}")
    return rows, rows[-1].nats / score.val_bpb


def export(
    run: train_gpt.Run, weights: Tensors, facts: dict, calibration: Tensors, nats: float, path: Path
) -> list[Row]:
    """The rows of an artifact within the run's TARGET_BYTES, written to `path` and scored by the
    passes of a run, each once; before it, rows without overlap lose `nats`. Collective."""
    hp, log = run.hp, run.log
    put(run, weights)  # the model may hold those of another artifact
    log.artifact = path
    blob, _ = train_gpt.export(run, calibration, facts)
    run.model.load_state_dict(train_gpt.load_artifact(blob))
    losses = train_gpt.open_artifact(blob)[0]["expected_loss"]
    expected = sum(losses.values()) or None  # without calibration
    rows, done = [], set()
    for name, scoring in train_gpt.final_passes(hp).items():
        if scoring in done:
            continue
        done.add(scoring)
        score = scoring.run(run.make_scorer, log, name)
        score.log(log, f"final_int6_{name}_exact")
        if name == "roundtrip":  # `nats` are of rows without overlap as well
            rows.append(Row("rounded", score.val_loss, nats, len(blob), expected))
        else:
            label = f"rounded, {name}".replace("_", " ")
            rows.append(Row(label, score.val_loss, size=len(blob)))
    return rows


def table(rows: list[Row], weights: int, per_bpb: float) -> str:
    """The table of a model with so many weights and so many nats for a bit per byte."""
    forms = {"nats": ".5f", "bpb": ".5f", "bytes, no code": ",d", "bits/weight": ".2f"}
    forms |= {"expected": ".5f", "found": "+.5f", "in bpb": "+.5f"}
    cells = [[" " * 24, *forms]]
    for label, nats, before, size, expected in rows:
        found = before and nats - before
        bits = size and 8 * size / weights
        values = (nats, nats / per_bpb, size, bits, expected, found, found and found / per_bpb)
        shown = [runs.cell(*pair, "") for pair in zip(values, forms.values(), strict=True)]
        cells.append([label, *shown])
    return runs.aligned(cells)


def compare(
    run: train_gpt.Run, weights: Tensors, facts: dict, arguments: argparse.Namespace, paths: list
) -> None:
    """Score, export and score the weights, and print the table. Collective."""
    put(run, weights)
    run.clock.step = facts["steps"] - 1  # the batches after it calibrate
    rows, per_bpb = score_before(run, arguments.as_file)
    ours, hp = rows[0].nats, run.hp
    if arguments.as_file and (hp.canonical_mask or hp.ngram_tilt):  # as the artifact is scored
        ours = scored(run, run.eval_forward, run.val, "mask or tilt", "mask_or_tilt_").val_loss
        rows.append(Row("before, mask or tilt", ours))
    batch = f"TRAIN_BATCH_TOKENS={hp.train_batch_tokens}"
    run.log(f"calibrating with GPTQ_BATCHES={hp.gptq_batches} of {batch}")
    _, calibration = run.finish()
    exported = []
    try:
        for size, path in zip(arguments.bytes, paths, strict=True):
            target = size + train_gpt.CODE_BYTES
            run.hp = dataclasses.replace(hp, target_bytes=target)
            exported += export(run, weights, facts, calibration, ours, path)
    except UserError as error:
        raise UserError(f"--bytes {size}: {error}") from error
    finally:
        count = train_gpt.count_numbers(weights.values())
        run.log(f"artifacts: {', '.join(map(str, paths))}")
        run.log(f"\n{table(rows + exported, count, per_bpb)}")
    score, size, code = exported[-1].nats / per_bpb, exported[-1].size, train_gpt.CODE_BYTES
    parts = f"{score:.4f} bits per byte, weights {size:,} and code {code:,} bytes"
    run.log.finish(parts, size + code)


def adopt(arguments: argparse.Namespace) -> None:
    """The work of one rank."""
    path = arguments.checkpoint
    adopted = read(path, arguments.as_file)
    hp = configure(path, adopted, arguments.as_file, dict(os.environ))
    require(
        len(arguments.bytes) == 1 or hp.rounding != "399",
        "ROUNDING=399 has one size: give one of --bytes, or set ROUNDING=sensitivity",
    )
    weights, shown = weights_of(path, adopted, hp), adopted.shown
    meant = [name for name in train_gpt.knobs_with("model") if name.upper() not in shown]
    values = [f"{name.upper()}={getattr(hp, name)}" for name in (*meant, "eval_seq_len")]
    advice = "set a lower MICRO_BATCH_TOKENS"
    full = as_user_error("a GPU's memory is full", advice, torch.OutOfMemoryError)
    with train_gpt.Runtime.start(hp) as runtime, train_gpt.Log(hp, runtime.comm) as log, full:
        log.require_unused()
        paths = [log.artifact]
        if len(arguments.bytes) > 1:
            paths = [Path(f"{log.path}-{size}.npz") for size in arguments.bytes]
        if runtime.comm.rank == 0:
            there = [str(name) for name in paths if name.exists()]
            require(not there, f"{' '.join(there)} would be replaced: set another RUN_ID")
            for name in (*paths, train_gpt.ARTIFACT):
                with train_gpt.writing(name):  # now, not after the work
                    trial = Path(f"{name}.partial")  # as `train_gpt.replacing`
                    trial.touch()
                    trial.unlink()
        log.header(runtime)
        log(f"{path}: {' '.join(f'{name}={value}' for name, value in shown.items())}")
        log("\n".join((*adopted.notes, f"meant as {' '.join(values)}")))
        val = beginning(train_gpt.read_validation(hp, runtime.device, log), arguments.tokens)
        if val.targets < FEW:
            little = f"below {FEW} a loss says little of the text's"
            log(f"note: {val.targets} tokens are scored: {little}")
        compare(train_gpt.Run(hp, runtime, log, val), weights, adopted.facts, arguments, paths)


def main() -> None:
    parser = program.parser(__doc__)
    add, most = parser.add_argument, train_gpt.SUBMISSION_CAP - train_gpt.CODE_BYTES
    sizes = lambda text: [program.count(word) for word in text.split(",")]  # noqa: E731
    add("checkpoint", help="checkpoints/RUN_ID/step_N.npz, or a file of torch.save or safetensors")
    text = "of another script: its knobs"
    add("--as", dest="as_file", default="", metavar="FILE", help=text)
    text = "of the validation text, from its start (default: all)"
    add("--tokens", type=program.count, help=text)
    text = f"of the weights; an export for each, from one calibration (default: {most})"
    add("--bytes", type=sizes, default=[most], metavar="A,B,C", help=text)
    arguments = parser.parse_args()
    ranks = launch.wanted_ranks(max(1, torch.cuda.device_count()))
    started = time.strftime("adopted-%Y%m%d-%H%M%S")
    os.environ["RUN_ID"] = os.environ.get("RUN_ID") or f"{started}-{os.getpid()}"
    if ranks == 1 or "RANK" in os.environ:
        adopt(arguments)
    else:
        sys.exit(launch.launch([sys.executable, *sys.argv], ranks))


if __name__ == "__main__":
    program.run_program(main)
