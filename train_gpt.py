"""Train, export, reload and score a small language model for the Parameter Golf challenge, in one
file.

The challenge: the fewest bits per byte on FineWeb validation text, by a model whose code plus
compressed weights fit in 16,000,000 bytes and which trains in 600 seconds on 8 x H100. This script
trains a transformer whose matrices are stored in three 3-D "parameter banks", with Parallel Muon
(arXiv:2511.07464), and scores its entropy-coded artifact.

    torchrun --standalone --nproc_per_node=8 train_gpt.py      # the full run, with every knob at its default
    python train_gpt.py                                        # the same mathematics on one GPU or on a CPU
    python train_gpt.py --help                                 # every knob is an environment variable

Data flow, in the order of the sections below:

    shards (n,) uint16 -> loader x, y (B, T) -> GPT -> loss () -> backward -> local gradients
      banks (R, a, b), padded to S*r rows: reduce-scatter in the node -> (r, a, b) -> all-reduce over the nodes ->
      momentum -> Newton-Schulz -> fp32 master rows -> all-gather in the node, in the compute dtype
      other parameters: one flat all-reduce -> AdamW;  EMA of the owned rows
    EMA -> one (out, in) matrix per bank row -> quantised codes + scales -> coder -> artifact bytes
    artifact -> dequantise -> banks -> GPT -> nats per token -> bits per byte

Shapes: B sequences, T tokens, D width, H heads, K key/value heads, E head dimension, V vocabulary,
L layers, W ranks, S ranks of a node, R rows of a bank, r rows of a bank that one rank owns. "#399"
is pull request 399 of the challenge's repository."""

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import fcntl
import functools
import gc
import hashlib
import json
import linecache
import lzma
import math
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import struct
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


def complain(sentence: str) -> None:
    """Print an error. A mistake usually fails all ranks of a node: the first prints, and its
    launcher ends the others."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(5)  # if no launcher has ended this rank by then, no other rank has failed
    print(f"error: {sentence}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def importing(requirements: str) -> Iterator[None]:
    """A missing package, or Ctrl-C in the seconds that torch takes, ends the program with one
    sentence."""
    try:
        yield
    except ImportError as error:
        activate = "run `source .venv/bin/activate`, or " if sys.prefix == sys.base_prefix else ""
        complain(f"{error}: {activate}`pip install -r {requirements}`")
        sys.exit(1)
    except KeyboardInterrupt:
        complain("interrupted by Ctrl-C")
        sys.exit(130)


with importing("requirements.txt"):
    import numpy as np
    import sentencepiece
    import torch
    import torch.distributed as dist
    import torch.distributed.nn  # noqa: F401  imported after a group exists, it would keep that group alive
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.distributed.device_mesh import init_device_mesh

SUBMISSION_CAP = 16_000_000  # bytes of code plus artifact, by the rules of the challenge
TRAINING_CAP = 600.0  # seconds, by the same rules
# This script as people read it; a self-extracting copy (tools/pack_code.py) brings it in this
# global.
SOURCE = globals().get("SOURCE") or Path(__file__).read_bytes()


class UserError(ValueError):
    """An error the user can fix: one sentence with the variable or file, what was found and what to
    do."""


def require(condition: object, sentence: str) -> None:
    """Raise UserError(sentence) unless the condition holds."""
    if not condition:
        raise UserError(sentence)


def reason(error: BaseException) -> str:
    """The first line of an exception's message, after its type unless it is a UserError or an
    OSError."""
    # An OSError's text also has the number and the file
    message = str(getattr(error, "strerror", None) or error)
    line = next(iter(message.strip().splitlines()), "")[:300]
    return line if isinstance(error, UserError | OSError) else f"{type(error).__name__}: {line}"


@contextlib.contextmanager
def explaining(what: str, *errors: type[Exception], advice: str) -> Iterator[None]:
    """Turn these errors into a UserError: what failed, why, and what to do."""
    try:
        yield
    except errors as error:
        raise UserError(f"{what}: {reason(error)}; {advice}") from error


def writing(path: str | Path) -> contextlib.AbstractContextManager:
    """Turn a failed write (folder not writable, disk full) into a UserError."""
    return explaining(
        f"cannot write {path}", OSError, advice="free space or choose a writable folder"
    )


def run_program(main: Callable[[], object]) -> None:
    """Call a program's `main`. A user's mistake, a missing package or Ctrl-C ends it with one
    sentence."""
    try:
        with importing("requirements-dev.txt"):
            main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        sys.exit(f"error: cannot use {error.filename or 'a file'}: {reason(error)}; check the path")


# ---- Hyperparameters: each knob is declared once, with type, default, help text, role and bounds -
# The artifact stores the knobs of "model" and "evaluation"; those of "evaluation" and "run" may
# change on resume.
ROLES = ("training", "model", "evaluation", "run")
COMPILE = ("auto", "0", "1", "train")
# Of attention, in the order in which a GPU tries them
KERNELS = ("fa3", "cudnn", "flash", "mem_efficient", "math")
# Up to this length plain products are faster on a CPU than torch's kernel, 2.6 times at 128
PLAIN_ATTENTION = 128
# Up to this width of a head torch's CPU kernel is twice as fast in fp32 as in bf16 (without AMX)
SMALL_HEAD = 32


def knob(default, text: str, role="training", **limits):
    """An environment variable. Limits: `low`, `high` (inclusive), `choices`, or another knob's
    name."""
    assert role in ROLES and limits.keys() <= {
        "low",
        "high",
        "choices",
        "multiple_of",
        "at_most",
        "section",
    }
    return dataclasses.field(default=default, metadata={"text": text, "role": role, **limits})


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """All knobs: #399's run, and what measured better since (records/published.env). UserError if
    impossible."""

    # fmt: off
    data_path: str = knob("./data/datasets/fineweb10B_sp1024", "folder of the shards", "run", section="Data")
    tokenizer_path: str = knob("./data/tokenizers/fineweb_1024_bpe.model", "SentencePiece model of the shards", "run")
    vocab_size: int = knob(1024, "pieces of the tokenizer", "model", low=4, high=65536)
    shuffle_seed: int = knob(1, "seed of the per-epoch shuffle, used together with SEED; 0: shard order (#399)", low=0)

    num_layers: int = knob(11, "transformer layers", "model", low=1, high=256, section="Model")
    model_dim: int = knob(512, "width D of the residual stream", "model", low=8, multiple_of="num_heads")
    num_heads: int = knob(8, "query heads", "model", low=1, multiple_of="num_kv_heads")
    num_kv_heads: int = knob(4, "key/value heads, each shared by NUM_HEADS / NUM_KV_HEADS query heads", "model", low=1)
    mlp_mult: float = knob(3.0, "hidden width of the MLP as a multiple of MODEL_DIM", "model", low=0.1)
    mlp_slope: float = knob(0.5, "negative slope of the squared leaky ReLU; 0: relu^2 (#399)", "model", low=0, high=1)
    skip_gates: bool = knob(True, "U-Net skips with sigmoid gates, initially 0.18; 0: scales, initially 1", "model")
    loop_visits: int = knob(1, "visits of the layers of the loop; 1: no depth recurrence", "model", low=1, high=16)
    loop_first: int = knob(3, "first layer of the loop", "model", low=0)
    loop_layers: int = knob(3, "layers of the loop", "model", low=0)
    lanes_last_n: int = knob(0, "last layers, with two parallel lanes", "model", low=0, at_most="num_layers")
    attn_gate: bool = knob(False, "a gate per head, from 12 dimensions of its input, on attention's output", "model")
    doc_attention: bool = knob(False, "attention sees only the position's own document", "model")
    tie_embeddings: bool = knob(True, "one matrix is both token embedding and output head; 0 is not supported")
    tied_embed_init_std: float = knob(0.005, "standard deviation of the initial embedding", low=0)
    logit_softcap: float = knob(30.0, "logits are c * tanh(logits / c)", "model", low=1e-3)
    qk_gain_init: float = knob(1.5, "initial value of the learned gain per query head")
    rope_base: float = knob(10000.0, "base of the rotary frequencies; not rescaled with the length", "model", low=1)
    rope_dims: int = knob(16, "rotated dimensions per head; 0: all", "model", low=0)
    ln_scale: bool = knob(True, "scale the input of each sublayer by 1/sqrt(layer + 1)", "model")
    xsa_last_n: int = knob(4, "last layers, with exclusive self-attention", "model", low=0, at_most="num_layers")
    bigram_vocab_size: int = knob(2048, "buckets of the hashed bigram embedding; 0: none", "model", low=0)
    bigram_dim: int = knob(128, "width of the hashed bigram embedding", "model", low=1)

    train_batch_tokens: int = knob(786_432, "tokens per step", low=1, multiple_of="train_seq_len", section="Batch")
    train_seq_len: int = knob(2048, "tokens T of a sequence", low=2, high=1 << 20, multiple_of="short_seq_parts")
    short_seq_parts: int = knob(4, "cut sequences into n parts for the first 40 % of the run; 1: never (#399)", low=1)
    micro_batch_tokens: int = knob(0, "tokens per forward of a rank; 0: 98,304 on a GPU, 16,384 on a CPU", "run", low=0)

    iterations: int = knob(9000, "steps, unless the wall clock ends the run first", "run", low=0, section="Schedule")
    max_wallclock_seconds: float = knob(TRAINING_CAP, "limit of training, GPTQ included; 0: none", "run", low=0)
    warmup_steps: int = knob(20, "untimed warm-up steps; state is restored afterwards", "run", low=0)
    warmdown_iters: int = knob(3000, "length of the linear warmdown in steps; at most half of the run", low=0)
    warmdown_frac: float = knob(0.0, "the same as a fraction of the run; 0: WARMDOWN_ITERS", low=0, high=1)
    min_lr: float = knob(0.0, "learning rate at the end of the warmdown, as a fraction of the peak", low=0, high=1)
    loop_start: float = knob(0.35, "fraction of the run after which the loop is visited repeatedly", low=0, high=1)

    matrix_lr: float = knob(0.025, "Muon learning rate of the banks", low=0, section="Optimizer")
    scalar_lr: float = knob(0.025, "Adam learning rate of gains, gates and the bigram projection", low=0)
    tied_embed_lr: float = knob(0.035, "Adam learning rate of the token and bigram embeddings", low=0)
    muon_momentum: float = knob(0.99, "Nesterov momentum", low=0, high=1)
    muon_momentum_warmup_start: float = knob(0.92, "momentum at step 0", low=0, high=1)
    muon_momentum_warmup_steps: int = knob(1500, "steps until MUON_MOMENTUM; at most half of the run", low=0)
    muon_backend_steps: int = knob(5, "Newton-Schulz iterations", low=1, high=50)
    muon_coeffs: str = knob("quintic", "Newton-Schulz coefficients", choices=("quintic", "polar-express"))
    muon_eq: bool = knob(True, "normalise rows before Newton-Schulz (MuonEq-R); 0: as #399")
    muon_wd: float = knob(0.04, "decoupled weight decay of the banks", low=0)
    adam_wd: float = knob(0.04, "decoupled weight decay of embeddings and the bigram projection", low=0)
    scalar_wd: float = knob(0.0, "decoupled weight decay of gains, gates and scales; #399: 0.04", low=0)
    beta1: float = knob(0.9, "decay of Adam's first moment", low=0, high=1)
    beta2: float = knob(0.95, "decay of Adam's second moment", low=0, high=1)
    adam_eps: float = knob(1e-8, "added to Adam's denominator", low=0)
    grad_clip_norm: float = knob(0.3, "maximum norm of the reduced gradient; 0: no clipping", low=0)

    ema_enabled: bool = knob(True, "export an EMA of the weights", section="Averaging and quantisation")
    ema_decay: float = knob(0.997, "EMA decay per step", low=0, high=1)
    swa_enabled: bool = knob(False, "export a plain average over the end of the warmdown instead")
    swa_every: int = knob(50, "steps between two samples of that average", low=1)
    late_qat: bool = knob(True, "train through the export's rounding (straight-through) at the end of the warmdown")
    qat_threshold: float = knob(0.1, "late QAT starts below this fraction of the peak learning rate", low=0, high=1)
    row_range: str = knob("sdclip", "range of a row's codes, or #399's rule", choices=("sdclip", "published"))
    gptq_batches: int = knob(4, "training batches for GPTQ, within the wall clock; 0: plain rounding", "run", low=0)
    target_bytes: int = knob(SUBMISSION_CAP, "widen the steps until code and artifact fit; 0: never", "run", low=0)
    compressor: str = knob("ans", "coder of the artifact", "run", choices=("ans", "lzma"))

    eval_seq_len: int = knob(2048, "tokens per window", "evaluation", low=2, high=1 << 20, section="Evaluation")
    eval_stride: int = knob(64, "new tokens per sliding window", "evaluation", low=1, at_most="eval_seq_len")
    eval_mode: str = knob("sliding", "sliding windows, or one pass in a band", "run", choices=("sliding", "banded"))
    eval_documents: bool = knob(False, "score each document alone instead of the packed stream", "run")
    val_batch_size: int = knob(524_288, "tokens per evaluation batch over all ranks", "run", low=1)
    val_loss_every: int = knob(1000, "steps between validations; 0: only at the end", "run", low=0)
    eval_max_seconds: float = knob(0.0, "limit of test-time training; then weights stay fixed; 0: none", "run", low=0)
    ttt_enabled: bool = knob(False, "a third score, with score-first test-time training", "run")
    ttt_mode: str = knob("sgd", "all weights per chunk, or low rank per document", "run", choices=("sgd", "lora"))
    ttt_chunk_tokens: int = knob(32_768, "targets scored before SGD trains on them", "run", low=2)
    ttt_epochs: int = knob(3, "SGD steps per chunk", "run", low=1)
    ttt_lr: float = knob(0.002, "SGD learning rate; cosine to 0 at the last chunk", "run", low=0)
    ttt_momentum: float = knob(0.9, "SGD momentum", "run", low=0, high=1)
    ttt_lora_rank: int = knob(80, "rank of the low-rank changes", "run", low=1)
    ttt_lora_alpha: float = knob(144.0, "the changes are multiplied by this, divided by the rank", "run", low=0)
    ttt_lora_chunk: int = knob(48, "targets per AdamW step; at most 8 until 256 and 24 until 2,000", "run", low=1)
    ttt_lora_lr: float = knob(1e-4, "AdamW learning rate of the low-rank changes", "run", low=0)
    ttt_lora_wd: float = knob(0.5, "AdamW weight decay of the low-rank changes", "run", low=0)
    eval_only: str = knob("", "artifact to load and score; nothing is trained", "run")

    run_id: str = knob("", "name of the log, logs/<RUN_ID>.txt and .jsonl; empty: date and time", section="Run")
    seed: int = knob(1337, "initialisation and data order", low=0)
    train_log_every: int = knob(200, "steps between two lines of the log", "run", low=1)
    checkpoint_every: str = knob("", "checkpoint interval: `500` steps or `60s`; empty: none", "run")
    resume: str = knob("", "auto: continue from the newest complete checkpoint of RUN_ID; or a checkpoint file", "run")
    shard_ranks: int = knob(0, "ranks that divide a bank's rows; 0: those of a node, LOCAL_WORLD_SIZE", "run", low=0)
    profile: str = knob("", "folder for a torch.profiler trace of steps 4 to 8; empty: none", "run")
    deterministic: bool = knob(False, "repeat a run on a GPU bit for bit, more slowly; a CPU always does", "run")
    compute_dtype: str = knob("auto", "auto: bfloat16 if it is fast", "run", choices=("auto", "bfloat16", "float32"))
    device: str = knob("auto", "auto: cuda if there is one", "run", choices=("auto", "cuda", "cpu"))
    attention: str = knob("auto", "attention kernel; auto: the first that runs", "run", choices=("auto", *KERNELS))
    compile: str = knob("auto", "auto: on a CPU with g++ and enough text; train: no scores", "run", choices=COMPILE)
    fused_mlp: bool = knob(False, "the MLP's activation inside its matrix products, by a Triton kernel", "run")
    # fmt: on

    @classmethod
    def from_env(cls, environ: dict[str, str]) -> "Hyperparameters":
        """The knobs set in `environ`, all others at their defaults. Raises UserError naming the
        variable."""
        wrong = misspelt(environ, [knob.name.upper() for knob in KNOBS])
        require(not wrong, wrong)
        switch = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
            ("0", "false", "no", "off"), False
        )
        values = {}
        for knob in KNOBS:
            name = knob.name.upper()
            text = environ.get(name, str(knob.default)).strip()
            try:
                values[knob.name] = switch[text.lower()] if knob.type is bool else knob.type(text)
            except (ValueError, KeyError):
                kind = {int: "a whole number", float: "a number", bool: "a switch, 0 or 1"}[
                    knob.type
                ]
                raise UserError(
                    f"{name}={text!r} is not {kind}: set for example {name}={knob.default}"
                ) from None
        return cls(**values)

    def __post_init__(self) -> None:
        for field in KNOBS:
            name, value = field.name.upper(), getattr(self, field.name)
            low, high, choices = map(field.metadata.get, ("low", "high", "choices"))
            require(
                not isinstance(value, float) or math.isfinite(value),
                f"{name}={value} is not a finite number",
            )
            require(low is None or value >= low, f"{name}={value} is below its minimum {low}")
            require(high is None or value <= high, f"{name}={value} is above its maximum {high}")
            require(
                choices is None or value in choices,
                f"{name}={value!r} is not one of {', '.join(choices or ())}",
            )
        wrong = {"multiple_of": "is not a multiple of", "at_most": "exceeds"}
        for field in KNOBS:  # after their bounds: a divisor must not be 0
            for key in wrong.keys() & field.metadata.keys():
                value, other = getattr(self, field.name), field.metadata[key]
                limit = getattr(self, other)
                holds = value % limit == 0 if key == "multiple_of" else value <= limit
                require(holds, f"{field.name.upper()}={value} {wrong[key]} {other.upper()}={limit}")
        require(
            self.head_dim % 2 == 0,
            f"MODEL_DIM / NUM_HEADS = {self.head_dim} is odd; rotary embeddings need pairs",
        )
        even = self.rope_dims % 2 == 0 and self.rope_dims <= self.head_dim
        require(
            even,
            f"ROPE_DIMS={self.rope_dims} must be even and at most MODEL_DIM / NUM_HEADS = {self.head_dim}",
        )
        require(
            self.tie_embeddings,
            "TIE_EMBEDDINGS=0 is not supported: the head is the token embedding; unset it",
        )
        require(
            self.bigram_vocab_size != 1,
            "BIGRAM_VOCAB_SIZE=1 has only the bucket for starts: set 0 or at least 2",
        )
        apart = (
            self.loop_visits == 1
            or self.loop_first + self.loop_layers <= self.num_layers - self.lanes_last_n
        )
        require(
            apart,
            "LOOP_FIRST + LOOP_LAYERS exceeds NUM_LAYERS - LANES_LAST_N: the loop must end before the lanes",
        )
        chunk = self.ttt_mode == "sgd" or self.ttt_lora_chunk <= self.eval_seq_len
        require(
            chunk, f"TTT_LORA_CHUNK={self.ttt_lora_chunk} exceeds EVAL_SEQ_LEN={self.eval_seq_len}"
        )
        interval = f"CHECKPOINT_EVERY={self.checkpoint_every!r} is neither a number of steps (500) nor of seconds (60s)"
        require(re.fullmatch(r"([1-9]\d*s?)?", self.checkpoint_every), interval)
        plain = "/" not in self.run_id and not self.run_id.startswith(".")
        require(
            plain,
            f"RUN_ID={self.run_id} is no file name: it must not have a slash or begin with a dot",
        )
        resume = self.resume in ("", "auto") or self.resume.endswith(".safetensors")
        require(
            resume,
            f"RESUME={self.resume} is neither auto nor a checkpoint, step_<N>.safetensors: set RESUME=auto",
        )
        named = self.run_id or not (self.checkpoint_every or self.resume)
        require(
            named,
            "CHECKPOINT_EVERY and RESUME need a RUN_ID to find the checkpoints again: set one",
        )
        both = self.ema_enabled and self.swa_enabled
        require(
            not both,
            "EMA_ENABLED=1 and SWA_ENABLED=1 both choose the exported weights: set one of them to 0",
        )

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    def visits(self, looping: bool = True) -> tuple[int, ...]:
        """The layers in the order of a forward: each once, or those of the loop LOOP_VISITS times
        (#1517)."""
        layers = tuple(range(self.num_layers))
        end = self.loop_first + self.loop_layers
        return (
            layers[:end]
            + layers[self.loop_first : end] * (self.loop_visits - 1) * looping
            + layers[end:]
        )

    def describe(self) -> str:
        """One `name=value` per line for the log; a leading * marks a value that differs from the
        default."""
        values = zip(KNOBS, dataclasses.astuple(self), strict=True)
        return "\n".join(
            f"{' ' if value == k.default else '*'} {k.name.upper()}={value}" for k, value in values
        )


KNOBS = dataclasses.fields(Hyperparameters)


def misspelt(environ: Iterable[str], known: list[str]) -> str:
    """A sentence about the first variable that is nearly one of the known ones, or "". Machines set
    MODEL_DIR, DEVICES and the like, so a short name with another letter is not near, nor is one
    word with more letters."""
    for name in sorted(set(environ) - set(known)):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.905)
        near = [knob for knob in near if "_" in name or not name.startswith(knob)]
        # Two letters in the other order
        near += [knob for knob in known if sorted(knob) == sorted(name)]
        near += [knob for knob in known if "_" in name and knob.startswith(f"{name}_")]
        if near:
            return f"{name} is set but is not a knob; did you mean {near[0]}? If it is not for this program, unset it"
    return ""


def knobs_with(*roles: str) -> tuple[str, ...]:
    """Names of the knobs that have one of these roles, in their order."""
    return tuple(knob.name for knob in KNOBS if knob.metadata["role"] in roles)


def knob_help() -> str:
    """The table of --help: every knob with default, meaning and bounds."""
    lines = []
    for knob in KNOBS:
        meta = knob.metadata
        default = int(knob.default) if knob.type is bool else knob.default
        signs = {"low": ">=", "high": "<=", "multiple_of": "multiple of", "at_most": "<="}
        bounds = [f"{sign} {str(meta[key]).upper()}" for key, sign in signs.items() if key in meta]
        limits = " | ".join(meta.get("choices", ())) or ", ".join(bounds)
        lines += [f"\n{meta['section']}"] if "section" in meta else []
        lines.append(
            f"  {knob.name.upper()}={default}\n      {meta['text']}{f'  [{limits}]' if limits else ''}"
        )
    return "\n".join(lines)


