"""Shared by the tests: a tiny tokenizer, shards, models, and functions that start the script."""

import contextlib
import dataclasses
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "tools", "data", "bench")]

import train_gpt  # noqa: E402
import warm_python  # noqa: E402

# A shell's background job ignores the first, nohup the second, and the tests' processes inherit it.
for number, act in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, act)

VOCAB = 400
# A model of 3 layers and about 30,000 parameters, fp32, not compiled: a run takes seconds.
# fmt: off
TINY = {
    "VOCAB_SIZE": VOCAB, "NUM_LAYERS": 3, "MODEL_DIM": 32, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "ROPE_DIMS": 4,
    "XSA_LAST_N": 2, "BIGRAM_VOCAB_SIZE": 64, "BIGRAM_DIM": 8, "TRAIN_SEQ_LEN": 32, "TRAIN_BATCH_TOKENS": 768,
    "EVAL_SEQ_LEN": 32, "EVAL_STRIDE": 8, "VAL_BATCH_SIZE": 1024, "ITERATIONS": 12, "WARMDOWN_ITERS": 4,
    "MUON_MOMENTUM_WARMUP_STEPS": 4, "WARMUP_STEPS": 1, "MAX_WALLCLOCK_SECONDS": 0, "VAL_LOSS_EVERY": 0,
    "MLP_MULT": 3, "LATE_QAT": 0, "COMPILE": 0, "COMPUTE_DTYPE": "float32", "DEVICE": "cpu",
}
# Parts that are off by default: 5 layers, two visited three times, two lanes in the last, gated attention in documents,
# in windows but for the last layer, MUDD.
PARTS = {
    "NUM_LAYERS": 5, "LOOP_VISITS": 3, "LOOP_FIRST": 1, "LOOP_LAYERS": 2, "LANES_LAST_N": 1, "ATTN_GATE": 1,
    "DOC_ATTENTION": 1, "LOOP_START": 0.2, "MIN_LR": 0.1, "ATTN_WINDOW": 12, "MUDD": 1,
}
# fmt: on


def write_shard(path: Path, tokens: np.ndarray, count=None, tokenizer="", **wrong: int) -> None:
    """Write a shard that names the tokenizer with this sha256, or none. Magic, version and count in
    its header can have wrong values."""
    known = {"magic": train_gpt.SHARD_MAGIC, "version": train_gpt.SHARD_VERSION}
    header = np.zeros(train_gpt.SHARD_HEADER // 4, dtype="<i4")
    header[:3] = *(known | wrong).values(), len(tokens) if count is None else count
    header[3:11] = np.frombuffer(bytes.fromhex(tokenizer or 64 * "0"), "<i4")
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())


def evaluator(forward, val, hp, runtime, stride, *log) -> train_gpt.Evaluator:
    """An evaluator with windows `stride` apart; 0: of a banded pass."""
    config = train_gpt.ForwardConfig(hp.layer_order(), band=0 if stride else hp.eval_seq_len)
    stride = stride or train_gpt.band_block(hp)[1]
    return train_gpt.Evaluator(forward, val, hp, runtime, config, stride, *log)


def evaluate(*arguments) -> train_gpt.Score:
    """The score of all targets by such an evaluator."""
    scorer = evaluator(*arguments)
    scorer.score_windows()
    return scorer.result()


def user_error(sentence: str):
    """The block must raise a UserError whose sentence has this pattern."""
    return pytest.raises(train_gpt.UserError, match=sentence)


def variables(name: str) -> dict[str, str]:
    """The variables of configs/NAME.env."""
    text = re.sub(r"(?m)^#.*", "", (ROOT / "configs" / f"{name}.env").read_text())
    return dict(word.split("=") for word in text.split())


def train_pieces(path: Path, lines: list[str], vocab_size: int, **options) -> None:
    """Train a SentencePiece model of these lines at `path`, which ends in .model."""
    usual = {"model_type": "bpe", "byte_fallback": True, "minloglevel": 2, "num_threads": 1}
    usual |= {"model_prefix": str(path.with_suffix("")), "vocab_size": vocab_size}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), **usual | options)


