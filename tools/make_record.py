#!/usr/bin/env python3
"""Make a submission folder from the logs of its seeds.

    python tools/make_record.py --track 10min_16mb --name "Sparse gates" --author "Ada Example" --github-id ada logs/run_seed*.txt

writes records/<track>/<date>_<slug>/ with README.md, submission.json, train_gpt.py (the very script that ran, from the
head of the logs), train_seed<N>.log and requirements.txt (the versions that ran). Every figure comes from the logs. What
only you know, README.md asks for: look for "to fill". Then tools/check_record.py says what a reviewer would.
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import compare
import runs
import train_gpt
from runs import Run, UserError, mean_std

CAP, SECONDS = train_gpt.SUBMISSION_CAP, 600.0
READABLE = "train_gpt.readable.py"


def script_of(members: list[Run]) -> bytes:
    """The one script that all these logs begin with. Raises UserError if there is none, or if it was not what was counted."""
    for run in members:
        if run.source is None:
            raise UserError(
                f"{run.path} does not begin with the script that ran: give logs/<RUN_ID>.txt of train_gpt.py, not what the console said"
            )
    source = members[0].source
    if members[0].code_bytes not in (len(source), len(train_gpt.pack_code(source))):
        raise UserError(
            f"{members[0].path} counts {members[0].code_bytes} bytes of code, but the script in it has {len(source)}: the log was altered"
        )
    return source


def is_packed(members: list[Run]) -> bool:
    """Whether the runs counted the packed script."""
    return members[0].settings.get("PACK_CODE") == "True"


def total_bytes(run: Run, code_bytes: int) -> int:
    """Artifact and code, with code of that size."""
    if run.model_bytes is None:
        raise UserError(f"{run.path} does not tell the size of its artifact: the run did not come to its end")
    return run.model_bytes + code_bytes


def on_8xh100(members: list[Run]) -> bool:
    """Whether all ran on the challenge's machine, as far as their logs tell."""
    return all(run.ranks == 8 and "H100" in (run.device or "") for run in members)


def hardware(members: list[Run]) -> str:
    """In words."""
    return " and ".join(
        sorted(
            {
                f"{run.ranks} x {run.device}" if "CPU" not in (run.device or "") or run.ranks != 1 else run.device
                for run in members
            }
        )
    )


def seed_result(run: Run, code_bytes: int) -> dict:
    """One seed's figures, under the names that merged submissions use."""
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


def summary(members: list[Run], code_bytes: int) -> dict:
    """What submission.json says that logs can tell. `val_loss` is nats a token, `val_bpb` bits a byte, both means over seeds."""
    (loss, loss_std), (bpb, bpb_std) = (
        mean_std([getattr(run.score, kind) for run in members]) for kind in ("loss", "bpb")
    )
    totals, seconds = [total_bytes(run, code_bytes) for run in members], [run.train_seconds or 0.0 for run in members]
    return {
        "val_loss": round(loss, 8),
        "val_bpb": round(bpb, 8),
        **({"val_loss_std": round(loss_std, 8), "val_bpb_std": round(bpb_std, 8)} if bpb_std is not None else {}),
        "seeds": [run.seed for run in members],
        "seed_results": {str(run.seed): seed_result(run, code_bytes) for run in members},
        "bytes_total": max(totals),
        "bytes_code": code_bytes,
        "hardware": hardware(members),
        "pytorch_version": members[0].versions.get("torch", "not stated"),
        "eval_method": members[0].score_name,
        "compliance": {
            "train_under_600s": max(seconds) <= SECONDS,
            "artifact_under_16mb": max(totals) <= CAP,
            "eval_under_600s": max(run.score.seconds or 0.0 for run in members) <= SECONDS,
            "three_seeds": len(members) >= 3,
            "hardware_8xh100": on_8xh100(members),
            **({"score_first_ttt": True} if "ttt" in members[0].score_name else {}),
        },
    }