# ---- Data: shards of uint16 tokens, the training loader, the validation stream with its byte counts
# Int32: magic, version, number of tokens, zeros
SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_INTS = 20240520, 1, 256
SHARD_HEADER_BYTES = 4 * SHARD_HEADER_INTS
BOS = 1  # starts every document of the challenge's data
MAX_FILE = 1 << 28  # bytes; tokenizers, manifests and artifacts are smaller
MAX_VALIDATION = 1 << 29  # tokens, all kept in memory; the challenge has 62 million


def read_shard(path: Path) -> np.ndarray:
    """The tokens (n,) uint16 of a shard, memory-mapped. Raises UserError if its header and its
    length disagree."""
    with explaining(f"cannot read shard {path}", OSError, advice="check the file and DATA_PATH"):
        size = path.stat().st_size
        header = np.fromfile(path, dtype="<i4", count=SHARD_HEADER_INTS)
    require(
        len(header) == SHARD_HEADER_INTS,
        f"shard {path} has {size} bytes, less than a header: download it again",
    )
    magic, version, count = header[:3].tolist()
    require(
        magic == SHARD_MAGIC,
        f"shard {path} starts with {magic}, not {SHARD_MAGIC}: it is not a token shard",
    )
    require(
        version == SHARD_VERSION,
        f"shard {path} has format version {version}, not {SHARD_VERSION}: convert it",
    )
    length = SHARD_HEADER_BYTES + 2 * count
    wrong = f"shard {path} has {size} bytes, but its header promises {count} tokens in {length}: download it again"
    require(count > 0 and size == length, wrong)
    return np.asarray(
        np.memmap(path, dtype="<u2", mode="r", offset=SHARD_HEADER_BYTES, shape=(count,))
    )


def require_documents(hp: Hyperparameters, path: Path, tokens: np.ndarray) -> None:
    """Raise UserError if a run that needs documents has none in these tokens of a shard."""
    needs = {
        "DOC_ATTENTION=1": hp.doc_attention,
        "EVAL_DOCUMENTS=1": hp.eval_documents,
        "TTT_MODE=lora": hp.ttt_enabled and hp.ttt_mode == "lora",
    }
    for name, needed in needs.items():
        found = f"{name} needs documents, but {path} does not mark where they begin (token {BOS})"
        require(not needed or BOS in tokens, f"{found}: tokenize the text again")


def shard_paths(folder: str | Path, split: str) -> list[Path]:
    """The shards of a split, fineweb_SPLIT_NNNNNN.bin, in order. Validation may have a sidecar,
    split "val_bytes"."""
    numbered = re.compile(rf"fineweb_{split}_\d+\.bin")
    return sorted(path for path in Path(folder).glob("*.bin") if numbered.fullmatch(path.name))


