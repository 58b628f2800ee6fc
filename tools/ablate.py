#!/usr/bin/env python3
"""Compare variants with a base: several seeds, equal steps or equal wall clock, equal artifact bytes.

    export DATA_PATH=... TOKENIZER_PATH=...
    python tools/ablate.py --steps 400 --bytes 2000000 "xsa: XSA_LAST_N=6" "gain: QK_GAIN_INIT=4"
    python tools/ablate.py --seconds 120 --seeds 1 2 3 --also OTHER_DATA_PATH "xsa: XSA_LAST_N=6"
    python tools/ablate.py --screen --steps 200 --seeds 1 "xsa: XSA_LAST_N=6" "gain: QK_GAIN_INIT=4" "wd: MUON_WD=0.09"

A variant is a name and the knobs in which it differs from the base: the small model below, changed by the environment.
`--bytes` sets the artifact size of all runs (TARGET_BYTES widens the quantisation steps until the artifact fits; a
variant that is smaller anyway stays so, and the table shows it). The variants take turns within a seed, so a slowdown
of the machine affects all of them. Logs go to --folder; a run that has finished there is not repeated.

With `--screen` the variants are factors of one experiment. Each is switched on in half of the runs, in combinations
from which every main effect can be estimated, so k variants need k + 1 runs or a few more. Screening finds what
deserves a comparison of its own; it does not show interactions.

A comparison prints for each variant the mean, standard deviation, difference to the base in bits per byte, p that it is
better at all (Welch's test and paired by seed, one-sided), ratio of step times, and bytes. A screening prints each
effect, the effect in standard errors, the ratio of step times, and bytes. The last line is JSON.
"""

import argparse
import json
import math
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import compare
import runs
import sweep
from train_gpt import Hyperparameters, UserError

# 4.1 million parameters; a step took 0.67 s on 2 cores.
# fmt: off
BASE = {
    "NUM_LAYERS": "6", "MODEL_DIM": "256", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "TRAIN_SEQ_LEN": "512",
    "EVAL_SEQ_LEN": "512", "TRAIN_BATCH_TOKENS": "8192", "BIGRAM_VOCAB_SIZE": "2048", "XSA_LAST_N": "4",
    "EMA_DECAY": "0.97", "LATE_QAT": "0", "MUON_MOMENTUM": "0.95", "MUON_MOMENTUM_WARMUP_START": "0.85",
    "MUON_MOMENTUM_WARMUP_STEPS": "50", "WARMDOWN_FRAC": "0.4", "WARMUP_STEPS": "2", "VAL_LOSS_EVERY": "0",
    "EVAL_STRIDE": "512",
}
# fmt: on
Variants = dict[str, dict[str, str]]  # the knobs of each variant by its name


def variant(text: str) -> tuple[str, dict[str, str]]:
    """(name, knobs) of "name: KNOB=value KNOB=value". Raises UserError for an unknown knob."""
    name, _, knobs = text.partition(":")
    chosen = dict(pair.partition("=")[::2] for pair in knobs.split())
    unknown = [knob for knob in chosen if knob.lower() not in Hyperparameters.__dataclass_fields__]
    if unknown or not name or not all(chosen.values()):
        raise UserError(
            f'{text!r} is not a variant: write "name: KNOB=value KNOB=value" with knobs of train_gpt.py --help'
        )
    return name, chosen


def check(variants: Variants, arguments: argparse.Namespace) -> None:
    """Raises UserError for variants that cannot be compared as written."""
    if len(variants) != len(arguments.variants) + 1:
        raise UserError('two variants have one name, or one is called "base": give each its own name')
    if not arguments.screen:
        return
    if not arguments.variants or arguments.also:
        raise UserError("--screen needs variants and does not work with --also")
    knobs = [knob for chosen in variants.values() for knob in chosen]
    twice = sorted({knob for knob in knobs if knobs.count(knob) > 1})
    if twice:
        raise UserError(f"--screen combines the variants: set {', '.join(twice)} in one of them only")


def environment(arguments: argparse.Namespace) -> dict[str, str]:
    """The variables that all runs share."""
    if arguments.seconds:
        length = {"ITERATIONS": "1000000", "MAX_WALLCLOCK_SECONDS": f"{arguments.seconds:g}"}
    else:
        length = {"ITERATIONS": str(arguments.steps), "MAX_WALLCLOCK_SECONDS": "0"}
    size = {}
    if arguments.bytes:
        size = {"TARGET_BYTES": str(arguments.bytes + (ROOT / "train_gpt.py").stat().st_size)}
    return {**BASE, **os.environ, **length, **size, "OMP_WAIT_POLICY": "PASSIVE"}


