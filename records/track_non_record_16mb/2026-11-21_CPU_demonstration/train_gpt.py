"""Train, export, reload and score a small language model for the Parameter Golf challenge, in one file.

The best model wins whose code plus compressed weights fit in 16,000,000 bytes and which trains in 600 seconds on
8 x H100; the score is bits per byte on FineWeb validation text. This script trains an 11-layer transformer whose
matrices live in a few 3-D "parameter banks", with Parallel Muon (arXiv:2511.07464) and a running average of the
weights, exports int6 codes, reads its own artifact back and scores it with sliding windows.

    torchrun --standalone --nproc_per_node=8 train_gpt.py      # the record run: every default is the record's
    python train_gpt.py                                        # the same mathematics on one GPU or on a CPU
    python train_gpt.py --help                                 # every knob: an environment variable of that name
    EVAL_ONLY=final_model.int6.xz python train_gpt.py          # load an artifact, score it, nothing else

How the data flows (and the order of the sections below):

    shards (n,) uint16 -> loader x, y (B, T) -> GPT -> loss () -> backward -> local gradients
      banks (R, a, b), R padded to W*r: reduce-scatter -> own (r, a, b) -> momentum -> Newton-Schulz -> fp32 master
                          -> all-gather of the new weights in the compute dtype
      all other parameters: one flat all-reduce -> AdamW
      every step: EMA, of the own rows only
    EMA -> one (out, in) matrix a row of each bank -> quantised codes + scales -> coder -> artifact bytes
    artifact -> dequantise -> banks -> GPT -> nats per token -> bits per byte

Shapes: B sequences, T tokens, D width, H heads, K key/value heads, E head dimension, V vocabulary, L layers,
W ranks, R bank rows, r bank rows a rank. "#399" and the like are pull requests of the challenge's repository.
"""

import argparse
import ast
import bz2
import contextlib
import ctypes
import dataclasses
import difflib
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import lzma
import math
import os
import platform
import queue
import resource
import shutil
import statistics
import struct
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece
import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  first imported later, it would hold on to the process group (see Runtime.start)
import torch.nn.functional as F
from torch import Tensor, nn

SUBMISSION_CAP = 16_000_000  # bytes of code plus artifact, decimal, by the rules of the challenge


class UserError(Exception):
    """Something its user can mend: one sentence that names the variable or file, what was found and what to do."""


# ----------------------------------------------------------------------------------------------------------------
# Hyperparameters: each knob is declared once, here, with its type, default, bounds and meaning


def knob(default, text: str, *, low=None, high=None, choices: tuple = (), section: str = ""):
    """One environment variable. `low` and `high` are inclusive bounds; `section` starts a new group in --help."""
    return dataclasses.field(default=default, metadata=dict(text=text, low=low, high=high, choices=choices, section=section))


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """All knobs; the defaults are the published run of #399 on 8 x H100. Raises UserError on impossible values."""

    # fmt: off
    data_path: str = knob("./data/datasets/fineweb10B_sp1024", "folder of fineweb_train_*.bin and fineweb_val_*.bin", section="Data")
    tokenizer_path: str = knob("./data/tokenizers/fineweb_1024_bpe.model", "SentencePiece model that made the shards")
    vocab_size: int = knob(1024, "pieces of the tokenizer", low=4, high=65536)
    shuffle_seed: int = knob(0, "0: sequential order of the shards; n > 0: rows of all shards permuted anew each epoch by this seed", low=0)
    align_to_bos: bool = knob(False, "begin a row at the first document that starts in its block, where one does")

    num_layers: int = knob(11, "transformer layers", low=1, high=256, section="Model")
    model_dim: int = knob(512, "width D of the residual stream", low=8)
    num_heads: int = knob(8, "query heads", low=1)
    num_kv_heads: int = knob(4, "key/value heads, each shared by NUM_HEADS / NUM_KV_HEADS query heads", low=1)
    mlp_mult: float = knob(3.0, "hidden width of the MLP as a multiple of MODEL_DIM", low=0.1)
    tie_embeddings: bool = knob(True, "one matrix is both the token embedding and the output head")
    tied_embed_init_std: float = knob(0.005, "standard deviation of the tied embedding at the start", low=0)
    logit_softcap: float = knob(30.0, "logits are c * tanh(logits / c)", low=1e-3)
    qk_gain_init: float = knob(1.5, "start of the learned gain of each query head")
    rope_base: float = knob(10000.0, "base of the rotary frequencies; never rescaled with the length", low=1)
    rope_dims: int = knob(16, "rotated dimensions of each head; 0: all of them", low=0)
    ln_scale: bool = knob(True, "scale the input of each sublayer by 1/sqrt(layer + 1)")
    xsa_last_n: int = knob(4, "exclusive self-attention on the last n layers: outputs lose their part along v", low=0)
    bigram_vocab_size: int = knob(2048, "buckets of the hashed bigram embedding; 0: none", low=0)
    bigram_dim: int = knob(128, "width of the hashed bigram embedding", low=1)

    train_batch_tokens: int = knob(786_432, "tokens a step, all ranks and micro-batches together", low=1, section="Batch")
    train_seq_len: int = knob(2048, "tokens T of a training sequence", low=2, high=1 << 20)
    micro_batch_tokens: int = knob(0, "largest forward of one rank, in tokens; 0: 98,304 on a GPU, 16,384 on a CPU", low=0)

    iterations: int = knob(9000, "steps, unless MAX_WALLCLOCK_SECONDS ends the run before", low=0, section="Schedule")
    max_wallclock_seconds: float = knob(600.0, "training never exceeds this; 0: no limit", low=0)
    warmup_steps: int = knob(20, "steps that compile and warm everything before the clock starts, then are undone", low=0)
    warmdown_iters: int = knob(3000, "last steps over which learning rates fall to 0 (at most half of the run)", low=0)
    warmdown_frac: float = knob(0.0, "the same as a fraction of the run, whatever the hardware; 0: WARMDOWN_ITERS", low=0, high=1)

    matrix_lr: float = knob(0.025, "Muon learning rate of the banks", low=0, section="Optimizer")
    scalar_lr: float = knob(0.025, "Adam learning rate of gains, gates and the bigram projection", low=0)
    tied_embed_lr: float = knob(0.035, "Adam learning rate of the tied embedding (and the bigram embedding)", low=0)
    embed_lr: float = knob(0.6, "the same where the head is untied", low=0)
    head_lr: float = knob(0.008, "Adam learning rate of the untied head", low=0)
    muon_momentum: float = knob(0.99, "Nesterov momentum", low=0, high=1)
    muon_momentum_warmup_start: float = knob(0.92, "momentum at step 0", low=0, high=1)
    muon_momentum_warmup_steps: int = knob(1500, "steps to reach MUON_MOMENTUM (at most half of the run)", low=0)
    muon_backend_steps: int = knob(5, "Newton-Schulz iterations", low=1, high=50)
    muon_coeffs: str = knob("quintic", "Newton-Schulz coefficients (quintic: #399)", choices=("quintic", "polar-express"))
    muon_eq: bool = knob(False, "normalise the rows of each matrix before Newton-Schulz (MuonEq-R)")
    reduce_dtype: str = knob("auto", "gradients of the banks on their way between ranks; auto: COMPUTE_DTYPE", choices=("auto", "float32"))
    muon_wd: float = knob(0.04, "decoupled weight decay of the banks", low=0)
    adam_wd: float = knob(0.04, "decoupled weight decay of everything else", low=0)
    beta1: float = knob(0.9, "Adam", low=0, high=1)
    beta2: float = knob(0.95, "Adam", low=0, high=1)
    adam_eps: float = knob(1e-8, "Adam", low=0)
    grad_clip_norm: float = knob(0.3, "largest norm of the reduced gradient; 0: no clipping", low=0)

    ema_enabled: bool = knob(True, "export an exponential moving average of the weights", section="Averaging and quantisation")
    ema_decay: float = knob(0.997, "its decay a step", low=0, high=1)
    swa_enabled: bool = knob(False, "export a plain average over the end of the warmdown instead")
    swa_every: int = knob(50, "steps between two samples of that average", low=1)
    late_qat: bool = knob(True, "train through the export's rounding (straight-through) once the rate is low")
    qat_threshold: float = knob(0.1, "late QAT begins when the learning rate falls under this part of its peak", low=0, high=1)
    row_range: str = knob("sdclip", "range of a row's codes, sdclip: so many deviations as the tables of matrices say; published: "
                                    "its largest weight, at least 1 (#399)", choices=("sdclip", "published"))
    gptq_batches: int = knob(4, "last training batches, within the wall clock, whose activations guide the rounding (GPTQ); 0: plain rounding", low=0)
    target_bytes: int = knob(SUBMISSION_CAP, "make codes coarser until code and artifact fit into so many bytes; 0: leave them as they are", low=0)
    compressor: str = knob("ans", "coder of the artifact's codes", choices=("ans", "lzma", "zstd"))
    pack_code: bool = knob(False, "write and count train_gpt.packed.py, a self-extracting copy, in the place of the source")

    eval_seq_len: int = knob(2048, "tokens of an evaluation window", low=2, high=1 << 20, section="Evaluation")
    eval_documents: bool = knob(False, "each document alone, without what precedes its BOS, instead of the packed stream")
    eval_stride: int = knob(64, "new tokens scored by each sliding window; EVAL_SEQ_LEN: no overlap", low=1)
    val_batch_size: int = knob(524_288, "tokens of one evaluation batch over all ranks", low=1)
    val_loss_every: int = knob(1000, "steps between validations; 0: only at the end", low=0)
    eval_max_seconds: float = knob(0.0, "test-time training ends after so many seconds, and the rest is scored without; 0: no limit", low=0)
    ttt_enabled: bool = knob(False, "a third score, with training on targets that were scored before")
    ttt_mode: str = knob("sgd", "all weights, chunk by chunk; or low-rank changes, document by document", choices=("sgd", "lora"))
    ttt_chunk_tokens: int = knob(32_768, "targets that are scored before SGD learns from them", low=2)
    ttt_epochs: int = knob(3, "steps of SGD on each chunk", low=1)
    ttt_lr: float = knob(0.002, "of SGD at the first chunk; a cosine ends it at the last", low=0)
    ttt_momentum: float = knob(0.9, "of SGD", low=0, high=1)
    ttt_freeze_blocks: int = knob(0, "first layers that SGD leaves alone", low=0)
    ttt_lora_rank: int = knob(8, "of the changes to a matrix", low=1)
    ttt_lora_chunk: int = knob(48, "targets of a document that are scored before each step", low=1)
    ttt_lora_lr: float = knob(1e-3, "of AdamW on the changes", low=0)
    eval_only: str = knob("", "artifact to load and score; nothing is trained")

    run_id: str = knob("", "name of the log, logs/<RUN_ID>.txt and .jsonl; empty: date and time", section="Run")
    seed: int = knob(1337, "initialisation (and nothing else: see SHUFFLE_SEED)", low=0)
    train_log_every: int = knob(200, "steps between two lines of the log", low=1)
    profile_steps: int = knob(0, "time the parts of so many steps, after the first two, and print a table", low=0)
    compute_dtype: str = knob("auto", "matrix arithmetic; auto: bfloat16 where the hardware multiplies it fast", choices=("auto", "bfloat16", "float32"))
    device: str = knob("auto", "auto: cuda where there is one", choices=("auto", "cuda", "cpu"))
    attention: str = knob("auto", "kernel to try first", choices=("auto", "fa3", "torch-fa3", "torch-fa4", "cudnn", "flash", "math"))
    compile: str = knob("auto", "torch.compile; auto: where a compiler is found", choices=("auto", "0", "1"))
    # fmt: on

    @classmethod
    def from_env(cls, environ: dict[str, str]) -> "Hyperparameters":
        """The knobs set in `environ`, the rest at their defaults. Raises UserError naming the variable."""
        return cls(**{f.name: _parse(f, environ[f.name.upper()]) for f in dataclasses.fields(cls) if f.name.upper() in environ})

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_bounds(field, getattr(self, field.name))
        head_dim, rotated = self.head_dim, self.rope_dims
        _rule(self.model_dim % self.num_heads == 0, f"MODEL_DIM={self.model_dim} is not a multiple of NUM_HEADS={self.num_heads}")
        _rule(self.num_heads % self.num_kv_heads == 0, f"NUM_HEADS={self.num_heads} is not a multiple of NUM_KV_HEADS={self.num_kv_heads}")
        _rule(head_dim % 2 == 0, f"MODEL_DIM / NUM_HEADS = {head_dim} is odd, but rotary embeddings turn pairs: make it even")
        _rule(rotated % 2 == 0 and rotated <= head_dim, f"ROPE_DIMS={rotated} must be even and at most the head dimension {head_dim}")
        _rule(self.xsa_last_n <= self.num_layers, f"XSA_LAST_N={self.xsa_last_n} exceeds NUM_LAYERS={self.num_layers}")
        _rule(self.bigram_vocab_size != 1, "BIGRAM_VOCAB_SIZE=1 leaves no bucket beside the one for document starts: set 0 or 2 and more")
        _rule(self.train_batch_tokens % self.train_seq_len == 0,
              f"TRAIN_BATCH_TOKENS={self.train_batch_tokens} is not a multiple of TRAIN_SEQ_LEN={self.train_seq_len}")
        _rule(self.ttt_freeze_blocks <= self.num_layers, f"TTT_FREEZE_BLOCKS={self.ttt_freeze_blocks} exceeds NUM_LAYERS={self.num_layers}")
        _rule(self.ttt_mode == "sgd" or self.ttt_lora_chunk <= self.eval_seq_len,
              f"TTT_LORA_CHUNK={self.ttt_lora_chunk} exceeds EVAL_SEQ_LEN={self.eval_seq_len}")
        _rule(self.eval_stride <= self.eval_seq_len,
              f"EVAL_STRIDE={self.eval_stride} exceeds EVAL_SEQ_LEN={self.eval_seq_len}: tokens between windows would not be scored")
        _rule(not (self.ema_enabled and self.swa_enabled), "EMA_ENABLED=1 and SWA_ENABLED=1 both choose the exported weights: set one of them to 0")

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def mlp_dim(self) -> int:
        return int(self.mlp_mult * self.model_dim)

    def describe(self) -> str:
        """One `name=value` a line for the log; a leading * marks what differs from the default."""
        return "\n".join(f"{' ' if getattr(self, f.name) == f.default else '*'} {f.name.upper()}={getattr(self, f.name)}"
                         for f in dataclasses.fields(self))


def _parse(field: dataclasses.Field, text: str):
    name, text = field.name.upper(), text.strip()
    if field.type is bool:
        values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
        _rule(text.lower() in values, f"{name}={text!r} is not a switch: set 0 or 1")
        return values[text.lower()]
    try:
        return field.type(text)
    except ValueError:
        kind = {int: "a whole number", float: "a number"}[field.type]
        raise UserError(f"{name}={text!r} is not {kind}: set for example {name}={field.default}") from None


def _check_bounds(field: dataclasses.Field, value) -> None:
    name, low, high, choices = field.name.upper(), *(field.metadata[k] for k in ("low", "high", "choices"))
    _rule(not isinstance(value, float) or math.isfinite(value), f"{name}={value} is not a finite number")
    _rule(low is None or value >= low, f"{name}={value} is below its least value {low}")
    _rule(high is None or value <= high, f"{name}={value} is above its greatest value {high}")
    _rule(not choices or value in choices, f"{name}={value!r} is not one of {', '.join(choices)}")


def _rule(holds: bool, sentence: str) -> None:
    if not holds:
        raise UserError(sentence)