class TokenStream:
    """All shards of a split, concatenated. All are opened at the start, so crossing a shard
    boundary costs nothing."""

    def __init__(self, folder: str, split: str, vocab_size: int):
        self.vocab_size = vocab_size
        absent = f"DATA_PATH={folder} does not exist: set the folder of your shards, or run data/download_fineweb.py"
        require(Path(folder).is_dir(), absent)
        self.paths = shard_paths(folder, split)
        require(
            self.paths,
            f"DATA_PATH={folder} has no fineweb_{split}_NNNNNN.bin; run data/download_fineweb.py",
        )
        self.shards = [read_shard(path) for path in self.paths]
        self.files = [path.open("rb", buffering=0) for path in self.paths]
        self.versions = [self._version(path) for path in self.paths]
        self.ends = np.cumsum([len(shard) for shard in self.shards])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as (count,) uint16. Raises UserError for a token outside
        the vocabulary or a changed shard. Reads the file, not its mapping: after a truncation that
        would kill the process."""
        vocab = self.vocab_size
        pieces = []
        while count:
            shard = int(np.searchsorted(self.ends, start, side="right"))
            path = self.paths[shard]
            # Of the token in its shard
            offset = start - int(self.ends[shard]) + len(self.shards[shard])
            wanted = min(count, len(self.shards[shard]) - offset)
            raw = os.pread(self.files[shard].fileno(), 2 * wanted, SHARD_HEADER_BYTES + 2 * offset)
            same = len(raw) == 2 * wanted and self._version(path) == self.versions[shard]
            require(
                same,
                f"shard {path} has changed or vanished since the run began: restore it and start again",
            )
            pieces.append(np.frombuffer(raw, dtype="<u2"))
            largest = pieces[-1].max()
            require(
                largest < vocab,
                f"shard {path} holds token {largest}, but VOCAB_SIZE={vocab}: set the data's",
            )
            start += wanted
            count -= wanted
        return np.concatenate(pieces)

    @staticmethod
    def _version(path: Path) -> tuple[int, ...]:
        status = path.stat() if path.exists() else os.stat_result([0] * 10)
        return status.st_ino, status.st_size, status.st_mtime_ns


class TrainingLoader:
    """Batch number s of the run, for any s. Block k of the data is tokens [k*T, k*T + T]. Step s
    takes the next TRAIN_BATCH_TOKENS / T blocks as its rows, and rank i the i-th part of them: the
    data depend on nothing but s. The order is a permutation of all blocks per epoch, so a batch is
    not a few documents (see also #1060 and #1394)."""

    def __init__(self, hp: Hyperparameters, runtime: "Runtime"):
        self.stream = TokenStream(hp.data_path, "train", hp.vocab_size)
        require_documents(hp, self.stream.paths[0], self.stream.shards[0][: 1 << 20])
        self.seq_len = hp.train_seq_len
        self.shortest = hp.train_seq_len // hp.short_seq_parts
        self.doc_attention, self.attention = hp.doc_attention, runtime.attention
        self.seeds = (hp.shuffle_seed, hp.seed)
        self.device = runtime.device
        self.blocks = (len(self.stream) - 1) // self.seq_len
        found = f"DATA_PATH={hp.data_path} holds {len(self.stream)} training tokens"
        require(self.blocks > 0, f"{found}, too few for TRAIN_SEQ_LEN={self.seq_len}: lower it")
        ranks = runtime.comm.size
        self.step_rows = hp.train_batch_tokens // self.seq_len
        self.rows, rest = divmod(self.step_rows, ranks)
        multiple = f"TRAIN_BATCH_TOKENS={hp.train_batch_tokens} is not a multiple of {ranks * self.seq_len}"
        require(rest == 0, f"{multiple}, so {ranks} ranks cannot share its sequences evenly")
        self.first_row = runtime.comm.rank * self.rows
        self.epoch = -1  # of self.order
        # Pinning uses the thread's current GPU
        bind = torch.cuda.set_device if self.device.type == "cuda" else None
        self.reader = ThreadPoolExecutor(1, initializer=bind, initargs=(self.device,))
        self.close = functools.partial(self.reader.shutdown, cancel_futures=True)
        self.pending = {}  # futures of the next batches, by step

    def batch(self, step: int) -> Tensor:
        """This rank's rows (B, T + 1) uint16 of a step, on its device; a thread reads those of the
        next steps."""
        steps = range(step, step + 4)  # three batches ahead, so a slow read does not stall a step
        self.pending = {s: self.pending.get(s) or self.reader.submit(self._read, s) for s in steps}
        return self.pending.pop(step).result().to(self.device, non_blocking=True)

    def _read(self, step: int) -> Tensor:
        rows = torch.empty(
            self.rows, self.seq_len + 1, dtype=torch.uint16, pin_memory=self.device.type == "cuda"
        )
        for row in range(self.rows):
            epoch, place = divmod(step * self.step_rows + self.first_row + row, self.blocks)
            if epoch != self.epoch:
                generator = np.random.default_rng((*self.seeds, epoch))
                self.order = (
                    generator.permutation(self.blocks) if self.seeds[0] else np.arange(self.blocks)
                )
                self.epoch = epoch
            tokens = rows.numpy()[row] = self.stream.read(
                self.seq_len * int(self.order[place]), self.seq_len + 1
            )
            if self.doc_attention:
                check_documents(np.flatnonzero(tokens == BOS), self.shortest, self.attention)
        return rows


# TITLE, ALLCAPS, CAPNEXT, ESC: pieces 4 to 7 of a CaseOps tokenizer
CASE_OPERATORS = "\ue001\ue002\ue003\ue004"


class ByteCounter:
    """UTF-8 bytes of the text behind each token: 1 for a byte piece, else those of its text with
    U+2581 as a space, at the start only if the previous token is not a boundary (control, unknown
    or unused, such as BOS). The operators of CaseOps (data/README.md) have none: a lower-case
    letter has as many bytes as the capital that it stands for."""

    def __init__(self, tokenizer_path: str, vocab_size: int):
        setting = f"TOKENIZER_PATH={tokenizer_path}"
        require(
            Path(tokenizer_path).is_file(),
            f"{setting} is not a file: set it to the shards' SentencePiece model",
        )
        with explaining(
            f"{setting} is not a SentencePiece model",
            RuntimeError,
            advice="set it to the shards' model",
        ):
            pieces = sentencepiece.SentencePieceProcessor(
                model_proto=read_small(Path(tokenizer_path))
            )
        found = pieces.vocab_size()
        require(
            found == vocab_size,
            f"{setting} has {found} pieces, but VOCAB_SIZE={vocab_size}: they must be equal",
        )
        space = pieces.piece_to_id("\u2581") != pieces.unk_id()
        require(
            space,
            f"{setting} has no piece for U+2581, so a space could become 3 byte pieces: use another one",
        )
        ids = list(range(vocab_size))
        texts = pieces.id_to_piece(ids)
        self.boundary = np.any(
            [pieces.is_control(ids), pieces.is_unknown(ids), pieces.is_unused(ids)], axis=0
        )
        self.spaced = ~self.boundary & [text.startswith("\u2581") for text in texts]
        sizes = [len(text.removeprefix("\u2581").replace("\u2581", " ").encode()) for text in texts]
        # Without that space
        self.length = np.where(pieces.is_byte(ids), 1, sizes).astype(np.int16) * ~self.boundary
        self.caseops = texts[4:8] == list(CASE_OPERATORS)
        if self.caseops:
            self.length[4:8] = 0

    def count(self, tokens: np.ndarray) -> np.ndarray:
        """Bytes (n - 1,) of each of tokens[1:], given tokens (n,)."""
        return self.length[tokens[1:]] + (self.spaced[tokens[1:]] & ~self.boundary[tokens[:-1]])


def read_small(path: Path) -> bytes:
    """The bytes of a tokenizer, manifest or artifact. Raises UserError for a file that would fill
    the memory."""
    size = path.stat().st_size
    require(
        size <= MAX_FILE,
        f"{path} has {size} bytes, over the limit of {MAX_FILE}: it is the wrong file",
    )
    return path.read_bytes()


def sha256_of(path: str | Path) -> str:
    """The sha256 of a tokenizer, in hexadecimal."""
    return hashlib.sha256(read_small(Path(path))).hexdigest()


def check_manifest(data_path: str, tokenizer_path: str) -> bool:
    """Whether DATA_PATH/manifest.json says that the text is in our grammar of CaseOps. Raises
    UserError if it names another tokenizer or more validation text than there is."""
    path = Path(data_path, "manifest.json")
    if not path.is_file():
        return False
    with explaining(
        f"{path} is not a valid manifest", Exception, advice="make or download the data again"
    ):
        manifest = json.loads(read_small(path))
        files = {
            Path(data_path, name): int(entry["bytes"]) for name, entry in manifest["files"].items()
        }
        digest = str(manifest["tokenizer"]["sha256"])
    same = sha256_of(tokenizer_path) == digest
    require(
        same,
        f"TOKENIZER_PATH={tokenizer_path} is not the tokenizer that made the shards, by its sha256 in {path}",
    )
    for shard, size in files.items():
        whole = not shard.name.startswith("fineweb_val_") or (
            shard.is_file() and shard.stat().st_size == size
        )
        require(
            whole, f"{shard} is missing or not of {size} bytes as {path} says: download it again"
        )
    return manifest["tokenizer"].get("caseops") is True


def read_sidecar(data_path: str, count: int) -> np.ndarray | None:
    """The exact bytes of each of the `count` validation tokens, uint16, from
    fineweb_val_bytes_NNNNNN.bin beside the shards; None without such files. Raises UserError if
    they hold another number."""
    if not shard_paths(data_path, "val_bytes"):
        return None
    stream = TokenStream(data_path, "val_bytes", 1 << 16)
    found = f"{data_path}/fineweb_val_bytes_*.bin holds the bytes of {len(stream)} tokens, but the shards hold {count}"
    require(len(stream) == count, f"{found}: download both again")
    nbytes = stream.read(0, count)
    require(
        0 < nbytes.max() < 1 << 15,
        f"{stream.paths[0]}: {nbytes.max()} bytes for a token are impossible",
    )
    return nbytes


def count_bytes(hp: Hyperparameters, tokens: np.ndarray) -> tuple[np.ndarray, str]:
    """Bytes (n,) int16 of each of tokens[1:], given tokens (n + 1,), and a note for the log. A
    sidecar is the truth; without one the tokenizer counts. Raises UserError if neither can know the
    bytes."""
    counter = ByteCounter(hp.tokenizer_path, hp.vocab_size)
    our_grammar = check_manifest(hp.data_path, hp.tokenizer_path)
    counted = counter.count(tokens)
    exact = read_sidecar(hp.data_path, len(tokens))
    if exact is None:
        unknown = f"TOKENIZER_PATH={hp.tokenizer_path} has CaseOps operators, but DATA_PATH={hp.data_path} has neither"
        files = "fineweb_val_bytes_NNNNNN.bin nor the manifest.json of data/tokenize_text.py"
        require(
            our_grammar or not counter.caseops,
            f"{unknown} {files}, so the bytes are unknown: get one of them",
        )
        return counted, ""
    nbytes = exact[1:].astype(np.int16)
    total, other = int(nbytes.sum(dtype=np.int64)), int(counted.sum(dtype=np.int64))
    differs = f"fineweb_val_bytes_*.bin says {total} bytes, which the score uses; the tokenizer counts {other}"
    return nbytes, differs * (total != other)


class Validation:
    """The validation stream on the device: tokens (n + 1,) int32 and the bytes (n,) int16 of its n
    targets."""

    def __init__(self, hp: Hyperparameters, device: torch.device):
        stream = TokenStream(hp.data_path, "val", hp.vocab_size)
        self.targets = len(stream) - 1
        found = f"DATA_PATH={hp.data_path} holds {len(stream)} validation tokens"
        require(len(stream) <= MAX_VALIDATION, f"{found}, over the limit of {MAX_VALIDATION}")
        require(
            self.targets >= hp.eval_seq_len,
            f"{found}, too few for EVAL_SEQ_LEN={hp.eval_seq_len}: lower it",
        )
        tokens = stream.read(0, len(stream))
        require_documents(hp, stream.paths[0], tokens)
        nbytes, self.note = count_bytes(hp, tokens)
        self.nbytes = torch.from_numpy(nbytes).to(device)
        self.total_bytes = int(self.nbytes.sum(dtype=torch.int64))
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        # Where they begin, on the host
        self.documents = np.union1d([0], np.flatnonzero(tokens[:-1] == BOS))

    def spans(self, documents: bool) -> np.ndarray:
        """[begin, end) (S, 2) of the inputs that may see each other: all, or each document with its
        BOS."""
        begins = self.documents if documents else np.array([0])
        return np.stack((begins, np.append(begins[1:], self.targets)), axis=1)


# ---- Table of matrices: initialisation, forward, optimizer, quantiser and export all read it -----
class Matrix(NamedTuple):
    """One kind of matrix (out, in) that the artifact stores as codes; all other tensors are fp16.
    `bits` only bounds the codes; their bytes, about 4.6 bits each, follow from the step, clip /
    (2^(bits-1) - 1) deviations."""

    name: str  # in the forward and in the artifact
    bank: str  # the 3-D parameter that stores it; "" for a parameter of its own
    # The first matrix that multiplies the same activations, for one Hessian; "" if rows are looked
    # up
    reads: str
    bits: int = 8  # of its codes ...
    clip: float = 20.0  # ... which range over this many standard deviations of a row
    out: str = "dim"  # its outputs, "dim", "kv" or "mlp" ...
    into: str = "dim"  # ... and inputs
    transposed: bool = False  # stored as (in, out)
    zero: bool = False  # initially zero (projections back to the stream) instead of orthogonal
    gain: str = ""  # name of the learned gain (L, out) of its outputs
    normed: bool = False  # reads the normalised stream, scaled by 1/sqrt(layer + 1)


# Three banks of 2L rows: 8 ranks pad 22 rows to 24. The transposed down projection may lie beside
# the up projection.
MATRICES = (
    Matrix("q", "qo_bank", reads="q", normed=True),
    Matrix("out", "qo_bank", reads="out", zero=True, gain="attn_scale"),
    Matrix("k", "kv_bank", reads="q", out="kv", normed=True),
    Matrix("v", "kv_bank", reads="q", out="kv", normed=True),
    Matrix("up", "mlp_bank", reads="up", out="mlp", normed=True),
    Matrix(
        "down", "mlp_bank", reads="down", into="mlp", transposed=True, zero=True, gain="mlp_scale"
    ),
)
# Rounding the token embedding, a fiftieth of the weights, costs as much as all others at ten times
# the step.
TABLES = (
    Matrix("tok_emb", "", "tok_emb", bits=10, clip=8.0),
    Matrix("bigram_emb", "", "", bits=8, clip=16.0),
    Matrix("bigram_proj", "", "bigram_proj", bits=9, clip=12.0),
)
BANKS = {
    bank: [kind for kind in MATRICES if kind.bank == bank]
    for bank in ("qo_bank", "kv_bank", "mlp_bank")
}
# Low-rank changes: NAME.a (B, L, rank, in), NAME.b (B, L, out, rank); L is 1 for the head
Adapter = dict[str, Tensor]


def matrix_shape(kind: Matrix, hp: Hyperparameters) -> tuple[int, int]:
    """(out, in)."""
    size = {
        "dim": hp.model_dim,
        "kv": hp.num_kv_heads * hp.head_dim,
        "mlp": int(hp.mlp_mult * hp.model_dim),
    }
    return size[kind.out], size[kind.into]


def bank_shape(bank: str, hp: Hyperparameters) -> tuple[int, int, int]:
    """(R, a, b). All matrices of a bank have one shape as stored."""
    ((a, b),) = {matrix_shape(kind, hp)[:: -1 if kind.transposed else 1] for kind in BANKS[bank]}
    return len(BANKS[bank]) * hp.num_layers, a, b


def bank_part(bank: Tensor, kind: Matrix) -> Tensor:
    """The matrices (L, out, in) of one kind: a view of their bank (R, a, b)."""
    kinds = BANKS[kind.bank]
    matrices = bank.unflatten(0, (len(kinds), -1)).unbind(0)[kinds.index(kind)]
    return matrices.mT if kind.transposed else matrices


# ---- Model ---------------------------------------------------------------------------------------
GATE_INPUTS = 12  # first dimensions of the stream, which attention's output gate reads


def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2)) over the last dimension, in x's dtype."""
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Partial RoPE (arXiv:2104.09864): rotate the first 2*cos.size(-1) dimensions of x (B, T, H,
    E)."""
    half = cos.size(-1)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos + b * sin, b * cos - a * sin, rest), dim=-1)


class NormRotate(torch.autograd.Function):
    """rms_norm of each head of x (B, T, H, E), times gain (H or 1, 1), rotated. Its backward is
    written out: the gain's gradient sums what the norm's gradient needs, while autograd would keep
    and read another tensor like x."""

    @staticmethod
    def forward(ctx, x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain, cos, sin)
        scale = (x.float().square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()
        return (rotate(x.float(), cos, sin) * (gain * scale)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, gain, cos, sin = ctx.saved_tensors
        scale = (x.float().square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()
        back = rotate(grad.float(), cos, -sin)
        along = (back * x.float()).sum(dim=-1, keepdim=True) * scale  # (B, T, H, 1)
        dx = gain * scale * (back - x.float() * (scale * along / x.size(-1)))
        return dx.to(x.dtype), along.sum((0, 1)) if ctx.needs_input_grad[1] else None, None, None


def xsa(y: Tensor, v: Tensor) -> Tensor:
    """Exclusive self-attention (#265): remove from y (B, T, H, E) its part along the own value in v
    (B, T, K, E)."""
    grouped = y.unflatten(2, (v.size(2), -1)).float()  # (B, T, K, H/K, E)
    v = v.unsqueeze(3)
    square = v.float().square().sum(dim=-1, keepdim=True).clamp(min=1e-24)
    return (
        (grouped - (grouped * v).sum(dim=-1, keepdim=True) / square * v).to(y.dtype).flatten(2, 3)
    )


class GPT(nn.Module):
    """The banked transformer. Banks, stream and matrix products use `dtype`; other parameters and
    the loss are fp32. The first half of the `visits` feeds the second half through U-Net skips with
    sigmoid gates (NanoGPT speedrun). Each layer mixes the embedding stream back in. The MLP's
    activation is a squared leaky ReLU (#1948). In layers with two lanes (#1204, #1529) attention
    reads one, the MLP reads the other, and both add to both. `qat` rounds the banks as a plain
    export does; eagerly, `hessians` sums what matrices read."""

    def __init__(
        self,
        hp: Hyperparameters,
        attend: Callable,
        dtype: torch.dtype,
        fused_mlp: Callable | None = None,
    ):
        super().__init__()
        self.hp, self.attend, self.dtype, self.fused_mlp = hp, attend, dtype, fused_mlp
        self.qat = False
        self.visits = hp.visits()  # layers, in order
        self.hessians: dict[str, Tensor] = {}  # by matrix name: sums of x^T x (L or 1, in, in)
        layers = hp.num_layers
        dim = hp.model_dim
        for bank in BANKS:
            self.register_parameter(
                bank, nn.Parameter(torch.zeros(bank_shape(bank, hp), dtype=dtype))
            )
        self.tok_emb = nn.Parameter(torch.zeros(hp.vocab_size, dim))
        if hp.bigram_vocab_size:
            self.bigram_emb = nn.Parameter(torch.zeros(hp.bigram_vocab_size, hp.bigram_dim))
            self.bigram_proj = nn.Parameter(torch.zeros(dim, hp.bigram_dim))
            self.bigram_scale = nn.Parameter(torch.tensor(0.05))
        self.smear_gate = nn.Parameter(torch.zeros(dim))
        self.skip_scale = nn.Parameter(
            torch.full((len(self.visits) // 2, dim), -1.5 if hp.skip_gates else 1.0)
        )
        # (L, 2, D)
        self.resid_mix = nn.Parameter(
            torch.tensor([1.0, 0.0])[None, :, None].repeat(layers, 1, dim)
        )
        self.q_gain = nn.Parameter(torch.full((layers, hp.num_heads), hp.qk_gain_init))
        self.attn_scale = nn.Parameter(torch.ones(layers, dim))
        self.mlp_scale = nn.Parameter(torch.ones(layers, dim))
        if hp.attn_gate:
            self.attn_gate = nn.Parameter(torch.zeros(layers, hp.num_heads, min(GATE_INPUTS, dim)))
        if hp.lanes_last_n:  # (layer, lane, what it is the sum of: lane, attention, MLP)
            self.lane_mix = nn.Parameter(
                torch.tensor([1.1, 1.0, 1.0]).repeat(hp.lanes_last_n, 2, 1)
            )
        rotated = hp.rope_dims or hp.head_dim
        frequency = hp.rope_base ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
        longest = max(
            hp.train_seq_len,
            hp.eval_seq_len,
            sum(band_block(hp)) if hp.eval_mode == "banded" else 0,
        )
        angle = torch.arange(longest, dtype=torch.float64)[:, None, None] * frequency
        # (T, 1, rotated/2), of any T
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        depth = torch.arange(1, layers + 1).float() if hp.ln_scale else torch.ones(layers)
        self.register_buffer("layer_scale", depth.rsqrt()[:, None, None], persistent=False)

    def initialise(self, seed: int) -> dict[str, Tensor]:
        """Orthogonal matrices, zero projections back to the stream, small normal embedding. Returns
        them in fp32."""
        weights = {
            name: p.detach().to("cpu", torch.float32, copy=True)
            for name, p in self.named_parameters()
        }
        generator = torch.Generator().manual_seed(seed)
        for kind in MATRICES:
            for matrix in bank_part(weights[kind.bank], kind) if not kind.zero else ():
                nn.init.orthogonal_(matrix, generator=generator)
        weights["tok_emb"].normal_(std=self.hp.tied_embed_init_std, generator=generator)
        if self.hp.bigram_vocab_size:
            nn.init.orthogonal_(weights["bigram_proj"], generator=generator)
        self.load_state_dict(weights)
        return weights

    def forward(
        self,
        ids: Tensor,
        targets=None,
        reduction="mean",
        adapter: Adapter | None = None,
        band: int = 0,
    ):
        """ids (B, T) -> logits (B, T, V) or, of targets (B, n) for the last n positions, nats:
        their mean () or, with "none", each (B, n). Only these n positions pass through head and
        last layer, apart from keys and values. An `adapter` adds its low-rank products to those of
        the matrices. With a `band`, a position attends to itself and the band - 1 before it; then T
        - n is 0 or at least the band."""
        hp = self.hp
        weights = self.matrices()
        for name, factor in (adapter or {}).items():
            scale = hp.ttt_lora_alpha / hp.ttt_lora_rank if name.endswith(".b") else 1.0
            weights[name] = (factor * scale).to(self.dtype).unbind(1)
        x = x0 = self.embed(ids, weights)  # (B, T, D)
        # Documents (B, T), numbered
        limits = band, (ids == BOS).cumsum(dim=1) if hp.doc_attention else None
        lane = None  # the second one, (B, T, D)
        skips = []
        half = len(self.visits) // 2
        gates = self.skip_scale.sigmoid() if hp.skip_gates else self.skip_scale
        for visit, layer in enumerate(self.visits):
            if visit >= half and skips:
                x = (x + gates[visit - half] * skips.pop()).to(self.dtype)
            mixed = (self.resid_mix[layer, 0] * x + self.resid_mix[layer, 1] * x0).to(self.dtype)
            last = targets is not None and visit == len(self.visits) - 1
            first = ids.size(1) - targets.size(1) if last else 0
            if layer < hp.num_layers - hp.lanes_last_n:
                x = mixed[:, first:] + self.attention(
                    rms_norm(mixed), weights, layer, first, limits
                )
                x = x + self.mlp(x, weights, layer)
            else:
                lanes = [old[:, first:] for old in (x, x if lane is None else lane)]
                attended = self.attention(rms_norm(mixed), weights, layer, first, limits)
                change = self.mlp(lanes[1], weights, layer)
                mix = self.lane_mix[layer - hp.num_layers]  # (2, 3)
                lanes = [
                    m[0] * old + m[1] * attended + m[2] * change
                    for m, old in zip(mix, lanes, strict=True)
                ]
                x, lane = (new.to(self.dtype) for new in lanes)
            if visit < half:
                skips.append(x)
        x = x if lane is None else x + lane
        logits = self.linear(rms_norm(x), weights, 0, "tok_emb").float()
        logits = hp.logit_softcap * torch.tanh(logits / hp.logit_softcap)
        if targets is None:
            return logits
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        return nats if reduction == "mean" else nats.view_as(targets)

    def matrices(self) -> dict[str, tuple[Tensor, ...]]:
        """The (out, in) matrices by name, one per layer, in the compute dtype. Gains and layer
        scales are folded in."""
        found = {}
        for kind in MATRICES:
            bank = bank_part(getattr(self, kind.bank), kind)
            if self.qat:
                rows = bank.detach().float()
                bits, clip = code_range(kind, self.hp)
                scale = row_scales(rows, bits, clip)
                bank = bank + (to_codes(rows, scale, bits) * scale - bank).detach()
            if kind.gain:
                bank = bank * getattr(self, kind.gain)[..., None]
            if kind.normed:
                bank = bank * self.layer_scale
            found[kind.name] = bank.to(self.dtype).unbind(0)
        for kind in TABLES:
            if kind.reads and hasattr(self, kind.name):
                found[kind.name] = (getattr(self, kind.name).to(self.dtype),)
        return found

    def linear(
        self, x: Tensor, weights: dict[str, tuple[Tensor, ...]], layer: int, *names: str
    ) -> Tensor:
        """x (B, T, in) -> (B, T, out) by these matrices of the layer, joined. Only FUSED_MLP has
        its own products."""
        if names[0] in self.hessians:
            # The factor comes afterwards
            rows = (rms_norm(x) if names[0] == "up" else x).flatten(0, -2).float()
            matmul = torch.backends.cuda.matmul
            with contextlib.ExitStack() as afterwards:
                afterwards.callback(setattr, matmul, "fp32_precision", matmul.fp32_precision)
                # For tensor cores: products of bf16 numbers stay exact, sums are fp32
                matmul.fp32_precision = "tf32"
                self.hessians[names[0]][layer].addmm_(rows.mT, rows)
        matrices = [weights[name][layer] for name in names]
        y = F.linear(x, torch.cat(matrices) if len(names) > 1 else matrices[0])
        return y if len(names) > 1 else self.changed(y, x, weights, layer, names[0])

    def changed(
        self, y: Tensor, x: Tensor, weights: dict[str, tuple[Tensor, ...]], layer: int, name: str
    ) -> Tensor:
        """y (B, T, out) and, if an adapter changes this name, its low-rank product of x (B, T, in),
        row by row."""
        if f"{name}.a" not in weights:
            return y
        return y + x @ weights[f"{name}.a"][layer].mT @ weights[f"{name}.b"][layer].mT

    def embed(self, ids: Tensor, weights: dict[str, tuple[Tensor, ...]]) -> Tensor:
        """ids (B, T) -> stream (B, T, D): token and hashed bigram embedding (BigramHash),
        normalised, mixed with the previous position (SmearGate). Nothing crosses a BOS: a document
        must not depend on the previous one."""
        starts = F.pad(ids[:, 1:] == BOS, (1, 0), value=True)
        x = F.embedding(ids, self.tok_emb)
        if self.hp.bigram_vocab_size:
            buckets = self.hp.bigram_vocab_size - 1  # the last one is for starts
            hashed = ((36313 * ids) ^ (27191 * F.pad(ids[:, :-1], (1, 0)))) % buckets
            pair = F.embedding(hashed.masked_fill(starts, buckets), self.bigram_emb).to(self.dtype)
            x = x + self.bigram_scale * self.linear(pair, weights, 0, "bigram_proj")
        x = rms_norm(x)
        gate = torch.sigmoid(self.smear_gate)
        previous = F.pad(x[:, :-1], (0, 0, 1, 0)) * ~starts[..., None]
        return ((1 - gate) * x + gate * previous).to(self.dtype)

    def attention(
        self, x: Tensor, weights: dict[str, tuple[Tensor, ...]], layer: int, first: int, limits
    ) -> Tensor:
        """Causal grouped-query attention of the normalised x (B, T, D) with partial RoPE: (B, n, D)
        from `first` on. `limits` is what a position sees at most: the band or 0, and the documents
        (B, T) or None."""
        hp = self.hp
        time = x.size(1)
        heads = (-1, hp.head_dim)
        if first:
            q = self.linear(x[:, first:], weights, layer, "q").unflatten(-1, heads)  # (B, n, H, E)
            # (B, T, K, E)
            k, v = self.linear(x, weights, layer, "k", "v").unflatten(-1, heads).chunk(2, dim=2)
        # The gradient of one split is one concatenation, into which gradients are written without a
        # copy
        else:
            sizes = (hp.num_heads, hp.num_kv_heads, hp.num_kv_heads)
            q, k, v = (
                self.linear(x, weights, layer, "q", "k", "v")
                .unflatten(-1, heads)
                .split(sizes, dim=2)
            )
        k = self.changed(k.flatten(2), x, weights, layer, "k").unflatten(-1, heads)
        cos, sin = self.cos[:time], self.sin[:time]
        q = NormRotate.apply(q, self.q_gain[layer][:, None], cos[first:], sin[first:])
        k = NormRotate.apply(k, torch.ones_like(cos[:1, :, :1]), cos, sin)
        y = (attend_last if first and not limits[0] else self.attend)(q, k, v, *limits)
        if layer >= hp.num_layers - hp.xsa_last_n:
            y = xsa(y, v[:, first:])
        if hp.attn_gate:  # (#1667); initially 1/2
            # (B, n, H)
            gate = F.linear(x[:, first:, :GATE_INPUTS], self.attn_gate[layer].to(x.dtype))
            y = y * torch.sigmoid(0.5 * gate)[..., None]
        return self.linear(y.flatten(2), weights, layer, "out")

    def mlp(self, x: Tensor, weights: dict[str, tuple[Tensor, ...]], layer: int) -> Tensor:
        """The MLP of rms_norm(x), (B, n, D). Its first half is homogeneous of degree 2, so one
        factor normalises."""
        scale = 1 / (x.float().square().mean(dim=-1, keepdim=True) + 1e-6)
        if self.fused_mlp and not (self.hessians or "mlp.a" in weights):
            return self.fused_mlp(x, scale, weights["up"][layer], weights["down"][layer])
        hidden = (
            F.leaky_relu(self.linear(x, weights, layer, "up"), self.hp.mlp_slope).square() * scale
        )
        y = self.linear(hidden.to(self.dtype), weights, layer, "down")
        return self.changed(y, rms_norm(x), weights, layer, "mlp") if "mlp.a" in weights else y


# ---- Runtime: rank, device, dtype, compiler and attention kernel, each decided once and logged ---
class Comm:
    """The collectives of a group of ranks; in a group of one they copy or do nothing. Each starts
    the work and returns the function that waits for it; on a GPU the stream waits, not the host.
    Reductions are sums: the loss is divided by the global number of micro-batches beforehand."""

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None):
        self.rank, self.size, self.group = rank, size, group
        self.shard = self  # the ranks that divide the rows of the banks among them
        self.replicate = self if size == 1 else Comm()  # the ranks that own the same rows

    def split(self, shard_ranks: int, device: torch.device) -> "Comm":
        """All ranks again, on a mesh: `shard_ranks` consecutive ranks, such as a node's, divide the
        rows of the banks (hybrid sharding, arXiv:2304.11277). Blocks."""
        replicas, rest = divmod(self.size, shard_ranks)
        wrong = f"SHARD_RANKS={shard_ranks} (default: LOCAL_WORLD_SIZE) does not divide the {self.size} ranks"
        require(rest == 0, f"{wrong}: set a divisor of {self.size}")
        whole = Comm(self.rank, self.size)
        if replicas > 1:
            names, shape = ("replicate", "shard"), (replicas, shard_ranks)
            mesh = self._named(init_device_mesh, device.type, shape, mesh_dim_names=names)
            replica, place = divmod(self.rank, shard_ranks)
            whole.shard = Comm(place, shard_ranks, mesh.get_group("shard"))
            whole.replicate = Comm(replica, replicas, mesh.get_group("replicate"))
        return whole

    def all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Sum `tensor` over the ranks, in place."""
        return self._start(dist.all_reduce, tensor)

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Callable[[], None]:
        """Sum `full` (S*r, ...) over the ranks; this rank's rows arrive in `shard`. torch 2.13 has
        a new name."""
        return self._start(
            getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor), shard, full
        )

    def all_gather(self, full: Tensor, shard: Tensor) -> Callable[[], None]:
        """Collect every rank's `shard` (r, ...) in `full` (S*r, ...)."""
        return self._start(
            getattr(dist, "all_gather_single", dist.all_gather_into_tensor), full, shard
        )

    def share(self, value):
        """Rank 0's `value`, any object that can be pickled, on every rank. Blocks."""
        box = [value]
        if self.size > 1:
            self._named(dist.broadcast_object_list, box, src=0)
        return box[0]

    def _start(self, collective: Callable, out: Tensor, *source: Tensor) -> Callable[[], None]:
        if self.size == 1:
            # Shards may be views of the whole
            if source and source[0].data_ptr() != out.data_ptr():
                out.copy_(source[0])
            return lambda: None
        work = self._named(collective, out, *source, group=self.group, async_op=True)
        return lambda: self._named(work.wait)

    def _named(self, call: Callable, *arguments, **options):
        lost = f"rank {dist.get_rank()} lost a collective operation: another rank has died or cannot be reached"
        with explaining(
            lost,
            RuntimeError,
            advice="look at the first rank that reported an error, then start again",
        ):
            return call(*arguments, **options)


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Where and how this process computes. Made once by `start` and passed on."""

    comm: Comm
    device: torch.device
    dtype: torch.dtype
    compiled: bool
    attention: str
    attend: Callable[..., Tensor]
    micro_batch_tokens: int  # tokens of one forward
    notes: tuple[str, ...]  # for the log: why a choice is not the first one
    fused_mlp: Callable | None = None  # in place of the plain form

    @classmethod
    @contextlib.contextmanager
    def start(cls, hp: Hyperparameters) -> Iterator["Runtime"]:
        """Set up the process group, device, dtype and kernels; shut down cleanly when the body
        succeeds."""
        comm = Comm(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
        device = choose_device(hp.device, int(os.environ.get("LOCAL_RANK", 0)))
        on_gpu = device.type == "cuda"
        choose_deterministic(hp.deterministic or not on_gpu)
        if comm.size > 1:
            # With dead ranks (pytorch #135712)
            shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            restarts = shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
            require(
                not restarts,
                "torchrun --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: set it",
            )
            backend, gpu = ("nccl", device) if on_gpu else ("gloo", None)
            dist.init_process_group(backend, timeout=timedelta(minutes=10), device_id=gpu)
        node = int(os.environ.get("LOCAL_WORLD_SIZE", comm.size))
        # Nodes may differ in size; rank 0 decides
        comm = comm.split(comm.share(hp.shard_ranks or node), device)
        if not on_gpu:
            # Unless glibc keeps freed memory, its pages fault again in every step, which cost more
            # than the arithmetic.
            with contextlib.suppress(OSError, AttributeError):  # another C library
                # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
                for parameter, value in ((-3, 1 << 30), (-1, -1)):
                    ctypes.CDLL(None).mallopt(parameter, value)
        dtype = choose_dtype(hp.compute_dtype, device)
        compiled, missing = choose_compile(hp.compile, device)
        attention, attend, refused = choose_attention(hp, device, dtype, compiled)
        fused_mlp, unfit = choose_fused_mlp(hp, device, dtype, compiled)
        # A GPU's default is what one of 8 ranks takes of the record's batch; a CPU's fits a
        # laptop's memory.
        micro = hp.micro_batch_tokens or (98_304 if on_gpu else 16_384)
        yield cls(
            comm,
            device,
            dtype,
            compiled,
            attention,
            attend,
            micro,
            (*missing, *refused, *unfit),
            fused_mlp,
        )
        # Not in a `finally`: a barrier would wait for dead ranks. A group that stays can abort the
        # process at exit.
        if comm.size > 1:
            comm._named(dist.barrier)
            comm.shard.group = comm.replicate.group = None  # what is referred to keeps its threads
            dist.destroy_process_group()

    def synchronize(self) -> None:
        """Wait for queued device work."""
        (torch.cuda if self.device.type == "cuda" else torch.cpu).synchronize()

    def describe(self) -> str:
        """One line for the log."""
        cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        cpu = re.search(r"model name\s*: (.*)|$", cpuinfo)[1] or platform.machine()
        cpu = f"CPU {cpu}, {torch.get_num_threads()} threads"
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else cpu
        kernels = f"compute_dtype:{str(self.dtype)[6:]} attention:{self.attention} compile:{int(self.compiled)}"
        mesh = f"{self.comm.replicate.size}x{self.comm.shard.size}"
        return f"runtime: ranks:{self.comm.size} mesh:{mesh} device:{name} {kernels}"


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """This process's device: GPU number LOCAL_RANK, or the CPU if there is no GPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    require(
        torch.cuda.is_available(),
        "DEVICE=cuda, but torch finds no GPU: install a CUDA build or set DEVICE=cpu",
    )
    gpus = torch.cuda.device_count()
    require(
        local_rank < gpus,
        f"LOCAL_RANK={local_rank}, but this node has {gpus} GPU(s): set --nproc_per_node={gpus}",
    )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware has matrix units for it (Ampere and later; AMX or AVX512-BF16),
    else float32."""
    if wanted != "auto":
        return getattr(torch, wanted)
    units = [
        getattr(torch.cpu, f"_is_{unit}_supported", lambda: False)()
        for unit in ("amx_tile", "avx512_bf16")
    ]
    fast = (
        torch.cuda.get_device_capability(device) >= (8, 0) if device.type == "cuda" else any(units)
    )
    return torch.bfloat16 if fast else torch.float32


def choose_deterministic(wanted: bool) -> None:
    """Let runs repeat bit for bit. Otherwise threads add an embedding's gradients in the order in
    which they arrive."""
    torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a check that costs time
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it


def choose_compile(wanted: str, device: torch.device) -> tuple[bool, list[str]]:
    """(compile or not, notes). Without its compilers a CPU runs eagerly; for a GPU, much slower, it
    is a UserError."""
    on_gpu = device.type == "cuda"
    compilers = (
        (os.environ.get("CC", "gcc"), "clang") if on_gpu else (os.environ.get("CXX", "g++"),)
    )
    needs = {
        # Elsewhere Inductor's C++ needs an OpenMP that compilers do not bring
        "Linux": sys.platform == "linux",
        # Triton's or Inductor's choice
        f"a {'C' if on_gpu else 'C++'} compiler": any(map(shutil.which, compilers)),
        "Python.h (python3-dev)": Path(sysconfig.get_path("include"), "Python.h").exists(),
        "triton": not on_gpu or find_spec("triton") is not None,
    }
    missing = (
        ", ".join(name for name, found in needs.items() if not found)
        if wanted in ("auto", "train")
        else ""
    )
    require(
        not on_gpu or not missing,
        f"torch.compile needs {missing}: install it, or set COMPILE=0, which is slow",
    )
    return wanted != "0" and not missing, [
        f"not compiled, which is slower: {missing} is missing"
    ] * bool(missing)


def compile_whole(function: Callable, compiled: bool) -> Callable:
    """`function` (or a module) compiled as one graph per set of shapes and switches; unchanged if
    not `compiled`."""
    if not compiled:
        return function
    # Inductor's mix-order reduction (torch 2.10 on) made this model 6 ms a step slower on 8 x H100
    # (pytorch #179494).
    triton = torch._inductor.config.triton
    options = (
        {"triton.mix_order_reduction": False} if hasattr(triton, "mix_order_reduction") else None
    )
    # Training, short sequences, late QAT and the few evaluation shapes
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, dynamic=False, fullgraph=True, options=options)


# ---- Attention kernels: FlashAttention 3, torch's operators, plain products ----------------------
def visible(q: Tensor, k: Tensor, band: int, document: Tensor | None) -> Tensor:
    """Whether the last n of T positions see each of the T, (1 or B, 1, n, T): themselves and those
    before them or, with a band, the band - 1 before them; with documents (B, T), only those of the
    same one."""
    n, time = q.size(1), k.size(1)  # torch's kernels align the causal mask with the first position
    mask = torch.ones(1, 1, n, time, dtype=torch.bool, device=q.device).tril(time - n)
    mask = mask.triu(time - n - band + 1) if band else mask
    return (
        mask
        if document is None
        else mask & (document[:, None, -n:, None] == document[:, None, None])
    )


def attend_last(
    q: Tensor, k: Tensor, v: Tensor, band: int = 0, document: Tensor | None = None
) -> Tensor:
    """Causal attention of the last n of T positions, as plain products: q (B, n, H, E), k and v (B,
    T, K, E)."""
    grouped = q.unflatten(2, (k.size(2), -1))  # (B, n, K, H/K, E)
    scores = torch.einsum("bnkge,btke->bkgnt", grouped, k).float() * q.size(-1) ** -0.5
    hidden = ~visible(q, k, band, document)[:, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1).to(v.dtype)
    return torch.einsum("bkgnt,btke->bnkge", weights, v).flatten(2, 3)


def attend_chunks(
    attend: Callable, q: Tensor, k: Tensor, v: Tensor, band: int, document: Tensor | None
) -> Tensor:
    """Banded attention of the last n of T positions, T - n = 0 or >= band, chunk by chunk with the
    keys that a chunk sees. `attend` gets a band if it needs a mask."""
    batch, n, time = q.size(0), q.size(1), k.size(1)
    assert n == time or time - n >= band
    # Queries that see a whole band; the others are at the start
    whole = n if n < time else max(0, n - band)
    chunk = max(1, band // 4)  # the fastest of W/4, W/2 and W on a CPU
    spare = -whole % chunk

    def of_chunks(t: Tensor) -> Tensor:
        """What the chunks see of t (B, T, X), (B * chunks, band + chunk, X)."""
        padded = F.pad(t[:, time - whole - band :], (0, 0, 0, spare))
        return padded.unfold(1, band + chunk, chunk).mT.flatten(0, 1)

    start = [t if t is None else t[:, : n - whole] for t in (q, k, v, document)]
    y = [attend(*start[:3], 0, start[3])] if whole < n else []
    if whole:
        q = F.pad(q[:, n - whole :], (0, 0, 0, 0, 0, spare)).unflatten(1, (-1, chunk)).flatten(0, 1)
        k, v = (of_chunks(t.flatten(2)).unflatten(2, (-1, q.size(3))) for t in (k, v))
        document = None if document is None else of_chunks(document[..., None])[..., 0]
        y.append(attend(q, k, v, band, document).unflatten(0, (batch, -1)).flatten(1, 2)[:, :whole])
    return torch.cat(y, dim=1)


# The bounds for FlashAttention 3 have room for a document per this many positions of a row
DOCUMENT_POSITIONS = 32


def check_documents(begins: np.ndarray, width: int, attention: str) -> None:
    """Raise UserError if a row of `width` positions could hold more documents than `attention` has
    room for, given where they begin in the stream, (S,) in order."""
    most = (np.searchsorted(begins, begins + width) - np.arange(len(begins))).max(initial=0)
    room = width // DOCUMENT_POSITIONS if attention == "fa3" else most
    found = f"{most} documents begin within {width} positions, but with DOC_ATTENTION=1 ATTENTION=fa3 takes {room}"
    require(
        most <= room,
        f"{found}: set ATTENTION=mem_efficient, which is slower, or join short documents",
    )


def document_bounds(document: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Where documents (B, T) begin among the last n queries of each row and among all keys, int32
    (S + 1,) each. Spare ones at the end are empty. More documents than `check_documents` allows are
    an error of indexing."""
    batch, time = document.shape
    begins = document != F.pad(document[:, :-1], (1, 0), value=-1)
    number = begins.flatten().cumsum(dim=0) - 1
    keys = torch.full(
        (batch * (1 + time // DOCUMENT_POSITIONS) + 1,), batch * time, device=document.device
    )
    keys = keys.scatter_reduce(
        0, number, torch.arange(batch * time, device=document.device), "amin"
    )
    queries = keys // time * n + (keys % time - (time - n)).clamp(min=0)
    return queries.int(), keys.int()


@torch.enable_grad()
def choose_attention(hp: Hyperparameters, device: torch.device, dtype: torch.dtype, compiled: bool):
    """(name, function of q (B, T, H, E), k and v (B, T, K, E), notes): the kernel asked for, or the
    first that runs."""
    on_gpu = device.type == "cuda"
    # On a GPU `math` takes several times as long
    order = KERNELS[:-1] if on_gpu else ("flash", "math")
    time = max(2 * PLAIN_ATTENTION, on_gpu * hp.train_seq_len)
    refused = []
    for name in order if hp.attention == "auto" else (hp.attention,):
        try:
            attend = load_attention(name)
            shapes = [
                (2, time, heads, hp.head_dim) for heads in (hp.num_heads, *[hp.num_kv_heads] * 2)
            ]
            inputs = [
                torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
                for shape in shapes
            ]
            probe = compile_whole(attend, compiled and on_gpu)
            document = (
                torch.arange(time, device=device).expand(2, -1) // 100 if hp.doc_attention else None
            )
            probe(*inputs, 0, document).float().sum().backward()
            if hp.eval_mode == "banded":
                probe(*inputs, time // 2, document)
            return name, attend, refused
        except Exception as error:  # a missing or unfit kernel can raise anything; try the next one
            refused.append(f"attention {name} skipped: {reason(error)}")
    raise UserError(
        f"ATTENTION={hp.attention}: {'; '.join(refused)}: install one or set ATTENTION=math, which is slow"
    )


def load_attention(name: str) -> Callable[..., Tensor]:
    """The kernel called `name`. Sets torch's kernel switches as a side effect; raises if the kernel
    is missing."""
    # Else the cache on disk answers with a graph of another kernel
    torch.compiler.config.cache_key_tag = name
    if name == "fa3":
        import flash_attn_interface as fa3  # FlashAttention 3, arXiv:2407.08608; Hopper only

        require(torch.cuda.get_device_capability()[0] == 9, "it needs a Hopper GPU")

        def attend_fa3(
            q: Tensor, k: Tensor, v: Tensor, band: int = 0, document: Tensor | None = None
        ) -> Tensor:
            options = {"window_size": (band - 1, 0)} if band else {}
            options |= (
                {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
            )
            if document is None:
                # Aligned with the last positions
                out = fa3.flash_attn_func(q, k, v, causal=True, **options)
            else:
                rows = (t.flatten(0, 1) for t in (q, k, v))
                bounds = *document_bounds(document, q.size(1)), q.size(1), k.size(1)
                out = fa3.flash_attn_varlen_func(*rows, *bounds, causal=True, **options)
            # Older builds return (out, log-sum-exp)
            out = out[0] if isinstance(out, tuple) else out
            return out.view(q.shape)

        return attend_fa3
    # Exactly one kernel stays enabled; otherwise torch would silently fall back to another one.
    for kernel in ("cudnn", "flash", "mem_efficient", "math"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(kernel == name)

    def attend_sdpa(
        q: Tensor, k: Tensor, v: Tensor, band: int = 0, document: Tensor | None = None
    ) -> Tensor:
        short = q.device.type == "cpu" and q.size(1) <= PLAIN_ATTENTION
        if name == "flash" and (q.is_cuda if band else short):  # a GPU's kernel takes no mask
            return attend_last(q, k, v, band, document)
        mask = visible(q, k, band, document) if band or document is not None else None
        dtype = q.dtype
        if dtype == torch.bfloat16 and q.device.type == "cpu" and q.size(-1) <= SMALL_HEAD:
            q, k, v = q.float(), k.float(), v.float()
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or K, T, E)
        if name == "mem_efficient":  # has no grouped-query form
            k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
        options = {
            "attn_mask": mask,
            "is_causal": mask is None,
            "enable_gqa": q.size(1) != k.size(1),
        }
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).to(dtype)

    def attend_any(
        q: Tensor, k: Tensor, v: Tensor, band: int = 0, document: Tensor | None = None
    ) -> Tensor:
        return (
            attend_chunks(attend_sdpa, q, k, v, band, document)
            if band
            else attend_sdpa(q, k, v, 0, document)
        )

    return attend_any


# ---- Fused MLP: the activation and its derivative inside matrix products, by a Triton kernel -----
def mlp_kernel() -> Callable:
    """The Triton kernel behind `load_mlp_product`. TMA reads and writes its tiles and cuts them at
    the edges."""
    # Triton reads a file
    linecache.cache[__file__] = (len(SOURCE), None, SOURCE.decode().splitlines(True), __file__)
    import triton
    import triton.language as tl

    @triton.jit
    def fused_mlp(
        a, b, scale, out, slopes, slope: tl.constexpr, forward: tl.constexpr, keep: tl.constexpr
    ):
        rows: tl.constexpr = a.block_shape[0]
        columns: tl.constexpr = b.block_shape[0]
        across = tl.cdiv(b.shape[0], columns)
        tiles = tl.cdiv(a.shape[0], rows) * across
        # One program per multiprocessor: loads for its next tile overlap the end of the last one.
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            row = tile // across * rows
            column = tile % across * columns
            total = tl.zeros((rows, columns), tl.float32)
            for k in range(0, a.shape[1], a.block_shape[1]):
                total = tl.dot(
                    a.load([row, k]), b.load([column, k]).T, total, input_precision="ieee"
                )
            # To need less shared memory
            halves = total.reshape(rows, 2, columns // 2).permute(0, 2, 1).split()
            for half in tl.static_range(2):
                value = halves[half]
                at = [row, column + half * (columns // 2)]
                if forward:
                    place = row + tl.arange(0, rows)
                    factor = tl.load(scale + place, mask=place < a.shape[0], other=0.0)[:, None]
                    bend = tl.where(value > 0, 1.0, slope)
                    if keep:
                        slopes.store(at, (2 * bend * bend * value * factor).to(out.dtype))
                    value = bend * value * (bend * value) * factor
                else:
                    value *= slopes.load(at)
                out.store(at, value.to(out.dtype))

    return fused_mlp


def load_mlp_product(slope: float, device: torch.device) -> Callable:
    """The function `product` below. Raises if Triton is missing or does not support the device."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    kernel = mlp_kernel()
    programs = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )

    def product(
        a: Tensor, b: Tensor, scale: Tensor, slopes: Tensor | None = None, keep: bool = False
    ):
        """(a (n, k) @ b (m, k)^T times `slopes`; slopes) or, without them, (f(a @ b^T) times scale
        (n, 1); its derivative, if `keep`), f the squared leaky ReLU; (n, m) each."""
        out = a.new_empty(len(a), len(b))
        forward = slopes is None
        if forward:
            slopes = torch.empty_like(out) if keep else out
        # 64 numbers in bf16: three stages of both blocks fill 144 KiB
        depth = 128 // a.element_size()
        tensors = (
            (a, [128, depth]),
            (b, [256, depth]),
            (scale, None),
            (out, [128, 128]),
            (slopes, [128, 128]),
        )
        ends = [TensorDescriptor.from_tensor(t, block) if block else t for t, block in tensors]
        kernel[(programs,)](*ends, slope, forward, keep, num_warps=8, num_stages=3)
        return out, slopes

    return product


class FusedMLP(torch.autograd.Function):
    """(f(x @ up^T) * scale) @ down^T of x (N, D) and scale (N, 1), f the squared leaky ReLU, by
    `product`."""

    @staticmethod
    def forward(
        ctx, x: Tensor, scale: Tensor, up: Tensor, down: Tensor, product: Callable, keep: bool
    ) -> Tensor:
        hidden, slopes = product(x, up, scale, keep=keep)  # (N, M) each
        ctx.save_for_backward(x, scale, up, down, hidden, slopes)
        ctx.product = product
        return F.linear(hidden, down)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, up, down, hidden, slopes = ctx.saved_tensors
        # The gradient of x @ up^T
        inner, _ = ctx.product(grad.contiguous(), down.mT.contiguous(), scale, slopes)
        dx = inner @ up
        # f is homogeneous of degree 2, f(z) = f'(z) z / 2, so the gradient of `scale` needs no sum
        # over hidden units.
        dscale = (dx.float() * x).sum(dim=-1, keepdim=True) / (2 * scale)
        return dx, dscale, inner.mT @ x, grad.mT @ hidden, None, None


@torch.enable_grad()
def choose_fused_mlp(hp: Hyperparameters, device: torch.device, dtype: torch.dtype, compiled: bool):
    """(function of x (B, T, D), scale (B, T, 1) and the matrices, or None for the plain form;
    notes). The kernel must run here and agree with the plain form, from which it differs by a few
    roundings."""
    if not hp.fused_mlp:
        return None, []

    def plain(x: Tensor, scale: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(
            (F.leaky_relu(F.linear(x, up), hp.mlp_slope).square() * scale).to(dtype), down
        )

    def fused(x: Tensor, scale: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = (x.flatten(0, -2), scale.flatten(0, -2))
        return FusedMLP.apply(*rows, up, down, product, torch.is_grad_enabled()).view_as(x)

    try:
        require(
            device.type == "cpu" or dtype == torch.bfloat16,
            "on a GPU it needs COMPUTE_DTYPE=bfloat16",
        )
        product = load_mlp_product(hp.mlp_slope, device)
        _, m, d = bank_shape("mlp_bank", hp)
        sizes = ((1, hp.train_seq_len, d), (1, hp.train_seq_len, 1), (m, d), (d, m))
        kinds = (dtype, torch.float32, dtype, dtype)
        inputs = [
            torch.randn(s, device=device, dtype=k, requires_grad=True)
            for s, k in zip(sizes, kinds, strict=True)
        ]
        outputs = [mlp(*inputs) for mlp in (plain, compile_whole(fused, compiled))]
        results = [(y, *torch.autograd.grad(y.float().square().sum(), inputs)) for y in outputs]
        close = [
            (a - b).float().norm() <= 0.02 * a.float().norm() for a, b in zip(*results, strict=True)
        ]
        require(all(close), "its results differ from the plain form's")
        return fused, []
    except Exception as error:  # a missing or unfit kernel can raise anything
        return None, [f"FUSED_MLP=1 has no effect, the plain form runs: {reason(error)}"]


# ---- Optimizer: Parallel Muon for the banks, Adam for the rest -----------------------------------
# One (a, b, c) per iteration. The quintic's slope at 0 is steep and it never converges: singular
# values end up in about 0.7 .. 1.2. Polar Express (arXiv:2505.16932) uses the best polynomial for
# what the previous one left.
# fmt: off
NEWTON_SCHULZ = {
    "quintic": ((3.4445, -4.7750, 2.0315),),
    "polar-express": ((8.1566, -22.4833, 15.8788), (4.0429, -2.8089, 0.5000), (3.8917, -2.7725, 0.5061),
                      (3.2858, -2.3681, 0.4645), (2.3465, -1.7098, 0.4232)),
}
# fmt: on


def newton_schulz(
    g: Tensor, dtype: torch.dtype, steps: int = 5, coefficients: str = "quintic"
) -> Tensor:
    """Push the singular values of each matrix of g (r, m, n), scaled to norm 1, towards 1 (Muon,
    Keller Jordan 2024), by iterations X <- aX + (bA + cA^2)X with A = XX^T, for tall X mirrored.
    Zero matrices stay zero."""
    x = (g / (torch.linalg.vector_norm(g, dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    table = NEWTON_SCHULZ[coefficients]
    tall = x.size(-2) > x.size(-1)
    for step in range(steps):
        a, b, c = table[min(step, len(table) - 1)]
        gram = x.mT @ x if tall else x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, poly, beta=a) if tall else torch.baddbmm(x, poly, x, beta=a)
    return x


def muon_update(
    shard: "BankShard", clip: Tensor, momentum: Tensor, rate: Tensor, hp: Hyperparameters
) -> None:
    """One Muon step on the rows (r, a, b) that this rank owns, from their summed gradient; clip,
    momentum, rate: ()."""
    grad = shard.grad_shard.float() * clip
    shard.momentum.mul_(momentum).add_(grad)
    update = grad + momentum * shard.momentum
    if hp.muon_eq:
        norm = torch.linalg.vector_norm(update, dim=-1, keepdim=True)
        if shard.transposed is not None:
            norm = torch.where(
                shard.transposed, torch.linalg.vector_norm(update, dim=-2, keepdim=True), norm
            )
        update = update / norm.clamp(min=1e-7)
    update = newton_schulz(update, shard.owned_rows.dtype, hp.muon_backend_steps, hp.muon_coeffs)
    shard.master.mul_(1 - rate * hp.muon_wd).sub_(update * (rate * shard.scale))
    shard.owned_rows.copy_(shard.master)


class BankShard:
    """One bank under Parallel Muon. Every rank holds the whole bank and its gradient in the compute
    dtype, in buffers padded to S*r rows. The owner of r rows also holds their fp32 weights and
    momentum. No collective needs a copy."""

    def __init__(self, name: str, model: GPT, weights: Tensor, comm: Comm, accumulate: bool):
        bank = getattr(model, name)
        self.rows = bank.size(0)  # R
        owned = -(-self.rows // comm.size)  # r
        self.mine = slice(comm.rank * owned, (comm.rank + 1) * owned)  # rows that this rank owns
        full = torch.zeros(comm.size * owned, *bank.shape[1:], device=bank.device)
        full[: self.rows] = weights
        self.padded = full.to(bank.dtype, copy=True)
        bank.data = self.padded[: self.rows]
        self.owned_rows = self.padded[self.mine]
        self.master = full[self.mine].clone()
        self.momentum = torch.zeros_like(self.master)
        self.grad = torch.zeros_like(self.padded)
        # Backward accumulates in place, so the padding rows stay zero
        bank.grad = self.grad[: self.rows]
        # Several micro-batches are summed in fp32
        self.grad_sum = self.grad.float() if accumulate else self.grad
        direct = comm.size == 1 or self.grad_sum.dtype == bank.dtype
        self.comm_buffer = self.grad_sum if direct else torch.empty_like(self.grad)
        shard = self.comm_buffer[self.mine]
        self.grad_shard = shard if comm.size == 1 else torch.empty_like(shard)
        traits = torch.zeros(len(full), 2, device=bank.device)
        for kind, rows in zip(
            BANKS[name], traits[: self.rows].chunk(len(BANKS[name])), strict=True
        ):
            out, into = matrix_shape(kind, model.hp)
            # Tall: larger updates, as in #399
            rows[:] = torch.tensor([kind.transposed, max(1.0, out / into) ** 0.5])
        transposed, self.scale = traits[self.mine, :, None, None].unbind(1)
        self.transposed = (
            transposed.bool() if any(kind.transposed for kind in BANKS[name]) else None
        )


class Report(NamedTuple):
    """What travels with the small gradients of a step, summed over the ranks."""

    loss: float  # mean; nan if a gradient is not finite
    seconds: float  # rank 0's clock when it queued the update
    stop: float  # ranks that were asked to stop


class ParallelMuon:
    """Owns every parameter: Muon the banks, Adam the others. `step` is the only path, for any
    number of ranks."""

    def __init__(
        self,
        model: GPT,
        weights: dict,
        hp: Hyperparameters,
        comm: Comm,
        accumulate=False,
        compiled=False,
    ):
        self.hp = hp
        self.comm = comm
        device = model.tok_emb.device
        largest_first = sorted(BANKS, key=lambda bank: -weights[bank].numel())
        self.banks = {
            bank: BankShard(bank, model, weights[bank], comm.shard, accumulate)
            for bank in largest_first
        }
        self.small = {
            name: parameter for name, parameter in model.named_parameters() if name not in BANKS
        }
        # Fp32 weights that this rank updates
        self.owned = {name: shard.master for name, shard in self.banks.items()}
        assert not any(name.endswith("_bank") for name in self.small), (
            "a bank is missing in the table of matrices"
        )
        self.owned |= {name: parameter.detach() for name, parameter in self.small.items()}
        sizes = [parameter.numel() for parameter in self.small.values()]
        # Gradients, then the report
        self.flat = torch.zeros(sum(sizes) + len(Report._fields), device=device)
        self.flat_grad, tail = self.flat.split([sum(sizes), len(Report._fields)])
        self.report = Report(*tail.unbind())  # () views, to be filled before `step`
        for parameter, view in zip(self.small.values(), self.flat_grad.split(sizes), strict=True):
            # Backward accumulates in place, so gradients need no packing
            parameter.grad = view.view_as(parameter)
        groups = {}
        for name, parameter in self.small.items():
            rate = hp.tied_embed_lr if name in ("tok_emb", "bigram_emb") else hp.scalar_lr
            decay = hp.adam_wd if name in [kind.name for kind in TABLES] else hp.scalar_wd
            group = {"params": [], "lr": rate, "peak_lr": rate, "weight_decay": decay}
            groups.setdefault((rate, decay), group)["params"].append(parameter)
        self.adam = torch.optim.AdamW(
            list(groups.values()), betas=(hp.beta1, hp.beta2), eps=hp.adam_eps, fused=True
        )
        # What Adam creates at its first step, so a checkpoint can restore it
        for parameter in self.small.values():
            moments = {moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
            self.adam.state[parameter] = {"step": torch.zeros((), device=device), **moments}
        self.muon_update = compile_whole(muon_update, compiled)
        self.gathers: list[Callable[[], None]] = []

    def accumulate(self) -> None:
        """Add the gradients of one micro-batch to the sum."""
        for shard in self.banks.values():
            if shard.grad_sum is not shard.grad:
                shard.grad_sum.add_(shard.grad)
                shard.grad.zero_()

    @torch.no_grad()
    def step(self, lr_scale: float, momentum: float) -> Tensor:
        """One update from the gradients, which are zero afterwards. Returns the summed Report as
        (3,). Do not read the banks before `finish`."""
        self.reduce_gradients()
        norm = self.gradient_norm()
        # Nan if a gradient is not finite, so that the run ends with this step
        self.report.loss.add_(0 * norm)
        clip = ((self.hp.grad_clip_norm or math.inf) / (norm + 1e-6)).clamp(max=1.0)
        # No copy
        settings = [
            torch.full_like(norm, value) for value in (momentum, lr_scale * self.hp.matrix_lr)
        ]
        for shard in self.banks.values():
            self.update_bank(shard, clip, *settings)
        self.update_small(clip, lr_scale)
        report = torch.stack(self.report)
        torch._foreach_zero_([self.flat, *(shard.grad_sum for shard in self.banks.values())])
        return report

    def reduce_gradients(self) -> None:
        """Sum over the ranks: small gradients and report in one flat all-reduce, each bank by a
        reduce-scatter and an all-reduce of the owned rows over the replicas, which overlaps with
        the next bank's reduce-scatter."""
        arrivals = [self.comm.all_reduce(self.flat)]
        scattered = []
        for shard in self.banks.values():
            if shard.comm_buffer is not shard.grad_sum:
                shard.comm_buffer.copy_(shard.grad_sum)
            scattered.append(
                (shard, self.comm.shard.reduce_scatter(shard.grad_shard, shard.comm_buffer))
            )
        for shard, arrived in scattered:
            # NCCL orders the next collective, of another group, after what this stream has waited
            # for
            arrived()
            arrivals.append(self.comm.replicate.all_reduce(shard.grad_shard))
        for arrived in arrivals:
            arrived()

    def gradient_norm(self) -> Tensor:
        """Norm () of the reduced gradient. The squares are gathered and not reduced, because
        reductions in two groups may round differently, and replicas would drift apart."""
        norms = [
            torch.linalg.vector_norm(shard.grad_shard, dtype=torch.float32)
            for shard in self.banks.values()
        ]
        mine = torch.stack([norm.square() for norm in norms])
        squares = mine.new_empty(self.comm.shard.size * len(mine))
        self.comm.shard.all_gather(squares, mine)()
        return (squares.sum() + torch.linalg.vector_norm(self.flat_grad).square()).sqrt()

    def update_bank(self, shard: BankShard, clip: Tensor, momentum: Tensor, rate: Tensor) -> None:
        """Muon on the owned rows; starts the all-gather of everyone's."""
        self.muon_update(shard, clip, momentum, rate, self.hp)
        self.gathers.append(self.comm.shard.all_gather(shard.padded, shard.owned_rows))

    def update_small(self, clip: Tensor, lr_scale: float) -> None:
        """Adam on the small parameters, equal on all ranks by determinism, while the all-gathers
        are in flight."""
        self.flat_grad.mul_(clip)
        for group in self.adam.param_groups:
            group["lr"] = group["peak_lr"] * lr_scale
        self.adam.step()

    def finish(self) -> None:
        """Wait until the banks hold the new weights, as late as possible: the next forward needs
        them."""
        while self.gathers:
            self.gathers.pop()()

    def sync_replicas(self) -> None:
        """Give every rank the owners' bank rows after a change outside `step`."""
        for shard in self.banks.values():
            shard.owned_rows.copy_(shard.master)
            self.comm.shard.all_gather(shard.padded, shard.owned_rows)()

    def weights(self) -> dict[str, Tensor]:
        """All weights in fp32, collected from their owners."""
        return {name: self.whole(name, tensor).clone() for name, tensor in self.owned.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All state that a step changes, by PARAMETER.KIND, of a bank the owned rows.
        `sync_replicas` after changes."""
        found = {f"{name}.weight": tensor for name, tensor in self.owned.items()}
        found |= {f"{name}.momentum": shard.momentum for name, shard in self.banks.items()}
        for name, parameter in self.small.items():
            found |= {f"{name}.{kind}": state for kind, state in self.adam.state[parameter].items()}
        return found

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of `tensors` on every rank: a bank's rows (R, a, b) from their owners. All ranks
        must call this."""
        shard = self.banks.get(name.partition(".")[0])
        if shard is None or self.comm.shard.size == 1:
            return tensor
        full = torch.empty_like(shard.padded, dtype=tensor.dtype)
        self.comm.shard.all_gather(full, tensor)()
        return full[: shard.rows]

    def distribute(self, name: str, tensor: Tensor, source: Tensor | None) -> None:
        """The inverse of `whole`: copy rank 0's `source` into every rank's `tensor`."""
        shard = self.banks.get(name.partition(".")[0])
        full = torch.zeros_like(tensor if shard is None else shard.padded, dtype=tensor.dtype)
        if self.comm.rank == 0:
            target = full if shard is None else full[: shard.rows]
            shape = getattr(source, "shape", None)
            wrong = f"the checkpoint has {name} with shape {shape}, not {target.shape}: it belongs to another model"
            require(shape == target.shape, wrong)
            target.copy_(source)
        self.comm.all_reduce(full)()  # zero on all other ranks
        tensor.copy_(full if shard is None else full[shard.mine])


# ---- Schedules, clock and averaging --------------------------------------------------------------
# Of a run at most for warm-ups and warmdowns given in steps, or slow machines never reach the peak
PHASE_LIMIT = 0.5
SHORT_SEQ_FRACTION = 0.4  # of the run that SHORT_SEQ_PARTS cuts sequences for
SWA_START = 0.2  # fraction of the peak learning rate below which SWA samples (#399)


class StepSettings(NamedTuple):
    """What the schedules prescribe for one step."""

    lr_scale: float  # multiplies every learning rate
    momentum: float  # Muon's
    qat: bool  # train through the export's rounding
    seq_len: int  # tokens T of a training sequence
    looping: bool = False  # visit the loop's layers repeatedly


def schedule(hp: Hyperparameters, step: int, seconds: float, end: float) -> StepSettings:
    """The settings of step number `step`, which begins `seconds` into a run whose steps begin
    before `end`, if not 0. Progress is the used fraction of ITERATIONS or of that time, the larger
    one; the warmdown ends at MIN_LR."""
    steps = max(hp.iterations, 1)
    used = seconds / end if end else 0.0
    progress = max(step / steps, used)
    steps = min(steps, step / used) if used else steps
    warmdown = hp.warmdown_frac or min(hp.warmdown_iters / steps, PHASE_LIMIT)
    lr_scale = min(1.0, max(0.0, 1.0 - progress) / warmdown) if warmdown else 1.0
    qat = hp.late_qat and lr_scale < hp.qat_threshold
    warmed = min(1.0, max(step / max(hp.muon_momentum_warmup_steps, 1), progress / PHASE_LIMIT))
    momentum = hp.muon_momentum_warmup_start + warmed * (
        hp.muon_momentum - hp.muon_momentum_warmup_start
    )
    # Late QAT with short sequences would be one more graph
    short = progress < SHORT_SEQ_FRACTION and not qat
    seq_len = hp.train_seq_len // (hp.short_seq_parts if short else 1)
    looping = hp.loop_visits > 1 and progress >= hp.loop_start
    return StepSettings(max(hp.min_lr, lr_scale), momentum, qat, seq_len, looping)


def phases(hp: Hyperparameters) -> list[StepSettings]:
    """A step of each kind in a run's schedule, in order, at the peak learning rate. Each kind is a
    graph."""
    steps = (schedule(hp, max(hp.iterations, 1) * place / 1000, 0.0, 0.0) for place in range(1001))
    return list(
        dict.fromkeys(
            step._replace(lr_scale=1.0, momentum=hp.muon_momentum_warmup_start) for step in steps
        )
    )


class Clock:
    """Training time: a timer that validation pauses, and rank 0's reading of it, from which all
    ranks decide."""

    def __init__(self, cap: float, in_flight: int):
        self.cap = cap or math.inf
        self.reserve = 0.0  # seconds of it for GPTQ
        self.in_flight = in_flight  # steps that the host may queue ahead of the device
        self.reset(0, 0.0, [])

    def start(self) -> None:
        self.started = self.started or time.perf_counter()

    def pause(self) -> None:
        self.paused_at = self.elapsed()
        self.started = None

    def elapsed(self) -> float:
        """Seconds on this rank's timer."""
        return self.paused_at + (time.perf_counter() - self.started if self.started else 0.0)

    def agree(self, step: int, seconds: float) -> None:
        """Rank 0 queued the update of `step` after `seconds` of training."""
        self.recent = [*self.recent[-19:], (seconds - self.seconds) / (step - self.step)]
        self.step = step
        self.seconds = seconds

    def reset(self, step: int, seconds: float, recent: list[float]) -> None:
        """Continue before `step`, `seconds` into the run."""
        self.step = step - 1  # the last step whose time is known
        self.seconds = self.paused_at = seconds  # that time; the timer
        self.recent = recent or [0.0]  # seconds of recent steps
        self.started = None

    def begins(self, step: int) -> float:
        """When `step` is expected to begin, in seconds, if steps take as long as they did on
        average."""
        return self.seconds * step / max(self.step + 1, 1)

    def end(self, step: int) -> float:
        """When run and schedules end: if `step` begins earlier, it fits before the cap at the
        slowest recent pace."""
        margin = (step - self.step + self.in_flight + 1) * max(self.recent)
        return self.cap - self.reserve - margin + self.begins(step) - self.seconds


class WeightAverage:
    """The weights to export: an EMA, or a plain average of late samples, in fp32. A rank averages
    what it owns."""

    def __init__(self, weights: dict[str, Tensor], hp: Hyperparameters):
        self.hp = hp
        self.weights = weights
        self.samples = 0
        self.mean = (
            {name: w.clone() for name, w in weights.items()}
            if hp.ema_enabled or hp.swa_enabled
            else {}
        )

    def update(self, step: int, lr_scale: float) -> None:
        """Add the weights after `step`."""
        if self.hp.ema_enabled or (
            self.mean and lr_scale < SWA_START and (step + 1) % self.hp.swa_every == 0
        ):
            self.samples += 1
            weight = 1 - self.hp.ema_decay if self.hp.ema_enabled else 1 / self.samples
            torch._foreach_lerp_(list(self.mean.values()), list(self.weights.values()), weight)

    def apply(self) -> str:
        """Replace the weights by the average. Returns what they are now, for the log."""
        if not self.samples:
            return "the last weights"
        torch._foreach_copy_(list(self.weights.values()), list(self.mean.values()))
        return (
            f"EMA of {self.samples} steps"
            if self.hp.ema_enabled
            else f"SWA of {self.samples} samples"
        )


# ---- Quantisation: weights -> integer codes and one scale per row --------------------------------
def code_range(
    kind: Matrix, hp: Hyperparameters, step_scale: float = 1.0
) -> tuple[int, float | None]:
    """(bits, range in deviations of a row) of codes. #399's rule: int6 for the blocks, int8 for the
    rest, and None."""
    if hp.row_range == "published":
        return (6 if kind.bank else 8), None
    return kind.bits, kind.clip * step_scale


def row_scales(rows: Tensor, bits: int, clip: float | None) -> Tensor:
    """The steps (..., out, 1) between the codes of fp32 rows (..., out, in), whose range is `clip`
    standard deviations (SDClip, #1394) or, for None, the largest weight, at least 1 (#399). Steps
    keep four significant bits; those of #399 have fp16's eleven, because a coarser step would cut
    the largest weight."""
    if clip is None:
        reach = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1.0)
        dropped = 13  # of the 23 bits of fp32's mantissa
    else:
        reach = rows.square().mean(dim=-1, keepdim=True).sqrt() * clip
        dropped = 20
    scale = reach / (2 ** (bits - 1) - 1)
    # A compiler could drop two casts
    rounded = (scale.view(torch.int32) + (1 << dropped - 1)) & -(1 << dropped)
    return rounded.view(torch.float32)


def to_codes(rows: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The nearest integer codes within +-(2^(bits-1) - 1), as fp32; 0 where the scale is 0."""
    top = 2 ** (bits - 1) - 1
    return torch.where(scale > 0, rows / scale, 0).round().clamp(-top, top)


def gptq(weights: Tensor, hessian: Tensor, scale: Tensor, bits: int, block: int = 128) -> Tensor:
    """Codes (L, out, in) of fp32 weights (L, out, in) that preserve Wx rather than W, given its
    Hessian (L, in, in). GPTQ (arXiv:2210.17323): columns are rounded one by one, largest
    activations first, and the open ones compensate each error along the inverse Hessian. The
    diagonal is raised by 1 % of its mean, also for inputs that are all 0."""
    width = weights.size(-1)
    power = hessian.diagonal(dim1=-2, dim2=-1)  # (L, in)
    order = power.argsort(dim=-1, descending=True)
    damping = torch.where(power.mean(dim=-1) > 0, 0.01 * power.mean(dim=-1), 1.0)
    hessian = hessian + torch.diag_embed(damping[:, None].expand_as(power))
    hessian = torch.take_along_dim(
        torch.take_along_dim(hessian, order[:, :, None], 1), order[:, None, :], 2
    ).double()
    factor = torch.linalg.cholesky(
        torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True
    ).float()
    remaining = torch.take_along_dim(weights, order[:, None, :], 2)
    codes = torch.empty_like(weights)
    for first in range(0, width, block):
        part = slice(first, min(first + block, width))
        rows = factor[:, first : first + block]
        inner = remaining[:, :, part].clone()
        errors = []
        for i, column in enumerate(range(first, part.stop)):
            code = to_codes(inner[:, :, i : i + 1], scale, bits)
            codes[:, :, column : column + 1] = code
            errors.append((inner[:, :, i : i + 1] - code * scale) / rows[:, i, column, None, None])
            inner[:, :, i + 1 :].baddbmm_(
                errors[-1], rows[:, i : i + 1, column + 1 : part.stop], alpha=-1
            )
        remaining[:, :, part.stop :].baddbmm_(
            torch.cat(errors, dim=-1), rows[:, :, part.stop :], alpha=-1
        )
    return torch.empty_like(codes).scatter_(2, order[:, None, :].expand_as(codes), codes)


# ---- Coders: codes (L, out, in) int16 -> bytes and back, exactly, on every machine ---------------
MAX_BITS = 12  # of a code
ANS_TOTAL = 1 << 15  # sum of the frequencies of a class
ANS_BUCKETS = 3  # classes per octave of code size
# Raw LZMA2 for data without words or alignment: literal context and position bits would only cost.
LZMA_FILTERS = [
    dict(id=lzma.FILTER_LZMA2, preset=9 | lzma.PRESET_EXTREME, dict_size=1 << 24, lc=0, lp=0, pb=0)
]
# Bytes -> bytes
lzma_pack = functools.partial(lzma.compress, format=lzma.FORMAT_RAW, filters=LZMA_FILTERS)


def lzma_unpack(blob: bytes, size: int) -> bytes:
    """The inverse of `lzma_pack` for `size` bytes; uses memory for `size` bytes. Raises an error if
    damaged."""
    decoder = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=LZMA_FILTERS)
    raw = decoder.decompress(blob, max_length=size + 1)
    require(
        len(raw) == size and decoder.eof and not decoder.unused_data,
        f"a packed part does not hold {size} bytes",
    )
    return raw


def to_planes(values: np.ndarray) -> bytes:
    """16-bit values as all low bytes, then all high bytes, which compresses better."""
    return values.astype("<i2").reshape(-1, 1).view(np.uint8).T.tobytes()


def from_planes(raw: bytes) -> np.ndarray:
    """The values (n,) int16 of `to_planes`."""
    return np.frombuffer(raw, np.uint8).reshape(2, -1).T.copy().view("<i2").ravel().astype(np.int16)


def encode_lzma(codes: np.ndarray) -> bytes:
    """Codes (L, out, in) int16 by LZMA2, along columns of like codes (1.5 % fewer bytes), with zero
    high bytes."""
    return lzma_pack(to_planes(codes.transpose(0, 2, 1).ravel() + np.int16(128)))


def decode_lzma(blob: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    """The codes (L, out, in) int16 of `encode_lzma`. Raises an error if they are damaged or of
    another shape."""
    codes = from_planes(lzma_unpack(blob, 2 * math.prod(shape))) - np.int16(128)
    return codes.reshape(shape[0], shape[2], shape[1]).transpose(0, 2, 1)


def encode_ans(codes: np.ndarray) -> bytes:
    """Asymmetric numeral systems (arXiv:1311.2540) with one table of frequencies per class of codes
    (docs/formats.md): the mean size of the codes in its row plus that in its column, in thirds of
    an octave. Exact on every machine."""
    import constriction

    size = np.abs(codes).astype(np.float32)
    mean = size.mean(axis=(1, 2), keepdims=True)
    rows = _buckets(size.mean(axis=2))
    columns = _buckets((size.mean(axis=1, keepdims=True) / np.maximum(mean, 1e-9))[:, 0])
    least = int(codes.min())
    symbols = (codes.ravel() - least).astype(np.int32)
    parts = [symbols[places] for places in _classes(rows, columns)]
    counts = np.stack([np.bincount(part, minlength=int(symbols.max()) + 1) for part in parts])
    # Frequencies are integers: 1 for each nonzero count, the rest in proportion
    present = counts > 0
    shared = (
        (ANS_TOTAL - present.sum(axis=1))
        * counts.cumsum(axis=1).T
        // np.maximum(1, counts.sum(axis=1))
    )
    tables = present + np.diff(shared.T, axis=1, prepend=0)
    coder = constriction.stream.stack.AnsCoder()
    distribution = constriction.stream.model.Categorical
    # The coder is a stack: last in, first out
    for table, part in zip(tables[::-1], parts[::-1], strict=True):
        if np.count_nonzero(table) > 1:
            # Its fixed-point weights are exact for frequencies that sum to a power of two.
            coder.encode_reverse(part, distribution(table.astype(np.float64), perfect=False))
    head = struct.pack("<3h", least, *tables.shape)
    side = lzma_pack(head + rows.tobytes() + columns.tobytes() + tables.astype("<u2").tobytes())
    return struct.pack("<I", len(side)) + side + coder.get_compressed().astype("<u4").tobytes()


def decode_ans(blob: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    """The codes (L, out, in) int16 of `encode_ans`. Raises an error if they are damaged or of
    another shape."""
    import constriction

    layers, out, width = shape
    (length,) = struct.unpack_from("<I", blob)
    packed = blob[4 : 4 + length]
    numbers = layers * (out + width)
    head = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=LZMA_FILTERS).decompress(
        packed, max_length=6
    )
    least, classes, count = struct.unpack("<3h", head)
    possible = 0 < classes < 512 and 0 < count <= 1 << MAX_BITS and abs(least) < 1 << MAX_BITS
    require(possible, f"{classes} tables of {count} codes from {least} are impossible")
    side = np.frombuffer(lzma_unpack(packed, 6 + numbers + 2 * classes * count), np.uint8)[6:]
    rows, columns, tables = np.split(side, (layers * out, numbers))
    tables = tables.view("<u2").reshape(classes, count)
    positions = _classes(rows.reshape(layers, out), columns.reshape(layers, width))
    fit = [
        not len(places) or table.sum() == ANS_TOTAL
        for table, places in zip(tables, positions, strict=False)
    ]
    require(len(positions) == classes and all(fit), "its tables of frequencies do not fit")
    coder = constriction.stream.stack.AnsCoder(
        np.frombuffer(blob, "<u4", offset=4 + length).astype(np.uint32)
    )
    codes = np.empty(math.prod(shape), dtype=np.int16)
    distribution = constriction.stream.model.Categorical
    for table, places in zip(tables, positions, strict=True):
        found = table.argmax()  # all there is if one symbol has all the weight
        if np.count_nonzero(table) > 1:
            found = coder.decode(distribution(table.astype(np.float64), perfect=False), len(places))
        codes[places] = least + found
    require(coder.is_empty(), "its codes do not end where they should")
    return codes.reshape(shape)


def _buckets(sizes: np.ndarray) -> np.ndarray:
    number = np.rint(ANS_BUCKETS * np.log2(np.maximum(sizes, 1 / 64)))
    return (number - number.min()).astype(np.uint8)


def _classes(rows: np.ndarray, columns: np.ndarray) -> list[np.ndarray]:
    """The positions of the codes of each class."""
    classes = (rows[:, :, None].astype(np.int16) + columns[:, None, :]).ravel()
    return np.split(classes.argsort(kind="stable"), np.bincount(classes).cumsum()[:-1])


# ---- Artifact: weights -> bytes and back (docs/formats.md) ---------------------------------------
CODERS = {"ans": (encode_ans, decode_ans), "lzma": (encode_lzma, decode_lzma)}
ARTIFACT = Path("final_model.int6.xz")  # the challenge's name for a copy, whichever coder
ARTIFACT_MAGIC, ARTIFACT_VERSION = b"PGOLF\r\n\x1a", 8
# Limits for a file from a stranger: bytes of its header, weights and rotary factors (some 20 bytes
# of memory each).
MAX_HEADER_BYTES, MAX_WEIGHTS = 1 << 20, 1 << 26
MAX_OCTAVES = 4.0  # by which TARGET_BYTES may widen the steps
# Hold the steps of ROW_RANGE exactly
STEP_TYPES = {"sdclip": torch.bfloat16, "published": torch.float16}


def outline(hp: Hyperparameters) -> dict[str, Tensor]:
    """The model's parameters by name, without memory. Raises UserError if it is too large for an
    artifact."""
    with torch.device("meta"):
        model = GPT(hp, None, torch.float32)
    weights = dict(model.named_parameters())
    count = sum(tensor.numel() for tensor in (*weights.values(), model.cos))
    found = f"{count} weights and rotary factors exceed the limit of {MAX_WEIGHTS} of an artifact"
    require(
        count <= MAX_WEIGHTS, f"{found}: lower MODEL_DIM, NUM_LAYERS, ROPE_DIMS or EVAL_SEQ_LEN"
    )
    return weights


def export_views(weights: dict[str, Tensor]) -> Iterator[tuple[Matrix | None, str, Tensor]]:
    """(kind, name, view of the weights) of every tensor in the artifact, in file order; codes are
    (L, out, in)."""
    for kind in MATRICES:
        yield kind, kind.name, bank_part(weights[kind.bank], kind)
    tables = {kind.name: kind for kind in TABLES}
    for name, tensor in weights.items():
        if name not in BANKS:
            yield tables.get(name), name, tensor[None] if name in tables else tensor


def pack_artifact(
    weights: dict, hp: Hyperparameters, hessians=None, metadata=None, step_scale: float = 1.0
) -> bytes:
    """The artifact's bytes (docs/formats.md), by GPTQ if there are Hessians, with steps
    `step_scale` times as wide."""
    streams, plain = [], []
    for kind, _, tensor in export_views(weights):
        if kind is None:
            plain.append(tensor.half().view(torch.int16).cpu().numpy().ravel())
            continue
        bits, clip = code_range(kind, hp, step_scale)
        scale = row_scales(tensor, bits, clip)
        hessian = (hessians or {}).get(kind.reads)
        codes = (
            to_codes(tensor, scale, bits) if hessian is None else gptq(tensor, hessian, scale, bits)
        )
        streams.append(CODERS[hp.compressor][0](codes.to(torch.int16).cpu().numpy()))
        plain.append(scale.to(STEP_TYPES[hp.row_range]).view(torch.int16).cpu().numpy().ravel())
    fields = {
        role: {name: getattr(hp, name) for name in knobs_with(role)}
        for role in ("model", "evaluation")
    }
    fields |= {
        "row_range": hp.row_range,
        "step_scale": step_scale,
        "coder": hp.compressor,
        **(metadata or {}),
    }
    header = json.dumps(fields | {"code_bytes": [len(stream) for stream in streams]}).encode()
    numbers = struct.pack("<HI", ARTIFACT_VERSION, len(header))
    body = b"".join(
        (ARTIFACT_MAGIC, numbers, header, *streams, lzma_pack(to_planes(np.concatenate(plain))))
    )
    return body + hashlib.sha256(body).digest()


def fit_artifact(
    weights: dict, hp: Hyperparameters, hessians, metadata: dict, max_bytes: float, log
) -> bytes:
    """The artifact of at most `max_bytes` with steps as fine as fit, but never finer than the
    tables'. An octave of wider steps saves about a bit per weight, a good guess that bisection
    bounds. Raises UserError if none fits."""
    blob = pack_artifact(weights, hp, hessians, metadata)
    if len(blob) <= max_bytes or hp.row_range == "published":
        return blob
    best = pack_artifact(weights, hp, hessians, metadata, 2**MAX_OCTAVES)
    widest = (
        f"steps {2**MAX_OCTAVES:.0f} times wider give {len(best)} bytes; {max_bytes} are available"
    )
    require(
        len(best) <= max_bytes,
        f"TARGET_BYTES={hp.target_bytes} cannot be met: {widest}; make the model smaller",
    )
    coded = sum(tensor.numel() for kind, _, tensor in export_views(weights) if kind)
    slack = max_bytes / 1000
    octaves = 0.0
    low, high = 0.0, MAX_OCTAVES
    for _ in range(12):
        octaves += (len(blob) - max_bytes + slack / 2) * 8 / coded
        if not low < octaves < high:
            octaves = (low + high) / 2
        blob = pack_artifact(weights, hp, hessians, metadata, 2**octaves)
        log(
            f"export: steps {2**octaves:.3f} times wider give {len(blob)} bytes; {max_bytes} are available"
        )
        if len(blob) > max_bytes:
            low = octaves
        else:
            best = blob
            high = octaves
            if max_bytes - len(best) <= slack:
                break
    return best


def open_artifact(blob: bytes) -> tuple[dict, Hyperparameters, list[tuple], int]:
    """(header, the model's knobs, [(kind, name, shape, bytes of its codes)], offset of the codes).
    Everything is checked before memory is allocated for it, and nothing is executed. Raises an
    error if the file is invalid."""
    start = len(ARTIFACT_MAGIC) + 6
    require(
        blob.startswith(ARTIFACT_MAGIC) and len(blob) >= start + 32,
        "it is not an artifact of this script",
    )
    version, length = struct.unpack_from("<HI", blob, len(ARTIFACT_MAGIC))
    require(
        version == ARTIFACT_VERSION, f"its format has version {version}, not {ARTIFACT_VERSION}"
    )
    require(hashlib.sha256(blob[:-32]).digest() == blob[-32:], "its checksum is wrong")
    require(
        length <= min(MAX_HEADER_BYTES, len(blob) - start - 32), f"its header claims {length} bytes"
    )
    header = json.loads(blob[start : start + length])
    knobs = {
        name.upper(): str(header[role][name])
        for role in ("model", "evaluation")
        for name in knobs_with(role)
    }
    hp = Hyperparameters.from_env(knobs | {"ROW_RANGE": str(header["row_range"])})
    require(header["coder"] in CODERS, "its coder is unknown")
    views = list(export_views(outline(hp)))
    sizes = list(header["code_bytes"])
    valid = all(type(n) is int and n >= 0 for n in sizes) and len(sizes) == sum(
        kind is not None for kind, *_ in views
    )
    require(valid, "its tensors are not those of its model")
    require(sum(sizes) <= len(blob) - start - length - 32, "it is shorter than its tensors")
    nbytes = iter(sizes)
    entries = [
        (kind, name, tuple(view.shape), next(nbytes) if kind else 0) for kind, name, view in views
    ]
    return header, hp, entries, start + length


def decode_artifact(blob: bytes) -> Iterator[tuple[str, np.ndarray | None, Tensor]]:
    """(name, codes (L, out, in) int16 or None, fp32 values) of each tensor. Raises an error like
    `open_artifact`."""
    header, _, entries, offset = open_artifact(blob)
    counts = [math.prod(shape[:2] if kind else shape) for kind, _, shape, _ in entries]
    packed = blob[offset + sum(nbytes for *_, nbytes in entries) : -32]
    plain = torch.from_numpy(from_planes(lzma_unpack(packed, 2 * sum(counts))))
    for (kind, name, shape, nbytes), values in zip(entries, plain.split(counts), strict=True):
        if kind is None:
            yield name, None, values.view(torch.float16).float().view(shape)
            continue
        codes = CODERS[header["coder"]][1](blob[offset : offset + nbytes], shape)
        scale = values.view(STEP_TYPES[header["row_range"]]).float().view(*shape[:2], 1)
        yield name, codes, torch.from_numpy(codes.astype(np.float32)) * scale
        offset += nbytes


def load_artifact(blob: bytes) -> dict[str, Tensor]:
    """The artifact's weights by parameter name, in fp32. Raises an error like `open_artifact`."""
    weights = {
        name: torch.zeros(tensor.shape) for name, tensor in outline(open_artifact(blob)[1]).items()
    }
    for (_, name, view), (_, _, values) in zip(
        export_views(weights), decode_artifact(blob), strict=True
    ):
        require(values.isfinite().all(), f"{name} has values that are not finite")
        view.copy_(values)
    return weights


def read_artifact(path: str, environ: dict[str, str]) -> tuple[bytes, Hyperparameters]:
    """The file's bytes, and the knobs of `environ` with the model's knobs from the artifact, and
    its windows unless `environ` sets others. Raises UserError if it is invalid or model or
    tokenizer differ from the artifact's."""
    require(
        Path(path).is_file(), f"artifact {path} does not exist: a run writes logs/<RUN_ID>.int6.xz"
    )
    with reading_artifact(path):
        blob = read_small(Path(path))
        header, made, _, _ = open_artifact(blob)
    stored = {name.upper(): str(getattr(made, name)) for name in knobs_with("model", "evaluation")}
    hp = Hyperparameters.from_env(stored | environ)
    for name in knobs_with("model"):
        here, there = getattr(hp, name), getattr(made, name)
        require(
            here == there,
            f"{name.upper()}={here} is set, but EVAL_ONLY={path} was made with {there}: unset it",
        )
    outline(hp)  # a banded pass has longer rotary tables than the artifact's own windows
    require(
        header["coder"] != "ans" or find_spec("constriction"),
        f"{path} needs a package: pip install constriction",
    )
    digest = header.get("tokenizer_sha256")
    tokenizer = Path(hp.tokenizer_path)
    same = not digest or not tokenizer.is_file() or sha256_of(tokenizer) == digest
    require(
        same,
        f"TOKENIZER_PATH={tokenizer} is not the tokenizer of EVAL_ONLY={path}, by its sha256: set it to that",
    )
    return blob, hp


def reading_artifact(path: str | Path) -> contextlib.AbstractContextManager:
    """Turn every error of reading an artifact, as hostile content can cause any, into a UserError
    that names it."""
    return explaining(
        f"artifact {path} cannot be used",
        Exception,
        advice="if truncated or altered, copy it again",
    )


# ---- Evaluation: non-overlapping and sliding windows, and the banded pass, by one evaluator ------
BAND_TARGETS = 64  # a block of a banded pass scores at most this many EVAL_SEQ_LEN


class Score(NamedTuple):
    """A result over the validation stream, or over the scored part of it."""

    nats: float  # mean per token
    bits_per_byte: float
    targets: int
    nbytes: int
    seconds: float

    def log(self, log: Callable, name: str) -> None:
        """The line that tools look for."""
        more = f"eval_time:{1000 * self.seconds:.0f}ms val_tokens:{self.targets} val_bytes:{self.nbytes}"
        fields = {
            "eval_seconds": self.seconds,
            "val_tokens": self.targets,
            "val_bytes": self.nbytes,
        }
        result = f"val_loss:{self.nats:.8f} val_bpb:{self.bits_per_byte:.8f}"
        log(
            f"{name} {result} {more}",
            event=name,
            val_loss=self.nats,
            val_bpb=self.bits_per_byte,
            **fields,
        )


def plan_windows(spans: np.ndarray, window: int, stride: int, narrowest: int = 0) -> np.ndarray:
    """Windows (5, N), in stream order, that score every input of the spans (S, 2) once: each reads
    `width` inputs from `start` on, and of the losses of its last n those in [scored, stop) count. A
    span begins with a whole window or, if `narrowest` is given, with narrower ones, each twice as
    wide as the one before, for short documents. The others are `stride` apart and score their last
    `stride`. Only `stop` depends on the end of the span, so no loss does."""
    begin, end = spans.T
    widths = [
        window >> halvings
        for halvings in range(7, -1, -1)
        if window >> halvings >= (narrowest or window)
    ]
    edges = np.array([0, *widths])  # the windows at a span's start score from one edge to the next
    later = np.maximum(0, -(-(end - begin - window) // stride))
    count = np.searchsorted(edges[:-1], end - begin) + later
    span = np.repeat(np.arange(len(spans)), count)
    number = np.arange(len(span)) - np.repeat(count.cumsum() - count, count)
    shift = np.maximum(0, number + 1 - len(widths)) * stride
    width = edges[np.minimum(number + 1, len(widths))]
    n = np.where(shift > 0, stride, width - edges[np.minimum(number, len(widths) - 1)])
    start = begin[span] + shift
    return np.stack((start, start + width - n, np.minimum(start + width, end[span]), width, n))


def band_block(hp: Hyperparameters) -> tuple[int, int]:
    """Positions that a block of a banded pass only reads, and those that it scores. As each layer
    reaches back by at most EVAL_SEQ_LEN - 1 more positions, and the embeddings by 2, the losses are
    those of one long pass. With MICRO_BATCH_TOKENS a block is no longer than that, unless it would
    score less than EVAL_SEQ_LEN."""
    window = hp.eval_seq_len
    read = window * (len(hp.visits()) + 1)
    scored = window * BAND_TARGETS
    return read, min(
        scored, max(window, hp.micro_batch_tokens - read)
    ) if hp.micro_batch_tokens else scored


def eval_rows(hp: Hyperparameters, runtime: Runtime, width: int) -> int:
    """Windows of `width` tokens that one rank scores per forward."""
    return max(1, min(hp.val_batch_size // runtime.comm.size, runtime.micro_batch_tokens) // width)


class Evaluator:
    """Scores windows of the validation stream; each rank takes an equal part, in full batches of
    few shapes, which are compiled once. `nats` (n + 1,) holds the loss of each target that it has
    scored, else NaN; the last is spare.

    Stride 0 means a banded pass: the windows are long blocks, in which each position attends to
    itself and the EVAL_SEQ_LEN - 1 before it, so every target has that context for about one
    forward."""

    def __init__(
        self,
        forward,
        val,
        hp: Hyperparameters,
        runtime: Runtime,
        stride: int,
        log=None,
        stage="score",
    ):
        self.stage = stage  # for the progress bar
        self.forward, self.val, self.hp, self.runtime = forward, val, hp, runtime
        self.band = 0 if stride else hp.eval_seq_len
        self.window, self.stride = hp.eval_seq_len, stride
        if self.band:
            self.window, self.stride = sum(band_block(hp)), band_block(hp)[1]
        # Of the windows, and of SGD's sequences
        rows = {self.window, min(self.window, hp.ttt_chunk_tokens)}
        for width in rows if hp.doc_attention else ():
            check_documents(val.documents, width, runtime.attention)
        self.log = log or (lambda line, **fields: None)
        self.nats = torch.full((val.targets + 1,), math.nan, device=runtime.device)
        self.count = torch.zeros((), dtype=torch.int64, device=runtime.device)
        self.started = self.reported = time.perf_counter()

    def windows(self) -> np.ndarray:
        """The windows or blocks (5, N) over the packed stream or, with EVAL_DOCUMENTS, each
        document."""
        return self.windows_of(self.val.spans(self.hp.eval_documents))

    def windows_of(self, spans: np.ndarray) -> np.ndarray:
        """Those over the spans (S, 2), of the same few shapes."""
        narrowest = (self.band or max(1, self.window // 8)) if self.hp.eval_documents else 0
        return plan_windows(spans, self.window, self.stride, narrowest)

    def take(self, nats: Tensor, target: Tensor, counts: Tensor) -> None:
        """Store the losses (rows, n) of these targets where `counts`. Only a progress line waits
        for the device."""
        self.nats.scatter_(
            0, target.masked_fill(~counts, self.val.targets).flatten(), nats.flatten().float()
        )
        self.count += counts.sum()
        if time.perf_counter() - self.reported > (2 if sys.stdout.isatty() else 10):
            self.reported = time.perf_counter()
            bpb = self.result(complete=False).bits_per_byte
            done = self.done()
            eta = (self.reported - self.started) * (1 / done - 1)
            bar = (f"{self.stage}: bpb {bpb:.4f}, {eta:.0f} s left", done)
            way = f"band:{self.band}" if self.band else f"stride:{self.stride}"
            line = f"evaluating {way} done:{100 * done:.1f}% bpb_so_far:{bpb:.4f} eta:{eta:.0f}s"
            self.log(line, bar=bar)

    def done(self) -> float:
        """The scored fraction, assuming that all ranks are as fast as this one."""
        return max(1e-9, min(1.0, int(self.count) * self.runtime.comm.size / self.val.targets))

    @torch.no_grad()
    def score(self, windows: np.ndarray) -> None:
        """Score these windows, the widest first and in stream order. Batches go round the ranks, so
        the place of a window in its batch depends on the windows before it."""
        comm = self.runtime.comm
        forward = functools.partial(self.forward, band=self.band) if self.band else self.forward
        for width, n in sorted(set(zip(*windows[3:].tolist(), strict=True)), reverse=True):
            members = windows[:3, (windows[3] == width) & (windows[4] == n)]
            rows = eval_rows(self.hp, self.runtime, width)
            table = np.pad(members, ((0, 0), (0, -members.shape[1] % rows)))  # spare: [0, 0)
            table = torch.from_numpy(table.reshape(3, -1, rows)[:, comm.rank :: comm.size].copy())
            # Or the host would wait for the copy
            table = table.pin_memory() if self.nats.is_cuda else table
            batches = table.to(self.nats.device, non_blocking=True)[..., None].unbind(1)
            for start, scored, stop in batches:  # (rows, 1) each
                self.batch(
                    forward, start + torch.arange(width, device=start.device), n, scored, stop
                )

    def batch(
        self, forward, position: Tensor, n: int, scored: Tensor, stop: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One forward of the inputs at `position` (rows, width); each row scores those of its last
        n positions that are in [scored, stop), (rows, 1) each. Returns (losses, whether they
        count), (rows, n) each."""
        target = position[:, -n:]
        counts = (target >= scored) & (target < stop)
        place = position.clamp(max=self.val.targets - 1)
        ids = self.val.tokens[place].long() * (position < stop)  # nothing behind the row's targets
        targets = self.val.tokens[place[:, -n:] + 1].long()
        nats = forward(ids, targets, reduction="none")
        self.take(nats.detach(), target, counts)
        return nats, counts

    def result(self, complete: bool = True) -> Score:
        """The score over all ranks, or so far on this one. Raises RuntimeError if a complete one
        misses a target."""
        nats = self.nats[:-1]
        scored = ~nats.isnan()
        nbytes = (self.val.nbytes * scored).sum(dtype=torch.int64)
        sums = [nats.nan_to_num(0).sum(dtype=torch.float64), scored.sum(), nbytes, self.count]
        totals = torch.stack([value.double() for value in sums])
        if complete:
            self.runtime.comm.all_reduce(totals)()
        total, *counts = totals.tolist()
        wanted = [self.val.targets, self.val.total_bytes, self.val.targets]
        if complete and counts[2] == wanted[2]:
            damaged = f"{wanted[0] - counts[0]:.0f} of {wanted[0]} validation losses are not finite"
            require(
                counts[0] == wanted[0],
                f"{damaged}: the weights are damaged; lower the learning rates",
            )
        if complete and counts != wanted:
            raise RuntimeError(f"scored [targets, bytes, scores] {counts} instead of {wanted}")
        targets, nbytes, _ = map(int, counts)
        seconds = time.perf_counter() - self.started
        return Score(
            total / max(targets, 1), total / math.log(2) / max(nbytes, 1), targets, nbytes, seconds
        )


def evaluate(
    forward: Callable, val: Validation, hp: Hyperparameters, runtime: Runtime, stride: int, *log
) -> Score:
    """Score every target of the validation stream once, with windows `stride` apart, EVAL_SEQ_LEN
    if they do not overlap; 0: in a banded pass."""
    scorer = Evaluator(forward, val, hp, runtime, stride, *log)
    scorer.score(scorer.windows())
    return scorer.result()


def validation_stride(hp: Hyperparameters) -> int:
    """The stride of a validation during training; 0: a banded pass."""
    return 0 if hp.eval_mode == "banded" else hp.eval_seq_len


def final_strides(hp: Hyperparameters) -> dict[str, int]:
    """The strides of the final scores, by name; 0: a banded pass."""
    strides = {"roundtrip": hp.eval_seq_len}
    strides |= {"banded": 0} if hp.eval_mode == "banded" else {"sliding_window": hp.eval_stride}
    return strides | ({f"ttt_{hp.ttt_mode}": hp.eval_stride} if hp.ttt_enabled else {})


def warm_up_windows(
    forward: Callable, val: Validation, hp: Hyperparameters, runtime: Runtime, stride: int
) -> None:
    """Score a batch of each shape on each rank, so that nothing compiles while an evaluation is
    timed."""
    scorer = Evaluator(forward, val, hp, runtime, stride)
    windows = scorer.windows()
    firsts = np.unique(windows[3:], axis=1, return_index=True)[1]
    rows = [
        runtime.comm.size * eval_rows(hp, runtime, width) for width in windows[3, firsts].tolist()
    ]
    scorer.score(windows[:, np.repeat(firsts, rows)])


def warm_up_evaluation(
    forward: Callable, val: Validation, hp: Hyperparameters, runtime: Runtime
) -> None:
    """The same for all final scores, and for the gradients of test-time training."""
    for name, stride in final_strides(hp).items():
        if name != "ttt_lora" or hp.eval_max_seconds:  # it uses windows after the limit
            warm_up_windows(forward, val, hp, runtime, stride)
    scorer = Evaluator(forward, val, hp, runtime, hp.eval_stride)
    if hp.ttt_enabled and hp.ttt_mode == "sgd" and val.targets > hp.ttt_chunk_tokens:
        sgd_gradients(forward, scorer, 0)
    if hp.ttt_enabled and hp.ttt_mode == "lora":
        chunks = lora_chunks(hp, np.ptp(val.spans(documents=True), axis=1).max())
        documents, adam = lora_begin(hp, lora_adapter(hp, runtime.device), 1)
        # The document has no targets
        for chunk in {lora_shape(scorer, *chunk): chunk for chunk in chunks}.values():
            lora_step(scorer, np.zeros((1, 2), np.int64), documents, *chunk, documents, adam)


# ---- Test-time training: score first, then train on what was scored (conditions C1 to C4 of the challenge)
def out_of_time(scorer: Evaluator) -> bool:
    """Whether rank 0 has used up EVAL_MAX_SECONDS; all ranks ask together."""
    limit = scorer.hp.eval_max_seconds
    over = limit > 0 and scorer.runtime.comm.share(time.perf_counter() - scorer.started) > limit
    if over:
        done = (
            f"EVAL_MAX_SECONDS={limit:g} was reached after {100 * scorer.done():.1f}% of the text"
        )
        scorer.log(f"ttt: {done}; the rest is scored with fixed weights")
    return over


def ttt_sgd(model: GPT, scorer: Evaluator) -> None:
    """Score the packed stream chunk by chunk with sliding windows, and train all weights of the
    model on each chunk but the last after it is scored, by SGD with momentum. Ranks share windows
    and sequences and take the same steps."""
    hp = scorer.hp
    chunk = hp.ttt_chunk_tokens
    windows = scorer.windows()
    chunks = np.split(
        windows, np.searchsorted(windows[1], range(chunk, scorer.val.targets, chunk)), axis=1
    )
    if len(chunks) == 1:
        covered = f"TTT_CHUNK_TOKENS={chunk} covers the whole text of {scorer.val.targets} targets"
        scorer.log(f"note: {covered}, so SGD learns nothing: lower it")
    training = True
    # Bf16 would lose the steps
    weights = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    momentum = {name: torch.zeros_like(w) for name, w in weights.items()}
    for number, part in enumerate(chunks):
        scorer.score(part)
        for _ in range(hp.ttt_epochs if number < len(chunks) - 1 else 0):
            training = training and not out_of_time(scorer)
            if not training:
                break
            rate = hp.ttt_lr * 0.5 * (1 + math.cos(math.pi * number / (len(chunks) - 1)))
            for name, gradient in sgd_gradients(model, scorer, number * chunk).items():
                momentum[name].mul_(hp.ttt_momentum).add_(gradient)
                weights[name].sub_(momentum[name], alpha=rate)
            model.load_state_dict(weights)


def sgd_gradients(model: nn.Module, scorer: Evaluator, begin: int) -> dict[str, Tensor]:
    """The chunk's mean gradient over all ranks, clipped to norm 1. A compiled forward meets two
    shapes at most."""
    hp, runtime = scorer.hp, scorer.runtime
    parameters = dict(model.named_parameters())
    sizes = [p.numel() for p in parameters.values()]
    length = min(hp.eval_seq_len, hp.ttt_chunk_tokens)
    sequences = scorer.val.tokens[begin : begin + hp.ttt_chunk_tokens + 1].unfold(
        0, length + 1, length
    )
    mine = sequences[runtime.comm.rank :: runtime.comm.size].long()
    total = torch.zeros(sum(sizes), device=runtime.device)
    for rows in mine.split(max(1, runtime.micro_batch_tokens // length)) if len(mine) else ():
        loss = scorer.forward(rows[:, :-1], rows[:, 1:], reduction="mean") * (
            len(rows) / len(sequences)
        )
        # One layer: no skips
        gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        total += torch.cat([gradient.flatten().float() for gradient in gradients])
    runtime.comm.all_reduce(total)()
    total *= (1 / (torch.linalg.vector_norm(total) + 1e-6)).clamp(max=1)
    return {
        name: part.view_as(p)
        for (name, p), part in zip(parameters.items(), total.split(sizes), strict=True)
    }


# A document's chunks have so many targets until these positions (#2014: lengths)
LORA_CHUNKS = ((256, 8), (2000, 24))
LORA_BATCH = 128  # documents that begin with the same A
# Batches from one whose A a batch begins with to that batch; fixed, so all numbers of ranks agree
LORA_QUEUES = 8
# Documents of one forward at most, at their start and behind the first window, where few are left
LORA_ROWS = (16, 4)
# EVAL_SEQ_LEN divided by these are the widths of windows, to compile few shapes
LORA_PARTS = (8, 4, 2, 1)


def ttt_lora(model: GPT, scorer: Evaluator) -> None:
    """Score document by document, each with low-rank changes (arXiv:2106.09685) of its own, as
    #1855 and #2014 do. B begins at 0; A begins as the mean of an earlier batch of documents.

    No loss depends on where a later document begins (C1). The batch and the first A of a document
    depend on documents that end before it begins, its chunks and windows on positions, and its row
    of a forward on how many documents before it in the batch are as long as that. The number of
    rows follows from the position, too, and rows do not see each other."""
    hp, comm = scorer.hp, scorer.runtime.comm
    spans = scorer.val.spans(documents=True)
    batches = np.split(spans, range(LORA_BATCH, len(spans), LORA_BATCH))
    shares = [
        [b for b in range(len(batches)) if b % LORA_QUEUES % comm.size == rank]
        for rank in range(comm.size)
    ]
    steps = [len(lora_chunks(hp, np.ptp(batch, axis=1).max())) for batch in batches]
    reached = np.zeros(len(spans), np.int64)  # targets of each document that this rank has scored
    work = lora_steps(scorer, batches, shares[comm.rank], reached)
    # All ranks ask equally often
    for _ in range(max(sum(steps[b] for b in share) for share in shares)):
        if out_of_time(scorer):
            break
        next(work, None)
    else:
        return
    total = torch.from_numpy(reached).to(scorer.runtime.device)
    comm.all_reduce(total)()
    windows = scorer.windows_of(spans)
    document = np.searchsorted(spans[:, 0], windows[1], side="right") - 1
    windows[1] = np.maximum(windows[1], (spans[:, 0] + total.cpu().numpy())[document])
    scorer.score(windows[:, windows[1] < windows[2]])


def lora_steps(
    scorer: Evaluator, batches: list[np.ndarray], share: list[int], reached: np.ndarray
) -> Iterator[None]:
    """Score a `share` of the batches of documents, chunk by chunk, and pause after each chunk.
    `reached` is kept."""
    hp, runtime = scorer.hp, scorer.runtime
    first = lora_adapter(hp, runtime.device)
    after: dict[int, Adapter] = {}
    for b in share:
        lengths = np.ptp(batches[b], axis=1)
        documents, adam = lora_begin(hp, after.pop(b - LORA_QUEUES, first), len(lengths))
        for begin, stop in lora_chunks(hp, lengths.max()):
            rows = lora_shape(scorer, begin, stop)[0]
            present = np.flatnonzero(lengths > begin)
            for group in np.split(present, range(rows, len(present), rows)):
                adapters = [documents[i] for i in group]
                learning = [documents[i] for i in group if lengths[i] > stop]
                lora_step(scorer, batches[b][group], adapters, begin, stop, learning, adam)
            reached[b * LORA_BATCH :][: len(lengths)] = lengths.clip(max=stop)
            yield
        with torch.no_grad():
            means = {
                n: sum(document[n] for document in documents) / len(documents)
                for n in first
                if n.endswith(".a")
            }
        after[b] = first | means


def lora_chunks(hp: Hyperparameters, length: int) -> list[tuple[int, int]]:
    """[begin, stop) of the chunks of a document, until all its targets are in one; the last may
    reach over its end."""
    chunks = [(0, 0)]
    while chunks[-1][1] < length:
        begin = chunks[-1][1]
        targets = next(
            (targets for until, targets in LORA_CHUNKS if begin < until), hp.ttt_lora_chunk
        )
        chunks.append((begin, begin + min(targets, hp.ttt_lora_chunk)))
    return chunks[1:]


def lora_shape(scorer: Evaluator, begin: int, stop: int) -> tuple[int, int, int]:
    """(documents of a forward, width of the window that scores a chunk, positions whose losses it
    computes)."""
    window = scorer.hp.eval_seq_len
    width = min(window // part for part in LORA_PARTS if window // part >= min(stop, window))
    rows = min(LORA_ROWS[stop > window], scorer.runtime.micro_batch_tokens // window)
    # At a document's start all, for few shapes
    return max(1, rows), width, stop - begin if stop > window else width


def lora_begin(
    hp: Hyperparameters, first: Adapter, count: int
) -> tuple[list[Adapter], torch.optim.Optimizer]:
    """(a copy of the adapter for each of `count` documents, their optimizer)."""
    documents = [
        {name: factor.clone().requires_grad_() for name, factor in first.items()}
        for _ in range(count)
    ]
    factors = [factor for document in documents for factor in document.values()]
    adam = torch.optim.AdamW(
        factors, hp.ttt_lora_lr, (0.0, 0.99), weight_decay=hp.ttt_lora_wd, fused=True
    )
    return documents, adam


def lora_adapter(hp: Hyperparameters, device: torch.device) -> Adapter:
    """A change for one document that changes nothing yet: random A and zero B. "mlp" goes past the
    whole MLP."""
    adapter: Adapter = {}
    generator = torch.Generator().manual_seed(0)
    outputs = {
        "k": hp.num_kv_heads * hp.head_dim,
        "out": hp.model_dim,
        "mlp": hp.model_dim,
        "tok_emb": hp.vocab_size,
    }
    for name, out in outputs.items():
        layers = 1 if name == "tok_emb" else hp.num_layers
        a = torch.rand(1, layers, hp.ttt_lora_rank, hp.model_dim, generator=generator)
        adapter[f"{name}.a"] = ((2 * a - 1) / hp.model_dim**0.5).to(device)
        adapter[f"{name}.b"] = torch.zeros(1, layers, out, hp.ttt_lora_rank, device=device)
    return adapter


def lora_step(
    scorer: Evaluator,
    spans: np.ndarray,
    adapters: list,
    begin: int,
    stop: int,
    learning: list,
    adam,
):
    """Score the targets [begin, stop) of documents (S, 2) side by side, each with its adapter. An
    AdamW step changes the adapters in `learning`."""
    rows, width, n = lora_shape(scorer, begin, stop)
    spare = rows - len(spans)
    # Spare rows score [0, 0)
    spans = torch.from_numpy(np.pad(spans, ((0, spare), (0, 0))).T.copy())
    start, end = spans[..., None].to(scorer.runtime.device)  # (rows, 1) each
    adapters = [
        *adapters,
        *[{name: factor.detach() for name, factor in adapters[-1].items()}] * spare,
    ]
    adapter = {name: torch.cat([document[name] for document in adapters]) for name in adapters[0]}
    position = start + max(0, stop - width) + torch.arange(width, device=start.device)
    # Else a compiled backward would treat all weights, too
    with contextlib.ExitStack() as afterwards:
        afterwards.callback(scorer.forward.requires_grad_, True)
        forward = functools.partial(scorer.forward.requires_grad_(False), adapter=adapter)
        nats, counts = scorer.batch(forward, position, n, start + begin, end.minimum(start + stop))
    if learning:
        loss = ((nats * counts).sum(dim=1) / counts.sum(dim=1).clamp(min=1)).sum()
        loss.backward(inputs=[factor for document in learning for factor in document.values()])
        adam.step()
        adam.zero_grad()


# ---- Log and files -------------------------------------------------------------------------------
@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to; then synced and renamed, so a crash leaves the old file or the
    complete new one."""
    partial = path.with_name(path.name + ".partial")
    with writing(path):
        try:
            yield partial
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


class Log:
    """Lines on rank 0's console and in logs/<RUN_ID>.txt; events as JSON lines in
    logs/<RUN_ID>.jsonl. A line that cannot be written does not end the run: `failure` says so at
    its end."""

    def __init__(self, hp: Hyperparameters, comm: Comm, folder: Path = Path("logs")):
        self.name = hp.run_id or time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
        self.artifact = folder / f"{self.name}{''.join(ARTIFACT.suffixes)}"
        self.started = time.perf_counter()
        self.failure = ""  # what could not be written, and what to do
        self.files = []
        if comm.rank == 0:
            paths = [folder / f"{self.name}{suffix}" for suffix in (".txt", ".jsonl")]
            with writing(paths[0]):
                folder.mkdir(parents=True, exist_ok=True)
                self.files = [path.open("a", encoding="utf-8", buffering=1) for path in paths]
            busy = f"RUN_ID={self.name}: another run is writing {paths[0]}"
            with explaining(busy, BlockingIOError, advice="wait or set another"):
                # Released when this process ends
                fcntl.flock(self.files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.bar = None
        if comm.rank == 0 and sys.stdout.isatty() and find_spec("tqdm"):
            from tqdm import tqdm

            layout = "{desc} {percentage:.0f}% |{bar}|"
            self.bar = tqdm(
                total=1, bar_format=layout, dynamic_ncols=True, leave=False, file=sys.stdout
            )

    def require_unused(self, hp: Hyperparameters, comm: Comm) -> None:
        """Raise UserError, on all ranks, if the run would replace the log of a finished run or,
        with EVAL_ONLY, of a training. Only a run that kept its limits has finished."""
        kept = {"finished", "train"} if hp.eval_only else {"finished"}
        events = (
            Path(self.files[1].name).read_text(encoding="utf-8", errors="replace")
            if self.files
            else ""
        )
        used = comm.share(bool(kept & set(re.findall(r'(?m)^\{"event": "(\w+)"', events))))
        files = f"{self.artifact.parent / self.name}.txt and .jsonl"
        require(
            not used,
            f"RUN_ID={self.name} is used by an earlier run: set another, or delete its log, {files}",
        )

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self.bar is not None:
            self.bar.close()

    def __call__(
        self, line: str, event: str = "", console: bool = True, bar: tuple = (), **fields
    ) -> None:
        """Write a line and, if `event` names one, {"event": ..., "seconds": since the log began,
        **fields}. In a terminal a progress bar replaces a line with a `bar` of (text, fraction
        done)."""
        if not self.files:
            return
        if bar and self.bar is not None:
            text, self.bar.n = bar
            self.bar.set_description_str(text)
        elif console:
            (print if self.bar is None else self.bar.write)(line)
            sys.stdout.flush()
        try:
            with writing(self.files[0].name):
                self.files[0].write(line + "\n")
                if event:
                    seconds = round(time.perf_counter() - self.started, 3)
                    self.files[1].write(
                        json.dumps({"event": event, "seconds": seconds, **fields}) + "\n"
                    )
        except UserError as error:
            self.failure = self.failure or str(error)

    def stage(self, name: str) -> None:
        """Show in the bar what begins."""
        if self.bar is not None:
            self.bar.n = 0
            self.bar.set_description_str(name)

    def note(self, text: str) -> None:
        """Write `text`, unless it is empty, as a note."""
        if text:
            self(f"note: {text}")

    def header(
        self, hp: Hyperparameters, runtime: Runtime, notes=(), resumed: bool = False
    ) -> None:
        """What is needed to repeat the run: source, versions, machine, every knob. A resumed run
        appends to its log."""
        for file in () if resumed else self.files:
            file.truncate(0)
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        settings = hp.describe()
        packages = [name for name in ("numpy", "sentencepiece", "constriction") if find_spec(name)]
        found = ", ".join(f"{name} {version(name)}" for name in packages)
        versions = f"python {platform.python_version()}, torch {torch.__version__}, {found}, cuda {torch.version.cuda}"
        fields = {"versions": versions, "runtime": runtime.describe()}
        source = "" if resumed else SOURCE.decode() + "\n" + "=" * 100 + "\n"
        self(
            f"{source}started: {started}\nhyperparameters (* differs from the default)\n{settings}",
            console=False,
        )
        self("\n".join(fields.values()))
        changed = " ".join(re.findall(r"(?m)^\* (.*)$", settings))
        fields |= {
            "run_id": self.name,
            "started": started,
            "hyperparameters": dataclasses.asdict(hp),
        }
        self(f"changed from the defaults: {changed or 'nothing'}", event="start", **fields)
        for note in (*runtime.notes, *notes):
            self.note(note)
        require(not self.failure, self.failure)

    def finish(self, comm: Comm, score: str, total: int, advice: str, made: str = "") -> None:
        """The end of a run: its score, the `total` bytes of the submission, what it `made`, and
        what to do next. Raises UserError, on all ranks, if something could not be written."""
        failure = comm.share(self.failure)
        require(not failure, failure)
        log = self.artifact.parent / self.name
        self(
            f"finished: {score}, {total:,} of {SUBMISSION_CAP:,} bytes",
            event="finished",
            bytes=total,
        )
        self(f"files: {made}{log}.txt, {log}.jsonl\nnext: {advice}")


# ---- Checkpoints: a killed run continues where it was (docs/formats.md) --------------------------
CHECKPOINTS = Path("checkpoints")
CHECKPOINT_VERSION = 6


def require_space(hp: Hyperparameters, comm: Comm, log: Log) -> None:
    """Raise UserError, on all ranks, if the disk has no room for log and artifact or for the
    checkpoints."""
    weights = sum(tensor.numel() for tensor in outline(hp).values())
    folder = CHECKPOINTS / hp.run_id
    # The artifact and its copy, two bytes per weight
    needs = {log.artifact.parent: (1 << 25) + 4 * weights}
    # Up to four fp32 numbers per weight; two are kept while a third is written
    if hp.checkpoint_every:
        missing = max(1, 3 - len(list(folder.glob("step_*.safetensors"))))
        needs[folder] = missing * ((1 << 20) + 16 * weights)
    full = ""
    need = sum(needs.values())  # all are on one disk, usually
    for place in needs if comm.rank == 0 else ():
        free = shutil.disk_usage(
            next(path for path in (place, *place.parents) if path.exists())
        ).free
        if free < need:
            full = f"{place} has {free >> 20} MiB of free space, but the run may need {need >> 20}"
    full = comm.share(full)
    require(not full, f"{full}: free some, or start it in another folder")


class Stopped(Exception):
    """The run ends early on request: (signal, steps done, path of the checkpoint)."""


class Checkpoints:
    """Rank 0 writes checkpoints/<RUN_ID>/step_<N>.safetensors: whole tensors, with everything else
    as metadata. A step only waits for the copy to host memory; a thread hashes, writes, syncs and
    renames. The last two are kept."""

    def __init__(self, hp: Hyperparameters, comm: Comm, log: Log):
        self.hp, self.comm, self.log = hp, comm, log
        self.folder = CHECKPOINTS / hp.run_id
        self.copies: dict[str, Tensor] = {}  # in host memory
        self.writer = ThreadPoolExecutor(1)
        self.written = self.writer.submit(lambda: None)  # future of the newest checkpoint
        self.newest = None  # its path
        self.last = {"step": 0, "seconds": 0.0}  # its state, from which intervals count
        if hp.checkpoint_every and comm.rank == 0:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                # Of a killed run
                for unfinished in (*self.folder.glob("*.partial"), *self.folder.glob(".tmp*")):
                    # `replacing` and safetensors' save_file write to such names
                    unfinished.unlink()

    def due(self, step: int, seconds: float) -> bool:
        """Whether to save before `step`, which begins `seconds` into the run; the same on all
        ranks."""
        every = self.hp.checkpoint_every
        spent = seconds - self.last["seconds"] if every.endswith("s") else step - self.last["step"]
        return bool(every) and spent >= int(every.rstrip("s"))

    def save(self, tensors: Iterator[tuple[str, Tensor]], state: dict) -> None:
        """Copy the whole tensors and start writing them, with this metadata. All ranks must call
        this."""
        self.written.result()
        self.last = state
        self.newest = self.folder / f"step_{state['step']:08d}.safetensors"
        for name, tensor in tensors:  # collected from the owners, so every rank iterates
            if self.comm.rank == 0:
                # To pinned memory
                self.copies[name] = tensor.to("cpu", non_blocking=True, copy=True)
        if self.comm.rank == 0:
            copied = torch.cuda.current_stream().record_event() if tensor.is_cuda else None
            metadata = {
                "version": CHECKPOINT_VERSION,
                "hyperparameters": dataclasses.asdict(self.hp),
                **state,
            }
            metadata["source_sha256"] = hashlib.sha256(SOURCE).hexdigest()
            self.written = self.writer.submit(self._write, self.newest, metadata, copied)

    def _write(self, path: Path, metadata: dict, copied: torch.cuda.Event | None) -> None:
        from safetensors import SafetensorError

        # Releases the interpreter lock while it writes; `save` does not
        from safetensors.torch import save_file

        started = time.perf_counter()
        step = metadata["step"]
        if copied is not None:
            copied.synchronize()
        try:
            finite = all(
                torch.linalg.vector_norm(tensor).isfinite() for tensor in self.copies.values()
            )
            require(finite, "it has values that are not finite")
            text = {
                "checkpoint": json.dumps(metadata),
                "sha256": checkpoint_digest(metadata, self.copies),
            }
            with replacing(path) as partial:
                save_file(self.copies, partial, metadata=text)
            for older in sorted(self.folder.glob("step_*.safetensors"))[:-2]:
                older.unlink(missing_ok=True)
            fields = {"bytes": path.stat().st_size, "wall_seconds": time.perf_counter() - started}
            self.log(f"checkpoint: step:{step} {path}", event="checkpoint", step=step, **fields)
        # Such as a full disk; the run continues without it
        except (UserError, SafetensorError, OSError) as error:
            self.log.note(f"there is no checkpoint of step {step}: {error}")
            self.newest = max(self.folder.glob("step_*.safetensors"), default=None)


def checkpoint_digest(metadata: dict, tensors: dict[str, Tensor]) -> str:
    """The sha256 over metadata and tensors, in hexadecimal."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def read_checkpoint(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """(metadata, tensors) of a checkpoint. Raises UserError if it is damaged; nothing in it is
    executed."""
    from safetensors import safe_open

    with explaining("it is truncated or not a checkpoint", Exception, advice="copy or delete it"):
        with safe_open(path, framework="pt") as file:
            text = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        metadata = json.loads(text["checkpoint"])
        stated, version = text["sha256"], metadata["version"]
    require(
        version == CHECKPOINT_VERSION, f"its format has version {version}, not {CHECKPOINT_VERSION}"
    )
    with explaining("its metadata is invalid", Exception, advice="copy or delete it"):
        numbers = [metadata[key] for key in ("step", "seconds", "samples", "reserve")] + metadata[
            "recent"
        ]
        valid = (
            all(isinstance(n, int | float) and n >= 0 for n in numbers)
            and metadata["hyperparameters"].keys()
        )
    require(stated == checkpoint_digest(metadata, tensors), "its checksum is wrong")
    require(bool(valid), "its metadata is invalid")
    return metadata, tensors


def find_checkpoint(
    hp: Hyperparameters, comm: Comm
) -> tuple[Path | None, dict, dict[str, Tensor], list[str]]:
    """(path, metadata, tensors, notes for the log) of RESUME's checkpoint; only rank 0 has
    tensors."""
    found = (None, {})
    notes = []
    tensors = {}
    folder = CHECKPOINTS / hp.run_id
    paths = sorted(folder.glob("step_*.safetensors"), reverse=True) if comm.rank == 0 else []
    fresh = not paths or bool(hp.resume) or not hp.checkpoint_every
    require(
        fresh, f"{folder} holds an earlier run: set RESUME=auto to continue it, or another RUN_ID"
    )
    own = (
        not paths
        or hp.resume in ("", "auto")
        or Path(hp.resume).resolve().parent == folder.resolve()
    )
    mixed = f"RESUME={hp.resume}, but RUN_ID={hp.run_id} has checkpoints of its own in {folder}"
    require(
        own, f"{mixed}: set RESUME=auto to continue from the newest of those, or another RUN_ID"
    )
    if hp.resume != "auto":
        paths = [Path(hp.resume)] if hp.resume and comm.rank == 0 else []
    for path in paths:
        try:
            metadata, tensors = read_checkpoint(path)
        except ValueError as error:
            notes.append(f"checkpoint {path} skipped: {reason(error)}")
            continue
        before = metadata["hyperparameters"]
        now = {name: getattr(hp, name) for name in knobs_with("training", "model")}
        unlike = ", ".join(
            f"{n.upper()}={now[n]} instead of {before.get(n)}"
            for n in now
            if before.get(n) != now[n]
        )
        other = f"RESUME={hp.resume}: {path} is of another run, with {unlike}: set the same, or another RUN_ID"
        require(
            not unlike,
            f"{other}; only these may change: {' '.join(knobs_with('evaluation', 'run')).upper()}",
        )
        if metadata["source_sha256"] != hashlib.sha256(SOURCE).hexdigest():
            notes.append("train_gpt.py has changed since this checkpoint")
        found = path, metadata
        break
    require(
        tensors or not notes,
        f"RESUME={hp.resume}: {'; '.join(notes)}; delete {folder} to start over",
    )
    (path, metadata), notes = comm.share((found, notes))
    return path, metadata, tensors, notes


# ---- Training ------------------------------------------------------------------------------------
@contextlib.contextmanager
def stop_signals() -> Iterator[list[signal.Signals]]:
    """The signals received so far. SIGTERM and the first Ctrl-C are only noted; a second one ends
    the run at once."""
    received = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, frame: object) -> None:
        signal.signal(number, before[number])
        received.append(signal.Signals(number))

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Training:
    """A run: model, data, optimizer, average and clock, and the loop over them."""

    def __init__(self, hp: Hyperparameters, runtime: Runtime, log: Log, val: Validation | None):
        self.hp, self.runtime, self.log, self.val = hp, runtime, log, val
        self.loader = TrainingLoader(hp, runtime)
        rows = self.loader.rows
        fitting = max(1, runtime.micro_batch_tokens // hp.train_seq_len)
        self.accumulation = next(
            n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= fitting
        )
        self.model = GPT(hp, runtime.attend, runtime.dtype, runtime.fused_mlp)
        # Another node's CPU may round differently
        weights = runtime.comm.share(self.model.initialise(hp.seed))
        self.model.load_state_dict(weights)
        self.forward = compile_whole(self.model.to(runtime.device), runtime.compiled)
        self.eval_forward = self.model if hp.compile == "train" else self.forward
        self.bpb = ""  # of the last validation, for the progress bar
        self.optimizer = ParallelMuon(
            self.model, weights, hp, runtime.comm, self.accumulation > 1, runtime.compiled
        )
        self.average = WeightAverage(self.optimizer.owned, hp)
        self.checkpoints = Checkpoints(hp, runtime.comm, log)
        self.clock = Clock(
            hp.max_wallclock_seconds, in_flight=2 if runtime.device.type == "cuda" else 0
        )
        self.in_flight = []  # steps whose reports are not read yet
        self.signals = []  # that this rank has received
        self.stopping = False  # whether any rank has received one

    def train_step(self, step: int, settings: StepSettings) -> Tensor:
        """Forward, backward and update on batch `step`. Returns the summed Report as (3,) on the
        device."""
        comm, report = self.runtime.comm, self.optimizer.report
        with contextlib.ExitStack() as afterwards:
            afterwards.callback(setattr, self.model, "qat", False)
            self.model.qat = settings.qat
            self.model.visits = self.hp.visits(settings.looping)
            for rows in self.loader.batch(step).chunk(self.accumulation):
                ids = rows.to(torch.int64)
                x, y = (part.reshape(-1, settings.seq_len) for part in (ids[:, :-1], ids[:, 1:]))
                loss = self.forward(x, y) / (self.accumulation * comm.size)
                loss.backward()
                self.optimizer.accumulate()
                report.loss.add_(loss.detach())
        report.seconds.fill_(self.clock.elapsed() if comm.rank == 0 else 0.0)
        report.stop.fill_(float(bool(self.signals)))
        summed = self.optimizer.step(settings.lr_scale, settings.momentum)
        self.average.update(step, settings.lr_scale)
        self.optimizer.finish()
        return summed

    def warm_up(self) -> None:
        """Run the graphs and collectives of the run before its clock starts, then restore all
        state."""
        hp = self.hp
        started = time.perf_counter()
        # Reserve time for GPTQ, as rank 0 measures it
        if hp.gptq_batches and hp.max_wallclock_seconds:
            self.calibrate(range(1))  # loads kernels
            reserve = 1.1 * hp.gptq_batches * self.runtime.comm.share(self.calibrate(range(1))[1])
            short = f"MAX_WALLCLOCK_SECONDS={hp.max_wallclock_seconds:g} is less than the {reserve:.1f} s for GPTQ"
            require(
                reserve < hp.max_wallclock_seconds,
                f"{short}: set GPTQ_BATCHES=0, or allow more time",
            )
            self.clock.reserve = reserve
            self.log(f"warmup: {reserve:.2f} s of the wall clock are reserved for GPTQ")
        if not hp.warmup_steps:
            return
        before = {name: tensor.clone() for name, tensor in self.tensors().items()}
        kinds = phases(hp)
        whole = next(kind for kind in kinds if kind.seq_len == hp.train_seq_len)
        kinds = [whole] * hp.warmup_steps + [kind for kind in kinds if kind is not whole]
        queued = []  # when each step was
        self.clock.start()
        for step, settings in enumerate(kinds):
            # Compiling takes minutes the first time
            if step in (0, hp.warmup_steps - 1) or settings is not whole:
                kind = f"seq_len:{settings.seq_len} qat:{int(settings.qat)} looping:{int(settings.looping)}"
                line = f"warmup_step:{step + 1}/{len(kinds)} {kind} seconds:{time.perf_counter() - started:.1f}"
                self.log(
                    line,
                    bar=("compiling" if self.runtime.compiled else "warm-up", step / len(kinds)),
                )
            queued.append(Report(*self.train_step(step, settings).tolist()).seconds)
        if hp.val_loss_every and hp.loop_visits > 1:  # validations before the loop begins
            self.model.visits = hp.visits(looping=False)
            warm_up_windows(self.eval_forward, self.val, hp, self.runtime, validation_stride(hp))
        self.model.visits = hp.visits()
        warm_up_evaluation(self.eval_forward, self.val, hp, self.runtime)
        torch._foreach_copy_(list(self.tensors().values()), list(before.values()))
        self.optimizer.sync_replicas()
        self.average.samples = 0
        self.runtime.synchronize()
        # An ordinary step, compiled before
        self.clock.reset(0, 0.0, np.diff(queued[: hp.warmup_steps])[-1:].tolist())
        elapsed = time.perf_counter() - started
        self.log(f"warmup: done seconds:{elapsed:.1f}", event="warmup", wall_seconds=elapsed)

    def profiler(self) -> contextlib.AbstractContextManager:
        """With PROFILE, torch's profiler of steps 4 to 8; its trace opens in a browser
        (ui.perfetto.dev)."""
        if not self.hp.profile:
            return contextlib.nullcontext()
        handler = torch.profiler.tensorboard_trace_handler(
            self.hp.profile, f"rank{self.runtime.comm.rank}"
        )
        window = torch.profiler.schedule(wait=2, warmup=1, active=5, repeat=1)
        return torch.profiler.profile(schedule=window, on_trace_ready=handler)

    def train(self) -> None:
        """Steps until ITERATIONS or the wall clock end, with validations in between, for which the
        clock pauses."""
        hp = self.hp
        first = step = self.clock.step + 1
        gc.collect()
        # Keep long-lived objects out of the collector's full passes, which stall a step
        gc.freeze()
        with stop_signals() as self.signals, self.profiler() as profile:
            while not self.stopping:
                due = hp.val_loss_every and step % hp.val_loss_every == 0
                if due or self.clock.begins(step) >= self.clock.end(step):
                    # Decide from what a checkpoint holds, so that a resumed run decides the same
                    self._settle(0)
                begins, end = self.clock.begins(step), self.clock.end(step)
                done = step >= hp.iterations or begins >= end
                settings = None if done else schedule(hp, step, begins, end)
                if done or due:
                    self._settle(0)
                    self.clock.pause()
                    self.model.visits = hp.visits(done or settings.looping)
                    self.validate(step)
                if done:
                    break
                self.clock.start()
                # To pinned memory
                values = self.train_step(step, settings).to("cpu", non_blocking=True)
                copied = (
                    torch.cuda.current_stream().record_event()
                    if self.runtime.device.type == "cuda"
                    else None
                )
                self.in_flight.append((step, settings, values, copied))
                # Queue ahead once a step's time is known
                self._settle(self.clock.in_flight if step > first + 1 else 0)
                step += 1
                if self.stopping or self.checkpoints.due(step, self.clock.begins(step)):
                    self._settle(0)
                    self.save(step)
                if hp.profile:
                    profile.step()
        self.save(step)
        kinds = (signal.SIGINT, signal.SIGTERM)
        received = torch.tensor([kind in self.signals for kind in kinds], dtype=torch.float32)
        received = received.to(self.runtime.device)
        # A signal of the last validation is in no step's report
        self.runtime.comm.all_reduce(received)()
        if received.any():
            self.checkpoints.written.result()  # so that rank 0 knows the newest
            raise Stopped(
                kinds[int(received[0] == 0)], step, self.runtime.comm.share(self.checkpoints.newest)
            )
        if step < hp.iterations:
            seconds = self.clock.elapsed()
            line = f"stopping_early: wallclock_cap train_time:{1000 * seconds:.0f}ms step:{step}/{hp.iterations}"
            self.log(line, event="stopping_early", step=step, train_seconds=seconds)

    def validate(self, step: int) -> None:
        """Log the score before this step."""
        self.log.stage("validation")
        stride = validation_stride(self.hp)
        score = evaluate(
            self.eval_forward, self.val, self.hp, self.runtime, stride, self.log, "validation"
        )
        self.bpb = f"bpb {score.bits_per_byte:.4f}, "
        result = f"val_loss:{score.nats:.4f} val_bpb:{score.bits_per_byte:.4f}"
        more = f"eval_time:{1000 * score.seconds:.0f}ms"
        self._progress("val", step, result, more, val_loss=score.nats, val_bpb=score.bits_per_byte)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint as this rank has them: the optimizer's, and the average as
        PARAMETER.average."""
        return self.optimizer.tensors() | {
            f"{name}.average": mean for name, mean in self.average.mean.items()
        }

    def save(self, step: int) -> None:
        """Checkpoint the state before `step`, if checkpoints are enabled and this one does not
        exist yet."""
        if self.hp.checkpoint_every and step > self.checkpoints.last["step"]:
            whole = (
                (name, self.optimizer.whole(name, tensor))
                for name, tensor in self.tensors().items()
            )
            state = {"step": step, "samples": self.average.samples, "reserve": self.clock.reserve}
            self.checkpoints.save(
                whole, state | {"seconds": self.clock.seconds, "recent": self.clock.recent}
            )

    def restore(self, path: Path, state: dict, tensors: dict[str, Tensor]) -> None:
        """Continue from a checkpoint, on any number of ranks; rank 0 has its tensors."""
        for name, tensor in self.tensors().items():
            self.optimizer.distribute(name, tensor, tensors.pop(name, None))
        self.optimizer.sync_replicas()
        step, seconds = state["step"], state["seconds"]
        self.average.samples = state["samples"]
        self.clock.reset(step, seconds, state["recent"])
        # With less, a finished run would take a step
        self.clock.reserve = max(self.clock.reserve, state["reserve"])
        self.checkpoints.last = state
        self.checkpoints.newest = path
        for later in (
            self.checkpoints.folder.glob("step_*.safetensors")
            if self.runtime.comm.rank == 0
            else ()
        ):
            if later.name > path.name:  # damaged, or of a branch that this run leaves
                later.unlink()
        line = f"resumed: step:{step} train_time:{1000 * seconds:.0f}ms from:{path}"
        self.log(line, event="resumed", step=step, train_seconds=seconds, path=str(path))

    def finish(self) -> tuple[str, dict[str, Tensor]]:
        """Average the weights and calibrate GPTQ, within the wall clock. Returns (name of the
        average, Hessians)."""
        batches = self.hp.gptq_batches
        self.log.stage("GPTQ" if batches else "averaging")
        self.model.visits = self.hp.visits()
        self.clock.start()
        averaged = self.average.apply()
        self.optimizer.sync_replicas()
        next_steps = range(self.clock.step + 1, self.clock.step + 1 + batches)
        hessians, took = self.calibrate(next_steps) if batches else ({}, 0.0)
        self.clock.pause()
        if batches:
            line = f"gptq: Hessians of {batches * self.hp.train_batch_tokens} training tokens took {1000 * took:.0f}ms"
            fields = {
                "batches": batches,
                "train_seconds": self.clock.elapsed(),
                "wall_seconds": took,
            }
            self.log(
                f"{line} train_time:{1000 * self.clock.elapsed():.0f}ms", event="gptq", **fields
            )
        return averaged, hessians

    @torch.no_grad()
    def calibrate(self, steps: range) -> tuple[dict[str, Tensor], float]:
        """(GPTQ's Hessians, the sums of x^Tx over the activations x that a matrix reads in these
        steps; seconds)."""
        started = time.perf_counter()
        weights = self.model.matrices()
        for name in [kind.reads for kind in (*MATRICES, *TABLES) if kind.reads in weights]:
            width = weights[name][0].size(1)
            self.model.hessians[name] = torch.zeros(
                len(weights[name]), width, width, device=self.runtime.device
            )
        hessians = self.model.hessians
        with contextlib.ExitStack() as afterwards:
            afterwards.callback(setattr, self.model, "hessians", {})
            for rows in (
                rows for step in steps for rows in self.loader.batch(step).chunk(self.accumulation)
            ):
                self.model(rows[:, :-1].to(torch.int64))
        for arrived in [self.runtime.comm.all_reduce(total) for total in hessians.values()]:
            arrived()
        self.runtime.synchronize()
        return hessians, time.perf_counter() - started

    def _settle(self, depth: int) -> None:
        """Process the reports of all but the last `depth` steps."""
        hp = self.hp
        while len(self.in_flight) > depth:
            index, settings, values, copied = self.in_flight.pop(0)
            if copied is not None:
                copied.synchronize()
            report = Report(*values.tolist())
            self.clock.agree(index, report.seconds)
            self.stopping |= report.stop > 0
            step = index + 1
            if not math.isfinite(report.loss):
                raise UserError(self._not_finite(step, report.loss))
            if step <= 10 or step % hp.train_log_every == 0:
                seconds = self.clock.elapsed()
                rate = step * hp.train_batch_tokens / seconds
                eta = min(
                    (hp.iterations - step) * seconds / step,
                    self.clock.cap - self.clock.reserve - seconds,
                )
                rates = f"tok_s:{rate:.0f} lr_scale:{settings.lr_scale:.4f} momentum:{settings.momentum:.4f}"
                more = f"{rates} qat:{int(settings.qat)} seq_len:{settings.seq_len} eta:{eta:.0f}s"
                fields = {
                    "train_loss": report.loss,
                    "tokens_per_second": rate,
                    **settings._asdict(),
                }
                state = f"training: step {step}, loss {report.loss:.4f}, {self.bpb}"
                state += f"{rate:,.0f} tokens/s, {eta:.0f} s left"
                fields["bar"] = (state, min(1, max(step / hp.iterations, seconds / self.clock.cap)))
                self._progress("train", step, f"train_loss:{report.loss:.4f}", more, **fields)

    def _not_finite(self, step: int, loss: float) -> str:
        norms = ", ".join(
            f"{name} {float(w.norm()):.3g}" for name, w in self.optimizer.owned.items()
        )
        self.checkpoints.written.result()
        kept = (
            f"; the last good checkpoint is {self.checkpoints.newest}"
            if self.checkpoints.newest
            else ""
        )
        advice = "lower MATRIX_LR, SCALAR_LR or TIED_EMBED_LR, or check the data of that step"
        return f"the training loss of step {step} is {loss} (norms of this rank's weights: {norms}){kept}: {advice}"

    def _progress(self, event: str, step: int, result: str, more: str, **fields) -> None:
        seconds = self.clock.elapsed()
        used = f"train_time:{1000 * seconds:.0f}ms step_avg:{1000 * seconds / max(step, 1):.2f}ms"
        line = f"step:{step}/{self.hp.iterations} {result} {used} {more}"
        self.log(line, event=event, step=step, train_seconds=seconds, **fields)


# ---- The whole run -------------------------------------------------------------------------------
# Targets times weights; two cores score fewer in less time than they compile
WORTH_COMPILING = 1e12


def score_artifact(
    model: GPT, forward, val: Validation, hp: Hyperparameters, runtime: Runtime, log: Log
) -> str:
    """Log the final scores: non-overlapping windows, sliding ones or a banded pass, test-time
    training; on Ctrl-C, what was scored until then. Returns the last one, for the end of the
    log."""
    for name, stride in final_strides(hp).items():
        log.stage(name)
        scorer = Evaluator(forward, val, hp, runtime, stride, log, name)
        try:
            if name.startswith("ttt"):
                {"sgd": ttt_sgd, "lora": ttt_lora}[hp.ttt_mode](model, scorer)
            else:
                scorer.score(scorer.windows())
            score = scorer.result()
            score.log(log, f"final_int6_{name}_exact")
        except KeyboardInterrupt:
            scored = scorer.result(complete=False)
            if scored.targets:
                scored.log(log, f"final_int6_{name}_partial")
            raise
    return f"{score.bits_per_byte:.4f} bits per byte ({name})"


def export(run: Training, hessians: dict[str, Tensor], metadata: dict) -> tuple[bytes, int]:
    """Rank 0 quantises, packs and writes the artifact. Returns its bytes, on all ranks, and the
    submission's size."""
    hp = run.hp
    log = run.log
    started = time.perf_counter()
    code_bytes = Path(__file__).stat().st_size
    weights = run.optimizer.weights()
    blob, path = b"", None
    log.stage("export")
    if run.runtime.comm.rank == 0:
        log(
            f"export: coding {sum(w.numel() for w in weights.values()):,} weights, {'GPTQ' if hessians else 'plain'}"
        )
        max_bytes = hp.target_bytes - code_bytes if hp.target_bytes else math.inf
        blob = fit_artifact(weights, hp, hessians, metadata, max_bytes, log)
        path = keep_artifact(blob, log)
    blob = run.runtime.comm.share(blob)
    total = len(blob) + code_bytes
    log(f"Serialized model int6+{hp.compressor}: {len(blob)} bytes\nCode size: {code_bytes} bytes")
    fields = {
        "model_bytes": len(blob),
        "code_bytes": code_bytes,
        "wall_seconds": time.perf_counter() - started,
    }
    log(
        f"Total submission size int6+{hp.compressor}: {total} bytes",
        event="artifact",
        path=str(path),
        **fields,
    )
    return blob, total


def keep_artifact(blob: bytes, log: Log) -> Path:
    """Write the artifact beside the log, with a copy as ARTIFACT, or else to the temporary folder.
    Returns its path."""
    path = log.artifact
    try:
        for name in (path, ARTIFACT):
            with replacing(name) as partial:
                partial.write_bytes(blob)
    except UserError as error:
        with writing("to the temporary folder"):
            path = Path(tempfile.mkdtemp(), log.artifact.name)
            path.write_bytes(blob)
        log.failure = f"{error}; the artifact is {path}"
        log.note(log.failure)
    return path


def check_limits(total: int, seconds: float, hp: Hyperparameters) -> None:
    """Raise UserError if time or bytes exceed the challenge's limits; MAX_WALLCLOCK_SECONDS may
    raise the first."""
    cap = max(hp.max_wallclock_seconds or math.inf, TRAINING_CAP)
    slow = f"training took {seconds:.2f} s, over the limit of {cap:g}: this run is not a valid submission"
    require(seconds <= cap, f"{slow}; lower MAX_WALLCLOCK_SECONDS")
    large = f"code and artifact are {total} bytes, {total - SUBMISSION_CAP} over the limit of {SUBMISSION_CAP}"
    require(
        total <= SUBMISSION_CAP,
        f"{large}: not a valid run; set TARGET_BYTES={SUBMISSION_CAP} or a smaller model",
    )


def compile_for_evaluation(model: GPT, val: Validation, runtime: Runtime, log: Log) -> Callable:
    """The forward of EVAL_ONLY. On a CPU a small text would be scored before its forward is
    compiled."""
    wanted, on_cpu = model.hp.compile, runtime.device.type == "cpu"
    compiled = runtime.compiled and wanted != "train"
    if compiled and on_cpu and wanted == "auto":
        compiled = val.targets * sum(p.numel() for p in model.parameters()) >= WORTH_COMPILING
        if not compiled:
            log.note("the text is too small to compile for on a CPU; COMPILE=1 compiles")
    if compiled:
        way = "; COMPILE=0 begins at once" if on_cpu else ""
        log(
            f"compiling the evaluation, which takes minutes the first time{way}",
            bar=("compiling", 0),
        )
    return compile_whole(model, compiled)


def evaluate_only(environ: dict[str, str], path: str) -> None:
    """Load the artifact at `path` and score it."""
    blob, hp = read_artifact(path, environ)
    with reading_artifact(path):
        weights = load_artifact(blob)
    with Runtime.start(hp) as runtime, contextlib.closing(Log(hp, runtime.comm)) as log:
        log.require_unused(hp, runtime.comm)
        log.header(hp, runtime)
        val = Validation(hp, runtime.device)
        log.note(val.note)
        model = GPT(hp, runtime.attend, runtime.dtype, runtime.fused_mlp)
        model.load_state_dict(weights)
        forward = compile_for_evaluation(model.to(runtime.device), val, runtime, log)
        warm_up_evaluation(forward, val, hp, runtime)
        score = score_artifact(model, forward, val, hp, runtime, log)
        total = len(blob) + Path(__file__).stat().st_size
        log.finish(runtime.comm, score, total, f"python tools/inspect_artifact.py {path}")


def train_and_score(hp: Hyperparameters) -> None:
    """The whole run: train, average, export, reload, score."""
    needs = {
        "constriction": hp.compressor == "ans",
        "safetensors": hp.checkpoint_every or hp.resume,
    }
    missing = " ".join(
        package for package, needed in needs.items() if needed and not find_spec(package)
    )
    require(
        not missing,
        f"COMPRESSOR=ans, CHECKPOINT_EVERY or RESUME needs {missing}: pip install {missing}",
    )
    outline(hp)  # an artifact that nothing can load is refused before the training
    with Runtime.start(hp) as runtime, contextlib.closing(Log(hp, runtime.comm)) as log:
        log.require_unused(hp, runtime.comm)
        # The log's lock also guards them
        path, state, tensors, notes = find_checkpoint(hp, runtime.comm)
        require_space(hp, runtime.comm, log)
        log.header(hp, runtime, notes, resumed=path is not None)
        val = Validation(hp, runtime.device)
        log.note(val.note)
        run = Training(hp, runtime, log, val)
        data = f"val_tokens:{val.targets} val_bytes:{val.total_bytes} train_shards:{len(run.loader.stream.paths)}"
        work = f"accumulation:{run.accumulation} rows:{run.loader.rows // run.accumulation}"
        log(f"model_params:{sum(p.numel() for p in run.model.parameters())} {data} {work}")
        with contextlib.closing(run.loader):
            run.warm_up()
            if path:
                run.restore(path, state, tensors)
            run.train()
            averaged, hessians = run.finish()
        peak = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB resident"
        if runtime.device.type == "cuda":
            peak = f"{torch.cuda.max_memory_allocated() >> 20} MiB allocated on the GPU"
        log(f"peak_memory: {peak}\nexporting {averaged}")
        log.stage("averaged weights")
        before = evaluate(
            run.eval_forward, val, hp, runtime, hp.eval_seq_len, log, "averaged weights"
        )
        seconds = runtime.comm.share(run.clock.elapsed())  # so that all ranks pass or fail
        before.log(log, "final_average_exact")
        training = {
            "steps": run.clock.step + 1,
            "train_seconds": seconds,
            "tokens_per_step": hp.train_batch_tokens,
        }
        training |= {
            "ranks": runtime.comm.size,
            "seed": hp.seed,
            "weights": averaged,
            "val_bpb": before.bits_per_byte,
        }
        blob, total = export(
            run, hessians, {"tokenizer_sha256": sha256_of(hp.tokenizer_path), "training": training}
        )
        run.model.load_state_dict(load_artifact(blob))
        score = score_artifact(run.model, run.eval_forward, val, hp, runtime, log)
        run.checkpoints.written.result()
        paths = {
            "DATA_PATH": hp.data_path,
            "TOKENIZER_PATH": hp.tokenizer_path,
            "EVAL_ONLY": str(log.artifact),
        }
        again = " ".join(f"{name}={shlex.quote(path)}" for name, path in paths.items())
        log.finish(
            runtime.comm,
            score,
            total,
            f"{again} python train_gpt.py",
            f"{log.artifact} (copy: {ARTIFACT}), ",
        )
        check_limits(total, seconds, hp)


def main() -> None:
    """Read the knobs and do the run. A user's mistake ends it with one sentence and a non-zero
    status."""
    text = {
        "description": __doc__.split("\n\n")[0],
        "epilog": "Knobs (environment variables):\n" + knob_help(),
    }
    argparse.ArgumentParser(
        **text, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()

    def interrupt(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a launcher repeats it
        raise KeyboardInterrupt(signal.Signals(number))

    signal.signal(signal.SIGTERM, interrupt)
    try:
        hp = Hyperparameters.from_env(dict(os.environ))
        return (
            evaluate_only(dict(os.environ), hp.eval_only) if hp.eval_only else train_and_score(hp)
        )
    except UserError as error:
        status, sentence = 1, str(error)
    except torch.OutOfMemoryError as error:
        status, sentence = (
            1,
            f"a GPU's memory is full ({reason(error)}): set a lower MICRO_BATCH_TOKENS",
        )
    except Stopped as stopped:
        number, step, path = stopped.args
        lost = "no checkpoint could be written, see the log"
        if not hp.checkpoint_every:
            lost = "only the log is kept: set CHECKPOINT_EVERY=60s to keep the training"
        advice = f"set RESUME=auto to continue from {path}" if path else lost
        status, sentence = 128 + number, f"stopped by {number.name} after step {step}; {advice}"
    except KeyboardInterrupt as interrupted:
        number, name = (
            (signal.SIGTERM, "SIGTERM") if interrupted.args else (signal.SIGINT, "Ctrl-C")
        )
        status, sentence = (
            128 + number,
            f"interrupted by {name}; what was finished until then is in the log",
        )
        if number == signal.SIGTERM and os.environ.get("LOCAL_RANK", "0") != "0":
            # The node's first rank says it, or the launcher ends the ranks that an error has left
            os._exit(status)
    complain(sentence)
    # Threads of failed collectives can abort an interpreter that shuts down
    if dist.is_initialized():
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
