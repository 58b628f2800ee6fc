#!/usr/bin/env python3
"""A fair ruler: a base and variants of it, several seeds, at equal steps or equal wall clock, and at equal bytes.

    DATA_PATH=... TOKENIZER_PATH=... python tools/ablate.py --steps 400 --bytes 2000000 "xsa: XSA_LAST_N=6" "gain: QK_GAIN_INIT=4"
    ... python tools/ablate.py --seconds 120 --seeds 1 2 3 --also OTHER_DATA_PATH "xsa: XSA_LAST_N=6"
    ... python tools/ablate.py --screen --steps 200 --seeds 1 "xsa: XSA_LAST_N=6" "gain: QK_GAIN_INIT=4" "decay: MUON_WD=0.09"

A variant is a name and the knobs in which it differs from the base, which is the small model below with what the
environment sets. `--bytes` is the artifact's size for all (TARGET_BYTES makes the steps of codes coarser until it fits,
and a variant that is smaller by itself stays so: the table says it). Variants take turns within a seed, so that a
machine that slows down slows all of them. Every run has its log in --folder; what is finished there is not run again.

With `--screen` the variants are switches of one experiment instead: each is on in half of its runs, in combinations that
let all of them be told apart, so that k variants need k + 1 runs or a few more, and every run tells of every variant. It
finds what is worth a comparison of its own; that two variants do not add up, it does not see.

Prints for each variant its mean, standard deviation, difference to the base in bits per byte, p that it is better at all
(Welch's and paired by seed, one-sided), ratio of the time of a step, and bytes; of a screening its effect, that in
standard errors, ratio of time, and bytes. Last, one JSON line.
"""

import argparse
import json
import math
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import compare
import runs
import sweep
import train_gpt

# 4.1 million parameters; a step took 0.67 s on 2 cores.
BASE = {
    "NUM_LAYERS": "6", "MODEL_DIM": "256", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "TRAIN_SEQ_LEN": "512", "EVAL_SEQ_LEN": "512",
    "TRAIN_BATCH_TOKENS": "8192", "BIGRAM_VOCAB_SIZE": "2048", "XSA_LAST_N": "4", "EMA_DECAY": "0.97", "LATE_QAT": "0",
    "MUON_MOMENTUM": "0.95", "MUON_MOMENTUM_WARMUP_START": "0.85", "MUON_MOMENTUM_WARMUP_STEPS": "50", "WARMDOWN_FRAC": "0.4",
    "WARMUP_STEPS": "2", "VAL_LOSS_EVERY": "0", "EVAL_STRIDE": "512",
}  # fmt: skip


def variant(text: str) -> tuple[str, dict[str, str]]:
    """ "name: KNOB=value KNOB=value" taken apart. Raises UserError for what is no knob."""
    name, _, knobs = text.partition(":")
    chosen = dict(pair.partition("=")[::2] for pair in knobs.split())
    unknown = [knob for knob in chosen if knob.lower() not in train_gpt.Hyperparameters.__dataclass_fields__]
    if unknown or not name or not all(chosen.values()):
        raise train_gpt.UserError(
            f'{text!r} is no variant: write "name: KNOB=value KNOB=value", with the knobs of train_gpt.py --help'
        )
    return name, chosen


def check(variants: dict[str, dict[str, str]], arguments: argparse.Namespace) -> None:
    """Raises UserError for variants that would not be compared as they are written."""
    if len(variants) != len(arguments.variants) + 1:
        raise train_gpt.UserError('two variants have one name, or one is called "base": give each a name of its own')
    knobs = [knob for chosen in variants.values() for knob in chosen]
    twice = sorted({knob for knob in knobs if knobs.count(knob) > 1})
    if arguments.screen and (twice or not arguments.variants or arguments.also):
        several = f", not {', '.join(twice)} to several" if twice else ""
        raise train_gpt.UserError(
            "a screening switches variants on and off together: give it some, without --also, each knob "
            f"to one of them{several}"
        )


def environment(arguments: argparse.Namespace) -> dict[str, str]:
    """What all runs have in common."""
    length = {"ITERATIONS": str(arguments.steps), "MAX_WALLCLOCK_SECONDS": "0"}
    if arguments.seconds:
        length = {"ITERATIONS": "1000000", "MAX_WALLCLOCK_SECONDS": f"{arguments.seconds:g}"}
    room = {"TARGET_BYTES": str(arguments.bytes + len(train_gpt.source_code()))} if arguments.bytes else {}
    return {**BASE, **os.environ, **length, **room, "OMP_WAIT_POLICY": "PASSIVE"}


