#!/usr/bin/env python3
"""Print some sampled text, a demonstration's results beside simpler ways to code the same text, and its loss curve.

python tools/report.py demo_data logs/demo.jsonl final_model.int6.xz
"""

import argparse
import json
import lzma
import math
import os
import sys
from pathlib import Path

import numpy as np
import sentencepiece
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt
from train_gpt import UserError

PROMPT = "def __init__(self,"


def read_events(path: Path) -> list[dict]:
    """The events of a run's log of JSON lines."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; give the logs/<RUN_ID>.jsonl of a run") from error


def decode(tokens: np.ndarray, tokenizer: Path) -> bytes:
    """The text of tokens (n,), documents joined."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    documents = np.split(tokens, np.flatnonzero(tokens == train_gpt.BOS))
    return "".join(pieces.decode(document[1:].tolist()) for document in documents if len(document)).encode()


NAMES = {"sliding_window": "sliding windows", "banded": "banded pass"}


def table(events: dict[str, dict], data: Path) -> list[tuple[str, float, str]]:
    """Rows (method, bits per byte, remark), all on the same validation text."""
    banded = events["start"]["hyperparameters"].get("eval_mode") == "banded"
    way = "banded" if banded else "sliding_window"
    missing = {"val", "artifact", f"final_int6_{way}_exact"} - set(events)
    if missing:
        raise UserError(f"the log has no event {min(missing)}: the run did not finish, run it again")
    tokens = train_gpt.read_shard(data / "fineweb_val_000000.bin")
    text = decode(tokens, data / "tokenizer.model")
    vocabulary = events["start"]["hyperparameters"]["vocab_size"]
    uniform = math.log2(vocabulary) * len(tokens) / len(text)
    xz = 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
    last = events["val"]
    weights = f"model, last weights{', banded pass' * banded}"
    roundtrip, score = (events[f"final_int6_{name}_exact"] for name in ("roundtrip", way))
    return [
        ("all tokens equally likely", uniform, f"log2 {vocabulary} bits per token"),
        ("xz -9e", xz, "of the validation text alone"),
        (weights, last["val_bpb"], f"after {last['step']} steps, {last['train_seconds']:.0f} s"),
        ("model, averaged weights", events["final_average_exact"]["val_bpb"], ""),
        ("artifact, separate windows", roundtrip["val_bpb"], f"{events['artifact']['model_bytes']:,} bytes"),
        (f"artifact, {NAMES[way]}", score["val_bpb"], "the score"),
    ]


def curve(events: list[dict], width: int = 72, height: int = 12) -> list[str]:
    """Lines that draw the training loss against the step, each column the mean over its steps; none for two steps."""
    steps, losses = np.array([(e["step"], e["train_loss"]) for e in events if e["event"] == "train"]).reshape(-1, 2).T
    if len(steps) < 3:
        return []
    column = ((steps - 1) * width / steps[-1]).astype(int)
    means = {int(c): losses[column == c].mean() for c in np.unique(column)}
    low, high = min(means.values()), max(means.values())
    rows = [[" "] * width for _ in range(height)]
    for c, mean in means.items():
        rows[round((high - mean) / max(high - low, 1e-9) * (height - 1))][c] = "*"
    labels = [f"{high:.2f}", *[""] * (height - 2), f"{low:.2f}"]
    lines = [f"{label:>8} |{''.join(row)}".rstrip() for label, row in zip(labels, rows, strict=True)]
    return [
        "training loss, nats per token:",
        *lines,
        f"{'':8} +{'-' * width}",
        f"{'step':>8}  1{steps[-1]:>{width - 1}.0f}",
    ]


@torch.no_grad()
def sample(artifact: str, tokenizer: Path, length: int, temperature: float = 0.8, seed: int = 1) -> str:
    """PROMPT continued by the artifact's model with `length` tokens."""
    blob, hp = train_gpt.read_artifact(artifact, dict(os.environ))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    with train_gpt.Runtime.start(hp) as runtime:
        model = train_gpt.GPT(hp, runtime.attend, runtime.dtype)
        model.load_state_dict(train_gpt.load_artifact(blob))
        model = model.to(runtime.device)
        generator = torch.Generator().manual_seed(seed)
        ids = [train_gpt.BOS, *pieces.encode(PROMPT)]
        for _ in range(length):
            window = torch.tensor([ids[-hp.eval_seq_len :]], device=runtime.device)
            probabilities = (model(window)[0, -1].cpu() / temperature).softmax(-1)
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return pieces.decode(ids[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder made by data/demo_corpus.py")
    parser.add_argument("log", type=Path, help="logs/<RUN_ID>.jsonl")
    parser.add_argument("artifact")
    parser.add_argument("--tokens", type=int, default=80, help="length of the sample")
    parser.add_argument("--note", default="", help="a sentence about the run")
    arguments = parser.parse_args()
    try:
        history = read_events(arguments.log)
        events = {event["event"]: event for event in history}  # the last of each kind
        rows = table(events, arguments.data)
        with train_gpt.reading_artifact(arguments.artifact):
            text = sample(arguments.artifact, arguments.data / "tokenizer.model", arguments.tokens)
        print(f"\na sample, begun with {PROMPT!r}:\n")
        print("\n".join("    " + line for line in text.splitlines()))
        model, code = events["artifact"]["model_bytes"], events["artifact"]["code_bytes"]
        print(
            f"\nsubmission: {model:,} bytes of weights + {code:,} of code = "
            f"{model + code:,} of {train_gpt.SUBMISSION_CAP:,} allowed"
        )
        if arguments.note:
            print(arguments.note)
        print(f"\n{'bits per byte on the held-out text':36}{'bpb':>8}")
        for method, bits, remark in rows:
            print(f"  {method:34}{bits:8.4f}  {remark}")
        print("", *curve(history), sep="\n")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