def made_lines(count: int, seed: int = 0) -> list[str]:
    """Lines of made words and of phrases that come back. They depend on no file, and not on the
    version of Python: of random.Random only the numbers of `random` never change."""
    number = random.Random(seed).random
    pick = lambda things: things[int(len(things) * number() ** 2)]  # noqa: E731
    letters = "etaoinshrdlcumwfgypbvk.,0:(x)='_\u00e9\u6587\U0001f600"
    words = ["".join(pick(letters) for _ in range(1 + int(8 * number()))) for _ in range(500)]
    words, cases = ["the", *words], (str, str, str.title, str.upper)
    phrases = [" ".join(pick(cases)(pick(words)) for _ in range(5)) for _ in range(200)]
    return [" ".join(pick(phrases) for _ in range(1 + int(3 * number()))) for _ in range(count)]


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A folder with tokenizer.model and two shards of each split."""
    folder = tmp_path_factory.mktemp("data")
    text = made_lines(1600)
    train_pieces(folder / "tokenizer.model", text, VOCAB, character_coverage=1.0)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    parts = [" ".join(text[i : i + 8]) for i in range(0, len(text), 8)]
    documents = [[train_gpt.BOS, *pieces.encode(part)] for part in parts]
    own = train_gpt.sha256_of(folder / "tokenizer.model")
    held_out, kept = documents[::20], [d for i, d in enumerate(documents) if i % 20]
    for split, docs in (("train", kept), ("val", held_out)):
        tokens = np.concatenate(docs)
        middle = len(tokens) // 2 + 5  # unequal shards; the first ends inside a document
        write_shard(folder / f"fineweb_{split}_000000.bin", tokens[:middle], tokenizer=own)
        write_shard(folder / f"fineweb_{split}_000001.bin", tokens[middle:], tokenizer=own)
    return folder


@pytest.fixture(scope="session")
def other_tokenizer(tmp_path_factory) -> str:
    """A tokenizer of as many pieces as that of `data`, trained on other text."""
    path = tmp_path_factory.mktemp("other") / "tokenizer.model"
    train_pieces(path, made_lines(1600, seed=1), VOCAB)
    return str(path)


@pytest.fixture(scope="session")
def env(data):
    """A function that returns the environment of a tiny run, with the given knobs changed."""

    def make(**changes) -> dict[str, str]:
        knobs = {"DATA_PATH": data, "TOKENIZER_PATH": data / "tokenizer.model", **TINY, **changes}
        return {name: str(value) for name, value in knobs.items()}

    return make


@pytest.fixture(scope="session")
def hyperparameters(env):
    """A function that returns the hyperparameters of a tiny run, with the given knobs changed."""
    return lambda **changes: train_gpt.Hyperparameters.from_env(env(**changes))


@pytest.fixture
def one_rank(hyperparameters):
    """A function that returns (hyperparameters, runtime) of a tiny run in this process."""

    def make(**changes):
        hp = hyperparameters(**changes)
        with train_gpt.Runtime.start(hp) as runtime:
            return hp, runtime

    return make


@pytest.fixture(autouse=True)
def signals_are_restored():
    """The script's handlers would stay after a test that calls it in this process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def hopper(monkeypatch):
    """A pretended H100."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.fixture
def run_of(one_rank, tmp_path, monkeypatch):
    """A function that makes a Run of a tiny run in this process, in an empty folder and without a
    log. `val`: with its validation text; `parts` of its runtime are replaced."""
    monkeypatch.chdir(tmp_path)

    def make(val: bool = False, parts: dict | None = None, **changes) -> train_gpt.Run:
        hp, runtime = one_rank(**changes)
        runtime = dataclasses.replace(runtime, **(parts or {}))
        text = train_gpt.read_validation(hp, runtime.device) if val else None
        return train_gpt.Run(hp, runtime, train_gpt.Log(hp, train_gpt.Comm(1, 2)), text)

    return make


def made(hp, attend=None, dtype=torch.float32, seed=0) -> train_gpt.GPT:
    """A model with its initial weights."""
    model = train_gpt.GPT(hp, attend, dtype)
    model.initialise(seed)
    return model


def weights_of(model) -> dict[str, torch.Tensor]:
    """All weights in fp32, by name."""
    return {name: p.detach().float().clone() for name, p in model.named_parameters()}


def exported(weights, hp, calibration=None, metadata=None, loss=train_gpt.FINEST) -> bytes:
    """The artifact of these weights."""
    quantisers = train_gpt.make_quantisers(weights, hp, calibration or {})
    return train_gpt.pack_artifact(weights, hp, quantisers, metadata or {}, loss, train_gpt.Comm())


def fitted(weights, hp, calibration, max_bytes, log=lambda line: None, comm=None) -> bytes:
    """The artifact of these weights, of at most so many bytes."""
    quantisers = train_gpt.make_quantisers(weights, hp, calibration)
    comm = comm or train_gpt.Comm()
    pack = functools.partial(train_gpt.pack_artifact, weights, hp, quantisers, {}, comm=comm)
    return train_gpt.fit_bytes(quantisers.values(), pack, max_bytes, log, comm)


def matrices_of(tensors) -> dict[str, torch.Tensor]:
    """Views of a model's tensors, given by parameter: the (out, in) matrices of the banks as
    blocks.LAYER.NAME, and all other parameters by their name."""
    found = {}
    for kind, name, view in train_gpt.artifact_tensors(tensors):
        if name in tensors:
            found[name] = tensors[name]
        else:
            found |= {f"blocks.{layer}.{kind.name}": matrix for layer, matrix in enumerate(view)}
    return found


def quantised(rows, rule=train_gpt.RULES["sensitivity"][0]) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, steps) of rows by plain rounding."""
    steps = rule.default_steps(rows)
    return train_gpt.to_codes(rows, steps, rule.limit), steps


