#!/usr/bin/env python3
"""Compare variants with a base: several seeds, equal steps or equal wall clock.

    python tools/ablate.py "xsa: XSA_LAST_N=4"          # ten minutes on 2 cores (docs/experiment.md)
    python tools/ablate.py --steps 1000 "xsa: XSA_LAST_N=4" "gain: QK_GAIN_INIT=4"
    python tools/ablate.py --seconds 120 --seeds 1 2 3 4 5 "xsa: XSA_LAST_N=4"
    python tools/ablate.py --tokens-per-weight 100 "xsa: XSA_LAST_N=11 @1.03"

A variant is a name and the knobs in which it differs from the base: the demonstration's small
model, changed by the environment. Without DATA_PATH the runs train on the demonstration's data.
EVAL_STRIDE follows EVAL_SEQ_LEN unless it is set. Logs go to --folder; a run that has finished
there is not repeated. Another train_gpt.py needs another folder.

With `--tokens-per-weight` the base is the record in small: its layers, proportions and 7,000 steps,
with so many training tokens per weight (the defaults have 165). `@1.03` is the price of a variant: its
step takes 1.03 times as long in the record, so it gets 1/1.03 of the steps.

The table has bits per byte. p and p_paired are one-sided, that the variant is better at all
(Welch's test, and paired by seed). `before` is the difference before the export (averaged weights,
non-overlapping windows). time_ratio has a ? if its seeds differ by more than 10 %. The last line is
JSON, which --folder keeps as ablation.json.
"""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "tools", "bench", "data")]

import program
import compare
import demo_corpus
import demo_settings
import sweep
import train_gpt
from lib import runs
from train_gpt import Hyperparameters, require

# 1.0 million parameters; 400 steps take some minutes on one core.
BASE = demo_settings.CPU | {"WARMDOWN_FRAC": 0.4, "VAL_LOSS_EVERY": 0}
STEPS = 400
POINTS = 50  # of a curve
RECORD_STEPS = 7000  # of #399 in 600 s
WIDTH = 48  # of the record in small
MICRO = 16_384  # tokens per forward of the record in small


class Variant(NamedTuple):
    """What a variant changes."""

    knobs: dict[str, str]
    price: float = 1.0  # time of its step in the record as a multiple of the base's


Variants = dict[str, Variant]  # by name


def variant(text: str) -> tuple[str, Variant]:
    """(name, variant) of "name: KNOB=value KNOB=value @price". Raises UserError."""
    name, _, rest = text.partition(":")
    rest, _, price = rest.partition("@")
    chosen = dict(pair.partition("=")[::2] for pair in rest.split())
    train_gpt.refuse_misspelt(chosen, sorted(runs.KNOBS))
    require(
        chosen.keys() <= runs.KNOBS and name and chosen and all(chosen.values()),
        f'{text!r} is not a variant: write "name: KNOB=value KNOB=value" with knobs of '
        "train_gpt.py --help",
    )
    advice = "write the ratio of step times, for example @1.03"
    with train_gpt.as_user_error(f"{text!r} has the price {price!r}", advice, Exception):
        return name, Variant(chosen, program.positive(price or "1"))


def seed(text: str) -> int:
    """A value of --seeds, which takes all words up to the next option."""
    if not text.lstrip("-").isdecimal():
        wrong = f"{text!r} is not a seed: write the variants before --seeds"
        raise argparse.ArgumentTypeError(wrong)
    return int(text)


def check(variants: Variants, arguments: argparse.Namespace) -> None:
    """Raises UserError for variants that cannot be compared as written."""
    own = len(variants) == len(arguments.variants) + 1
    require(own, 'two variants have one name, or one is called "base": give each its own name')
    priced = any(chosen.price != 1 for chosen in variants.values())
    alone = not (arguments.seconds and priced)
    require(alone, "--seconds measures the time of a step: leave out the prices (@)")