def finish(run_id: str, environ: dict[str, str]) -> runs.Run:
    """The run of that name, which is started if it is not done. Raises UserError if it fails."""
    environ = {**environ, "RUN_ID": run_id}
    if done := sweep.finished(environ, run_id):
        return done
    print(f"== {run_id}", flush=True)
    fault = sweep.execute([sys.executable, str(ROOT / "train_gpt.py")], environ, quiet=True)
    done = None if fault else sweep.finished(environ, run_id)
    if done is None:
        raise train_gpt.UserError(f"{run_id} failed: {fault or 'its log has no final score'}")
    if not environ.get("EVAL_ONLY"):
        sweep.keep_artifact(run_id)
    return done


def measure(
    variants: dict[str, dict[str, str]], arguments: argparse.Namespace
) -> dict[str, list[tuple[runs.Run, runs.Run | None]]]:
    """For each variant its runs, one a seed, each with that of its score on the other data if there are any."""
    common, found = environment(arguments), {name: [] for name in variants}
    for seed in arguments.seeds:
        for name, knobs in variants.items():
            run_id = f"{name}_seed{seed}"
            run, other = finish(run_id, {**common, **knobs, "SEED": str(seed)}), None
            if arguments.also:
                artifact = {"EVAL_ONLY": str(sweep.artifact_of(run_id)), "DATA_PATH": str(arguments.also)}
                other = finish(f"{run_id}_also", {**common, **knobs, "SEED": str(seed), **artifact})
            found[name].append((run, other))
    return found


def design(factors: int) -> list[list[bool]]:
    """Which of the factors each run has: a Plackett-Burman design (Biometrika 33, 1946) by Paley's construction.

    p + 1 runs and p columns for the first prime p = 3 mod 4 that is at least `factors`: the first columns are theirs, the
    others are spare. Any two columns have each of the four combinations equally often, so that the runs with a factor and
    those without it differ, on average, in it alone. The last run has none of them.
    """
    p = next(n for n in range(3, 1000, 4) if n >= factors and all(n % d for d in range(2, n)))
    squares = {i * i % p for i in range(p)}  # with 0
    return [[(column - run) % p in squares for column in range(p)] for run in range(p)] + [[False] * p]


def effects(plan: list[list[bool]], values: list[float]) -> list[float]:
    """Mean of the runs with each factor less that of the runs without it."""
    mean = [{on: statistics.fmean(v for has, v in zip(column, values, strict=True) if has == on) for on in (True, False)}
            for column in zip(*plan, strict=True)]  # fmt: skip
    return [sides[True] - sides[False] for sides in mean]


def standard_error(found: list[float], factors: int) -> tuple[float, str]:
    """Of one of the effects, of which all but the first `factors` are those of spare columns; and what it is taken from.

    Three spare columns or more tell it themselves: nothing is behind them but noise and what does not add up. Otherwise
    Lenth's method (Technometrics 31, 1989) takes most effects for nothing, and with less than 5 of them there is none.
    """
    spare, sizes = found[factors:], [abs(effect) for effect in found]
    if len(spare) >= 3:
        return math.sqrt(statistics.fmean(effect * effect for effect in spare)), f"{len(spare)} spare columns"
    if len(found) < 5:
        return math.nan, "too few effects"
    rough = 1.5 * statistics.median(sizes)
    return 1.5 * statistics.median([size for size in sizes if size < 2.5 * rough] or sizes), "Lenth's method"


