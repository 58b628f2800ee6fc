"""tools/make_record.py and tools/check_record.py: submission folders and their check."""

import dataclasses
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import check_record
import make_record
import pack_code
import train_gpt
from conftest import ROOT, run, user_error
from lib import runs
from sample_logs import LATER, LEGAL, PUBLISHED, counted, logs_of, written

CHECK = ROOT / "tools" / "check_record.py"


@pytest.fixture
def made(swept, tmp_path, monkeypatch):
    """A function: a submission folder made from the sweep's logs, with its README filled in."""
    monkeypatch.setattr(make_record, "ROOT", tmp_path)

    def make(track="non_record_16mb", change=lambda text: text, identified=True) -> Path:
        for path in logs_of(swept):
            written(tmp_path / "logs", change(path.read_text()), path.name)
        about = ["--name", "A tiny, first one", "--author", "Ada", "--track", track]
        about += ["--github-id", "ada"] * identified
        monkeypatch.setattr(sys, "argv", ["make_record.py", *about, f"{tmp_path}/logs/*.txt"])
        make_record.main()
        folder = next((tmp_path / "records" / f"track_{track}").iterdir())
        readme = folder / "README.md"
        readme.write_text(re.sub(r"\(to fill: .*\)", "none", readme.read_text()))
        return folder

    return make


def checked(folder: Path, *options) -> tuple[int, dict[str, list[str]]]:
    """(exit status, lines by verdict) of check_record.py."""
    result = run([CHECK, folder, *options], {}, folder.parent, status=None)
    assert "Traceback" not in result.stderr, result.stderr
    printed = result.stdout.splitlines()
    lines = {s: [line for line in printed if line.startswith(s)] for s in ("ok", "FAIL", "n/a")}
    assert sum(map(len, lines.values())) >= 10
    return result.returncode, lines


FILES = "README.md requirements.txt submission.json train_gpt.py train_seed1.log train_seed2.log"


def test_a_folder_has_everything_from_the_logs(made, swept):
    folder = made(change=lambda text: text.replace("* DATA_PATH=", "* DATA_PATH=a b/", 1))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_A_tiny_first_one", folder.name)
    assert sorted(p.name for p in folder.iterdir()) == FILES.split()
    assert (folder / "train_gpt.py").read_bytes() == (ROOT / "train_gpt.py").read_bytes()
    found = [runs.read_run(path) for path in logs_of(swept)]
    given = json.loads((folder / "submission.json").read_text())
    bpb, nats = ([getattr(r.score, name) for r in found] for name in ("bpb", "loss"))
    assert given["val_bpb"] == pytest.approx(np.mean(bpb), abs=1e-8)
    assert given["val_loss"] == pytest.approx(np.mean(nats), abs=1e-8)
    assert given["val_bpb_std"] == pytest.approx(np.std(bpb, ddof=1), abs=1e-8)
    assert given["seeds"] == [1, 2]
    assert given["bytes_total"] == max(r.total_bytes for r in found)
    assert given["github_id"] == "ada"
    assert given["track"] == "non_record_16mb", "the folder is called track_..., the field is not"
    assert given["seed_results"]["2"]["val_loss"] == found[1].score.loss
    assert given["compliance"]["three_seeds"] is False
    assert all(given["compliance"][claim] is True for claim in make_record.ABSENT)
    assert given["attribution"] == "descends from #399 by abaybektursun"
    text = (folder / "README.md").read_text()
    command = "NUM_LAYERS=3 LATE_QAT=1 VAL_LOSS_EVERY=4 TRAIN_LOG_EVERY=2 OMP_NUM_THREADS=1"
    for part in ("This is not a record", "DATA_PATH='a b/", *command.split()):
        assert part in text
    assert f"**val_bpb {given['val_bpb']:.5f}**" in text
    pins = (folder / "requirements.txt").read_text()
    assert f"torch=={train_gpt.torch.__version__.split('+')[0]}\n" in pins