def launch(run: Run) -> str:
    """The command line that the log stands for."""
    knobs = [f"{name}={run.settings[name]}" for name in run.changed if name not in ("SEED", "RUN_ID")]
    knobs = [re.sub("=(True|False)$", lambda match: f"={int(match[1] == 'True')}", knob) for knob in knobs]
    start = (
        "python train_gpt.py" if run.ranks == 1 else f"torchrun --standalone --nproc_per_node={run.ranks} train_gpt.py"
    )
    lines, line = [], ""
    for word in [*knobs, "SEED=$SEED", start]:
        if line and len(line) + len(word) > 100:
            lines.append(line)
            line = ""
        line += word + " "
    return " \\\n".join(text.rstrip() for text in [*lines, line])


def results_table(members: list[Run], facts: dict) -> str:
    """The results, one line a seed, in Markdown."""
    columns = (
        ("val_bpb", ".5f"),
        ("val_loss", ".5f"),
        ("pre_quant_val_bpb", ".5f"),
        ("roundtrip_val_bpb", ".5f"),
        ("steps", ".0f"),
        ("step_avg_ms", ".2f"),
        ("train_time_s", ".1f"),
        ("eval_time_s", ".1f"),
        ("artifact_bytes", ",.0f"),
    )
    lines = ["| seed | " + " | ".join(f"`{name}`" for name, _ in columns) + " |", "|" + "---|" * (len(columns) + 1)]
    rows = {str(run.seed): facts["seed_results"][str(run.seed)] for run in members}
    for seed, row in rows.items():
        lines.append(
            f"| {seed} | " + " | ".join(format(row[name], form) if name in row else "" for name, form in columns) + " |"
        )
    if len(rows) > 1:
        for title, which in (("**mean**", 0), ("**std**", 1)):
            stats = [
                mean_std([row[name] for row in rows.values()])[which]
                if all(name in row for row in rows.values())
                else None
                for name, _ in columns
            ]
            lines.append(
                f"| {title} | "
                + " | ".join("" if v is None else format(v, f) for v, (_, f) in zip(stats, columns, strict=True))
                + " |"
            )
    return "\n".join(lines)


