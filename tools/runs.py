"""Runs as their logs tell them: ours, and those of the published scripts of the challenge.

Everything the tools of this folder know about a run comes from its text log (logs/<RUN_ID>.txt, in a record's folder
train_seed<N>.log) by `read_run`. Both dialects of the field are read: `step:200/9000 train_loss:2.43 train_time:16305ms`
with `..._exact val_loss:... val_bpb:...` (#399 and what it descends from) and `200/9000 train_loss: 2.43 train_time: 0.3m`.
"""

import dataclasses
import functools
import glob
import re
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from train_gpt import Hyperparameters, UserError

RULER = "=" * 100  # between the source at the head of a log and the rest
# What makes two runs different experiments. Published logs list other things in the same lines; they do not count.
CONFIGURATION = {field.name.upper() for field in dataclasses.fields(Hyperparameters)} - {"SEED", "RUN_ID"} | {
    "WORLD_SIZE"
}

NUMBER = r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|inf)"
STEP = re.compile(r"^(?:step:)?(\d+)/(\d+) (?=train_loss|val_loss)(.*)")
FIELD = re.compile(r"(\w+): ?" + NUMBER + r"(ms|m|s)?(?![\w.])")
SCORE = re.compile(
    r"^([A-Za-z][\w .-]*?)(?:_exact)?:?(?: stride:\d+)? val_loss[:=] ?" + NUMBER + r" val_bpb[:=] ?" + NUMBER + r"(.*)"
)
SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, None: 1.0}


class Point(NamedTuple):
    """One line of a log about one step."""

    step: int
    seconds: float | None  # of training; some logs do not tell
    fields: dict[str, float]


class Score(NamedTuple):
    """A final score: nats a token, bits a byte, and how long it took, if the log tells."""

    loss: float
    bpb: float
    seconds: float | None
    tokens: int | None
    nbytes: int | None


@dataclasses.dataclass(frozen=True)
class Run:
    """What one log says; None where it says nothing."""

    path: Path
    source: bytes | None  # of the script, if the log begins with it
    settings: dict[str, str]  # knobs by their names as variables; of published logs, whatever they list
    changed: tuple[str, ...]  # knobs that differ from the defaults, where the log marks them
    started: str | None  # YYYY-MM-DDTHH:MM:SSZ
    versions: dict[str, str]
    device: str | None
    ranks: int | None
    train: list[Point]
    val: list[Point]
    steps: int | None
    train_seconds: float | None
    resumed: int  # how often it was stopped and went on
    scores: dict[str, Score]  # by name, in the order of the log
    model_bytes: int | None
    code_bytes: int | None
    total_bytes: int | None

    @property
    def seed(self) -> int | None:
        text = self.settings.get("SEED", "")
        return int(text) if text.isdigit() else None

    @property
    def configuration(self) -> dict[str, str]:
        """The knobs that make it another experiment."""
        return {name: value for name, value in self.settings.items() if name in CONFIGURATION}

    @property
    def score_name(self) -> str | None:
        """Which score counts: test-time training, else sliding windows, else windows side by side, of the artifact."""
        counting = [
            name
            for name in self.scores
            if not is_before_export(name) and "partial" not in name and "diagnostic" not in name.lower()
        ]
        return next((name for part in ("ttt", "sliding", "") for name in reversed(counting) if part in name), None)

    @property
    def score(self) -> Score:
        """The score that counts. Raises UserError if the run did not come to it."""
        if self.score_name is None:
            raise UserError(
                f"{self.path} has no final score: the run did not come to its end; start it again or leave the log out"
            )
        return self.scores[self.score_name]

    @property
    def before_export(self) -> Score | None:
        """The weights before they were quantised."""
        return next((score for name, score in self.scores.items() if is_before_export(name)), None)

    @property
    def after_export(self) -> Score | None:
        """The artifact, in windows side by side."""
        return next(
            (score for name, score in self.scores.items() if "roundtrip" in name or name == "diagnostic quantized"),
            None,
        )

    @property
    def step_ms(self) -> float | None:
        """Mean milliseconds of a step."""
        return 1000 * self.train_seconds / self.steps if self.steps and self.train_seconds else None


def is_before_export(name: str) -> bool:
    """Whether a score is of weights that were not quantised yet."""
    return any(part in name.lower() for part in ("average", "post_ema", "post-ema", "pre-quant", "prequant"))