def test_a_github_id_is_not_guessed(made):
    """It was the author's name, which passed the check."""
    folder = made(identified=False)
    given = json.loads((folder / "submission.json").read_text())
    assert (given["author"], given["github_id"]) == ("Ada", "(to fill: your GitHub ID)")
    status, lines = checked(folder)
    assert status == 1 and len(lines["FAIL"]) == 1 and "without github_id" in lines["FAIL"][0]


def test_a_good_folder_passes(made):
    folder = made()
    status, lines = checked(folder, "--legality")
    assert status == 0 and not lines["FAIL"], lines
    assert len(lines["n/a"]) == 3
    assert any(line.endswith(": the shortest has 12") for line in lines["n/a"])
    assert any("8xH100" in line and "a non-record" in line for line in lines["n/a"])
    assert any("C1 causal" in line for line in lines["ok"])
    assert sorted(p.name for p in folder.iterdir()) == FILES.split(), "the check leaves nothing"


def test_the_packed_script_that_ran_is_submitted(made, monkeypatch):
    """It and its source belong together. Packing takes seconds, so it is done once."""
    source = pack_code.without_comments((ROOT / "train_gpt.py").read_bytes())
    packed, other = pack_code.pack(source), pack_code.pack(b"x = 1")
    monkeypatch.setattr(pack_code, "pack", {source: packed}.get)
    folder = made(change=counted(len(packed), source))
    assert (folder / "train_gpt.py").read_bytes() == packed
    assert (folder / "train_gpt.readable.py").read_bytes() == source
    assert json.loads((folder / "submission.json").read_text())["bytes_code"] == len(packed)
    status, lines = checked(folder)
    assert status == 0, lines
    shown = f"is the script that the logs show: packed, {len(packed):,} bytes"
    assert any(shown in line for line in lines["ok"])
    for name, content, part in (
        ("train_gpt.readable.py", source + b"x", "train_gpt.readable.py is not its source"),
        ("train_gpt.py", source, f"it has {len(source)} bytes, the code that ran {len(packed)}"),
        ("train_gpt.py", other, "does not begin with it"),
    ):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        line = check_record.same_script(check_record.Folder(folder))
        assert line.status == "FAIL" and part in line.detail
        (folder / name).write_bytes(before)
    assert check_record.same_script(check_record.Folder(folder)).status == "ok"
    shutil.rmtree(folder)
    with user_error("the script was not packed with tools/pack_code.py"):
        made(change=counted(len(packed) + 1, source))


def test_a_claim_is_about_every_seed(swept):
    """Not about the first one alone."""
    members = [runs.read_run(path) for path in logs_of(swept)]
    machine = {"ranks": 8, "device": "NVIDIA H100"}
    members = [dataclasses.replace(run, **machine) for run in members]
    slow = {members[1].score_name: members[1].score._replace(seconds=600.1)}
    for claim, worse in {
        "artifact_under_16mb": {"model_bytes": make_record.CAP},
        "train_under_600s": {"train_seconds": 600.1},
        "eval_under_600s": {"scores": slow},
        "hardware_8xh100": {"ranks": 4},
    }.items():
        pair = [members[0], dataclasses.replace(members[1], **worse)]
        for given, holds in ((members, True), (pair, False), (pair[::-1], False)):
            assert make_record.summary(given, 1)["compliance"][claim] is holds, claim
    larger = dataclasses.replace(members[1], model_bytes=9**9)
    assert make_record.summary([members[0], larger], 1)["bytes_total"] == 9**9 + 1


def as_record(text: str) -> str:
    """The log as if from the challenge's machine."""
    form = r"(?m)^runtime: ranks:1 (.*?) device:.*?(?= compute)"
    return re.sub(form, r"runtime: ranks:8 \1 device:NVIDIA H100 80GB HBM3", text)


def test_a_record_needs_its_machine(made, tmp_path):
    """It is told how to show its significance."""
    status, lines = checked(made(track="10min_16mb", change=as_record))
    assert status == 0, lines
    assert "n/a   a record" in "".join(lines["n/a"]) and "compare.py" in "".join(lines["n/a"])
    shutil.rmtree(tmp_path / "records")
    status, lines = checked(made(track="10min_16mb"))
    assert status == 1 and "they ran on CPU" in "".join(lines["FAIL"])


