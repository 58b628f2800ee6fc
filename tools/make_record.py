#!/usr/bin/env python3
"""Make a submission folder from the logs of its seeds.

    python tools/make_record.py --track 10min_16mb --name "Sparse gates" --author "Ada Example" --github-id ada \\
        "logs/run_seed*.txt"

writes records/track_<track>/<date>_<slug>/ with README.md, submission.json, train_gpt.py (the
script that ran), train_seed<N>.log and requirements.txt (the versions that ran). Every figure comes
from the logs. README.md and submission.json mark what you have to write yourself with "to fill".
Then check the folder with tools/check_record.py.

The logs begin with the source of the script. If a packed script ran (tools/pack_code.py), the
folder gets it as train_gpt.py, packed again from the source in the logs, and that source as
train_gpt.readable.py.
"""

import argparse
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import program
import pack_code
import train_gpt
from lib import runs
from lib.runs import Run, UserError, mean_std

CAP = train_gpt.SUBMISSION_CAP
TRACKS = ("10min_16mb", "non_record_16mb")
SECONDS = 600.0  # the challenge's limit for training, and for evaluation
READABLE = "train_gpt.readable.py"


def source_of(members: list[Run]) -> bytes:
    """The readable script with which all these logs begin. Raises UserError if a log does not begin
    with it."""
    for run in members:
        if run.source is None:
            raise UserError(
                f"{run.path} does not begin with the script that ran: "
                "give the logs/<RUN_ID>.txt that train_gpt.py wrote, not its console output"
            )
    return members[0].source


def code_of(members: list[Run]) -> bytes:
    """The script file that ran: the source in the logs, readable or packed.

    Raises UserError if neither has the size in the logs.
    """
    source = source_of(members)
    sizes = {run.code_bytes for run in members}
    if len(sizes) > 1 or None in sizes:
        raise UserError(
            f"the logs have code sizes {sorted(map(str, sizes))}: all seeds must run the same script file"
        )
    if len(source) in sizes:
        return source
    code = pack_code.pack(source)
    if len(code) in sizes:
        return code
    raise UserError(
        f"{members[0].path} counts {sizes.pop()} bytes of code, but the script in it has {len(source)}: "
        "the log was altered, or the script was not packed with tools/pack_code.py"
    )


def total_bytes(run: Run, code_bytes: int) -> int:
    """Bytes of artifact and code."""
    if run.model_bytes is None:
        raise UserError(
            f"{run.path} does not contain the size of its artifact: the run did not finish"
        )
    return run.model_bytes + code_bytes


def on_8xh100(members: list[Run]) -> bool:
    """Whether all logs show the challenge's machine."""
    return all(run.ranks == 8 and "H100" in (run.device or "") for run in members)


def hardware(members: list[Run]) -> str:
    """A description of the machines."""
    found = set()
    for run in members:
        one_cpu = "CPU" in (run.device or "") and run.ranks == 1
        found.add(run.device if one_cpu else f"{run.ranks} x {run.device}")
    return " and ".join(sorted(found))


def seed_result(run: Run, code_bytes: int) -> dict:
    """The results of one seed, under the names that merged submissions use."""
    found = {
        "val_loss": run.score.loss,
        "val_bpb": run.score.bpb,
        "artifact_bytes": total_bytes(run, code_bytes),
        "bytes_model": run.model_bytes,
        "steps": run.steps,
        "step_avg_ms": run.step_ms and round(run.step_ms, 2),
        "train_time_s": run.train_seconds and round(run.train_seconds, 3),
        "eval_time_s": run.score.seconds and round(run.score.seconds, 1),
        "pre_quant_val_bpb": run.before_export and run.before_export.bpb,
        "roundtrip_val_bpb": run.after_export and run.after_export.bpb,
    }
    return {key: value for key, value in found.items() if value is not None}


# What today's repository asks about; train_gpt.py has none of it: vectors that are fitted to single
# samples (SLOT), training on validation text before the export, and caches of n-grams.
ABSENT = ("no_slot", "no_pre_quant_ttt", "no_ngram_cache")
ATTRIBUTION = "descends from #399 by abaybektursun"