def read_run(path: Path) -> Run:
    """The run of a text log. Raises UserError if there is none in it, or more than one."""
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; give the text log of a run, logs/<RUN_ID>.txt"
        ) from error
    if path.suffix in (".jsonl", ".json"):
        raise UserError(f"{path} is not a text log; give {path.with_suffix('.txt').name} beside it")
    head, ruler, rest = blob.partition(f"\n{RULER}\n".encode())
    source, lines = (head if ruler else None), (rest if ruler else blob).decode("utf-8", errors="replace").splitlines()
    if RULER in lines:  # nanogpt's way: source, ruler, versions, ruler
        lines = [line for line in lines if line != RULER]
    train, val = _points(path, lines)
    scores = _scores(lines)
    if not train and not val and not scores:
        raise UserError(
            f"{path} has neither steps nor scores: give the text log of a run, logs/<RUN_ID>.txt or train_seed<N>.log"
        )
    settings, changed = _settings(lines)
    steps = [point.step for point in (*train, *val)]
    seconds = [point.seconds for point in (*train, *val) if point.seconds is not None]
    seconds += [
        float(value) / 1000
        for value in re.findall(r"^(?:stopping_early|gptq): .*train_time: ?([\d.]+)ms", "\n".join(lines), re.M)
    ]
    find = functools.partial(_find, "\n".join(lines))
    total = re.findall(r"^Total submission size([^:\n]*): (\d+) bytes", "\n".join(lines), re.M)
    model = re.findall(r"^Serialized model ([^:\n]+): (\d+) bytes", "\n".join(lines), re.M)
    code = re.findall(r"^Code size([^:\n]*): (\d+) bytes", "\n".join(lines), re.M)
    return Run(
        path=path,
        source=source,
        settings=settings,
        changed=changed,
        started=find(r"^started: (\S+)$"),
        versions=_versions(lines),
        device=find(r"^runtime: .*?device:(.*?) compute_dtype:") or find(r"(NVIDIA [A-Z]+\d+[^|\n]*?)  "),
        ranks=_int(find(r"^runtime: ranks:(\d+)") or find(r"^\s*world_size: ?(\d+)")),
        resumed=sum(line.startswith("resumed: ") for line in lines),
        train=train,
        val=val,
        steps=max(steps, default=None),
        train_seconds=max(seconds, default=None),
        scores=scores,
        # Several sizes are the rule in published logs: the raw one first, then one for each coder; the last one counts.
        model_bytes=_int(model[-1][1] if model else None),
        code_bytes=_int(code[-1][1] if code else None),
        total_bytes=_int(total[-1][1] if total else None),
    )


def _find(text: str, pattern: str) -> str | None:
    found = re.search(pattern, text, re.M)
    return found and found[1].strip()


def _int(text: str | None) -> int | None:
    return None if text is None else int(text)


def _fields(text: str) -> dict[str, float]:
    """The key:value pairs of a line; times in seconds."""
    return {key: round(float(value) * SECONDS[unit or None], 9) for key, value, unit in FIELD.findall(text)}


def _points(path: Path, lines: list[str]) -> tuple[list[Point], list[Point]]:
    """Steps of training and of validation, in order. What a resumed run has done twice counts as it was done last."""
    found: dict[str, dict[int, Point]] = {"train_loss": {}, "val_loss": {}}
    last = -1
    for line in lines:
        if match := re.match(r"^resumed: step:(\d+) ", line):
            last = int(match[1])
            for points in found.values():
                for later in [step for step in points if step > last]:
                    del points[later]
        if not (match := STEP.match(line)):
            continue
        step, fields = int(match[1]), _fields(match[3])
        kind = "train_loss" if "train_loss" in fields else "val_loss"
        if step < last:
            raise UserError(
                f"{path} holds several runs, one after the other (step {step} follows {last}): give a log of its own to each"
            )
        last = step
        found[kind][step] = Point(step, fields.get("train_time"), fields)
    return list(found["train_loss"].values()), list(found["val_loss"].values())


def _scores(lines: list[str]) -> dict[str, Score]:
    """Final scores. A line for people and one with all digits are one score; both may know its time."""
    scores: dict[str, Score] = {}
    for line in lines:
        if match := SCORE.match(line):
            name, loss, bpb, rest = match.groups()
            name, fields = name.strip(), _fields(rest)
            seconds = fields.get("eval_time", scores[name].seconds if name in scores else None)
            tokens, nbytes = (int(fields[key]) if key in fields else None for key in ("val_tokens", "val_bytes"))
            scores[name] = Score(float(loss), float(bpb), seconds, tokens, nbytes)
    return scores