def edit(name: str, old: str, new: str):
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        changed = re.sub(old, new, text, count=1, flags=re.M)
        assert changed != text
        (folder / name).write_text(changed)

    return change


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def fields(change=lambda given: {}, **changes):
    """submission.json with these fields, and those that a function gives for its own."""

    def changed(folder: Path) -> None:
        given = json.loads((folder / "submission.json").read_text())
        (folder / "submission.json").write_text(json.dumps(given | changes | change(given)))

    return changed


def fatten(folder: Path) -> None:
    """Each of code and artifact is under the limit, their sum is over it."""
    with open(folder / "train_gpt.py", "a") as file:
        file.write("#" * (15_999_000 - (folder / "train_gpt.py").stat().st_size))


def edit_import(new: str):
    return edit("train_gpt.py", r"^import argparse$", new)


# fmt: off
BROKEN = {
    "an n-gram cache": (fields(compliance={"no_ngram_cache": False}), "no_ngram_cache is False, not true"),
    "attribution is a number": (fields(attribution=399), "attribution is 399, not a text"),
    "no readme": (remove("README.md"), "no README.md"),
    "no json": (remove("submission.json"), "no submission.json"),
    "bad json": (edit("submission.json", r"\{", "{,"), "submission.json cannot be read: Expecting"),
    "no script": (remove("train_gpt.py"), "no train_gpt.py"),
    "no logs": (lambda at: [log.unlink() for log in at.glob("*.log")], "no log"),
    "unfinished log": (edit("train_seed1.log", r"final_int6_\w+_exact.*\n.*", ""), "did not finish"),
    "no author": (fields(author=""), "without author"),
    "unfilled readme": (edit("README.md", "none", "(to fill: x)"), "still to fill"),
    "bpb as loss": (fields(lambda given: {"val_loss": given["val_bpb"]}), "val_loss is nats per token"),
    "a seed left out": (remove("train_seed2.log"), "seed_results has seed 2, which has no log"),
    "a seed's results left out": (
        fields(lambda given: {"seed_results": {"1": given["seed_results"]["1"]}}), "seed_results lacks seed 2"
    ),
    "mixed settings": (
        edit("train_seed2.log", r"^[* ] MATRIX_LR=0\.025", "* MATRIX_LR=0.03"), "MATRIX_LR=0.025 and 0.03"
    ),
    "a seed twice": (lambda at: shutil.copy(at / "train_seed1.log", at / "train_seed3.log"), "one occurs twice"),
    "other text": (
        edit("train_seed2.log", r"(final_int6_sl.*)val_tokens:\d+", r"\1val_tokens:99"), "tokens and bytes are"
    ),
    "another script": (edit_import("import argparse  # changed"), "does not begin with it"),
    "one seed of another script": (edit("train_seed2.log", r"^Code size: \d+", "Code size: 5"), "that ran 5 or"),
    "one seed without the script": (
        edit("train_seed2.log", f"(?s)^.*?{runs.SEPARATOR}", ""),
        "train_seed2.log does not begin with it",
    ),
    "too large": (fatten, "too many"),
    "one artifact too large": (
        edit("train_seed2.log", r"^(Serialized model int6.*:) \d+", r"\1 16000000"), "(seed 2), "
    ),
    "trained too long": (
        edit("train_seed2.log", r"^(calibration: .*train_time):\d+ms", r"\1:600001ms"), "seed 2: 600.00 s"
    ),
    "evaluated too long": (
        edit("train_seed1.log", r"(final_int6_sl.*)eval_time:\d+ms", r"\1eval_time:700000ms"), "seed 1: 700."
    ),
    "prepared too long": (edit("train_seed1.log", r"prepare_time:\d+ms", "prepare_time:600000ms"), "seed 1: 60"),
    "counts of n-grams denied": (
        edit("train_seed1.log", r"^  NGRAM_TILT=False", "* NGRAM_TILT=True"),
        "no_ngram_cache of compliance is True, the logs show F",
    ),
    "damaged packing": (
        lambda at: (at / "train_gpt.py").write_bytes(pack_code.pack(b"pass")[:-60]),
        "train_gpt.py cannot be read: the packed script is incomplete",
    ),
    "no python": (edit_import("import argparse argparse"), "invalid syntax"),
    "no help": (edit("train_gpt.py", r"^    main\(\)$", '    sys.exit("error: no")'), "exit status 1: error: no"),
    "an import": (edit_import("import argparse\nimport pytest"), "pytest is not in requirements.txt"),
    "a network module": (edit_import("import argparse\nimport urllib.request"), "it imports urllib"),
    "a secret": (
        edit("train_seed2.log", r"^changed from", "HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123456789\nchanged from"),
        "key or password",
    ),
}
# fmt: on


