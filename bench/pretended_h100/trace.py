"""Runs a part of train_gpt.py under the pretended driver and writes what it launched. bench/h100.py
starts it, with the driver preloaded, in an environment that has a CUDA build of torch:

    python trace.py FOLDER '{"script": ..., "work": "step", "knobs": {...}, "ranks": 8}'

FOLDER gets trace.json: facts about the run, Inductor's kernels with their bytes, and the driver's
log of one repetition after two that compile and fill caches. `work` is one of WORK.
"""

import collections
import contextlib
import ctypes
import dataclasses
import importlib.util
import json
import math
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import sympy
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, library
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.dependencies import MemoryDep
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.virtualized import V
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.functions import FloorDiv, Identity, ModularIndexing
from torch.utils.flop_counter import flop_registry

DRIVER = ctypes.CDLL(None)
CHALLENGE_TOKENS, CHALLENGE_DOCUMENTS = 62_021_846, 50_000  # of the challenge's validation split
# Standard deviation of the logarithm of a document's length, of 301 documents of FineWeb
SPREAD = 0.93
MAX_OFFSETS = 1 << 14  # of one buffer that are enumerated


def note(*fields: object) -> None:
    """A line in the driver's log."""
    DRIVER.pretended_note("\t".join(map(str, fields)).encode())


# ---- Bytes of Inductor's kernels -----------------------------------------------------------------
def split_loops(access: MemoryDep) -> tuple[sympy.Expr, dict[sympy.Symbol, int]]:
    """(index, size of each loop variable); loops i that are read as i // n and i % n become two."""
    index = access.index.replace(Identity, lambda inside: inside)
    sizes = {}
    for variable, size in zip(access.var_names, map(int, access.size), strict=True):
        atoms = index.atoms(FloorDiv, ModularIndexing)
        parts = [part for part in atoms if part.args[0] == variable]
        divisors = {int(part.args[-1] if part.args[1] == 1 else part.args[1]) for part in parts}
        if len(divisors) != 1 or size % min(divisors):
            sizes[variable] = size
            continue
        (divisor,) = divisors
        high, low = sympy.symbols(f"{variable}_high {variable}_low", integer=True, nonnegative=True)
        for part in parts:
            remainder = isinstance(part, ModularIndexing) and part.args[1] == 1
            whole = isinstance(part, FloorDiv) or int(part.args[2]) * divisor >= size
            if remainder or whole:
                index = index.subs(part, low if remainder else high)
        index = index.subs(variable, divisor * high + low)
        sizes |= {high: size // divisor, low: divisor}
    return index.expand(), sizes


def footprint(accesses: list, total: int) -> int:
    """Elements of a buffer of `total` elements that a kernel touches, so a slice counts as a slice.
    An access is base + sum(stride * i) over loops. Inner loops are enumerated, and accesses with
    the same outer ones are united. Anything else counts the whole buffer."""
    united: dict[tuple, np.ndarray] = {}
    for access in accesses:
        if not isinstance(access, MemoryDep):
            return total
        index, sizes = split_loops(access)
        strides = {variable: index.coeff(variable) for variable in sizes}
        base = (index - sum(stride * variable for variable, stride in strides.items())).expand()
        if not all(number.is_Integer for number in (base, *strides.values())):
            return total
        moving = [(int(strides[v]), n) for v, n in sizes.items() if n > 1]
        loops = sorted((abs(stride), n) for stride, n in moving if stride)
        offsets = np.array([int(base)])
        while loops and len(offsets) * loops[0][1] <= MAX_OFFSETS:
            stride, size = loops.pop(0)
            offsets = (offsets[:, None] + stride * np.arange(size)).ravel()
        if loops and offsets.max() - offsets.min() >= loops[0][0]:
            return total
        outer = tuple(loops)
        united[outer] = np.union1d(united.get(outer, offsets), offsets)
    parts = (len(offsets) * math.prod(n for _, n in outer) for outer, offsets in united.items())
    return min(total, sum(parts))


def kernel_bytes(kernel: TritonKernel) -> int:
    """Bytes that a kernel reads and writes, for Inductor's own estimate of the same name."""
    in_place = len({id(buffer) for buffer in kernel.args.inplace_buffers.values()})
    accesses, count = kernel.features.buf_accesses(), 0
    for i, name in enumerate(kernel.args.python_argdefs()[1]):
        if name in accesses:
            touched = footprint(accesses[name], int(V.graph.get_numel(name)))  # shapes are static
            count += touched * V.graph.get_dtype(name).itemsize * (2 if i < in_place else 1)
    return count


def product_cost(arguments: tuple) -> tuple[int, int, str]:
    """(bytes, FLOPs, sizes) of the script's own kernel, a (N, K) @ b (M, K)^T with more in its
    epilogue. Every tensor counts once: b stays in the cache, and nothing is written twice."""
    # Of TMA's descriptors
    tensors = [getattr(argument, "base", argument) for argument in arguments]
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor)}
    (n, k), m = tensors[0].shape, tensors[1].shape[0]
    return sum(sizes.values()), 2 * n * m * k, f"{n}x{m}x{k}"


