"""Train, export and score a small language model for the Parameter Golf challenge, in one file.

The challenge: the fewest bits per byte on FineWeb validation text, by a model whose code plus
compressed weights fit in 16,000,000 bytes and which trains in 600 seconds on 8 x H100. This script
trains a transformer whose matrices are stored in three 3-D "parameter banks", with Parallel Muon
(arXiv:2511.07464), and scores its entropy-coded artifact.

    torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node=8 train_gpt.py  # all defaults
    python train_gpt.py                                      # the same mathematics, one GPU or CPU
    python train_gpt.py --help                               # every knob, an environment variable

The file has the method first: knobs, errors, model, optimizer, schedules, training, evaluation,
test-time training, quantisation and artifact, the whole run. The machinery follows: data, coders,
log, checkpoints, ranks and devices, kernels. `main` is last.

Data flow:

    shards (n,) uint16 -> loader x, y (B, T) -> GPT -> loss () -> backward -> local gradients
      banks (R, a, b), padded to S*r rows: reduce-scatter in the node -> (r, a, b) ->
      all-reduce over the nodes -> momentum -> Newton-Schulz -> fp32 master rows ->
      all-gather in the node, in the compute dtype
      other parameters: one flat all-reduce -> AdamW;  EMA of the owned rows
    EMA -> one (out, in) matrix per bank row -> quantised codes + steps -> coder -> artifact bytes
    artifact -> dequantise -> banks -> GPT -> nats per token -> bits per byte

Shapes: B sequences, T tokens, D width, H heads, K key/value heads, E head dimension, V vocabulary,
L layers, S ranks of a node, R rows of a bank, r rows of a bank that one rank owns. "#399"
is pull request 399 of the challenge's repository."""

from __future__ import annotations

import argparse
import bisect
import collections
import copy
import dataclasses
import difflib
import gc
import hashlib
import io
import itertools
import json
import linecache
import lzma
import math
import operator
import os
import platform
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, TextIO

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"error: this needs Python 3.11 or later, and this is {sys.version.split()[0]}")

SUBMISSION_CAP = 16_000_000  # bytes of code plus artifact, by the rules of the challenge
TRAINING_CAP = 600.0  # seconds, by the same rules


# ---- Hyperparameters: each knob is declared once -------------------------------------------------
# A bound may name another knob. "low" is checked first, so no divisor is 0.
LIMITS = {
    "low": ("at least", operator.ge),
    "high": ("at most", operator.le),
    "choices": ("one of", lambda value, choices: value in choices),
    "multiple_of": ("a multiple of", lambda value, divisor: value % divisor == 0),
}
MAX_NUMBER = (1 << 32) - 1  # largest value of a knob
# Attention kernels; `sdpa`: torch's flash or memory-efficient one.
KERNELS = ("fa3", "cudnn", "sdpa", "math")
# How a U-Net skip is added: times a sigmoid gate, initially 0.18; times a scale, initially 1; or by
# a gate between the scaled skip and the stream.
SKIPS = ("gates", "scales", "lerp")
# Trellises: parity checks by number of states (Ungerboeck, IEEE Trans. Inf. Theory 28, 1982).
PARITY = {4: (0o5, 0o2), 8: (0o13, 0o4), 16: (0o23, 0o4), 64: (0o103, 0o24), 256: (0o515, 0o362)}


def knob(default, text, role="training", **limits):
    """A field set by an environment variable. The artifact stores those whose `role` is "model", and
    of "training" and "score" those that differ from their defaults. EVAL_ONLY repeats them; a
    variable may change those that are not "model". On resume those of "score" and "run" may change,
    those of "training" and "model" may not. So "model" is for every knob that says what weights or
    codes mean.

    `limits` are those of LIMITS and `section`, a heading of --help; numbers are at least 0 and at
    most MAX_NUMBER unless they say otherwise."""
    if type(default) in (int, float):  # not bool
        limits = {"low": 0, "high": MAX_NUMBER} | limits
    return dataclasses.field(default=default, metadata={"text": text, "role": role, **limits})


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """All knobs. The defaults are #399's run (configs/399.env) plus changes that measured better.
    Raises UserError for impossible values."""

    # fmt: off
    data_path: str = knob("./data/datasets/fineweb10B_sp1024", "folder with the token shards", "score", section="Data")
    tokenizer_path: str = knob("./data/tokenizers/fineweb_1024_bpe.model", "SentencePiece model of the shards", "score")
    vocab_size: int = knob(1024, "vocabulary size of the tokenizer", "model", low=4, high=65536)
    shuffle_seed: int = knob(1, "seed of the per-epoch shuffle, with SEED; 0: #399's order")

    num_layers: int = knob(11, "transformer layers", "model", low=1, high=256, section="Model")
    model_dim: int = knob(512, "width D of the residual stream", "model", low=8, multiple_of="num_heads")
    num_heads: int = knob(8, "query heads", "model", low=1, multiple_of="num_kv_heads")
    num_kv_heads: int = knob(4, "key/value heads, each shared by NUM_HEADS / NUM_KV_HEADS query heads", "model", low=1)
    mlp_mult: float = knob(4.0, "hidden width over MODEL_DIM; GPUs like a width in steps of 64", "model", low=0.1)
    mlp_slope: float = knob(0.5, "negative slope of the squared leaky ReLU; 0: relu^2 (#399)", "model", high=1)
    skips: str = knob("gates", "U-Net skips: sigmoid gates, scales (#399), or lerp (#2135)", "model", choices=SKIPS)
    smear_token: bool = knob(False, "SmearGate before the norm, gated by 12 dimensions of the embedding", "model")
    loop_visits: int = knob(1, "how often the looped layers run; 1: no depth recurrence", "model", low=1, high=16)
    loop_first: int = knob(3, "first looped layer", "model")
    loop_layers: int = knob(3, "number of looped layers", "model")
    lanes_last_n: int = knob(0, "the last N layers have two parallel lanes", "model", high="num_layers")
    mudd: bool = knob(False, "weights by token add earlier streams to the last layer and its output (MUDD)", "model")
    attn_gate: bool = knob(False, "gate attention's output per head, from 12 dimensions of its input", "model")
    mlp_gate: bool = knob(False, "gate the MLP's output per token, from 12 dimensions of the stream", "model")
    attn_window: int = knob(0, "attention sees the last N tokens (all in the last quarter of layers); 0: all", "model")
    doc_attention: bool = knob(False, "attention stays within a document; fa3 takes 16 + T/256 in a row", "model")
    doc_len: int = knob(0, "in training, cut documents every N tokens from their start or the row's; 0: never")
    tied_embed_init_std: float = knob(0.005, "standard deviation of the initial embedding")
    logit_softcap: float = knob(30.0, "logits are c * tanh(logits / c)", "model", low=1e-3)
    qk_gain_init: float = knob(1.5, "initial value of the learned gain per query head")
    rope_base: float = knob(10000.0, "base of the rotary frequencies; not rescaled with the length", "model", low=1)
    rope_dims: int = knob(16, "rotated dimensions per head; 0: all", "model")
    ln_scale: bool = knob(True, "scale the input of each sublayer by 1/sqrt(layer + 1)", "model")
    xsa_last_n: int = knob(4, "the last N layers use exclusive self-attention", "model", high="num_layers")
    bigram_vocab_size: int = knob(2048, "buckets of the hashed bigram embedding; 0: none", "model")
    bigram_dim: int = knob(128, "width of the hashed bigram embedding", "model", low=1)

    train_batch_tokens: int = knob(786_432, "tokens per step", low=1, multiple_of="train_seq_len", section="Batch")
    train_seq_len: int = knob(2048, "tokens T of a sequence", low=2, high=1 << 20, multiple_of="short_seq_parts")
    short_seq_parts: int = knob(4, "cut sequences into N parts for the first 40 % of the run; 1: never (#399)", low=1)
    micro_batch_tokens: int = knob(0, "tokens per forward on each rank; 0: 98,304, on a CPU 16,384", "run")

    iterations: int = knob(20_000, "training steps, unless time is over first", "run", low=1, section="Schedule")
    max_wallclock_seconds: float = knob(TRAINING_CAP, "time limit of steps and calibration; 0: none", "run")
    warmup_steps: int = knob(20, "untimed warm-up steps, undone afterwards; 0: the first timed steps compile", "run")
    warmdown_iters: int = knob(3000, "length of the linear warmdown in steps; at most half of the run")
    warmdown_frac: float = knob(0.0, "the same as a fraction of the run; 0: WARMDOWN_ITERS", high=1)
    min_lr: float = knob(0.0, "learning rate at the end of the warmdown, as a fraction of the peak", high=1)
    loop_start: float = knob(0.35, "fraction of the run after which the layers loop", high=0.99)

    matrix_lr: float = knob(0.025, "Muon learning rate of the banks", section="Optimizer")
    scalar_lr: float = knob(0.025, "Adam learning rate of gains, gates and the bigram projection")
    tied_embed_lr: float = knob(0.035, "Adam learning rate of the token and bigram embeddings")
    muon_momentum: float = knob(0.99, "Nesterov momentum", high=1)
    muon_momentum_warmup_start: float = knob(0.92, "momentum at step 0", high=1)
    muon_momentum_warmup_steps: int = knob(1500, "steps until MUON_MOMENTUM; at most half of the run")
    muon_backend_steps: int = knob(5, "Newton-Schulz iterations", low=1, high=50)
    muon_coeffs: str = knob("quintic", "Newton-Schulz coefficients", choices=("quintic", "polar-express"))
    muon_eq: bool = knob(True, "normalise rows before Newton-Schulz (MuonEq-R); 0: as #399")
    muon_wd: float = knob(0.04, "decoupled weight decay of the banks")
    adam_wd: float = knob(0.04, "decoupled weight decay of embeddings and the bigram projection")
    scalar_wd: float = knob(0.0, "decoupled weight decay of gains, gates and scales; #399: 0.04")
    beta1: float = knob(0.9, "decay of Adam's first moment", high=0.999999)
    beta2: float = knob(0.95, "decay of Adam's second moment", high=0.999999)
    adam_eps: float = knob(1e-8, "added to Adam's denominator")
    grad_clip_norm: float = knob(0.3, "maximum norm of the reduced gradient; 0: no clipping")

    ema_enabled: bool = knob(True, "export an EMA of the weights", section="Averaging and quantisation")
    ema_decay: float = knob(0.997, "EMA decay per step", high=1)
    swa_enabled: bool = knob(False, "export a plain average over the end of the warmdown instead")
    swa_every: int = knob(50, "steps between two samples of that average", low=1)
    late_qat: bool = knob(False, "train through rounding (straight-through) at the end of the warmdown")
    qat_threshold: float = knob(0.1, "late QAT starts below this fraction of the peak rate (not MIN_LR)", high=1)
    rounding: str = knob("sensitivity", "least loss at a size, or #399's rule", "model", choices=("sensitivity", "399"))
    gptq_batches: int = knob(4, "training batches for calibration, whose time is reserved; 0: none", "run")
    trellis_states: int = knob(8, "states of the trellis; 0: none", "model", choices=(0, *PARITY))
    target_bytes: int = knob(SUBMISSION_CAP, "bytes of code and artifact, unless ROUNDING=399; 0: no limit", "run")
    compressor: str = knob("ans", "coder of the rounded weights", "run", choices=("ans", "lzma", "zstd"))

    eval_seq_len: int = knob(2048, "tokens per window", "score", low=2, high=1 << 20, section="Evaluation")
    eval_stride: int = knob(64, "new tokens per sliding window", "score", low=1, high="eval_seq_len")
    eval_mode: str = knob("sliding", "sliding windows, or one pass in a band", "score", choices=("sliding", "banded"))
    canonical_mask: bool = knob(False, "lower the logits of tokens that the tokenizer never emits there", "score")
    ngram_tilt: bool = knob(False, "raise the logit of the token that mostly followed the last 15 so far", "score")
    val_batch_size: int = knob(524_288, "tokens per evaluation batch over all ranks", "score", low=1)
    val_loss_every: int = knob(1000, "steps between validations; 0: only at the end", "run")
    eval_max_seconds: float = knob(0.0, "after N seconds, score the rest without test-time training; 0: never", "score")
    ttt_enabled: bool = knob(False, "also score with score-first test-time training", "score")
    ttt_mode: str = knob("sgd", "sgd: all weights; lora: low rank, per document", "score", choices=("sgd", "lora"))
    ttt_chunk_tokens: int = knob(32_768, "targets scored before SGD trains on them", "score", low=2)
    ttt_lr: float = knob(0.002, "SGD learning rate; cosine to 0 at the last chunk", "score")
    ttt_lora_targets: str = knob("k,out,mlp,head", "outputs with low-rank changes, of q,k,v,out,mlp,head", "score")
    ttt_lora_rank: int = knob(80, "rank of the low-rank changes", "score", low=1)
    ttt_lora_alpha: float = knob(144.0, "the changes are scaled by this / rank", "score")
    ttt_lora_chunk: int = knob(48, "targets per AdamW step; at most 8 to token 256, and 24 to 2,000", "score", low=1)
    ttt_lora_lr: float = knob(1e-4, "AdamW learning rate of the low-rank changes", "score")
    ttt_lora_wd: float = knob(0.5, "AdamW weight decay of the low-rank changes", "score")
    eval_only: str = knob("", "artifact to load and score; nothing is trained", "run")

    run_id: str = knob("", "name of the log, logs/<RUN_ID>.txt; empty: date and time", "run", section="Run")
    seed: int = knob(1337, "initialisation and data order")
    train_log_every: int = knob(200, "steps between two lines of the log", "run", low=1)
    checkpoint_every: str = knob("", "checkpoint interval: `500` steps or `60s`; empty: none", "run")
    resume: str = knob("", "auto: continue from RUN_ID's newest complete checkpoint", "run", choices=("", "auto"))
    shard_ranks: int = knob(0, "ranks among which a bank is sharded; 0: LOCAL_WORLD_SIZE", "run")
    compute_dtype: str = knob("auto", "auto: bfloat16 if it is fast", "score", choices=("auto", "bfloat16", "float32"))
    device: str = knob("auto", "auto: a GPU if there is one", "score", choices=("auto", "cuda", "cpu"))
    attention: str = knob("auto", "attention kernel; auto: fa3, else cudnn, sdpa", "score", choices=("auto", *KERNELS))
    compile: str = knob("auto", "auto: on a CPU training only", "run", choices=("auto", "0", "1"))
    fused_mlp: bool = knob(True, "fused Triton kernel of the MLP, on a Hopper GPU in bfloat16", "score")
    # fmt: on

    @classmethod
    def from_env(cls, environ: dict[str, str]) -> Hyperparameters:
        """The knobs set in `environ`, all others at their defaults. Raises UserError naming the
        variable."""
        names = environ.get("RUN_SH", "").split()  # variables of run.sh
        refuse_misspelt(environ, names + [field.name.upper() for field in KNOBS])
        return cls(**{field.name: parse(field, environ) for field in KNOBS})

    def __post_init__(self):
        values = vars(self)
        for limit, (relation, holds) in LIMITS.items():
            for field in KNOBS:
                if limit in field.metadata:
                    value, bound = values[field.name], field.metadata[limit]
                    shown = f"{bound.upper()}={values[bound]}" if bound in values else bound
                    require(
                        holds(value, values.get(bound, bound)),
                        f"{field.name.upper()}={value!r} is not {relation} {shown}",
                    )
        self.check_combinations()

    def check_combinations(self):
        """Raise UserError if knobs contradict each other, or a text is malformed."""
        rotated = self.rope_dims or self.head_dim
        require(
            rotated % 2 == 0 and rotated <= self.head_dim,
            f"ROPE_DIMS={self.rope_dims} means {rotated} rotary dimensions: they must be even and "
            f"at most MODEL_DIM / NUM_HEADS = {self.head_dim}; lower ROPE_DIMS or NUM_HEADS",
        )
        require(self.bigram_vocab_size != 1, "BIGRAM_VOCAB_SIZE=1 holds no pair: set 0 or 2")
        looped, plain = self.loop_first + self.loop_layers, self.num_layers - self.lanes_last_n
        require(
            self.loop_visits == 1 or looped <= plain,
            f"the loop needs the first {looped} layers (LOOP_FIRST={self.loop_first} + LOOP_LAYERS="
            f"{self.loop_layers}), but only {plain} have a single lane (NUM_LAYERS="
            f"{self.num_layers} - LANES_LAST_N={self.lanes_last_n}): lower LOOP_FIRST or LOOP_LAYERS",
        )
        require(
            self.ttt_mode == "sgd" or self.ttt_lora_chunk <= self.eval_seq_len,
            f"TTT_LORA_CHUNK={self.ttt_lora_chunk} exceeds EVAL_SEQ_LEN={self.eval_seq_len}",
        )
        require(
            set(self.ttt_lora_targets.split(",")) <= set(LORA_TARGETS),
            f"TTT_LORA_TARGETS={self.ttt_lora_targets!r} is not a list of {','.join(LORA_TARGETS)}",
        )
        require(
            re.fullmatch(r"([1-9]\d*s?)?", self.checkpoint_every),
            f"CHECKPOINT_EVERY={self.checkpoint_every!r} is neither steps (500) nor seconds (60s)",
        )
        require(
            not re.search("^[.]|[/,]", self.run_id) and len(os.fsencode(self.run_id)) <= 230,
            f"RUN_ID={self.run_id} must not have a slash or a comma, begin with a dot, or exceed 230 "
            "bytes, as files with longer names come of it",
        )
        require(
            self.run_id or not (self.checkpoint_every or self.resume),
            "CHECKPOINT_EVERY and RESUME need a RUN_ID to find the checkpoints again: set one",
        )
        require(
            not (self.ema_enabled and self.swa_enabled),
            "EMA_ENABLED=1 and SWA_ENABLED=1 both choose what is exported: set one to 0",
        )

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def trellis(self) -> int:
        """States of the trellis of the codes; 0 for none, as with #399's rule."""
        return 0 if self.rounding == "399" else self.trellis_states

    def stored(self) -> dict[str, str]:
        """The variables that the artifact stores, see `knob`."""
        return {
            name.upper(): str(value)
            for name, value in vars(self).items()
            if name in knobs_with("model")
            or (name in knobs_with("training", "score") and value != getattr(Hyperparameters, name))
        }

    def layer_order(self, looping: bool = True) -> tuple[int, ...]:
        """The layers in the order of a forward: each once, or those of the loop LOOP_VISITS times
        (#1517)."""
        layers = tuple(range(self.num_layers))
        first, end = self.loop_first, self.loop_first + self.loop_layers
        times = self.loop_visits if looping else 1
        return layers[:first] + times * layers[first:end] + layers[end:]

    def reach(self, layer: int, most: int) -> int:
        """How many tokens attention of this layer sees, if no layer sees more than `most`. The last
        quarter of the layers has no window (#1512)."""
        windowed = self.attn_window and layer < self.num_layers - round(self.num_layers / 4)
        return min(most, self.attn_window) if windowed else most

    def describe(self) -> str:
        """The sections and one `name=value` per line for the log; a leading * marks a value that
        differs from the default."""
        lines = []
        for field, value in zip(KNOBS, vars(self).values(), strict=True):
            if "section" in field.metadata:
                lines.append(f"{field.metadata['section']}:")
            lines.append(f"{' ' if value == field.default else '*'} {field.name.upper()}={value}")
        return "\n".join(lines)


KNOBS = dataclasses.fields(Hyperparameters)


