#!/usr/bin/env python3
"""Look at a submission folder as a reviewer does: one line a rule, and exit status 1 if one is broken.

    python tools/check_record.py records/10min_16mb/2026-11-21_mine
    python tools/check_record.py FOLDER --against RECORD_TO_BEAT --legality
    python tools/check_record.py FOLDER --artifact final_model.int6.xz --data-path DATA --tokenizer MODEL     # score it again

ok    the rule is kept, as far as the folder tells
FAIL  it is broken
n/a   it does not apply (a non-record need not run on 8 x H100), or it could not be checked, and why

It runs the folder's train_gpt.py (--help; with the further options more), so use a container for a stranger's. Published
folders can be checked, too; what their logs do not tell is said so.
"""

import argparse
import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import compare
import make_record
import runs
import train_gpt
from make_record import CAP, SECONDS
from runs import Run, UserError

# What the challenge's own requirements.txt installs; folders without one of their own can count on it.
GIVEN = "numpy brotli tqdm torch huggingface_hub kernels setuptools typing_extensions datasets tiktoken sentencepiece wandb".split()  # noqa: SIM905
NETWORK = set(
    "socket urllib http requests httpx aiohttp ftplib huggingface_hub datasets kernels wandb boto3 gdown".split()
)  # noqa: SIM905
SECRETS = re.compile(r"(hf_[A-Za-z0-9]{30,}|(?:API_KEY|SECRET|PASSWORD|ACCESS_TOKEN|HF_TOKEN)\s*[=:]\s*\S{8,})")


class Verdict(NamedTuple):
    """One line of the review."""

    status: str  # ok, FAIL or n/a
    rule: str
    detail: str


class Folder:
    """A submission folder, read once: what is not there or cannot be read is None, and a sentence in `problems`."""

    def __init__(self, path: Path):
        if not path.is_dir():
            raise UserError(f"{path} is not a folder: give one with README.md, submission.json, train_gpt.py and logs")
        self.path, self.problems = path, []
        self.code = self._read("train_gpt.py")
        self.source = self._unpacked()
        self.readme = (self._read("README.md") or b"").decode(errors="replace")
        self.submission = self._json(self._read("submission.json"))
        logs = sorted(path.glob("*.log")) or sorted(
            file for file in path.glob("*.txt") if file.name != "requirements.txt"
        )
        self.runs: list[Run] = []
        for log in logs:
            try:
                run = runs.read_run(log)
                run.score  # noqa: B018  raises for a run that has none
                self.runs.append(run)
            except UserError as error:
                self.problems.append(str(error))
        if not logs:
            self.problems.append("no log (train_seed<N>.log)")
        self.track = str(self.submission.get("track", path.resolve().parent.name))

    @property
    def non_record(self) -> bool:
        return self.track.replace("-", "_").removeprefix("track_").startswith("non_record")

    def _read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except OSError:
            self.problems.append(f"no {name}")
            return None

    def _unpacked(self) -> bytes | None:
        """The script as people read it, if it is packed by this project's packer or not at all."""
        if not self.code or not self.code.startswith(train_gpt.PACKED_HEAD):
            return self.code
        try:
            return train_gpt.unpack_code(self.code)
        except (ValueError, SyntaxError, OSError) as error:
            self.problems.append(f"train_gpt.py cannot be unpacked: {error}")
            return None

    def _json(self, text: bytes | None) -> dict:
        try:
            found = json.loads(text or b"{}")
        except ValueError as error:
            self.problems.append(f"submission.json is no JSON: {error}")
            return {}
        if not isinstance(found, dict):
            self.problems.append("submission.json is no JSON object")
            return {}
        return found


def verdict(rule: str, fault: str, detail: str = "") -> Verdict:
    """FAIL with the fault, if there is one."""
    return Verdict("FAIL" if fault else "ok", rule, fault or detail)


def files(folder: Folder) -> Iterator[Verdict]:
    """README, JSON, script, logs; the JSON's fields."""
    yield verdict(
        "README.md, submission.json, train log and train_gpt.py are in the folder",
        "; ".join(folder.problems),
        f"{len(folder.runs)} logs",
    )
    missing = [key for key in ("author", "github_id", "name", "date", "val_bpb") if not folder.submission.get(key)]
    yield verdict(
        'submission.json "includes your name, GitHub ID, val_bpb, and related metadata"',
        f"without {', '.join(missing)}" if missing else "",
    )
    todo, short = folder.readme.count("(to fill"), len(folder.readme) < 200
    yield verdict(
        "README.md is written",
        f"{todo} sections are still to fill" if todo else "it says next to nothing" if short else "",
    )
    leaks = [run.path.name for run in folder.runs if SECRETS.search(run.path.read_text(errors="replace"))]
    yield verdict(
        "no log holds a secret", f"what looks like a key or password is in {', '.join(leaks)}" if leaks else ""
    )