def altered(given: dict) -> list[tuple[str, dict]]:
    """submission.json with another value of one of its entries, each in turn, and the entry."""
    theirs = {"author", "github_id", "name", "track", "attribution", "technique_summary"}
    found = []
    for key, value in given.items():
        if isinstance(value, dict):
            found += [(f"{key} {name}", {**given, key: inner}) for name, inner in altered(value)]
        elif key not in theirs:
            other = {bool: lambda x: not x, str: lambda x: f"0{x}", list: lambda x: [*x, 9]}
            change = other.get(type(value), lambda x: 1.01 * x)
            found.append((key, {**given, key: change(value)}))
    return found


def test_each_statement_is_contradicted_by_the_logs(made):
    """All that submission.json says, but what its author says."""
    folder = made()
    path = folder / "submission.json"
    given = json.loads(path.read_text())
    cases = [
        *altered(given),
        ("compliance score_first_ttt", fields_of(given, score_first_ttt=True)),
    ]
    summary = given["technique_summary"].replace("NUM_LAYERS=3", "NUM_LAYERS=4")
    cases.append(("technique_summary", {**given, "technique_summary": summary}))
    assert len(cases) > 40
    for entry, wrong in cases:
        path.write_text(json.dumps(wrong))
        (found,) = check_record.same_figures(check_record.Folder(folder))
        assert found.status == "FAIL" and entry.split()[-1] in found.detail, (entry, found)
    path.write_text(json.dumps(given))
    (found,) = check_record.same_figures(check_record.Folder(folder))
    assert found.status == "ok"


def test_a_figure_is_right_in_all_its_digits():
    for given, right in ((1.1194, True), (1.1195, False), (1.119381, False), (1.12, False)):
        assert check_record.close(given, 1.11938, 4) is right, given


def fields_of(given: dict, **claims) -> dict:
    return {**given, "compliance": given["compliance"] | claims}


def tilted(text: str) -> str:
    """A log with NGRAM_TILT=1, whose hints take 29 s."""
    text = text.replace("  NGRAM_TILT=False", "* NGRAM_TILT=True")
    return re.sub(r"prepare_time:\d+ms", "prepare_time:29000ms", text)


def test_a_run_with_the_tilt_says_that_it_counts_n_grams(made):
    """It said that it does not, and its hints took no time, which is limited."""
    slow = lambda text: re.sub(r"(final_int6_sl.*eval_time:)\d+", r"\g<1>590000", tilted(text))  # noqa: E731
    folder = made(change=slow)
    given = json.loads((folder / "submission.json").read_text())
    assert given["compliance"]["eval_under_600s"] is False
    assert any("seed 1: 619.00 s" in line.detail for line in failures(folder))
    shutil.rmtree(folder)
    folder = made(change=tilted)
    given = json.loads((folder / "submission.json").read_text())
    assert given["compliance"]["no_ngram_cache"] is False
    assert all(row["eval_time_s"] >= 29 for row in given["seed_results"].values())
    status, lines = checked(folder)
    assert status == 0 and any(
        "no_ngram_cache is False, as NGRAM_TILT=1" in x for x in lines["n/a"]
    )
    path = folder / "submission.json"
    path.write_text(json.dumps(fields_of(given, no_slot=False)))
    (found,) = check_record.claims(check_record.Folder(folder))
    assert found.status == "FAIL" and found.detail == "no_slot is False, not true"