def finish(run_id: str, environ: dict[str, str]) -> runs.Run:
    """The finished run of this name; it is started if necessary. Raises UserError if it fails."""
    environ = {**environ, "RUN_ID": run_id}
    if done := sweep.finished(environ, run_id):
        return done
    print(f"== {run_id}", flush=True)
    fault = sweep.execute([sys.executable, str(ROOT / "train_gpt.py")], environ, quiet=True)
    done = None if fault else sweep.finished(environ, run_id)
    if done is None:
        raise UserError(f"{run_id} failed: {fault or 'its log has no final score'}")
    if not environ.get("EVAL_ONLY"):
        sweep.keep_artifact(run_id)
    return done


def measure(variants: Variants, arguments: argparse.Namespace) -> dict[str, list[tuple[runs.Run, runs.Run | None]]]:
    """For each variant one pair per seed: the run, and its evaluation on the other data (None without --also)."""
    common = environment(arguments)
    found = {name: [] for name in variants}
    for seed in arguments.seeds:
        for name, knobs in variants.items():
            run_id = f"{name}_seed{seed}"
            environ = {**common, **knobs, "SEED": str(seed)}
            run = finish(run_id, environ)
            other = None
            if arguments.also:
                artifact = {"EVAL_ONLY": str(sweep.artifact_of(run_id)), "DATA_PATH": str(arguments.also)}
                other = finish(f"{run_id}_also", environ | artifact)
            found[name].append((run, other))
    return found


def design(factors: int) -> list[list[bool]]:
    """Which columns each run switches on: a Plackett-Burman design (Biometrika 33, 1946) by Paley's construction.

    It has p + 1 runs and p columns for the first prime p = 3 mod 4 that is at least `factors`. The first columns are
    the factors, the others are spare. Any two columns have each of their four combinations equally often, so the runs
    with a factor and those without it differ, on average, in that factor alone. The last run has no factor.
    """
    p = next(n for n in range(3, 1000, 4) if n >= factors and all(n % d for d in range(2, n)))
    squares = {i * i % p for i in range(p)}  # with 0
    return [[(column - run) % p in squares for column in range(p)] for run in range(p)] + [[False] * p]


def effects(plan: list[list[bool]], values: list[float]) -> list[float]:
    """For each column the mean of the runs with it minus the mean of the runs without it."""
    found = []
    for column in zip(*plan, strict=True):
        on = [value for has, value in zip(column, values, strict=True) if has]
        off = [value for has, value in zip(column, values, strict=True) if not has]
        found.append(statistics.fmean(on) - statistics.fmean(off))
    return found


def standard_error(found: list[float], factors: int) -> tuple[float, str]:
    """(standard error of an effect, its source). `found` holds the effects of the factors, then of the spare columns.

    Three or more spare columns give it directly, as they contain only noise and interactions. Otherwise Lenth's method
    (Technometrics 31, 1989) assumes that most factors have no effect; it needs at least 5 effects (else NaN).
    """
    spare = found[factors:]
    if len(spare) >= 3:
        return math.sqrt(statistics.fmean(effect * effect for effect in spare)), f"{len(spare)} spare columns"
    if len(found) < 5:
        return math.nan, "too few effects"
    sizes = [abs(effect) for effect in found]
    rough = 1.5 * statistics.median(sizes)
    return 1.5 * statistics.median([size for size in sizes if size < 2.5 * rough] or sizes), "Lenth's method"