def _settings(lines: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Knobs, and which of them are marked as changed."""
    ours = [match.groups() for line in lines if (match := re.match(r"^([* ]) ([A-Z][A-Z0-9_]+)=(.*)$", line))]
    if ours:
        return {name: value for _, name, value in ours}, tuple(name for mark, name, _ in ours if mark == "*")
    found = {}
    for line in lines:
        if match := re.match(r"^  ([a-z]\w*): (.*)$", line):  # a list of hyperparameters
            found[match[1].upper()] = match[2]
        elif (
            not STEP.match(line) and not SCORE.match(line) and re.fullmatch(r"(\w+:\S+ )*\w+:\S+", line)
        ):  # pairs end to end
            found |= {key.upper(): value for key, value in (pair.split(":", 1) for pair in line.split())}
    return found, ()


def _versions(lines: list[str]) -> dict[str, str]:
    for line in lines:
        if line.startswith("python ") and ", torch " in line:
            return dict(part.split(" ", 1) for part in line.split(", "))
        if match := re.match(r"^Running PyTorch (\S+)", line):
            return {"torch": match[1]}
    return {}


def read_group(text: str) -> list[Run]:
    """The runs of a group: a folder with logs in it, a log, or a pattern; several of them with commas between.

    Raises UserError if there are none, if two have the same seed, or if they are not of one configuration.
    """
    paths: list[Path] = []
    for part in text.split(","):
        found = [Path(part)]
        if Path(part).is_dir():
            found = sorted(
                path
                for path in Path(part).iterdir()
                if path.suffix == ".log" or (path.suffix == ".txt" and path.name != "requirements.txt")
            )
        elif any(char in part for char in "*?["):
            found = [Path(name) for name in sorted(glob.glob(part)) if name.endswith((".txt", ".log"))]
        if not found:
            raise UserError(
                f"there are no logs in {part}: give a folder of logs, a log, or a pattern such as 'logs/base_*.txt'"
            )
        paths += found
    runs = [read_run(path) for path in paths]
    for run in runs:
        run.score  # noqa: B018  raises for a run that has none
    if difference := differences(runs):
        raise UserError(
            f"the logs of {text} are not of one configuration: {difference}; compare configurations, not mixtures of them"
        )
    seeds = [run.seed for run in runs if run.seed is not None]
    for seed in set(seeds):
        if seeds.count(seed) > 1:
            raise UserError(
                f"the logs of {text} have seed {seed} more than once: a run and its repetition are not two samples"
            )
    return runs


def differences(runs: list[Run]) -> str:
    """What the runs do not have in common beside their seeds, in words; "" if nothing."""
    for run in runs[1:]:
        a, b = runs[0].configuration, run.configuration
        unlike = [
            f"{name}={a.get(name, 'not set')} and {b.get(name, 'not set')}"
            for name in sorted({*a, *b})
            if a.get(name) != b.get(name)
        ]
        if unlike:
            return f"{runs[0].path.name} and {run.path.name} have {'; '.join(unlike[:4])}"
        if runs[0].source is not None and run.source is not None and runs[0].source != run.source:
            return f"{runs[0].path.name} and {run.path.name} begin with different scripts"
    return ""


def mean_std(values: list[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; that of one value is unknown."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def table(runs: list[Run], names: list[str] | None = None) -> str:
    """One line a run, then mean and deviation: the columns that a competitor looks at."""
    columns = [
        ("steps", 7, ".0f", lambda run: run.steps),
        ("ms/step", 9, ".2f", lambda run: run.step_ms),
        ("before", 9, ".5f", lambda run: run.before_export and run.before_export.bpb),
        ("after", 9, ".5f", lambda run: run.after_export and run.after_export.bpb),
        ("score", 9, ".5f", lambda run: run.score.bpb),
        ("bytes", 12, ",.0f", lambda run: run.total_bytes),
        ("train s", 8, ".1f", lambda run: run.train_seconds),
        ("eval s", 8, ".1f", lambda run: run.score.seconds),
    ]
    names = names or [run.path.stem for run in runs]
    width = max(map(len, (*names, "mean")))
    cell = lambda value, size, form: f"{'-' if value is None else format(value, form):>{size}}"  # noqa: E731
    lines = [" " * width + "".join(f"{title:>{size}}" for title, size, _, _ in columns)]
    rows = [[read(run) for *_, read in columns] for run in runs]
    for name, row in zip(names, rows, strict=True):
        lines.append(
            f"{name:{width}}"
            + "".join(cell(value, size, form) for value, (_, size, form, _) in zip(row, columns, strict=True))
        )
    if len(runs) > 1:
        stats = [mean_std(list(column)) if None not in column else (None, None) for column in zip(*rows, strict=True)]
        for name, which in (("mean", 0), ("std", 1)):
            lines.append(
                f"{name:{width}}"
                + "".join(
                    cell(pair[which], size, form) for pair, (_, size, form, _) in zip(stats, columns, strict=True)
                )
            )
    return "\n".join([*lines, f"{'n':{width}}{len(runs):>7}"])
