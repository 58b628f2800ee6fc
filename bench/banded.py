#!/usr/bin/env python3
"""Compare banded attention with sliding windows on trained models, with several bands and attention
sinks.

    python bench/banded.py final_model.int6.xz checkpoints/RUN/step_00002000.safetensors --plot banded.png

In a banded pass each position attends to itself and the W - 1 positions before it, and keys and
values are computed once. The stream is cut into blocks. A block reads `overlap` positions that it
does not score, except at the start of the stream. The mask is the plain reference here.

With n sinks the first n positions of a block stay visible and the band has W - n positions
(StreamingLLM, arXiv:2309.17453). As there, a sink stands right before the band: no position sees it
at more than a distance of W - 1.

A model is an artifact or a checkpoint, whose averaged weights are scored, if there are any yet.
Differences are paired by target: `se` is the standard error of their mean. DATA_PATH and
TOKENIZER_PATH name the text; weights and products are fp32.

The last line is JSON.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt
from common import image_file, positive
from train_gpt import Hyperparameters

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # queries of one product


class Model(NamedTuple):
    """A trained model."""

    name: str
    hp: Hyperparameters
    weights: dict[str, Tensor]
    steps: int
    looping: bool  # whether the loop is visited repeatedly by now

    @property
    def tokens_per_weight(self) -> float:
        """Training tokens divided by the number of weights."""
        return (
            self.steps * self.hp.train_batch_tokens / sum(w.numel() for w in self.weights.values())
        )


def load(path: Path) -> Model:
    """The model of an artifact or of a checkpoint. Raises UserError if it is neither."""
    environ = {**os.environ, "COMPUTE_DTYPE": "float32"}
    if path.suffix != ".safetensors":
        blob, hp = train_gpt.read_artifact(str(path), environ)
        training = train_gpt.open_artifact(blob)[0]["training"]
        hp = dataclasses.replace(
            hp, train_seq_len=hp.eval_seq_len, train_batch_tokens=training["tokens_per_step"]
        )
        return Model(path.name, hp, train_gpt.load_artifact(blob), training["steps"], True)
    state, tensors = train_gpt.read_checkpoint(path)
    stored = {name.upper(): str(value) for name, value in state["hyperparameters"].items()}
    hp = Hyperparameters.from_env(stored | environ)
    kind = "average" if state["samples"] else "weight"
    weights = {name: tensors[f"{name}.{kind}"] for name in train_gpt.outline(hp)}
    return Model(
        f"{hp.run_id}:{state['step']}",
        hp,
        weights,
        state["step"],
        state["step"] >= hp.loop_start * hp.iterations,
    )


def banded_attention(model: Callable[[], train_gpt.GPT], band: int, sinks: int) -> Callable:
    """A function of q (B, T, H, E), k and v (B, T, K, E) that sees `sinks` positions and the last
    band - sinks."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *_) -> Tensor:
        time = q.size(1)
        spare = -time % CHUNK
        position = torch.arange(time + spare).view(-1, CHUNK, 1)  # (chunks, C, 1)
        key = position[:, :1] - band + torch.arange(band + CHUNK)  # (chunks, 1, band + C)
        hidden = (key > position) | (key <= position - (band - sinks)) | (key < sinks)
        queries = (
            F.pad(q, (0, 0, 0, 0, 0, spare)).unflatten(2, (k.size(2), -1)).unflatten(1, (-1, CHUNK))
        )
        windows = (
            F.pad(t, (0, 0, 0, 0, band, spare)).unfold(1, band + CHUNK, CHUNK) for t in (k, v)
        )
        keys, values = windows  # (B, chunks, K, E, band + C)
        scores = torch.einsum("bnqkge,bnket->bnkgqt", queries, keys)
        scores = scores.masked_fill(hidden[:, None, None], -math.inf)
        if sinks:
            back = (torch.arange(time + spare) - (band - 1)).clamp(min=0, max=time - 1)
            cos, sin = model().cos[back], model().sin[back]
            near = train_gpt.rotate(F.pad(q, (0, 0, 0, 0, 0, spare)), cos, -sin)
            near = near.unflatten(2, (k.size(2), -1)).unflatten(1, (-1, CHUNK))
            first = torch.einsum("bnqkge,bske->bnkgqs", near, k[:, :sinks])
            first = first.masked_fill((torch.arange(sinks) > position)[:, None, None], -math.inf)
            scores = torch.cat((first, scores), dim=-1)
        weights = (scores * q.size(-1) ** -0.5).softmax(dim=-1)
        y = torch.einsum("bnkgqt,bnket->bnqkge", weights[..., sinks:], values)
        if sinks:
            y = y + torch.einsum("bnkgqs,bske->bnqkge", weights[..., :sinks], v[:, :sinks])
        return y.flatten(1, 2)[:, :time].flatten(2, 3)

    return attend