def readme(given: dict, members: list[Run], facts: dict, packed: bool, against: str) -> str:
    """README.md: everything from the logs; three sections for the author."""
    first, n = members[0], len(members)
    spread = f", standard deviation {facts['val_bpb_std']:.5f}" if n > 1 else ""
    data = {name: first.settings.get(name, "not stated") for name in ("DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE")}
    scored = (
        f"{first.score.tokens:,} targets of {first.score.nbytes:,} bytes"
        if first.score.tokens and first.score.nbytes
        else "not stated"
    )
    parts = [
        f"# {given['name']}",
        f"**val_bpb {facts['val_bpb']:.5f}** (mean of {n} seed{'s' if n > 1 else ''}{spread}; `{facts['eval_method']}`), "
        f"{facts['bytes_total']:,} of {CAP:,} bytes at most, on {facts['hardware']}.",
        given["blurb"],
    ]
    if not facts["compliance"]["hardware_8xh100"]:
        parts.append(
            f"This is not a record: it ran on {facts['hardware']}, and the challenge asks for 8 x H100. Its wall clock and its score "
            "are this machine's."
        )
    parts += ["## Results", results_table(members, facts)]
    if against:
        parts += ["## Significance", f"```\n{against}\n```"]
    parts += [
        "## Environment",
        "\n".join(f"- {name} {version}" for name, version in first.versions.items()) + f"\n- {facts['hardware']}",
        "## Command",
        f"For each seed of {' '.join(map(str, facts['seeds']))}:\n\n```\n{launch(first)}\n```",
        "## Data",
        f"`DATA_PATH={data['DATA_PATH']}`, `TOKENIZER_PATH={data['TOKENIZER_PATH']}`, `VOCAB_SIZE={data['VOCAB_SIZE']}`. Scored: {scored}.",
        "## Fixes",
        '(to fill: what was wrong before, or "none")',
        "## Simplifications",
        '(to fill: what was taken away, or "none")',
        "## Additions",
        '(to fill: what is new, with its gain, or "none")',
        "## Files",
        f"`train_gpt.py` is the script that ran, {'packed; `' + READABLE + '` is the same, readable' if packed else 'byte for byte'}. "
        "`train_seed<N>.log` are the whole logs, `submission.json` their figures, `requirements.txt` the packages that ran.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def requirements(run: Run) -> str:
    """The packages that ran, pinned to the versions in the log."""
    skipped = {"python", "cuda"}
    # A local build tag such as +cpu or +cu130 names an index of packages rather than a version of the package.
    return "".join(
        f"{name}=={version.split('+')[0]}\n" for name, version in run.versions.items() if name not in skipped
    )


def make(members: list[Run], given: dict, track: str, root: Path, pack: bool, against: list[Run] | None) -> Path:
    """Write the folder and return it. Raises UserError if it is there already, or the logs do not belong together."""
    if difference := runs.differences(members):
        raise UserError(f"the logs are not of one configuration: {difference}; a record has one")
    seeds = [run.seed for run in members]
    if None in seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"the logs have seeds {seeds}: each must tell a seed of its own")
    members = sorted(members, key=lambda run: run.seed)
    if members[0].started is None and not given["date"]:
        raise UserError(f"{members[0].path} does not tell when it began: give --date YYYY-MM-DD")
    date = given["date"] or members[0].started[:10]
    source, packed = script_of(members), pack or is_packed(members)
    code = train_gpt.pack_code(source) if packed else source
    facts = summary(members, len(code))
    folder = root / track / f"{date}_{re.sub('[^A-Za-z0-9.]+', '_', given['name']).strip('_')}"
    about = {key: given[key] for key in ("author", "github_id", "name", "blurb")} | {"date": date, "track": track}
    elsewhere = {"SEED", "RUN_ID", "DATA_PATH", "TOKENIZER_PATH"}
    changed = " ".join(f"{name}={members[0].settings[name]}" for name in members[0].changed if name not in elsewhere)
    about["technique_summary"] = given["summary"] or f"train_gpt.py with {changed or 'its defaults'}"
    text = compare.report(against, members, speed=False)[1] if against else ""
    files = {
        "train_gpt.py": code,
        "submission.json": (json.dumps(about | facts, indent=2, ensure_ascii=False) + "\n").encode(),
        "README.md": readme(given, members, facts, packed, text).encode(),
        "requirements.txt": requirements(members[0]).encode(),
        **({READABLE: source} if packed else {}),
        **{f"train_seed{run.seed}.log": run.path.read_bytes() for run in members},
    }
    if folder.exists():
        raise UserError(
            f"{folder} is there already, and records are not changed once made: give another --name or --date"
        )
    partial = folder.with_name(folder.name + ".partial")
    with train_gpt.writing(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, content in files.items():
            train_gpt.write_atomic(partial / name, content)
        partial.rename(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path, help="one text log a seed")
    parser.add_argument("--track", required=True, help="10min_16mb, non_record_16mb, ...")
    parser.add_argument("--name", required=True, help="title of the submission")
    parser.add_argument("--author", required=True)
    parser.add_argument("--github-id", default="", help="default: the author")
    parser.add_argument("--blurb", default="", help="what it is, in a sentence or two")
    parser.add_argument("--summary", default="", help="techniques; default: the knobs that were changed")
    parser.add_argument("--date", default="", help="YYYY-MM-DD; default: when the first run began")
    parser.add_argument("--against", default="", help="logs of the record to beat: adds the significance")
    parser.add_argument(
        "--pack", action="store_true", help="put the packed script in, and count it, whatever the runs counted"
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent, help="folder of the tracks")
    arguments = parser.parse_args()
    given = vars(arguments) | {"github_id": arguments.github_id or arguments.author}
    try:
        against = runs.read_group(arguments.against) if arguments.against else None
        members = [runs.read_run(path) for path in arguments.logs]
        folder = make(members, given, arguments.track, arguments.root, arguments.pack, against)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(
        f"made: {folder}\nnow fill in what README.md asks for, and look at it as a reviewer would: python tools/check_record.py {folder}"
    )


if __name__ == "__main__":
    main()