def watch_kernels() -> list[dict]:
    """Note every launch of Inductor's kernels. The notes refer to the returned list by index."""
    TritonKernel.estimate_kernel_num_bytes = kernel_bytes
    torch._inductor.config.benchmark_kernel = True  # store the estimate with the kernel
    torch._inductor.config.use_static_cuda_launcher = False
    found: dict[tuple, int] = {}
    kernels, run = [], CachingAutotuner.run

    def noted(self, *arguments, **options):
        name, flops, sizes = self.fn.__name__, 0, str(self.size_hints)
        bytes_moved = 1e9 * (self.inductor_meta.get("kernel_num_gb") or 0)
        if name == "fused_mlp":
            bytes_moved, flops, sizes = product_cost(arguments)
        place = found.setdefault((name, self.filename, sizes), len(kernels))
        if place == len(kernels):
            kernels.append({"name": name, "bytes": bytes_moved, "flops": flops, "sizes": sizes})
        note("kernel", place)
        return run(self, *arguments, **options)

    CachingAutotuner.run = noted
    return kernels


# ---- FlashAttention 3: an opaque operator whose cost is a formula --------------------------------
@library.custom_op("pretended::attention", mutates_args=(), device_types="cuda")
def attention(q: Tensor, k: Tensor, v: Tensor, seen: int) -> tuple[Tensor, Tensor]:
    """Output like q (B, n, H, E) and log-sum-exp (B, H, n). A query sees so many keys on average."""
    note("attention", "forward", *q.shape, *k.shape[1:3], seen)
    return q.new_empty(q.shape), torch.empty(q.size(0), q.size(2), q.size(1), device=q.device)


@library.custom_op("pretended::attention_backward", mutates_args=(), device_types="cuda")
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients like q, k and v."""
    note("attention", "backward", *q.shape, *k.shape[1:3], seen)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@attention.register_fake
def _(q, k, v, seen):
    return q.new_empty(q.shape), torch.empty(q.size(0), q.size(2), q.size(1), device=q.device)


@attention_backward.register_fake
def _(grad, q, k, v, out, lse, seen):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def save_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.seen = inputs[3]


def differentiate(ctx, grad, _):
    return *attention_backward(grad.contiguous(), *ctx.saved_tensors, ctx.seen), None


attention.register_autograd(differentiate, setup_context=save_inputs)


def dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def mean_keys(parts: np.ndarray, window: int) -> int:
    """The keys that a position sees on average in texts of so many tokens (S,), if it sees itself
    and the window - 1 before it; 0: all before it."""
    full = np.minimum(parts, window or parts)
    return round(((full * (full + 1) / 2 + (parts - full) * window).sum() / parts.sum()).item())


def keys_in_document(time: int, window: int, limit: int = 0) -> int:
    """The keys of its own document that a position of a sequence of `time` tokens sees on average,
    if lengths are random with the challenge's mean and documents are cut every `limit` tokens."""
    lengths = np.exp(SPREAD * np.random.default_rng(0).standard_normal(CHALLENGE_DOCUMENTS))
    ends = np.rint((lengths * CHALLENGE_TOKENS / lengths.sum()).cumsum()).astype(np.int64)
    cuts = np.union1d(ends, np.arange(0, ends[-1] + 1, time))
    if limit:
        begins = np.append(0, ends[:-1])
        own = [np.arange(a, b, limit) for a, b in zip(begins, ends, strict=True)]
        cuts = np.union1d(cuts, np.concatenate(own))
    return mean_keys(np.diff(cuts), window)