def parse(field: dataclasses.Field, environ: dict[str, str]) -> object:
    """The value of one knob in the environment, else its default. Raises UserError."""
    name, kind = field.name.upper(), type(field.default)
    text = environ.get(name, str(field.default)).strip()
    try:
        return ConfigParser.BOOLEAN_STATES[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        wanted = {int: "a whole number", float: "a number", bool: "a switch, 0 or 1"}[kind]
        raise UserError(
            f"{name}={text!r} is not {wanted}: set for example {name}={field.default:n}"
        ) from None


def refuse_misspelt(environ: Iterable[str], known: list[str]):
    """Raise UserError for the first variable that is nearly a known one, or a knob of other
    scripts."""
    for name in sorted(set(environ) - set(known)):
        near = [OTHER_NAMES[name]] if name in OTHER_NAMES else []
        if "_" in name or not name.startswith(tuple(known)):  # machines set DEVICES and the like
            near += difflib.get_close_matches(name.upper(), known, cutoff=0.905)
        ours = f"did you mean {near[0]}?" if any(near) else "no knob here does the same."
        require(
            not near,
            f"{name} is set but is not a knob; {ours} If it is not for this program, unset it",
        )


# Names of #399, #549, #2135 and older demonstrations, with ours, which are empty if there is none.
OTHER_NAMES = """
DEMO_SECONDS=MAX_WALLCLOCK_SECONDS
MUON_LR=MATRIX_LR MUON_ROW_NORMALIZE=MUON_EQ MUON_BETA2= HEAD_LR= EMBED_LR= EMBED_WD=ADAM_WD
QAT_ENABLED=LATE_QAT LATE_QAT_THRESHOLD=QAT_THRESHOLD VAL_BATCH_TOKENS=VAL_BATCH_SIZE
NUM_LOOPS=LOOP_VISITS LOOP_END=LOOP_LAYERS ENABLE_LOOPING_AT=LOOP_START ROPE_YARN=
PARALLEL_START_LAYER=LANES_LAST_N PARALLEL_RESIDUAL_START=LANES_LAST_N SKIP_GATES_ENABLED=SKIPS
GATED_ATTENTION=ATTN_GATE GATED_ATTN_ENABLED=ATTN_GATE SPARSE_ATTN_GATE_ENABLED=ATTN_GATE
SMEAR_GATE_ENABLED=SMEAR_TOKEN NEGATIVE_SLOPE=MLP_SLOPE LEAKY_RELU_SLOPE=MLP_SLOPE
TIE_EMBEDDINGS= DETERMINISTIC=
MTP_NUM_HEADS= MTP_LOSS_WEIGHT= VE_ENABLED= VE_DIM= VE_LAYERS= DTG_ENABLED= VALUE_RESIDUAL=
LAWA_ENABLED= LAWA_K= LAWA_FREQ= GPTQ_CALIBRATION_BATCHES=GPTQ_BATCHES GPTQ_RESERVE_SECONDS=
MATRIX_BITS= EMBED_BITS= MATRIX_CLIP_SIGMAS= EMBED_CLIP_SIGMAS= MLP_CLIP_SIGMAS= ATTN_CLIP_SIGMAS=
LQER_ENABLED= LQER_RANK= PHASED_TTT_ENABLED= PHASED_TTT_NUM_PHASES= TTT_BETA1= TTT_BETA2=
TTT_EPOCHS= TTT_MOMENTUM= TTT_FREEZE_BLOCKS= TTT_BATCH_SEQS= TTT_GRAD_CLIP=
TTT_CHUNK_SIZE=TTT_LORA_CHUNK TTT_WEIGHT_DECAY=TTT_LORA_WD
TTT_K_LORA=TTT_LORA_TARGETS TTT_O_LORA=TTT_LORA_TARGETS TTT_MLP_LORA=TTT_LORA_TARGETS"""
OTHER_NAMES = dict(pair.split("=") for pair in OTHER_NAMES.split())


def knobs_with(*roles: str) -> tuple[str, ...]:
    """Names of the knobs that have one of these roles, in their order."""
    return tuple(field.name for field in KNOBS if field.metadata["role"] in roles)


def knob_help() -> str:
    """The table of --help: every knob with default, meaning and bounds."""
    lines = []
    for field in KNOBS:
        meta = field.metadata
        shown = [key for key in LIMITS if meta.get(key, MAX_NUMBER) != MAX_NUMBER]
        bounds = [f"{LIMITS[key][0]} {str(meta[key]).upper()}" for key in shown]
        limits = " | ".join(map(str, meta.get("choices", ()))) or ", ".join(bounds)
        if "section" in meta:
            lines.append(f"\n{meta['section']}")
        lines.append(f"  {field.name.upper()}={field.default}")
        lines.append(f"      {meta['text']}{f'  [{limits}]' if limits else ''}")
    return "\n".join(lines)


# ---- Start: signals, errors, packages ------------------------------------------------------------
def launched(name: str, default: int) -> int:
    """The number that a launcher, such as torchrun, has set in this variable."""
    return int(os.environ.get(name, default))


# Read when torch is loaded. OpenMP threads that spin while they wait slow a busy CPU down tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# PLACE_IN_NODE is 0 on one rank of each node. It is not LOCAL_RANK, which is 0 on all ranks with
# torchrun --virtual-local-rank.
PLACE_IN_NODE = launched("RANK", 0) % launched("LOCAL_WORLD_SIZE", launched("WORLD_SIZE", 1))


def handle_signals(noted: list[signal.Signals] | None = None):
    """From now on Ctrl-C, SIGTERM of a launcher, SIGUSR1 of Slurm and SIGHUP of a lost terminal are
    only `noted`. Without such a list, and at a second Ctrl-C, they end the process."""

    def handle(number, frame):
        again = number == signal.SIGINT and number in (noted or ())
        if noted is not None and not again:
            noted.append(signal.Signals(number))  # a launcher repeats signals
        elif PLACE_IN_NODE:
            os._exit(128 + number)  # one rank of a node prints
        elif not sys.exc_info()[1]:  # no signal disturbs an error
            raise KeyboardInterrupt(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        # nohup ignores the last one, a shell's background the first
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)


def print_to(stream: TextIO, text: str, end: str = "\n"):
    """Print. Without a reader, as of `| head`, on a full disk or a lost terminal it goes nowhere."""
    try:
        print(text, file=stream, end=end, flush=True)
    except OSError:  # else also at the end, with status 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def importing(requirements: str):
    """A missing package, or Ctrl-C while torch is imported, ends the program with one sentence."""
    try:
        yield
    except ImportError as error:
        sys.exit(
            f"error: {error}: run `./run.sh setup`, then `source .venv/bin/activate` if there is a "
            f".venv; or `pip install -r {requirements}`; on Windows use WSL2"
        )
    except KeyboardInterrupt:
        print("error: interrupted by Ctrl-C", file=sys.stderr)
        sys.exit(130)


with importing("requirements.txt"):
    import fcntl

    import numpy as np
    import sentencepiece
    import torch
    import torch.distributed as dist
    import torch.distributed.nn  # noqa: F401  imported after a group exists, it would keep that group alive
    import torch.nn.functional as F
    import zstandard
    from numpy import ndarray
    from torch import Tensor, nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.linalg import vector_norm

CODE_BYTES = Path(__file__).stat().st_size  # of the script that runs
# The readable script: a self-extracting copy (tools/pack_code.py) sets the global.
SOURCE = globals().get("SOURCE") or Path(__file__).read_bytes()


class UserError(ValueError):
    """An error the user can fix: the variable or file, what was found, and what to do."""


def require(condition: object, sentence: str):
    """Raise UserError(sentence) unless the condition holds."""
    if not condition:
        raise UserError(sentence)


def error_message(error: BaseException) -> str:
    """The first line of an exception's message; its type comes first if a library wrote it."""
    # The text of an OSError would repeat its number and file.
    message = str(getattr(error, "strerror", None) or error)
    line = message.strip().split("\n")[0][:300]
    return line if isinstance(error, UserError | OSError) else f"{type(error).__name__}: {line}"


@contextmanager
def as_user_error(what: str, advice: str, *errors: type[Exception]):
    """Turn these errors into a UserError: what failed, why, and what to do."""
    try:
        yield
    except errors as error:
        raise UserError(f"{what}: {error_message(error)}; {advice}") from error


def writing(path: str | Path) -> AbstractContextManager:
    """Turn a failed write (folder not writable, disk full) into a UserError."""
    return as_user_error(f"cannot write {path}", "free space or choose a writable folder", OSError)


def end(sentence: str, status: int = 1):
    """Print an error and end the process. Usually all ranks fail: one rank of a node prints, and its
    launcher then ends the others."""
    handle_signals()
    if PLACE_IN_NODE:
        time.sleep(5)  # if this rank still runs then, it alone has failed
    print_to(sys.stderr, f"error: {sentence}")
    if dist.is_initialized():  # threads of failed collectives can abort an interpreter that ends
        print_to(sys.stdout, "", end="")
        os._exit(status)
    sys.exit(status)


# ---- Matrices: initialisation, forward, optimizer, quantiser and export read this table ----------
class MatrixKind(NamedTuple):
    """A kind of matrix (out, in) that the artifact stores as codes; all other tensors are fp16."""

    name: str  # in the forward and in the artifact
    bank: str  # the 3-D parameter that stores it; "" for a parameter of its own
    hessian: str  # the matrix with which it shares the Hessian of its inputs; "" for a lookup only
    out: str = "dim"  # outputs: "dim", "kv", "mlp" or "vocab"
    into: str = "dim"  # inputs
    transposed: bool = False  # stored as (in, out)
    # Name of the learned gain (L, out) of its outputs, or "". In MATRICES, a matrix with a gain is
    # initially zero, one without is orthogonal.
    gain: str = ""
    layer_scaled: bool = False  # multiplied by 1/sqrt(layer + 1)
    norm_after: bool = False  # its outputs may be normalised in place of its inputs
    target: str = ""  # the name in LORA_TARGETS of low-rank changes of its outputs

    def shape(self, hp: Hyperparameters) -> tuple[int, int]:
        """(out, in) of a matrix of BANKS, and of "tok_emb"."""
        size = {
            "dim": hp.model_dim,
            "kv": hp.num_kv_heads * hp.head_dim,
            "mlp": max(1, int(hp.mlp_mult * hp.model_dim)),
            "vocab": hp.vocab_size,
        }
        return size[self.out], size[self.into]


# Three banks of 2L rows: 8 ranks pad 22 rows to 24; a bank of one kind would have 11, padded to 16.
# The down projection is stored transposed, so that it has the shape of the up projection.
#
#               reads                                     multiplied by
#     q, k, v   rms_norm of the stream                    the layer scale (`layer_scaled`)
#     out       the heads                                 `attn_scale`
#     up        the stream, or its rms_norm: see GPT.mlp  the layer scale
#     down      the hidden units                          `mlp_scale`
#
# The forward multiplies by a matrix with `linear(x, layer.NAME)`, a field of `Layer`. Parameter,
# Muon, checkpoint, Hessian and export follow from its row. For a new one see docs/experiment.md.
MATRICES = (
    MatrixKind("q", "qo_bank", "q", layer_scaled=True, target="q"),
    MatrixKind("out", "qo_bank", "out", gain="attn_scale", target="out"),
    MatrixKind("k", "kv_bank", "q", out="kv", layer_scaled=True, target="k"),
    MatrixKind("v", "kv_bank", "q", out="kv", layer_scaled=True, target="v"),
    MatrixKind("up", "mlp_bank", "up", out="mlp", layer_scaled=True, norm_after=True),
    MatrixKind(
        "down",
        "mlp_bank",
        "down",
        into="mlp",
        transposed=True,
        gain="mlp_scale",
        target="mlp",
    ),
)
TABLES = (
    MatrixKind("tok_emb", "", "tok_emb", out="vocab", target="head"),
    MatrixKind("bigram_emb", "", ""),
    MatrixKind("bigram_proj", "", "bigram_proj"),
)
# What low-rank test-time training can change: outputs of attention's matrices, MLP and logits.
LORA_TARGETS = {kind.target: kind for kind in (*MATRICES, *TABLES) if kind.target}
BANKS = {kind.bank: [k for k in MATRICES if k.bank == kind.bank] for kind in MATRICES}


def bank_shape(bank: str, hp: Hyperparameters) -> tuple[int, int, int]:
    """(R, a, b). Raises ValueError if its matrices differ in shape."""
    (shape,) = {kind.shape(hp)[:: -1 if kind.transposed else 1] for kind in BANKS[bank]}
    return len(BANKS[bank]) * hp.num_layers, *shape


def bank_part(bank: Tensor, kind: MatrixKind) -> Tensor:
    """The matrices (L, out, in) of one kind: a view of their bank (R, a, b)."""
    kinds = BANKS[kind.bank]
    matrices = bank.chunk(len(kinds))[kinds.index(kind)]
    return matrices.mT if kind.transposed else matrices


# ---- Model ---------------------------------------------------------------------------------------
GATE_INPUTS = 12  # first dimensions of a stream, which the gates of tokens and heads read
MUDD_WIDTH = 16  # hidden units that decide the weights of MUDD's sources
REFUSED_NATS = math.log(1e6)  # subtracted from the logits of refused tokens: losses stay finite
# The n-gram tilt (#1514, #2135): tokens of a context, the share of what followed it so far that
# makes a token its hint, and what is added to the hint's logit.
TILT_CONTEXT, TILT_SHARE, TILT_NATS = 15, 0.8, 2.625
NORM_EPS = torch.finfo(torch.float32).eps  # of the norms; torch's default for fp32
Tensors = dict[str, Tensor]  # by name: weights, state, sums
# The stream as x and the last layer's change, or None, and the second lane, or None, (B, T, D) each:
# left to the first kernel of the next block, their sum costs no kernel of its own.
Stream = tuple[Tensor, Tensor | None, Tensor | None]
# Low-rank changes of the outputs in LORA_TARGETS: NAME.a (B, depth, rank, in) and NAME.b
# (B, depth, out, rank), by the position of a layer in the order; the head has depth 1.
Adapter = Tensors


def token_losses(logits: Tensor, targets: Tensor, reduction: str, hints: Tensor | None) -> Tensor:
    """Nats of logits (B, n, V) and targets (B, n): their mean () or, with reduction "none", (B, n).

    With `hints` (B, n), -1 for none, and reduction "none": as if the logits of these tokens were
    TILT_NATS higher. That change has no gradient: training at test time does not see it (#2135)."""
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
    if reduction == "mean":
        return nats
    nats = nats.view_as(targets)
    if hints is None:
        return nats
    choices = torch.stack((hints.clamp(min=0), targets), -1)
    hint, target = logits.detach().gather(-1, choices).unbind(-1)
    chance = (hint - target - nats.detach()).exp()  # of the hint: target + nats = log of the sum
    change = (chance * math.expm1(TILT_NATS)).log1p() - TILT_NATS * (hints == targets)
    return nats + change * (hints >= 0)


class ForwardConfig(NamedTuple):
    """How a forward runs."""

    layer_order: tuple[int, ...]  # depth recurrence repeats some layers
    qat: bool = False  # round the banks to multiples of `Rule.default_steps`
    band: int = 0  # a position sees itself and the band - 1 before it; 0: all before it
    doc_len: int = 0  # cut documents every n tokens; 0: never


class Matrix(NamedTuple):
    """A matrix with which a forward multiplies."""

    weight: Tensor  # (out, in), in the compute dtype
    # (B, rank, D), (B, out, rank): a change of its outputs that reads the layer's input, see `adapt`
    low_rank: tuple[Tensor, Tensor] | None = None
    observe: Callable | None = None  # called with inputs, in eager mode only


class Layer(NamedTuple):
    """One visit of a layer: what `GPT.block` reads of the model. A block does not show `attn_scale`,
    `mlp_scale` and the layer scale: `GPT.matrices` multiplies "out" and "down" by the gains, and the
    readers of the normalised stream by the layer scale. The tensors are rows of the parameters with
    their names, those of `attn_gate` times the layer scale."""

    q: Matrix
    k: Matrix
    v: Matrix
    out: Matrix
    up: Matrix
    down: Matrix
    resid_mix: Tensor  # (2, D): of the stream and the embedding
    q_gain: Tensor  # (H,)
    band: int  # as in ForwardConfig
    longest: int  # no document is longer, unless it is 0
    xsa: bool
    kept: bool  # returns the stream before it, as a later visit may read it
    mudd: bool  # see `GPT.mudd`
    attn_gate: Tensor | None = None  # (H, GATE_INPUTS)
    mlp_gate: Tensor | None = None  # (GATE_INPUTS + 1,)
    lane_mix: Tensor | None = None  # (2, 3); None: one lane
    skip_scale: Tensor | None = None  # (D,); None: no U-Net skip ends here
    skip_gate: Tensor | None = None  # (D,)


def linear(x: Tensor, *matrices: Matrix) -> Tensor:
    """x (B, T, in) -> (B, T, out) by these matrices, concatenated, without low-rank products."""
    for matrix in matrices:
        if matrix.observe:
            matrix.observe(x)
    weights = [matrix.weight for matrix in matrices]
    return F.linear(x, torch.cat(weights) if len(weights) > 1 else weights[0])


def adapt(y: Tensor, x: Tensor, matrix: Matrix) -> Tensor:
    """y (B, T, ...), plus the low-rank product of x (B, T, in) if this matrix has one."""
    if matrix.low_rank is None:
        return y
    a, b = matrix.low_rank
    return y + (x @ a.mT @ b.mT).view_as(y)


def count_numbers(tensors: Iterable[Tensor]) -> int:
    """How many numbers these tensors hold together."""
    return sum(tensor.numel() for tensor in tensors)


def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2)) over the last dimension, in x's dtype."""
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)