def _reason(error: BaseException) -> str:
    """The first line of what an exception says, or its name if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]


def misspelt_knobs(environ: dict[str, str]) -> list[str]:
    """A sentence for every variable of `environ` that is nearly, but not quite, the name of a knob."""
    knobs = [f.name.upper() for f in dataclasses.fields(Hyperparameters)]
    near = {name: difflib.get_close_matches(name, knobs, n=1, cutoff=0.85) for name in sorted(environ) if name not in knobs}
    return [f"{name} is set but is not a knob; did you mean {match[0]}?" for name, match in near.items() if match]


def knob_help() -> str:
    """The table that --help prints: every knob with its default, meaning and bounds."""
    lines = []
    for field in dataclasses.fields(Hyperparameters):
        meta = field.metadata
        if meta["section"]:
            lines.append(f"\n{meta['section']}")
        bounds = [f"{sign} {meta[key]}" for key, sign in (("low", ">="), ("high", "<=")) if meta[key] is not None]
        limits = " | ".join(meta["choices"]) or ", ".join(bounds)
        default = int(field.default) if field.type is bool else field.default
        lines.append(f"  {field.name.upper()}={default}\n      {meta['text']}{f'  [{limits}]' if limits else ''}")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------
# Runtime: rank, device, dtype, attention kernel and compiler, each decided once and logged


class Ranks:
    """The collectives of a run of W ranks. At W = 1 they are copies or nothing, so that callers need no branch.

    All sums are plain sums: means come from dividing the loss by the global number of micro-batches beforehand.
    """

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Sum `tensor` over the ranks, in place. Returns the function that waits for it."""
        return self._start(dist.all_reduce, tensor)

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Callable[[], None]:
        """Sum `full` (W*r, ...) over the ranks; this rank's rows go to `shard` (r, ...)."""
        return self._start(getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor), shard, full)  # its name from torch 2.13 on

    def all_gather(self, full: Tensor, shard: Tensor) -> Callable[[], None]:
        """Put the `shard` (r, ...) of every rank into `full` (W*r, ...)."""
        return self._start(getattr(dist, "all_gather_single", dist.all_gather_into_tensor), full, shard)

    def broadcast_bytes(self, blob: bytes | None, device: torch.device) -> bytes:
        """The `blob` of rank 0, on every rank (through the network: ranks may sit on several nodes)."""
        if self.size == 1:
            return blob
        length = torch.tensor([len(blob or b"")], device=device)
        self._start(dist.broadcast, length, 0)()
        data = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == 0:
            data.copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
        data = data.to(device)
        self._start(dist.broadcast, data, 0)()
        return data.cpu().numpy().tobytes()

    def _start(self, collective, out: Tensor, source: Tensor | int | None = None) -> Callable[[], None]:
        if self.size == 1:
            if isinstance(source, Tensor) and source.data_ptr() != out.data_ptr():
                out.copy_(source)
            return lambda: None
        with self._named_failure():
            work = collective(out, async_op=True) if source is None else collective(out, source, async_op=True)
        return lambda: self._wait(work)

    def _wait(self, work) -> None:
        with self._named_failure():
            work.wait()

    @contextlib.contextmanager
    def _named_failure(self):
        try:
            yield
        except RuntimeError as error:
            raise UserError(f"rank {self.rank} lost a collective operation: another rank has died or cannot be reached ({_reason(error)}); "
                            "look at the first rank that reported an error, then start the run again") from error


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Where and how this process computes; made once by `start` and passed on, never looked up."""

    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    compiled: bool
    attention: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    notes: tuple[str, ...]  # why a choice is not the first one, for the log

    @classmethod
    @contextlib.contextmanager
    def start(cls, hp: Hyperparameters) -> Iterator["Runtime"]:
        """Join the other ranks if there are any, decide everything, and leave in good order if the body succeeds."""
        ranks = Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
        device = choose_device(hp.device, int(os.environ.get("LOCAL_RANK", 0)))
        if ranks.size > 1:
            on_gpu = device.type == "cuda"
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=10), device_id=device if on_gpu else None)
        if device.type == "cpu":
            keep_freed_memory()
        dtype, (compiled, missing) = choose_dtype(hp.compute_dtype, device), choose_compile(hp.compile, device)
        attention, attend, refused = choose_attention(hp, device, dtype, compiled)
        yield cls(ranks, device, dtype, compiled, attention, attend, (*missing, *refused))
        # Not after an exception, where a barrier with a dead rank would hang. Destroying the group ends gloo's threads,
        # unless something still holds it, such as default arguments of torch.distributed.nn that were bound to it on
        # import; a thread that lives on can abort the process while the interpreter shuts down.
        if ranks.size > 1:
            dist.barrier()
            dist.destroy_process_group()

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def describe(self) -> str:
        """One line for the log."""
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else f"{cpu_name()}, {torch.get_num_threads()} threads"
        return (f"runtime: ranks:{self.ranks.size} device:{name} compute_dtype:{str(self.dtype).removeprefix('torch.')} "
                f"attention:{self.attention} compile:{int(self.compiled)}")


def cpu_name() -> str:
    """What the CPU calls itself, where Linux tells."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "CPU " + next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"CPU {platform.machine()}"