def screen(variants: Variants, arguments: argparse.Namespace) -> None:
    """Run the design once per seed and print the main effects of all variants."""
    names = [name for name in variants if name != "base"]
    common = environment(arguments)
    plan = []
    done = []
    for seed in arguments.seeds:
        for place, chosen in enumerate(design(len(names))):
            environ = {**common, "SEED": str(1000 * seed + place)}
            for name, has in zip(names, chosen, strict=False):
                if has:
                    environ |= variants[name]
            plan.append(chosen)
            done.append(finish(f"screen_seed{seed}_{place:02d}", environ))
    scores = [run.score.bpb for run in done]
    bpb = effects(plan, scores)
    size = effects(plan, [run.model_bytes for run in done])
    log_time = effects(plan, [math.log(run.step_ms) for run in done])
    error, source = standard_error(bpb, len(names))
    print(
        f"\n{done[0].score_name}, effects in bits per byte from {len(done)} runs, "
        f"standard error {error:.5f} ({source}); {done[0].device}"
    )
    width = max(map(len, names))
    print(f"{'':{width}}{'effect':>12}{'t':>8}{'time_ratio':>12}{'bytes':>12}")
    for name, effect, ratio, nbytes in sorted(zip(names, bpb, log_time, size, strict=False), key=lambda row: row[1]):
        print(f"{name:{width}}{effect:>+12.5f}{effect / error:>8.2f}{math.exp(ratio):>12.3f}{nbytes:>+12,.0f}")
    report = {
        "effects": dict(zip(names, bpb, strict=False)),
        "standard_error": None if math.isnan(error) else error,
        "scores": scores,
    }
    print(json.dumps(report))


def row(name: str, members: list[runs.Run], base: list[runs.Run]) -> dict:
    """One variant's row of the table."""
    bpb = [run.score.bpb for run in members]
    base_bpb = [run.score.bpb for run in base]
    mean, std = runs.mean_std(bpb)
    welch = compare.welch(base_bpb, bpb)
    paired = compare.paired(base_bpb, bpb)
    time_ratio = None
    if members[0].step_ms:
        time_ratio = statistics.median(a.step_ms / b.step_ms for a, b in zip(members, base, strict=True))
    return {
        "variant": name,
        "mean": mean,
        "std": std,
        "n": len(bpb),
        "difference": mean - statistics.fmean(base_bpb),
        "p": welch and welch.p,
        "p_paired": paired and paired.p,
        "steps": statistics.fmean(run.steps or 0 for run in members),
        "bytes": max(run.model_bytes or 0 for run in members),
        "time_ratio": time_ratio,
    }


COLUMNS = {
    "mean": (9, ".5f"),
    "std": (9, ".5f"),
    "difference": (12, "+.5f"),
    "p": (9, ".4f"),
    "p_paired": (10, ".4f"),
    "steps": (8, ".0f"),
    "time_ratio": (12, ".3f"),
    "bytes": (12, ",.0f"),
}


def table(rows: list[dict]) -> str:
    """The rows as aligned text."""
    width = max(len(line["variant"]) for line in rows)
    lines = [" " * width + "".join(f"{name:>{size}}" for name, (size, _) in COLUMNS.items())]
    for line in rows:
        text = f"{line['variant']:{width}}"
        for name, (size, form) in COLUMNS.items():
            cell = "-" if line[name] is None else format(line[name], form)
            text += f"{cell:>{size}}"
        lines.append(text)
    return "\n".join(lines)


def comparison(variants: Variants, arguments: argparse.Namespace) -> None:
    """Run all variants and print a table for each data set."""
    found = measure(variants, arguments)
    first = found["base"][0][0]
    titles = {"score": first.score_name}
    if arguments.also:
        titles[f"on {arguments.also.name}"] = f"on {arguments.also.name}"
    report = {}
    for which, (key, title) in enumerate(titles.items()):
        columns = {name: [pair[which] for pair in pairs] for name, pairs in found.items()}
        report[key] = [row(name, members, columns["base"]) for name, members in columns.items()]
        print(f"\n{title}, bits per byte; {first.device}")
        print(table(report[key]))
    print(json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", help='"name: KNOB=value ..."')
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, default=0, help="steps per run")
    length.add_argument("--seconds", type=float, default=0.0, help="training seconds per run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--bytes", type=int, default=0, help="size of the artifact; 0: no target")
    parser.add_argument("--also", type=Path, help="another DATA_PATH of the same tokenizer to score the artifacts on")
    parser.add_argument("--screen", action="store_true", help="all variants in one experiment")
    parser.add_argument("--folder", type=Path, default=Path("ablations"), help="default: ablations")
    arguments = parser.parse_args()
    try:
        variants = {"base": {}} | dict(variant(text) for text in arguments.variants)
        check(variants, arguments)
        for name in ("DATA_PATH", "TOKENIZER_PATH"):  # the runs start in another folder
            if name in os.environ:
                os.environ[name] = str(Path(os.environ[name]).resolve())
        arguments.also = arguments.also and arguments.also.resolve()
        arguments.folder.mkdir(parents=True, exist_ok=True)
        os.chdir(arguments.folder)
        run = screen if arguments.screen else comparison
        run(variants, arguments)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
