#!/usr/bin/env python3
"""Say what a demonstration run has reached, beside simpler ways to code the same text, and let the model write a little.

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

PROMPT = "def __init__(self,"


def read_events(path: Path) -> dict[str, dict]:
    """The last event of each kind in a run's log of JSON lines."""
    try:
        return {event["event"]: event for event in map(json.loads, path.read_text().splitlines())}
    except (OSError, ValueError) as error:
        raise train_gpt.UserError(f"cannot read {path}: {error}; it is written by a run of train_gpt.py") from error


def decode(tokens: np.ndarray, tokenizer: Path) -> bytes:
    """The text behind tokens (n,), documents end to end."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    documents = np.split(tokens, np.flatnonzero(tokens == train_gpt.BOS))
    return "".join(pieces.decode(document[1:].tolist()) for document in documents if len(document)).encode()


def table(events: dict[str, dict], data: Path) -> list[tuple[str, float, str]]:
    """Rows (what, bits per byte, remark), all on the same validation text."""
    missing = {"val", "artifact", "final_int6_sliding_window_exact"} - set(events)
    if missing:
        raise train_gpt.UserError(
            f"the log has no event {min(missing)}: the run did not come to its end, start it again"
        )
    artifact, tokens = events["artifact"], train_gpt.read_shard(data / "fineweb_val_000000.bin")
    text = decode(tokens, data / "tokenizer.model")
    vocabulary = events["start"]["hyperparameters"]["vocab_size"]
    packed = 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
    return [
        (
            "all tokens equally likely",
            math.log2(vocabulary) * len(tokens) / len(text),
            f"log2 {vocabulary} bits a token",
        ),
        ("xz -9e", packed, "of the validation text alone"),
        (
            "model, last weights",
            events["val"]["val_bpb"],
            f"after {events['val']['step']} steps, {events['val']['train_seconds']:.0f} s",
        ),
        ("model, averaged weights", events["final_average_exact"]["val_bpb"], ""),
        (
            "artifact, windows side by side",
            events["final_int6_roundtrip_exact"]["val_bpb"],
            f"{artifact['model_bytes']:,} bytes",
        ),
        ("artifact, sliding windows", events["final_int6_sliding_window_exact"]["val_bpb"], "the score"),
    ]


@torch.no_grad()
def write(artifact: str, tokenizer: Path, length: int, temperature: float = 0.8, seed: int = 1) -> str:
    """Text that the artifact's model continues PROMPT with, `length` tokens long."""
    blob = train_gpt.read_artifact(artifact)
    hp = train_gpt.artifact_hyperparameters(artifact, blob, dict(os.environ))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    with train_gpt.Runtime.start(hp) as runtime:
        model = train_gpt.GPT(hp, runtime.attend, runtime.dtype)
        train_gpt.load_artifact(blob, model)
        model, generator = model.to(runtime.device), torch.Generator().manual_seed(seed)
        ids = [train_gpt.BOS, *pieces.encode(PROMPT)]
        for _ in range(length):
            window = torch.tensor([ids[-hp.eval_seq_len :]], device=runtime.device)
            chances = (model(window)[0, -1].cpu() / temperature).softmax(-1)
            ids.append(int(torch.multinomial(chances, 1, generator=generator)))
    return pieces.decode(ids[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("artifact")
    parser.add_argument("--tokens", type=int, default=80, help="length of the sample")
    arguments = parser.parse_args()
    try:
        events = read_events(arguments.log)
        print(f"\n{'bits per byte on the held-out text':36}{'bpb':>8}")
        for what, bits, remark in table(events, arguments.data):
            print(f"  {what:34}{bits:8.4f}  {remark}")
        artifact = events["artifact"]
        print(f"\nsubmission: {artifact['model_bytes']:,} bytes of weights + {artifact['code_bytes']:,} of code = "
              f"{artifact['model_bytes'] + artifact['code_bytes']:,} of {train_gpt.SUBMISSION_CAP:,} allowed")  # fmt: skip
        with train_gpt.reading_artifact(arguments.artifact):
            sample = write(arguments.artifact, arguments.data / "tokenizer.model", arguments.tokens)
        print(f"\na sample, begun with {PROMPT!r}:\n")
        print("\n".join("    " + line for line in sample.splitlines()))
    except train_gpt.UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