def screen(variants: dict[str, dict[str, str]], arguments: argparse.Namespace) -> None:
    """Main effects of all variants, and what each costs, from the same runs; each seed repeats the design."""
    names, common = [name for name in variants if name != "base"], environment(arguments)
    plan, done = design(len(names)) * len(arguments.seeds), []
    for number, chosen in enumerate(plan):
        knobs = {
            knob: value
            for name, has in zip(names, chosen, strict=False)
            if has
            for knob, value in variants[name].items()
        }
        seed, place = divmod(number, len(plan) // len(arguments.seeds))
        run_id = f"screen_seed{arguments.seeds[seed]}_{place:02d}"
        done.append(finish(run_id, {**common, **knobs, "SEED": str(1000 * arguments.seeds[seed] + place)}))
    bpb, size = effects(plan, [run.score.bpb for run in done]), effects(plan, [run.model_bytes for run in done])
    cost = effects(plan, [math.log(run.step_ms) for run in done])
    (error, source), width = standard_error(bpb, len(names)), max(map(len, names))
    print(
        f"\n{done[0].score_name}, effects in bits per byte of {len(done)} runs, standard error {error:.5f} ({source}); {done[0].device}"
    )
    print(f"{'':{width}}{'effect':>12}{'t':>8}{'time_ratio':>12}{'bytes':>12}")
    for name, effect, ratio, nbytes in sorted(zip(names, bpb, cost, size, strict=False), key=lambda line: line[1]):
        print(f"{name:{width}}{effect:>+12.5f}{effect / error:>8.2f}{math.exp(ratio):>12.3f}{nbytes:>+12,.0f}")
    report = {"effects": dict(zip(names, bpb, strict=False)), "standard_error": None if math.isnan(error) else error}
    print(json.dumps({**report, "scores": [run.score.bpb for run in done]}))


def row(name: str, mine: list[runs.Run], base: list[runs.Run]) -> dict:
    """One variant's line."""
    bpb, of_base = ([run.score.bpb for run in group] for group in (mine, base))
    tests = {"p": compare.welch(of_base, bpb), "p_paired": compare.paired(of_base, bpb)}
    return {
        "variant": name, "mean": statistics.fmean(bpb), "std": runs.mean_std(bpb)[1], "n": len(bpb),
        "difference": statistics.fmean(bpb) - statistics.fmean(of_base), **{key: test and test.p for key, test in tests.items()},
        "steps": statistics.fmean(run.steps or 0 for run in mine), "bytes": max(run.model_bytes or 0 for run in mine),
        "time_ratio": statistics.median(a.step_ms / b.step_ms for a, b in zip(mine, base, strict=True)) if mine[0].step_ms else None,
    }  # fmt: skip


def table(rows: list[dict]) -> str:
    """The lines, aligned."""
    columns = (("mean", 9, ".5f"), ("std", 9, ".5f"), ("difference", 12, "+.5f"), ("p", 9, ".4f"), ("p_paired", 10, ".4f"),
               ("steps", 8, ".0f"), ("time_ratio", 12, ".3f"), ("bytes", 12, ",.0f"))  # fmt: skip
    width = max(len(line["variant"]) for line in rows)
    lines = [" " * width + "".join(f"{name:>{size}}" for name, size, _ in columns)]
    for line in rows:
        cells = ("-" if line[name] is None else format(line[name], form) for name, _, form in columns)
        lines.append(
            f"{line['variant']:{width}}"
            + "".join(f"{cell:>{size}}" for cell, (_, size, _) in zip(cells, columns, strict=True))
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", help='"name: KNOB=value ..."')
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, default=0, help="of each run")
    length.add_argument("--seconds", type=float, default=0.0, help="of training of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--bytes", type=int, default=0, help="of the artifact; 0: as they come")
    parser.add_argument(
        "--also", type=Path, help="another DATA_PATH of the same tokenizer, on which the artifacts are scored, too"
    )
    parser.add_argument(
        "--screen", action="store_true", help="all variants in one experiment, each on in half of its runs"
    )
    parser.add_argument("--folder", type=Path, default=Path("ablations"))
    arguments = parser.parse_args()
    try:
        variants = {"base": {}} | dict(variant(text) for text in arguments.variants)
        check(variants, arguments)
        for name in ("DATA_PATH", "TOKENIZER_PATH"):  # runs start in another folder
            if name in os.environ:
                os.environ[name] = str(Path(os.environ[name]).resolve())
        arguments.also = arguments.also and arguments.also.resolve()
        arguments.folder.mkdir(parents=True, exist_ok=True)
        os.chdir(arguments.folder)
        if arguments.screen:
            screen(variants, arguments)
            return
        found = measure(variants, arguments)
    except train_gpt.UserError as error:
        sys.exit(f"error: {error}")
    report = {}
    for title, which in (("", 0), *([(f"on {arguments.also.name}", 1)] if arguments.also else [])):
        columns = {name: [pair[which] for pair in pairs] for name, pairs in found.items()}
        report[title or "score"] = [row(name, mine, columns["base"]) for name, mine in columns.items()]
        print(f"\n{title or found['base'][0][0].score_name}, bits per byte; {found['base'][0][0].device}")
        print(table(report[title or "score"]))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
