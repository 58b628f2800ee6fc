#!/usr/bin/env python3
"""Print some sampled text, a demonstration's results beside simpler ways to code the same text, and
its loss curve; or write an HTML page about runs.

    python tools/report.py logs/demo.jsonl logs/demo.npz
    python tools/report.py --html runs.html "logs/base_seed*.txt" "logs/new_seed*.txt"

The log names the data. All of its validation text is decoded and compressed.

The page is one file that needs no network. It groups runs that differ only in their seeds and
compares each group with that of the first log. A log's .jsonl is used if it lies beside it.
"""

import argparse
import lzma
import math
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "tools", "data")]

import program
import caseops
import train_gpt
from lib import record_curves
from lib.runs import read_events
from sample import load
from train_gpt import require

# isort: split
import numpy as np
import torch


def validation(data: str, tokenizer: str, vocab_size: int) -> tuple[int, bytes]:
    """(tokens, text) of the validation shards, documents joined."""
    stream = train_gpt.TokenStream(data, "val", vocab_size)
    tokens = stream.read(0, len(stream))
    pieces = caseops.Tokenizer(tokenizer, vocab_size)
    documents = np.split(tokens, np.flatnonzero(tokens == train_gpt.BOS))
    texts = (pieces.decode(part[part != train_gpt.BOS].tolist()) for part in documents)
    return len(tokens), "".join(texts).encode()


NAMES = {"sliding_window": "sliding windows", "banded": "banded pass"}


def table(events: dict[str, dict], tokens: int, text: bytes) -> list[tuple[str, float, str]]:
    """Rows (method, bits per byte, remark), all on the validation text, which has `tokens`."""
    banded = events["start"]["hyperparameters"].get("eval_mode") == "banded"
    way = "banded" if banded else "sliding_window"
    for kind in ("artifact", f"final_int6_{way}_exact", "finished", "val"):
        require(
            kind in events, f"the log has no event {kind}: the run did not finish, run it again"
        )
    vocabulary = events["start"]["hyperparameters"]["vocab_size"]
    uniform = math.log2(vocabulary) * tokens / len(text)
    xz = 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
    last = events["val"]
    weights = f"model, last weights{', banded pass' * banded}"
    names = ("final_average_exact", "final_int6_roundtrip_exact", f"final_int6_{way}_exact")
    averaged, separate, score = (events[name]["val_bpb"] for name in names)
    return [
        ("all tokens equally likely", uniform, f"log2 {vocabulary} bits per token"),
        ("xz -9e", xz, "of the validation text alone"),
        (weights, last["val_bpb"], f"after {last['step']} steps, {last['train_seconds']:.0f} s"),
        ("model, averaged weights", averaged, ""),
        ("artifact, separate windows", separate, f"{events['artifact']['model_bytes']:,} bytes"),
        (f"artifact, {NAMES[way]}", score, "the score"),
    ]


def curve(events: list[dict], width: int = 72, height: int = 12) -> list[str]:
    """Lines that draw the training loss, each column the mean over its steps."""
    points = [(e["step"], e["train_loss"]) for e in events if e["event"] == "train"]
    steps, losses = np.array(points).reshape(-1, 2).T
    if len(steps) < 3:
        return []
    column = ((steps - 1) * width / steps[-1]).astype(int)
    means = {int(c): losses[column == c].mean() for c in np.unique(column)}
    low, high = min(means.values()), max(means.values())
    rows = [[" "] * width for _ in range(height)]
    for c, mean in means.items():
        rows[round((high - mean) / max(high - low, 1e-9) * (height - 1))][c] = "*"
    labels = [f"{high:.2f}", *[""] * (height - 2), f"{low:.2f}"]
    lines = [f"{label:>8} |{''.join(row)}" for label, row in zip(labels, rows, strict=True)]
    axis = [f"{'':8} +{'-' * width}", f"{'step':>8}  1{steps[-1]:>{width - 1}.0f}"]
    return ["training loss, nats per token:", *map(str.rstrip, lines), *axis]


def sample(
    artifact: str, tokenizer: str, prompt: str, length: int, temperature: float = 0.8, seed: int = 1
) -> str:
    """`prompt` continued by the artifact's model with at most `length` tokens."""
    reader, pieces = load(artifact, os.environ | {"TOKENIZER_PATH": tokenizer})
    reader.ids += pieces.encode(prompt)
    for _ in reader.continued(length, temperature, torch.Generator().manual_seed(seed)):
        pass
    return pieces.decode(reader.ids)


def main() -> None:
    parser = program.parser(__doc__)
    add, text = parser.add_argument, "a run's .jsonl and .npz; with --html logs, folders, patterns"
    add("logs", nargs="+", help=text)
    add("--html", type=page_file, help="write a page about the logs to this file")
    add("--record", choices=record_curves.RATES, help="draw a record's curves into the page")
    text = "of the sample (default: the beginning of the validation text)"
    add("--prompt", type=program.utf8, default="", help=text)
    arguments = parser.parse_args()
    if arguments.record and not arguments.html:
        parser.error("--record needs --html; tools/compare.py --record prints the same")
    if arguments.html:
        from lib import html_page

        html_page.write(arguments.html, arguments.logs, arguments.record)
    elif len(arguments.logs) != 2:
        parser.error("give logs/<RUN_ID>.jsonl and logs/<RUN_ID>.npz, or --html and logs")
    else:
        print_report(Path(arguments.logs[0]), arguments.logs[1], arguments.prompt)


def page_file(name: str) -> Path:
    """The path of a page. With another suffix it may be a log, which would be replaced."""
    if not name.endswith(".html"):
        raise argparse.ArgumentTypeError(f"{name} does not end in .html")
    return program.output_file(name)


def print_report(log: Path, artifact: str, prompt: str) -> None:
    """Print the report about one run, with a sample."""
    history = read_events(log)
    events = {event["event"]: event for event in history}  # the last of each kind
    knobs = events["start"]["hyperparameters"]
    names = ("data_path", "tokenizer_path", "vocab_size")
    tokens, text = validation(*map(knobs.get, names))
    rows = table(events, tokens, text)
    prompt = prompt or text[:200].decode(errors="ignore").strip().partition("\n")[0][:40]
    continued = sample(artifact, knobs["tokenizer_path"], prompt, length=80)
    print(f"\nsample from the prompt {prompt!r}:\n")
    print("\n".join("    " + line for line in continued.splitlines()))
    model, code = events["artifact"]["model_bytes"], events["artifact"]["code_bytes"]
    total = f"{model + code:,} of {train_gpt.SUBMISSION_CAP:,} allowed"
    print(f"\nsubmission: {model:,} bytes of weights + {code:,} of code = {total}")
    print(f"\n{'bits per byte on the held-out text':36}{'bpb':>8}")
    for method, bits, remark in rows:
        print(f"  {method:34}{bits:8.4f}  {remark}")
    print("", *curve(history), sep="\n")


if __name__ == "__main__":
    program.run_program(main)