class Scorer:
    """Scores one model in several ways on the same targets."""

    def __init__(self, model: Model, runtime: train_gpt.Runtime, targets: int):
        train_gpt.require(
            not model.hp.doc_attention,
            f"{model.name} attends within documents: choose another model",
        )
        self.model, self.runtime = model, runtime
        self.val = train_gpt.Validation(model.hp, runtime.device)
        if targets and targets < self.val.targets:
            val = self.val
            val.tokens, val.nbytes, val.targets = (
                val.tokens[: targets + 1],
                val.nbytes[:targets],
                targets,
            )
            val.total_bytes = int(val.nbytes.sum(dtype=torch.int64))
            val.documents = val.documents[val.documents < targets]

    def score(self, window: int, stride: int, band: int = 0, sinks: int = 0) -> Tensor:
        """Nats (n,) of all targets, in windows or, with a band, in blocks of `window` positions."""
        hp = dataclasses.replace(self.model.hp, eval_seq_len=window, eval_stride=stride)
        attend = banded_attention(lambda: gpt, band, sinks) if band else self.runtime.attend
        gpt = train_gpt.GPT(hp, attend, torch.float32)
        gpt.load_state_dict(self.model.weights)
        gpt.visits = hp.visits(self.model.looping)

        def through_all(ids: Tensor, targets: Tensor, **rest) -> Tensor:
            """All positions through the last layer, as its form for few positions has no band."""
            whole = torch.cat((ids[:, 1:], targets[:, -1:]), dim=1)
            return gpt(ids, whole, **rest)[:, -targets.size(1) :]

        scorer = train_gpt.Evaluator(
            through_all if band else gpt, self.val, hp, self.runtime, stride
        )
        scorer.score(scorer.windows())
        return scorer.nats[:-1].double()

    def bpb(self, nats: Tensor) -> float:
        """Bits per byte of these losses."""
        return nats.sum().item() / math.log(2) / self.val.total_bytes


def compare(scorer: Scorer, arguments: argparse.Namespace) -> list[dict]:
    """Print and return one row for each way to score the model."""
    model = scorer.model
    length = model.hp.train_seq_len
    ways = {
        "plain": (length, length),
        f"sliding {max(1, length // arguments.strides)}": (
            length,
            max(1, length // arguments.strides),
        ),
    }
    block = arguments.block * length
    for share in arguments.bands:
        band = round(share * length)
        for sinks in arguments.sinks:
            for overlap in arguments.overlaps:
                name = f"banded {band}" + f" sinks {sinks}" * bool(sinks) + f" overlap {overlap:g}T"
                ways[name] = (block, block - round(overlap * length), band, sinks)
    rows = []
    base = None
    for name, way in ways.items():
        nats = scorer.score(*way)
        base = nats if name.startswith("sliding") else base
        row = {"way": name, "bpb": scorer.bpb(nats), "band": way[2] if len(way) > 2 else 0}
        row |= {
            "sinks": way[3] if len(way) > 2 else 0,
            "overlap": way[0] - way[1],
            "length": length,
        }
        if base is not None:
            scale = len(nats) / math.log(2) / scorer.val.total_bytes
            row |= {
                "difference": scorer.bpb(nats - base),
                "se": scale * (nats - base).std().item() / len(nats) ** 0.5,
            }
        row |= {
            "model": model.name,
            "steps": model.steps,
            "tokens_per_weight": model.tokens_per_weight,
        }
        rows.append(row)
        text = f"{row['difference']:+10.5f}{row['se']:9.5f}" if "difference" in row else ""
        print(
            f"{model.name:32}{model.steps:7}{row['tokens_per_weight']:8.1f}  {name:34}{row['bpb']:9.5f}{text}",
            flush=True,
        )
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Plot banded minus sliding against training tokens per weight, a point for each model and band
    or sinks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    banded = [row for row in rows if row["band"]]
    groups = (
        (panels[0], "no sinks", [row for row in banded if not row["sinks"]], "band"),
        (panels[1], "band T", [row for row in banded if row["band"] == row["length"]], "sinks"),
    )
    for axes, title, members, key in groups:
        labels = sorted({row[key] / (row["length"] if key == "band" else 1) for row in members})
        for number, label in enumerate(labels):
            scale = "length" if key == "band" else None
            points = sorted(
                (row["tokens_per_weight"], row["difference"], row["se"])
                for row in members
                if row[key] / (row[scale] if scale else 1) == label
            )
            x, y, error = zip(*points, strict=True)
            x = [tokens * (1 + 0.06 * number) for tokens in x]  # beside each other
            name = f"W = {label:g} T" if scale else f"{label:g} sinks"
            axes.errorbar(x, y, error, marker="o", linestyle="none", label=name)
        axes.set(
            title=title,
            xlabel="training tokens per weight",
            ylabel="bits per byte above sliding windows",
        )
        axes.set_xscale("log")
        axes.axhline(0, color="black", linewidth=0.8)
        axes.axhspan(-0.0005, 0.0005, color="black", alpha=0.08)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, help="artifacts and checkpoints")
    parser.add_argument(
        "--targets", type=int, default=0, help="score only the first ones of the text"
    )
    parser.add_argument(
        "--bands",
        nargs="+",
        type=float,
        default=[0.5, 0.75, 1.0],
        help="W, times the training length",
    )
    parser.add_argument("--sinks", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument(
        "--overlaps", nargs="+", type=float, default=[2.0], help="times the training length"
    )
    parser.add_argument(
        "--block", type=positive, default=8, help="positions of a block, times the training length"
    )
    parser.add_argument(
        "--strides",
        type=positive,
        default=32,
        help="sliding windows of T are T divided by this apart",
    )
    parser.add_argument(
        "--plot",
        type=image_file,
        help="draw banded minus sliding by length of training to this file",
    )
    arguments = parser.parse_args()
    print(f"{'model':32}{'steps':>7}{'tok/w':>8}  {'way':34}{'bpb':>9}{'-sliding':>10}{'se':>9}")
    rows = []
    for path in arguments.models:
        model = load(path)
        with train_gpt.Runtime.start(model.hp) as runtime:
            rows += compare(Scorer(model, runtime, arguments.targets), arguments)
    print(json.dumps({"bench": "banded", "targets": arguments.targets, "rows": rows}))
    if arguments.plot:
        draw(rows, arguments.plot)


if __name__ == "__main__":
    train_gpt.run_program(main)