def versions() -> str:
    """Python, CUDA and every package that computes or codes here, with their versions."""
    found = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in ("numpy", "sentencepiece", "constriction", "zstandard", "triton", "flash_attn_3"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join([*found, f"cuda {torch.version.cuda}"])


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """This process's device: the GPU numbered LOCAL_RANK, or the CPU where there is none."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    _rule(torch.cuda.is_available(), "DEVICE=cuda, but torch finds no CUDA device: install a CUDA build of torch or set DEVICE=cpu")
    found = torch.cuda.device_count()
    _rule(local_rank < found, f"LOCAL_RANK={local_rank}, but this node has {found} GPU(s): set --nproc_per_node={found}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """bfloat16 where there are matrix units for it (Ampere and later; AMX or AVX512-BF16), else float32."""
    if wanted != "auto":
        return getattr(torch, wanted)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float32
    probes = (getattr(torch.cpu, name, lambda: False) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return torch.bfloat16 if any(probe() for probe in probes) else torch.float32


def choose_compile(wanted: str, device: torch.device) -> tuple[bool, list[str]]:
    """Whether to compile, and a note if what that needs is not all here."""
    if wanted != "auto":
        return wanted == "1", []
    compilers = (os.environ.get("CXX", "g++"), "clang++", "c++")
    needs = {
        "Linux": sys.platform == "linux",  # elsewhere Inductor's C++ needs an OpenMP that compilers do not bring
        "a C++ compiler": any(map(shutil.which, compilers)),
        "Python.h (python3-dev)": Path(sysconfig.get_path("include"), "Python.h").exists(),
        "triton": device.type == "cpu" or importlib.util.find_spec("triton") is not None,
    }
    missing = [name for name, found in needs.items() if not found]
    return not missing, [f"not compiled and slower for it: {', '.join(missing)} is missing"] if missing else []


def keep_freed_memory() -> None:
    """Ask glibc to keep freed blocks: a training step frees and takes the same hundreds of megabytes again.

    By default large blocks go back to the kernel, and every page of the next one faults anew: on a 2-core CPU that
    cost more than the arithmetic of a step. Not on other C libraries, where nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_mmap_threshold, one_gib = -1, -3, 1 << 30
        mallopt(m_mmap_threshold, one_gib)
        mallopt(m_trim_threshold, -1)


def choose_attention(hp: Hyperparameters, device: torch.device, dtype: torch.dtype, compiled: bool) -> tuple[str, Callable, list[str]]:
    """The first kernel that runs forward and backward at the model's head shape: (name, function, refusals).

    The function takes q (B, T, H, E), k and v (B, T, K, E) and returns (B, T, H, E), causal. A kernel that is not
    installed or does not run here is passed over and named in the refusals; `math` always works.
    """
    order = ("fa3", "torch-fa3", "torch-fa4", "cudnn", "flash", "math") if device.type == "cuda" else ("flash", "math")
    if hp.attention != "auto":
        order = (hp.attention, *(name for name in order if name != hp.attention))
    refused = []
    for name in order:
        try:
            attend = load_attention(name)
            q, k = (torch.randn(2, 128, n, hp.head_dim, device=device, dtype=dtype) for n in (hp.num_heads, hp.num_kv_heads))
            # torch's own operators always compile; some builds of flash_attn_interface do not.
            probe = torch.compile(attend, fullgraph=True) if compiled and name == "fa3" else attend
            with torch.enable_grad():
                probe(q.requires_grad_(), k.requires_grad_(), k.detach().clone().requires_grad_()).float().sum().backward()
            return name, attend, refused
        except Exception as error:  # whatever a missing or unfit kernel raises, the next one is tried
            refused.append(f"attention {name} passed over: {type(error).__name__}: {_reason(error)}")
    raise UserError(f"ATTENTION={hp.attention}: no attention kernel runs on {device}: {'; '.join(refused)}")


def load_attention(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The kernel called `name`; raises whatever its absence raises. Sets torch's own kernel switches as a side effect."""
    if name == "fa3":
        from flash_attn_interface import flash_attn_func  # FlashAttention 3, arXiv:2407.08608; Hopper only

        if torch.cuda.get_device_capability()[0] != 9:
            raise RuntimeError("needs a Hopper GPU")

        def attend_fa3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = flash_attn_func(q, k, v, causal=True)
            return out[0] if isinstance(out, tuple) else out  # older builds return (out, log-sum-exp)

        return attend_fa3
    if name.startswith("torch-fa"):  # torch >= 2.11 can put FA3 or FA4 behind its own operator
        torch.nn.attention.activate_flash_attention_impl(name.removeprefix("torch-").upper())
    elif hasattr(torch.nn.attention, "restore_flash_attention_impl") and torch.nn.attention.current_flash_attention_impl():
        torch.nn.attention.restore_flash_attention_impl()
    # Exactly one kernel stays on: with others on, torch would take one of them without a word where this one is absent.
    backends = torch.backends.cuda
    backends.enable_cudnn_sdp(name == "cudnn")
    backends.enable_flash_sdp(name == "flash" or name.startswith("torch-fa"))
    backends.enable_mem_efficient_sdp(False)
    backends.enable_math_sdp(name == "math")

    def attend_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or K, T, E)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
        return out.transpose(1, 2)

    return attend_sdpa


class Log:
    """The run's log: lines on rank 0's console and in logs/<RUN_ID>.txt, events as JSON lines in logs/<RUN_ID>.jsonl."""

    def __init__(self, hp: Hyperparameters, ranks: Ranks, folder: Path = Path("logs")):
        self.name, self.start = hp.run_id or time.strftime("%Y%m%d-%H%M%S"), time.perf_counter()
        self.files = []
        if ranks.rank == 0:
            with writing(folder / f"{self.name}.txt"):
                folder.mkdir(parents=True, exist_ok=True)
                self.files = [open(folder / f"{self.name}{suffix}", "w", encoding="utf-8", buffering=1)  # noqa: SIM115
                              for suffix in (".txt", ".jsonl")]

    def line(self, text: str, console: bool = True) -> None:
        """Write `text` to the log, and to the console unless it would only fill it (the source, the versions)."""
        if self.files:
            if console:
                print(text, flush=True)
            with writing(self.files[0].name):
                self.files[0].write(text + "\n")

    def event(self, kind: str, **fields) -> None:
        """One JSON line {"event": kind, "seconds": since the log began, ...}."""
        if self.files:
            with writing(self.files[1].name):
                self.files[1].write(json.dumps({"event": kind, "seconds": round(time.perf_counter() - self.start, 3), **fields}) + "\n")

    def header(self, hp: Hyperparameters, runtime: Runtime) -> None:
        """What a reader needs to repeat the run: source, versions, machine, every knob."""
        self.line(source_code().decode(), console=False)
        self.line("=" * 100, console=False)
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.line(f"started: {started}", console=False)
        self.line(versions())
        self.line(runtime.describe())
        self.line("hyperparameters (* differs from the default)\n" + hp.describe(), console=False)
        changed = [row[2:] for row in hp.describe().splitlines() if row.startswith("*")]
        self.line("changed from the defaults: " + (" ".join(changed) or "nothing"))
        for note in (*runtime.notes, *misspelt_knobs(os.environ)):
            self.line(f"note: {note}")
        self.event("start", run_id=self.name, started=started, versions=versions(), runtime=runtime.describe(), hyperparameters=dataclasses.asdict(hp))


@contextlib.contextmanager
def writing(path: str | Path):
    """Turn what the operating system says about a failed write (folder not writable, disk full) into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; free space or choose a writable folder") from error


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` so that a crash leaves the old file or the whole new one: temporary name, sync, rename."""
    partial = path.with_name(path.name + ".partial")
    with writing(path):
        try:
            with open(partial, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


class Stopwatch:
    """Seconds of training, without the pauses for validation."""

    def __init__(self):
        self.total, self.since = 0.0, None

    def start(self) -> None:
        self.since = time.perf_counter()

    def pause(self) -> None:
        self.total, self.since = self.seconds(), None

    def seconds(self) -> float:
        return self.total + (time.perf_counter() - self.since if self.since is not None else 0.0)


# ----------------------------------------------------------------------------------------------------------------
# Data: shards of uint16 tokens, the training loader, the validation stream with its byte counts

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_INTS = 20240520, 1, 256
SHARD_HEADER_BYTES = 4 * SHARD_HEADER_INTS
BOS = 1  # every document of the challenge's data starts with it


def read_shard(path: Path) -> np.ndarray:
    """The tokens (n,) uint16 of a shard, memory-mapped.

    A shard is 256 little-endian int32 (magic 20240520, version 1, token count n, zeros) and n little-endian uint16.
    Raises UserError naming the file if header and length do not agree with that.
    """
    try:
        size = path.stat().st_size
        header = np.fromfile(path, dtype="<i4", count=SHARD_HEADER_INTS)
    except OSError as error:
        raise UserError(f"cannot read shard {path}: {error.strerror or error}") from error
    _rule(len(header) == SHARD_HEADER_INTS, f"shard {path} has {size} bytes, less than its header of {SHARD_HEADER_BYTES}: fetch it again")
    magic, version, count = (int(n) for n in header[:3])
    _rule(magic == SHARD_MAGIC, f"shard {path} starts with {magic} instead of {SHARD_MAGIC}: it is not a token shard of the challenge")
    _rule(version == SHARD_VERSION, f"shard {path} has format version {version}, but only version {SHARD_VERSION} is known: convert it")
    expected = SHARD_HEADER_BYTES + 2 * count
    _rule(count > 0 and size == expected, f"shard {path} has {size} bytes, but its header promises {count} tokens in {expected}: fetch it again")
    return np.asarray(np.memmap(path, dtype="<u2", mode="r", offset=SHARD_HEADER_BYTES, shape=(count,)))


class TokenStream:
    """All shards of a split, end to end, as one sequence of tokens that is read a slice at a time.

    Every shard is mapped at the start, so that going on to the next one is not an event.
    """

    def __init__(self, folder: str, split: str, vocab_size: int):
        self.paths = sorted(Path(folder).glob(f"fineweb_{split}_*.bin"))
        _rule(Path(folder).is_dir(), f"DATA_PATH={folder} is not a folder: set DATA_PATH to the folder of the shards (see data/README.md)")
        _rule(bool(self.paths), f"DATA_PATH={folder} holds no fineweb_{split}_*.bin: fetch or make the shards (see data/README.md)")
        self.shards = [read_shard(path) for path in self.paths]
        self.versions = [self._version(path) for path in self.paths]
        self.ends = np.cumsum([len(shard) for shard in self.shards])
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as (count,) uint16. Raises UserError if one is not in the vocabulary, or if the
        shard is no longer the file that was opened (reading a mapping whose file was cut short would kill the process).
        """
        pieces, shard = [], int(np.searchsorted(self.ends, start, side="right"))
        while count:
            _rule(self._version(self.paths[shard]) == self.versions[shard],
                  f"shard {self.paths[shard]} has changed or vanished since the run began: leave the data alone and start again")
            offset = start - int(self.ends[shard]) + len(self.shards[shard])
            piece = self.shards[shard][offset:offset + count]
            if piece.max() >= self.vocab_size:
                raise UserError(f"shard {self.paths[shard]} holds token {piece.max()}, but VOCAB_SIZE={self.vocab_size}: "
                                "set VOCAB_SIZE and TOKENIZER_PATH to those of the shards")
            pieces.append(piece)
            start, count, shard = start + len(piece), count - len(piece), shard + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    @staticmethod
    def _version(path: Path) -> tuple[int, ...]:
        try:
            status = path.stat()
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns


class TrainingLoader:
    """Batch number s of the run, for any s: block k of the data is tokens [k*T, k*T + T], and step s takes the next
    TRAIN_BATCH_TOKENS / T blocks as its rows, of which rank i has the i-th W-th. The number of the next step is all the
    state there is: data do not depend on W, on the micro-batch or on what was read before. After the last block the
    data begin again.

    The order is sequential, as in #399, or with SHUFFLE_SEED a permutation of all blocks, another one each epoch.
    With ALIGN_TO_BOS a row begins at the first BOS of its block, if there is one: it then reads as far into the next
    block, and what lies before the BOS is left to the row before, as far as that reaches.
    """

    AHEAD = 3  # batches kept ready, so that one slow read of the disk is not felt

    def __init__(self, hp: Hyperparameters, runtime: Runtime):
        self.stream, self.seq_len = TokenStream(hp.data_path, "train", hp.vocab_size), hp.train_seq_len
        self.seed, self.align = hp.shuffle_seed, hp.align_to_bos
        self.blocks = (len(self.stream) - 1) // self.seq_len
        _rule(self.blocks > 0, f"DATA_PATH={hp.data_path} holds {len(self.stream)} training tokens, not one sequence of "
                               f"TRAIN_SEQ_LEN={self.seq_len} and its last target: get more data or shorten the sequence")
        ranks, self.device = runtime.ranks, runtime.device
        self.step_rows = hp.train_batch_tokens // self.seq_len
        _rule(self.step_rows % ranks.size == 0,
              f"TRAIN_BATCH_TOKENS={hp.train_batch_tokens} is {self.step_rows} sequences, which {ranks.size} ranks cannot share evenly: "
              f"set it to a multiple of {ranks.size * self.seq_len}")
        self.rows = self.step_rows // ranks.size
        self.first_row = ranks.rank * self.rows
        self.epoch, self.order = -1, None
        self.ready, self.wanted = queue.Queue(), queue.Queue()
        self.thread = threading.Thread(target=self._prefetch, daemon=True)
        self.thread.start()
        self.expected = None

    def close(self) -> None:
        """End the background thread."""
        self.wanted.put(None)
        self.thread.join()

    def batch(self, step: int) -> Tensor:
        """Rows (B, T + 1) uint16 of this rank on its device; inputs are [:, :-1], targets [:, 1:].

        The next steps' rows are read in the background. Raises UserError if a shard turns out to be unfit.
        """
        if step != self.expected:
            for ahead in range(self.AHEAD):
                self.wanted.put(step + ahead)
        found = None
        while found != step:
            found, rows = self.ready.get()
        if isinstance(rows, BaseException):
            raise rows
        self.wanted.put(step + self.AHEAD)
        self.expected = step + 1
        return rows.to(self.device, non_blocking=True)

    def _prefetch(self) -> None:
        while (step := self.wanted.get()) is not None:
            try:
                self.ready.put((step, self._read(step)))
            except BaseException as error:  # whatever it is: a thread that dies silently would leave the run waiting for ever
                self.ready.put((step, error))

    def _read(self, step: int) -> Tensor:
        rows = torch.empty(self.rows, self.seq_len + 1, dtype=torch.uint16, pin_memory=self.device.type == "cuda")
        first = step * self.step_rows + self.first_row
        for out, number in zip(rows.numpy(), range(first, first + self.rows), strict=True):
            epoch, index = divmod(number, self.blocks)
            out[:] = self._row(self._permuted(epoch, index) * self.seq_len)
        return rows

    def _permuted(self, epoch: int, index: int) -> int:
        if not self.seed:
            return index
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.blocks)
        return int(self.order[index])

    def _row(self, start: int) -> np.ndarray:
        row = self.stream.read(start, self.seq_len + 1)
        shift = int((row[:-1] == BOS).argmax()) if self.align else 0  # 0 where there is no BOS, too
        shift = min(shift, len(self.stream) - len(row) - start)
        return self.stream.read(start + shift, len(row)) if shift else row


class ByteCounter:
    """UTF-8 bytes of the text behind each token, by the challenge's rule for SentencePiece.

    A byte piece is 1 byte; any other normal piece is the bytes of its text. U+2581 stands for a space, 1 byte; one
    that leads a piece counts only if the token before is no boundary (control, unknown or unused, such as BOS).
    Raises UserError if the tokenizer is not the one of the shards.
    """

    def __init__(self, tokenizer_path: str, vocab_size: int):
        _rule(Path(tokenizer_path).is_file(), f"TOKENIZER_PATH={tokenizer_path} is not a file: set it to the SentencePiece model of the shards")
        try:
            pieces = sentencepiece.SentencePieceProcessor(model_file=tokenizer_path)
        except (RuntimeError, OSError) as error:
            raise UserError(f"TOKENIZER_PATH={tokenizer_path} is not a SentencePiece model: {_reason(error)}") from error
        found = pieces.vocab_size()
        _rule(found == vocab_size, f"TOKENIZER_PATH={tokenizer_path} has {found} pieces, but VOCAB_SIZE={vocab_size}: they must be equal")
        _rule(pieces.piece_to_id("\u2581") != pieces.unk_id(),
              f"TOKENIZER_PATH={tokenizer_path} has no piece for U+2581 alone, so that a space may cost three byte pieces: train it with one")
        self.length = np.zeros(vocab_size, dtype=np.int16)  # bytes without the leading space
        self.spaced = np.zeros(vocab_size, dtype=bool)
        self.boundary = np.ones(vocab_size, dtype=bool)
        for token in range(vocab_size):
            if pieces.is_control(token) or pieces.is_unknown(token) or pieces.is_unused(token):
                continue
            text = pieces.id_to_piece(token)
            self.boundary[token] = False
            self.spaced[token] = text.startswith("\u2581")
            self.length[token] = 1 if pieces.is_byte(token) else len(text.removeprefix("\u2581").replace("\u2581", " ").encode())

    def count(self, tokens: np.ndarray) -> np.ndarray:
        """Bytes (n - 1,) of each of tokens[1:], given tokens (n,)."""
        return self.length[tokens[1:]] + (self.spaced[tokens[1:]] & ~self.boundary[tokens[:-1]])


def sha256_of(path: str) -> str:
    """The file's sha256, in hexadecimal."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def check_manifest(data_path: str, tokenizer_path: str) -> None:
    """Hold the data against DATA_PATH/manifest.json, if the tools of data/ have left one there.

    Raises UserError if the tokenizer is not the one of the shards or the validation split is not whole: either would
    give a wrong score that looks like a right one.
    """
    path = Path(data_path, "manifest.json")
    if not path.is_file():
        return
    try:
        manifest = json.loads(path.read_bytes())
        sizes = {Path(data_path, name): int(entry["bytes"]) for name, entry in manifest["files"].items() if name.startswith("fineweb_val_")}
        digest = str(manifest["tokenizer"]["sha256"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as a manifest ({_reason(error)}): make or fetch the data again") from error
    _rule(sha256_of(tokenizer_path) == digest,
          f"TOKENIZER_PATH={tokenizer_path} is not the tokenizer that made the shards, by its sha256 in {path}: set it to that one")
    for shard, size in sizes.items():
        _rule(shard.is_file() and shard.stat().st_size == size, f"{shard} is missing or not of {size} bytes as {path} says: fetch it again")


class Validation:
    """The validation stream on the device: tokens (n + 1,) int32 and the bytes (n,) int16 of its n targets."""

    def __init__(self, hp: Hyperparameters, device: torch.device):
        stream = TokenStream(hp.data_path, "val", hp.vocab_size)
        tokens = stream.read(0, len(stream))
        self.targets = len(tokens) - 1
        _rule(self.targets >= hp.eval_seq_len, f"DATA_PATH={hp.data_path} holds {len(tokens)} validation tokens, fewer than one window "
                                               f"of EVAL_SEQ_LEN={hp.eval_seq_len} and its last target: shorten the window or get the whole split")
        self.nbytes = torch.from_numpy(ByteCounter(hp.tokenizer_path, hp.vocab_size).count(tokens)).to(device)
        check_manifest(hp.data_path, hp.tokenizer_path)
        self.total_bytes = int(self.nbytes.sum(dtype=torch.int64))
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)

    def spans(self, documents: bool) -> np.ndarray:
        """[begin, end) of the inputs (S, 2) that may see each other: the whole stream, or each document with its BOS."""
        inputs = self.tokens[:-1].cpu().numpy()
        begins = np.union1d([0], np.flatnonzero(inputs == BOS)) if documents else np.array([0])
        return np.stack((begins, np.append(begins[1:], len(inputs))), axis=1)


# ----------------------------------------------------------------------------------------------------------------
# The table of matrices: initialisation, forward, optimizer, quantiser and export all read it


class Matrix(NamedTuple):
    """One kind of matrix, of which each layer has one (out, in)."""

    name: str  # in the forward and in the artifact
    bank: str  # the 3-D parameter it lives in
    part: int  # it has rows part*L .. (part + 1)*L of that bank
    out: str  # "dim", "kv" or "mlp": number of its outputs ...
    into: str  # ... and inputs
    reads: str  # the activations that it multiplies, as `GPT.forward` calls them to its watcher
    bits: int = 8  # of its codes in the artifact ...
    clip: float = 20.0  # ... whose range is so many standard deviations of a row
    transposed: bool = False  # stands in its bank as (in, out)
    zero: bool = False  # starts at zero (projections back to the stream) instead of orthogonal
    gain: str = ""  # learned gain (L, out) of its outputs
    normed: bool = False  # reads the normalised stream, scaled by 1/sqrt(layer + 1)


LAYERED = ("resid_mix", "q_gain", "attn_scale", "mlp_scale")  # other parameters whose first dimension is the layer
# Three banks of 2L matrices each: at 11 layers 22 rows, which 8 ranks share as 24. #399 has four, of 22, 22, 11 and 11
# rows, where 8 ranks pad 11 to 16 and two of them have no MLP matrix at all. The down projection stands transposed
# beside the up projection: Newton-Schulz does not mind.
MATRICES = (
    Matrix("q", "qo_bank", 0, "dim", "dim", "stream", normed=True),
    Matrix("out", "qo_bank", 1, "dim", "dim", "heads", zero=True, gain="attn_scale"),
    Matrix("k", "kv_bank", 0, "kv", "dim", "stream", normed=True),
    Matrix("v", "kv_bank", 1, "kv", "dim", "stream", normed=True),
    Matrix("up", "mlp_bank", 0, "mlp", "dim", "mlp", normed=True),
    Matrix("down", "mlp_bank", 1, "dim", "mlp", "hidden", transposed=True, zero=True, gain="mlp_scale"),
)
BANKS = tuple(dict.fromkeys(matrix.bank for matrix in MATRICES))
# Bits bound the range of codes and nothing else: what a code costs is its entropy, some 4.6 bits here, which
# clip / (2^(bits-1) - 1), the step in deviations, decides. So the range should cut nothing off: on two models trained on
# English text int6 cut at 5 deviations lost 7 thousandths of a nat, and the same step with twice the range 1 to 2.


class Table(NamedTuple):
    """One of the (out, in) matrices outside the banks that the artifact holds as codes; all else is fp16 there."""

    name: str
    reads: str  # as above; "" where rows are looked up instead of multiplied
    bits: int
    clip: float


# The token embedding is a fiftieth of the weights, but its rounding costs as much as that of all others with steps ten
# times as wide.
TABLES = {table.name: table for table in (Table("tok_emb", "final", 10, 8.0), Table("lm_head", "final", 10, 8.0),
                                          Table("bigram_emb", "", 8, 16.0), Table("bigram_proj", "pair", 9, 12.0))}


def matrix_shape(kind: Matrix, hp: Hyperparameters) -> tuple[int, int]:
    """(out, in)."""
    size = {"dim": hp.model_dim, "kv": hp.num_kv_heads * hp.head_dim, "mlp": hp.mlp_dim}
    return size[kind.out], size[kind.into]


def bank_shape(bank: str, hp: Hyperparameters) -> tuple[int, int, int]:
    """(R, a, b) of a bank; all matrices in it have one shape, once those that stand transposed are."""
    kinds = [matrix for matrix in MATRICES if matrix.bank == bank]
    ((a, b),) = {matrix_shape(kind, hp)[:: -1 if kind.transposed else 1] for kind in kinds}
    return len(kinds) * hp.num_layers, a, b


def bank_part(bank: Tensor, kind: Matrix) -> Tensor:
    """The matrices (L, out, in) of one kind, a view of their bank (R, a, b)."""
    parts = sum(matrix.bank == kind.bank for matrix in MATRICES)
    matrices = bank.unflatten(0, (parts, -1)).unbind(0)[kind.part]
    return matrices.mT if kind.transposed else matrices


def row_traits(bank: str, hp: Hyperparameters) -> list[tuple[bool, float]]:
    """For each row of a bank whether its matrix stands transposed, and the scale of its updates: as in #399, matrices
    that are tall, by their own shape and not by the bank's, get larger ones."""
    shapes = [(kind.transposed, *matrix_shape(kind, hp)) for kind in MATRICES if kind.bank == bank]
    return [(transposed, max(1.0, out / into) ** 0.5) for transposed, out, into in shapes for _ in range(hp.num_layers)]


# ----------------------------------------------------------------------------------------------------------------
# Model


def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2)) over the last dimension, in x's dtype."""
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


def rotary_tables(hp: Hyperparameters) -> tuple[Tensor, Tensor]:
    """cos and sin (T, 1, rotated/2) for every position of the longest sequence; frequencies do not depend on T."""
    rotated = hp.rope_dims or hp.head_dim
    frequency = hp.rope_base ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    angle = torch.arange(max(hp.train_seq_len, hp.eval_seq_len), dtype=torch.float64)[:, None, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Partial RoPE (arXiv:2104.09864): turn the first 2*cos.size(-1) dimensions of x (B, T, H, E), leave the rest."""
    half = cos.size(-1)
    a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return torch.cat(((a * cos + b * sin).to(x.dtype), (b * cos - a * sin).to(x.dtype), rest), dim=-1)


def attend_tail(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last queries only: q (B, n, H, E) of the last n of T positions, k and v (B, T, K, E).

    Written out, as torch's kernels take the queries for the first ones; n is small.
    """
    n, time = q.size(1), k.size(1)
    grouped = q.unflatten(2, (k.size(2), -1))  # (B, n, K, H/K, E)
    scores = torch.einsum("bnkge,btke->bkgnt", grouped, k).float() * q.size(-1) ** -0.5
    later = torch.ones(n, time, dtype=torch.bool, device=q.device).triu(time - n + 1)
    chances = scores.masked_fill(later, -math.inf).softmax(dim=-1).to(v.dtype)
    return torch.einsum("bkgnt,btke->bnkge", chances, v).flatten(2, 3)


def exclude_self(y: Tensor, v: Tensor) -> Tensor:
    """XSA, exclusive self-attention (#265): remove from y (B, T, H, E) its component along the value of its own position.

    v is (B, T, K, E); each key/value head serves a group of H / K query heads, seen here as one more dimension.
    """
    grouped = y.unflatten(2, (v.size(2), -1))  # (B, T, K, H/K, E)
    v_hat = F.normalize(v.float(), dim=-1).unsqueeze(3)
    along = (grouped * v_hat).sum(dim=-1, keepdim=True)
    return (grouped - along * v_hat).to(y.dtype).flatten(2, 3)


def previous(x: Tensor, starts: Tensor) -> Tensor:
    """x (B, T, D) moved one position later; zero where `starts` (B, T) says that nothing precedes."""
    return F.pad(x[:, :-1], (0, 0, 1, 0)) * ~starts[..., None]


LORA_KINDS = ("k", "v", "out")  # matrices that test-time training may change by a low rank
Adapter = dict[str, tuple[Tensor, Tensor]]  # by kind: A (B, L, rank, in) and B (B, L, out, rank), for each row of a batch


def product(x: Tensor, weights: dict[str, Tensor], name: str, layer: int, adapter: Adapter | None) -> Tensor:
    """x (B, T, in) by a matrix of the layer, changed for each row b of the batch by the adapter's B_b A_b, if there is one."""
    y = F.linear(x, weights[name])
    if adapter is None or name not in adapter:
        return y
    a, b = (matrix[:, layer].to(x.dtype).mT for matrix in adapter[name])
    return y + x @ a @ b


def unwatched(reads: str, layer: int, x: Tensor) -> None:
    """Takes no notice of what the matrices read."""


class GPT(nn.Module):
    """The banked transformer. Banks and matrix arithmetic in `dtype`, all else in fp32.

    First half of the layers feeds the second half through learned U-Net skips; each layer mixes the embedding stream
    back in. Parameters of all layers are stacked: banks (R, a, b) and gains (L, ...). Weights in full precision are
    dicts of fp32 tensors by the names of the parameters; the optimizer keeps those of the banks.
    """

    def __init__(self, hp: Hyperparameters, attend: Callable, dtype: torch.dtype):
        super().__init__()
        self.hp, self.attend, self.dtype = hp, attend, dtype
        layers, dim = hp.num_layers, hp.model_dim
        self.encoder_layers = layers // 2
        for bank in BANKS:
            self.register_parameter(bank, nn.Parameter(torch.zeros(bank_shape(bank, hp), dtype=dtype)))
        self.tok_emb = nn.Parameter(torch.zeros(hp.vocab_size, dim))
        self.lm_head = None if hp.tie_embeddings else nn.Parameter(torch.zeros(hp.vocab_size, dim))
        if hp.bigram_vocab_size:
            self.bigram_emb = nn.Parameter(torch.zeros(hp.bigram_vocab_size, hp.bigram_dim))
            self.bigram_proj = nn.Parameter(torch.zeros(dim, hp.bigram_dim))
            self.bigram_scale = nn.Parameter(torch.tensor(0.05))
        self.smear_gate = nn.Parameter(torch.zeros(dim))
        self.skip_scale = nn.Parameter(torch.ones(self.encoder_layers, dim))
        self.resid_mix = nn.Parameter(torch.stack((torch.ones(layers, dim), torch.zeros(layers, dim)), dim=1))  # (L, 2, D)
        self.q_gain = nn.Parameter(torch.full((layers, hp.num_heads), hp.qk_gain_init))
        self.attn_scale = nn.Parameter(torch.ones(layers, dim))
        self.mlp_scale = nn.Parameter(torch.ones(layers, dim))
        cos, sin = rotary_tables(hp)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        depth = torch.arange(1, layers + 1).float() if hp.ln_scale else torch.ones(layers)
        self.register_buffer("layer_scale", depth.rsqrt()[:, None, None], persistent=False)

    def initialise(self, seed: int) -> dict[str, Tensor]:
        """Orthogonal matrices, zero projections back to the stream, small normal embedding; the same on any device and rank.

        Returns the weights that the model now has, before their rounding to its dtype.
        """
        weights = {name: p.detach().to("cpu", torch.float32, copy=True) for name, p in self.named_parameters()}
        generator = torch.Generator().manual_seed(seed)
        for kind in MATRICES:
            for matrix in bank_part(weights[kind.bank], kind):
                if not kind.zero:
                    nn.init.orthogonal_(matrix, generator=generator)
        weights["tok_emb"].normal_(std=self.hp.tied_embed_init_std if self.hp.tie_embeddings else 1.0, generator=generator)
        if self.hp.bigram_vocab_size:
            nn.init.orthogonal_(weights["bigram_proj"], generator=generator)
        self.load(weights)
        return weights

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Take these weights (all of them, by the names of the parameters)."""
        for name, parameter in self.named_parameters():
            parameter.copy_(weights[name])

    def forward(self, ids: Tensor, targets: Tensor | None = None, reduction: str = "mean", qat: bool = False,
                tail: int = 0, adapter: Adapter | None = None, watch: Callable = unwatched) -> Tensor:
        """ids, targets (B, T) -> logits (B, T, V) without targets, else nats: their mean () or, with "none", each (B, T).

        `qat`: matrices pass through the export's rounding, gradients pass straight through it. `tail`: only the last so
        many positions of each row are wanted (and `targets` has but these); the last layer then computes keys and values
        for all positions and everything else for these. `adapter`: changes of low rank to the matrices. `watch` is shown the activations (..., in) that matrices
        multiply, by the names of the tables.
        """
        weights = self.matrices(qat)
        x = x0 = self.embed(ids, watch)  # (B, T, D)
        skips = []
        for i, w in enumerate(weights):
            if i >= self.encoder_layers and skips:
                x = (x + self.skip_scale[i - self.encoder_layers] * skips.pop()).to(self.dtype)
            mix = self.resid_mix[i]
            x = (mix[0] * x + mix[1] * x0).to(self.dtype)
            kept = tail if i == len(weights) - 1 else 0
            x = x[:, -kept:] + self.attention(rms_norm(x), w, i, kept, adapter, watch)  # -0: all
            normed = rms_norm(x)
            hidden = F.linear(normed, w["up"]).relu().square()
            watch("mlp", i, normed)
            watch("hidden", i, hidden)
            x = x + F.linear(hidden, w["down"])
            if i < self.encoder_layers:
                skips.append(x)
        head = self.tok_emb if self.lm_head is None else self.lm_head
        x = rms_norm(x)
        watch("final", 0, x)
        logits = F.linear(x, head.to(self.dtype)).float()
        logits = self.hp.logit_softcap * torch.tanh(logits / self.hp.logit_softcap)
        if targets is None:
            return logits
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        return nats if reduction == "mean" else nats.view_as(targets)

    def matrices(self, qat: bool = False) -> list[dict[str, Tensor]]:
        """For each layer the (out, in) matrices by name, in the compute dtype.

        Output gains and layer scales are folded in: W diag and diag W cost out*in products here, but B*T*out if they
        were applied to activations. The result is the same but for rounding.
        """
        layers = [{} for _ in range(self.hp.num_layers)]
        for kind in MATRICES:
            bank = bank_part(getattr(self, kind.bank), kind)
            if qat:
                codes, scale = quantise_rows(bank.detach().float(), *code_range(kind, self.hp))
                bank = bank + (codes * scale - bank).detach()
            if kind.gain:
                bank = bank * getattr(self, kind.gain)[..., None]
            if kind.normed:
                bank = bank * self.layer_scale
            for layer, matrix in zip(layers, bank.to(self.dtype).unbind(0), strict=True):
                layer[kind.name] = matrix
        return layers

    def embed(self, ids: Tensor, watch: Callable = unwatched) -> Tensor:
        """ids (B, T) -> stream (B, T, D): token and hashed bigram, normalised, smeared with the position before.

        Nothing is taken from before a BOS: what precedes a document must not matter to it.
        """
        starts = ids == BOS
        starts = starts | F.pad(torch.zeros_like(starts[:, 1:]), (1, 0), value=True)
        x = F.embedding(ids, self.tok_emb)
        if self.hp.bigram_vocab_size:
            buckets = self.hp.bigram_vocab_size - 1  # the last one is for starts
            hashed = ((36313 * ids) ^ (27191 * F.pad(ids[:, :-1], (1, 0)))) % buckets
            pair = F.embedding(torch.where(starts, buckets, hashed), self.bigram_emb).to(self.dtype)
            watch("pair", 0, pair)
            x = x + self.bigram_scale * F.linear(pair, self.bigram_proj.to(self.dtype))
        x = rms_norm(x)
        gate = torch.sigmoid(self.smear_gate)
        return ((1 - gate) * x + gate * previous(x, starts)).to(self.dtype)

    def attention(self, x: Tensor, w: dict[str, Tensor], layer: int, tail: int = 0, adapter: Adapter | None = None,
                  watch: Callable = unwatched) -> Tensor:
        """Causal grouped-query attention of the normalised stream x (B, T, D) with query gain and partial RoPE; of the last
        `tail` positions alone if that is not 0."""
        hp, time = self.hp, x.size(1)
        watch("stream", layer, x)
        q = F.linear(x[:, -tail:], w["q"]).unflatten(-1, (hp.num_heads, hp.head_dim))  # (B, T, H, E)
        k, v = (product(x, w, name, layer, adapter).unflatten(-1, (hp.num_kv_heads, hp.head_dim)) for name in "kv")  # (B, T, K, E)
        cos, sin = self.cos[:time], self.sin[:time]
        q = (rotate(rms_norm(q), cos[-tail:], sin[-tail:]) * self.q_gain[layer][:, None]).to(self.dtype)
        y = (attend_tail if tail else self.attend)(q, rotate(rms_norm(k), cos, sin), v)
        if layer >= hp.num_layers - hp.xsa_last_n:
            y = exclude_self(y, v[:, -tail:])
        y = y.flatten(2)
        watch("heads", layer, y)
        return product(y, w, "out", layer, adapter)


def flops_per_token(hp: Hyperparameters) -> float:
    """Forward and backward floating-point operations of one training token: 2 a multiply-add, backward twice the
    forward, attention over the (T + 1) / 2 positions that a token sees on average."""
    matrices = sum(math.prod(bank_shape(bank, hp)) for bank in BANKS)
    head = hp.vocab_size * hp.model_dim
    bigram = hp.model_dim * hp.bigram_dim if hp.bigram_vocab_size else 0
    attention = hp.num_layers * 2 * hp.model_dim * (hp.train_seq_len + 1) / 2
    return 3 * 2 * (matrices + head + bigram + attention)


# Dense bf16 peaks in FLOP/s from the makers' data sheets, by a part of the device's name.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def peak_flops(device: torch.device) -> float | None:
    """The data-sheet peak of this GPU, or None where it is not known (a CPU, for one)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


# ----------------------------------------------------------------------------------------------------------------
# Optimizers: Parallel Muon for the banks, Adam for the rest

# One (a, b, c) an iteration. The quintic's slope at 0 is steep and it never settles: singular values land in about
# 0.7 .. 1.2. Polar Express (arXiv:2505.16932) takes the best polynomial for what the one before has left.
NEWTON_SCHULZ = {
    "quintic": ((3.4445, -4.7750, 2.0315),),
    "polar-express": ((8.1566, -22.4833, 15.8788), (4.0429, -2.8089, 0.5000), (3.8917, -2.7725, 0.5061),
                      (3.2858, -2.3681, 0.4645), (2.3465, -1.7098, 0.4232)),
}  # fmt: skip


def newton_schulz(g: Tensor, dtype: torch.dtype, steps: int = 5, coefficients: str = "quintic") -> Tensor:
    """Push the singular values of each matrix of g (r, m, n), scaled to norm 1, towards 1 (Muon, Keller Jordan 2024).

    They need not get there: a direction of update is all that is wanted, and that allows the steep first steps. Zero
    matrices stay zero. Each iteration is X <- aX + (bA + cA^2)X with A = XX^T, for tall X the same from the other side
    with A = X^TX, as three batched products in `dtype` without an elementwise pass between them. Iterations beyond the
    list of coefficients use its last ones.
    """
    norm = torch.linalg.vector_norm(g, dim=(-2, -1), keepdim=True)
    x, coefficients = (g / (norm + 1e-7)).to(dtype), NEWTON_SCHULZ[coefficients]
    tall = x.size(-2) > x.size(-1)
    for step in range(steps):
        a, b, c = coefficients[min(step, len(coefficients) - 1)]
        gram = x.mT @ x if tall else x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, poly, beta=a) if tall else torch.baddbmm(x, poly, x, beta=a)
    return x


def muon_update(shard: "BankShard", clip: Tensor, momentum: Tensor, rate: Tensor, hp: Hyperparameters) -> None:
    """One step of Muon on the rows (r, a, b) that a rank owns, from their summed gradient; clip, momentum, rate are ().

    Nesterov momentum, rows normalised if asked (MuonEq-R), Newton-Schulz, decoupled weight decay. Changes the rows'
    momentum and fp32 weights in place, and their copy in the compute dtype. Compiled, it reads and writes them once.
    """
    grad = shard.shard.float() * clip
    shard.momentum.mul_(momentum).add_(grad)
    update = grad + momentum * shard.momentum
    if hp.muon_eq:
        across, along = (torch.linalg.vector_norm(update, dim=dim, keepdim=True) for dim in (-2, -1))
        update = update / torch.where(shard.transposed, across, along).clamp(min=1e-7)
    update = newton_schulz(update, shard.own.dtype, hp.muon_backend_steps, hp.muon_coeffs)
    shard.master.mul_(1 - rate * hp.muon_wd).sub_(update * (rate * shard.scale))
    shard.own.copy_(shard.master)


class BankShard:
    """One bank under Parallel Muon. Every rank has all of it and of its gradient in the compute dtype, in buffers padded
    to W*r rows; the rank that owns r of the rows has their fp32 weights and momentum. So no collective needs a copy."""

    def __init__(self, bank: nn.Parameter, weights: Tensor, traits: list[tuple[bool, float]], ranks: Ranks,
                 reduce_dtype: torch.dtype, summed: bool):
        self.bank, rows = bank, bank.size(0)
        owned = -(-rows // ranks.size)  # r
        self.padding = ranks.size * owned - rows
        assert self.padding == -rows % ranks.size < ranks.size, "fewer padding rows than ranks"
        padded, mine = (ranks.size * owned, *bank.shape[1:]), slice(ranks.rank * owned, (ranks.rank + 1) * owned)

        self.working = torch.zeros(padded, dtype=bank.dtype, device=bank.device)
        self.working[:rows] = weights
        bank.data = self.working[:rows]
        self.own = self.working[mine]
        self.grad = torch.zeros_like(self.working)
        bank.grad = self.grad[:rows]  # backward adds in place, so the padding rows stay zero
        # Micro-batches are summed in fp32; a single one is already the sum.
        self.sum = torch.zeros_like(self.grad, dtype=torch.float32) if summed and bank.dtype != torch.float32 else self.grad
        self.wire = self.sum if ranks.size == 1 or self.sum.dtype == reduce_dtype else torch.empty_like(self.grad, dtype=reduce_dtype)
        self.shard = self.wire[mine] if ranks.size == 1 else torch.empty_like(self.wire[mine])

        full = torch.zeros(padded, device=bank.device)
        full[:rows] = weights
        self.master, self.momentum = full[mine].clone(), torch.zeros_like(full[mine])
        traits = traits + [(False, 0.0)] * self.padding
        self.transposed, self.scale = (torch.tensor(column, device=bank.device)[mine, None, None] for column in zip(*traits, strict=True))


class Optimizers:
    """Every parameter is owned by exactly one optimizer; `step` is the only path, for 1..W ranks. Its phases:

    launch   small gradients, loss and clock in one flat all-reduce, then every bank's reduce-scatter, largest first
    clip     the norm of the reduced gradient: own shards and small gradients, one scalar all-reduce
    muon     bank by bank: momentum, Newton-Schulz and new fp32 weights of the own rows, start of their all-gather
    adam     the small parameters, while the all-gathers are in flight
    finish   wait for the gathers, as late as the caller can: the next forward needs them

    Every rank computes with what the owners of the rows have sent, so replicas are equal by construction.
    """

    def __init__(self, model: GPT, weights: dict[str, Tensor], hp: Hyperparameters, ranks: Ranks, accumulation: int = 1, compiled: bool = False):
        self.hp, self.ranks = hp, ranks
        named = dict(model.named_parameters())
        token_lr = hp.tied_embed_lr if hp.tie_embeddings else hp.embed_lr
        owner = {  # parameter -> peak learning rate; banks belong to Muon, all others to Adam
            **dict.fromkeys(BANKS, hp.matrix_lr),
            **dict.fromkeys(("tok_emb", "bigram_emb"), token_lr),
            "lm_head": hp.head_lr,
            **dict.fromkeys(("bigram_proj", "bigram_scale", "smear_gate", "skip_scale", "resid_mix", "q_gain", "attn_scale", "mlp_scale"),
                            hp.scalar_lr),
        }
        assert set(named) <= set(owner), f"parameters without an optimizer: {set(named) - set(owner)}"
        reduce_dtype = model.dtype if hp.reduce_dtype == "auto" else torch.float32
        summed = accumulation > 1 or reduce_dtype != model.dtype
        self.banks = {bank: BankShard(named[bank], weights[bank], row_traits(bank, hp), ranks, reduce_dtype, summed)
                      for bank in sorted(BANKS, key=lambda bank: -named[bank].numel())}
        self.small = {name: parameter for name, parameter in named.items() if name not in BANKS}
        device = model.tok_emb.device
        self.flat = torch.zeros(sum(p.numel() for p in self.small.values()) + 2, device=device)  # gradients, loss, clock
        views = self.flat[:-2].split([p.numel() for p in self.small.values()])
        for parameter, view in zip(self.small.values(), views, strict=True):
            parameter.grad = view.view_as(parameter)  # backward adds in place: gradients need no packing
        groups = [{"params": [p for name, p in self.small.items() if owner[name] == rate], "lr": rate, "peak_lr": rate}
                  for rate in sorted({owner[name] for name in self.small})]
        self.adam = torch.optim.AdamW(groups, betas=(hp.beta1, hp.beta2), eps=hp.adam_eps, weight_decay=hp.adam_wd, fused=True)
        self.update = torch.compile(muon_update, dynamic=False, fullgraph=True) if compiled else muon_update
        self.gathers: list[Callable[[], None]] = []

    def accumulate(self) -> None:
        """Take in the gradients of one micro-batch."""
        for shard in self.banks.values():
            if shard.sum is not shard.grad:
                shard.sum.add_(shard.grad)
                shard.grad.zero_()

    @torch.no_grad()
    def step(self, lr_scale: float, momentum: float, mark: Callable = lambda part: None) -> Tensor:
        """One update from the gradients in place; leaves them zero. Returns (2,): mean loss and rank 0's clock.

        The banks are not to be read before `finish`. `mark` is told which part begins.
        """
        mark("communication")
        for arrived in self._launch():
            arrived()
        mark("clip")
        clip = self._clip()
        # Filled on the device: a copy from the host would wait for it.
        settings = [torch.full((), value, device=self.flat.device) for value in (momentum, lr_scale * self.hp.matrix_lr)]
        for shard in self.banks.values():
            mark("Newton-Schulz")
            self.update(shard, clip, *settings, self.hp)
            mark("communication")
            self.gathers.append(self.ranks.all_gather(shard.working, shard.own))
        mark("small parameters")
        self._adam(clip, lr_scale)
        report = self.flat[-2:].clone()
        self.zero_grad()
        return report

    def finish(self) -> None:
        """Wait until the banks hold the new weights."""
        while self.gathers:
            self.gathers.pop()()

    def _launch(self) -> list[Callable[[], None]]:
        arrivals = [self.ranks.all_reduce(self.flat)]
        for shard in self.banks.values():
            if shard.wire is not shard.sum:
                shard.wire.copy_(shard.sum)
            arrivals.append(self.ranks.reduce_scatter(shard.shard, shard.wire))
        return arrivals

    def _clip(self) -> Tensor:
        square = torch.stack([torch.linalg.vector_norm(shard.shard, dtype=torch.float32).square() for shard in self.banks.values()]).sum()
        self.ranks.all_reduce(square)()
        norm = (square + torch.linalg.vector_norm(self.flat[:-2]).square()).sqrt()
        limit = self.hp.grad_clip_norm or math.inf
        return (limit / (norm + 1e-6)).clamp(max=1.0)

    def _adam(self, clip: Tensor, lr_scale: float) -> None:
        self.flat[:-2].mul_(clip)
        for group in self.adam.param_groups:
            group["lr"] = group["peak_lr"] * lr_scale
        self.adam.step()

    def owned(self) -> list[Tensor]:
        """The fp32 weights that this rank updates: its rows of each bank, all of each small parameter."""
        return [*(shard.master for shard in self.banks.values()), *(p.detach() for p in self.small.values())]

    def publish(self) -> None:
        """Give all ranks the banks as the owners have them, after a change that was no step."""
        for shard in self.banks.values():
            shard.own.copy_(shard.master)
            self.ranks.all_gather(shard.working, shard.own)()

    def weights(self) -> dict[str, Tensor]:
        """All weights in fp32, gathered from their owners."""
        found = {name: p.detach().clone() for name, p in self.small.items()}
        for name, shard in self.banks.items():
            full = torch.empty_like(shard.working, dtype=torch.float32)
            self.ranks.all_gather(full, shard.master)()
            found[name] = full[:shard.bank.size(0)]
        return found

    def reset(self) -> None:
        """Forget all state, as if no step had been taken."""
        self.adam.state.clear()
        for shard in self.banks.values():
            shard.momentum.zero_()

    def zero_grad(self) -> None:
        """Zero the gradient buffers in place; parameters keep their views of them."""
        self.flat.zero_()
        for shard in self.banks.values():
            shard.sum.zero_()

    def state_dict(self) -> dict:
        """All state of this rank: Adam's, and the weights and momentum of the bank rows that it owns."""
        return {"adam": self.adam.state_dict(), "banks": {name: (shard.master, shard.momentum) for name, shard in self.banks.items()}}

    def load_state_dict(self, state: dict) -> None:
        """Take the state of `state_dict` (of the same rank of as many ranks)."""
        self.adam.load_state_dict(state["adam"])
        for name, (master, momentum) in state["banks"].items():
            self.banks[name].master.copy_(master)
            self.banks[name].momentum.copy_(momentum)
        self.publish()


# ----------------------------------------------------------------------------------------------------------------
# Schedules and averaging

PHASE_LIMIT = 0.5  # phases given in steps take at most this part of a run: 3,000 steps are the end of the published
# run, but on a machine eight times slower they would be all of it, and the rate would never reach its peak
SWA_START = 0.2  # part of the peak rate under which SWA samples (#399)


class Moment(NamedTuple):
    """What the schedules prescribe for one step."""

    lr_scale: float  # multiplies every learning rate
    momentum: float  # Muon's
    qat: bool  # train through the int6 rounding


def schedule(hp: Hyperparameters, step: int, seconds: float, step_seconds: float) -> Moment:
    """The settings of step number `step`, which begins `seconds` into the run when a step takes `step_seconds`.

    A pure function of values that all ranks share. Progress is the part used up of ITERATIONS or of the wall clock,
    whichever is further; the warmdown is linear in it and ends at 0.
    """
    cap, steps = hp.max_wallclock_seconds, max(hp.iterations, 1)
    progress = max(step / steps, seconds / cap if cap else 0.0)
    if cap and step_seconds:
        steps = min(steps, cap / step_seconds)
    warmdown = hp.warmdown_frac or min(hp.warmdown_iters / steps, PHASE_LIMIT)
    lr_scale = min(1.0, max(0.0, 1.0 - progress) / warmdown) if warmdown else 1.0
    warmed = min(1.0, max(step / max(hp.muon_momentum_warmup_steps, 1), progress / PHASE_LIMIT))
    momentum = hp.muon_momentum_warmup_start + warmed * (hp.muon_momentum - hp.muon_momentum_warmup_start)
    return Moment(lr_scale, momentum, hp.late_qat and lr_scale < hp.qat_threshold)


class Clock:
    """Rank 0's training time as all ranks know it: it arrives with the gradients, so they decide alike by it."""

    def __init__(self, cap: float, in_flight: int):
        self.cap, self.in_flight = cap, in_flight
        self.step, self.seconds = -1, 0.0  # the last step whose time is known
        self.recent = deque(maxlen=20)

    def agree(self, step: int, seconds: float) -> None:
        """Rank 0 asked for the update of `step` after `seconds` of training."""
        self.recent.append((seconds - self.seconds) / (step - self.step))
        self.step, self.seconds = step, seconds

    def expect(self, step_seconds: float) -> None:
        """A step took so long in the warm-up."""
        self.recent.append(step_seconds)

    def reserve(self, seconds: float) -> None:
        """Keep so much of the cap for what comes after the last step. Raises UserError if the cap has not as much."""
        _rule(not self.cap or seconds < self.cap, f"MAX_WALLCLOCK_SECONDS={self.cap:g} is less than the {seconds:.1f} s that GPTQ_BATCHES takes: "
                                                  "set it to 0, or give the run more time")
        self.cap = self.cap and self.cap - seconds

    @property
    def step_seconds(self) -> float:
        """Average so far; 0 before the first step is known."""
        return self.seconds / (self.step + 1) if self.step >= 0 else 0.0

    def begins(self, step: int) -> float:
        """When `step` is expected to begin, in seconds."""
        return self.seconds + (step - self.step - 1) * self.step_seconds

    def fits(self, step: int) -> bool:
        """Whether `step` would surely end before the cap, were it and those in flight as slow as the slowest of late."""
        return not self.cap or self.seconds + (step - self.step + self.in_flight + 1) * max(self.recent, default=0.0) <= self.cap


class WeightAverage:
    """The weights to export: their exponential moving average, or a plain average of late samples, in fp32. A rank
    averages what it owns (`Optimizers.owned`)."""

    def __init__(self, weights: list[Tensor], hp: Hyperparameters):
        self.hp, self.weights = hp, weights
        self.reset()

    def reset(self) -> None:
        """Begin anew at the present weights."""
        self.samples = 0
        self.mean = [w.clone() for w in self.weights] if self.hp.ema_enabled or self.hp.swa_enabled else []

    def update(self, step: int, lr_scale: float) -> None:
        """Take in the weights after `step`."""
        if self.hp.ema_enabled:
            self.samples += 1
            torch._foreach_lerp_(self.mean, self.weights, 1 - self.hp.ema_decay)
        elif self.hp.swa_enabled and lr_scale < SWA_START and (step + 1) % self.hp.swa_every == 0:
            self.samples += 1
            torch._foreach_lerp_(self.mean, self.weights, 1 / self.samples)

    def apply(self) -> str:
        """Put the average in the place of the weights. Returns what they now are, for the log."""
        if not self.samples:
            return "the last weights"
        torch._foreach_copy_(self.weights, self.mean)
        return f"EMA of {self.samples} steps" if self.hp.ema_enabled else f"SWA of {self.samples} samples"


# ----------------------------------------------------------------------------------------------------------------
# Quantisation: weights -> whole codes, a scale a row


def code_range(kind: Matrix | Table, hp: Hyperparameters, coarser: float = 1.0) -> tuple[int, float | None]:
    """Bits of a matrix's codes, and their range in deviations of a row, `coarser` times that of the table.

    The published rule, of #399, has int6 for the blocks and int8 for all else, and None in the place of a range.
    """
    if hp.row_range == "published":
        return (6 if isinstance(kind, Matrix) else 8), None
    return kind.bits, kind.clip * coarser


def row_scales(rows: Tensor, bits: int, clip: float | None) -> Tensor:
    """The steps (..., out, 1) between the codes of fp32 rows (..., out, in).

    A range of `clip` standard deviations, taken about zero (SDClip, #1394), gives every row the same number of levels
    and bytes, whatever the size of its weights. The published rule is the largest weight, but at least 1 (fault B13):
    most rows then share one step. Four significant bits are enough, since codes are made for the step as it is; they
    are cut by whole numbers, because a pair of casts is what a compiler may remove, and training would see other codes.
    """
    reach = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1.0) if clip is None else rows.square().mean(dim=-1, keepdim=True).sqrt() * clip
    scale = reach / (2 ** (bits - 1) - 1)
    return ((scale.view(torch.int32) + 0x80000) & -0x100000).view(torch.float32)


def to_codes(rows: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The nearest whole codes within +-(2^(bits-1) - 1), as fp32; 0 where there is no scale."""
    top = 2 ** (bits - 1) - 1
    return torch.where(scale > 0, rows / scale, 0).round().clamp(-top, top)


def quantise_rows(rows: Tensor, bits: int, clip: float | None) -> tuple[Tensor, Tensor]:
    """fp32 rows (..., out, in) -> codes (..., out, in) and scales (..., out, 1), by plain rounding."""
    scale = row_scales(rows, bits, clip)
    return to_codes(rows, scale, bits), scale


class Moments:
    """Second moments x^T x (L or 1, in, in) in fp32 of the activations that matrices read, summed over all tokens seen.

    For a matrix W that multiplies x they are the Hessian of the squared error of Wx, the same for each row of W.
    """

    def __init__(self, hp: Hyperparameters, device: torch.device):
        size = {kind.reads: (hp.num_layers, matrix_shape(kind, hp)[1]) for kind in MATRICES}
        size |= {"final": (1, hp.model_dim)} | ({"pair": (1, hp.bigram_dim)} if hp.bigram_vocab_size else {})
        self.sums = {reads: torch.zeros(layers, width, width, device=device) for reads, (layers, width) in size.items()}

    def __call__(self, reads: str, layer: int, x: Tensor) -> None:
        """Take in activations (..., in)."""
        x = x.flatten(0, -2).float()
        self.sums[reads][layer].addmm_(x.mT, x)


def gptq(weights: Tensor, hessian: Tensor, scale: Tensor, bits: int, block: int = 128) -> Tensor:
    """Codes (L, out, in) of fp32 weights (L, out, in) that keep Wx rather than W, given its Hessian (L, in, in).

    GPTQ (arXiv:2210.17323): columns are rounded one after the other, those with the largest activations first, and each
    error is made up for by the columns still open, along the inverse Hessian. Of that only the Cholesky factor is
    needed. The diagonal is raised by 1 % of its mean, which also keeps inputs that were always zero.
    """
    width = weights.size(-1)
    power = hessian.diagonal(dim1=-2, dim2=-1)  # (L, in)
    order = power.argsort(dim=-1, descending=True)
    damping = torch.where(power.mean(dim=-1) > 0, 0.01 * power.mean(dim=-1), 1.0)
    hessian = hessian + torch.diag_embed(damping[:, None].expand_as(power))
    hessian = torch.take_along_dim(torch.take_along_dim(hessian, order[:, :, None], 1), order[:, None, :], 2).double()
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True).float()
    open_columns, codes = torch.take_along_dim(weights, order[:, None, :], 2), torch.empty_like(weights)
    for first in range(0, width, block):
        part, rows = slice(first, min(first + block, width)), factor[:, first:first + block]
        inner, errors = open_columns[:, :, part].clone(), []
        for i, column in enumerate(range(first, part.stop)):
            code = to_codes(inner[:, :, i:i + 1], scale, bits)
            codes[:, :, column:column + 1] = code
            errors.append((inner[:, :, i:i + 1] - code * scale) / rows[:, i, column, None, None])
            inner[:, :, i + 1:].baddbmm_(errors[-1], rows[:, i:i + 1, column + 1:part.stop], alpha=-1)
        open_columns[:, :, part.stop:].baddbmm_(torch.cat(errors, dim=-1), rows[:, :, part.stop:], alpha=-1)
    return torch.empty_like(codes).scatter_(2, order[:, None, :].expand_as(codes), codes)


# ----------------------------------------------------------------------------------------------------------------
# Coders: codes (L, out, in) int16 -> bytes, and back, exactly and on every machine


def squeeze(raw: bytes) -> bytes:
    """LZMA2 without a container, for data without words or alignment: literal context and position bits would only cost."""
    return lzma.compress(raw, lzma.FORMAT_RAW, filters=LZMA_FILTERS)


def expand(blob: bytes, size: int) -> bytes:
    """What `squeeze` was given, if that had `size` bytes. Raises ValueError, in the memory of `size`, if not."""
    decoder = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=LZMA_FILTERS)
    try:
        raw = decoder.decompress(blob, max_length=size + 1)
    except lzma.LZMAError as error:
        raise ValueError(f"a compressed part is damaged ({error})") from error
    if len(raw) != size or not decoder.eof or decoder.unused_data:
        raise ValueError(f"a compressed part does not hold {size} bytes")
    return raw


LZMA_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 24, "lc": 0, "lp": 0, "pb": 0}]


def to_planes(values: np.ndarray) -> bytes:
    """16-bit values as all their low bytes, then all their high ones: compressors see what is alike side by side."""
    return values.astype("<i2").reshape(-1, 1).view(np.uint8).T.tobytes()


def from_planes(raw: bytes) -> np.ndarray:
    """The values (n,) int16 of `to_planes`."""
    return np.frombuffer(raw, np.uint8).reshape(2, -1).T.copy().view("<i2").ravel().astype(np.int16)


def code_planes(codes: np.ndarray) -> bytes:
    """What general compressors are given: column by column, whose codes are alike (1.5 % fewer bytes), from 0 on, so that
    codes of up to 8 bits leave the high bytes zero."""
    return to_planes(codes.transpose(0, 2, 1).ravel() + np.int16(128))


def planes_codes(raw: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    """The codes of `code_planes`."""
    layers, out, width = shape
    return (from_planes(raw) - np.int16(128)).reshape(layers, width, out).transpose(0, 2, 1)


def encode_lzma(codes: np.ndarray) -> bytes:
    """Codes (L, out, in) int16 by LZMA2."""
    return squeeze(code_planes(codes))


def decode_lzma(blob: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    """The codes (L, out, in) int16 of `encode_lzma`. Raises ValueError if they are not of this shape or damaged."""
    return planes_codes(expand(blob, 2 * math.prod(shape)), shape)


def encode_zstd(codes: np.ndarray) -> bytes:
    """Codes (L, out, in) int16 by Zstandard."""
    import zstandard

    return zstandard.ZstdCompressor(level=22).compress(code_planes(codes))


def decode_zstd(blob: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    """The codes (L, out, in) int16 of `encode_zstd`. Raises ValueError if they are not of this shape or damaged."""
    import zstandard

    size = 2 * math.prod(shape)
    try:
        if zstandard.frame_content_size(blob) != size:
            raise ValueError(f"a compressed part does not hold {size} bytes")
        return planes_codes(zstandard.ZstdDecompressor().decompress(blob, allow_extra_data=False), shape)
    except zstandard.ZstdError as error:
        raise ValueError(f"a compressed part is damaged ({error})") from error


MAX_BITS = 12  # of a code
ANS_TOTAL = 1 << 15  # the frequencies of a class add up to it
ANS_BUCKETS = 3  # classes an octave of code size


def encode_ans(codes: np.ndarray) -> bytes:
    """Asymmetric numeral systems (arXiv:1311.2540) with a table of frequencies for each class of codes.

    The class of a code is a whole number for its row plus one for its column: the sizes of the codes there, in thirds
    of an octave. That models the size of a code as a product of both. Numbers, tables and codes are all that is in the
    file; a reader computes with whole numbers only. Layout, little-endian:

        bytes of the squeezed part (uint32) | squeezed: least code, classes, codes in the tables (3 x int16), numbers of
        rows (L, out) and columns (L, in) uint8, tables (classes, codes) uint16 | words of the coder (uint32)
    """
    size = np.abs(codes).astype(np.float32)
    mean = size.mean(axis=(1, 2), keepdims=True)
    rows, columns = (_buckets(part) for part in (size.mean(axis=2), (size.mean(axis=1, keepdims=True) / np.maximum(mean, 1e-9))[:, 0]))
    order, bounds = _classes(rows, columns)
    least = int(codes.min())
    symbols = (codes.ravel()[order] - least).astype(np.int32)
    tables = np.stack([_frequencies(np.bincount(symbols[a:b], minlength=int(symbols.max()) + 1)) for a, b in zip(bounds, bounds[1:], strict=False)])
    stack, model = _ans()
    coder = stack.AnsCoder()
    for table, a, b in reversed(list(zip(tables, bounds, bounds[1:], strict=False))):  # what goes on the stack last comes off first
        if np.count_nonzero(table) > 1:
            coder.encode_reverse(symbols[a:b], model.Categorical(table.astype(np.float64), perfect=False))
    side = squeeze(b"".join((struct.pack("<3h", least, *tables.shape), rows.tobytes(), columns.tobytes(), tables.astype("<u2").tobytes())))
    return struct.pack("<I", len(side)) + side + coder.get_compressed().astype("<u4").tobytes()


def decode_ans(blob: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    """The codes (L, out, in) int16 of `encode_ans`. Raises ValueError or struct.error if they are not of this shape or damaged."""
    layers, out, width = shape
    (length,) = struct.unpack_from("<I", blob)
    head = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=LZMA_FILTERS).decompress(blob[4:4 + length], max_length=6)
    least, classes, count = struct.unpack("<3h", head)
    if not (0 < classes < 512 and 0 < count <= 1 << MAX_BITS and abs(least) < 1 << MAX_BITS):
        raise ValueError(f"{classes} tables of {count} codes from {least} are not possible")
    numbers = layers * (out + width)
    side = np.frombuffer(expand(blob[4:4 + length], 6 + numbers + 2 * classes * count), np.uint8)[6:]
    rows, columns = side[:layers * out].reshape(layers, out), side[layers * out:numbers].reshape(layers, width)
    tables = side[numbers:].view("<u2").reshape(classes, count)
    order, bounds = _classes(rows, columns)
    if len(bounds) != classes + 1 or any((tables.sum(axis=1) != ANS_TOTAL) & (np.diff(bounds) > 0)):
        raise ValueError("its tables of frequencies do not fit")
    stack, model = _ans()
    coder = stack.AnsCoder(np.frombuffer(blob, "<u4", offset=4 + length).astype(np.uint32))
    codes = np.empty(math.prod(shape), dtype=np.int16)
    for table, a, b in zip(tables, bounds, bounds[1:], strict=False):
        single = np.count_nonzero(table) <= 1
        codes[order[a:b]] = least + (table.argmax() if single else coder.decode(model.Categorical(table.astype(np.float64), perfect=False), int(b - a)))
    if not coder.is_empty():
        raise ValueError("its codes do not end where they should")
    return codes.reshape(shape)


def _ans() -> tuple:
    """constriction's stack coder and its models. Its fixed-point weights are exact for frequencies that add up to a
    power of two, so that no rounding of floats is between what was written and what is read."""
    import constriction

    return constriction.stream.stack, constriction.stream.model


def _buckets(sizes: np.ndarray) -> np.ndarray:
    number = np.rint(ANS_BUCKETS * np.log2(np.maximum(sizes, 1 / 64)))
    return (number - number.min()).astype(np.uint8)


def _classes(rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All positions in the order of their classes, and the bounds (classes + 1,) between these."""
    classes = (rows[:, :, None].astype(np.int16) + columns[:, None, :]).ravel()
    return classes.argsort(kind="stable"), np.concatenate(([0], np.bincount(classes).cumsum()))


def _frequencies(counts: np.ndarray) -> np.ndarray:
    """Counts scaled to whole numbers that add up to ANS_TOTAL: 1 for each that is not 0, the rest in proportion."""
    present = counts > 0
    shared = (ANS_TOTAL - present.sum()) * np.concatenate(([0], counts.cumsum())) // max(1, counts.sum())
    return present + np.diff(shared)


def check_coder(hp: Hyperparameters) -> None:
    """Raises UserError if the coder is not installed: better before the training than after it."""
    package = {"ans": "constriction", "zstd": "zstandard", "lzma": "lzma"}[hp.compressor]
    _rule(importlib.util.find_spec(package) is not None,
          f"COMPRESSOR={hp.compressor} needs the package {package}, which is not installed: pip install {package}, or set COMPRESSOR=lzma")


CODERS = {"ans": (encode_ans, decode_ans), "lzma": (encode_lzma, decode_lzma), "zstd": (encode_zstd, decode_zstd)}


# ----------------------------------------------------------------------------------------------------------------
# Export: codes -> artifact bytes, and back

ARTIFACT = Path("final_model.int6.xz")  # the challenge's name for it, whatever the coder
ARTIFACT_MAGIC, ARTIFACT_VERSION = b"PGOLF\r\n\x1a", 2
# What a reader takes from a file that it does not trust: bytes of the file and of its header, weights in all (in memory
# at most 20 bytes each while they are decoded).
MAX_FILE_BYTES, MAX_HEADER_BYTES, MAX_WEIGHTS = 1 << 28, 1 << 20, 1 << 26
# The knobs without which the weights mean nothing; and those that the score depends on, whose values are defaults.
MODEL_KNOBS = ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "mlp_mult", "tie_embeddings", "logit_softcap",
               "rope_base", "rope_dims", "ln_scale", "xsa_last_n", "bigram_vocab_size", "bigram_dim")
EVAL_KNOBS = ("eval_seq_len", "eval_stride")
COARSEST = 4.0  # octaves by which TARGET_BYTES may widen the steps


class Entry(NamedTuple):
    """One tensor of the artifact. Up to 12 bits are codes, with a scale a row and the range `clip`; 16 is plain fp16."""

    name: str
    shape: tuple[int, ...]
    bits: int
    clip: float | None
    nbytes: int  # of its codes in the file


def export_views(weights: dict[str, Tensor]) -> Iterator[tuple[Matrix | Table | None, str, Tensor]]:
    """Every tensor that the artifact holds, as (row of its table if it becomes codes (L, out, in), name, view of the
    weights), in file order."""
    for kind in MATRICES:
        yield kind, kind.name, bank_part(weights[kind.bank], kind)
    for name, tensor in weights.items():
        if name not in BANKS:
            yield TABLES.get(name), name, tensor[None] if name in TABLES else tensor


def pack_artifact(weights: dict[str, Tensor], hp: Hyperparameters, moments: dict[str, Tensor] | None = None,
                  facts: dict | None = None, coarser: float = 1.0) -> bytes:
    """The artifact's bytes, little-endian:

        magic (8) | version (uint16) | bytes of the header (uint32) | header (JSON) | codes, tensor by tensor |
        scales (bfloat16) and plain values (fp16) as byte planes, squeezed | sha256 of all before (32)

    `moments` of what the matrices read make the codes GPTQ's, `facts` go into the header, and steps between codes are
    `coarser` times those of the tables.
    """
    entries, streams, plain = [], [], []
    encode, _ = CODERS[hp.compressor]
    for kind, name, tensor in export_views(weights):
        if kind is None:
            plain.append(tensor.half().view(torch.int16).cpu().numpy().ravel())
            entries.append(Entry(name, tuple(tensor.shape), 16, None, 0))
            continue
        (bits, clip), hessian = code_range(kind, hp, coarser), (moments or {}).get(kind.reads)
        scale = row_scales(tensor, bits, clip)
        codes = to_codes(tensor, scale, bits) if hessian is None else gptq(tensor, hessian, scale, bits)
        streams.append(encode(codes.to(torch.int16).cpu().numpy()))
        plain.append(scale.to(torch.bfloat16).view(torch.int16).cpu().numpy().ravel())
        entries.append(Entry(name, tuple(tensor.shape), bits, clip, len(streams[-1])))
    streams.append(squeeze(to_planes(np.concatenate(plain))))
    header = json.dumps({**{group: {name: getattr(hp, name) for name in names} for group, names in (("model", MODEL_KNOBS), ("evaluation", EVAL_KNOBS))},
                         **(facts or {}), "coder": hp.compressor, "tensors": entries}).encode()
    body = b"".join((ARTIFACT_MAGIC, struct.pack("<HI", ARTIFACT_VERSION, len(header)), header, *streams))
    return body + hashlib.sha256(body).digest()


def fit_artifact(weights: dict[str, Tensor], hp: Hyperparameters, moments: dict[str, Tensor], facts: dict, room: float, say: Callable) -> bytes:
    """The artifact with the finest steps, at least those of the tables, that has at most `room` bytes.

    An octave of coarser steps saves about a bit a weight, which makes a good guess; a bracket holds the guesses in.
    Raises UserError if no step is coarse enough.
    """
    blob = pack_artifact(weights, hp, moments, facts)
    if len(blob) <= room or hp.row_range == "published":
        return blob
    coded = sum(tensor.numel() for kind, _, tensor in export_views(weights) if kind)
    octaves, low, high, slack, best = 0.0, 0.0, COARSEST, room / 1000, None
    for _ in range(12):
        guess = octaves + (len(blob) - room + slack / 2) * 8 / coded
        octaves = guess if low < guess < high else high if best is None and high - low < 0.1 else (low + high) / 2
        blob = pack_artifact(weights, hp, moments, facts, 2**octaves)
        say(f"export: steps {2**octaves:.3f} times coarser give {len(blob)} bytes where {room} are left")
        if len(blob) <= room:
            best, high = blob, octaves
        else:
            low = octaves
        if best is not None and room - len(best) <= slack:
            break
    _rule(best is not None, f"TARGET_BYTES={hp.target_bytes} cannot be met: steps {2**COARSEST:.0f} times coarser leave {len(blob)} bytes "
                            f"where {room} are left beside the code; make the model smaller")
    return best


def open_artifact(blob: bytes) -> tuple[dict, Hyperparameters, list[Entry], int]:
    """(header, knobs of the model, tensors, where their bytes begin), all checked before anything is made after them.

    Raises ValueError where the file is not as written. No content of a file is ever run.
    """
    start = len(ARTIFACT_MAGIC) + 6
    if not blob.startswith(ARTIFACT_MAGIC) or len(blob) < start + 32:
        raise ValueError("it is not an artifact of this script")
    version, length = struct.unpack_from("<HI", blob, len(ARTIFACT_MAGIC))
    if version != ARTIFACT_VERSION:
        raise ValueError(f"its format has version {version}, but this script knows version {ARTIFACT_VERSION} only")
    if len(blob) > MAX_FILE_BYTES or hashlib.sha256(blob[:-32]).digest() != blob[-32:]:
        raise ValueError("its checksum is wrong" if len(blob) <= MAX_FILE_BYTES else f"it has over {MAX_FILE_BYTES} bytes")
    if length > min(MAX_HEADER_BYTES, len(blob) - start - 32):
        raise ValueError(f"its header claims {length} bytes")
    header = json.loads(blob[start:start + length])
    entries = [Entry(name, tuple(shape), bits, clip, nbytes) for name, shape, bits, clip, nbytes in header["tensors"]]
    hp = Hyperparameters.from_env({name.upper(): str(header["model"][name]) for name in MODEL_KNOBS}
                                  | {name.upper(): str(header["evaluation"][name]) for name in EVAL_KNOBS})
    with torch.device("meta"):  # shapes without memory
        wanted = [(kind, name, tuple(tensor.shape)) for kind, name, tensor in export_views(dict(GPT(hp, None, torch.float32).named_parameters()))]
    if sum(math.prod(shape) for _, _, shape in wanted) > MAX_WEIGHTS:
        raise ValueError(f"its model has over {MAX_WEIGHTS} weights")
    if [(name, shape) for _, name, shape in wanted] != [(entry.name, entry.shape) for entry in entries]:
        raise ValueError("its tensors are not those of its model")
    for (kind, _, _), entry in zip(wanted, entries, strict=True):
        if type(entry.bits) is not int or type(entry.nbytes) is not int or entry.nbytes < 0 or (kind is None) != (entry.bits == 16):
            raise ValueError(f"its tensor {entry.name} is described in a way that is not possible")
    if header["coder"] not in CODERS or sum(entry.nbytes for entry in entries) > len(blob) - start - length - 32:
        raise ValueError("it is shorter than its tensors, or of an unknown coder")
    return header, hp, entries, start + length


def decode_artifact(blob: bytes) -> Iterator[tuple[Entry, np.ndarray | None, Tensor]]:
    """Each tensor's entry, codes (L, out, in) int16 if it has any, and fp32 values. Raises ValueError as `open_artifact`."""
    header, _, entries, offset = open_artifact(blob)
    _, decode = CODERS[header["coder"]]
    counts = [math.prod(entry.shape[:2] if entry.bits < 16 else entry.shape) for entry in entries]
    squeezed = blob[offset + sum(entry.nbytes for entry in entries):-32]
    plain = torch.from_numpy(from_planes(expand(squeezed, 2 * sum(counts))))
    for entry, values in zip(entries, plain.split(counts), strict=True):
        if entry.bits == 16:
            yield entry, None, values.view(torch.float16).float().view(entry.shape)
            continue
        codes = decode(blob[offset:offset + entry.nbytes], entry.shape)
        scale = values.view(torch.bfloat16).float().view(*entry.shape[:2], 1)
        yield entry, codes, torch.from_numpy(codes.astype(np.float32)) * scale
        offset += entry.nbytes


def load_artifact(blob: bytes, model: GPT) -> None:
    """Put the artifact's weights into the model. Raises ValueError if they are of another one."""
    _, hp, _, _ = open_artifact(blob)
    differing = [name for name in MODEL_KNOBS if getattr(hp, name) != getattr(model.hp, name)]
    if differing:
        raise ValueError("it was made with " + ", ".join(f"{n.upper()}={getattr(hp, n)} (here {getattr(model.hp, n)})" for n in differing))
    weights = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    for (_, _, view), (_, _, values) in zip(export_views(weights), decode_artifact(blob), strict=True):
        view.copy_(values)
    model.load(weights)


def artifact_hyperparameters(path: str, blob: bytes, environ: dict[str, str]) -> Hyperparameters:
    """The knobs of `environ`, with those that shape the model from the artifact, and its windows of evaluation unless
    `environ` has others. Raises UserError if model or tokenizer are not those of the artifact."""
    with reading_artifact(path):
        header, made, _, _ = open_artifact(blob)
    hp = Hyperparameters.from_env({name.upper(): str(getattr(made, name)) for name in MODEL_KNOBS + EVAL_KNOBS} | environ)
    for name in MODEL_KNOBS:
        _rule(getattr(hp, name) == getattr(made, name),
              f"{name.upper()}={getattr(hp, name)} is set, but EVAL_ONLY={path} was made with {getattr(made, name)}: unset {name.upper()}")
    digest = header.get("tokenizer_sha256")
    _rule(not digest or not Path(hp.tokenizer_path).is_file() or sha256_of(hp.tokenizer_path) == digest,
          f"TOKENIZER_PATH={hp.tokenizer_path} is not the tokenizer of EVAL_ONLY={path}, by the sha256 in that: set it to that one")
    return hp


def read_artifact(path: str | Path) -> bytes:
    """The file's bytes. Raises UserError if it cannot be read or is larger than any artifact."""
    with reading_artifact(path):
        size = Path(path).stat().st_size
        if size > MAX_FILE_BYTES:
            raise ValueError(f"it has {size} bytes, more than the {MAX_FILE_BYTES} of any artifact")
        return Path(path).read_bytes()


@contextlib.contextmanager
def reading_artifact(path: str | Path):
    """Turn whatever is wrong with an artifact into a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read artifact {path}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError, struct.error, lzma.LZMAError, UserError) as error:
        reason = _reason(error)
        if not isinstance(error, ValueError | UserError) or isinstance(error, json.JSONDecodeError | UnicodeError):  # not a sentence of ours
            reason = f"its content is not as it should be ({type(error).__name__}: {reason})"
        raise UserError(f"artifact {path} cannot be used: {reason}; it may be truncated or altered, copy it again") from error


def inspection(path: str) -> str:
    """What --inspect prints: the header, and for each tensor its shape, bits, range and bytes."""
    blob = read_artifact(path)
    with reading_artifact(path):
        header, _, entries, start = open_artifact(blob)
        lines = [f"{path}: {len(blob)} bytes, sha256 {hashlib.sha256(blob).hexdigest()}",
                 *(f"  {key}: {json.dumps(value)}" for key, value in header.items() if key != "tensors"),
                 f"  {'tensor':12} {'shape':>18} {'bits':>5} {'clip':>7} {'entropy':>8} {'coded':>8} {'bytes':>10}   (bits a code)"]
        for entry, codes, values in decode_artifact(blob):
            row = f"  {entry.name:12} {'x'.join(map(str, entry.shape)) or 'scalar':>18} {entry.bits:5}"
            if codes is None:
                lines.append(f"{row} {'':7} {'':8} {16:8} {2 * values.numel():10}   before squeezing")
            else:
                clip = "max" if entry.clip is None else f"{entry.clip:.3f}"
                lines.append(f"{row} {clip:>7} {order0_entropy(codes) / codes.size:8.4f} {8 * entry.nbytes / codes.size:8.4f} {entry.nbytes:10}")
    coded = sum(entry.nbytes for entry in entries)
    return "\n".join([*lines, f"  codes {coded}, scales and plain values {len(blob) - start - coded - 32}, header and checksum {start + 32} bytes"])


def order0_entropy(codes: np.ndarray) -> float:
    """Bits of codes (L, ...) by their frequencies alone, those of each of the L matrices for itself."""
    total = 0.0
    for matrix in codes:
        counts = np.unique(matrix, return_counts=True)[1]
        total += float((counts * np.log2(matrix.size / counts)).sum())
    return total


# ----------------------------------------------------------------------------------------------------------------
# Evaluation


class Score(NamedTuple):
    """A result over the validation stream, or over so much of it as was scored."""

    nats: float  # mean per token
    bits_per_byte: float
    seconds: float
    targets: int
    nbytes: int

    def fields(self, digits: int = 8) -> str:
        return f"val_loss:{self.nats:.{digits}f} val_bpb:{self.bits_per_byte:.{digits}f}"


class Interrupted(Exception):
    """Ctrl-C during an evaluation, with the score of what was scored until then."""


class Windows(NamedTuple):
    """Arrays (N,): each window reads the inputs [start, stop) of the stream and scores those from `scored` on."""

    start: np.ndarray
    scored: np.ndarray
    stop: np.ndarray

    def select(self, which: np.ndarray) -> "Windows":
        return Windows(*(column[which] for column in self))


def plan_windows(spans: np.ndarray, window: int, stride: int) -> Windows:
    """Windows of `window` inputs that score every input of the spans (S, 2) once.

    In each span they begin `stride` apart. The first scores all it reads, each later one its last `stride` inputs, so
    that a target has at least window - stride inputs before it. What lies after a target plays no part in where its
    window lies: the last one may reach over the end of the span, where it scores nothing.
    """
    begin, end = spans.T
    count = 1 + np.maximum(0, -(-(end - begin - window) // stride))
    span = np.repeat(np.arange(len(spans)), count)
    number = np.arange(len(span)) - np.repeat(count.cumsum() - count, count)
    start = begin[span] + number * stride
    return Windows(start, np.where(number == 0, start, start + window - stride), np.minimum(start + window, end[span]))


def eval_rows(hp: Hyperparameters, runtime: Runtime, width: int) -> int:
    """Windows of `width` tokens that one rank scores at once."""
    return max(1, min(hp.val_batch_size // runtime.ranks.size, micro_batch_tokens(hp, runtime.device)) // width)


class Evaluator:
    """Scores windows of the validation stream; `nats` (n + 1,) has the loss of each target that this rank has scored, NaN
    for the others (the last place takes what is computed but not scored).

    Ranks take equal parts of the windows. Batches come in few shapes, the last of each filled up, so that a compiled
    forward meets no new one. Where a window scores but its end, the last layer and the head compute but that.
    """

    def __init__(self, forward: Callable, val: Validation, hp: Hyperparameters, runtime: Runtime, stride: int, progress: Callable):
        self.forward, self.val, self.hp, self.runtime, self.stride, self.progress = forward, val, hp, runtime, stride, progress
        self.nats = torch.full((val.targets + 1,), math.nan, device=runtime.device)
        self.count = torch.zeros((), dtype=torch.int64, device=runtime.device)
        self.started = self.said = time.perf_counter()

    def take(self, nats: Tensor, target: Tensor, counts: Tensor, share: float) -> None:
        """Note the losses (rows, m) of the targets with these numbers, where `counts`; `share` of all is then done."""
        self.nats.scatter_(0, torch.where(counts, target, self.val.targets).flatten(), nats.flatten().float())
        self.count += counts.sum()
        if time.perf_counter() - self.said > 10:
            self.said = time.perf_counter()
            spent = self.said - self.started
            self.progress(f"evaluating stride:{self.stride} done:{100 * share:.1f}% bpb_so_far:{self._sums()[1]:.4f} "
                          f"eta:{spent / max(share, 1e-3) - spent:.0f}s")

    @torch.no_grad()
    def score(self, windows: Windows, done: float = 0.0, share: float = 1.0) -> None:
        """Score these windows, which are the part from `done` to `done + share` of all, for the progress."""
        full, ranks, finished = self.hp.eval_seq_len, self.runtime.ranks, 0
        tails = self.stride * (windows.scored > windows.start)
        widths = np.full(len(tails), full)
        for narrower in (full // 2, full // 4, full // 8):  # documents that are shorter than a window
            widths[(windows.stop - windows.start <= narrower) & (tails == 0) & (narrower >= 64)] = narrower
        for width, tail in sorted(set(zip(widths.tolist(), tails.tolist(), strict=True)), key=lambda shape: (-shape[0], shape[1])):
            members = np.flatnonzero((widths == width) & (tails == tail))
            mine = members[len(members) * ranks.rank // ranks.size:len(members) * (ranks.rank + 1) // ranks.size]
            rows = eval_rows(self.hp, self.runtime, width)
            for first in range(0, len(mine), rows):
                finished += min(rows, len(mine) - first) * ranks.size
                self._batch(windows.select(mine[first:first + rows]), rows, width, tail, done + share * min(1.0, finished / len(widths)))

    def _batch(self, windows: Windows, rows: int, width: int, tail: int, share: float) -> None:
        """One forward. Rows that are left over repeat the last window and score nothing."""
        spare, device, last = rows - len(windows.start), self.runtime.device, self.val.targets - 1
        start, scored, stop = (torch.from_numpy(np.pad(column, (0, spare), mode="edge"))[:, None].to(device) for column in windows)
        position = start + torch.arange(width, device=device)  # (rows, width)
        target = position[:, -tail:]  # all of it if tail is 0
        counts = (target >= scored) & (target < stop) & (torch.arange(rows, device=device) < rows - spare)[:, None]
        ids, targets = self.val.tokens[position.clamp(max=last)].long(), self.val.tokens[target.clamp(max=last) + 1].long()
        nats = self.forward(ids, targets, reduction="none", **({"tail": tail} if tail else {}))
        self.take(nats, target, counts, share)

    def _sums(self, ranks: Ranks | None = None) -> tuple[float, float, int, int, int]:
        """(nats a token, bits a byte, scored targets, their bytes, scores) of these ranks, by default this one alone."""
        nats = self.nats[:-1]
        scored = ~nats.isnan()
        sums = [nats.nan_to_num(0).sum(dtype=torch.float64), scored.sum(), (self.val.nbytes * scored).sum(dtype=torch.int64), self.count]
        totals = torch.stack([value.double() for value in sums])
        if ranks:
            ranks.all_reduce(totals)()
        total, targets, nbytes, count = totals.tolist()
        return total / max(targets, 1), total / math.log(2) / max(nbytes, 1), int(targets), int(nbytes), int(count)

    def result(self, whole: bool = True) -> Score:
        """The score over all ranks. Raises RuntimeError if not every target was scored exactly once, and with finite loss."""
        *score, targets, nbytes, count = self._sums(self.runtime.ranks if whole else None)
        if whole and (targets, nbytes, count) != (self.val.targets, self.val.total_bytes, self.val.targets):
            raise RuntimeError(f"scored {targets} targets of {nbytes} bytes in {count} scores instead of {self.val.targets} of {self.val.total_bytes}")
        return Score(*score, time.perf_counter() - self.started, targets, nbytes)


def evaluate(forward: Callable, val: Validation, hp: Hyperparameters, runtime: Runtime, stride: int, progress: Callable = lambda text: None) -> Score:
    """Score every target of the validation stream once, with windows of T = EVAL_SEQ_LEN tokens, `stride` apart: of the
    stream as it is, or with EVAL_DOCUMENTS of each document alone. stride = T gives windows side by side.

    `progress` gets a line every ten seconds. Raises Interrupted, with what this rank has scored, on Ctrl-C.
    """
    evaluator = Evaluator(forward, val, hp, runtime, stride, progress)
    try:
        evaluator.score(plan_windows(val.spans(hp.eval_documents), hp.eval_seq_len, stride))
    except KeyboardInterrupt:
        raise Interrupted(evaluator.result(whole=False)) from None
    return evaluator.result()


# ----------------------------------------------------------------------------------------------------------------
# Test-time training: learning from the validation text, each target only after it was scored (conditions C1 to C4)


class ScoreFirst:
    """Scores the validation stream and learns from what it has scored, with an Evaluator as its only way to a score.

    sgd: chunk after chunk of the packed stream is scored by sliding windows, then a few epochs of SGD on all weights
    take in its targets; the last chunk is not learned from. Ranks share windows and sequences, and all take one step.

    lora: each document for itself, with low-rank changes (arXiv:2106.09685) to some matrices that begin at zero. Its
    chunks are scored one after the other; the same forward pass that scores a chunk gives the gradient for one step of
    AdamW after it. Documents of like length go together. Ranks share the documents.

    After EVAL_MAX_SECONDS nothing is learned any more, and the rest is scored as it then is.
    """

    def __init__(self, model: GPT, evaluator: Evaluator, log: Log):
        self.model, self.evaluator, self.log = model, evaluator, log
        self.hp, self.val, self.runtime = evaluator.hp, evaluator.val, evaluator.runtime
        self.out_of_time = False

    def run(self) -> Score:
        """The score. Changes the model's weights (sgd). Raises Interrupted as `evaluate` does."""
        try:
            self.sgd() if self.hp.ttt_mode == "sgd" else self.lora()
        except KeyboardInterrupt:
            raise Interrupted(self.evaluator.result(whole=False)) from None
        return self.evaluator.result()

    def time_is_up(self, share: float) -> bool:
        """Whether rank 0 says so; all ranks ask together."""
        if self.hp.eval_max_seconds and not self.out_of_time:
            seconds = time.perf_counter() - self.evaluator.started if self.runtime.ranks.rank == 0 else 0.0
            spent = torch.tensor(seconds, device=self.runtime.device)
            self.runtime.ranks.all_reduce(spent)()
            self.out_of_time = float(spent) > self.hp.eval_max_seconds
            if self.out_of_time:
                self.log.line(f"ttt: EVAL_MAX_SECONDS={self.hp.eval_max_seconds:g} are over after {100 * share:.1f}% of the text; "
                              "the rest is scored without further training")
        return self.out_of_time

    def sgd(self) -> None:
        """Score and learn chunk by chunk."""
        hp, chunk = self.hp, self.hp.ttt_chunk_tokens
        windows = plan_windows(self.val.spans(hp.eval_documents), hp.eval_seq_len, hp.eval_stride)
        chunks = -(-self.val.targets // chunk)
        parameters = dict(self.model.named_parameters())
        weights = {name: p.detach().float().clone() for name, p in parameters.items()}  # steps are too small for bfloat16
        momentum = {name: torch.zeros_like(w) for name, w in weights.items()}
        for number in range(chunks):
            self.evaluator.score(windows.select(windows.scored // chunk == number), number / chunks, 1 / chunks)
            if number == chunks - 1 or self.time_is_up((number + 1) / chunks):
                continue
            rate = hp.ttt_lr * 0.5 * (1 + math.cos(math.pi * number / (chunks - 1)))
            for _ in range(hp.ttt_epochs):
                for name, gradient in self._gradients(parameters, number * chunk).items():
                    momentum[name].mul_(hp.ttt_momentum).add_(gradient)
                    weights[name].sub_(momentum[name], alpha=rate)
                self.model.load(weights)

    def _gradients(self, parameters: dict[str, nn.Parameter], begin: int) -> dict[str, Tensor]:
        """Mean gradient of the chunk that begins there, over all ranks, clipped to norm 1; zero for frozen blocks."""
        hp, ranks = self.hp, self.runtime.ranks
        length = min(hp.train_seq_len, hp.ttt_chunk_tokens)
        starts = range(begin, begin + hp.ttt_chunk_tokens - length + 1, length)
        total = torch.zeros(sum(p.numel() for p in parameters.values()), device=self.runtime.device)
        rows = max(1, micro_batch_tokens(hp, self.runtime.device) // length)
        mine = torch.tensor(starts[ranks.rank::ranks.size], dtype=torch.int64, device=self.runtime.device)
        for part in mine.split(rows) if len(mine) else ():
            position = part[:, None] + torch.arange(length, device=part.device)
            loss = self.model(self.val.tokens[position].long(), self.val.tokens[position + 1].long()) * (len(part) / len(starts))
            total += torch.cat([gradient.flatten().float() for gradient in torch.autograd.grad(loss, list(parameters.values()))])
        ranks.all_reduce(total)()
        found = {name: part.view_as(p) for (name, p), part in
                 zip(parameters.items(), total.split([p.numel() for p in parameters.values()]), strict=True)}
        for name, gradient in found.items():
            if name in BANKS:
                gradient.unflatten(0, (-1, hp.num_layers))[:, :hp.ttt_freeze_blocks] = 0
            elif name in LAYERED:
                gradient[:hp.ttt_freeze_blocks] = 0
        total *= (1 / (torch.linalg.vector_norm(total) + 1e-6)).clamp(max=1)
        return found

    def lora(self) -> None:
        """Score and learn document by document, many at once."""
        spans = self.val.spans(documents=True)
        spans = spans[np.argsort(spans[:, 0] - spans[:, 1], kind="stable")]  # the longest first
        window, ranks, done = self.hp.eval_seq_len, self.runtime.ranks, 0
        lengths = np.concatenate(([0], (spans[:, 1] - spans[:, 0]).cumsum())) / self.val.targets  # share of the text until each
        while done < len(spans):
            width = min(window, -(-int(spans[done, 1] - spans[done, 0]) // self.hp.ttt_lora_chunk) * self.hp.ttt_lora_chunk)
            group = spans[done:done + ranks.size * max(1, micro_batch_tokens(self.hp, self.runtime.device) // width)]
            if self.time_is_up(lengths[done]):
                self.evaluator.score(plan_windows(spans[done:], window, self.hp.eval_stride), lengths[done], 1 - lengths[done])
                return
            if len(group[ranks.rank::ranks.size]):
                self._documents(group[ranks.rank::ranks.size], lengths[done], lengths[done + len(group)] - lengths[done])
            done += len(group)

    def _documents(self, spans: np.ndarray, done: float, share: float) -> None:
        """Score these documents, side by side, each with changes of its own; the longest comes first."""
        hp, device, step = self.hp, self.runtime.device, self.hp.ttt_lora_chunk
        adapter = new_adapter(hp, len(spans), device)
        adam = torch.optim.AdamW([matrix for pair in adapter.values() for matrix in pair], lr=hp.ttt_lora_lr, betas=(0.9, 0.99), weight_decay=0.0)
        begin, end = (torch.from_numpy(column.copy())[:, None].to(device) for column in spans.T)
        longest = int((spans[:, 1] - spans[:, 0]).max())
        for first in range(0, longest, step):
            start, live = max(0, first + step - hp.eval_seq_len), int((spans[:, 1] - spans[:, 0] > first).sum())
            position = begin[:live] + torch.arange(start, first + step, device=device)
            target = position[:, -step:]
            counts = target < end[:live]
            position, safe = position.clamp(max=self.val.targets - 1), target.clamp(max=self.val.targets - 1)
            with torch.enable_grad():
                own = {name: (a[:live], b[:live]) for name, (a, b) in adapter.items()}
                nats = self.model(self.val.tokens[position].long(), self.val.tokens[safe + 1].long(), "none", tail=step, adapter=own)
            self.evaluator.take(nats.detach(), target, counts, done + share * first / longest)
            if first + step < longest:
                adam.zero_grad()
                ((nats * counts).sum(dim=1) / counts.sum(dim=1).clamp(min=1)).sum().backward(inputs=[m for pair in adapter.values() for m in pair])
                adam.step()


def new_adapter(hp: Hyperparameters, documents: int, device: torch.device) -> Adapter:
    """Low-rank changes that change nothing yet: random A (documents, L, rank, in), the same for all, and B of zeros."""
    generator, adapter = torch.Generator().manual_seed(0), {}
    for kind in MATRICES:
        if kind.name in LORA_KINDS:
            out, into = matrix_shape(kind, hp)
            a = torch.randn(hp.num_layers, hp.ttt_lora_rank, into, generator=generator) / into**0.5
            adapter[kind.name] = (a.to(device).repeat(documents, 1, 1, 1).requires_grad_(),
                                  torch.zeros(documents, hp.num_layers, out, hp.ttt_lora_rank, device=device, requires_grad=True))
    return adapter


# ----------------------------------------------------------------------------------------------------------------
# Training


def micro_batch_tokens(hp: Hyperparameters, device: torch.device) -> int:
    """Tokens of one forward: on a GPU what 8 ranks take of the record's batch, on a CPU what fits a laptop's memory."""
    return hp.micro_batch_tokens or (98_304 if device.type == "cuda" else 16_384)


def micro_batches(hp: Hyperparameters, runtime: Runtime, rows: int) -> int:
    """Into how many equal parts a rank divides its `rows` sequences of a step: as few as the micro-batch allows."""
    fitting = max(1, micro_batch_tokens(hp, runtime.device) // hp.train_seq_len)
    return next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= fitting)


def compile_model(model: GPT, runtime: Runtime) -> Callable:
    """The model's forward, compiled whole if the runtime compiles. One graph for each set of shapes and switches."""
    if not runtime.compiled:
        return model
    # Inductor's mix-order reduction (torch 2.10 on) made this model 6 ms a step slower on 8 x H100 (pytorch #179494).
    triton = torch._inductor.config.triton
    options = {"triton.mix_order_reduction": False} if hasattr(triton, "mix_order_reduction") else None
    torch._dynamo.config.recompile_limit = 32  # training, late QAT, and the few shapes of evaluation are all meant to be
    return torch.compile(model, dynamic=False, fullgraph=True, options=options)


class Profile:
    """Milliseconds of the parts of a step, by device events (on a CPU by the clock); nothing unless steps are asked for."""

    def __init__(self, steps: int, device: torch.device):
        self.device, self.skip, self.steps = device, 2, steps  # the first steps are no measure of the rest
        self.marks, self.times = [], []

    def mark(self, part: str) -> None:
        """From here on time belongs to `part`."""
        if self.steps and not self.skip:
            self.marks.append((part, self._now()))

    def _now(self) -> torch.cuda.Event | float:
        if self.device.type != "cuda":
            return 1000 * time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end_step(self) -> None:
        """The last part of the step is over."""
        self.mark("")
        if self.steps and self.skip:
            self.skip -= 1
        elif self.steps:
            self.steps -= 1
            self.times.append(self.marks)
            self.marks = []

    def table(self) -> str:
        """Medians over the steps, one part a line; empty before the last of the steps, and after it was asked for once."""
        if self.steps or not self.times:
            return ""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        spent: list[dict[str, float]] = []
        for marks in self.times:
            spent.append({})
            for (part, begin), (_, end) in zip(marks, marks[1:], strict=False):
                elapsed = end - begin if isinstance(begin, float) else begin.elapsed_time(end)
                spent[-1][part] = spent[-1].get(part, 0.0) + elapsed
        self.times = []
        totals = [sum(step.values()) for step in spent]
        rows = [(part, statistics.median(step[part] for step in spent)) for part in spent[0]] + [("step", statistics.median(totals))]
        return "\n".join([f"profile of {len(spent)} steps, medians in ms", *(f"  {part:18}{value:10.3f}" for part, value in rows)])


class Training:
    """A run: model, optimizers, data and clock, and the loop over them."""

    def __init__(self, hp: Hyperparameters, runtime: Runtime, log: Log, val: Validation):
        self.hp, self.runtime, self.log, self.val = hp, runtime, log, val
        self.loader = TrainingLoader(hp, runtime)
        self.accumulation = micro_batches(hp, runtime, self.loader.rows)
        self.model = GPT(hp, runtime.attend, runtime.dtype)
        weights = self.model.initialise(hp.seed)
        self.forward = compile_model(self.model.to(runtime.device), runtime)
        self.optimizers = Optimizers(self.model, weights, hp, runtime.ranks, self.accumulation, runtime.compiled)
        self.average = WeightAverage(self.optimizers.owned(), hp)
        self.profile = Profile(hp.profile_steps, runtime.device)
        # On a GPU the host stays up to two steps ahead, so that the device never waits for it.
        self.depth = 2 if runtime.device.type == "cuda" else 0
        self.watch, self.clock, self.in_flight = Stopwatch(), Clock(hp.max_wallclock_seconds, self.depth), deque()

    def train_step(self, step: int, moment: Moment) -> Tensor:
        """Forward, backward and update on batch `step`. Returns (2,) on the device: mean loss, rank 0's clock."""
        ranks, flat, mark = self.runtime.ranks, self.optimizers.flat, self.profile.mark
        mark("data")
        for rows in self.loader.batch(step).chunk(self.accumulation):
            ids = rows.to(torch.int64)
            mark("forward")
            loss = self.forward(ids[:, :-1], ids[:, 1:], qat=moment.qat) / (self.accumulation * ranks.size)
            mark("backward")
            loss.backward()
            self.optimizers.accumulate()
            flat[-2] += loss.detach()
        flat[-1].fill_(self.watch.seconds() if ranks.rank == 0 else 0.0)
        report = self.optimizers.step(moment.lr_scale, moment.momentum, mark)
        mark("average")
        self.average.update(step, moment.lr_scale)
        mark("communication")
        self.optimizers.finish()
        self.profile.end_step()
        return report

    def warm_up(self) -> None:
        """Run every graph and collective that the run will use, before its clock starts, then undo all effects."""
        started = time.perf_counter()
        self._rehearse_moments()
        if not self.hp.warmup_steps:
            return
        weights = [tensor.clone() for tensor in self.optimizers.owned()]
        self.watch.start()
        asked = []
        for step in range(self.hp.warmup_steps):
            if step == 0 and self.runtime.compiled:
                self.log.line("warmup: compiling the training step (the first time: minutes; later runs reuse the cache)")
            report = self.train_step(step, Moment(1.0, self.hp.muon_momentum_warmup_start, qat=False))
            asked.append(float(report[1]))
            if step in (0, self.hp.warmup_steps - 1):
                self.log.line(f"warmup_step:{step + 1}/{self.hp.warmup_steps} seconds:{time.perf_counter() - started:.1f}")
        if self.hp.late_qat:
            self.log.line("warmup: the same with late QAT")
            self.train_step(0, Moment(1.0, self.hp.muon_momentum_warmup_start, qat=True))
        self.log.line("warmup: evaluation")
        window, stride = self.hp.eval_seq_len, self.hp.eval_stride
        blank = torch.zeros(eval_rows(self.hp, self.runtime, window), window, dtype=torch.int64, device=self.runtime.device)
        with torch.no_grad():
            self.forward(blank, blank.clone(), reduction="none")
            if stride < window:
                self.forward(blank, blank[:, :stride].clone(), reduction="none", tail=stride)
        torch._foreach_copy_(self.optimizers.owned(), weights)
        self.optimizers.publish()
        self.optimizers.reset()
        self.average.reset()
        self.runtime.synchronize()
        self.watch, self.profile = Stopwatch(), Profile(self.hp.profile_steps, self.runtime.device)
        if len(asked) > 1:
            self.clock.expect(asked[-1] - asked[-2])
        self.log.line(f"warmup: done seconds:{time.perf_counter() - started:.1f}")
        self.log.event("warmup", wall_seconds=time.perf_counter() - started)

    def train(self) -> None:
        """Steps until ITERATIONS or the wall clock end, with validations in between (the clock stands still for them)."""
        gc.collect()
        gc.freeze()  # long-lived objects out of the collector's sight: its full passes stall a step
        for step in range(self.hp.iterations + 1):
            done, fits = step == self.hp.iterations, self.clock.fits(step)
            if done or not fits or (self.hp.val_loss_every and step % self.hp.val_loss_every == 0):
                self._settle(0)
                self.watch.pause()
                self._validate(step)
                if not done and not fits:
                    self.log.line(f"stopping_early: wallclock_cap train_time:{1000 * self.watch.total:.0f}ms step:{step}/{self.hp.iterations}")
                    self.log.event("stopping_early", step=step, train_seconds=self.watch.total)
                if done or not fits:
                    break
            if self.watch.since is None:
                self.watch.start()
            moment = schedule(self.hp, step, self.clock.begins(step), self.clock.step_seconds)
            report = self.train_step(step, moment)
            self.in_flight.append((step, moment, *self._fetch(report)))
            self._settle(self.depth if step > 1 else 0)  # run ahead only once it is known how long a step takes

    def finish(self) -> tuple[str, dict[str, Tensor]]:
        """Put the average in the place of the weights, on all ranks, and see what its matrices read, within the wall
        clock. Returns what the weights now are and the second moments by the names of the tables."""
        self.watch.start()
        begun = self.watch.total
        averaged = self.average.apply()
        self.optimizers.publish()
        moments = self._moments(self.clock.step + 1, self.hp.gptq_batches) if self.hp.gptq_batches else {}
        self.watch.pause()
        if moments:
            self.log.line(f"gptq: second moments of {self.hp.gptq_batches * self.hp.train_batch_tokens} training tokens "
                          f"took {1000 * (self.watch.total - begun):.0f}ms train_time:{1000 * self.watch.total:.0f}ms")
            self.log.event("gptq", batches=self.hp.gptq_batches, train_seconds=self.watch.total, wall_seconds=self.watch.total - begun)
        return averaged, moments

    @torch.no_grad()
    def _moments(self, first: int, batches: int) -> dict[str, Tensor]:
        """Second moments over training batches `first`, `first` + 1, ..., of all ranks. Not compiled: it runs but once."""
        moments = Moments(self.hp, self.runtime.device)
        for step in range(first, first + batches):
            for rows in self.loader.batch(step).chunk(self.accumulation):
                self.model(rows[:, :-1].to(torch.int64), watch=moments)
        for arrived in [self.runtime.ranks.all_reduce(total) for total in moments.sums.values()]:
            arrived()
        self.runtime.synchronize()
        return moments.sums

    def _rehearse_moments(self) -> None:
        """Learn how long `finish` will take, and keep that time of the wall clock for it: rank 0's word for all."""
        if not (self.hp.gptq_batches and self.hp.max_wallclock_seconds):
            return
        for _ in range(2):  # the first one also loads kernels
            began = time.perf_counter()
            self._moments(0, 1)
            took = torch.tensor(time.perf_counter() - began if self.runtime.ranks.rank == 0 else 0.0, device=self.runtime.device)
        self.runtime.ranks.all_reduce(took)()
        self.clock.reserve(1.1 * float(took) * self.hp.gptq_batches)
        self.log.line(f"warmup: {self.hp.max_wallclock_seconds - self.clock.cap:.2f} s of the wall clock are kept for GPTQ")

    def _fetch(self, report: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start the report's way to the host; the event tells when it is there, and with it the whole step."""
        if report.device.type != "cuda":
            return report, None
        values = torch.empty(report.shape, pin_memory=True)
        values.copy_(report, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return values, event

    def _settle(self, depth: int) -> None:
        """Take in the reports of all but the last `depth` steps."""
        while len(self.in_flight) > depth:
            step, moment, values, event = self.in_flight.popleft()
            if event is not None:
                event.synchronize()
            loss, seconds = values.tolist()
            self.clock.agree(step, seconds)
            _rule(math.isfinite(loss), f"the training loss of step {step + 1} is {loss}: lower MATRIX_LR, SCALAR_LR or TIED_EMBED_LR, "
                                       "or look at the data of that step")
            if step < 10 or (step + 1) % self.hp.train_log_every == 0:
                self._log_step(step + 1, loss, moment)
            if table := self.profile.table():
                self.log.line(table)

    def _log_step(self, step: int, loss: float, moment: Moment) -> None:
        hp, seconds = self.hp, self.watch.seconds()
        rate = step * hp.train_batch_tokens / seconds
        peak = peak_flops(self.runtime.device)
        mfu = f" mfu:{rate * flops_per_token(hp) / (peak * self.runtime.ranks.size):.3f}" if peak else ""
        left = (hp.iterations - step) * seconds / step
        if hp.max_wallclock_seconds:
            left = min(left, hp.max_wallclock_seconds - seconds)
        self.log.line(f"step:{step}/{hp.iterations} train_loss:{loss:.4f} train_time:{1000 * seconds:.0f}ms step_avg:{1000 * seconds / step:.2f}ms "
                      f"tok_s:{rate:.0f}{mfu} lr_scale:{moment.lr_scale:.4f} momentum:{moment.momentum:.4f} qat:{int(moment.qat)} eta:{left:.0f}s")
        self.log.event("train", step=step, train_loss=loss, train_seconds=seconds, tokens_per_second=rate, **moment._asdict())

    def _validate(self, step: int) -> None:
        score = evaluate(self.forward, self.val, self.hp, self.runtime, stride=self.hp.eval_seq_len)
        seconds = self.watch.total
        self.log.line(f"step:{step}/{self.hp.iterations} {score.fields(4)} train_time:{1000 * seconds:.0f}ms "
                      f"step_avg:{1000 * seconds / max(step, 1):.2f}ms eval_time:{1000 * score.seconds:.0f}ms")
        self.log.event("val", step=step, val_loss=score.nats, val_bpb=score.bits_per_byte, train_seconds=seconds)


# ----------------------------------------------------------------------------------------------------------------
# The whole run


def log_score(log: Log, name: str, score: Score) -> None:
    """One final score, in the line that tools look for."""
    log.line(f"{name} {score.fields()} eval_time:{1000 * score.seconds:.0f}ms val_tokens:{score.targets} val_bytes:{score.nbytes}")
    log.event(name, val_loss=score.nats, val_bpb=score.bits_per_byte, eval_seconds=score.seconds, val_tokens=score.targets, val_bytes=score.nbytes)


def score_artifact(model: GPT, forward: Callable, val: Validation, hp: Hyperparameters, runtime: Runtime, log: Log) -> None:
    """The final scores of the weights now in the model: windows without overlap, sliding ones, and test-time training."""
    def learn() -> Score:
        return ScoreFirst(model, Evaluator(forward, val, hp, runtime, hp.eval_stride, log.line), log).run()

    ways = {"final_int6_roundtrip": lambda: evaluate(forward, val, hp, runtime, hp.eval_seq_len, log.line),
            "final_int6_sliding_window": lambda: evaluate(forward, val, hp, runtime, hp.eval_stride, log.line)}
    for name, way in (ways | ({f"final_int6_ttt_{hp.ttt_mode}": learn} if hp.ttt_enabled else {})).items():
        try:
            log_score(log, f"{name}_exact", way())
        except Interrupted as stopped:
            log_score(log, f"{name}_partial", stopped.args[0])
            raise


PACKED = Path("train_gpt.packed.py")
PACKED_HEAD = b"# coding: latin-1\nimport bz2;exec(compile(bz2.decompress('"
PACKED_TAIL = b"'.encode('latin-1')),__file__,'exec'))\n"


def source_code() -> bytes:
    """This script as it is read by people, also when its self-extracting copy is what runs."""
    code = Path(__file__).read_bytes()
    return unpack_code(code) if code.startswith(PACKED_HEAD) else code


def pack_code(source: bytes) -> bytes:
    """A program that does what `source` does: its compressed bytes as a Python string of Latin-1 characters, which
    costs 2 % where base85 costs 25. Only what ends a line or a string in a source file has to be escaped."""
    escapes = {ord(char): f"\\x{ord(char):02x}".encode() for char in "\0\n\r\x1a'\\"}
    packed = b"".join(escapes.get(byte, bytes([byte])) for byte in bz2.compress(source, 9))
    return PACKED_HEAD + packed + PACKED_TAIL


def unpack_code(packed: bytes) -> bytes:
    """The source within a self-extracting copy."""
    literal = packed.removeprefix(PACKED_HEAD).removesuffix(PACKED_TAIL)
    return bz2.decompress(ast.literal_eval(f"'{literal.decode('latin-1')}'").encode("latin-1"))


def export(weights: dict[str, Tensor], moments: dict[str, Tensor], facts: dict, hp: Hyperparameters, runtime: Runtime, log: Log) -> tuple[bytes, int]:
    """Rank 0 quantises, packs and writes the artifact; all ranks get its bytes. Returns them and the submission's size."""
    started, blob, code = time.perf_counter(), None, source_code()
    if hp.pack_code:
        code = pack_code(code)
    if runtime.ranks.rank == 0:
        if hp.pack_code:
            write_atomic(PACKED, code)
        log.line(f"export: coding {sum(tensor.numel() for tensor in weights.values()):,} weights with {hp.compressor}, "
                 f"{'rounded by GPTQ' if moments else 'plainly rounded'}")
        room = hp.target_bytes - len(code) if hp.target_bytes else math.inf
        blob = fit_artifact(weights, hp, moments, facts, room, log.line)
        write_atomic(ARTIFACT, blob)
    blob = runtime.ranks.broadcast_bytes(blob, runtime.device)
    log.line(f"Serialized model int6+{hp.compressor}: {len(blob)} bytes")
    log.line(f"Code size: {len(code)} bytes")
    log.line(f"Total submission size int6+{hp.compressor}: {len(blob) + len(code)} bytes")
    log.event("artifact", path=str(ARTIFACT), model_bytes=len(blob), code_bytes=len(code), wall_seconds=time.perf_counter() - started)
    return blob, len(blob) + len(code)


def check_size(total: int) -> None:
    """Raises UserError if code and artifact together are over the challenge's limit."""
    _rule(total <= SUBMISSION_CAP, f"code and artifact are {total} bytes, {total - SUBMISSION_CAP} over the limit of {SUBMISSION_CAP}: "
                                   f"this run is no valid submission; set TARGET_BYTES={SUBMISSION_CAP} or make the model smaller")


def peak_memory(device: torch.device) -> str:
    """The most memory that this process has used, for the log."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) >> 20} MiB allocated on the GPU"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == 'darwin' else 10)} MiB resident"


def evaluate_only(environ: dict[str, str], path: str) -> None:
    """Load the artifact at `path` and score it."""
    blob = read_artifact(path)
    hp = artifact_hyperparameters(path, blob, environ)
    with Runtime.start(hp) as runtime:
        log = Log(hp, runtime.ranks)
        log.header(hp, runtime)
        val = Validation(hp, runtime.device)
        model = GPT(hp, runtime.attend, runtime.dtype)
        with reading_artifact(path):
            load_artifact(blob, model)
        score_artifact(model, compile_model(model.to(runtime.device), runtime), val, hp, runtime, log)


def train_and_score(hp: Hyperparameters) -> None:
    """The whole run: train, average, export, reload, score."""
    check_coder(hp)
    with Runtime.start(hp) as runtime:
        log = Log(hp, runtime.ranks)
        log.header(hp, runtime)
        val = Validation(hp, runtime.device)
        run = Training(hp, runtime, log, val)
        log.line(f"model_params:{sum(p.numel() for p in run.model.parameters())} val_tokens:{val.targets} val_bytes:{val.total_bytes} "
                 f"train_shards:{len(run.loader.stream.paths)} accumulation:{run.accumulation} rows:{run.loader.rows // run.accumulation}")
        with contextlib.closing(run.loader):
            run.warm_up()
            run.train()
            averaged, moments = run.finish()
        log.line(f"peak_memory: {peak_memory(runtime.device)}")
        log.line(f"exporting {averaged}")
        before = evaluate(run.forward, val, hp, runtime, hp.eval_seq_len)
        log_score(log, "final_average_exact", before)
        facts = {"tokenizer_sha256": sha256_of(hp.tokenizer_path),
                 "training": {"steps": run.clock.step + 1, "train_seconds": round(run.watch.total, 3), "tokens_a_step": hp.train_batch_tokens,
                              "ranks": runtime.ranks.size, "seed": hp.seed, "weights": averaged, "val_loss": before.nats, "val_bpb": before.bits_per_byte}}
        blob, total = export(run.optimizers.weights(), moments, facts, hp, runtime, log)
        load_artifact(blob, run.model)
        score_artifact(run.model, run.forward, val, hp, runtime, log)
        check_size(total)


def main() -> None:
    """Read the knobs, do the run; a user's mistake ends it with one sentence and a non-zero status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Knobs (environment variables):\n" + knob_help(),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inspect", metavar="FILE", help="say what is in an artifact, and nothing else")
    inspect = parser.parse_args().inspect
    try:
        hp = Hyperparameters.from_env(dict(os.environ))
        if inspect:
            print(inspection(inspect))
        elif hp.eval_only:
            evaluate_only(dict(os.environ), hp.eval_only)
        else:
            train_and_score(hp)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except (KeyboardInterrupt, Interrupted):
        print("error: interrupted by Ctrl-C; what was finished until then is in the log", file=sys.stderr, flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