def summary(members: list[Run], code_bytes: int) -> dict:
    """The part of submission.json that follows from the logs. `val_loss` is in nats per token,
    `val_bpb` in bits per byte; both are means over seeds."""
    loss, loss_std = mean_std([run.score.loss for run in members])
    bpb, bpb_std = mean_std([run.score.bpb for run in members])
    totals = [total_bytes(run, code_bytes) for run in members]
    compliance = {
        "train_under_600s": max(run.train_seconds or 0.0 for run in members) <= SECONDS,
        "artifact_under_16mb": max(totals) <= CAP,
        "eval_under_600s": max(run.score.seconds or 0.0 for run in members) <= SECONDS,
        "three_seeds": len(members) >= 3,
        "hardware_8xh100": on_8xh100(members),
    }
    compliance |= dict.fromkeys(ABSENT, True)
    if "ttt" in members[0].score_name:
        compliance["score_first_ttt"] = True
    found = {"val_loss": round(loss, 8), "val_bpb": round(bpb, 8)}
    if bpb_std is not None:
        found |= {"val_loss_std": round(loss_std, 8), "val_bpb_std": round(bpb_std, 8)}
    return found | {
        "seeds": [run.seed for run in members],
        "seed_results": {str(run.seed): seed_result(run, code_bytes) for run in members},
        "bytes_total": max(totals),
        "bytes_code": code_bytes,
        "hardware": hardware(members),
        "pytorch_version": members[0].versions.get("torch", "not stated"),
        "eval_method": members[0].score_name,
        "compliance": compliance,
    }


def launch(run: Run) -> str:
    """The command line that repeats the run."""
    switches = {"True": "1", "False": "0"}
    # Validations and lines of the log take time of the run
    shown = runs.CONFIGURATION | {"VAL_LOSS_EVERY", "TRAIN_LOG_EVERY"}
    changed = {name: run.settings[name] for name in run.changed if name in shown}
    # A CPU's threads decide rounding
    if threads := re.search(r", (\d+) threads", run.device or ""):
        changed["OMP_NUM_THREADS"] = threads[1]
    words = [f"{name}={shlex.quote(switches.get(value, value))}" for name, value in changed.items()]
    many = f"torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node={run.ranks}"
    start = "python" if run.ranks == 1 else many
    lines = [""]
    for word in [*words, "SEED=$SEED", f"{start} train_gpt.py"]:
        if lines[-1] and len(lines[-1]) + len(word) > 100:
            lines.append("")
        lines[-1] += word + " "
    return " \\\n".join(line.rstrip() for line in lines)


RESULT_COLUMNS = {
    "val_bpb": ".5f",
    "val_loss": ".5f",
    "pre_quant_val_bpb": ".5f",
    "roundtrip_val_bpb": ".5f",
    "steps": ".0f",
    "step_avg_ms": ".2f",
    "train_time_s": ".1f",
    "eval_time_s": ".1f",
    "artifact_bytes": ",.0f",
}


def results_table(facts: dict) -> str:
    """The results in Markdown, one line per seed, then mean and standard deviation."""

    def line(title: str, row: dict[str, float | None]) -> str:
        cells = (
            "" if row.get(name) is None else format(row[name], form)
            for name, form in RESULT_COLUMNS.items()
        )
        return f"| {title} | " + " | ".join(cells) + " |"

    rows = facts["seed_results"]
    lines = ["| seed | " + " | ".join(f"`{name}`" for name in RESULT_COLUMNS) + " |"]
    lines.append("|" + "---|" * (len(RESULT_COLUMNS) + 1))
    lines += [line(seed, row) for seed, row in rows.items()]
    if len(rows) > 1:
        known = [name for name in RESULT_COLUMNS if all(name in row for row in rows.values())]
        stats = {name: mean_std([row[name] for row in rows.values()]) for name in known}
        lines.append(line("**mean**", {name: mean for name, (mean, _) in stats.items()}))
        lines.append(line("**std**", {name: std for name, (_, std) in stats.items()}))
    return "\n".join(lines)


def readme(given: dict, members: list[Run], facts: dict, packed: bool) -> str:
    """README.md: the figures from the logs, and three sections for the author to write."""
    first = members[0]
    n = len(members)
    spread = f", standard deviation {facts['val_bpb_std']:.5f}" if n > 1 else ""
    seeds = "1 seed" if n == 1 else f"{n} seeds"
    data = [
        f"`{name}={first.settings.get(name, 'not stated')}`"
        for name in ("DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE")
    ]
    scored = "not stated"
    if first.score.tokens and first.score.nbytes:
        scored = f"{first.score.tokens:,} targets of {first.score.nbytes:,} bytes"
    parts = [
        f"# {given['name']}",
        f"**val_bpb {facts['val_bpb']:.5f}** (mean of {seeds}{spread}; `{facts['eval_method']}`), "
        f"{facts['bytes_total']:,} of {CAP:,} bytes, on {facts['hardware']}.",
    ]
    if not facts["compliance"]["hardware_8xh100"]:
        parts.append(
            f"This is not a record: it ran on {facts['hardware']}, and the challenge asks for 8 x H100. "
            "Times and scores are those of this machine."
        )
    parts += ["## Results", results_table(facts)]
    versions = [f"- {name} {version}" for name, version in first.versions.items()]
    script = f"packed; `{READABLE}` is its readable source" if packed else "byte for byte"
    parts += [
        "## Environment",
        "\n".join([*versions, f"- {facts['hardware']}"]),
        "## Command",
        f"For each seed of {' '.join(map(str, facts['seeds']))}:\n\n```\n{launch(first)}\n```",
        "## Data",
        f"{', '.join(data)}. Scored: {scored}.",
        "## Fixes",
        '(to fill: bugs fixed, or "none")',
        "## Simplifications",
        '(to fill: what was removed, or "none")',
        "## Additions",
        '(to fill: what is new and its gain, or "none")',
        "## Files",
        f"`train_gpt.py` is the script that ran, {script}. `train_seed<N>.log` are the complete logs, "
        "`submission.json` their figures, `requirements.txt` the packages that ran.",
    ]
    return "\n\n".join(parts) + "\n"