def close(said: object, found: float | None, digits: int) -> bool:
    """Whether a figure of the JSON is the logs', to as many digits as it is given with, and at least so many."""
    if not isinstance(said, (int, float)) or found is None:
        return False
    given = max(digits, len(repr(float(said)).partition(".")[2]))
    return abs(said - found) <= 0.51 * 10 ** -min(given, 8) + 1e-12 * abs(found)


def same_figures(folder: Folder) -> Iterator[Verdict]:
    """submission.json against the logs."""
    rule, said, members = "submission.json says what the logs say", folder.submission, folder.runs
    if not members or folder.code is None:
        yield Verdict("n/a", rule, "there are no readable logs, or no script")
        return
    facts, wrong = figures(folder), []
    totals = {
        row.get("artifact_bytes") for row in facts["seed_results"].values()
    }  # some give the largest, some that of the first seed
    for key, value in said.items():
        if key == "val_loss" and close(value, facts["val_bpb"], 3) and not close(value, facts["val_loss"], 3):
            wrong.append(
                f"val_loss is {value}, which is the bits per byte: val_loss is nats a token, {facts['val_loss']:.5f}"
            )
        elif key in ("val_loss", "val_bpb") and not close(value, facts[key], 4):
            wrong.append(f"{key} is {value}, the logs' mean is {facts[key]:.5f} ({facts['eval_method']})")
        elif key in ("val_loss_std", "val_bpb_std") and key in facts and not close(value, facts[key], 4):
            wrong.append(f"{key} is {value}, the logs' is {facts[key]:.5f}")
        elif key == "seeds" and seeds_of(value) != sorted(facts["seed_results"]):
            wrong.append(f"seeds are {seeds_of(value)}, the logs' {sorted(facts['seed_results'])}")
        elif key == "bytes_total" and facts["bytes_total"] and value not in totals:
            wrong.append(f"bytes_total is {value}, the largest of the logs' with this code is {facts['bytes_total']}")
        elif key == "bytes_code" and value != len(folder.code):
            wrong.append(f"bytes_code is {value}, train_gpt.py has {len(folder.code)}")
        elif key == "seed_results" and isinstance(value, (dict, list)):
            wrong += seed_faults(value, facts["seed_results"])
    yield verdict(
        rule,
        "; ".join(wrong),
        f"val_bpb {facts['val_bpb']:.5f}, val_loss {facts['val_loss']:.5f} over {len(members)} seeds",
    )


def seeds_of(said: object) -> list[str]:
    """The seeds that submission.json names, in a list or as the keys of an object."""
    return sorted(map(str, said)) if isinstance(said, (list, dict)) else [str(said)]


def figures(folder: Folder) -> dict:
    """What submission.json should say, of logs that may not tell everything."""
    members = folder.runs
    if all(run.model_bytes is not None for run in members):
        return make_record.summary(members, len(folder.code))
    (loss, _), (bpb, _) = (runs.mean_std([getattr(run.score, kind) for run in members]) for kind in ("loss", "bpb"))
    return {
        "val_loss": loss,
        "val_bpb": bpb,
        "bytes_total": None,
        "eval_method": members[0].score_name,
        "seed_results": {str(run.seed): {"val_loss": run.score.loss, "val_bpb": run.score.bpb} for run in members},
    }


def seed_faults(said: object, found: dict) -> list[str]:
    """What seed_results has otherwise than the logs; it may be an object by seed or a list of objects."""
    listed = (
        said
        if isinstance(said, list)
        else [{"seed": seed, **row} for seed, row in said.items() if isinstance(row, dict)]
    )
    rows = {str(row.get("seed")): row for row in listed if isinstance(row, dict)}
    wrong = [f"seed_results has seed {seed}, of which there is no log" for seed in rows if seed not in found]
    wrong += [f"seed_results leaves seed {seed} out" for seed in found if seed not in rows]
    for seed, row in rows.items():
        for key in ("val_loss", "val_bpb", "artifact_bytes"):
            if key in row and key in found.get(seed, {}) and not close(row[key], found[seed][key], 4):
                wrong.append(f"seed_results has {key} {row[key]} for seed {seed}, the log {found[seed][key]}")
    return wrong