def test_what_the_logs_do_not_show_is_left_to_the_author(made):
    """Whether a changed script has SLOT, for example. It said that it has not."""
    source = (ROOT / "train_gpt.py").read_bytes() + b"changed = 1\n"
    folder = made(change=counted(len(source), source))
    path = folder / "submission.json"
    given = json.loads(path.read_text())
    unknown = dict.fromkeys(make_record.ABSENT, make_record.UNKNOWN)
    assert given["compliance"].items() >= unknown.items()
    detail = "no_slot is '(to fill: true or false; the logs do not show it, as of a changed script"
    assert any(detail in line.detail for line in failures(folder))
    path.write_text(json.dumps(fields_of(given, **dict.fromkeys(make_record.ABSENT, True))))
    assert not failures(folder)


def test_a_score_of_its_own_belongs_to_the_submission(swept, sweep_knobs, tmp_path, monkeypatch):
    """A training without test-time training and the EVAL_ONLY score of its artifact."""
    training = logs_of(swept)[0]
    knobs = {"EVAL_ONLY": str(training.with_suffix(".npz")), "RUN_ID": "score", "TTT_ENABLED": "1"}
    run([ROOT / "train_gpt.py"], {**sweep_knobs, **knobs}, tmp_path)
    scored = tmp_path / "logs" / "score.txt"
    one, two = runs.read_run(training), runs.read_run(scored)
    assert one.artifact == two.artifact != runs.read_run(logs_of(swept)[1]).artifact
    monkeypatch.setattr(make_record, "ROOT", tmp_path)
    about = dict(author="Ada", github_id="ada", name="Two logs")
    folder = make_record.make([two, one], about, "non_record_16mb")
    text = (folder / "README.md").read_text()
    (folder / "README.md").write_text(re.sub(r"\(to fill: .*\)", "none", text))
    assert f"EVAL_ONLY={training.stem}.npz" in text and "TTT_ENABLED=1" in text.split("Then for")[1]
    assert {"train_seed1.log", "eval_seed1.log"} < {path.name for path in folder.iterdir()}
    given = json.loads((folder / "submission.json").read_text())
    assert given["eval_method"] == "final_int6_ttt_sgd" and given["val_bpb"] == two.score.bpb
    row = given["seed_results"]["1"]
    assert (row["steps"], row["pre_quant_val_bpb"]) == (12, one.before_export.bpb)
    assert row["eval_time_s"] == round(two.score.seconds + two.prepare_seconds, 1)
    assert (
        given["compliance"]["score_first_ttt"] is True
        and "TTT_ENABLED=True" in given["technique_summary"]
    )
    status, lines = checked(folder)
    assert status == 0, lines
    (joined,) = runs.read_group(str(folder))
    assert joined.score == two.score and joined.configuration["TTT_ENABLED"] == "True"
    # What is not its score
    with user_error("has no training: give the log of the run that made this artifact"):
        make_record.make([two], about, "t")
    with user_error("score one artifact: give one of them"):
        make_record.make([one, two, two], about, "t")
    other = re.sub("sha256:.*", f"sha256:{64 * '0'}", scored.read_text())
    written(folder, other, "eval_seed1.log")
    problem = "eval_seed1.log scores an artifact whose training has no log"
    assert any(problem in line.detail for line in failures(folder))
    other = "#1\nACCESS_TOKEN=12345678" + scored.read_text()
    path = written(folder, other, "eval_seed1.log")
    damaged = check_record.Folder(folder)
    assert "eval_seed1.log does not begin with it" in check_record.same_script(damaged).detail
    assert any(
        "eval_seed1.log contains what" in line.detail for line in check_record.files(damaged)
    )
    with user_error("train_seed1.log and eval_seed1.log begin with different scripts"):
        train = runs.read_run(folder / "train_seed1.log")
        make_record.make([train, runs.read_run(path)], {**about, "name": "Other"}, "t")