def requirements(run: Run) -> str:
    """The packages that ran, pinned to the versions in the log."""
    # A local build tag such as +cpu or +cu130 names a package index, not a version.
    versions = {name: version.split("+")[0] for name, version in run.versions.items()}
    return "".join(
        f"{name}=={version}\n"
        for name, version in versions.items()
        if name not in ("python", "cuda")
    )


def about(given: dict, track: str, date: str, run: Run) -> dict:
    """The part of submission.json that the logs do not contain."""
    elsewhere = {"SEED", "RUN_ID", "DATA_PATH", "TOKENIZER_PATH"}
    changed = " ".join(
        f"{name}={run.settings[name]}" for name in run.changed if name not in elsewhere
    )
    found = {key: given[key] for key in ("author", "github_id", "name")}
    found |= {"date": date, "track": track, "attribution": ATTRIBUTION}
    return found | {"technique_summary": f"train_gpt.py with {changed or 'its defaults'}"}


def make(members: list[Run], given: dict, track: str) -> Path:
    """Write the folder and return its path. Raises UserError if it exists or the logs do not belong
    together."""
    if difference := runs.differences(members):
        raise UserError(
            f"the logs mix configurations: {difference}; a record has one configuration"
        )
    seeds = [run.seed for run in members]
    if None in seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"the logs have seeds {seeds}: each log needs its own seed")
    for run in members:
        run.score  # noqa: B018  raises if the run did not finish
    members = sorted(members, key=lambda run: run.seed)
    source = source_of(members)
    date = members[0].started[:10]
    slug = re.sub("[^A-Za-z0-9.]+", "_", given["name"]).strip("_")
    folder = ROOT / "records" / f"track_{track}" / f"{date}_{slug}"
    if folder.exists():
        raise UserError(f"{folder} exists already, and records never change: give another --name")
    code = code_of(members)
    facts = summary(members, len(code))
    submission = about(given, track, date, members[0]) | facts
    files = {
        "train_gpt.py": code,
        "submission.json": (json.dumps(submission, indent=2, ensure_ascii=False) + "\n").encode(),
        "README.md": readme(given, members, facts, code != source).encode(),
        "requirements.txt": requirements(members[0]).encode(),
    }
    if code != source:
        files[READABLE] = source
    files |= {f"train_seed{run.seed}.log": run.path.read_bytes() for run in members}
    write_folder(folder, files)
    return folder


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Write a new folder with these files, completely or not at all. Raises UserError."""
    partial = folder.with_name(folder.name + ".partial")
    with train_gpt.writing(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, content in files.items():
            with train_gpt.replacing(partial / name) as new:  # syncs it
                new.write_bytes(content)
        partial.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "logs", nargs="+", help="text logs, one per seed; folders of logs and patterns"
    )
    parser.add_argument(
        "--track", required=True, type=lambda name: name.removeprefix("track_"), choices=TRACKS
    )
    parser.add_argument("--name", type=program.utf8, required=True, help="title of the submission")
    parser.add_argument("--author", type=program.utf8, required=True)
    parser.add_argument("--github-id", type=program.utf8, default="(to fill: your GitHub ID)")
    arguments = parser.parse_args()
    members = [runs.read_run(path) for text in arguments.logs for path in runs.find_logs(text)]
    folder = make(members, vars(arguments), arguments.track)
    if warning := runs.uneven_steps(members):
        print(warning, file=sys.stderr)
    tool = ROOT / "tools" / "check_record.py"
    tool = tool.relative_to(ROOT) if Path.cwd() == ROOT else tool
    check = shlex.join(["python", str(tool), str(folder)])
    print(f"made: {folder}\nnow write what it marks with 'to fill', then run: {check}")


if __name__ == "__main__":
    program.run_program(main)