def one_configuration(folder: Folder) -> Iterator[Verdict]:
    """Seeds, settings, and the script that ran."""
    members = folder.runs
    yield verdict("all seeds of a mean are from one configuration", runs.differences(members))
    seeds = [run.seed for run in members]
    twice = f"seeds {seeds}: one is there twice" if len(set(seeds)) < len(seeds) else ""
    fault = "a log does not tell its seed" if None in seeds else twice
    yield verdict("each log is of a seed of its own", fault, " ".join(map(str, seeds)))
    scored = {(run.score.tokens, run.score.nbytes) for run in members}
    tokens, nbytes = next(iter(scored), (None, None))
    said = f"{tokens:,} tokens, {nbytes:,} bytes" if tokens and nbytes else "the logs do not tell how much"
    yield verdict(
        "all seeds scored the same text",
        f"tokens and bytes are {sorted(map(str, scored))}" if len(scored) > 1 else "",
        said,
    )
    rule = "train_gpt.py is the script that the logs show"
    shown = [run for run in members if run.source is not None]
    if not shown or folder.source is None:
        yield Verdict("n/a", rule, "the logs do not begin with the script")
    else:
        other = [run.path.name for run in shown if run.source.strip() != folder.source.strip()]
        yield verdict(rule, f"{', '.join(other)} begins with another one" if other else "")


def limits(folder: Folder, artifact: Path | None) -> Iterator[Verdict]:
    """Bytes, seconds, machine."""
    members, code = folder.runs, len(folder.code or b"")
    rule = "code as it lies there and artifact are at most 16,000,000 bytes, decimal"
    sizes = (
        {f"seed {run.seed}": run.model_bytes for run in members}
        if artifact is None
        else {artifact.name: artifact.stat().st_size}
    )
    if not sizes or None in sizes.values():
        yield Verdict("n/a", rule, "the logs do not tell the artifact's size")
    else:
        name, largest = max(sizes.items(), key=lambda item: item[1])
        text = f"{code:,} + {largest:,} = {code + largest:,} ({name})"
        yield verdict(rule, text + f", {code + largest - CAP:,} too many" if code + largest > CAP else "", text)
    for what, read in (("training", lambda run: run.train_seconds), ("evaluation", lambda run: run.score.seconds)):
        rule, times = f"{what} takes at most 10 minutes", {run.seed: read(run) for run in members}
        unknown = [str(seed) for seed, time in times.items() if time is None]
        over = {seed: time for seed, time in times.items() if time and time > SECONDS}
        if unknown or not times:
            yield Verdict("n/a", rule, f"the logs do not tell it ({', '.join(unknown) or 'there are none'})")
        else:
            stopped = [str(run.seed) for run in members if run.resumed and what == "training"]
            rest = (
                f"; seed {' '.join(stopped)} was stopped and resumed: what it lost by that is not counted"
                if stopped
                else ""
            )
            fault = "; ".join(f"seed {seed}: {time:.2f} s" for seed, time in over.items())
            yield verdict(rule, fault, f"{max(times.values()):.1f} s at most{rest}")
    rule, found = 'training and evaluation ran "on 8xH100s"', make_record.hardware(members) if members else ""
    if folder.non_record:
        yield Verdict("n/a", rule, f"a non-record; it ran on {found}")
    elif any(run.device is None or run.ranks is None for run in members) or not members:
        yield Verdict(
            "n/a",
            rule,
            f"the logs do not tell the machine; submission.json says {folder.submission.get('hardware', 'nothing')}",
        )
    else:
        yield verdict(rule, "" if make_record.on_8xh100(members) else f"they ran on {found}", found)