def test_an_evaluation_is_judged_as_its_training_is(swept):
    """Machine, script, settings and seconds of both count; one that did not finish has no score."""
    machine = {"ranks": 8, "device": "NVIDIA H100"}
    training = dataclasses.replace(runs.read_run(logs_of(swept)[0]), **machine)
    training.settings["EVAL_STRIDE"] = "999"  # of a score that does not count

    def joined(changes=None, **other) -> list[runs.Run]:
        settings = training.settings | {
            "EVAL_ONLY": "x.npz",
            "EVAL_STRIDE": "64",
            **(changes or {}),
        }
        changed = {"settings": settings, "changed": list(changes or ()), "prepare_seconds": 30.0}
        return runs.with_evaluations([training, dataclasses.replace(training, **changed | other)])

    (good,) = joined()
    assert good.eval_seconds == good.score.seconds + 30
    claims = make_record.compliance([good], 1)
    assert claims["hardware_8xh100"] and claims["no_slot"] and claims["no_ngram_cache"]
    for claim, value, others in (
        ("hardware_8xh100", False, joined(ranks=4)),
        ("no_slot", None, joined(source=b"another")),
        ("no_ngram_cache", False, joined({"NGRAM_TILT": "True"})),
        ("eval_under_600s", False, joined(prepare_seconds=600.0)),
    ):
        assert make_record.compliance(others, 1)[claim] is value, claim
    assert "WORLD_SIZE of its score=8 and 2" in runs.differences([good, *joined(ranks=2)])
    changes = {"NGRAM_TILT": "True", "MATRIX_LR": "9.0"}
    training = dataclasses.replace(training, changed=["EVAL_STRIDE", "NUM_LAYERS"])
    (found,) = joined(changes)
    assert found.changes == {"NUM_LAYERS": training.settings["NUM_LAYERS"], "NGRAM_TILT": "True"}
    assert [run.evaluation for run in joined(finished=False)] == [None, None]


def test_paths_of_the_machine_are_not_in_the_readme(made, data, capsys):
    folder = made()
    assert f"note: the logs show paths of this machine: DATA_PATH={data}" in capsys.readouterr().err
    for name in ("README.md", "submission.json"):
        assert str(data.parent) not in (folder / name).read_text()
    assert f"DATA_PATH={data.name}" in (folder / "README.md").read_text()


def failures(folder: Path) -> list[check_record.Verdict]:
    found = check_record.check(check_record.Folder(folder))
    return [line for line in found if line.status == "FAIL"]


def test_each_breakage_is_found(made, tmp_path, monkeypatch):
    good = made()
    starts = check_record.starts
    # Starting the script takes seconds, so it is left out where it does not matter.
    skipped = check_record.Verdict("ok", check_record.STARTS, "")
    for name, (damage, part) in BROKEN.items():
        instead = starts if name == "no help" else lambda _: skipped
        monkeypatch.setattr(check_record, "starts", instead)
        folder = tmp_path / "broken" / "track_non_record_16mb" / good.name
        shutil.copytree(good, folder)
        damage(folder)
        found = failures(folder)
        assert any(part in line.detail for line in found), (name, found)
        shutil.rmtree(folder)


def test_a_track_is_one_of_the_challenge(made, tmp_path, capsys):
    for track in ("10mn_16mb", "track_10mn_16mb"):
        with pytest.raises(SystemExit):
            made(track=track)
        assert "(choose from " in capsys.readouterr().err
    assert not (tmp_path / "records").exists()


def test_make_warns_and_quotes(made, tmp_path, monkeypatch, capsys):
    """Seeds that differ in their steps, and a folder with a space."""
    monkeypatch.setattr(make_record, "ROOT", tmp_path / "two words")
    fewer = lambda t: re.sub(r"(?m)^step:1[12]/12 .*\n" * ("* SEED=2" in t), "", t)  # noqa: E731
    with pytest.raises(FileNotFoundError):  # the fixture looks elsewhere
        made(change=fewer)
    printed = capsys.readouterr()
    assert "warning: these runs have 10 to 12 steps" in printed.err
    *_, tool, folder = shlex.split(printed.out)
    assert Path(folder).is_dir() and tool == str(tmp_path / "two words/tools/check_record.py")