def provide_flash_attention(seen: dict[tuple[int, int], int]) -> None:
    """Let `import flash_attn_interface` find the operator. `seen` has the keys that a position sees
    on average within its document, by the length of the longest and the window. Documents that are missing cost
    nothing here. Like the real one it takes views of contiguous rows."""
    module = types.ModuleType("flash_attn_interface")

    def flash_attn_func(q, k, v, causal, window_size=(-1, -1), **_):  # older ones: deterministic
        time, window = k.size(1), window_size[0] + 1
        full = min(time, window or time)  # as `mean_keys`, which Dynamo cannot trace
        keys = (full * (full + 1) // 2 + (time - full) * window) // time
        return attention(*map(dense_rows, (q, k, v)), keys)[0]

    def flash_attn_varlen_func(
        q, k, v, _, bounds, longest_q, longest, causal, window_size=(-1, -1), **more
    ):
        rows = (dense_rows(t)[None] for t in (q, k, v))
        return attention(*rows, seen[longest, window_size[0] + 1])[0][0]

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    sys.modules["flash_attn_interface"] = module


# ---- Eager work: bytes and FLOPs by operator -----------------------------------------------------
class CountOperators(TorchDispatchMode):
    """Notes bytes and FLOPs of every operator that is not a view."""

    left = False

    def without(self, function: Callable, part: str, after: str) -> Callable:
        """The function as a part of its own, outside the mode, in which Dynamo compiles nothing."""

        def call(*arguments, **named):
            if self.left:  # AOTAutograd calls torch.autograd.grad, too
                return function(*arguments, **named)
            self.left = True
            self.__exit__(None, None, None)
            note("part", part)
            found = function(*arguments, **named)
            note("part", after)
            self.__enter__()
            self.left = False
            return found

        return call

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        if not function.is_view and function.namespace not in ("pretended", "c10d"):
            leaves = torch.utils._pytree.tree_leaves((arguments, options, out))
            moved = sum(t.nbytes for t in leaves if isinstance(t, Tensor) and t.is_cuda)
            flops = flop_registry.get(function.overloadpacket)
            count = flops(*arguments, **(options or {}), out_val=out) if flops else 0
            note("operator", function.overloadpacket.__name__, moved, count)
        return out


# ---- The work ------------------------------------------------------------------------------------
def mark(owner: object, name: str, part: str) -> None:
    """Let calls of this method begin a part in the log."""
    method = getattr(owner, name)

    def marked(*arguments, **options):
        note("part", part)
        return method(*arguments, **options)

    setattr(owner, name, marked)


class Data:
    """Stands in for the training loader and for the validation stream: zeros of the right shape."""

    def __init__(self, hp, runtime, targets: int = 0):
        self.rows = hp.train_batch_tokens // hp.train_seq_len // runtime.comm.size
        self.batches = torch.zeros(
            self.rows, hp.train_seq_len + 1, dtype=torch.uint16, pin_memory=True
        )
        self.device = runtime.device
        self.targets = self.total_bytes = targets
        self.tokens = torch.zeros(targets + 1, dtype=torch.int32, device=runtime.device)
        self.nbytes = np.ones(targets, np.int16)
        refused = self.tokens.new_zeros(hp.vocab_size, hp.vocab_size, dtype=torch.bool)
        self.refused = refused if hp.canonical_mask else None
        self.hints = self.tokens[1:] if hp.ngram_tilt else None
        self.documents = np.array([0])

    def batch(self, step: int) -> Tensor:
        return self.batches.to(self.device, non_blocking=True)

    def spans(self) -> np.ndarray:
        lengths = SPREAD * np.random.default_rng(0).standard_normal(CHALLENGE_DOCUMENTS)
        parts = np.exp(lengths).cumsum()
        ends = np.rint(parts / parts[-1] * self.targets).astype(np.int64)
        return np.stack((np.append(0, ends[:-1]), ends), axis=1)


def training_step(script, hp, runtime, options: dict) -> Callable[[], None]:
    script.TrainingLoader = Data
    run = script.Run(hp, runtime, lambda *_, **__: None, None)
    forward = run.forward

    def marked(*arguments, **named):
        note("part", "forward")
        loss = forward(*arguments, **named)
        loss.register_hook(lambda grad: note("part", "backward"))
        return loss

    run.forward = marked
    for name, part in (
        ("accumulate", "accumulate"),
        ("reduce_gradients", "reduce"),
        ("gradient_norm", "norm"),
        ("muon_update", "Muon"),
        ("update_small", "Adam"),
    ):
        mark(run.optimizer, name, part)
    mark(run.average, "update", "average")
    run.clock.start()
    momentum, looping = hp.muon_momentum_warmup_start, hp.loop_visits > 1
    settings = script.StepSettings(1.0, momentum, False, hp.train_seq_len, looping)
    return lambda: run.train_step(0, settings)


def calibration(script, hp, runtime, options: dict) -> Callable[[], None]:
    """GPTQ's sums over rank 0's rows of a step: forward and backward, not compiled."""
    model = build_model(script, hp, runtime)
    rows = Data(hp, runtime).batch(0)

    def work():
        note("part", "calibration")
        with CountOperators():
            script.Calibration(model, hp.train_batch_tokens).add(rows)

    return work


def build_model(script, hp, runtime) -> torch.nn.Module:
    model = script.GPT(hp, runtime.attend, runtime.dtype, runtime.fused_mlp)
    return model.to(runtime.device)


def evaluator_of(script, forward, val, hp, runtime, stride: int):
    """With windows `stride` apart; 0: of a banded pass."""
    config = script.ForwardConfig(hp.layer_order(), band=0 if stride else hp.eval_seq_len)
    return script.Evaluator(forward, val, hp, runtime, config, stride or script.band_block(hp)[1])


def evaluation(script, hp, runtime, options: dict) -> Callable[[], None]:
    """One batch of windows, or of the blocks of a banded pass."""
    forward = script.compile_blocks(build_model(script, hp, runtime), runtime.compiled)
    banded = hp.eval_mode == "banded"
    only_read, stride = hp.eval_seq_len - hp.eval_stride, hp.eval_stride
    if banded:
        only_read, stride = script.band_block(hp)
    window = only_read + stride
    rows = script.eval_rows(hp, runtime, window)
    options["windows"] = {"eval_rows": rows, "window": window, "stride": stride}
    val = Data(hp, runtime, window + (rows * runtime.comm.size + 1) * stride)
    windows = script.plan_windows([(0, val.targets)], window, stride)
    batch = windows[:, 1 : 1 + rows * runtime.comm.size]
    scorer = evaluator_of(script, forward, val, hp, runtime, 0 if banded else stride)

    def work():
        note("part", "windows")
        scorer.score(batch)

    return work


def sgd_adaptation(script, hp, runtime, options: dict) -> Callable[[], None]:
    """One chunk that is scored and trained on, and one that is only scored. The text's first window
    is a batch of its own, so the first chunk's windows are another part."""
    model = build_model(script, hp, runtime)
    forward = script.compile_blocks(model, runtime.compiled)
    val = Data(hp, runtime, 2 * hp.ttt_chunk_tokens)
    gradients, counting = script.sgd_gradients, CountOperators()
    passes = counting.without(forward, "passes", "gradients")
    passes.parameters, passes.named_parameters = forward.parameters, forward.named_parameters

    def counted(*arguments):
        scorer = arguments[-2]
        scorer.forward = passes
        grad = counting.without(torch.autograd.grad, "passes", "gradients")
        with mock.patch.object(torch.autograd, "grad", grad), counting:
            note("part", "gradients")
            found = gradients(*arguments)
        scorer.forward = forward
        note("part", "update")
        return found

    script.sgd_gradients = counted
    score, parts = script.Evaluator.score, []
    script.Evaluator.score = lambda *given: (note("part", parts.pop()), score(*given))[1]

    def work():
        parts[:] = "windows", "first windows"
        note("part", "other")
        scorer = evaluator_of(script, forward, val, hp, runtime, hp.eval_stride)
        script.ttt_sgd(scorer)

    return work


def low_rank_adaptation(script, hp, runtime, options: dict) -> Callable[[], None]:
    """A chunk of each shape of window with its AdamW step, each a part of the log.
    options["repeats"] gets how often rank 0 does each in the challenge's validation split."""
    model = build_model(script, hp, runtime)
    forward = script.compile_blocks(model, runtime.compiled)
    examples, options["repeats"] = chunks_of(script, hp, runtime, model)
    val = Data(hp, runtime, 2 * hp.eval_seq_len)
    scorer = evaluator_of(script, forward, val, hp, runtime, hp.eval_stride)
    first = script.lora_adapter(hp, runtime.device)
    compile_whole = script.compile_whole

    def compile_update(function, compiled):
        update = compile_whole(function, compiled)

        def marked(*arguments) -> None:
            note("part", f"{work.part}, AdamW")
            update(*arguments)
            note("part", "other")

        return marked

    def work():
        for work.part, chunk in examples.items():
            scorer.batch = part_of(scorer, work.part)
            rows = script.lora_shape(scorer, *chunk)[0]
            # A kernel that gathers is charged for the whole buffer, so it holds no other documents.
            with mock.patch.multiple(script, LORA_BATCH=rows, compile_whole=compile_update):
                state = script.LoraState(np.array([[0, chunk[1] + 1]] * rows), first)
                script.lora_step(scorer, state, *chunk)

    return work


def part_of(scorer, part: str) -> Callable:
    """The scorer's batch, which begins this part of the log."""

    def batch(*arguments):
        note("part", part)
        return type(scorer).batch(scorer, *arguments)

    return batch


def chunks_of(script, hp, runtime, model) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """By name of the part: [begin, stop) of the first chunk of each shape, and how often rank 0 has
    this shape, by the script's own plan for documents like the challenge's."""
    examples: dict[str, tuple[int, int]] = {}
    repeats: dict[str, int] = collections.Counter()

    def planned(scorer, state, begin, stop):
        rows, width, n = script.lora_shape(scorer, begin, stop)
        part = f"{rows} windows of {width}" + f", last {n}" * (n < width)
        examples.setdefault(part, (begin, stop))
        present = state.lengths[state.lengths > begin]
        for first in range(0, len(present), rows):
            repeats[part] += 1
            repeats[f"{part}, AdamW"] += bool(present[first : first + rows].max() > stop)

    with mock.patch.multiple(script, lora_step=planned, lora_adapter=lambda *_: {}):
        data = Data(hp, runtime, CHALLENGE_TOKENS)
        scorer = evaluator_of(script, model, data, hp, runtime, hp.eval_stride)
        script.ttt_lora(scorer)
    return examples, repeats


def updates(script, hp, runtime, options: dict) -> Callable[[], None]:
    """The ways of bench/optimizer.py, then a step of ParallelMuon, each a part of the log."""
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    import optimizer

    as_399 = dict(muon_eq=False, muon_coeffs="quintic", muon_backend_steps=5)
    ways = optimizer.updates(dataclasses.replace(hp, **as_399), runtime, separate=True)
    whole = optimizer.Ours(hp, runtime, runtime.comm).optimizer
    del whole.update_small, whole.clear  # those of the class
    names = ((whole, "reduce_gradients", "norms"), (whole, "gradient_norm", "clip"))
    for owner, name, part in (*names, (whole, "update_small", "Adam")):
        mark(owner, name, f"step: {part}")
    banks, update = {id(shard): bank for bank, shard in whole.banks.items()}, whole.muon_update

    def marked(shard, *settings):
        note("part", f"step: {banks[id(shard)]}")
        update(shard, *settings)

    whole.muon_update = marked
    counting = CountOperators()
    for name, way in ways.items():
        if isinstance(way, optimizer.Separate):
            part = f"{name}: Newton-Schulz"
            way.newton_schulz = counting.without(way.newton_schulz, part, name)

    @torch.no_grad()
    def work():
        for name, way in ways.items():
            note("part", name)
            eager = isinstance(way, optimizer.Separate)
            with counting if eager else contextlib.nullcontext():
                way.step()
        whole.step(1.0, hp.muon_momentum)

    return work


WORK = {
    "step": training_step,
    "update": updates,
    "gptq": calibration,
    "eval": evaluation,
    "ttt_sgd": sgd_adaptation,
    "ttt_lora": low_rank_adaptation,
}


def main() -> None:
    folder = Path(sys.argv[1])
    options = json.loads(sys.argv[2])
    DRIVER.pretended_logging(0)
    kernels = watch_kernels()
    specification = importlib.util.spec_from_file_location("train_gpt", options["script"])
    script = sys.modules["train_gpt"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    knobs = {"ATTENTION": "fa3", "COMPILE": "1", **options["knobs"]}
    hp = script.Hyperparameters.from_env(knobs)
    lengths = {hp.train_seq_len, hp.train_seq_len // hp.short_seq_parts, hp.eval_seq_len}
    lengths.add(sum(script.band_block(hp)))
    seen = {}
    for window in {0, hp.eval_seq_len, hp.attn_window}:  # none, a band's, a layer's
        seen |= {(length, window): keys_in_document(length, window) for length in lengths}
        if hp.doc_len and options["work"] in ("step", "gptq"):
            seen[hp.doc_len, window] = keys_in_document(hp.train_seq_len, window, hp.doc_len)
        if options["work"] == "ttt_lora":  # each window is a part of one document
            widths = [script.round_up(hp.eval_seq_len // part) for part in script.LORA_PARTS]
            seen |= {(width, window): mean_keys(np.array([width]), window) for width in widths}
    provide_flash_attention(seen)
    dist.init_process_group("fake", rank=0, world_size=options["ranks"], store=FakeStore())
    device = torch.device("cuda", 0)
    runtime = script.Runtime(
        comm=script.Comm(0, options["ranks"]),
        device=device,
        dtype=script.choose_dtype(hp.compute_dtype, device),
        compiled=hp.compile != "0",
        attention=hp.attention,
        attend=script.load_attention(hp.attention),
        micro_batch_tokens=hp.micro_batch_tokens or 98_304,
        notes=(),
        fused_mlp=script.load_fused_mlp(hp.mlp_slope, device) if hp.fused_mlp else None,
    )
    work = WORK[options["work"]](script, hp, runtime, options)
    for repetition in range(3):
        if repetition == 2:
            torch.cuda.reset_peak_memory_stats()
            DRIVER.pretended_logging(1)
        work()
        torch.cuda.synchronize()
    DRIVER.pretended_logging(0)
    facts = {
        "torch": torch.__version__,
        "peak_mib": torch.cuda.max_memory_allocated() >> 20,
        **options.get("windows", {}),
        "ttt_chunk": hp.ttt_chunk_tokens,
        "repeats": options.get("repeats"),
    }
    log = Path(os.environ["PRETENDED_H100_LOG"]).read_text().splitlines()
    (folder / "trace.json").write_text(json.dumps({"facts": facts, "kernels": kernels, "log": log}))


if __name__ == "__main__":
    main()