def modules(nodes: Iterable[ast.AST]) -> set[str]:
    """Top-level packages that these nodes import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def script(folder: Folder) -> Iterator[Verdict]:
    """Whether train_gpt.py compiles, starts, and imports what it may."""
    rules = ("train_gpt.py compiles", "train_gpt.py starts within the folder (--help)", LISTED, OFFLINE)
    if folder.source is None:
        yield from (Verdict("n/a", rule, "there is no train_gpt.py that can be read") for rule in rules)
        return
    try:
        tree = ast.parse(folder.source)
    except (SyntaxError, ValueError) as error:
        yield Verdict("FAIL", rules[0], str(error))
        return
    yield Verdict("ok", rules[0], "")
    yield starts(folder, rules[1])
    runs_text = any(
        isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("exec", "eval") for node in ast.walk(tree)
    )
    if runs_text and len(tree.body) < 8:
        yield from (
            Verdict("n/a", rule, "it runs code that another packer has put into it, which was not read")
            for rule in rules[2:]
        )
    else:
        yield from packages(folder, tree)


LISTED = "train_gpt.py imports what requirements.txt lists"
OFFLINE = '"no external downloads, training dataset access, or network calls ... during evaluation"'


def packages(folder: Folder, tree: ast.Module) -> Iterator[Verdict]:
    """The imports of the script. Those at its top it cannot do without; others it may ask for and do without."""
    path, every, top = folder.path / "requirements.txt", modules(ast.walk(tree)), modules(tree.body)
    allowed, where = GIVEN, "the challenge's own requirements (the folder has none)"
    if path.exists():
        names = (re.split(r"[\s=<>!~\[;#@]", line.strip())[0] for line in path.read_text().splitlines())
        allowed, where = {name.lower().replace("-", "_") for name in names}, "requirements.txt"

    def unlisted(found: set[str]) -> str:
        # triton comes with torch; "importing FlashAttention, etc. is completely fine"
        own = {
            name
            for name in found
            if name not in sys.stdlib_module_names and name != "triton" and not name.startswith("flash_attn")
        }
        return ", ".join(sorted(name for name in own if name.lower() not in allowed))

    beyond, optional = unlisted(top), unlisted(every - top)
    needed = ", ".join(sorted(top - sys.stdlib_module_names))
    rest = f"; asked for where they are used, and not listed: {optional}" if optional else ""
    yield verdict(LISTED, f"{beyond} is not in {where}" if beyond else "", needed + rest)
    others = "; it starts other programs (subprocess)" if "subprocess" in every else ""
    net = ", ".join(sorted(every & NETWORK))
    yield verdict(
        OFFLINE, f"it imports {net}" if net else "", f"no module for it is imported; --artifact tries it{others}"
    )


def environment(**variables: object) -> dict[str, str]:
    """A clean environment for the folder's script, with these variables."""
    kept = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
        if name in os.environ
    }
    return kept | {"OMP_WAIT_POLICY": "PASSIVE"} | {name: str(value) for name, value in variables.items()}