def mean_square(x: Tensor) -> Tensor:
    """Mean of x^2 over the last dimension (kept), in fp32, plus the epsilon of the norms."""
    return x.float().square().mean(-1, keepdim=True) + NORM_EPS


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Partial RoPE (arXiv:2104.09864): rotate the first 2 * cos.size(-1) dimensions of x
    (B, T, H, E)."""
    half = cos.size(-1)
    a, b, rest = x.tensor_split((half, 2 * half), -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin, rest), -1)


class NormRotate(torch.autograd.Function):
    """`(rotate(rms_norm(x), cos, sin) * gain).to(x.dtype)` for the heads x (B, T, H, E) and gain
    (H or 1, 1).

    The backward is written out: one reduction serves both gradients, and autograd would save
    another tensor like x: 2.0 of 65.8 ms and 3 GiB (modelled, 8 x H100). To try another norm or
    rotation, call the plain form; a test in tests/test_model.py compares both and their gradients."""

    @staticmethod
    def forward(ctx, x, gain, cos, sin):
        ctx.save_for_backward(x, gain, cos, sin)
        scale = mean_square(x).rsqrt()
        return (rotate(x.float(), cos, sin) * (gain * scale)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, gain, cos, sin = ctx.saved_tensors
        scale = mean_square(x).rsqrt()
        back = rotate(grad.float(), cos, -sin)
        along = (back * x.float()).sum(-1, keepdim=True) * scale  # (B, T, H, 1)
        dx = gain * scale * (back - x.float() * (scale * along / x.size(-1)))
        dgain = along.sum((0, 1)) if ctx.needs_input_grad[1] else None
        return dx.to(x.dtype), dgain, None, None


def xsa(y: Tensor, v: Tensor) -> Tensor:
    """Exclusive self-attention (#265): remove from y (B, T, H, E) its part along the own value in
    v (B, T, K, E)."""
    grouped = y.unflatten(2, (v.size(2), -1)).float()  # (B, T, K, H/K, E)
    v = v.unsqueeze(3)
    square = v.float().square().sum(-1, keepdim=True).clamp(min=1e-24)
    along = (grouped * v).sum(-1, keepdim=True) / square
    return (grouped - along * v).to(y.dtype).flatten(2, 3)


def activation(z: Tensor, hp: Hyperparameters) -> Tensor:
    """The MLP's, a squared leaky ReLU (#493). `mlp_kernel` has it and its derivative, too."""
    return F.leaky_relu(z, hp.mlp_slope).square()


def is_homogeneous(hp: Hyperparameters) -> bool:
    """Whether activation(2 z) = 4 activation(z): exactly, as doubling has no rounding. Then the norm
    can be one factor after it."""
    z = torch.linspace(-9, 9, 100, device="cpu").sinh()
    return torch.equal(activation(2 * z, hp), 4 * activation(z, hp))


def filled(*shape: int, value: float = 0.0) -> nn.Parameter:
    """An fp32 parameter filled with one value."""
    return nn.Parameter(torch.full(shape, value))


class GPT(nn.Module):
    """The banked transformer. Banks, stream and matrix products use `dtype`; other parameters and
    the loss are fp32.

    The first half of the layer order feeds the second half through U-Net skips (NanoGPT speedrun).
    Each layer mixes the embedding stream back in. In layers with two lanes (#1204, #1529) attention
    reads one, the MLP reads the other, and both add to both."""

    def __init__(
        self,
        hp: Hyperparameters,
        attend: Callable,
        dtype: torch.dtype,
        fused_mlp: Callable | None = None,
    ):
        super().__init__()
        self.hp, self.attend, self.dtype, self.fused_mlp = hp, attend, dtype, fused_mlp
        self.homogeneous = is_homogeneous(hp)
        layers, dim = hp.num_layers, hp.model_dim
        for bank in BANKS:
            setattr(self, bank, nn.Parameter(torch.zeros(bank_shape(bank, hp), dtype=dtype)))
        self.tok_emb = filled(hp.vocab_size, dim)
        if hp.bigram_vocab_size:
            self.bigram_emb = filled(hp.bigram_vocab_size, hp.bigram_dim)
            self.bigram_proj = filled(dim, hp.bigram_dim)
            self.bigram_scale = filled(value=0.05)
        inputs = min(GATE_INPUTS, dim)
        # SMEAR_TOKEN: a factor, then the weights of the gate.
        self.smear_gate = filled(1 + inputs if hp.smear_token else dim)
        skips = len(hp.layer_order()) // 2
        self.skip_scale = filled(skips, dim, value=-1.5 if hp.skips == "gates" else 1.0)
        if hp.skips == "lerp":
            self.skip_gate = filled(skips, dim)
        mix = torch.tensor([[1.0], [0.0]])  # of the stream and the embedding
        self.resid_mix = nn.Parameter(mix.repeat(layers, 1, dim))  # (L, 2, D)
        self.q_gain = filled(layers, hp.num_heads, value=hp.qk_gain_init)
        self.attn_scale = filled(layers, dim, value=1.0)
        self.mlp_scale = filled(layers, dim, value=1.0)
        if hp.attn_gate:
            self.attn_gate = filled(layers, hp.num_heads, inputs)
        if hp.mlp_gate:  # weights, then a bias: initially 0.993
            self.mlp_gate = nn.Parameter(F.pad(torch.zeros(layers, inputs), (0, 1), value=5.0))
        if hp.lanes_last_n:  # (layer, lane, what it is the sum of: lane, attention, MLP)
            mix = torch.tensor([1.1, 1.0, 1.0])
            self.lane_mix = nn.Parameter(mix.repeat(hp.lanes_last_n, 2, 1))
        if hp.mudd:
            self.mudd_in = filled(2, MUDD_WIDTH, dim)
            self.mudd_out = filled(9, MUDD_WIDTH + 1)  # 3 sources for each of 3 sums, and a bias
        self.add_constants()

    def add_constants(self):
        """The rotary factors, (T, 1, rotated/2) of any T, and the layer scales (L, 1, 1)."""
        hp = self.hp
        rotated = hp.rope_dims or hp.head_dim
        frequency = hp.rope_base ** (-torch.arange(0, rotated, 2).double() / rotated)
        window = sum(band_block(hp)) if hp.eval_mode == "banded" else hp.eval_seq_len
        longest = max(hp.train_seq_len, window)
        angle = torch.arange(longest).double()[:, None, None] * frequency
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        depth = torch.arange(1, hp.num_layers + 1).float()
        scale = depth.rsqrt() if hp.ln_scale else torch.ones_like(depth)
        self.register_buffer("layer_scale", scale[:, None, None], persistent=False)

    def initialise(self, seed: int) -> Tensors:
        """Orthogonal matrices, zero projections back to the stream, small normal embedding. Returns
        them in fp32."""
        weights = {name: tensor.float().clone() for name, tensor in self.state_dict().items()}
        generator = torch.Generator().manual_seed(seed)
        for kind in MATRICES:
            for matrix in bank_part(weights[kind.bank], kind) if not kind.gain else ():
                nn.init.orthogonal_(matrix, generator=generator)
        weights["tok_emb"].normal_(std=self.hp.tied_embed_init_std, generator=generator)
        if self.hp.bigram_vocab_size:
            nn.init.orthogonal_(weights["bigram_proj"], generator=generator)
        if self.hp.mudd:
            weights["mudd_in"].normal_(generator=generator)
        self.load_state_dict(weights)
        return weights

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        reduction: str = "mean",
        config: ForwardConfig | None = None,
        adapter: Adapter | None = None,
        observe: Callable | None = None,
        refused: Tensor | None = None,
        hints: Tensor | None = None,
    ) -> Tensor:
        """ids (B, T) -> logits (B, T, V). With targets (B, n) of the last n positions: their mean
        loss in nats () or, with reduction "none", each loss (B, n).

        `refused` (V, V): after token a, token b is a million times less likely if refused[a, b].
        `hints` (B, n) tilt the losses (`token_losses`). An `adapter` adds low-rank products.
        `observe(kind, layer, input)` runs before each product, in eager mode only."""
        config = config or ForwardConfig(self.hp.layer_order())
        visits, projection, table = self.layers(config, ids.size(1), adapter or {}, observe)
        document = None  # of each position, (B, T); or what `prepare` of a kernel makes
        if self.hp.doc_attention:
            document = number_documents(ids, config.doc_len)
            if hasattr(self.attend, "prepare"):
                document = self.attend.prepare(document)
        x0 = self.embed(ids, projection)  # (B, T, D)
        x0.requires_grad_(torch.is_grad_enabled())  # also where no parameter is trained
        x, change, *x0s = FanOut.apply(x0, len(visits), self.add)
        lane, inputs, half = None, [], len(visits) // 2
        for depth, layer in enumerate(visits):
            # Visit half + i takes the input of visit half - i; the middle one its own, which `block`
            # has.
            skip = inputs[2 * half - depth] if half < depth < 2 * half else None
            early = inputs[-2:-1] if layer.mudd else []
            given = x0s[depth], skip, early, layer, document
            # Rebinding all three names frees the first stream.
            before, (x, change, lane) = self.block((x, change, lane), *given)
            inputs.append(before)
        return self.head((x, change, lane), table, ids, targets, reduction, refused, hints)

    @staticmethod
    def add(*terms: Tensor) -> Tensor:
        return sum(terms)

    def layers(
        self, config: ForwardConfig, time: int, adapter: Adapter, observe: Callable | None
    ) -> tuple[list[Layer], Matrix | None, Matrix]:
        """(the visits in their order, of `time` tokens; the bigram's projection or None; the head)."""
        hp, order = self.hp, config.layer_order
        weights = {name: t.unbind(0) for name, t in self.matrices(config.qat).items()}
        pairs = self.low_rank_pairs(adapter, order) if adapter else {}
        pairs = {name: [t.unbind(1) for t in pair] for name, pair in pairs.items()}

        def matrix(kind: MatrixKind, layer: int = 0, depth: int = 0) -> Matrix | None:
            if kind.name not in weights:
                return None
            pair = tuple(factors[depth] for factors in pairs.get(kind.name, ()))
            observer = observe and partial(observe, kind, layer)
            return Matrix(weights[kind.name][layer], pair or None, observer)

        rows = {name: p for name, p in self.named_parameters() if name in Layer._fields}
        if hp.attn_gate:
            rows["attn_gate"] = self.attn_gate * self.layer_scale
        for name in {"resid_mix", "skip_scale", "skip_gate"} & rows.keys():
            rows[name] = rows[name].to(self.dtype)  # or the gradients of the stream would be fp32
        rows = {name: tensor.unbind(0) for name, tensor in rows.items()}

        layers, half = [], len(order) // 2
        for depth, layer in enumerate(order):
            lane = layer - hp.num_layers + hp.lanes_last_n
            skip = depth - half if depth < 2 * half else -1
            places = {"lane_mix": lane, "skip_scale": skip, "skip_gate": skip}  # others: `layer`
            parts = {kind.name: matrix(kind, layer, depth) for kind in MATRICES}
            for name, of_places in rows.items():
                if (place := places.get(name, layer)) >= 0:
                    parts[name] = of_places[place]
            left = hp.mudd * (len(order) - depth)
            parts |= {
                # A window of the whole sequence is 0, as none: both have one graph.
                "band": hp.reach(layer, min(config.band or time, time)) % time,
                "longest": config.doc_len * hp.doc_attention,
                "xsa": layer >= hp.num_layers - hp.xsa_last_n,
                "kept": depth < half or left == 3,  # at depth 0 only to share a graph
                "mudd": left == 1,
            }
            layers.append(Layer(**parts))
        head, _, projection = map(matrix, TABLES)
        return layers, projection, head

    def head(
        self,
        stream: Stream,
        matrix: Matrix,
        ids: Tensor,
        targets: Tensor | None,
        reduction: str,
        refused: Tensor | None,
        hints: Tensor | None,
    ) -> Tensor:
        """The last stream -> what `forward` returns."""
        x, change, lane = stream
        x = x if change is None else x + change
        x = rms_norm(x if lane is None else x + lane)
        if targets is not None:
            x = x[:, -targets.size(1) :]
        logits = adapt(linear(x, matrix), x, matrix).float()
        logits = self.hp.logit_softcap * (logits / self.hp.logit_softcap).tanh()
        if refused is not None:
            logits = logits - REFUSED_NATS * refused[ids[:, -logits.size(1) :]]
        if targets is None:
            return logits
        return token_losses(logits, targets, reduction, hints)

    def block(
        self,
        stream: Stream,
        x0: Tensor,
        skip: Tensor | None,
        early: list[Tensor],
        layer: Layer,
        document: Tensor | None,
    ) -> tuple[Tensor | None, Stream]:
        """One layer: (the stream before it if it is `kept`, the stream after it). x0 is the stream of
        the embedding, `early` for MUDD the one before the last three visits, (B, T, D) each.
        Compiled once per kind of layer and shape, as it depends on no layer's number or depth."""
        x, change, lane = stream
        before = x = x if change is None else x + change
        value, sources = None, (x0, before, *early)
        if layer.mudd:
            residual, value = self.mudd(x, sources, 0)
            x = x + residual
        if layer.lane_mix is not None and lane is None:
            lane = x  # without the skip of this layer (#2135)
        if layer.skip_scale is not None:
            skip, scale = before if skip is None else skip, layer.skip_scale
            if self.hp.skips == "lerp":  # (#1218, #2135)
                x = torch.lerp(scale * skip, x, layer.skip_gate.sigmoid())
            else:
                x = x + (scale.sigmoid() if self.hp.skips == "gates" else scale) * skip
        mixed = layer.resid_mix[0] * x + layer.resid_mix[1] * x0
        attended = self.attention(rms_norm(mixed), layer, document, value)
        # Autograd would fill the gradient of an output that nobody reads with zeros.
        before = before if layer.kept else None
        if lane is None:
            x = mixed + attended
            change = self.mlp(x, layer)
        else:
            change = self.mlp(lane, layer)
            x, lane = (
                (m[0] * old + m[1] * attended + m[2] * change).to(self.dtype)
                for m, old in zip(layer.lane_mix, (x, lane), strict=True)
            )
            change = None
        if layer.mudd:
            x, lane = x + (change if lane is None else lane), None
            (change,) = self.mudd(x, sources, 1)
        return before, (x, change, lane)

    def mudd(self, x: Tensor, sources: tuple[Tensor, ...], end: int) -> list[Tensor]:
        """Sums of the sources (B, T, D) for stream and values of the last visit, or (`end` 1) for its
        output. A small MLP of the stream x decides their weights (arXiv:2502.12170), initially 0."""
        hidden = F.gelu(F.linear(F.normalize(x, dim=-1), self.mudd_in[end].to(x.dtype)))
        w_out = self.mudd_out.to(x.dtype).split((6, 3))[end]
        weights = F.linear(F.pad(hidden, (0, 1), value=1.0) / MUDD_WIDTH, w_out)
        return [sum(map(operator.mul, w.split(1, -1), sources)) for w in weights.split(3, -1)]

    def attention(
        self, x: Tensor, layer: Layer, document: Tensor | None, value: Tensor | None
    ) -> Tensor:
        """Causal grouped-query attention of the normalised x (B, T, D) with partial RoPE. Its values
        also read `value` (B, T, D)."""
        hp = self.hp
        # The gradient of one split is one concatenation, filled without a copy.
        sizes = (hp.num_heads, hp.num_kv_heads, hp.num_kv_heads)
        matrices = layer.q, layer.k, layer.v
        qkv = linear(x, *matrices).unflatten(-1, (-1, hp.head_dim)).split(sizes, dim=2)
        # q (B, T, H, E), k and v (B, T, K, E)
        q, k, v = (adapt(y, x, matrix) for y, matrix in zip(qkv, matrices, strict=True))
        if value is not None:
            v = v + adapt(linear(value, layer.v), value, layer.v).view_as(v)
        cos, sin = self.cos[: x.size(1)], self.sin[: x.size(1)]
        q = NormRotate.apply(q, layer.q_gain[:, None], cos, sin)
        k = NormRotate.apply(k, cos.new_ones(1, 1), cos, sin)
        y = self.attend(q, k, v, layer.band, document, layer.longest)
        if layer.xsa:
            y = xsa(y, v)
        if hp.attn_gate:  # (#1667); initially 1/2
            gate = F.linear(x[..., :GATE_INPUTS], layer.attn_gate.to(x.dtype))  # (B, T, H)
            y = y * (0.5 * gate).sigmoid()[..., None]
        # The matrix "out" includes `attn_scale`. Another gain here must not make the stream fp32.
        # The low-rank change of `out` reads x, beside attention.
        return adapt(linear(y.flatten(2), layer.out), x, layer.out)

    def mlp(self, stream: Tensor, layer: Layer) -> Tensor:
        """The MLP of rms_norm(stream), (B, T, D) (#1948). If `activation` allows it, the norm is one
        factor after it, which is faster."""
        x, scale = stream, 1 / mean_square(stream)  # the square of the norm's factor
        if not self.homogeneous:
            x, scale = rms_norm(stream), 1
        gate = 1
        if self.hp.mlp_gate:  # (#1941), as a factor of the hidden units, where it costs no kernel
            weights = layer.mlp_gate.to(stream.dtype)
            gate = F.linear(stream[..., :GATE_INPUTS], weights[None, :-1], weights[-1:]).sigmoid()
        if self.fused_mlp and not (layer.up.observe or layer.down.low_rank):
            return self.fused_mlp(x, scale * gate, layer.up.weight, layer.down.weight)
        hidden = activation(linear(x, layer.up), self.hp) * (scale * gate)
        y = linear(hidden.to(self.dtype), layer.down)
        return y if layer.down.low_rank is None else adapt(y, gate * rms_norm(stream), layer.down)

    def embed(self, ids: Tensor, projection: Matrix | None) -> Tensor:
        """ids (B, T) -> stream (B, T, D): token and hashed bigram embedding (BigramHash),
        normalised, mixed with the previous position (SmearGate).

        Neither crosses a BOS."""
        starts = F.pad(ids[:, 1:] == BOS, (1, 0), value=True)
        x = F.embedding(ids, self.tok_emb)
        if self.hp.bigram_vocab_size:
            buckets = self.hp.bigram_vocab_size - 1  # the last one is for starts
            hashed = ((36313 * ids) ^ (27191 * F.pad(ids[:, :-1], (1, 0)))) % buckets
            hashed = hashed.masked_fill(starts, buckets)
            pair = F.embedding(hashed, self.bigram_emb).to(self.dtype)
            x = x + self.bigram_scale * linear(pair, projection)
        if not self.hp.smear_token:
            x = rms_norm(x)
        previous = F.pad(x[:, :-1], (0, 0, 1, 0)) * ~starts[..., None]
        if self.hp.smear_token:  # (#1667, #2135)
            factor, weights = self.smear_gate[0], self.smear_gate[1:]
            gate = F.linear(x[..., :GATE_INPUTS], weights[None]).sigmoid()
            return rms_norm(x + factor * gate * previous).to(self.dtype)
        gate = self.smear_gate.sigmoid()
        return ((1 - gate) * x + gate * previous).to(self.dtype)

    def matrices(self, qat: bool = False) -> Tensors:
        """The matrices (L or 1, out, in) by name, in the compute dtype. Gains and layer scales are
        folded in; `qat` rounds the banks, with a straight-through gradient."""
        matrices = {}
        for kind in MATRICES:
            bank = bank_part(getattr(self, kind.bank), kind)
            if qat:
                rows = bank.detach().float()
                rule = RULES[self.hp.rounding][0]
                steps = rule.default_steps(rows)
                bank = bank + (to_codes(rows, steps, rule.limit) * steps - bank).detach()
            if kind.gain:
                bank = bank * getattr(self, kind.gain)[..., None]
            if kind.layer_scaled:
                bank = bank * self.layer_scale
            matrices[kind.name] = bank.to(self.dtype)
        for kind in TABLES:
            if kind.hessian and hasattr(self, kind.name):
                matrices[kind.name] = getattr(self, kind.name).to(self.dtype)[None]
        return matrices

    def low_rank_pairs(
        self, adapter: Adapter, order: tuple[int, ...]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """The adapter by name of the matrix whose outputs it changes: (B, depth, rank, in) and
        (B, depth, out, rank) in the compute dtype. Gains and layer scales are folded in."""
        pairs = {}
        for target, kind in LORA_TARGETS.items():
            if f"{target}.a" in adapter:
                a, b = (adapter[f"{target}.{part}"] for part in "ab")
                b = b * (self.hp.ttt_lora_alpha / self.hp.ttt_lora_rank)
                if kind.bank:
                    b = b * self.layer_scale[list(order)]
                if kind.gain:
                    b = b * getattr(self, kind.gain)[list(order), :, None]
                pairs[kind.name] = a.to(self.dtype), b.to(self.dtype)
        return pairs


class FanOut(torch.autograd.Function):
    """The first stream, a change of 0, and the stream x0 of the embedding for each of n visits. These
    are views and the change has a gradient, as another graph would be compiled for one object in
    two places, or without a gradient. `add` sums the n + 1 gradients when all are there: autograd
    adds them in pairs, three times the traffic."""

    @staticmethod
    def forward(ctx, x0: Tensor, n: int, add: Callable) -> tuple[Tensor, ...]:
        ctx.add = add
        views = [x0.view_as(x0) for _ in range(n + 1)]
        return views[0], torch.zeros_like(x0), *views[1:]

    @staticmethod
    def backward(ctx, stream: Tensor, _change: Tensor, *grads: Tensor) -> tuple:
        return ctx.add(*grads[::-1], stream), None, None


def gradients_of(model: GPT, losses: Tensor, weights: Tensor | None = None) -> Tensors:
    """The gradients by parameter name of the losses or, if there are several, of their weighted sum.
    Of a parameter that is not used, such as the skips of a model of one layer, they are zeros."""
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(losses, parameters.values(), weights, materialize_grads=True)
    return dict(zip(parameters, grads, strict=True))


def compile_blocks(model: GPT, compiled: bool) -> GPT:
    """The model with the same parameters, whose parts are compiled functions; unchanged if not
    `compiled`. So the graphs do not depend on the number and order of the layers."""
    if not compiled:
        return model
    by_block = copy.copy(model)
    for part in ("matrices", "low_rank_pairs", "embed", "add", "block", "head"):
        setattr(by_block, part, compile_whole(getattr(model, part), compiled))
    return by_block


# ---- Optimizer: Parallel Muon for the banks, Adam for the rest -----------------------------------
# One (a, b, c) per iteration. The quintic's slope at 0 is steep and it never converges: singular
# values end up in about 0.7 .. 1.2. Polar Express (arXiv:2505.16932) uses the best polynomial for
# what the previous one left.
NEWTON_SCHULZ = {
    "quintic": ((3.4445, -4.7750, 2.0315),),
    "polar-express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}


def newton_schulz(g: Tensor, dtype: torch.dtype, steps: int, coefficients: str) -> Tensor:
    """Push the singular values of each matrix of g (r, m, n), scaled to norm 1, towards 1 (Muon,
    Keller Jordan 2024), by iterations X <- aX + (bA + cA^2)X with A = XX^T, mirrored for tall X.
    Zero matrices stay zero."""
    x = (g / (vector_norm(g, dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    table = NEWTON_SCHULZ[coefficients]
    tall = x.size(-2) > x.size(-1)
    for step in range(steps):
        a, b, c = table[min(step, len(table) - 1)]
        gram = x.mT @ x if tall else x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, poly, beta=a) if tall else torch.baddbmm(x, poly, x, beta=a)
    return x


def muon_update(
    shard: BankShard, clip: Tensor, momentum: Tensor, rate: Tensor, hp: Hyperparameters
):
    """One Muon step on the rows (r, a, b) that this rank owns, from their summed gradient; clip,
    momentum, rate: ()."""
    grad = shard.grad_shard.float() * clip
    velocity = shard.state["momentum"].mul_(momentum).add_(grad)
    update = grad + momentum * velocity
    if hp.muon_eq:  # normalise the outputs of each matrix (MuonEq-R)
        of_rows, of_columns = (vector_norm(update, dim=dim, keepdim=True) for dim in (-1, -2))
        update = update / torch.where(shard.transposed, of_columns, of_rows).clamp(min=1e-7)
    update = newton_schulz(update, shard.owned_rows.dtype, hp.muon_backend_steps, hp.muon_coeffs)
    shard.master.mul_(1 - rate * hp.muon_wd).sub_(update * (rate * shard.scale))
    shard.owned_rows.copy_(shard.master)


class BankShard:
    """One bank under Parallel Muon. Every rank holds the whole bank and its gradient in the compute
    dtype, padded to S*r rows. The owner of r rows also holds their fp32 weights and momentum.

        padded       (S*r, a, b)  the bank; the model's parameter is a view of its first R rows
        owned_rows   (r, a, b)    view of `padded`
        master       (r, a, b)    fp32 weights of the owned rows
        state        (r, ...)     fp32, by name: momentum (r, a, b)
        grad         (S*r, a, b)  the gradient of one micro-batch, into which backward adds
        grad_sum     (S*r, a, b)  the sum over all micro-batches: `grad` if there is one, else fp32
        grad_shard   (r, a, b)    the sum over all ranks; `grad_sum` itself if S is 1
        scale        (r, 1, 1)    factor of the update; larger for tall matrices, as in #399
        transposed   (r, 1, 1)    whether a matrix is stored as (in, out)

    Checkpoints and the warm-up restore each entry of `state`, which all ranks must have. For a new
    one see docs/experiment.md.
    """

    def __init__(self, name: str, model: GPT, weights: Tensor, comm: Comm, accumulate: bool):
        bank = getattr(model, name)
        self.rows = bank.size(0)  # R
        owned = math.ceil(self.rows / comm.size)  # r
        self.own_places = slice(comm.rank * owned, (comm.rank + 1) * owned)
        full = torch.zeros(comm.size * owned, *bank.shape[1:], device=bank.device)
        full[: self.rows] = weights
        self.padded = full.to(bank.dtype, copy=True)
        bank.data = self.padded[: self.rows]
        self.owned_rows = self.padded[self.own_places]
        self.master = full[self.own_places].clone()
        self.state = {"momentum": torch.zeros_like(self.master)}
        self.grad = torch.zeros_like(self.padded)
        bank.grad = self.grad[: self.rows]  # so the padding rows stay zero
        self.grad_sum = self.grad.float() if accumulate else self.grad
        self.grad_shard = self.grad_sum if comm.size == 1 else torch.empty_like(self.owned_rows)
        of_rows = []
        for kind in BANKS[name]:
            out, into = kind.shape(model.hp)
            of_rows += [(max(1, out / into) ** 0.5, kind.transposed)] * model.hp.num_layers
        of_rows += of_rows[-1:] * (len(full) - self.rows)  # of padding rows, which stay zero
        of_rows = torch.tensor(of_rows[self.own_places], device=bank.device)[..., None, None]
        self.scale, self.transposed = of_rows[:, 0], of_rows[:, 1] > 0


class Report(NamedTuple):
    """Scalars of a step, which each rank fills in place; all-reduced with the small gradients."""

    loss: Tensor  # mean; nan if a gradient is not finite
    seconds: Tensor  # rank 0's clock when it queued the update
    stop: Tensor  # ranks that were asked to stop


class ParallelMuon:
    """Muon for the banks, AdamW for all other parameters, on any number of ranks."""

    def __init__(
        self,
        model: GPT,
        weights: Tensors,
        hp: Hyperparameters,
        comm: Comm,
        accumulate: bool = False,
        compiled: bool = False,
    ):
        self.hp, self.comm = hp, comm
        self.banks = {
            bank: BankShard(bank, model, weights[bank], comm.shard, accumulate)
            for bank in sorted(BANKS, key=lambda bank: -weights[bank].numel())  # largest first
        }
        self.small = {name: p for name, p in model.named_parameters() if name not in BANKS}
        # The fp32 weights that this rank updates.
        self.owned = {name: shard.master for name, shard in self.banks.items()}
        self.owned |= {name: parameter.detach() for name, parameter in self.small.items()}
        # One buffer for the small gradients, the squared norm of the banks' gradients and the
        # report, so one all-reduce is enough.
        sizes = [parameter.numel() for parameter in self.small.values()]
        self.flat = self.small["tok_emb"].new_zeros(sum(sizes) + 1 + len(Report._fields))
        self.flat_grad, scalars = self.flat.tensor_split([sum(sizes)])
        self.squares, *report = scalars  # views ()
        self.report = Report(*report)  # filled before `step`
        for parameter, view in zip(self.small.values(), self.flat_grad.split(sizes), strict=True):
            parameter.grad = view.view_as(parameter)  # backward adds into it: no packing
        self.add_adam()
        self.muon_update = compile_whole(muon_update, compiled)

    def add_adam(self):
        """AdamW with its state, as a checkpoint may restore it before the first step. A new
        parameter gets SCALAR_LR, and SCALAR_WD unless it is in TABLES."""
        hp = self.hp
        groups = {}
        for name, parameter in self.small.items():
            rate = hp.tied_embed_lr if name in ("tok_emb", "bigram_emb") else hp.scalar_lr
            decay = hp.adam_wd if name in [kind.name for kind in TABLES] else hp.scalar_wd
            group = {"params": [], "peak_lr": rate, "weight_decay": decay}
            groups.setdefault((rate, decay), group)["params"].append(parameter)
        self.adam = torch.optim.AdamW(
            groups.values(), betas=(hp.beta1, hp.beta2), eps=hp.adam_eps, fused=True
        )
        for parameter in self.small.values():
            self.adam.state[parameter] = {
                "step": parameter.new_zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def accumulate(self):
        """Add the gradients of one micro-batch to the sum."""
        for shard in self.banks.values():
            if shard.grad_sum is not shard.grad:
                shard.grad_sum.add_(shard.grad)
                shard.grad.zero_()

    def clear(self):
        """Set the gradients and the report to zero."""
        banks = itertools.chain(*((one.grad, one.grad_sum) for one in self.banks.values()))
        torch._foreach_zero_(list({self.flat, *banks}))  # a set, as `grad_sum` may be `grad`

    @torch.no_grad()
    def step(self, lr_scale: float, momentum: float) -> Tensor:
        """One update from the gradients, which are zero afterwards. Returns the summed Report as
        (3,)."""
        self.reduce_gradients()
        norm = self.gradient_norm()
        self.report.loss.add_(0 * norm)  # nan if a gradient is not finite
        clip = ((self.hp.grad_clip_norm or inf) / (norm + 1e-6)).clamp(max=1.0)
        # Filled on the device, as a copy from the host would wait.
        rate = torch.full_like(norm, lr_scale * self.hp.matrix_lr)
        momentum = torch.full_like(norm, momentum)
        gathered = []
        for shard in self.banks.values():
            self.muon_update(shard, clip, momentum, rate, self.hp)
            gathered.append(self.comm.shard.all_gather(shard.padded, shard.owned_rows))
        self.update_small(clip, lr_scale)
        report = torch.stack(self.report)
        self.clear()
        for wait in gathered:
            wait()
        return report

    def reduce_gradients(self):
        """Sum over the ranks: each bank by a reduce-scatter in the node and an all-reduce of the
        owned rows over the replicas, which overlaps with the next bank's reduce-scatter; then the
        flat buffer."""
        scattered, reduced, alone = [], [], self.comm.shard.size == 1
        for shard in self.banks.values():
            # After the last micro-batch `grad` is free to hold the sum in the compute dtype.
            full = shard.grad_sum if alone else shard.grad.copy_(shard.grad_sum)
            scattered.append((shard, self.comm.shard.reduce_scatter(shard.grad_shard, full)))
        for shard, wait in scattered:
            wait()
            reduced.append(self.comm.replicate.all_reduce(shard.grad_shard))
        for wait in reduced:
            wait()
        norms = [
            vector_norm(shard.grad_shard, dtype=torch.float32) for shard in self.banks.values()
        ]
        self.squares.copy_(torch.stack(norms).square().sum() / self.comm.replicate.size)
        # Last, as it carries the norm: one more all-reduce would take longer than it hides, by the
        # model (bench/h100.py --work update). NCCL may hang if ranks order two groups differently.
        self.comm.all_reduce(self.flat)()

    def gradient_norm(self) -> Tensor:
        """Norm () of the reduced gradient, the same on all ranks, or replicas would drift apart."""
        return (self.squares + vector_norm(self.flat_grad).square()).sqrt()

    def update_small(self, clip: Tensor, lr_scale: float):
        """AdamW on the small parameters while the all-gathers run; the same on all ranks."""
        self.flat_grad.mul_(clip)
        for group in self.adam.param_groups:
            group["lr"] = group["peak_lr"] * lr_scale
        self.adam.step()

    def sync_banks(self):
        """Copy the owners' fp32 rows into every rank's banks, after a change outside `step`."""
        for shard in self.banks.values():
            shard.owned_rows.copy_(shard.master)
            self.comm.shard.all_gather(shard.padded, shard.owned_rows)()

    def weights(self) -> Tensors:
        """All weights in fp32, gathered from their owners. Collective."""
        return {name: self.gather(name, tensor).clone() for name, tensor in self.owned.items()}

    def tensors(self) -> Tensors:
        """All state that a step changes, by PARAMETER.KIND, of a bank the owned rows. After changes
        call `sync_banks`."""
        tensors = {f"{name}.weight": tensor for name, tensor in self.owned.items()}
        states = {name: shard.state for name, shard in self.banks.items()}
        states |= {name: self.adam.state[parameter] for name, parameter in self.small.items()}
        for name, state in states.items():
            tensors |= {f"{name}.{kind}": tensor for kind, tensor in state.items()}
        return tensors

    def gather(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of `tensors`, whole on every rank: of a bank all rows (R, a, b). Collective."""
        shard = self.banks.get(name.partition(".")[0])
        if shard is None:
            return tensor
        full = tensor.new_empty(len(shard.padded), *tensor.shape[1:])
        self.comm.shard.all_gather(full, tensor)()
        return full[: shard.rows]

    def scatter(self, name: str, tensor: Tensor, source: Tensor | None):
        """The inverse of `gather`: copy rank 0's `source` into every rank's `tensor`. Raises
        UserError if its shape is another one."""
        source = self.comm.broadcast(source)
        shard = self.banks.get(name.partition(".")[0])
        shape = tensor.shape if shard is None else (shard.rows, *tensor.shape[1:])
        saved = getattr(source, "shape", None)
        require(saved == shape, f"the checkpoint has {name} with shape {saved}, not {shape}")
        if shard is None:
            tensor.copy_(source)
        else:
            rows = source[shard.own_places]
            tensor[: len(rows)] = rows  # padding rows stay zero


# ---- Schedules, clock and averaging --------------------------------------------------------------
# Warm-ups and warmdowns given in steps take at most this part of a run, or slow machines would
# never reach the peak.
PHASE_LIMIT = 0.5
SHORT_SEQ_FRACTION = 0.4  # of the run that SHORT_SEQ_PARTS cuts sequences for
# Fraction of the peak learning rate below which SWA samples, so never if MIN_LR is larger; 0.5 in
# #399.
SWA_START = 0.2
MARGIN = 1 / 600  # of the time limit: for a short stall while the last steps are in flight


class StepSettings(NamedTuple):
    """Settings of one step. If a new field changes every step, give it one value in `phases`, and
    pass it to compiled functions as a tensor: each value of a Python number compiles a graph."""

    lr_scale: float  # multiplies every learning rate; SWA begins by its value
    momentum: float  # Muon's
    # Each combination of these is a graph. The warm-up compiles those of a run of ITERATIONS.
    qat: bool  # late QAT
    seq_len: int  # tokens T of a training sequence
    looping: bool = False  # repeat the layers of the loop


def schedule(hp: Hyperparameters, step: int, seconds: float, end: float) -> StepSettings:
    """The settings of step number `step`. `seconds`: when it begins. `end`: when the last step may
    begin, or infinity.

    Progress is the used fraction of ITERATIONS or of the time, the larger one. The warmdown ends at
    MIN_LR."""
    time_used = seconds / end
    progress = max(step / hp.iterations, time_used)
    # The steps of the whole run, at the pace so far
    run_steps = min(hp.iterations, step / time_used) if time_used else hp.iterations
    warmdown = hp.warmdown_frac or min(hp.warmdown_iters / run_steps, PHASE_LIMIT)
    # Another shape of the warmdown also moves late QAT, below, and SWA, which begin by this value.
    lr_scale = min(1.0, max(0.0, 1.0 - progress) / warmdown) if warmdown else 1.0
    qat = hp.late_qat and lr_scale < hp.qat_threshold
    warmup = max(step / max(hp.muon_momentum_warmup_steps, 1), progress / PHASE_LIMIT)
    start = hp.muon_momentum_warmup_start
    momentum = start + min(1.0, warmup) * (hp.muon_momentum - start)
    short = progress < SHORT_SEQ_FRACTION and not qat  # both would be one more graph
    seq_len = hp.train_seq_len // (hp.short_seq_parts if short else 1)
    looping = hp.loop_visits > 1 and progress >= hp.loop_start
    return StepSettings(max(hp.min_lr, lr_scale), momentum, qat, seq_len, looping)


def phases(hp: Hyperparameters) -> dict[StepSettings, int]:
    """{a step of each kind in the schedule, at the peak learning rate: at how many of 1,001 places of
    the run, for tools/check_machine.py}, in order, for a run of ITERATIONS. Each kind is a graph."""
    steps = (schedule(hp, hp.iterations * place / 1000, 0.0, inf) for place in range(1001))
    start = hp.muon_momentum_warmup_start
    return collections.Counter(step._replace(lr_scale=1.0, momentum=start) for step in steps)


class Clock:
    """Training time: a timer that pauses for validation. All ranks decide by rank 0's time."""

    def __init__(self, cap: float, ahead: int):
        self.cap = cap or inf
        self.reserve = 0.0  # seconds of it for calibration
        self.ahead = ahead  # steps that the host may queue ahead of the device
        self.step = -1  # the last one whose time is known
        self.seconds = 0.0  # that time
        self.recent = [0.0]  # seconds of the last 20 steps
        self.paused_at = 0.0
        self.started = None

    def start(self):
        self.started = self.started or perf_counter()

    def pause(self):
        self.paused_at = self.elapsed()
        self.started = None

    def elapsed(self) -> float:
        """Seconds on this rank's timer."""
        return self.paused_at + (perf_counter() - self.started if self.started else 0.0)

    def record(self, step: int, seconds: float):
        """Record when rank 0 queued the update of `step`, in its training time."""
        self.recent = [*self.recent[-19:], seconds - self.seconds]
        self.step = step
        self.seconds = seconds

    def expected_start(self, step: int) -> float:
        """When `step` is expected to begin, in seconds, at the average pace of the run."""
        return self.seconds * step / max(self.step + 1, 1)

    def time_left(self, step: int) -> float:
        """Seconds of the limit that are left when `step` has ended. It starts if this is positive.

        At the last known time, that of queueing a step, the device had yet to compute that step and
        those in flight. A step takes as long as the second slowest of the last 20, so a single
        stall does not end the run early."""
        pace = sorted(self.recent)[-1 - len(self.recent) // 20]
        finished = self.step - self.ahead - 1
        return self.cap * (1 - MARGIN) - self.reserve - self.seconds - (step - finished) * pace


class WeightAverage:
    """The weights to export: an EMA, or a plain average of late samples (SWA), in fp32. Each rank
    averages what it owns."""

    def __init__(self, weights: Tensors, hp: Hyperparameters):
        self.hp = hp
        self.weights = list(weights.values())
        self.samples = 0
        averaging = hp.ema_enabled or hp.swa_enabled
        self.mean = {name: w.clone() for name, w in weights.items()} if averaging else {}

    def update(self, step: int, lr_scale: float):
        """Add the weights after `step`."""
        hp = self.hp
        late = lr_scale < SWA_START and (step + 1) % hp.swa_every == 0
        if hp.ema_enabled or (hp.swa_enabled and late):
            self.samples += 1
            weight = 1 - hp.ema_decay if hp.ema_enabled else 1 / self.samples
            torch._foreach_lerp_(list(self.mean.values()), self.weights, weight)

    def apply(self) -> str:
        """Replace the weights by the average. Returns what they are now, for the log."""
        if not self.samples:
            return "the last weights"
        torch._foreach_copy_(self.weights, list(self.mean.values()))
        return f"{'EMA' if self.hp.ema_enabled else 'SWA'} of {self.samples} samples"


# ---- Training: steps, reports, validations, checkpoints ------------------------------------------
class Run:
    """Model, optimizer and average, and the loop around them: data, clock, signals, reports,
    validations and checkpoints. The calls of a step: train, train_step, backward;
    ParallelMuon.step, muon_update."""

    def __init__(self, hp: Hyperparameters, runtime: Runtime, log: Log, val: Validation | None):
        self.hp, self.runtime, self.log, self.val = hp, runtime, log, val
        self.comm = runtime.comm
        self.on_gpu = runtime.device.type == "cuda"
        self.loader = TrainingLoader(hp, runtime)
        self.accumulation = micro_batches(hp, self.loader.rows, runtime.micro_batch_tokens)
        self.model = GPT(hp, runtime.attend, runtime.dtype, runtime.fused_mlp)
        # Shared, because another node's CPU may round differently.
        weights = self.comm.broadcast(self.model.initialise(hp.seed))
        self.model.load_state_dict(weights)
        self.forward = compile_blocks(self.model.to(runtime.device), runtime.compiled)
        self.optimizer = ParallelMuon(
            self.model, weights, hp, self.comm, self.accumulation > 1, runtime.compiled
        )
        self.average = WeightAverage(self.optimizer.owned, hp)
        # On a CPU most texts are scored before their forward would be compiled.
        self.eval_forward = self.forward if self.on_gpu or hp.compile == "1" else self.model
        self.make_scorer = partial(Evaluator, self.eval_forward, val, hp, runtime)
        self.checkpoints = Checkpoints(hp, self.comm, log)
        self.clock = Clock(hp.max_wallclock_seconds, ahead=2 if self.on_gpu else 0)
        # Queued steps whose report is unread: (step, settings, report (3,) in pinned host memory,
        # the event after which it is there).
        self.in_flight = []
        self.signals = []  # that this rank has received
        self.stopping = False  # whether any rank has received one

    def train(self):
        """Steps until ITERATIONS, the time limit or a signal end the training."""
        hp, clock = self.hp, self.clock
        due = range(0, hp.iterations, hp.val_loss_every) if hp.val_loss_every else ()
        step = first = clock.step + 1
        gc.collect()
        gc.freeze()  # long-lived objects would make the collector's full passes stall a step
        while not self.is_over(step):
            # Schedules end where the run does: at the latest start of a step that still fits.
            start = clock.expected_start(step)
            settings = schedule(hp, step, start, start + clock.time_left(step))
            if step in due:
                self.validate(step, settings.looping)
            clock.start()
            report = self.train_step(step, settings).to("cpu", non_blocking=True)
            copied = torch.cuda.current_stream().record_event() if self.on_gpu else None
            self.in_flight.append((step, settings, report, copied))
            step += 1
            # Queue ahead once the time of a step is known, but not before a validation.
            self.read_reports(clock.ahead if step > first + 2 and step not in due else 0)
            if self.checkpoints.due(step, clock.expected_start(step)):
                self.save(step)
        gc.unfreeze()  # or Triton 3.9 reports leaks at the end
        self.validate(step, looping=True)
        self.save(step)
        self.raise_if_stopped()
        if step < hp.iterations:
            seconds = clock.elapsed()
            self.log(
                f"stopping_early: wallclock_cap train_time:{1000 * seconds:.0f}ms "
                f"step:{step}/{hp.iterations}"
            )

    def is_over(self, step: int) -> bool:
        """Whether ITERATIONS, the time limit or a signal leave no room for `step`."""
        if step >= self.hp.iterations or self.clock.time_left(step) <= 0:
            # Decide from what a checkpoint holds, so that a resumed run decides the same.
            self.read_reports()
        return self.stopping or step >= self.hp.iterations or self.clock.time_left(step) <= 0

    def train_step(self, step: int, settings: StepSettings) -> Tensor:
        """Forward, backward and update on batch `step`. Returns the summed Report as (3,) on the
        device."""
        self.backward(self.loader.batch(step), settings)
        if self.comm.rank == 0:
            self.optimizer.report.seconds.fill_(self.clock.elapsed())
        self.optimizer.report.stop.fill_(bool(self.signals))
        report = self.optimizer.step(settings.lr_scale, settings.momentum)
        self.average.update(step, settings.lr_scale)
        return report

    def config(self, settings: StepSettings) -> ForwardConfig:
        """How the forwards of such a step run."""
        order = self.hp.layer_order(settings.looping)
        return ForwardConfig(order, settings.qat, doc_len=self.hp.doc_len)

    def backward(self, batch: Tensor, settings: StepSettings):
        """Add the gradients of this rank's share of the step's mean loss, by its rows (B, T + 1),
        and the share itself to the report."""
        config = self.config(settings)
        for rows in batch.chunk(self.accumulation):
            ids = rows.to(torch.int64)
            x, y = (part.reshape(-1, settings.seq_len) for part in (ids[:, :-1], ids[:, 1:]))
            loss = self.forward(x, y, config=config) / (self.accumulation * self.comm.size)
            loss.backward()
            self.optimizer.accumulate()
            self.optimizer.report.loss.add_(loss.detach())

    def read_reports(self, keep: int = 0):
        """Wait for the reports of all steps in flight but the last `keep`, and act on them. Raises
        UserError if a loss is not finite."""
        while len(self.in_flight) > keep:
            step, settings, values, copied = self.in_flight.pop(0)
            if copied is not None:
                copied.synchronize()
            report = Report(*values.tolist())
            self.clock.record(step, report.seconds)
            self.stopping |= report.stop > 0
            done = step + 1
            if not math.isfinite(report.loss):
                raise UserError(
                    f"the training loss of step {done} is {report.loss}: lower MATRIX_LR, SCALAR_LR "
                    "or TIED_EMBED_LR, or check the data of that step"
                )
            if done <= 10 or done % self.hp.train_log_every == 0:
                self.log_step(done, settings, report.loss)

    def log_step(self, step: int, settings: StepSettings, loss: float):
        """The line of a training step, after `step` steps."""
        hp, clock = self.hp, self.clock
        seconds = clock.elapsed()
        rate = step * hp.train_batch_tokens / seconds
        eta = min((hp.iterations - step) * seconds / step, clock.cap - clock.reserve - seconds)
        self.log_progress(
            "train",
            step,
            f"train_loss:{loss:.4f}",
            f"tok_s:{rate:.0f} lr_scale:{settings.lr_scale:.4f} momentum:{settings.momentum:.4f} "
            f"qat:{settings.qat:d} seq_len:{settings.seq_len} eta:{eta:.0f}s",
            train_loss=loss,
            tokens_per_second=rate,
            done=max(step / hp.iterations, seconds / clock.cap),
            **settings._asdict(),
        )

    def log_progress(self, event: str, step: int, result: str, more: str, **fields):
        """A line of step, result and training time, in the order that tools look for."""
        seconds = self.clock.elapsed()
        self.log(
            f"step:{step}/{self.hp.iterations} {result} train_time:{1000 * seconds:.0f}ms "
            f"step_avg:{1000 * seconds / max(step, 1):.2f}ms {more}",
            event,
            step=step,
            train_seconds=seconds,
            **fields,
        )

    def validate(self, step: int, looping: bool):
        """Collective. Log the score of the weights before `step`, unless the run is to stop. The
        clock pauses."""
        self.read_reports()
        self.stopping |= any(self.comm.gather(self.signals))
        if self.stopping:
            return
        self.clock.pause()
        score = validation_pass(self.hp, looping).run(self.make_scorer, self.log, "validation")
        self.log_progress(
            "val",
            step,
            f"val_loss:{score.val_loss:.4f} val_bpb:{score.val_bpb:.4f}",
            f"eval_time:{1000 * score.eval_seconds:.0f}ms",
            val_loss=score.val_loss,
            val_bpb=score.val_bpb,
        )

    def tensors(self) -> Tensors:
        """All that a step changes, as this rank has it: the optimizer's tensors, and the average as
        PARAMETER.average."""
        return self.optimizer.tensors() | {
            f"{name}.average": mean for name, mean in self.average.mean.items()
        }

    def save(self, step: int):
        """Checkpoint the state before `step`, if checkpoints are enabled and this one does not
        exist yet."""
        self.read_reports()
        if self.hp.checkpoint_every and step > self.checkpoints.last["step"]:
            state = {
                "step": step,
                "samples": self.average.samples,
                "seconds": self.clock.seconds,
                "recent": self.clock.recent,
                "reserve": self.clock.reserve,
            }
            full = ((name, self.optimizer.gather(name, t)) for name, t in self.tensors().items())
            self.checkpoints.save(full, state)

    def restore(self, path: Path, state: dict, tensors: Tensors):
        """Continue from a checkpoint, on any number of ranks; rank 0 has its tensors."""
        for name, tensor in self.tensors().items():
            self.optimizer.scatter(name, tensor, tensors.pop(name, None))
        self.optimizer.sync_banks()
        clock, step, seconds = self.clock, state["step"], state["seconds"]
        self.average.samples = state["samples"]
        clock.step, clock.recent = step - 1, state["recent"]
        clock.seconds = clock.paused_at = seconds
        # With a smaller reserve, a finished run would take another step.
        clock.reserve = max(clock.reserve, state["reserve"])
        self.checkpoints.last = state
        self.log(
            f"resumed: step:{step} train_time:{1000 * seconds:.0f}ms from:{path}",
            "resumed",
            step=step,
            train_seconds=seconds,
            path=str(path),
        )

    def raise_if_stopped(self):
        """Collective. End if any rank has received a signal: also during the last validation, which
        no report follows."""
        self.checkpoints.written.result()  # the other ranks would not wait for it
        if received := set().union(*self.comm.gather(self.signals)):
            # The first cause: SIGHUP and SIGINT, to which launchers add SIGTERM
            raise KeyboardInterrupt(min(received).name)

    def finish(self) -> tuple[str, Tensors]:
        """Average the weights and calibrate the export, within the wall clock. Returns (name of the
        average, `Calibration.sums`)."""
        first = self.clock.step + 1
        steps = range(first, first + self.hp.gptq_batches)
        self.log.stage("calibration")
        self.clock.start()
        averaged = self.average.apply()
        self.optimizer.sync_banks()
        begun = self.clock.elapsed()
        calibration = self.calibrate(steps) if steps else {}
        self.clock.pause()
        if steps:
            seconds = self.clock.elapsed()
            self.log(
                f"calibration: {len(steps)} batches took {1000 * (seconds - begun):.0f}ms "
                f"train_time:{1000 * seconds:.0f}ms",
                "calibration",
                batches=len(steps),
                train_seconds=seconds,
                wall_seconds=seconds - begun,
            )
        return averaged, calibration

    def calibrate(self, steps: range) -> Tensors:
        """`Calibration.sums` over the batches of these steps on all ranks."""
        collected = Calibration(self.model, len(steps) * self.hp.train_batch_tokens)
        for step in steps:
            for rows in self.loader.batch(step).chunk(self.accumulation):
                collected.add(rows)
        for total in collected.sums.values():
            self.comm.all_reduce(total)()
        self.runtime.synchronize()
        return dict(collected.sums)

    def warm_up(self):
        """Run the graphs and collectives of the run before its clock starts, then restore all
        state: a step of each kind, the last WARMUP_STEPS times, and every shape of the
        evaluations."""
        hp, started = self.hp, perf_counter()
        if hp.gptq_batches and hp.max_wallclock_seconds:
            self.reserve_for_calibration()
        if not hp.warmup_steps:
            return
        state = list(self.tensors().values())
        before = [tensor.clone() for tensor in state]
        *_, last = phases(hp)  # with all parts
        rows = self.loader.batch(0).chunk(self.accumulation)[0]
        self.log("warmup: gradients", "graph", name="gradients")
        check_kernels(self.forward, rows, self.config(last), self.comm, self.log)
        for kind in phases(hp):
            name = f"step qat:{kind.qat:d} seq_len:{kind.seq_len} looping:{kind.looping:d}"
            self.log(f"warmup: {name}", "graph", name=name)
            self.train_step(0, kind)
        for _ in range(1, hp.warmup_steps):
            self.train_step(0, last)
        passes = final_passes(hp)
        if hp.val_loss_every and hp.loop_visits > 1:
            passes["validation"] = validation_pass(hp, looping=False)
        warm_up_evaluation(self.make_scorer, passes, self.log)
        torch._foreach_copy_(state, before)
        self.optimizer.sync_banks()
        self.average.samples = 0
        self.runtime.synchronize()
        elapsed = perf_counter() - started
        self.log(f"warmup: done seconds:{elapsed:.1f}", "warmup", wall_seconds=elapsed)

    def reserve_for_calibration(self):
        """Reserve time for calibration, as the slowest rank measures it."""
        cap = self.hp.max_wallclock_seconds
        self.calibrate(range(1))  # loads kernels
        begun = perf_counter()
        self.calibrate(range(1))
        reserve = 1.1 * self.hp.gptq_batches * max(self.comm.gather(perf_counter() - begun))
        require(
            reserve < cap,
            f"MAX_WALLCLOCK_SECONDS={cap:g} is less than the {reserve:.1f} s for calibration: "
            "set GPTQ_BATCHES=0, or allow more time",
        )
        self.clock.reserve = reserve
        self.log(f"warmup: reserving {reserve:.2f} s for calibration")


# ---- Evaluation: windows and the banded pass, by one evaluator -----------------------------------
BAND_TARGETS = 64  # a block of a banded pass, but the first, scores at most this many EVAL_SEQ_LEN


class Score(NamedTuple):
    """A result over the validation stream."""

    val_loss: float  # nats per token
    val_bpb: float  # bits per byte
    eval_seconds: float
    val_tokens: int
    val_bytes: int

    def log(self, log: Callable, name: str):
        """The line that tools look for."""
        log(
            f"{name} val_loss:{self.val_loss:.8f} val_bpb:{self.val_bpb:.8f} "
            f"eval_time:{1000 * self.eval_seconds:.0f}ms "
            f"val_tokens:{self.val_tokens} val_bytes:{self.val_bytes}",
            name,
            **self._asdict(),
        )


def band_block(hp: Hyperparameters) -> tuple[int, int]:
    """Positions that a block of a banded pass, but the first, only reads, and those that it scores.

    Each layer reaches back by at most EVAL_SEQ_LEN - 1 more positions, or ATTN_WINDOW - 1, and the
    embeddings by 2 (one more window), so the losses are those of one long pass. With
    MICRO_BATCH_TOKENS a block is no longer than that, unless it would score less than EVAL_SEQ_LEN."""
    window = hp.eval_seq_len
    read = window + sum(hp.reach(layer, window) for layer in hp.layer_order())
    scored = window * BAND_TARGETS
    if hp.micro_batch_tokens:
        scored = min(scored, max(window, hp.micro_batch_tokens - read))
    return read, scored


def plan_windows(
    spans: Iterable, window: int, stride: int, done: Iterable[int] = itertools.repeat(0)
) -> ndarray:
    """Windows (3, N), in stream order, that score the target of each input of the spans (S, 2) once,
    but for the first `done` (S,) of each.

    A column is one window: (start, first, stop). It reads `window` inputs from `start` on and
    scores those in [first, stop). A span begins with a window that scores all its targets. The
    others are `stride` apart and score their last `stride`. Of a window, only `stop` depends on the
    end of the span, so no loss does. A matrix, because there can be a million windows."""
    windows = []
    for (begin, end), scored in zip(spans, done, strict=False):
        start = np.arange(begin, max(begin + 1, end - window + stride), stride)
        first = np.where(start > begin, start + window - stride, begin).clip(begin + scored)
        stop = np.minimum(start + window, end)
        windows.append(np.stack((start, first, stop))[:, first < stop])
    return np.concatenate(windows, 1)


def to_batches(columns: ndarray, rows: int, device: torch.device) -> tuple[Tensor, ...]:
    """The columns of a matrix (k, N) in batches (k, rows, 1), in one copy. Columns of zeros fill
    the last batch: as windows they score [0, 0), nothing."""
    table = torch.from_numpy(np.pad(columns, ((0, 0), (0, -columns.shape[1] % rows))))
    if device.type == "cuda":
        table = table.pin_memory()  # or the host would wait for the copy
    return table.view(len(table), -1, rows, 1).to(device, non_blocking=True).unbind(1)


def eval_rows(hp: Hyperparameters, runtime: Runtime, width: int) -> int:
    """Windows of `width` tokens that one rank scores per forward."""
    return max(1, min(hp.val_batch_size // runtime.comm.size, runtime.micro_batch_tokens) // width)


@dataclasses.dataclass
class Evaluator:
    """Scores windows of the validation stream, in full batches of few shapes, which are compiled
    once. Batches are dealt to the ranks.

    `nats` (n + 1,) holds the loss of each target that this rank has scored, else NaN; the last is
    spare. In a banded pass the windows are long blocks, in which each position attends to itself
    and the EVAL_SEQ_LEN - 1 before it, so every target has that context for about one forward."""

    forward: Callable
    val: Validation
    hp: Hyperparameters
    runtime: Runtime
    config: ForwardConfig
    stride: int
    log: Callable = lambda line, **fields: None

    def __post_init__(self):
        hp, device = self.hp, self.runtime.device
        self.window = sum(band_block(hp)) if self.config.band else hp.eval_seq_len
        self.rows = eval_rows(hp, self.runtime, self.window)
        self.nats = torch.full((self.val.targets + 1,), math.nan, device=device)
        self.count = torch.tensor(0, device=device)  # int64
        self.started = self.reported = perf_counter()

    def score_windows(self):
        """Score every target of the stream once, with the model as it is."""
        self.score(self.windows())

    def windows(self) -> ndarray:
        """The windows (3, N) over the packed stream."""
        return plan_windows([(0, self.val.targets)], self.window, self.stride)

    def warm_up(self):
        """Score a batch of each shape on each rank, so that nothing compiles while an evaluation is
        timed: of the first window, which has most targets, and of the last."""
        batch = self.runtime.comm.size * self.rows
        for place in (0, -1):
            self.score(self.windows()[:, [place] * batch])

    @torch.no_grad()
    def score(self, windows: ndarray):
        """Score these windows (3, N), first those with more than `stride` targets. Batches go round
        the ranks, so the place of a window in its batch depends on the windows before it."""
        comm, device = self.runtime.comm, self.nats.device
        offsets = torch.arange(self.window, device=device)
        short = windows[1] >= windows[0] + self.window - self.stride
        for n, members in ((self.window, ~short), (self.stride, short)):
            batches = to_batches(windows[:, members], self.rows, device) if members.any() else ()
            for start, first, stop in batches[comm.rank :: comm.size]:  # (rows, 1) each
                self.batch(start + offsets, n, first, stop)

    def batch(
        self, position: Tensor, n: int, first: Tensor, stop: Tensor, adapter: Adapter | None = None
    ) -> tuple[Tensor, Tensor]:
        """One forward of the inputs at `position` (rows, width). A row scores those of its last n
        positions that are in [first, stop), (rows, 1) each. Returns (losses, whether they count),
        (rows, n) each.

        All rows have one width. Positions from `stop` on read token 0."""
        target = position[:, -n:]
        counts = (target >= first) & (target < stop)
        place = position.clamp(max=self.val.targets - 1)
        ids = self.val.tokens[place].long() * (position < stop)
        last, hints = place[:, -n:], self.val.hints
        targets = self.val.tokens[last + 1].long()
        if hints is not None:
            hints = hints[last].long()  # hints[i] is for the target of input i
        nats = self.forward(
            ids, targets, "none", self.config, adapter, refused=self.val.refused, hints=hints
        )
        index = target.masked_fill(~counts, self.val.targets)
        self.nats.scatter_(0, index.flatten(), nats.detach().flatten().float())
        self.count += counts.sum()
        if perf_counter() - self.reported > 5:
            self.log_progress()
        return nats, counts

    def log_progress(self):
        """How far this rank is, which synchronises with the device."""
        self.reported = perf_counter()
        done = max(1e-9, min(1.0, self.count.item() * self.runtime.comm.size / self.val.targets))
        eta = (self.reported - self.started) * (1 / done - 1)
        self.log(f"evaluating stride:{self.stride} done:{done:.1%} eta:{eta:.0f}s", done=done)

    def result(self) -> Score:
        """The score over all ranks. Raises UserError if a loss is not finite, RuntimeError if a
        target was not scored or scored twice."""
        nats = self.nats[:-1]  # NaN: not scored here
        total = nats.nansum(dtype=torch.float64)
        sums = torch.stack((total, nats.isfinite().sum(), self.count))
        self.runtime.comm.all_reduce(sums)()
        total, finite, visited = sums.tolist()
        targets, nbytes = self.val.targets, self.val.total_bytes
        require(
            finite == targets or visited != targets,
            f"{targets - finite:.0f} of {targets} validation losses are not finite: the weights "
            "are damaged; lower the learning rates",
        )
        if not finite == visited == targets:
            raise RuntimeError(f"scored {finite:.0f} of {targets} targets, {visited:.0f} times")
        seconds = perf_counter() - self.started
        return Score(total / targets, total / math.log(2) / nbytes, seconds, targets, nbytes)


# ---- Test-time training: score first, then train on what was scored ------------------------------
# The challenge's conditions for it: a loss depends on the tokens before its target alone (C1; SGD's
# rates also on the length of the text, which is known in advance), the model gives a full
# distribution (C2), every target is scored before it trains anything (C3), and once (C4).
TTT_EPOCHS, TTT_MOMENTUM = 3, 0.9  # steps of SGD per chunk (#461)


def out_of_time(scorer: Evaluator) -> bool:
    """Whether EVAL_MAX_SECONDS have passed on this rank."""
    return 0 < scorer.hp.eval_max_seconds < perf_counter() - scorer.started


def score_rest(scorer: Evaluator, windows: ndarray):
    """Score these windows, which EVAL_MAX_SECONDS left over, with the model as it is."""
    _start, first, stop = windows
    left = (stop - first).sum() / scorer.val.targets
    scorer.log(f"ttt: EVAL_MAX_SECONDS are over: {left:.1%} of the text has fixed weights")
    scorer.score(windows)


def ttt_sgd(scorer: Evaluator):
    """Score the packed stream chunk by chunk with sliding windows. Train all weights of the model
    on each chunk but the last, after it is scored, by SGD with momentum (#461). Ranks share windows
    and sequences and take the same steps."""
    hp, comm, targets = scorer.hp, scorer.runtime.comm, scorer.val.targets
    size = hp.ttt_chunk_tokens
    windows = scorer.windows()
    _start, first, _stop = windows
    edges = np.searchsorted(first, range(size, targets, size))
    *chunks, last = np.split(windows, edges, 1)
    views = [p.detach().view(-1) for p in scorer.forward.parameters()]
    # In fp32, as bf16 would lose the steps.
    weights = torch.cat(views).float()
    momentum = torch.zeros_like(weights)
    for number, chunk in enumerate(chunks):
        scorer.score(chunk)
        rate = hp.ttt_lr * 0.5 * (1 + math.cos(math.pi * number / len(chunks)))
        for _ in range(TTT_EPOCHS):
            # Rank 0 decides for all.
            if hp.eval_max_seconds and comm.broadcast(out_of_time(scorer)):
                return score_rest(scorer, windows[:, edges[number] :])
            momentum.mul_(TTT_MOMENTUM).add_(sgd_gradients(scorer, number * size))
            weights.sub_(momentum, alpha=rate)
            torch._foreach_copy_(views, weights.split([len(view) for view in views]))
    scorer.score(last)


def sgd_gradients(scorer: Evaluator, begin: int) -> Tensor:
    """The chunk's mean gradient over all ranks by all parameters, in fp32 as one vector, clipped to
    norm 1. Targets after the last whole sequence of the chunk are left out. A compiled forward
    meets two shapes at most."""
    hp, runtime = scorer.hp, scorer.runtime
    length = min(hp.eval_seq_len, hp.ttt_chunk_tokens)
    end = begin + hp.ttt_chunk_tokens + 1
    sequences = scorer.val.tokens[begin:end].unfold(0, length + 1, length)
    own = sequences[runtime.comm.rank :: runtime.comm.size].long()
    total = torch.zeros(count_numbers(scorer.forward.parameters()), device=runtime.device)
    for rows in own.split(max(1, runtime.micro_batch_tokens // length)) if len(own) else ():
        loss = scorer.forward(
            rows[:, :-1], rows[:, 1:], config=scorer.config, refused=scorer.val.refused
        )
        loss = loss * (len(rows) / len(sequences))
        gradients = gradients_of(scorer.forward, loss).values()
        total += torch.cat([gradient.float().flatten() for gradient in gradients])
    runtime.comm.all_reduce(total)()
    return total * (1 / (vector_norm(total) + 1e-6)).clamp(max=1)


def warm_up_sgd(scorer: Evaluator):
    """Compile windows of each shape, and the gradients of a chunk."""
    scorer.warm_up()
    sgd_gradients(scorer, 0)


LORA_BETA2, LORA_EPS = 0.99, 1e-10  # of AdamW without a first moment (#2135)
LORA_CHUNKS = ((256, 8), (2000, 24))  # (until this position, targets of a chunk); as #2014
LORA_BATCH = 128  # documents of a rank that begin with the same A
# Most documents per forward: within the first window, and after it, where few are left.
LORA_ROWS = (16, 4)
# Windows are about EVAL_SEQ_LEN divided by these, so that few shapes are compiled.
LORA_PARTS = (8, 4, 2, 1)


def ttt_lora(scorer: Evaluator):
    """Score documents, each with low-rank changes (arXiv:2106.09685) of its own, as #1855 and #2014
    do. Documents are dealt to the ranks. B begins at 0; A begins as the mean of the rank's previous
    batch of documents, so the score depends on the number of ranks.

    No loss depends on where a later document begins (C1). The rank, the batch and the first A of a
    document depend on documents that end before it begins. Its chunks and windows depend on
    positions. Its row in a forward depends on how many earlier documents of the batch are still
    there, and rows do not see each other."""
    hp, comm, spans = scorer.hp, scorer.runtime.comm, scorer.val.spans()
    done = np.zeros(len(spans), np.int64)  # targets scored of each document
    own = np.arange(len(spans))[comm.rank :: comm.size]
    adapter = lora_adapter(hp, scorer.runtime.device)
    for batch in np.split(own, range(LORA_BATCH, len(own), LORA_BATCH)):
        state = LoraState(spans[batch], adapter)
        for begin, stop in lora_chunks(hp, state.lengths.max(initial=0)):
            if out_of_time(scorer):
                break
            lora_step(scorer, state, begin, stop)
            done[batch] = state.lengths.clip(max=stop)
        for name in adapter:
            if name.endswith(".a"):
                adapter[name] = state.factors[name][: len(batch)].mean(0, keepdim=True)
    if hp.eval_max_seconds:
        done = np.sum(comm.gather(done), 0)
        windows = plan_windows(spans, scorer.window, scorer.stride, done)
        if windows.size:
            score_rest(scorer, windows)


class LoraState:
    """Documents (S, 2) that learn side by side, each with a copy of the adapter `first`.

    There are always LORA_BATCH + 1 copies, or each number of documents would compile an update. The
    last is spare: no document reads it."""

    def __init__(self, spans: ndarray, first: Adapter):
        self.spans, self.lengths, self.steps = spans, np.ptp(spans, 1), 0
        self.factors = {name: f.repeat(LORA_BATCH + 1, 1, 1, 1) for name, f in first.items()}
        # Second moments
        self.squares = {name: torch.zeros_like(f) for name, f in self.factors.items()}


def lora_chunks(hp: Hyperparameters, length: int) -> Iterator[tuple[int, int]]:
    """[begin, stop) of the chunks of a document, until all its targets are in one; the last may
    reach over its end."""
    begin = 0
    while begin < length:
        sizes = [targets for until, targets in LORA_CHUNKS if begin < until]
        stop = begin + min([hp.ttt_lora_chunk, *sizes])
        yield begin, stop
        begin = stop


def lora_shape(scorer: Evaluator, begin: int, stop: int) -> tuple[int, int, int]:
    """(documents of a forward, width of the window that scores a chunk, positions whose losses it
    computes)."""
    window = scorer.hp.eval_seq_len
    widths = (min(window, round_up(window // part)) for part in LORA_PARTS)
    width = min(width for width in widths if width >= min(stop, window))
    rows = min(LORA_ROWS[stop > window], scorer.runtime.micro_batch_tokens // window)
    # Within the first window all positions have losses, for few shapes.
    return max(1, rows), width, stop - begin if stop > window else width


def lora_adapter(hp: Hyperparameters, device: torch.device) -> Adapter:
    """Initial LoRA factors of one document (random A, zero B). "out" and "mlp" are bypasses: they
    read the input of attention and of the MLP and add to their outputs."""
    adapter = {}
    generator = torch.Generator().manual_seed(0)
    for name in hp.ttt_lora_targets.split(","):
        kind = LORA_TARGETS[name]
        visits = len(hp.layer_order()) if kind.bank else 1
        out, _ = kind.shape(hp)
        a = torch.rand(1, visits, hp.ttt_lora_rank, hp.model_dim, generator=generator)
        adapter[f"{name}.a"] = ((2 * a - 1) / hp.model_dim**0.5).to(device)
        adapter[f"{name}.b"] = torch.zeros(1, visits, out, hp.ttt_lora_rank, device=device)
    return adapter


def lora_step(scorer: Evaluator, state: LoraState, begin: int, stop: int):
    """Score the targets [begin, stop) of all documents that have them, some side by side, each with
    its factors. Those that go on take an AdamW step."""
    device = scorer.runtime.device
    rows, width, n = lora_shape(scorer, begin, stop)
    offsets = torch.arange(width, device=device)
    update = compile_whole(lora_update, scorer.runtime.compiled)  # once: torch keeps its graphs
    state.steps += 1
    bias = torch.full((), 1 - LORA_BETA2**state.steps, device=device)  # no copy from the host
    present = np.flatnonzero(state.lengths > begin)
    opening, closing = state.spans[present].T
    starts, lasts = opening + max(0, stop - width), np.minimum(opening + stop, closing)
    columns = np.stack((starts, opening + begin, lasts, closing, present))
    scorer.forward.requires_grad_(False)  # or a backward would compute gradients of all weights
    for start, first, last, end, document in to_batches(columns, rows, device):
        adapter = {name: f[document[:, 0]].requires_grad_() for name, f in state.factors.items()}
        nats, counts = scorer.batch(start + offsets, n, first, last, adapter)
        loss = ((nats * counts).sum(1) / counts.sum(1).clamp(min=1)).sum()
        grads = torch.autograd.grad(loss, list(adapter.values()))
        # A row whose document ends here, or that fills the batch, changes the spare copy.
        copies = document.where(last < end, LORA_BATCH)[:, 0]
        update(state.factors, state.squares, grads, copies, bias, scorer.hp)
    scorer.forward.requires_grad_(True)


@torch.no_grad()
def lora_update(
    factors: Adapter,
    squares: Adapter,
    grads: tuple[Tensor, ...],
    index: Tensor,
    bias: Tensor,
    hp: Hyperparameters,
):
    """AdamW without a first moment on the copies `index` (rows,)."""
    for name, grad in zip(factors, grads, strict=True):
        old = factors[name][index]
        square = LORA_BETA2 * squares[name][index] + (1 - LORA_BETA2) * grad.square()
        change = hp.ttt_lora_wd * old + grad / ((square / bias).sqrt() + LORA_EPS)
        factors[name][index] = old - hp.ttt_lora_lr * change
        squares[name][index] = square


def warm_up_lora(scorer: Evaluator):
    """Compile a step of each shape, on one document as long as the longest; windows, if a limit may
    come."""
    hp, longest = scorer.hp, np.ptp(scorer.val.spans(), 1).max()
    state = LoraState(np.array([[0, longest]]), lora_adapter(hp, scorer.runtime.device))
    shapes = {lora_shape(scorer, *chunk): chunk for chunk in lora_chunks(hp, longest)}
    for chunk in shapes.values():
        lora_step(scorer, state, *chunk)
    if hp.eval_max_seconds:
        scorer.warm_up()


# ---- Final scores --------------------------------------------------------------------------------
class Pass(NamedTuple):
    """A way to score the validation stream."""

    config: ForwardConfig
    stride: int  # between windows
    score: Callable = Evaluator.score_windows
    warm_up: Callable = Evaluator.warm_up  # compiles what `score` runs

    def run(self, make_scorer: Callable, log: Log, name: str) -> Score:
        """Score every target of the stream once. After SGD the model is another one."""
        log.stage(name)
        scorer = make_scorer(self.config, self.stride, log)
        self.score(scorer)
        return scorer.result()


def validation_pass(hp: Hyperparameters, looping: bool = True) -> Pass:
    """The cheapest pass: the banded one if it is the final score, or windows without overlap."""
    config = ForwardConfig(hp.layer_order(looping))
    if hp.eval_mode == "banded":
        return Pass(config._replace(band=hp.eval_seq_len), band_block(hp)[1])
    return Pass(config, hp.eval_seq_len)


def final_passes(hp: Hyperparameters) -> dict[str, Pass]:
    """The final scores by name. A new way to score is another entry, before test-time training: that
    by SGD changes the model."""
    plain = ForwardConfig(hp.layer_order())
    passes = {"roundtrip": Pass(plain, hp.eval_seq_len)}
    if hp.eval_mode == "banded":
        passes["banded"] = validation_pass(hp)
    else:
        passes["sliding_window"] = Pass(plain, hp.eval_stride)
    if hp.ttt_enabled:
        learner = {"sgd": (ttt_sgd, warm_up_sgd), "lora": (ttt_lora, warm_up_lora)}[hp.ttt_mode]
        passes[f"ttt_{hp.ttt_mode}"] = Pass(plain, hp.eval_stride, *learner)
    return passes


def warm_up_evaluation(make_scorer: Callable, passes: dict[str, Pass], log: Callable):
    """Compile what these passes run."""
    for name, scoring in passes.items():
        log(f"warmup: {name}", "graph", name=name)
        scoring.warm_up(make_scorer(scoring.config, scoring.stride))


def score_artifact(make_scorer: Callable, hp: Hyperparameters, log: Log, prepared: float) -> str:
    """Log the final scores, and the seconds of the last one with the `prepared` ones, of text and
    artifact. Returns the last one, for the end of the log."""
    for name, scoring in final_passes(hp).items():
        score = scoring.run(make_scorer, log, name)
        score.log(log, f"final_int6_{name}_exact")
    total = prepared + score.eval_seconds
    log(
        f"evaluation: eval_time:{1000 * total:.0f}ms prepare_time:{1000 * prepared:.0f}ms",
        "evaluation",
        eval_seconds=total,
        prepare_seconds=prepared,
    )
    return f"{score.val_bpb:.4f} bits per byte ({name})"


# ---- Quantisation: weights -> integer codes and a step per row -----------------------------------
# The N matrices (out, in) of one kind, one of each layer, are rounded together.
FINEST = 0.0001  # nats per token that the finest steps cost, by calibration
SEGMENT = 64  # rows of a column that share a path through the trellis; paths run side by side


def round_steps(steps: Tensor, dropped: int) -> Tensor:
    """Positive, and without the last bits of fp32: fewer distinct steps compress better. Rounded as
    integers, as a compiler could drop two casts."""
    rounded = (steps.clamp(min=1e-18).view(torch.int32) + (1 << (dropped - 1))) & -(1 << dropped)
    return rounded.view(torch.float32)


def to_codes(rows: Tensor, steps: Tensor, limit: int) -> Tensor:
    """The nearest integers within +-limit, as fp32."""
    return (rows / steps).round().clamp(-limit, limit)


class Rule(NamedTuple):
    """How matrices are rounded."""

    damping: float  # of the Hessian, see `damped`
    limit: int = 2047  # the largest code without a trellis
    step_type: torch.dtype = torch.bfloat16  # holds the steps exactly
    # True: the export has `default_steps` and no trellis (#399). False: only QAT has these steps.
    fixed: bool = False

    def default_steps(self, rows: Tensor) -> Tensor:
        """The steps (..., out, 1) of fp32 rows (..., out, in) without their costs: a sixth of the
        deviation, or #399's, which reach the largest weight, taken as at least 1."""
        if self.fixed:
            return round_steps(rows.abs().amax(-1, keepdim=True).clamp(min=1.0) / self.limit, 13)
        return round_steps(rows.square().mean(-1, keepdim=True).sqrt() / 6, 20)


# By ROUNDING: for the matrices of BANKS, for TABLES. With low damping GPTQ moves errors to inputs
# that are weak in the calibration text, but may be strong in other text. An embedding is also
# looked up, and then each of its columns counts equally.
RULES = {
    "sensitivity": (Rule(0.1), Rule(1.0)),
    "399": (Rule(0.01, 31, torch.float16, True), Rule(0.01, 127, torch.float16, True)),
}


class Calibration:
    """Sums over `tokens` tokens for the export. NAME of a matrix: x^T x (N, in, in) of its inputs x.
    NAME.cost (N, out): W/2 times the mean of g^2 over a row and the tokens, where g is the gradient
    of one token's loss and W counts all weights of the model. So NAME.cost times a squared error is
    what the model would lose, in nats per token, if all of its weights had this error and were as
    sensitive as that row."""

    def __init__(self, model: GPT, tokens: int):
        self.model = model
        self.config = ForwardConfig(model.hp.layer_order(), doc_len=model.hp.doc_len)
        self.scale = count_numbers(model.parameters()) / (2 * tokens)
        self.random = torch.Generator().manual_seed(0)
        self.sums = collections.defaultdict(float)
        for kind, name, view in artifact_tensors(dict(model.named_parameters())):
            if kind and kind.hessian == name:  # not k and v, which share that of q
                # (N, in, in)
                self.sums[name] = torch.zeros_like(view[:, 0]).float().diag_embed()

    def add(self, batch: Tensor):
        """Observe a micro-batch (B, T + 1).

        A backward has the gradient of a sum over tokens. With random weights of mean 0 and variance
        1 its square is, on average, the sum of the tokens' squares."""
        for rows in batch.to(torch.int64).chunk(4):  # an eager forward keeps more for its backward
            nats = self.model(rows[:, :-1], rows[:, 1:], "none", self.config, observe=self.observe)
            weights = torch.randn(nats.shape, generator=self.random).to(nats.device)
            for kind, name, grad in artifact_tensors(gradients_of(self.model, nats, weights)):
                if kind:
                    self.sums[f"{name}.cost"] += self.scale * grad.float().square().mean(-1)

    def observe(self, kind: MatrixKind, layer: int, x: Tensor):
        """Add the products of a matrix's inputs x (B, T, in)."""
        if kind.hessian != kind.name:
            return
        x = x.detach()
        # The MLP may normalise after its first product: then x is not normalised yet.
        rows = (rms_norm(x) if kind.norm_after else x).flatten(0, -2).float()
        matmul = torch.backends.cuda.matmul
        before = matmul.fp32_precision
        # For tensor cores: inputs are bf16, so their products stay exact. Sums are fp32.
        matmul.fp32_precision = "tf32"
        try:
            self.sums[kind.name][layer].addmm_(rows.mT, rows)
        finally:
            matmul.fp32_precision = before


def damped(hessian: Tensor, damping: float) -> Tensor:
    """(H / m + d I) / (1 + d) of a Hessian H (N, in, in) with m the mean of its diagonal, and this
    damping d. The new diagonal has mean 1."""
    mean = hessian.diagonal(0, 1, 2).mean(-1)[:, None, None]
    hessian = hessian / mean.clamp(min=1e-30)
    hessian.diagonal(0, 1, 2).add_(damping)
    return hessian / (1 + damping)


def inverse_factor(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """(order (N, in) of the inputs, largest first; upper Cholesky factor (N, in, in) of the inverse
    of the Hessian in this order)."""
    order = hessian.diagonal(0, 1, 2).argsort(descending=True)
    hessian = torch.take_along_dim(hessian, order[:, :, None], 1)
    hessian = torch.take_along_dim(hessian, order[:, None], 2).double()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return order, torch.linalg.cholesky(inverse, upper=True).float()


def gptq(
    weights: Tensor, order: Tensor, factor: Tensor, steps: Tensor, to_integers: Callable, block=128
) -> Tensor:
    """Integers (N, out, in) that, times the steps (N, out, 1), preserve Wx rather than the fp32
    weights W (N, out, in), given their `inverse_factor`. `to_integers` rounds a column (N, out, 1).

    GPTQ (arXiv:2210.17323): columns are rounded one by one, largest activations first, and the open
    ones compensate each error along the inverse Hessian, those beyond this block at its end."""
    left, width = torch.take_along_dim(weights, order[:, None], 2), weights.size(2)
    factor = factor / factor.diagonal(0, 1, 2)[..., None]
    integers = torch.zeros_like(left)
    for first in range(0, width, block):
        stop, errors = min(first + block, width), []
        for place in range(first, stop):
            own, near = slice(place, place + 1), slice(place + 1, stop)
            integers[..., own] = to_integers(left[..., own])
            errors.append(left[..., own] - integers[..., own] * steps)
            left[..., near].baddbmm_(errors[-1], factor[:, own, near], alpha=-1)
        left[..., stop:].baddbmm_(torch.cat(errors, 2), factor[:, first:stop, stop:], alpha=-1)
    return torch.take_along_dim(integers, order.argsort()[:, None], 2)


def next_state(state, odd, states: int):
    """The state of the trellis after a code that is odd or not (0 or 1)."""
    # The state moves right. The bit that leaves it adds the first check, an odd code the second.
    first, second = PARITY[states]
    return (state >> 1) ^ (state & 1) * (first >> 1) ^ odd * (second >> 1)


def to_segments(columns: Tensor) -> Tensor:
    """Columns (N, out, n) as (place, segments, N, n): segments of SEGMENT rows, or one if there are
    fewer, the last one filled up with zeros."""
    length = min(SEGMENT, columns.size(1))
    padded = F.pad(columns, (0, 0, 0, -columns.size(1) % length))
    return padded.unflatten(1, (-1, length)).transpose(0, 2)


def viterbi(targets: Tensor, weights: Tensor, states: int) -> Tensor:
    """Integers (N, out, n) near the targets (N, out, n). Each segment of a column is the path through
    the trellis, from state 0, with the least sum of squared errors times weights (N, out, n). An
    integer is 2 x code + the lowest bit of the state, so a state and the lowest bit of a code
    decide the integer modulo 4."""
    # An edge is a pair of a state and the lowest bit of a code. Edges e and e + states end in state
    # e: with 4 states (0, 0) and (2, 1) in 0, (0, 1) and (2, 0) in 1, (1, 0) and (3, 1) in 2, (1, 1)
    # and (3, 0) in 3.
    edges = itertools.product(range(states), (0, 1))
    edges = sorted(edges, key=lambda edge: next_state(*edge, states))  # by where they end
    previous, odd = torch.tensor(edges[::2] + edges[1::2], device=targets.device).unbind(1)
    remainder = (previous & 1) + 2 * odd
    number = torch.arange(states, device=targets.device)[:, None]
    segments = to_segments(targets)
    rest, aims = number[:4], segments.flatten(1)[:, None]
    integers = 4 * ((aims - rest) / 4).round() + rest  # (rows, 4, paths)
    errors = to_segments(weights).flatten(1)[:, None] * (aims - integers).square()
    total = torch.where(number > 0, inf, 0.0)  # of the best path to each state (states, 1 or paths)
    # Of each row whether the second edge into each state is the better one; from the last row on,
    # the edges of the path.
    taken, path = [], []
    for error in errors.index_select(1, remainder):
        first, second = total.index_select(0, previous).add(error).split(states)
        taken.append(second < first)
        total = torch.minimum(first, second)
    state = total.argmin(0, keepdim=True)
    for took in taken[::-1]:
        path.append(state.add(took.gather(0, state), alpha=states))  # state + states * took
        state = previous.take(path[-1])
    nearest = integers.gather(1, remainder[torch.cat(path[::-1])][:, None]).view_as(segments)
    return nearest.transpose(0, 2).flatten(1, 2)[:, : targets.size(1)]


def trellis_bits(codes: Tensor, states: int) -> Tensor:
    """The lowest bit of the trellis' state before each code (N, out, n)."""
    odd = to_segments(codes) & 1
    state, bits = 0 * odd[0], []
    for row in odd:
        bits.append(state & 1)
        state = next_state(state, row, states)
    return torch.stack(bits).transpose(0, 2).flatten(1, 2)[:, : codes.size(1)]


class Quantiser:
    """Rounds weights to codes, integers of at most 12 bits, times the step of a row.

    Multiples of a step have a mean squared error of step^2 / 12, and twice the step saves one bit
    per weight. So at given bytes the total loss is lowest when each weight adds the same `loss`:
    cost x pivot x step^2 / 12, with `pivot` for GPTQ. The costs of `Calibration` count each weight
    as all weights of the model, so with them `loss` is also what the whole model loses, in nats per
    token.

    Trellis-coded quantisation (Marcellin and Fischer 1990) has multiples of half a step. A state
    allows every second one: twice the code, plus the lowest bit of the state. A code takes
    as many bits as before, and the choice of the path makes the squared error a fifth smaller
    (0.97 dB): step^2 / 15."""

    def __init__(self, rows: Tensor, hessian: Tensor, cost: Tensor | None, states: int, rule: Rule):
        """Of weights (N, out, in) with the Hessian (N, in, in) of their inputs, in any unit. `cost`
        (N, out) is of a squared error of 1; None: 1 / mean square of the row. `states` are the
        trellis', 0 for none."""
        self.rows, self.states, self.rule, self.calibrated = rows, states, rule, cost is not None
        # (N, out, 1)
        self.largest = rows.abs().amax(-1, keepdim=True)
        self.deviation = (rows.square().mean(-1, keepdim=True) + 1e-30).sqrt()
        self.cost = cost[..., None] if self.calibrated else self.deviation**-2.0
        self.damped = damped(hessian, rule.damping)
        self.order, self.factor = inverse_factor(self.damped)
        # With GPTQ the error of a column counts by its pivot, the inverse square of the factor's
        # diagonal, not by its entry of the Hessian's diagonal, which has mean 1.
        pivots = self.factor.diagonal(0, 1, 2) ** -2.0  # (N, in)
        self.pivot = pivots.mean(-1)[:, None, None]

    def steps(self, loss: float) -> Tensor:
        """(N, out, 1), with which each weight costs `loss`, in the unit of `cost`."""
        if self.rule.fixed:
            return self.rule.default_steps(self.rows)
        wanted = ((15 if self.states else 12) * loss / (self.cost * self.pivot)).sqrt()
        # The lower bound: below largest / 2000 a step has no code for the largest weight, and
        # `round_steps` moves it by up to a sixteenth: 1875. The upper bound: odd states have no
        # code for 0, so wide steps cost much.
        return round_steps(wanted.clamp(self.largest / 1875, 2 * self.deviation), 20)

    def on_host(self) -> Quantiser:
        """A copy on the CPU, where `round` is faster: it has a million small operations."""
        host = copy.copy(self)
        for name, value in vars(self).items():
            setattr(host, name, value.cpu() if isinstance(value, Tensor) else value)
        return host

    def expected_bytes(self, loss: float) -> float:
        """The bytes of all codes by the entropy of Gaussian rows in these steps. The 1 keeps it
        positive."""
        ratio = self.deviation / self.steps(loss)
        bits = (1 + 2 * math.pi * math.e * ratio.square()).log2() / 2
        return float(bits.mean()) * self.rows.numel() / 8

    def round(self, loss: float) -> tuple[Tensor, ...]:
        """Codes (N, out, in) int16, steps (N, out, 1), and what the weights of each matrix are expected
        to cost together, (N,), in the unit of `cost`: the sum over rows of cost e H e^T, where e is
        the error of a row and H is damped."""
        steps = self.steps(loss)
        parts = 2 if self.states else 1
        unit, weights = steps / parts, self.cost * steps.square()

        def to_integers(column):
            if not self.states:
                return to_codes(column, unit, self.rule.limit)
            # In half steps: a code of 12 bits is at most 2,047.
            return viterbi((column / unit).clamp(-4000, 4000), weights, self.states)

        integers = gptq(self.rows, self.order, self.factor, unit, to_integers)
        errors = self.rows - integers * unit
        expected = (self.cost * errors * (errors @ self.damped)).sum((1, 2))
        return (integers / parts).floor().short(), steps, expected


def cost_of_rows(squares: Tensor) -> Tensor:
    """`cost` of a `Quantiser` by the sums NAME.cost of `Calibration`."""
    # Rows that the calibration has hardly seen are not free of cost, nor is a matrix without use.
    return squares + 0.05 * squares.mean(1, keepdim=True) + 1e-30


Quantisers = dict[str, Quantiser]  # by the name of the kind of matrix that each one rounds


def make_quantisers(weights: Tensors, hp: Hyperparameters, calibration: Tensors) -> Quantisers:
    """The quantisers of all matrices, in file order. Each rank makes all of them. `calibration` has
    the sums of `Calibration`, or is {}."""
    for name, tensor in (weights | calibration).items():
        require(tensor.isfinite().all(), f"{name} is not finite: lower the learning rates")
    quantisers = {}
    for kind, name, view in artifact_tensors(weights):
        if kind:
            # Without a calibration, or of a table that is only looked up
            eye = torch.ones_like(view[:, 0]).diag_embed()  # (N, in, in)
            hessian = calibration.get(kind.hessian, eye)
            cost = cost_of_rows(calibration[f"{name}.cost"]) if calibration else None
            rule = RULES[hp.rounding][not kind.bank]
            quantisers[name] = Quantiser(view, hessian, cost, hp.trellis, rule)
    return quantisers


# ---- Artifact: weights -> bytes and back (docs/formats.md) ---------------------------------------
ARTIFACT = Path("final_model.npz")  # the challenge's name for a copy, whichever coder
ARTIFACT_VERSION = 17
# Limits for an untrusted file: bytes of its header; weights and rotary factors, which take
# some 20 bytes of memory each; entries of the ZIP directory (ours have three).
MAX_HEADER_BYTES, MAX_WEIGHTS, MAX_ENTRIES = 1 << 20, 1 << 26, 1000


def meta_parameters(hp: Hyperparameters) -> Tensors:
    """The model's parameters by name, without memory. Raises UserError if it is too large for an
    artifact."""
    with torch.device("meta"):
        model = GPT(hp, None, torch.float32)
    weights = dict(model.named_parameters())
    count = count_numbers((*weights.values(), model.cos))
    require(
        count <= MAX_WEIGHTS,
        f"{count} weights and rotary factors exceed the limit of {MAX_WEIGHTS} of an artifact: "
        "lower MODEL_DIM, NUM_LAYERS, ROPE_DIMS or EVAL_SEQ_LEN",
    )
    return weights


def artifact_tensors(weights: Tensors) -> Iterator[tuple[MatrixKind | None, str, Tensor]]:
    """(kind, name, view of the weights) of every tensor in the artifact, in file order; codes are
    (N, out, in)."""
    for kind in MATRICES:
        yield kind, kind.name, bank_part(weights[kind.bank], kind)
    tables = {kind.name: kind for kind in TABLES}
    for name, tensor in weights.items():
        if name not in BANKS:
            yield tables.get(name), name, tensor[None] if name in tables else tensor


@torch.inference_mode()  # small operations: a fifth faster (measured, one thread of an EPYC)
def round_matrices(
    quantisers: Quantisers, hp: Hyperparameters, loss: float, comm: Comm
) -> dict[str, tuple[bytes, Tensor, float]]:
    """Collective. By name (coded codes, steps, what rounding is expected to cost). The quantisers
    are dealt to the ranks."""
    coded, encode = {}, CODERS[hp.compressor][0]
    for name, quantiser in list(quantisers.items())[comm.rank :: comm.size]:
        codes, steps, expected = quantiser.on_host().round(loss)
        steps = steps.to(quantiser.rule.step_type)
        coded[name] = encode(codes.numpy()), steps, float(expected.sum())
    return dict(collections.ChainMap(*comm.gather(coded)))


def pack_artifact(
    weights: Tensors,
    hp: Hyperparameters,
    quantisers: Quantisers,
    metadata: dict,
    loss: float,
    comm: Comm,
) -> bytes:
    """Collective. The artifact's bytes (docs/formats.md) in the steps for this `loss`, nats per token
    after a calibration. The same arguments give the same bytes on any number of ranks."""
    rounded = round_matrices(quantisers, hp, loss, comm)
    streams, plain, expected = [], [], {}
    count = count_numbers(weights.values())
    for kind, name, tensor in artifact_tensors(weights):
        values = tensor.half()
        if kind:
            stream, values, total = rounded[name]
            expected[name] = total / count  # as `Calibration` counts each weight as all of them
            streams.append(stream)
        plain.append(values.view(torch.int16).cpu().numpy().ravel())
    first, *_ = quantisers.values()  # all are calibrated, or none
    header = {
        "version": ARTIFACT_VERSION,
        "knobs": hp.stored(),
        "expected_loss": expected if first.calibrated else {},
        "coder": hp.compressor,
        **metadata,
        "code_bytes": list(map(len, streams)),  # of the weights' codes, not of the script
    }
    parts = {
        "header": json.dumps(header).encode(),
        "codes": b"".join(streams),
        "values": lzma_pack(to_planes(np.concatenate(plain))),
    }
    file = io.BytesIO()
    np.savez(file, **{name: np.frombuffer(part, np.uint8) for name, part in parts.items()})
    return file.getvalue()


def fit_bytes(
    quantisers: Collection[Quantiser], pack: Callable, max_bytes: float, log: Callable, comm: Comm
) -> bytes:
    """Collective. Of at most 12 files `pack(loss)`, no loss below FINEST, the largest of at most
    `max_bytes`; the smallest if none fits. It ends at 99.9 % of `max_bytes`.

    A file also has tables and steps, beside the codes whose bytes are expected. So a try corrects
    the next one, and the last two tell how a file follows those bytes."""
    losses = np.geomspace(FINEST, 1e8, 20_000)  # to the widest steps

    def expected_bytes(loss):
        return sum(quantiser.expected_bytes(loss) for quantiser in quantisers)

    target = room = 0.9995 * max_bytes  # of a file, of its codes
    slope, last, files = 1, None, {}
    for _ in range(12):
        # The least loss whose codes should fit
        place = bisect.bisect_left(losses[:-1], True, key=lambda loss: expected_bytes(loss) <= room)
        place = comm.broadcast(place)  # another machine may round differently
        if place in files:
            break
        file = files[place] = comm.broadcast(pack(losses[place]))  # another liblzma packs otherwise
        if len(file) <= max_bytes and (len(file) >= 0.999 * max_bytes or place == 0):
            break
        log(f"export: {len(file)} bytes, {max_bytes} are available")
        size, codes = len(file), expected_bytes(losses[place])
        if last:
            slope = np.clip((size - last[0]) / (codes - last[1] or 1), 1, 3)
        room, last = codes + (target - size) / slope, (size, codes)
    return min(files.values(), key=lambda file: (len(file) > max_bytes, abs(len(file) - max_bytes)))


def open_artifact(blob: bytes) -> tuple[dict, Hyperparameters, dict[str, bytes], bytes]:
    """(header, the knobs in it, codes by tensor, steps and plain values), coded as in the
    file. Raises an error if the file is invalid.

    Sizes are checked before memory is filled (here, by `read_small`, `read_arrays` and the
    decoders), and nothing is executed."""
    # In a ZIP file the name of the first entry begins at byte 30.
    require(
        blob[30:40] == b"header.npy" and blob.count(b"PK\1\2") < MAX_ENTRIES,
        "it is not an artifact, or one before version 11: use the script that made it, RESUME=auto "
        "for a checkpoint of a run, or tools/import_checkpoint.py for a checkpoint of torch.save",
    )
    arrays = read_arrays(io.BytesIO(blob))
    text, codes, values = (arrays[name].tobytes() for name in ("header", "codes", "values"))
    require(len(text) <= MAX_HEADER_BYTES, f"its header has {len(text)} bytes")
    header = json.loads(text)
    require(
        header["version"] == ARTIFACT_VERSION,
        f"its format has version {header['version']!r}, not {ARTIFACT_VERSION}: "
        "score it with the script that made it",
    )
    known = map(str.upper, knobs_with("model", "training", "score"))
    unknown = " ".join(sorted(header["knobs"].keys() - known))
    require(
        not unknown,
        f"this script has no knob {unknown} of a model or score: use the one that made it",
    )
    hp = Hyperparameters.from_env(header["knobs"])  # a younger knob has its default
    names = [name for kind, name, _ in artifact_tensors(meta_parameters(hp)) if kind]
    sizes = map(io.BytesIO(codes).read, header["code_bytes"])
    return header, hp, dict(zip(names, sizes, strict=True)), values


def load_artifact(blob: bytes) -> Tensors:
    """The artifact's weights by parameter name, in fp32. Raises an error like `open_artifact`."""
    header, hp, streams, values = open_artifact(blob)
    _, decode = CODERS[header["coder"]]
    weights = {name: torch.zeros(like.shape) for name, like in meta_parameters(hp).items()}
    tensors = list(artifact_tensors(weights))
    counts = [(view[..., 0] if kind else view).numel() for kind, _, view in tensors]
    plain = torch.from_numpy(from_planes(lzma_unpack(values, 2 * sum(counts))))
    for (kind, name, view), part in zip(tensors, plain.split(counts), strict=True):
        if kind:
            rows = torch.from_numpy(decode(streams[name], tuple(view.shape)))
            if hp.trellis:
                rows = rows + trellis_bits(rows, hp.trellis) / 2
            # Both rules of a pair have the same type.
            steps = part.view(RULES[hp.rounding][0].step_type).view_as(view[..., :1])
            view.copy_(rows * steps.float())
        else:
            view.copy_(part.view(torch.float16).view_as(view))
    return weights


def read_artifact(path: str, environ: dict[str, str]) -> tuple[bytes, Hyperparameters]:
    """The file's bytes, and the knobs in it and in `environ`, which may set those that are not of the
    model otherwise. Raises UserError if it is invalid or model or tokenizer differ from the
    artifact's."""
    with reading_artifact(path):
        blob = read_small(path)
        header, stored, _, _ = open_artifact(blob)
    environ = header["knobs"] | environ
    # Before the rules of all knobs: MODEL_DIM=100 would be refused as no multiple of NUM_HEADS.
    for field in KNOBS:
        here, there = parse(field, environ), getattr(stored, field.name)
        require(
            field.metadata["role"] != "model" or here == there,
            f"{field.name.upper()}={here} is set, but {path} was made with {there}: unset it",
        )
    hp = Hyperparameters.from_env(environ)
    meta_parameters(hp)  # a banded pass has longer rotary tables than the artifact's own windows
    digest = header.get("tokenizer_sha256")
    tokenizer = Path(hp.tokenizer_path)
    require(
        not digest or not tokenizer.is_file() or sha256_of(tokenizer) == digest,
        f"TOKENIZER_PATH={tokenizer} is not the tokenizer of {path}, by its sha256: set it to that",
    )
    return blob, hp


def reading_artifact(path: str | Path) -> AbstractContextManager:
    """Turn every error of reading an artifact into a UserError that names it. Hostile content can
    cause any."""
    advice = "a run writes logs/<RUN_ID>.npz; if truncated or altered, copy it again"
    return as_user_error(f"artifact {path} cannot be used", advice, Exception)


# ---- The whole run -------------------------------------------------------------------------------


def train_and_score(hp: Hyperparameters):
    """The whole run: train, average, export, reload, score."""
    require_exportable(hp)
    with Runtime.start(hp) as runtime, Log(hp, runtime.comm) as log:
        run = prepare(hp, runtime, log)
        with run.checkpoints.writer:  # waits for the file that is being written
            blob, total, seconds = train_and_export(run, log)
            begun = perf_counter() - run.val.seconds
            with reading_artifact(log.artifact):
                run.model.load_state_dict(load_artifact(blob))
            score = score_artifact(run.make_scorer, hp, log, perf_counter() - begun)
        log.finish(score, total, evaluation_command(log.artifact, runtime.comm.size))
        check_limits(total, seconds, hp)


def evaluation_command(artifact: Path, ranks: int) -> str:
    """The command that scores the artifact as its run did."""
    many = f"torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node={ranks}"
    path, script = map(shlex.quote, (str(artifact), sys.argv[0]))
    return f"EVAL_ONLY={path} {many if ranks > 1 else 'python'} {script}"


def train_and_export(run: Run, log: Log) -> tuple[bytes, int, float]:
    """(artifact, size of the submission, seconds of the training). A signal ends the training after
    its step; once that is done, it ends the run after the export."""
    hp, comm = run.hp, run.comm
    handle_signals(run.signals)
    run.train()
    averaged, calibration = run.finish()
    if run.on_gpu:  # in the challenge's words
        allocated = torch.cuda.max_memory_allocated() >> 20
        reserved = torch.cuda.max_memory_reserved() >> 20
        log(
            f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB",
            "peak_memory",
            allocated=allocated,
            reserved=reserved,
        )
    log(f"exporting {averaged}")
    initial = hp.ema_decay**run.average.samples
    if hp.ema_enabled and initial > 0.1:
        log(f"note: initial weights still make up {initial:.0%} of the average: lower EMA_DECAY")
    before = final_passes(hp)["roundtrip"].run(run.make_scorer, log, "averaged weights")
    before.log(log, "final_average_exact")
    seconds = comm.broadcast(run.clock.elapsed())  # so that all ranks pass or fail
    training = {
        "steps": run.clock.step + 1,
        "train_seconds": round(seconds, 1),  # all digits would move a repeat's codes
        "tokens_per_step": hp.train_batch_tokens,
        "ranks": comm.size,
        "seed": hp.seed,
        "weights": averaged,
        "val_bpb": before.val_bpb,
    }
    blob, total = export(run, calibration, training)
    handle_signals()
    run.raise_if_stopped()
    return blob, total, seconds


def evaluate_only(environ: dict[str, str], path: str):
    """Load the artifact at `path` and score it."""
    started = perf_counter()
    blob, hp = read_artifact(path, environ)
    with reading_artifact(path):
        weights = load_artifact(blob)
    loaded = perf_counter() - started
    with Runtime.start(hp) as runtime, Log(hp, runtime.comm) as log:
        log.require_unused()
        log.header(runtime)
        log(f"artifact: {len(blob)} bytes sha256:{hashlib.sha256(blob).hexdigest()}")
        val = read_validation(hp, runtime.device, log)
        model = GPT(hp, runtime.attend, runtime.dtype, runtime.fused_mlp)
        forward = compile_blocks(model.to(runtime.device), runtime.compiled)
        make_scorer = partial(Evaluator, forward, val, hp, runtime)
        warm_up_evaluation(make_scorer, final_passes(hp), log)
        model.load_state_dict(weights)
        total = len(blob) + CODE_BYTES
        log.finish(score_artifact(make_scorer, hp, log, val.seconds + loaded), total)
        check_limits(total, 0.0, hp)


def require_exportable(hp: Hyperparameters):
    """Raise UserError, before the training, if no artifact could be written or nothing could load
    it."""
    if hp.compressor == "ans":
        ans_package()
    require(
        not 0 < hp.target_bytes <= CODE_BYTES,
        f"TARGET_BYTES={hp.target_bytes} is no more than the {CODE_BYTES} bytes of the script: "
        "raise it, or pack the script (tools/pack_code.py)",
    )
    meta_parameters(hp)  # refuses a model that is too large


def prepare(hp: Hyperparameters, runtime: Runtime, log: Log) -> Run:
    """The run, warmed up and, with RESUME, restored. What would fail it later fails here."""
    log.require_unused()
    path, state, tensors, notes = find_checkpoint(hp, runtime.comm)  # guarded by the log's lock
    log.header(runtime, notes, resumed=path is not None)
    val = read_validation(hp, runtime.device, log)
    run = Run(hp, runtime, log, val)
    log(
        f"model_params:{count_numbers(run.model.parameters())} "
        f"val_tokens:{val.targets} val_bytes:{val.total_bytes} "
        f"train_shards:{len(run.loader.stream.paths)} "
        f"accumulation:{run.accumulation} rows:{run.loader.rows // run.accumulation}"
    )
    run.warm_up()
    if path:
        run.restore(path, state, tensors)
    return run


def export(run: Run, calibration: Tensors, training: dict) -> tuple[bytes, int]:
    """The ranks quantise and pack, rank 0 writes the artifact, with facts about the training.
    Returns its bytes, on all ranks, and the submission's size."""
    hp, log, comm = run.hp, run.log, run.comm
    started = perf_counter()
    weights = run.optimizer.weights()
    count = count_numbers(weights.values())
    fixed = not hp.target_bytes or hp.rounding == "399"  # no step may be widened
    max_bytes = inf if fixed else hp.target_bytes - CODE_BYTES
    how = "GPTQ" if calibration else "no calibration"
    log(f"export: coding {count:,} weights, {how}; Ctrl-C now waits until the artifact is written")
    metadata = {"tokenizer_sha256": sha256_of(hp.tokenizer_path), "training": training}
    quantisers = make_quantisers(weights, hp, calibration)
    pack = partial(pack_artifact, weights, hp, quantisers, metadata, comm=comm)
    blob = fit_bytes(quantisers.values(), pack, max_bytes, log, comm)
    path = comm.broadcast(keep_artifact(blob, log) if comm.rank == 0 else None)
    require(
        len(blob) <= max_bytes,
        f"TARGET_BYTES={hp.target_bytes} cannot be met: the smallest artifact has {len(blob)} bytes, "
        f"kept as {path}; {max_bytes} are available; make the model smaller",
    )
    if expected := open_artifact(blob)[0]["expected_loss"]:  # which also checks the header
        bits, nats = 8 * len(blob) / count, sum(expected.values())
        log(
            f"export: {bits:.2f} bits per weight, expected loss of rounding {nats:.4f} nats",
            "rounding",
            bits_per_weight=bits,
            expected_loss=expected,
        )
    total = len(blob) + CODE_BYTES
    digest = hashlib.sha256(blob).hexdigest()
    log(  # "int6": the challenge's word
        f"Serialized model int6+{hp.compressor}: {len(blob)} bytes sha256:{digest}\n"
        f"Code size: {CODE_BYTES} bytes\nTotal submission size int6+{hp.compressor}: {total} bytes",
        "artifact",
        path=str(path),
        model_bytes=len(blob),
        code_bytes=CODE_BYTES,
        wall_seconds=perf_counter() - started,
    )
    return blob, total


def keep_artifact(blob: bytes, log: Log) -> Path:
    """Write the artifact beside the log, with a copy as ARTIFACT, or else to the temporary folder.
    Returns its path."""
    path = log.artifact
    try:
        for name in (path, ARTIFACT):
            with replacing(name, path.name) as unfinished:  # another run may write ARTIFACT, too
                unfinished.write_bytes(blob)
    except UserError as error:
        with writing("to the temporary folder"):
            path = Path(tempfile.mkdtemp(), log.artifact.name)
            path.write_bytes(blob)
        log.failure = f"{error}; the artifact is {path}"
        log(f"note: {log.failure}")
    return path


def check_limits(total: int, seconds: float, hp: Hyperparameters):
    """Raise UserError if time or bytes exceed the challenge's limits; MAX_WALLCLOCK_SECONDS may
    raise the first."""
    cap = max(hp.max_wallclock_seconds or inf, TRAINING_CAP)
    require(
        seconds <= cap,
        f"training took {seconds:.2f} s, over the limit of {cap:g}: "
        "this run is not a valid submission; lower MAX_WALLCLOCK_SECONDS",
    )
    require(
        total <= SUBMISSION_CAP,
        f"code and artifact are {total} bytes, {total - SUBMISSION_CAP} over the limit of "
        f"{SUBMISSION_CAP}: not a valid submission; "
        f"train with TARGET_BYTES={SUBMISSION_CAP} or a smaller model",
    )


# ---- Data: shards, the training loader, the validation stream with its byte counts ---------------
SHARD_MAGIC, SHARD_VERSION = 20240520, 1
SHARD_HEADER = 1024  # bytes, int32: magic, version, number of tokens, 8 of a sha256, zeros
BOS = 1  # starts every document of the challenge's data
RESTORE = "restore it, start again"
MAX_FILE = 1 << 28  # bytes; tokenizers, manifests and artifacts are smaller


def read_shard(path: Path) -> ndarray:
    """The tokens (n,) uint16 of a shard, memory-mapped. Raises UserError if header and file size
    disagree."""
    with as_user_error(
        f"cannot read shard {path}", "check the file and DATA_PATH", OSError, ValueError
    ):
        size = path.stat().st_size
        magic, version, count = np.fromfile(path, "<i4", 3).tolist()
    right = SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER + 2 * count
    require(
        count > 0 and (magic, version, size) == right,
        f"shard {path} has {size} bytes and the header {magic, version, count}, not "
        f"{SHARD_HEADER} + 2 n bytes and {SHARD_MAGIC, SHARD_VERSION}, n: download it again",
    )
    return np.asarray(np.memmap(path, "<u2", "r", SHARD_HEADER))


def tokenizer_of(path: Path) -> str:
    """The sha256 of the tokenizer that a shard's header names, in hexadecimal; "" for none."""
    with as_user_error(f"cannot read shard {path}", RESTORE, OSError):
        digest = np.fromfile(path, np.uint8, 32, offset=12).tobytes()
    return digest.hex() * any(digest)


def shard_paths(folder: str | Path, split: str) -> list[Path]:
    """The shards of a split, fineweb_SPLIT_NNNNNN.bin, in order. The sidecar of the validation
    split has the split "val_bytes"."""
    return sorted(Path(folder).glob(f"fineweb_{split}_{6 * '[0-9]'}.bin"))


class TokenStream:
    """All shards of a split, concatenated. None stays open, as there may be thousands."""

    def __init__(self, folder: str, split: str, vocab_size: int):
        self.vocab_size = vocab_size
        self.paths = shard_paths(folder, split)
        require(
            self.paths,
            f"DATA_PATH={folder} has no fineweb_{split}_NNNNNN.bin: set the folder of your shards, "
            "or run data/download_fineweb.py",
        )
        self.starts = np.cumsum([0, *(len(read_shard(path)) for path in self.paths)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> ndarray:
        """Tokens [start, start + count) as (count,) uint16; wraps around at the end. Raises
        UserError for a token outside the vocabulary or a truncated shard."""
        pieces = []
        while count:
            start %= len(self)
            shard = np.searchsorted(self.starts, start, side="right") - 1
            path, (begin, end) = self.paths[shard], self.starts[shard : shard + 2].tolist()
            n = min(count, end - start)
            # Not a memory map: if the file is truncated, reading one kills the process.
            with as_user_error(f"cannot read shard {path}", RESTORE, OSError):
                tokens = np.fromfile(path, "<u2", n, offset=SHARD_HEADER + 2 * (start - begin))
            require(len(tokens) == n, f"shard {path} was truncated during the run: {RESTORE}")
            largest = tokens.max()
            require(
                largest < self.vocab_size,
                f"shard {path} holds token {largest}, but VOCAB_SIZE={self.vocab_size}: "
                "set VOCAB_SIZE to match the data",
            )
            pieces.append(tokens)
            start += n
            count -= n
        return np.concatenate(pieces)


@lru_cache(maxsize=1)
def shuffled(blocks: int, *seeds: int) -> ndarray:
    """A permutation (blocks,) of the blocks of the data."""
    return np.random.default_rng(seeds).permutation(blocks)


class TrainingLoader:
    """Batch number s of the run, for any s.

    Block k of the data is tokens [k*T, k*T + T + 1). Step s takes the next TRAIN_BATCH_TOKENS / T
    blocks as its rows, and rank i the i-th part of them: the data depend on nothing but s. The
    order is a permutation of all blocks per epoch, so a batch is not a few documents (see also
    #1060 and #1394). SHUFFLE_SEED=0 reads the shards in #399's order instead."""

    def __init__(self, hp: Hyperparameters, runtime: Runtime):
        self.hp, self.runtime = hp, runtime
        self.stream = TokenStream(hp.data_path, "train", hp.vocab_size)
        self.blocks = (len(self.stream) - 1) // hp.train_seq_len
        require(
            self.blocks > 0,
            f"DATA_PATH={hp.data_path} holds {len(self.stream)} training tokens, too few for "
            f"TRAIN_SEQ_LEN={hp.train_seq_len}: lower it",
        )
        ranks = runtime.comm.size
        self.step_rows = hp.train_batch_tokens // hp.train_seq_len
        self.rows, rest = divmod(self.step_rows, ranks)
        require(
            rest == 0,
            f"TRAIN_BATCH_TOKENS={hp.train_batch_tokens} is not a multiple of "
            f"{ranks * hp.train_seq_len}, so {ranks} ranks cannot share its sequences evenly",
        )
        self.reader = ThreadPoolExecutor(1)
        self.pending = {}  # futures of the next batches, by step

    def batch(self, step: int) -> Tensor:
        """This rank's rows (B, T + 1) uint16 of a step, on its device; a thread reads the next
        three batches, so a slow read does not stall a step."""
        steps, device = range(step, step + 4), self.runtime.device
        self.pending = {s: self.pending.get(s) or self.reader.submit(self.read, s) for s in steps}
        batch = self.pending.pop(step).result()
        if device.type == "cuda":
            batch = batch.pin_memory()  # else the copy would wait for all queued work
        return batch.to(device, non_blocking=True)

    def read(self, step: int) -> Tensor:
        hp, first = self.hp, step * self.step_rows + self.runtime.comm.rank * self.rows
        count = hp.train_seq_len + 1
        rows = [self.stream.read(self.start(first + i), count) for i in range(self.rows)]
        return torch.from_numpy(np.stack(rows))

    def start(self, number: int) -> int:
        """The first token of row `number` of the run."""
        hp = self.hp
        if not hp.shuffle_seed:
            # In #399, 8 ranks (or fewer, in 8 turns) take the next tokens of the stream, and each
            # time one more than they train on.
            rows = self.step_rows // math.gcd(self.step_rows, 8)
            return number * hp.train_seq_len + number // rows
        epoch, place = divmod(number, self.blocks)
        order = shuffled(self.blocks, hp.shuffle_seed, hp.seed, epoch)
        return hp.train_seq_len * int(order[place])


# TITLE, ALLCAPS, CAPNEXT, ESC: pieces 4 to 7 of a CaseOps tokenizer.
CASE_OPERATORS = "\ue001\ue002\ue003\ue004"


class ByteCounter:
    """UTF-8 bytes of the text behind each token: 1 for a byte piece, else those of its text, where
    U+2581 is a space. A space at its start does not count after a boundary (a control, unknown or
    unused piece, such as BOS). If the pieces are not the text, because some are operators of CaseOps
    (`caseops`), a sidecar has the bytes."""

    def __init__(self, tokenizer_path: str, vocab_size: int):
        setting = f"TOKENIZER_PATH={tokenizer_path}"
        with as_user_error(
            f"cannot load {setting}",
            "set it to the shards' SentencePiece model",
            OSError,
            RuntimeError,
        ):
            pieces = sentencepiece.SentencePieceProcessor(model_proto=read_small(tokenizer_path))
        require(
            pieces.vocab_size() == vocab_size,
            f"{setting} has {pieces.vocab_size()} pieces, but VOCAB_SIZE={vocab_size}: "
            "they must be equal",
        )
        require(
            pieces.piece_to_id("\u2581") != pieces.unk_id(),
            f"{setting} has no piece for U+2581, so a space could become 3 byte pieces: use "
            "another one",
        )
        require(
            not pieces.normalize("a").endswith("\u2581"),
            f"{setting} adds a space to the end of a text, which would be charged: use another one",
        )
        ids = list(range(vocab_size))
        texts = pieces.id_to_piece(ids)
        self.boundary = np.any(
            (pieces.is_control(ids), pieces.is_unknown(ids), pieces.is_unused(ids)), axis=0
        )
        self.spaced = ~self.boundary & [text.startswith("\u2581") for text in texts]
        sizes = [len(text.replace("\u2581", " ").encode()) for text in texts]
        self.length = np.where(pieces.is_byte(ids), 1, sizes).astype(np.int16) * ~self.boundary
        self.caseops = texts[4:8] == list(CASE_OPERATORS)

    def count(self, tokens: ndarray) -> ndarray:
        """Bytes (n - 1,) of each of tokens[1:], given tokens (n,)."""
        before, after = tokens[:-1], tokens[1:]
        return self.length[after] - (self.spaced[after] & self.boundary[before])


def refused_pairs(tokenizer_path: str) -> ndarray:
    """Whether a BPE tokenizer never emits piece b right after piece a, (V, V) bool: a merge across
    their boundary would come before the merges that make a and b, or after both. Control, unknown,
    byte and user-defined pieces are never refused. Raises UserError without merges in order.

    If a merge crosses the boundary of x + y = a and b before a is made, b never follows a. So the
    pairs of a follow from those of y, and those of b from those of its first part
    (arXiv:2506.07956). An example: with the merges 1: b c -> bc and 2: a b -> ab, "ab" is never
    followed by "c", as merge 1 takes the b first. With a a -> aa alone, "aaa" becomes "aa", "a", as
    of equal merges the leftmost comes first: behind "aa" only earlier merges count (`<`), in front
    of it equal ones, too (`<=`)."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=read_small(tokenizer_path))
    count = pieces.vocab_size()
    ids = list(range(count))
    texts, scores = pieces.id_to_piece(ids), np.array(pieces.get_score(ids))
    # SentencePiece gives its merged pieces the scores -0.0, -1.0, ..., all others +0.0.
    merged = np.flatnonzero(np.signbit(scores))
    require(
        merged.size and (scores[merged] == -np.arange(merged.size)).all(),
        f"CANONICAL_MASK=1 needs a BPE model, and TOKENIZER_PATH={tokenizer_path} is none: set 0",
    )
    index = {texts[i]: i for i in merged}
    splits = [
        (index[text[:n]], index[text[n:]], i)
        for text, i in index.items()
        for n in range(1, len(text))
        if text[:n] in index and text[n:] in index
    ]
    # The first merge of a part of a with a part of b.
    across = np.full((count, count), count, np.int32)
    for x, y, i in splits:
        across[x, y] = i
    formed = np.array([len(text) == 1 for text in texts])
    for x, y, i in splits:
        if formed[x] and formed[y] and across[x, y] == i:  # else x and y are no longer side by side
            np.copyto(across[i], across[y], where=formed & (across[y] < i))
            formed[i] = True
            np.copyto(across[:, i], across[:, x], where=formed & (across[:, x] <= i))
    return across < count


def ngram_hints(targets: ndarray) -> ndarray:
    """Which token NGRAM_TILT expects as each of the targets (n,) of a stream, (n,) int32: the one
    that made up TILT_SHARE of all that followed the TILT_CONTEXT targets before it, until then; -1
    for none. So a hint depends on earlier targets alone (C1), and is the same on every machine.

    Hashes only leave out contexts that occur once; the others are compared token by token. Takes
    40 bytes a target, and a kilobyte for each context that occurs again."""
    hashes = np.zeros_like(targets[TILT_CONTEXT:], np.uint64)
    for at in range(TILT_CONTEXT):
        hashes *= np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: odd, mixes all bits
        hashes += targets[at : at - TILT_CONTEXT].astype(np.uint64)
    ordered = np.sort(hashes)
    again = np.zeros(1 << 24, bool)  # by the top 24 bits: a false hit only costs time
    again[ordered[1:][ordered[1:] == ordered[:-1]] >> 40] = True
    hints = np.full(len(targets), -1, np.int32)
    followers = collections.defaultdict(collections.Counter)
    for begin in np.flatnonzero(again[hashes >> 40]).tolist():
        place = begin + TILT_CONTEXT
        counts = followers[targets[begin:place].tobytes()]
        if counts:
            hint, count = counts.most_common(1)[0]
            if count / counts.total() >= TILT_SHARE:
                hints[place] = hint
        counts[int(targets[place])] += 1
    return hints


def reencoded(tokens: ndarray, tokenizer_path: str) -> tuple[float, float]:
    """Of the first 20,000 tokens (n,): (the share that comes back, behind the same 31 tokens, when
    the text of their documents is encoded again; the share that is single characters or bytes).

    All come back with the tokenizer that made them: what a cut spoils, the first 16 tokens of a
    document without its start and the last 4 of all, is left out. Of other tokenizers of the same
    size at most 0.94 did, but 1 where all tokens are single characters, and from a tokenizer of the
    same text in another alphabet."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=read_small(tokenizer_path))

    def runs(document):
        padded = 31 * [BOS] + document
        return [tuple(padded[i : i + 32]) for i in range(len(document))]

    def gap(token):
        return 2 * pieces.is_control(token) + pieces.is_unknown(token)

    back, single, cut = [], [], 16 + 31
    for no_text, group in itertools.groupby(tokens[:20_000].tolist(), gap):
        if not no_text:
            document = list(group)
            again = set(runs(pieces.encode(pieces.decode(document))))
            back += [run in again for run in runs(document)[cut:]]
            single += [len(pieces.id_to_piece(i)) == 1 or pieces.is_byte(i) for i in document]
        cut = 0 if no_text == 2 else 16 + 31
    back = back[:-4]
    return np.mean(back or 1), np.mean(single if back else 1)


def require_own_tokenizer(data_path: str, tokenizer_path: str, tokens: ndarray, log: Callable):
    """Raise UserError if a sha256 or, without one in the shards, `reencoded` says that the validation
    tokens (n,) are of another tokenizer; log a note if neither can tell."""
    manifest = check_manifest(data_path, tokenizer_path)
    named = all(map(tokenizer_of, shard_paths(data_path, "val")))
    if named or not manifest.get("canonical", True):
        return
    back, single = reencoded(tokens, tokenizer_path)
    require(
        back >= 0.999,
        f"{back:.2%} of the first validation tokens come back when {tokenizer_path} encodes their "
        "text again, not all: give the tokenizer that made the shards (if it did, but encoded "
        "otherwise, say so: docs/formats.md, canonical)",
    )
    if single > 0.5 and not (manifest or shard_paths(data_path, "val_bytes")):
        log(
            f"note: THE BYTES ARE UNPROVEN: {single:.0%} of the first validation tokens are single "
            "characters or bytes, so another tokenizer would look right, too: name theirs in "
            f"{data_path}/manifest.json (docs/formats.md)"
        )


def read_small(path: str | Path) -> bytes:
    """The bytes of a tokenizer, manifest or artifact. Raises UserError for a file that would fill
    the memory."""
    size = os.path.getsize(path)
    require(
        size <= MAX_FILE,
        f"{path} has {size} bytes, over the limit of {MAX_FILE}: it is the wrong file",
    )
    with open(path, "rb") as file:  # no more than that, even of a device
        return file.read(size)


def sha256_of(path: str | Path) -> str:
    """The sha256 of a tokenizer, in hexadecimal."""
    return hashlib.sha256(read_small(path)).hexdigest()


def check_manifest(data_path: str, tokenizer_path: str) -> dict:
    """What DATA_PATH/manifest.json says of the tokenizer (docs/formats.md); {} without the file.
    Raises UserError if it or the header of a shard names another tokenizer.
    data/inspect_shards.py checks the files it lists."""
    path, tokenizer = Path(data_path, "manifest.json"), {}
    paths = Path(data_path).glob("fineweb_*.bin")
    named = {shard: digest for shard in paths if (digest := tokenizer_of(shard))}
    if path.is_file():
        with as_user_error(
            f"{path} is not a valid manifest", "make or download the data again", Exception
        ):
            tokenizer = dict(json.loads(read_small(path))["tokenizer"])
            named[path] = tokenizer["sha256"]
    own = sha256_of(tokenizer_path)
    for path, digest in named.items():
        require(
            digest == own,
            f"TOKENIZER_PATH={tokenizer_path} is not the tokenizer that made the shards, by its "
            f"sha256 in {path}",
        )
    return tokenizer


def read_sidecar(data_path: str, count: int) -> ndarray | None:
    """The exact bytes (count,) uint16 of the validation tokens, from fineweb_val_bytes_NNNNNN.bin
    beside the shards; None without such files. Raises UserError if they cannot belong to that many
    tokens."""
    if not shard_paths(data_path, "val_bytes"):
        return None
    stream = TokenStream(data_path, "val_bytes", 1 << 16)
    exact = stream.read(0, len(stream))
    require(
        len(exact) == count and 0 < exact.max() < 1 << 15,
        f"{data_path}/fineweb_val_bytes_*.bin holds {len(exact)} numbers up to {exact.max()}, not "
        f"the bytes of the {count} tokens of the shards: download both again",
    )
    return exact


def count_bytes(hp: Hyperparameters, tokens: ndarray, log: Callable) -> ndarray:
    """Bytes (n,) of each of tokens[1:], given tokens (n + 1,): those of the sidecar if there is
    one, else by the tokenizer. Raises UserError if the tokenizer cannot know them."""
    counter = ByteCounter(hp.tokenizer_path, hp.vocab_size)
    require_own_tokenizer(hp.data_path, hp.tokenizer_path, tokens, log)
    exact = read_sidecar(hp.data_path, len(tokens))
    if exact is not None:
        log(f"note: fineweb_val_bytes_*.bin says {exact[1:].sum()} bytes, which the score uses")
        return exact[1:]
    require(
        not counter.caseops,
        f"TOKENIZER_PATH={hp.tokenizer_path} has CaseOps operators, but DATA_PATH={hp.data_path} "
        "has no fineweb_val_bytes_NNNNNN.bin, so the bytes are unknown: make the shards again with "
        "data/tokenize_text.py, or download that file",
    )
    return counter.count(tokens)


class Validation:
    """The validation stream: tokens (n + 1,) int32 on a device and the bytes (n,) of its n targets;
    `refused` pairs (V, V) with CANONICAL_MASK=1, `hints` (n,) int32 with NGRAM_TILT=1. All
    that took `seconds`."""

    def __init__(self, tokens: ndarray, nbytes: ndarray, device: torch.device):
        self.refused = self.hints = None
        self.seconds = 0.0
        self.targets = len(tokens) - 1
        self.tokens = torch.tensor(tokens, dtype=torch.int32, device=device)
        self.nbytes, self.total_bytes = nbytes, int(nbytes.sum())
        # Where documents begin. The last token is a target only, so it begins none.
        self.documents = np.union1d([0], np.flatnonzero(tokens[:-1] == BOS))

    def spans(self) -> ndarray:
        """[begin, end) (S, 2) of the inputs of each document, with its BOS."""
        return np.stack((self.documents, np.append(self.documents[1:], self.targets)), 1)


def read_validation(
    hp: Hyperparameters, device: torch.device, log: Callable = lambda line: None
) -> Validation:
    """The validation shards of DATA_PATH with their bytes. Raises UserError."""
    begun = perf_counter()
    stream = TokenStream(hp.data_path, "val", hp.vocab_size)
    require(
        len(stream) > hp.eval_seq_len,
        f"DATA_PATH={hp.data_path} holds {len(stream)} validation tokens, too few for "
        f"EVAL_SEQ_LEN={hp.eval_seq_len}: lower it",
    )
    tokens = stream.read(0, len(stream))
    needed = hp.doc_attention or (hp.ttt_enabled and hp.ttt_mode == "lora")
    require(
        BOS in tokens or not needed,
        f"DOC_ATTENTION=1 and TTT_MODE=lora need documents, but DATA_PATH={hp.data_path} does not mark "
        f"where they begin (token {BOS}): tokenize the text again",
    )
    val = Validation(tokens, count_bytes(hp, tokens, log), device)
    if hp.canonical_mask:
        # Never from the validation text itself: its end would change the losses before it (C1).
        if check_manifest(hp.data_path, hp.tokenizer_path).get("canonical", True):
            refused = refused_pairs(hp.tokenizer_path)
            if count := refused[tokens[:-1], tokens[1:]].sum():
                log(
                    f"note: CANONICAL_MASK refuses {count} targets: {REFUSED_NATS:.1f} nats more for each"
                )
            val.refused = torch.from_numpy(refused).to(device)
        else:
            log("note: CANONICAL_MASK is off: manifest.json says canonical: false")
    if hp.ngram_tilt:
        val.hints = torch.from_numpy(ngram_hints(tokens[1:])).to(device)
    val.seconds = perf_counter() - begun
    return val


# ---- Coders: codes (N, out, in) int16 -> bytes and back, exactly, on every machine ---------------
ANS_TOTAL = 1 << 15  # sum of the frequencies of a class
ANS_BUCKETS = 3  # classes per octave of code size
# Raw LZMA2 for data without words or alignment: literal context and position bits would only cost.
LZMA = {
    "id": lzma.FILTER_LZMA2,
    "preset": 9 | lzma.PRESET_EXTREME,
    "dict_size": 1 << 24,
    "lc": 0,
    "lp": 0,
    "pb": 0,
}


def lzma_pack(raw: bytes) -> bytes:
    """A raw LZMA2 stream."""
    return lzma.compress(raw, lzma.FORMAT_RAW, filters=[LZMA])


def lzma_unpack(blob: bytes, most: int) -> bytes:
    """The inverse of `lzma_pack` for at most `most` bytes, without more memory. Raises an error if
    damaged."""
    decoder = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[LZMA])
    raw = decoder.decompress(blob, max_length=most + 1)
    whole = decoder.eof and not decoder.unused_data
    require(whole and len(raw) <= most, f"a packed part is cut or exceeds {most} bytes")
    return raw


def zstd_pack(raw: bytes) -> bytes:
    """One Zstandard frame, as in #399's first revision. It states its size and has a checksum."""
    return zstandard.ZstdCompressor(level=22, write_checksum=True).compress(raw)


def zstd_unpack(blob: bytes, most: int) -> bytes:
    """The inverse of `zstd_pack`, like `lzma_unpack`."""
    frame = zstandard.get_frame_parameters(blob)
    require(
        frame.window_size <= frame.content_size <= most,  # the window is memory, too
        f"a frame states no size of at most {most} bytes",
    )
    return zstandard.ZstdDecompressor().decompress(blob, allow_extra_data=False)


def to_planes(values: ndarray) -> bytes:
    """16-bit values as all low bytes, then all high bytes, which compresses better."""
    return values.astype("<i2").reshape(-1, 1).view(np.uint8).T.tobytes()


def from_planes(raw: bytes) -> ndarray:
    """The values (n,) int16 of `to_planes`."""
    return np.frombuffer(raw, np.uint8).reshape(2, -1).T.copy().view("<i2").ravel().astype(np.int16)


def columnwise(pack: Callable, unpack: Callable) -> tuple[Callable, Callable]:
    """(encode, decode): codes (N, out, in) int16 packed column by column, as a column holds like
    codes (1.5 % fewer bytes), with mostly zero high bytes. `decode` raises an error if the codes
    are damaged or of another shape."""

    def encode(codes):
        return pack(to_planes(codes.transpose(0, 2, 1).ravel() + np.int16(128)))

    def decode(blob, shape):
        layers, out, width = shape
        codes = from_planes(unpack(blob, 2 * math.prod(shape))) - np.int16(128)
        return codes.reshape(layers, width, out).transpose(0, 2, 1)

    return encode, decode


def ans_package():
    """constriction, which only the coder `ans` needs. Raises UserError without it."""
    with as_user_error(
        "COMPRESSOR=ans",
        "run `pip install constriction`; COMPRESSOR=lzma or zstd trains without it",
        ImportError,
    ):
        import constriction
    return constriction


def encode_ans(codes: ndarray) -> bytes:
    """Codes (N, out, in) int16 by asymmetric numeral systems (arXiv:1311.2540), with one table of
    frequencies per class of codes. A class is the sum of two numbers, in thirds of an octave: the
    mean |code| of the row, and that of the column relative to the rows (docs/formats.md). Exact on
    every machine."""
    sizes = np.abs(codes).astype(np.float32)
    rows = np.maximum(sizes.mean(2, keepdims=True), 1 / 64)  # (N, out, 1)
    columns = np.maximum((sizes / rows).mean(1), 1 / 64)  # (N, in)
    buckets = [np.rint(ANS_BUCKETS * np.log2(part)).ravel() for part in (rows, columns)]
    numbers = np.concatenate([part - part.min() for part in buckets]).astype(np.uint8)
    least = codes.min()
    symbols = codes.astype(np.int32) - least
    parts = [symbols.ravel()[places] for places in positions_by_class(numbers, codes.shape)]
    count = symbols.max() + 2  # the coder needs two symbols, also if all codes are equal
    tables = frequencies(np.stack([np.bincount(part, minlength=count) for part in parts]))
    coder = ans_package().stream.stack.AnsCoder()
    for table, part in zip(tables[::-1], parts[::-1], strict=True):  # last in, first out
        coder.encode_reverse(part, distribution(table))
    side = struct.pack("<3h", least, *tables.shape) + numbers.tobytes()
    side = lzma_pack(side + tables.astype("<u2").tobytes())
    return struct.pack("<I", len(side)) + side + coder.get_compressed().astype("<u4").tobytes()


def decode_ans(blob: bytes, shape: tuple[int, int, int]) -> ndarray:
    """The codes (N, out, in) int16 of `encode_ans`. Raises an error if they are damaged or of
    another shape."""
    layers, out, width = shape
    (length,) = struct.unpack_from("<I", blob)
    side, stream = blob[4 : 4 + length], np.frombuffer(blob, "<u4", offset=4 + length)
    end = 6 + layers * (out + width)
    raw = lzma_unpack(side, end + (1 << 22))  # room for 512 tables of 4,000 symbols
    least, number, count = struct.unpack_from("<3h", raw)
    tables = np.frombuffer(raw, "<u2", offset=end).reshape(number, count)
    positions = positions_by_class(np.frombuffer(raw[6:end], np.uint8), shape)
    require(
        len(positions) == number and (tables.sum(1) == ANS_TOTAL).all(),
        "its tables of frequencies do not fit",
    )
    coder = ans_package().stream.stack.AnsCoder(stream.astype(np.uint32))
    codes = np.empty(math.prod(shape), np.int16)
    for table, places in zip(tables, positions, strict=True):
        codes[places] = least + coder.decode(distribution(table), len(places))
    require(coder.is_empty(), "its codes do not end where they should")
    return codes.reshape(shape)


def positions_by_class(numbers: ndarray, shape: tuple[int, int, int]) -> list[ndarray]:
    """The positions of the codes of each class, in codes of this shape (N, out, in). A class is the
    sum of the numbers of a row and a column; `numbers` has those of all rows, then columns."""
    layers, out, width = shape
    rows, columns = np.split(numbers.astype(np.int16), [layers * out])
    classes = (rows.reshape(layers, out, 1) + columns.reshape(layers, 1, width)).ravel()
    counts = np.bincount(classes)
    return np.split(classes.argsort(kind="stable"), counts[counts > 0].cumsum()[:-1])


def frequencies(counts: ndarray) -> ndarray:
    """Frequencies of the symbols, (classes, symbols) as the counts: 1 for each that occurs, the
    rest in proportion. They sum to ANS_TOTAL."""
    present = counts > 0
    total = counts.sum(1, keepdims=True)
    spare = ANS_TOTAL - present.sum(1, keepdims=True)
    up_to = spare * counts.cumsum(1) // total  # exact: rounded down
    return present + np.diff(up_to, prepend=0)


def distribution(table: ndarray):
    """The coder's model. Its fixed-point weights are exact for frequencies that sum to a power of
    two."""
    return ans_package().stream.model.Categorical(table.astype(np.float64), perfect=False)


CODERS = {
    "ans": (encode_ans, decode_ans),
    "lzma": columnwise(lzma_pack, lzma_unpack),
    "zstd": columnwise(zstd_pack, zstd_unpack),
}


# ---- Log and files -------------------------------------------------------------------------------
@contextmanager
def replacing(path: Path, name: str = "") -> Iterator[Path]:
    """Atomic write: yields a temporary path beside it, `name`.partial, then fsync and rename. A crash
    leaves the old file or the complete new one."""
    unfinished = path.with_name(f"{name or path.name}.partial")
    with writing(path):
        try:
            yield unfinished
            with open(unfinished, "rb+") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def read_arrays(file: Path | io.BytesIO) -> dict[str, ndarray]:
    """The arrays of an .npz file. Raises an error if it is damaged. Executes nothing in it, and fills
    no more memory than its size."""
    with np.load(file) as archive:
        size = sum(member.file_size for member in archive.zip.infolist())
        require(size <= archive.zip.start_dir, "its arrays are larger than the file")
        # A changed shape would end the reading before the checksum.
        require(not archive.zip.testzip(), "its checksum is wrong")
        return dict(archive)


# Their versions are logged; the last three decide the speed of kernels.
PACKAGES = ["torch", "numpy", "sentencepiece", "zstandard", "constriction"]
PACKAGES += ["triton", "flash_attn_3", "kernels"]


def package_versions() -> str:
    """The versions of Python, the installed PACKAGES and CUDA, for the log."""
    versions = [f"python {platform.python_version()}"]
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    return ", ".join((*versions, f"cuda {torch.version.cuda}"))


CUT = " <- cut\n"  # ends the last line of a resumed log, if a crash has cut it; tools leave it out


class Log(AbstractContextManager):
    """Lines on rank 0's console and in logs/<RUN_ID>.txt; events as JSON lines in
    logs/<RUN_ID>.jsonl. A failed write does not end the run; `finish` raises it."""

    def __init__(self, hp: Hyperparameters, comm: Comm, folder: Path = Path("logs")):
        self.hp, self.comm = hp, comm
        self.name = hp.run_id or time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
        self.path = folder / self.name  # without suffix
        self.artifact = folder / f"{self.name}.npz"
        self.started = perf_counter()
        self.failure = ""  # the first failed write, and what to do
        self.begun = False  # the log is of this run, not of an earlier one
        self.files = []
        self.terminal = comm.rank == 0 and sys.stdout.isatty()
        if comm.rank > 0:
            return
        with writing(f"{self.path}.txt"):
            folder.mkdir(parents=True, exist_ok=True)
            for suffix in ("txt", "jsonl"):
                file = Path(f"{self.path}.{suffix}")
                self.files.append(file.open("a", 1, "utf-8", "backslashreplace"))
        busy = f"RUN_ID={self.name}: another run is writing {self.path}.txt"
        # A file system may have no locks. They are released when this process ends.
        with suppress(OSError), as_user_error(busy, "wait or set another", BlockingIOError):
            fcntl.flock(self.files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __exit__(self, kind, error, trace):
        """Remove the bar from the terminal and write what ended the run."""
        self.show("")
        if self.begun and error:
            self(f"error: {error_message(error)}", console=False)

    def __call__(
        self, line: str, event: str = "", console=True, done: float | None = None, **fields
    ):
        """Write a line and, if `event` names one, {"event": ..., "seconds": since the log began,
        **fields}. In a terminal a line with `done`, a fraction, is shown behind the progress bar."""
        if not self.files:
            return
        if done is not None and self.terminal:
            self.stage(line, done)
        elif console:
            self.show("")
            print_to(sys.stdout, line)
        text, events = self.files
        try:
            with writing(text.name):
                text.write(f"{line}\n")
                if event:
                    seconds = round(perf_counter() - self.started, 3)
                    events.write(f"{json.dumps({'event': event, 'seconds': seconds, **fields})}\n")
        except UserError as error:
            self.failure = self.failure or str(error)

    def stage(self, name: str, done: float = 0.0):
        """Show in the bar what runs and the fraction of it that is done."""
        self.show(f"{done:4.0%} |{'#' * int(20 * done):20}| {name}")

    def show(self, text: str):
        """Replace the last line of a terminal."""
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print_to(sys.stdout, f"\r{text[:width]}\x1b[K\r", end="")

    def require_unused(self):
        """Collective. Raise UserError if the run would replace the log of a finished run or, without
        RESUME, an artifact."""
        used = False
        if self.files:
            finished = b'{"event": "finished"' in Path(self.files[1].name).read_bytes()
            resumes = self.hp.resume and not self.hp.eval_only
            used = finished or (self.artifact.exists() and not resumes)
        require(
            not self.comm.broadcast(used),
            f"RUN_ID={self.name} is used by an earlier run: set another, or delete {self.path}.txt, "
            f".jsonl, .npz and {CHECKPOINTS / self.name}",
        )

    def header(self, runtime: Runtime, notes: Iterable[str] = (), resumed=False):
        """Write what is needed to repeat the run: source, versions, machine, every knob. A resumed
        run appends to its log."""
        for file in self.files:
            if not resumed:
                file.truncate(0)
            elif Path(file.name).read_bytes()[-1:] not in b"\n":
                with writing(file.name):
                    file.write(CUT)
        if self.files and not os.path.getsize(self.files[0].name):
            self(f"{SOURCE.decode()}\n{'=' * 100}", console=False)
        self.begun = True
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        settings, versions, machine = self.hp.describe(), package_versions(), runtime.describe()
        self(
            f"started: {started}\nhyperparameters (* differs from the default)\n{settings}",
            console=False,
        )
        changed = " ".join(re.findall(r"(?m)^\* (.*)", settings)) or "nothing"
        self(
            f"{versions}\n{machine}\nchanged from the defaults: {changed}",
            "start",
            versions=versions,
            runtime=machine,
            run_id=self.name,
            started=started,
            hyperparameters=vars(self.hp),
        )
        for note in (*runtime.notes, *notes):
            self(f"note: {note}")
        require(not self.failure, self.failure)

    def finish(self, score: str, total: int, advice: str = ""):
        """Collective. Write the run's score, the `total` bytes of the submission, where its files
        are and what to do next. Raises UserError if a write has failed."""
        failure = self.comm.broadcast(self.failure)
        require(not failure, failure)
        self(f"finished: {score}, {total:,} of {SUBMISSION_CAP:,} bytes", "finished", bytes=total)
        self(f"files: {self.path}.*")
        if advice and "RUN_SH" not in os.environ:  # run.sh says what comes next
            self(f"next: {advice}")


# ---- Checkpoints: a killed run continues where it was (docs/formats.md) --------------------------
CHECKPOINTS = Path("checkpoints")
CHECKPOINT_VERSION = 8
SOURCE_SHA256 = hashlib.sha256(SOURCE).hexdigest()
CHECKPOINT_FILES = "step_*.npz"


class Checkpoints:
    """Rank 0 writes checkpoints/<RUN_ID>/step_<N>.npz: whole tensors, with everything else as
    metadata. A thread writes the file; a step waits for the last file and its own copy to host
    memory. The last two are kept."""

    def __init__(self, hp: Hyperparameters, comm: Comm, log: Log):
        self.hp, self.comm, self.log = hp, comm, log
        self.folder = CHECKPOINTS / hp.run_id
        self.writer = ThreadPoolExecutor(1)
        self.written = self.writer.submit(lambda: None)  # future of the last `write`
        self.last = {"step": 0, "seconds": 0.0}  # what the last one holds: intervals count from it
        if hp.checkpoint_every and comm.rank == 0:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                for unfinished in self.folder.glob("*.partial"):  # of a killed run
                    unfinished.unlink()

    def due(self, step: int, seconds: float) -> bool:
        """Whether to save before `step`, which begins `seconds` into the run; the same on all
        ranks."""
        every = self.hp.checkpoint_every
        unit, now = ("seconds", seconds) if every.endswith("s") else ("step", step)
        return every != "" and now - self.last[unit] >= int(every.rstrip("s"))

    def save(self, tensors: Iterator[tuple[str, Tensor]], state: dict):
        """Collective. Copy the whole tensors and start writing them, with this metadata."""
        self.written.result()  # one copy at a time in host memory
        self.last = state
        # Collected from the owners, so every rank iterates
        copies = {name: t.to("cpu", copy=True) for name, t in tensors if self.comm.rank == 0}
        if copies:
            metadata = {
                "version": CHECKPOINT_VERSION,
                "source_sha256": SOURCE_SHA256,
                "hyperparameters": vars(self.hp),
                **state,
            }
            self.written = self.writer.submit(self.write, metadata, copies)

    def write(self, metadata: dict, tensors: Tensors):
        """In the writer's thread. After an error, such as a full disk, the run continues."""
        step = metadata["step"]
        path = self.folder / f"step_{step:08d}.npz"
        try:
            for name, tensor in tensors.items():
                require(vector_norm(tensor).isfinite(), f"{name} is not finite")
            with replacing(path) as unfinished, open(unfinished, "wb") as file:
                np.savez(file, metadata=json.dumps(metadata), **tensors)
            # Later ones are damaged: this run did not continue from them.
            before = sorted(file for file in self.folder.glob(CHECKPOINT_FILES) if file < path)
            for older in before[:-1]:
                older.unlink()
            self.log(f"checkpoint: step:{step} {path}", "checkpoint", step=step)
        except (ValueError, OSError) as error:
            self.log(f"note: there is no checkpoint of step {step}: {error}")


def read_checkpoint(path: Path) -> tuple[dict, Tensors]:
    """(metadata, tensors). Raises UserError if the file is damaged."""
    with as_user_error(
        f"checkpoint {path} is truncated, altered or of another version",
        "copy or delete it",
        Exception,
    ):
        tensors = read_arrays(path)
        metadata = json.loads(str(tensors.pop("metadata")))
        require(metadata["version"] == CHECKPOINT_VERSION, f"version {metadata['version']}")
    return metadata, {name: torch.from_numpy(array) for name, array in tensors.items()}


def find_checkpoint(
    hp: Hyperparameters, comm: Comm
) -> tuple[Path | None, dict, Tensors, list[str]]:
    """(path, metadata, tensors, notes for the log) of the newest complete checkpoint of RUN_ID, if
    RESUME is set and there is one; only rank 0 has tensors and notes."""
    folder = CHECKPOINTS / hp.run_id
    files = sorted(folder.glob(CHECKPOINT_FILES)) if comm.rank == 0 else []
    require(
        hp.resume or not hp.checkpoint_every or not files,
        f"{folder} holds an earlier run: set RESUME=auto to continue it, or another RUN_ID",
    )
    path, metadata, tensors, notes = None, {}, {}, []
    while hp.resume and files and not metadata:
        path = files.pop()
        try:
            metadata, tensors = read_checkpoint(path)
        except UserError as error:
            notes.append(f"skipped: {error}")
    require(metadata or not notes, f"{'; '.join(notes)}; delete {folder} to start over")
    if metadata:
        require_same_run(hp, path, metadata)
        if metadata["source_sha256"] != SOURCE_SHA256:
            notes.append("train_gpt.py has changed since this checkpoint")
    return *comm.broadcast((path, metadata)), tensors, notes


def require_same_run(hp: Hyperparameters, path: Path, metadata: dict):
    """Raise UserError if knobs differ that must not. A knob younger than the file has its default."""
    now = vars(hp)
    then = vars(Hyperparameters()) | metadata["hyperparameters"]
    unlike = [
        f"{name.upper()}={now[name]} instead of {then[name]}"
        for name in knobs_with("training", "model")
        if now[name] != then[name]
    ]
    require(
        not unlike,
        f"{path} is of another run, with {', '.join(unlike)}: set the same, or another RUN_ID; "
        f"only these may change: {' '.join(knobs_with('score', 'run')).upper()}",
    )


# ---- Ranks and devices: rank, device, dtype and compiler, each decided once and logged -----------
# MICRO_BATCH_TOKENS=0: what one of 8 ranks takes of the record's batch, and what fits a laptop.
MICRO_BATCH = {"cuda": 98_304, "cpu": 16_384}


def call_collective(collective: Callable, *arguments, **options):
    """Call a collective. Raises UserError that names this rank if another one is lost."""
    with as_user_error(
        f"rank {dist.get_rank()} lost a collective operation: another rank has died or cannot "
        "be reached",
        "look at the first rank that reported an error, then start again",
        RuntimeError,
    ):
        return collective(*arguments, **options)


class Comm:
    """The collectives of a group of ranks; in a group of one they copy or do nothing. `broadcast`
    and `gather` are for the group of all ranks. "Collective" in a docstring: all ranks must call
    the function.

    Those of tensors start the work and return a function that waits for it; on a GPU the stream
    waits, not the host. Reductions are sums: the loss has been divided by the global number of
    micro-batches."""

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None):
        self.rank, self.size, self.group = rank, size, group
        self.shard = self  # the ranks that divide the rows of the banks among them
        self.replicate = self if size == 1 else Comm()  # the ranks that own the same rows

    def split(self, shard_ranks: int, device: torch.device):
        """Make a mesh of all ranks: `shard_ranks` consecutive ones, such as a node's, divide the
        rows of the banks (hybrid sharding, arXiv:2304.11277). Blocks."""
        replicas, rest = divmod(self.size, shard_ranks)
        require(
            rest == 0,
            f"SHARD_RANKS={shard_ranks} (default: LOCAL_WORLD_SIZE) does not divide the "
            f"{self.size} ranks: set a divisor of {self.size}",
        )
        if replicas > 1:
            mesh = call_collective(init_device_mesh, device.type, (replicas, shard_ranks))
            self.replicate, self.shard = (
                Comm(mesh.get_local_rank(axis), mesh.size(axis), mesh.get_group(axis))
                for axis in (0, 1)
            )

    def all_reduce(self, tensor: Tensor) -> Callable:
        """Sum `tensor` over the ranks, in place."""
        return self.start(dist.all_reduce, tensor)

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Callable:
        """Sum `full` (S*r, ...) over the ranks; this rank's rows arrive in `shard`."""
        # Named so since torch 2.13
        collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return self.start(collective, shard, full)

    def all_gather(self, full: Tensor, shard: Tensor) -> Callable:
        """Collect every rank's `shard` (r, ...) in `full` (S*r, ...)."""
        collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return self.start(collective, full, shard)

    def broadcast(self, value):
        """Broadcast rank 0's `value`, any object that can be pickled. Blocks."""
        box = [value]
        if self.size > 1:
            call_collective(dist.broadcast_object_list, box, src=0)
        return box[0]

    def gather(self, value) -> list:
        """All-gather `value`, any object that can be pickled, into a list by rank. Blocks."""
        values = [value] * self.size
        if self.size > 1:
            call_collective(dist.all_gather_object, values, value)
        return values

    def start(self, collective: Callable, out: Tensor, *source: Tensor) -> Callable:
        if self.size == 1:
            for tensor in source:
                out.copy_(tensor)  # nothing to do if both are views of the same numbers
            return lambda: None
        work = call_collective(collective, out, *source, group=self.group, async_op=True)
        return lambda: call_collective(work.wait)


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Device, ranks and kernels of this process; made once, by `start`."""

    comm: Comm
    device: torch.device
    dtype: torch.dtype
    compiled: bool
    micro_batch_tokens: int  # tokens of one forward
    notes: tuple[str, ...] = ()  # for the log: why a choice is not the first one
    attention: str = ""
    attend: Callable | None = None
    fused_mlp: Callable | None = None  # in place of the plain form

    @classmethod
    @contextmanager
    def start(cls, hp: Hyperparameters) -> Iterator[Runtime]:
        """Set up the process group, device, dtype and kernels; shut down cleanly when the body
        succeeds."""
        device = choose_device(hp.device)
        if device.type == "cpu":  # runs repeat bit for bit
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # a check that costs time
        comm = join_ranks(hp, device)
        dtype = choose_dtype(hp.compute_dtype, device)
        pays = device.type == "cuda" or not hp.eval_only
        compiled = pays if hp.compile == "auto" else hp.compile == "1"
        micro = hp.micro_batch_tokens or MICRO_BATCH[device.type]
        yield choose_kernels(hp, cls(comm, device, dtype, compiled, micro))
        # Not in a `finally`: a barrier would wait for dead ranks.
        if comm.size > 1:
            call_collective(dist.barrier)
            # A group with a reference keeps its threads, which can abort the process at exit.
            comm.shard.group = comm.replicate.group = None
            dist.destroy_process_group()

    def synchronize(self):
        """Wait for queued device work."""
        (torch.cuda if self.device.type == "cuda" else torch.cpu).synchronize()

    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name()
        name = "grep -m 1 '^model name' /proc/cpuinfo 2>/dev/null | cut -d : -f 2"
        model = subprocess.getoutput(name).strip() or platform.machine()
        return f"CPU {model}, {torch.get_num_threads()} threads"

    def describe(self) -> str:
        """One line for the log."""
        comm, dtype = self.comm, str(self.dtype).removeprefix("torch.")
        return (
            f"runtime: ranks:{comm.size} mesh:{comm.replicate.size}x{comm.shard.size} "
            f"device:{self.device_name()} compute_dtype:{dtype} attention:{self.attention} "
            f"fused_mlp:{self.fused_mlp is not None:d} compile:{self.compiled:d}"
        )


def join_ranks(hp: Hyperparameters, device: torch.device) -> Comm:
    """All ranks that the launcher has started, as torchrun sets the environment. Blocks."""
    comm = Comm(launched("RANK", 0), launched("WORLD_SIZE", 1))
    if comm.size > 1:
        backend, gpu = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        with as_user_error(
            f"WORLD_SIZE={comm.size}: the ranks cannot meet",
            "start them with torchrun, or unset WORLD_SIZE",
            Exception,
        ):
            dist.init_process_group(backend, device_id=gpu)
    # Nodes may differ in size
    comm.split(comm.broadcast(hp.shard_ranks or launched("LOCAL_WORLD_SIZE", comm.size)), device)
    return comm


def micro_batches(hp: Hyperparameters, rows: int, tokens: int) -> int:
    """The fewest equal parts of a rank's rows of a step that have at most `tokens` tokens, or one
    row, each."""
    fitting = max(1, tokens // hp.train_seq_len)
    return next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= fitting)


def choose_device(wanted: str) -> torch.device:
    """This process's device: GPU number LOCAL_RANK, or the CPU if there is no GPU."""
    # The driver may count GPUs that this torch cannot use.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_rank = launched("LOCAL_RANK", 0)
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return torch.device("cpu")
    require(
        local_rank < gpus,
        f"DEVICE={wanted}, but torch finds {gpus} GPUs on this node for LOCAL_RANK={local_rank}: "
        f"set --nproc_per_node={gpus}; with 0, install a CUDA build or set DEVICE=cpu",
    )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware has matrix units for it (Ampere and later; AMX or AVX512-BF16),
    else float32."""
    if wanted != "auto":
        return getattr(torch, wanted)
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def compile_whole(function: Callable, compiled: bool) -> Callable:
    """`function` compiled, one graph per set of shapes and constants; unchanged if not `compiled`. A
    print or a breakpoint in it is an error: set COMPILE=0 to debug."""
    if not compiled:
        return function
    triton = torch._inductor.config.triton
    if hasattr(triton, "mix_order_reduction"):
        # From torch 2.10 on; it made this model 6 ms a step slower on 8 x H100 (pytorch #179494).
        triton.mix_order_reduction = False
    # More graphs of one function are an error. A block has up to 8 kinds of layers in 9 shapes.
    torch._dynamo.config.recompile_limit = 256
    # Else a warm start traces each graph with an autograd.Function again (pytorch #149751).
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    return torch.compile(function, dynamic=False, fullgraph=True)


# ---- Kernels: which one a run takes, and whether its gradients are right -------------------------
# The largest error of a gradient, by norms. bf16 causes up to 0.02, below 0.06 if it is one number.
AGREEMENT = 0.15
# Attention kernels are slower, or wrong, at lengths that are no multiple of this (pytorch #171627,
# #196678).
TILE = 128


def round_up(length: int) -> int:
    """`length`, rounded up to a multiple of TILE."""
    return -(-length // TILE) * TILE


def choose_kernels(hp: Hyperparameters, runtime: Runtime) -> Runtime:
    """Collective. The runtime with the kernels asked for, or with the first that all ranks have.
    Raises UserError if there is none."""
    device, names, notes = runtime.device, [hp.attention], []
    if hp.attention == "auto":
        names = ["fa3", "cudnn", "sdpa"] if device.type == "cuda" else ["sdpa"]
    for name in names:
        missing = next(filter(None, runtime.comm.gather(why_not(name, hp, runtime))), "")
        if not missing:
            break
        notes.append(f"attention {name} skipped: {missing}")
    else:
        raise UserError(f"{'; '.join(notes)}: set ATTENTION=sdpa or ATTENTION=math")
    fused = hp.fused_mlp and runtime.dtype == torch.bfloat16 and is_homogeneous(hp)
    fused = fused and not any(size % 8 for size in bank_shape("mlp_bank", hp)[1:])  # TMA
    return dataclasses.replace(
        runtime,
        attention=name,
        attend=load_attention(name),
        fused_mlp=load_fused_mlp(hp.mlp_slope, device) if fused and is_hopper(device) else None,
        notes=tuple(notes),
    )


def why_not(name: str, hp: Hyperparameters, runtime: Runtime) -> str:
    """Why a kernel of attention does not run here, or "" if it does."""
    train, window = hp.train_seq_len, hp.eval_seq_len
    short = train // hp.short_seq_parts, min(window, hp.ttt_chunk_tokens)
    unfit = [n for n in {train, window, *short, hp.attn_window} if n % TILE]
    if name == "cudnn" and unfit:
        return f"sequences or windows of {unfit} tokens are no multiple of {TILE}"
    like = {"dtype": runtime.dtype, "device": runtime.device}
    heads = hp.num_heads, hp.num_kv_heads, hp.num_kv_heads
    try:
        load_attention(name)(*(torch.zeros(1, TILE, n, hp.head_dim, **like) for n in heads))
    except Exception as error:  # a missing or unfit kernel can raise anything
        return error_message(error)
    return ""


def is_hopper(device: torch.device) -> bool:
    """Whether this is an H100 or H200. The capability of an MI300 begins with 9 as well."""
    cuda = device.type == "cuda" and not torch.version.hip
    return cuda and torch.cuda.get_device_capability(device)[0] == 9


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, band=0, document: Tensor | None = None, longest=0
) -> Tensor:
    """`reference_attention` in bounded memory: by chunks where attention or a document has a limit,
    and computed again in a backward. 16,384 tokens have 8.6 GB of scores a layer."""
    band = band or longest
    attend = partial(banded_attention, reference_attention) if band else reference_attention
    return torch.utils.checkpoint.checkpoint(attend, q, k, v, band, document, use_reentrant=False)


def check_kernels(forward: GPT, rows: Tensor, config: ForwardConfig, comm: Comm, log: Callable):
    """Collective. Raise UserError unless `forward`, as the run compiles it, computes the loss of rows
    (B, T + 1) and its gradients as the plain form does in fp32, on all ranks. The parameters are
    changed: zeros and saturated gates would hide the gradients behind them."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in forward.parameters():
            size = parameter.shape[-1:].numel() ** -0.5
            parameter.lerp_(size * torch.randn_like(parameter), 0.5)
    plain = GPT(forward.hp, plain_attention, torch.float32).to(rows.device)
    plain.load_state_dict(forward.state_dict())
    # The first four rows, repeated: one would not show wrong strides, and errors of many rows cancel.
    place = torch.arange(len(rows), device=rows.device) % 4
    rows = rows.to(torch.int64)[place]  # CUDA has no index of uint16

    def loss_and_gradients(model, rows):
        loss = model(rows[:, :-1], rows[:, 1:], config=config)
        return {"loss": loss.detach()} | gradients_of(model, loss)

    # By row: the plain form needs much memory, and the sum would be small if rows cancel by chance.
    exact, sizes = collections.defaultdict(float), collections.defaultdict(float)
    for row, share in zip(rows[:4].split(1), place.bincount() / len(rows), strict=True):
        for name, value in loss_and_gradients(plain, row).items():
            exact[name] += share * value
            sizes[name] += share * vector_norm(value)
    errors = {
        name: (vector_norm(value.float() - exact[name]) / sizes[name].clamp(min=1e-30)).item()
        for name, value in loss_and_gradients(forward, rows).items()
    }
    limit = lambda name: 0.01 if name == "loss" else AGREEMENT  # noqa: E731
    wrong = [f"{name} {error:.3g}" for name, error in errors.items() if not error <= limit(name)]
    wrong = ", ".join(sum(comm.gather(wrong), [])[:4])
    require(
        not wrong,
        f"gradients differ from the plain form in fp32, by these parts of them: {wrong}: set "
        "ATTENTION=math, FUSED_MLP=0 or COMPILE=0; the one that helps is the cause",
    )
    log(f"warmup: gradients agree with fp32, to {max(errors.values()):.1%}")


# ---- Attention: FlashAttention 3, torch's operators, plain products ------------------------------
# Up to this length plain products are faster on a CPU than torch's kernel, 2.6 times at 128.
PLAIN_ATTENTION = 128
# Up to this width of a head torch's CPU kernel is twice as fast in fp32 as in bf16 (without AMX).
SMALL_HEAD = 32


def attention_mask(q: Tensor, k: Tensor, band: int, document: Tensor | None) -> Tensor:
    """Whether the last n of T positions see each of the T, (1 or B, 1, n, T): themselves and those
    before them or, with a band, the band - 1 before them; with documents (B, T), only those of the
    same one."""
    n, time = q.size(1), k.size(1)  # torch's kernels align the causal mask with the first position
    mask = torch.ones(1, 1, n, time, dtype=torch.bool, device=q.device).tril(time - n)
    if band:
        mask = mask.triu(time - n - band + 1)
    if document is not None:
        mask = mask & (document[:, None, -n:, None] == document[:, None, None])
    return mask


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, band=0, document: Tensor | None = None, longest=0
) -> Tensor:
    """Causal attention of the last n of T positions, as plain products: q (B, n, H, E), k and v
    (B, T, K, E). No document is longer than `longest`, unless it is 0."""
    grouped = q.unflatten(2, (k.size(2), -1))  # (B, n, K, H/K, E)
    scores = torch.einsum("bnkge,btke->bkgnt", grouped, k).float() * q.size(-1) ** -0.5
    hidden = ~attention_mask(q, k, band, document)[:, None]
    weights = scores.masked_fill(hidden, -inf).softmax(-1).to(v.dtype)
    return torch.einsum("bkgnt,btke->bnkge", weights, v).flatten(2, 3)


def banded_attention(
    attend: Callable, q: Tensor, k: Tensor, v: Tensor, band: int, document: Tensor | None
) -> Tensor:
    """Causal attention in a band (B, T, H, E), chunk by chunk: a chunk of queries gets its own keys
    and the `band` before them, so `attend` needs a mask of (chunk, band + chunk) only."""
    batch, time = q.shape[:2]
    chunk = round_up(max(1, band // 4))  # the fastest of band/4, band/2 and band on a CPU
    if document is None:
        document = torch.zeros(batch, time, device=q.device)

    def of_chunks(t, before, padding=0.0):
        """Each chunk of t (B, T, ...) and the positions before it, (B * chunks, before + chunk,
        ...)."""
        padded = F.pad(t, (0, 0) * (t.dim() - 2) + (before, -time % chunk), value=padding)
        return padded.unfold(1, before + chunk, chunk).movedim(-1, 2).flatten(0, 1)

    q, k, v = of_chunks(q, 0), of_chunks(k, band), of_chunks(v, band)
    document = of_chunks(document, band, padding=-1.0)  # keys before the row: no one's
    return attend(q, k, v, band, document).unflatten(0, (batch, -1)).flatten(1, 2)[:, :time]


def number_documents(ids: Tensor, limit: int = 0) -> Tensor:
    """The number of the document of each token (B, T), counted in its row. A document that is
    longer than `limit` is cut every `limit` tokens from its start or from the row's (#2135)."""
    begins = ids == BOS
    if limit:
        place = torch.arange(ids.size(1), device=ids.device)
        start = torch.where(begins, place, 0).cummax(1).values
        begins = (place - start) % limit == 0
    return begins.cumsum(1)


def cu_seqlens(document: Tensor) -> Tensor:
    """Where documents (B, T) begin among the positions of all rows (cu_seqlens), int32 (S + 1,).
    Spare ones at the end are empty. More documents than there is room for are an error of
    indexing."""
    batch, time = document.shape
    positions = torch.arange(batch * time, device=document.device)
    begins = document != F.pad(document[:, :-1], (1, 0), value=-1)
    # FineWeb has fewer documents, at most 49 in 16,384 positions (estimated). Each spare one costs a
    # backward 9 ns per head and 128 positions of the longest document (measured, H100).
    room = batch * (17 + time // 256)
    bounds = torch.full((room,), batch * time, device=document.device)
    bounds = bounds.scatter_reduce(0, begins.flatten().cumsum(0) - 1, positions, "amin")
    return F.pad(bounds, (0, 1), value=batch * time).int()


def load_attention(name: str) -> Callable:
    """The kernel called `name`, a function like `reference_attention`. Sets torch's kernel switches
    as a side effect; raises if the kernel is missing."""
    # Else the cache on disk answers with a graph of another kernel.
    torch.compiler.config.cache_key_tag = name
    if name == "fa3":
        return load_fa3()
    # Otherwise torch would silently fall back to another one. `math` takes several times as long.
    enabled = ("flash", "mem_efficient") if name == "sdpa" else (name,)
    for kernel in ("cudnn", "flash", "mem_efficient", "math"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(kernel in enabled)

    def attend(q, k, v, band=0, document=None, longest=0):
        if band and q.size(1) == k.size(1):
            return banded_attention(attend, q, k, v, band, document)
        on_cpu = q.device.type == "cpu"
        if name == "sdpa" and on_cpu and q.size(1) <= PLAIN_ATTENTION:
            return reference_attention(q, k, v, band, document)
        mask = attention_mask(q, k, band, document) if band or document is not None else None
        dtype = q.dtype
        if on_cpu and dtype == torch.bfloat16 and q.size(-1) <= SMALL_HEAD:
            q, k, v = q.float(), k.float(), v.float()
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or K, T, E)
        if name == "sdpa" and not on_cpu:  # that with a mask has no grouped-query form
            k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.size(1) != k.size(1)
        )
        return y.transpose(1, 2).to(dtype)

    return attend


def load_fa3() -> Callable:
    """FlashAttention 3 (arXiv:2407.08608): an installed wheel, or else the build that Hugging
    Face's `kernels` downloads. Raises if there is neither, or the GPU is not a Hopper."""
    require(torch.cuda.is_available() and is_hopper(torch.device("cuda")), "it needs a Hopper GPU")
    fa3 = None
    with suppress(ImportError):
        import flash_attn_interface as fa3
    if fa3 is None:  # not while an error is handled: a signal would be ignored
        from kernels import get_kernel

        fa3 = get_kernel("kernels-community/flash-attn3", version=1)
        fa3 = getattr(fa3, "flash_attn_interface", fa3)  # some builds export only this module

    def attend(q, k, v, band=0, document=None, longest=0):
        options = {
            "causal": True,
            "window_size": (band - 1, 0),  # -1: no limit
        }
        if document is None:
            out = fa3.flash_attn_func(q, k, v, **options)
        else:
            rows = (t.flatten(0, 1) for t in (q, k, v))
            # A backward starts a block for each 128 positions up to `length` of each document.
            length = min(longest or inf, q.size(1))
            out = fa3.flash_attn_varlen_func(*rows, document, document, length, length, **options)
        # Older builds return (out, log-sum-exp).
        out = out[0] if isinstance(out, tuple) else out
        return out.view(q.shape)

    attend.prepare = cu_seqlens  # once for all layers
    return attend


# ---- Fused MLP: the activation inside matrix products, by a Triton kernel ------------------------
def mlp_kernel() -> Callable:
    """The Triton kernel behind `load_fused_mlp`. TMA reads and writes its tiles and cuts them at
    the edges."""
    # Triton reads a kernel's source from a file, which a packed script does not have.
    linecache.cache[__file__] = (len(SOURCE), None, SOURCE.decode().splitlines(True), __file__)
    import triton
    import triton.language as tl

    @triton.jit
    def fused_mlp(a, b, scale, out, slopes, slope: tl.constexpr, forward: tl.constexpr):
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
                left, right = a.load([row, k]), b.load([column, k])
                total = tl.dot(left, right.T, total, input_precision="ieee")
            # Two halves need less shared memory than the whole.
            halves = total.reshape(rows, 2, columns // 2).permute(0, 2, 1).split()
            for half in tl.static_range(2):
                value = halves[half]
                at = [row, column + half * (columns // 2)]
                if forward:
                    place = row + tl.arange(0, rows)
                    factor = tl.load(scale + place, mask=place < a.shape[0], other=0.0)[:, None]
                    bend = tl.where(value > 0, 1.0, slope)
                    slopes.store(at, (2 * bend * bend * value * factor).to(out.dtype))
                    value = bend * value * (bend * value) * factor
                else:
                    value *= slopes.load(at)
                out.store(at, value.to(out.dtype))

    return fused_mlp


def load_fused_mlp(slope: float, device: torch.device) -> Callable:
    """`FusedMLP` as a function of x (B, T, D), scale (B, T, 1), up and down. Raises if Triton is
    missing or does not support the device."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    kernel = mlp_kernel()
    programs = 1
    if device.type == "cuda":
        programs = torch.cuda.get_device_properties(device).multi_processor_count

    def product(a, b, scale, slopes, forward):
        """z = a (n, k) @ b (m, k)^T: f(z) times scale (n, 1), with f the squared leaky ReLU and its
        derivative written to `slopes` (n, m), or else z times `slopes`."""
        out = torch.empty_like(slopes)
        # 64 numbers in bf16: three stages of both blocks fill 144 KiB.
        depth = 128 // a.element_size()
        tiled = TensorDescriptor.from_tensor
        kernel[(programs,)](
            tiled(a, [128, depth]),
            tiled(b, [256, depth]),
            scale,
            tiled(out, [128, 128]),
            tiled(slopes, [128, 128]),
            slope,
            forward,
            num_warps=8,
            num_stages=3,
        )
        return out

    def fused(x, scale, up, down):
        return FusedMLP.apply(x.flatten(0, -2), scale.flatten(0, -2), up, down, product).view_as(x)

    return fused


class FusedMLP(torch.autograd.Function):
    """(f(x @ up^T) * scale) @ down^T of x (N, D) and scale (N, 1), f the squared leaky ReLU, by
    `product`."""

    @staticmethod
    def forward(ctx, x, scale, up, down, product):
        slopes = x.new_empty(len(x), len(up))
        hidden = product(x, up, scale, slopes, forward=True)  # (N, M)
        ctx.save_for_backward(x, scale, up, down, hidden, slopes)
        ctx.product = product
        return F.linear(hidden, down)

    @staticmethod
    def backward(ctx, grad):
        x, scale, up, down, hidden, slopes = ctx.saved_tensors
        # `inner` is the gradient of x @ up^T.
        inner = ctx.product(grad.contiguous(), down.mT.contiguous(), scale, slopes, forward=False)
        dx = inner @ up
        # f is homogeneous of degree 2, f(z) = f'(z) z / 2, so the gradient of `scale` needs no sum
        # over hidden units.
        dscale = (dx.float() * x).sum(-1, keepdim=True) / (2 * scale).clamp(min=1e-30)
        return dx, dscale, inner.mT @ x, grad.mT @ hidden, None


# ---- Main ----------------------------------------------------------------------------------------
def main():
    """Read the knobs and do the run. A user's mistake ends it with one sentence and a non-zero
    status."""
    parser = argparse.ArgumentParser(
        usage="NUM_LAYERS=4 python train_gpt.py (knobs are environment variables)",
        description=(__doc__ or "").split("\n\n")[0],  # python -OO drops it
        epilog=f"Knobs (environment variables):\n{knob_help()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    # It may be ASCII, and a path may have any bytes.
    sys.stdout.reconfigure(errors="backslashreplace")
    handle_signals()
    try:
        if artifact := os.environ.get("EVAL_ONLY", "").strip():
            evaluate_only(os.environ, artifact)
        else:
            train_and_score(Hyperparameters.from_env(os.environ))
    except UserError as error:
        end(str(error))
    except KeyboardInterrupt as error:
        status = 128 + signal.Signals[str(error)]
        end(f"interrupted by {error}; what was finished until then is in the log", status)
    except torch.OutOfMemoryError as error:
        lower = f"set a lower MICRO_BATCH_TOKENS, such as {MICRO_BATCH['cuda'] // 2}"
        end(f"a GPU's memory is full ({error_message(error)}): {lower}")
    except torch._dynamo.exc.ShortenTraceback as error:  # no C++ compiler, Triton or Python.h
        cause = error_message(getattr(error, "inner_exception", error))
        end(f"torch.compile failed ({cause}): set COMPILE=0, which is slower")


if __name__ == "__main__":
    main()
