#!/usr/bin/env python3
"""Bring the checkpoint of another script of the challenge here: score, export and score it again.

    python tools/adopt.py final_model.pt --as records/published.env
    TARGET_BYTES=8000000 EVAL_MODE=banded python tools/adopt.py final_model.pt --as records/2135.env

final_model.pt is what #399, #549, #2135 and their relatives write before they round: torch.save of a
state dict, or the same as a safetensors file, in banks or with one matrix per layer. Nothing in it
is executed. Sizes follow from its tensors. --as is a file of variables with what no tensor shows:
skips, activation, rotary base, loop and others (docs/published.md has the list). Variables of the
environment override it, as for every run: set DATA_PATH and TOKENIZER_PATH to its data. The export
is ours: ROW_RANGE, GPTQ_BATCHES, TRELLIS_STATES, TARGET_BYTES and COMPRESSOR of the file are left
out, those of the environment are not.

train_gpt.py then scores the weights as they are, calibrates on training shards, exports and scores
the artifact, on NPROC ranks (default: one per GPU). Its first val_loss and val_bpb are those of the
weights as they are: compare them with yours ("DIAGNOSTIC post_ema" in the logs of those scripts). If
they are worse, --as is not what the script computes. On a CPU use little validation text, and a
calibration of for example TRAIN_BATCH_TOKENS=32768.

The table at the end: "predicted" is the loss that the export expects of its rounding, "found" that
of the artifact, both with non-overlapping windows. "bytes" are without code. --their-bpb and
--their-bytes put the other script's export beside it, scored on the same text with such windows.
"""

import argparse
import collections
import dataclasses
import math
import os
import pickletools
import re
import shutil
import sys
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import launch
import runs
import train_gpt
from train_gpt import Hyperparameters, Tensors, UserError, as_user_error, require

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
KNOBS_OF = {
    "smear_gate": "SMEAR_TOKEN",
    "skip_scale": "NUM_LAYERS, LOOP_VISITS and LOOP_LAYERS",
    "skip_gate": "SKIP_LERP",
    "attn_gate": "ATTN_GATE",
    "mlp_gate": "MLP_GATE",
    "lane_mix": "LANES_LAST_N",
}
EXPORT = ("ROW_RANGE", "GPTQ_BATCHES", "TRELLIS_STATES", "TARGET_BYTES", "COMPRESSOR")
UNTIMED = {"WARMUP_STEPS": "0", "MAX_WALLCLOCK_SECONDS": "0"}
# No step is taken, and the weights are an average already.
FINISHED = {"ITERATIONS": "0", "EMA_ENABLED": "0", "SWA_ENABLED": "0"}
FINISHED |= {"RESUME": "auto", "CHECKPOINT_EVERY": "", "EVAL_ONLY": ""}
NESTED = ("model", "state_dict", "model_state_dict")  # of checkpoints with more than weights
# What torch.save's pickle of a state dict names.
PLAIN = r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch \w+Storage"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Adopted(NamedTuple):
    """What a file holds, in our names."""

    tensors: Tensors  # matrices (L, out, in) by kind; all others by parameter
    names: dict[str, str]  # the file's name of each
    notes: list[str]  # on what is left out


def read_file(path: str) -> dict:
    """The contents of a file of torch.save or safetensors. Its tensors are views of the file.
    Raises UserError. Executes nothing in it."""
    with open(path, "rb") as file:
        head = file.read(9)
    with as_user_error(
        f"{path} cannot be used",
        Exception,
        advice="give the whole final_model.pt of the weights before rounding",
    ):
        if head[8:] == b"{":
            from safetensors.torch import load_file

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
        text = archive.read(texts[0])
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
            isinstance(tensor, Tensor) and tensor.layout == torch.strided,
            f"{path}: {full!r} is {type(tensor).__name__}, not a tensor: save the state dict alone",
        )
        name = ".".join(
            word for word in str(full).split(".") if word not in ("module", "_orig_mod")
        )
        require(name not in tensors, f"{path} has two tensors {name}, one with a prefix: save one")
        room -= tensor.numel() * tensor.element_size()
        require(
            tensor.numel() and room >= 0,
            f"{path}: {name} of shape {tuple(tensor.shape)} is empty, or larger than the file",
        )
        require(
            tensor.dtype in FLOATS,
            f"{path}: {name} is {tensor.dtype}: give the weights before rounding",
        )
        require(tensor.isfinite().all(), f"{path}: {name} has values that are not finite")
        tensors[name] = tensor.detach()
    return tensors, notes