def noise(model, seed=1, size=0.2) -> train_gpt.GPT:
    """The model with random numbers added to all parameters, so that every term matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return model


def start(arguments: list, environment: dict, cwd: Path, ranks=1, fresh=False, **options):
    """Start `arguments` (a script and its arguments) with python or, on several ranks, torchrun.
    `fresh`: with a new Python, not with a fork that has torch already (tests/warm_python.py)."""
    passed = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    base = {name: value for name, value in os.environ.items() if name in passed}
    launcher = [sys.executable if fresh else warm_python.python()]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        launcher += [f"--nproc_per_node={ranks}"]
    return subprocess.Popen(
        [*launcher, *map(str, arguments)],
        env={**base, **warm_python.FIXED, **environment},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell ignores Ctrl-C in its background jobs, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def run(*arguments, status: int | None = 0, **options) -> subprocess.CompletedProcess:
    """`start`, then wait for the end. The exit status must be this one; None: any."""
    process = start(*arguments, **options)
    try:
        out, err = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert status in (None, process.returncode), f"{out[-3000:]}\n{err[-4000:]}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def work(mode: str, folder: Path, environment: dict[str, str], ranks=1):
    """Run a mode of tests/worker.py in this folder."""
    return run([ROOT / "tests" / "worker.py", mode, folder], environment, folder, ranks)


def sentence(result) -> str:
    """The last line of standard error: an error without a traceback."""
    *_, last = result.stderr.strip().splitlines()
    assert last.startswith("error: ") and "Traceback" not in result.stderr, result.stderr
    return last


def assert_mistake(arguments: list, folder: Path, part: str, status=1, **environment) -> None:
    """This program ends with the status and one sentence, which has `part`."""
    result = run(arguments, environment, folder, status=status)
    # argparse puts the program's name before it.
    found = re.findall(r"(?m)^(?:\S+\.py: )?error: .*", result.stderr)
    assert len(found) == 1 and part in found[0], result.stderr
    assert "Traceback" not in result.stderr, result.stderr


def script_after(code: str) -> list[str]:
    """Arguments of a Python that runs train_gpt.py after this code."""
    path = str(ROOT / "train_gpt.py")
    return ["-c", f"import runpy; {code}; runpy.run_path({path!r}, run_name='__main__')"]


def processes_in(folder: Path) -> list[str]:
    """The processes whose working folder is `folder` or below it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if Path(os.readlink(path)).is_relative_to(folder):
                found.append(path.parent.name)
    return found


@pytest.fixture
def nothing_is_left_running(tmp_path):
    """After each test its processes end by themselves."""
    yield
    deadline = time.monotonic() + 60
    while processes_in(tmp_path):
        assert time.monotonic() < deadline, processes_in(tmp_path)
        time.sleep(0.1)


@pytest.fixture
def script(tmp_path, env):
    """A function that runs train_gpt.py in an empty folder as a tiny run with changed knobs."""

    def go(*arguments, status=0, **changes) -> subprocess.CompletedProcess:
        return run([ROOT / "train_gpt.py", *arguments], env(**changes), tmp_path, status=status)

    return go


@pytest.fixture(scope="session")
def sweep_knobs(env):
    return env(RUN_ID="t", TRAIN_LOG_EVERY=2, VAL_LOSS_EVERY=4, EVAL_STRIDE=32, LATE_QAT=1)


@pytest.fixture(scope="session")
def swept(sweep_knobs, tmp_path_factory):
    """The folder of a finished sweep of two learning rates with two seeds; out.txt is its output."""
    folder = tmp_path_factory.mktemp("sweep")
    command = [ROOT / "tools" / "sweep.py", "--", warm_python.python(), ROOT / "train_gpt.py"]
    knobs = {**sweep_knobs, "SEEDS": "1 2", "GRID": "MATRIX_LR=0.005,0.025"}
    (folder / "out.txt").write_text(run(command, knobs, folder).stdout)
    return folder


@pytest.fixture
def copied(swept, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(swept, tmp_path / "sweep")