def starts(folder: Folder, rule: str) -> Verdict:
    """Run --help in the folder."""
    try:
        result = subprocess.run(
            [sys.executable, "-B", "train_gpt.py", "--help"],
            cwd=folder.path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
    except subprocess.TimeoutExpired:
        return Verdict("FAIL", rule, "no answer within 120 s")
    said = (result.stderr.strip() or result.stdout.strip()).splitlines()
    if missing := re.search(r"No module named '([\w.]+)'", result.stderr):
        return Verdict("n/a", rule, f"{missing[1]} is not installed here")
    return verdict(
        rule,
        f"exit status {result.returncode}: {said[-1][:160] if said else 'nothing said'}" if result.returncode else "",
    )


def significance(folder: Folder, against: str) -> Iterator[Verdict]:
    """Against the record to beat, if one is given."""
    rule = 'a record "must beat the existing SOTA by at least 0.005 nats" at p < 0.01'
    if not against:
        yield Verdict("n/a", rule, "a non-record" if folder.non_record else "give the record to beat with --against")
        return
    try:
        counts, why = compare.verdict(runs.read_group(against), folder.runs, speed=False)
    except UserError as error:
        counts, why = False, str(error)
    yield Verdict("ok" if counts else "n/a" if folder.non_record else "FAIL", rule, why)


def legality(folder: Folder) -> Iterator[Verdict]:
    """The probes of tools/legality.py on the folder's own evaluators, with a small model of random weights."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    import legality as probes

    rule = "C1 causal, C2 normalised, C3 score before update, C4 once from left to right"
    if (
        folder.source is None
        or b"class Evaluator" not in folder.source
        or not folder.runs
        or not folder.runs[0].changed
    ):
        yield Verdict("n/a", rule, "its evaluation is not built as this project's, so that the probes do not fit")
        return
    specification = importlib.util.spec_from_loader("submitted", loader=None)
    module = importlib.util.module_from_spec(specification)
    module.__file__ = str(folder.path / "train_gpt.py")
    sys.modules["submitted"] = module  # dataclasses look their module up
    exec(compile(folder.source, module.__file__, "exec"), module.__dict__)
    yield verdict(
        rule, probes.suite(module, folder.runs[0].settings), "probed on a small model with the run's ways of evaluation"
    )


GUARD = """
import runpy, sys
def guard(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request", "ftplib.connect", "http.client.connect"):
        raise SystemExit(f"error: evaluation makes a network call: {event} {arguments[-1]}")
    if event == "open" and isinstance(arguments[0], str) and "fineweb_train" in arguments[0]:
        raise SystemExit(f"error: evaluation opens training data: {arguments[0]}")
sys.addaudithook(guard)
sys.argv = ["train_gpt.py"]
runpy.run_path("train_gpt.py", run_name="__main__")
"""


def rescore(folder: Folder, artifact: Path, data: Path, tokenizer: Path) -> Iterator[Verdict]:
    """Score the artifact with the folder's script, the validation split and the tokenizer alone, and without a network."""
    rule = "the artifact alone gives the score again, without network and training data"
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        (place / "data").mkdir()
        for shard in sorted(data.glob("fineweb_val_*.bin")):
            (place / "data" / shard.name).symlink_to(shard.resolve())
        (place / "train_gpt.py").write_bytes(folder.code)
        variables = environment(
            EVAL_ONLY=artifact.resolve(), DATA_PATH="data", TOKENIZER_PATH=tokenizer.resolve(), RUN_ID="again"
        )
        result = subprocess.run(
            [sys.executable, "-B", "-c", GUARD], cwd=place, env=variables, capture_output=True, text=True
        )
        if result.returncode:
            yield Verdict("FAIL", rule, (result.stderr.strip().splitlines() or ["nothing said"])[-1][:300])
            return
        again = runs.read_run(place / "logs" / "again.txt").score
    nearest = min(folder.runs, key=lambda run: abs(run.score.bpb - again.bpb))
    off = again.bpb - nearest.score.bpb
    # The order of sums differs between machines and batches; a wrong artifact or split is off by far more.
    text = f"{again.bpb:.5f} bits a byte in {again.seconds:.0f} s, {off:+.6f} from the log of seed {nearest.seed}"
    yield verdict(rule, text if abs(off) > 1e-3 else "", text)


def check(
    folder: Folder,
    against: str = "",
    probe: bool = False,
    artifact: Path | None = None,
    data: Path | None = None,
    tokenizer: Path | None = None,
) -> list[Verdict]:
    """All verdicts, in the order in which a reviewer wants them."""
    parts: list[Callable[[], Iterator[Verdict]]] = [
        lambda: files(folder),
        lambda: same_figures(folder),
        lambda: one_configuration(folder),
        lambda: limits(folder, artifact),
        lambda: script(folder),
        lambda: significance(folder, against),
    ]
    if probe:
        parts.append(lambda: legality(folder))
    if artifact and data and tokenizer:
        parts.append(lambda: rescore(folder, artifact, data, tokenizer))
    return [line for part in parts for line in part()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", default="", help="logs or folder of the record to beat")
    parser.add_argument(
        "--legality", action="store_true", help="probe the evaluation for the four conditions (half a minute)"
    )
    parser.add_argument("--artifact", type=Path, help="count this file, and with the next two score it again")
    parser.add_argument("--data-path", type=Path, help="folder with the validation shards")
    parser.add_argument("--tokenizer", type=Path, help="SentencePiece model of the shards")
    arguments = parser.parse_args()
    try:
        found = check(
            Folder(arguments.folder),
            arguments.against,
            arguments.legality,
            arguments.artifact,
            arguments.data_path,
            arguments.tokenizer,
        )
    except UserError as error:
        sys.exit(f"error: {error}")
    for status, rule, detail in found:
        print(f"{status:5} {rule}{': ' if detail else ''}{detail}")
    broken, other = (sum(line.status == status for line in found) for status in ("FAIL", "n/a"))
    print(f"\n{broken or 'no'} rule{'s are' if broken > 1 else ' is'} broken; {other} not checked or not applicable")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