def rename(path: str) -> Adopted:
    """The tensors of a file in our names. Raises UserError for a tensor that is not known."""
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
            with as_user_error(
                f"{path}: {' and '.join(parts)}", ValueError, RuntimeError, advice="both are needed"
            ):
                first, second = given
                joined = torch.cat((first[:, None], second), dim=1)
            put(ours, " and ".join(parts), joined.mT if ours == "lane_mix" else joined[0])
    caps = {name: tensors[name] for name in CAPS if name in tensors}
    return Adopted(found | caps, names, notes)


def sizes(path: str, adopted: Adopted) -> dict[str, str]:
    """The knobs that tensors show. Raises UserError if one of these tensors is missing."""

    def size(name: str, axis: int) -> int:
        shape = getattr(adopted.tensors.get(name), "shape", ())
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
    if "bigram_emb" in adopted.tensors:
        found["BIGRAM_VOCAB_SIZE"] = size("bigram_emb", 0)
        found["BIGRAM_DIM"] = size("bigram_emb", 1)
    return {name: str(value) for name, value in found.items()}


def theirs(ours: str) -> str:
    """The names of a parameter or matrix of ours in other scripts, for a sentence."""
    known = [bank for bank, kinds in BANKS.items() if ours in kinds]
    known += [f"blocks.*.{name}" for name, own in LAYERS.items() if own == ours]
    known += [name for name, own in OTHERS.items() if own == ours]
    known += [" and ".join(parts) for own, parts in JOINED.items() if own == ours]
    return " or ".join(known) or ours


def configure(
    path: str, shown: dict[str, str], as_file: str, environ: dict[str, str]
) -> tuple[Hyperparameters, dict[str, str]]:
    """(knobs, variables) of the run that exports the weights: of the file of --as, of the
    environment, and the sizes of the tensors. Raises UserError if these contradict each other."""
    given = {name: text for name, text in program.read_env(as_file).items() if name not in EXPORT}
    for knob in train_gpt.KNOBS:
        name = knob.name.upper()
        if name in shown and name in environ:
            here, there = train_gpt.parse(knob, environ), train_gpt.parse(knob, shown)
            require(here == there, f"{name}={here} is set, but {path} has {there}: unset it")
    merged = given | UNTIMED | environ | shown | FINISHED
    merged["RUN_ID"] = environ.get("RUN_ID") or time.strftime("adopted-%Y%m%d-%H%M%S")
    hp = Hyperparameters.from_env(merged)
    train_gpt.meta_parameters(hp)  # refuses one that is too large
    return hp, merged


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
    if hp.lanes_last_n and len(rest.get("lane_mix", ())) == hp.num_layers:
        rest["lane_mix"] = rest["lane_mix"][before:]
        notes.append(f"left out: {before} rows of {theirs('lane_mix')}, of layers without lanes")
    weights = {
        name: torch.zeros(like.shape) for name, like in train_gpt.meta_parameters(hp).items()
    }
    for _, name, view in train_gpt.artifact_tensors(weights):
        view = weights.get(name, view)
        look = f"; look at {KNOBS_OF[name]}" if name in KNOBS_OF else ""
        require(name in rest, f"{path} has no {theirs(name)}, which the model needs{look}")
        shape, tensor = tuple(view.shape), rest.pop(name)
        require(
            tensor.shape == shape,
            f"{path}: {adopted.names[name]} has the shape {tuple(tensor.shape)}, but the model's "
            f"{name} has {shape}{look}",
        )
        view.copy_(tensor)
    for name in rest:
        raise UserError(
            f"{path} has {adopted.names[name]}, but the model has no {name}; look at "
            f"{KNOBS_OF[name]}"
        )
    return weights