def proportional(width: int, tokens_per_weight: float) -> dict[str, str]:
    """The knobs of the record's model at another width, with this many training tokens per weight
    in its 7,000 steps. Raises UserError if that is less than one sequence per step."""
    record = Hyperparameters()
    scale = width / record.model_dim
    length = round(scale * record.train_seq_len)
    heads = 2 if width < 64 else 4  # of at least 16 dimensions
    knobs = {
        "MODEL_DIM": width,
        "NUM_HEADS": heads,
        "NUM_KV_HEADS": heads // 2,
        # Half of a head; a quarter, as in the record, leaves few frequencies
        "ROPE_DIMS": 2 * (width // heads // 4),
        "BIGRAM_VOCAB_SIZE": round(scale * record.bigram_vocab_size),
        "BIGRAM_DIM": round(scale * record.bigram_dim),
        "TRAIN_SEQ_LEN": length,
        "EVAL_SEQ_LEN": length,
        "WARMUP_STEPS": 2,
        "VAL_LOSS_EVERY": 0,
        "CHECKPOINT_EVERY": "300s",
    }
    hp = configured(knobs | os.environ)
    weights = sum(tensor.numel() for tensor in train_gpt.meta_parameters(hp).values())
    sequences = round(tokens_per_weight * weights / RECORD_STEPS / length)
    few = f"--tokens-per-weight {tokens_per_weight:g} is less than one sequence per step"
    require(sequences, f"{few}: raise it")
    return knobs | {"TRAIN_BATCH_TOKENS": sequences * length, "MICRO_BATCH_TOKENS": MICRO}


def configured(knobs: dict) -> Hyperparameters:
    """These knobs, before the run has a name and a stride. Raises UserError."""
    texts = {name: str(value) for name, value in knobs.items()}
    return Hyperparameters.from_env({"RUN_ID": "x", "EVAL_STRIDE": "1", **texts})


def record_bytes(hp: Hyperparameters) -> int:
    """Bytes of an artifact with as many bits per code as 16 MB have for the default model."""
    views = list(train_gpt.artifact_tensors(train_gpt.meta_parameters(hp)))
    codes = sum(view.numel() for kind, _, view in views if kind)
    words = sum((view[..., 0] if kind else view).numel() for kind, _, view in views)
    return round(3.89 / 8 * codes) + 2 * words


def environment(arguments: argparse.Namespace, *chosen: Variant) -> dict[str, str]:
    """The variables of a run with these variants: of the base, of the environment, then of the
    variants. Raises UserError for a value that a knob cannot have."""
    base, steps, windows = BASE, arguments.steps or STEPS, 1
    if arguments.tokens_per_weight:
        base = proportional(arguments.width, arguments.tokens_per_weight)
        # The record's stride, 64 of 2,048, would make the scores longer than the training
        steps, windows = RECORD_STEPS, 4
    found = {"OMP_WAIT_POLICY": "PASSIVE"} | base | os.environ
    if arguments.jobs > 1:
        found.setdefault("OMP_NUM_THREADS", max(1, program.cores() // arguments.jobs))
    if arguments.tokens_per_weight:
        code = (ROOT / "train_gpt.py").stat().st_size
        found["TARGET_BYTES"] = record_bytes(configured(found)) + code
    if arguments.seconds:
        found |= {"ITERATIONS": 1_000_000, "MAX_WALLCLOCK_SECONDS": arguments.seconds}
    else:
        steps = round(steps / math.prod(one.price for one in chosen))
        found |= {"ITERATIONS": steps, "MAX_WALLCLOCK_SECONDS": 0}
        found["TRAIN_LOG_EVERY"] = max(1, steps // POINTS)
    for one in chosen:
        found |= one.knobs
    length = configured(found).eval_seq_len
    found.setdefault("EVAL_STRIDE", max(1, length // windows))
    return {name: str(value) for name, value in found.items()}


def finish(environ: dict[str, str]) -> runs.Run:
    """The finished run with these variables; it is started or continued if necessary, in a folder
    of its own, because all runs copy their artifact to one name. Raises UserError if it fails."""
    run_id = environ["RUN_ID"]
    if done := sweep.finished(environ, run_id):
        return done
    folder = Path("work", run_id).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / sweep.LOGS / f"{run_id}.txt"
    hint = "" if environ.get("COMPILE") == "0" else "; compiling takes minutes the first time"
    print(f"== {run_id}: progress in {log}{hint}", flush=True)
    command = [sys.executable, str(ROOT / "train_gpt.py")]
    fault = sweep.execute(command, environ, quiet=True, folder=folder)
    require(not fault, f"{run_id} failed: {fault}")
    sweep.LOGS.mkdir(exist_ok=True)
    for log in (folder / sweep.LOGS).iterdir():
        log.replace(sweep.LOGS / log.name)
    shutil.rmtree(folder)
    done = sweep.finished(environ, run_id)
    require(done, f"{run_id} failed: its log has no final score")
    return done


def measure(variants: Variants, arguments: argparse.Namespace) -> dict[str, list[runs.Run]]:
    """The runs of each variant, one per seed. Raises UserError if one of them could not start, or
    failed; then no other one starts."""
    environments = {name: environment(arguments, one) for name, one in variants.items()}
    # Variants take turns, so a slowdown of the machine affects all of them
    turns = [(name, seed) for seed in arguments.seeds for name in variants]
    planned = [
        environments[name] | {"SEED": str(seed), "RUN_ID": f"{name}_seed{seed}", "RESUME": "auto"}
        for name, seed in turns
    ]
    for environ in planned:
        Hyperparameters.from_env(environ)
    found = {name: [] for name in variants}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        futures = [pool.submit(finish, environ) for environ in planned]
        try:
            for (name, _), future in zip(turns, futures, strict=True):
                found[name].append(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def holm(values: list[float | None]) -> list[float | None]:
    """The p of several tests, corrected: if nothing has an effect, one of them is below a level as
    rarely as the p of a single test (S. Holm, Scand. J. Statist. 6, 1979)."""
    order = sorted((i for i, p in enumerate(values) if p is not None), key=values.__getitem__)
    found, least = list(values), 0.0
    for rank, i in enumerate(order):
        least = found[i] = max(least, min(1.0, (len(order) - rank) * values[i]))
    return found


def row(name: str, members: list[runs.Run], base: list[runs.Run], tests: int) -> dict:
    """One variant's row of the table. Its p are those of this test alone."""
    bpb = [run.score.bpb for run in members]
    base_bpb = [run.score.bpb for run in base]
    mean, std = runs.mean_std(bpb)
    welch = compare.welch(base_bpb, bpb)
    paired = compare.paired(base_bpb, bpb)
    before, ratios, pairs = None, [], list(zip(members, base, strict=True))
    if members[0].before_export:
        before = statistics.fmean(a.before_export.bpb - b.before_export.bpb for a, b in pairs)
    if members[0].step_ms:
        ratios = [a.step_ms / b.step_ms for a, b in pairs]
    return {
        "variant": name,
        "mean": mean,
        "std": std,
        "n": len(bpb),
        "before": before,
        "p": welch and welch.p,
        "p_paired": paired and paired.p,
        "difference": mean - statistics.fmean(base_bpb),
        "detectable": welch and compare.detectable(welch, compare.LEVEL / tests),
        "steps": statistics.fmean(run.steps or 0 for run in members),
        "bytes": max(run.model_bytes or 0 for run in members),
        "time_ratio": statistics.median(ratios) if ratios else None,
        "time_ratios": ratios,
    }


def unsure(line: dict) -> str:
    """Why a row's time_ratio may be the machine's, or ""."""
    ratios = line["time_ratios"]
    if line["variant"] == "base" or not ratios:
        return ""
    if len(ratios) == 1:
        return "one seed does not show how much the machine's speed varied"
    if max(ratios) <= (1 + runs.UNEVEN) * min(ratios):
        return ""
    return f"the seeds have {min(ratios):.2f} to {max(ratios):.2f}: repeat it on an idle machine"


FORMS = {  # of the columns
    **{"mean": ".5f", "std": ".5f", "difference": "+.5f", "p": ".4f", "p_paired": ".4f"},
    **{"before": "+.5f", "steps": ".0f", "time_ratio": ".3f", "bytes": ",.0f"},
}


def table(rows: list[dict]) -> str:
    """The rows as aligned text."""
    cells = [["", *FORMS]]
    for line in rows:
        shown = {name: runs.cell(line[name], form) for name, form in FORMS.items()}
        shown["time_ratio"] += "?" * bool(unsure(line))
        cells.append([line["variant"], *shown.values()])
    return runs.aligned(cells)


def comparison(variants: Variants, arguments: argparse.Namespace) -> None:
    """Run all variants and print a table."""
    found = measure(variants, arguments)
    first = found["base"][0]
    for name, members in found.items():
        if warning := runs.uneven_steps(members):
            print(f"{name}: {warning}")
    tests = max(1, len(found) - 1)
    rows = [row(name, members, found["base"], tests) for name, members in found.items()]
    for name in ("p", "p_paired"):
        corrected = holm([line[name] for line in rows[1:]])
        for line, value in zip(rows[1:], corrected, strict=True):
            line[name] = value
    print(f"\n{first.score_name}, bits per byte; {first.device}")
    print(table(rows))
    if tests > 1:
        print(f"p and p_paired are corrected for {tests} variants (Holm)")
    for line in rows[1:]:
        print(f"{line['variant']}: {compare.conclusion(line['p'])}")
        if line["detectable"]:
            least = f"with {line['n']} seeds only a gain of {line['detectable']:.4f} or more"
            seen = f"is seen in {compare.POWER:.0%} of comparisons; a smaller one may exist"
            print(f"{line['variant']}: {least} {seen}")
        if why := unsure(line):
            print(f"{line['variant']}: time_ratio is uncertain, as {why}")
    report = json.dumps({"score": rows})
    Path("ablation.json").write_text(f"{report}\n")
    print(report)


def choose_data() -> None:
    """Set the variables of the data; without DATA_PATH, make the demonstration's."""
    own = os.environ.get("DATA_PATH")
    folder = Path(own or ROOT / "demo_data").resolve()
    if not own:
        print("demonstration data", demo_corpus.build(folder), flush=True)
    os.environ["DATA_PATH"] = str(folder)
    os.environ |= {
        name: str(value)
        for name, value in demo_settings.data_knobs(os.environ).items()
        if not os.environ.get(name)
    }
    # The runs start in another folder
    os.environ["TOKENIZER_PATH"] = str(Path(os.environ["TOKENIZER_PATH"]).resolve())


def main() -> None:
    parser = program.parser(__doc__)
    add, length = parser.add_argument, parser.add_mutually_exclusive_group()
    add("variants", nargs="*", help='"name: KNOB=value ..."')
    length.add_argument("--steps", type=int, default=0, help=f"steps per run; default: {STEPS}")
    length.add_argument("--seconds", type=float, default=0.0, help="training seconds per run")
    text = "the record in small, with so many tokens"
    length.add_argument("--tokens-per-weight", type=float, default=0.0, help=text)
    add("--width", type=int, default=WIDTH, help=f"of the record in small; default: {WIDTH}")
    add("--jobs", type=program.count, default=2, help="runs side by side; default: 2")
    add("--seeds", type=seed, nargs="+", default=[1, 2, 3])
    text = "default: %(default)s"
    add("--folder", type=program.output_folder, default=Path("ablations"), help=text)
    arguments = parser.parse_args()
    variants = {"base": Variant({})} | dict(variant(text) for text in arguments.variants)
    check(variants, arguments)
    choose_data()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(arguments.folder)
    signal.signal(signal.SIGTERM, sweep.end_runs)
    try:
        comparison(variants, arguments)
    except KeyboardInterrupt:
        print("error: interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    program.run_program(main)