def test_make_refuses(made, swept, tmp_path, monkeypatch):
    monkeypatch.setattr(pack_code, "pack", lambda _: b"")  # packing takes seconds
    folder = made()
    with user_error("exists already"), monkeypatch.context() as patched:
        patched.setattr(make_record, "code_of", None)  # it is refused before that work
        made()
    assert folder.is_dir()
    first, second = logs_of(swept)
    other_rate = logs_of(swept, "0.005")[1]
    altered = written(tmp_path, "#1\n" + first.read_text(), "1.txt")
    other = written(tmp_path, "#2\n" + second.read_text(), "2.txt")
    text = second.read_text()
    died = written(tmp_path, text[: text.rindex("final_int6_sliding_window_exact")], "died.txt")
    cases = {
        (first, first): "each log needs its own seed",
        (first, other_rate): "MATRIX_LR=0.025 and 0.005",
        (altered,): "the log was altered",
        (first, other): "begin with different scripts",
        (written(tmp_path, PUBLISHED),): "does not begin with the script",
        (first, died): "did not finish",
    }
    given = dict.fromkeys(("author", "github_id", "name"), "x")
    for logs, part in cases.items():
        with user_error(part):
            make_record.make([runs.read_run(path) for path in logs], given, "t")


SAME = "ok    submission.json says what the logs say"
BPB_AS_LOSS = "logs say: val_loss is 1.1217, which is bits per byte"


@pytest.mark.parametrize(
    "log, given, parts",
    [
        (PUBLISHED + LEGAL, {"val_bpb": 1.1192, "bytes_total": 15977386, "blurb": "x"}, [SAME]),
        (PUBLISHED, {"val_loss": 1.1217, "val_bpb": 1.1217}, [BPB_AS_LOSS]),
        (LATER, {"val_loss": 2.31944212, "val_bpb": 1.05989454, "seeds": [42]}, ["508.8 s", SAME]),
    ],
)
def test_published_folders_get_sane_messages(tmp_path, log, given, parts):
    """Fewer fields, no requirements.txt, another script, logs without source."""
    folder = tmp_path / "track_10min_16mb" / "2026-03-23_Someone"
    written(folder, log)
    code = runs.read_run(folder / "train_seed42.log").code_bytes
    script = "import numpy as np\nfrom flash_attn_interface import flash_attn_func\n"
    written(folder, script + "#" * (code - len(script)), "train_gpt.py")
    written(folder, "# A published record\n" + "text " * 60, "README.md")
    about = {"author": "a", "github_id": "a", "name": "n", "date": "2026-03-23", **given}
    written(folder, json.dumps(about), "submission.json")
    status, lines = checked(folder)
    text = "\n".join(line for kind in lines.values() for line in kind)
    for part in parts:
        assert part in text, text
    assert "the script that the logs show: the logs do not begin with the script" in text
    assert "flash_attn_interface is not installed here" in text
    assert "ok    train_gpt.py imports what requirements.txt lists" in text
    slow = "FAIL  training takes at most 10 minutes: seed 42: 600.13 s"
    assert (slow in text) == (log is not LATER), "fault B20: the published system overran its clock"
    assert status == (1 if lines["FAIL"] else 0)


RECORDS = sorted(path.parent for path in (ROOT / "records").glob("*/*/submission.json"))


def test_our_own_records_hold():
    found = {path: failures(path) for path in RECORDS}
    assert found and not any(found.values()), found


def test_the_probes_know_the_scripts_that_they_fit(monkeypatch):
    """Ours of today; our records have older ones. A good folder is probed above."""
    monkeypatch.setattr(check_record.legality, "suite", lambda *_: "")
    for path in RECORDS:
        folder = check_record.Folder(path)
        folder.runs[0].settings.update(TTT_ENABLED="True", TTT_MODE="lora")
        fits = b"def lora_update" in folder.source
        (probed,) = check_record.probes(folder)
        assert probed.status == ("ok" if fits else "n/a"), (path, probed)
        assert fits or "a later version of the script" in probed.detail
    folder.source = (ROOT / "train_gpt.py").read_bytes()
    del folder.runs[0].settings["FUSED_MLP"]  # a switch in those records
    (probed,) = check_record.probes(folder)
    assert probed.status == "ok", probed