def write_checkpoint(weights: Tensors, hp: Hyperparameters) -> None:
    """Write a checkpoint of a run with these weights before its first step. Raises UserError."""
    hp, notes = dataclasses.replace(hp, checkpoint_every="1"), []
    model = train_gpt.GPT(hp, None, torch.float32)
    model.load_state_dict(weights)
    optimizer = train_gpt.ParallelMuon(model, weights, hp, train_gpt.Comm())
    checkpoints = train_gpt.Checkpoints(
        hp, train_gpt.Comm(), lambda line, **fields: notes.append(line)
    )
    state = {"step": 0, "samples": 0, "seconds": 0.0, "recent": [0.0], "reserve": 0.0}
    checkpoints.save(optimizer.tensors().items(), state)
    require(checkpoints.written.result(), "; ".join(notes))


def table(
    events: list[dict], weights: int, their_bpb: float | None, their_bytes: int | None
) -> str:
    """The table of a finished run of a model with so many weights, from the run's events."""
    found = {event["event"]: event for event in events}
    before = found["final_average_exact"]["val_loss"]
    per_bpb = before / found["final_average_exact"]["val_bpb"]  # nats per token
    size = found["artifact"]["model_bytes"]
    rows: list[tuple] = [("before the export", before, None)]
    if "rounding" in found:  # with calibration
        expected = sum(found["rounding"]["expected_loss"].values())
        rows.append(("after it, predicted", before + expected, size))
    for name, score in found.items():
        if form := re.fullmatch("final_int6_(.*)_exact", name):
            kind = "found" if form[1] == "roundtrip" else form[1].replace("_", " ")
            rows.append((f"after it, {kind}", score["val_loss"], size))
    if their_bpb or their_bytes:
        rows.append(("theirs", their_bpb and their_bpb * per_bpb, their_bytes))
    lines = [f"{'':25} {'nats':>9} {'bpb':>9} {'change':>9} {'bytes':>12} {'bits/weight':>11}"]
    for label, nats, size in rows:
        cells = (
            (nats, 9, ".5f"),
            (nats and nats / per_bpb, 9, ".5f"),
            (nats and nats - before, 9, "+.5f"),
            (size, 12, ",d"),
            (size and 8 * size / weights, 11, ".2f"),
        )
        texts = ("" if value is None else format(value, form) for value, _, form in cells)
        padded = (f"{text:>{width}}" for text, (_, width, _) in zip(texts, cells, strict=True))
        lines.append(f"{label:25} {' '.join(padded)}".rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="the file of torch.save or safetensors")
    parser.add_argument(
        "--as",
        dest="as_file",
        required=True,
        metavar="FILE",
        help="records/published.env or like it",
    )
    parser.add_argument("--their-bpb", type=float, help="bits per byte after the other export")
    parser.add_argument("--their-bytes", type=int, help="bytes of its weights, without code")
    arguments = parser.parse_args()
    path = arguments.checkpoint
    ranks = launch.wanted_ranks(max(1, torch.cuda.device_count()))
    adopted = rename(path)
    shown = sizes(path, adopted)
    print(f"{path}: {' '.join(f'{name}={value}' for name, value in shown.items())}")
    hp, environ = configure(path, shown, arguments.as_file, dict(os.environ))
    weights = weights_of(path, adopted, hp)
    for note in adopted.notes:
        print(note)
    meant = [name for name in train_gpt.knobs_with("model") if name.upper() not in shown]
    print(f"meant as {' '.join(f'{name.upper()}={getattr(hp, name)}' for name in meant)}")
    count = train_gpt.count_numbers(weights.values())
    folder = train_gpt.CHECKPOINTS / hp.run_id
    require(not folder.exists(), f"{folder} is of another run: set another RUN_ID, or delete it")
    try:
        write_checkpoint(weights, hp)
        del adopted, weights
        print("the first val_loss and val_bpb are those before the export: compare them with yours")
        sys.stdout.flush()
        os.environ.update(environ)
        status = launch.launch([sys.executable, str(ROOT / "train_gpt.py")], ranks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    events = runs.read_events(Path("logs", f"{hp.run_id}.jsonl"))
    if events[-1]["event"] == "finished":
        print(f"\n{table(events, count, arguments.their_bpb, arguments.their_bytes)}")
    sys.exit(status)


if __name__ == "__main__":
    program.run_program(main)
