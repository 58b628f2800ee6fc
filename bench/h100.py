#!/usr/bin/env python3
"""Models, and does not measure, what train_gpt.py costs on one H100 of eight. It needs no GPU.

    python bench/h100.py                                            # a training step with every knob at its default
    python bench/h100.py NUM_LAYERS=12 --against MLP_MULT=3         # the difference of two settings
    python bench/h100.py --against ../other/train_gpt.py            # ... or of two versions of the script
    python bench/h100.py --work update                              # the update, and orders of communication
    python bench/h100.py --work gptq                                # the calibration of a batch
    python bench/h100.py --work eval                                # sliding windows; ttt_sgd and ttt_lora: adaptation
    python bench/h100.py --work eval EVAL_MODE=banded               # a banded pass; EVAL_STRIDE=2048: non-overlapping

A pretended CUDA driver answers as an H100, logs every launch and computes nothing: bench/README.md.
It tells graphs, kernels, launches, bytes, FLOPs, registers, spills and peak memory; not times, the
kernels that cuBLAS would choose, or NCCL. A real step takes longer than this.

The first call builds an environment with a CUDA build of torch (7 GB, some minutes) in the folder
PRETENDED_H100_HOME. It needs Linux, g++ and Python's headers. Results are kept there, so a variant
is traced once. The last line of the output is JSON.
"""

import collections
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SUPPORT = HERE / "pretended_h100"
sys.path[:0] = [str(HERE), str(ROOT)]

import program
import scaling
from train_gpt import BANKS, Hyperparameters, as_user_error, bank_shape, require

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
HOME = Path(os.environ.get("PRETENDED_H100_HOME") or CACHE / "pretended-h100")
BANDWIDTH = 3.35e12  # bytes/s of the memory, by the data sheet
# Of dense bf16 products, what cuBLAS reaches on large ones; the data sheet's peak is 989e12
FLOPS = 790e12
# Attention takes the sum of its bytes and of its operations at these rates, not the larger of both.
# They fit forward and backward of one layer with FlashAttention 3, measured on an H100 in
# docs/data/h100_attention.csv (1.35, 2.21 and 11.5 ms for 512, 2,048 and 16,384 tokens), within 4 %.
# A traced step of 11 layers took 21.6 ms, for which they give 25.2. No window was measured.
ATTENTION_BANDWIDTH, ATTENTION_FLOPS = 0.9e12, 560e12
HOST_LINK = 25e9  # bytes/s between host and device
LAUNCH = 2.5e-6  # seconds that a kernel takes at least
CUDA = {"2.9.1": 12080, "2.13.0": 13000, "2.15.0": 13020}  # of the wheels, by torch version
# Libraries whose CUDA calls the pretended driver must answer.
LIBRARIES = "c10_cuda torch_cuda torch_python torch_cpu torch_cuda_linalg caffe2_nvrtc"
# What is looked up by name at run time, so that no library imports it.
LOOKED_UP = """
cuInit cuCtxGetLimit cuCtxSetLimit cuCtxSetCurrent cuCtxSynchronize cuCtxPushCurrent_v2
cuCtxPopCurrent_v2 cuFuncSetAttribute cuFuncSetCacheConfig cuLaunchCooperativeKernel cuMemAlloc_v2
cuModuleUnload cuOccupancyMaxActiveClusters cuStreamGetCaptureInfo cuStreamSynchronize
cuTensorMapEncodeTiled
"""
STUBS = """#include <cstdio>
#include <cstdlib>
#define STUB(name) extern "C" __attribute__((visibility("default"))) int name() { \\
    static int told = getenv("PRETENDED_H100_VERBOSE") ? puts(#name) : 0; (void)told; return 0; }
"""
TOP = 15  # kernels that are shown
CHALLENGE_TOKENS = 62_021_846  # targets of the challenge's validation split
UNKNOWN = {"name": "", "bytes": 0, "flops": 0, "sizes": ""}  # a kernel of which nothing is noted
BYTES_OF_TYPE = {0: 4, 1: 8, 2: 2, 14: 2}  # cudaDataType: fp32, fp64, fp16, bf16


# ---- The environment -----------------------------------------------------------------------------
def command(*words: object, **options) -> str:
    """The output of a program. Raises UserError with its last words if it fails."""
    name, *_ = words = list(map(str, words))
    with as_user_error(name, "install it, as by `apt install g++ binutils`", FileNotFoundError):
        done = subprocess.run(words, capture_output=True, text=True, **options)
    last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
    status = f"{Path(name).name} failed with status {done.returncode}"
    require(not done.returncode, f"{status}:\n{last}")
    return done.stdout


def environment(home: Path, torch_version: str) -> tuple[Path, Path]:
    """(Python with a CUDA build of torch, folder of the pretended driver), made if necessary."""
    place = home / f"venv-{torch_version}"
    python = place / "bin" / "python"
    if not python.exists():
        cuda = f"a CUDA build of torch {torch_version}"
        print(f"installing {cuda} in {place} (7 GB, once)", flush=True)
        venv.create(place, with_pip=True)
        wanted = (f"torch=={torch_version}", "setuptools", "-r", ROOT / "requirements.txt")
        command(python, "-m", "pip", "install", "-q", *wanted)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(command(python, "-c", purelib).strip())
    require(
        (packages / "torch" / "lib" / "libtorch_cuda.so").exists(),
        f"{place} got a CPU build of torch: delete it, and let pip find the CUDA build",
    )
    source = SUPPORT / "driver.cpp"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    folder = home / f"driver-{torch_version}-{digest}"
    if not (folder / "libcuda.so.1").exists():
        build_driver(source, folder, packages, CUDA[torch_version])
    return python, folder


def build_driver(source: Path, folder: Path, packages: Path, cuda: int) -> None:
    """Compile the driver, with a function that succeeds for each CUDA symbol that it lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    includes = ("triton/backends/nvidia/include", "nvidia/cu13/include")
    options = ["-std=c++17", f"-DCUDART_VERSION={cuda}", *(f"-I{packages / p}" for p in includes)]
    command("g++", "-O1", "-fPIC", *options, "-c", source, "-o", folder / "driver.o")
    defined = set(re.findall(r" T (\w+)", command("nm", "--defined-only", folder / "driver.o")))
    wanted = set(LOOKED_UP.split())
    for library in LIBRARIES.split():
        path = packages / "torch" / "lib" / f"lib{library}.so"
        symbols = command("nm", "-D", "--undefined-only", path)
        wanted |= set(re.findall(r" U ((?:__cuda|cuda|cublas|cu[A-Z])\w+)", symbols))
    missing = sorted(name for name in wanted - defined if not name.startswith(("cuFile", "cudnn")))
    (folder / "stubs.cpp").write_text("".join([STUBS, *(f"STUB({name})\n" for name in missing)]))
    shared = ["-O1", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1", "-ldl"]
    partial = folder / "libcuda.partial"
    command("g++", folder / "driver.o", folder / "stubs.cpp", *shared, "-o", partial)
    (folder / "libcuda.so").unlink(missing_ok=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")
    partial.rename(folder / "libcuda.so.1")


def preloaded(driver: Path) -> dict[str, str]:
    """The environment of a program that is to see the pretended device."""
    folders = dict.fromkeys(("LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"), str(driver))
    device = {"LD_PRELOAD": str(driver / "libcuda.so.1"), "CUDA_VISIBLE_DEVICES": "0"}
    return os.environ | folders | device


def trace(home: Path, torch_version: str, options: dict) -> dict:
    """The trace of this work, from the last time or made now."""
    python, driver = environment(home, torch_version)
    files = [options["script"], SUPPORT / "trace.py", HERE / "optimizer.py"]
    digest = hashlib.sha256(b"".join(Path(path).read_bytes() for path in files))
    digest.update(json.dumps([driver.name, options | {"script": ""}], sort_keys=True).encode())
    folder = home / "traces" / digest.hexdigest()[:16]
    result = folder / "trace.json"
    if not result.exists():
        print(f"tracing {describe(options)} with torch {torch_version} ...", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "launches.log"
        log.unlink(missing_ok=True)
        variables = {
            "PRETENDED_H100_LOG": str(log),
            "TRITON_CACHE_DIR": str(home / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # a cached kernel would not have its bytes
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_UNIQUE_KERNEL_NAMES": "1",
        }
        words = python, SUPPORT / "trace.py", folder, json.dumps(options)
        command(*words, env=preloaded(driver) | variables)
        log.unlink()
    return json.loads(result.read_text())


# ---- Costs ---------------------------------------------------------------------------------------
def launches_of(found: dict) -> list[dict]:
    """One entry per launch: part, kind, name, bytes, flops, spills."""
    launches, part, kernel = [], "start", UNKNOWN
    names = sorted({line.split("\t")[1] for line in found["log"] if line.startswith("library")})
    plain = command("c++filt", input="\n".join(names)).split("\n") if names else []
    readable = dict(zip(names, plain, strict=False))

    def add(kind: str, name: str, moved: float = 0, flops: float = 0, **more) -> None:
        own = {"part": part, "kind": kind, "name": name, "bytes": moved, "flops": flops}
        launches.append(own | more)

    for line in found["log"]:
        kind, *fields = line.split("\t")
        if kind == "note":
            kind, *fields = fields
        if kind == "part":
            part = fields[0]
        elif kind == "kernel":
            kernel = found["kernels"][int(fields[0])]
        elif kind == "attention":
            b, n, h, e, time, groups, keys = map(int, fields[1:])
            buffers, work = {"forward": (2, 1.0), "backward": (4, 2.5)}[fields[0]]
            moved = 2 * b * e * buffers * (n * h + time * groups)
            add("attention", f"attention {fields[0]}", moved, work * 4 * b * h * n * keys * e)
        elif kind == "operator":
            add("operator", fields[0], float(fields[1]), float(fields[2]), launches=0)
        elif kind == "triton":
            own = kernel if kernel["name"] == fields[0] else UNKNOWN
            sizes = re.sub(r"[{}' ]", "", own["sizes"])
            name = re.sub(r"^triton_|_\d+$", "", fields[0])[:56] + f" {sizes}"
            add("triton", name, own["bytes"], own["flops"], spills=int(fields[2]))
        elif kind == "product":
            m, n, k, batch = map(int, fields[:4])
            a, b, c = (BYTES_OF_TYPE.get(int(t), 2) for t in fields[4].split(","))
            moved = batch * (m * k * a + k * n * b + m * n * c)
            add("product", f"{m} x {n} x {k} (x {batch})", moved, 2 * m * n * k * batch)
        elif kind == "library":
            name = readable[fields[0]]
            add("library", name, elementwise_bytes(name, int(fields[1])))
        elif kind in ("copy", "fill"):
            way = fields[0] if kind == "copy" else "fill"
            add("copy", way, int(fields[-1]) * (2 if way == "d2d" else 1))
    # Where operators were counted one by one, launches cost nothing more than themselves.
    eager = {launch["part"] for launch in launches if launch["kind"] == "operator"}
    for launch in launches:
        counted = launch["kind"] in ("product", "library") or launch["name"] in ("d2d", "fill")
        launch |= {"bytes": 0, "flops": 0} if launch["part"] in eager and counted else {}
    return launches


def elementwise_bytes(name: str, blocks: int) -> float:
    """An upper bound of an elementwise kernel's bytes, from its name and grid; 0 for others."""
    pointers = re.search(r"std::array<char\*, (\d+)ul>", name)
    if "elementwise_kernel" not in name or not pointers:
        return 0.0
    item = 2 if "BFloat16" in name and "float" not in name.replace("BFloat16", "") else 4
    elements = 1024 if item == 2 and "vectorized" in name else 512
    return float(blocks * elements * item * int(pointers[1]))


def seconds(launch: dict) -> float:
    """The roofline of a launch; of attention, what was measured."""
    if launch["kind"] == "attention":
        return launch["bytes"] / ATTENTION_BANDWIDTH + launch["flops"] / ATTENTION_FLOPS
    rate = HOST_LINK if launch["kind"] == "copy" and launch["name"] in ("h2d", "d2h") else BANDWIDTH
    return max(launch["bytes"] / rate, launch["flops"] / FLOPS)


def table(launches: list[dict], key: str) -> dict[str, dict]:
    """Sums over launches with the same value of `key`, or tuple of keys joined by a space."""
    sums: dict[str, dict] = collections.defaultdict(collections.Counter)
    for launch in launches:
        row = sums[" | ".join(launch[name] for name in key.split())]
        row["launches"] += launch.get("launches", 1)
        row["gb"] += launch["bytes"] / 1e9
        row["tflop"] += launch["flops"] / 1e12
        row["ms"] += 1e3 * seconds(launch)
    return sums


def with_launches(launches: list[dict]) -> dict[str, float]:
    """Seconds by part, if a launch takes at least LAUNCH."""
    sums = collections.Counter()
    for launch in launches:
        sums[launch["part"]] += max(seconds(launch), LAUNCH * launch.get("launches", 1))
    return sums


def totals(found: dict, launches: list[dict]) -> dict:
    """What the JSON line says of one variant. All times are modelled."""
    kinds = table(launches, "kind")
    total = sum(kinds.values(), collections.Counter())
    times = {"step_ms": total["ms"]}
    times["step_ms_with_launches"] = 1e3 * sum(with_launches(launches).values())
    times |= {f"{kind}_ms": kinds[kind]["ms"] for kind in ("triton", "product", "attention")}
    times |= {"triton_gb": kinds["triton"]["gb"], "tflop": total["tflop"]}
    spilled = {launch["name"] for launch in launches if launch.get("spills")}
    counts = {"launches": total["launches"], "spilled_kernels": len(spilled)}
    facts = {name: found["facts"][name] for name in ("peak_mib", "torch")}
    return {name: round(value, 4) for name, value in times.items()} | counts | facts


# ---- Report --------------------------------------------------------------------------------------
def describe(options: dict) -> str:
    """One variant in words."""
    knobs = " ".join(f"{name}={value}" for name, value in options["knobs"].items()) or "defaults"
    script = Path(options["script"]).name
    return f"{options['work']} of {script}, {knobs}, rank 0 of {options['ranks']}"


def print_rows(title: str, rows: dict[str, dict]) -> None:
    """A table of sums."""
    print(f"\n{title:76}{'launches':>9}{'GB':>10}{'TFLOP':>9}{'ms':>9}")
    for name, row in rows.items():
        gb, tflop, ms = row["gb"], row["tflop"], row["ms"]
        print(f"  {name[:74]:74}{row['launches']:9d}{gb:10.3f}{tflop:9.3f}{ms:9.3f}")


def report(options: dict, found: dict) -> dict:
    """Print one variant. Returns its totals."""
    launches = launches_of(found)
    result = totals(found, launches)
    print(f"\n==== modelled, not measured: {describe(options)}, torch {found['facts']['torch']}")
    print_rows("part and kind", table(launches, "part kind"))
    print_rows("all of a kind", table(launches, "kind"))
    kernels = [launch for launch in launches if launch["kind"] == "triton"]
    costs = sorted(table(kernels, "part name").items(), key=lambda row: -row[1]["ms"])
    print_rows("Triton kernels that cost most", dict(costs[:TOP]))
    for name in sorted({k["name"] for k in kernels if k["spills"]}):
        print(f"  spills registers: {name}")
    least = f"{result['step_ms_with_launches']:.2f} with at least 2.5 us a launch"
    print(f"\nmodelled: {result['step_ms']:.2f} ms ({least})", end=", ")
    print(f"{result['launches']} launches, peak memory {result['peak_mib']:,} MiB")
    if options["work"] == "update":
        result |= price_updates(launches)
        return result | (price_orders(options, launches) if options["ranks"] > 1 else {})
    return result | extrapolate(options, found, launches)


def extrapolate(options: dict, found: dict, launches: list[dict]) -> dict:
    """Modelled seconds over the challenge's validation split, for the work of evaluations."""
    facts, ranks, parts = found["facts"], options["ranks"], with_launches(launches)
    if options["work"] == "eval":
        windows = 1 + -(-(CHALLENGE_TOKENS - facts["window"]) // facts["stride"])
        total = -(-windows // (ranks * facts["eval_rows"])) * sum(parts.values())
    elif options["work"] == "ttt_sgd":  # one chunk was trained on; "windows" are the next one's
        chunks = -(-CHALLENGE_TOKENS // facts["ttt_chunk"])
        total = chunks * (sum(parts.values()) - parts["first windows"])
    elif options["work"] == "ttt_lora":
        total = sum(times * parts[part] for part, times in facts["repeats"].items())
        for part, times in facts["repeats"].items():
            print(f"  {times:6d} x {1e3 * parts[part]:7.3f} ms: {part}")
        parts = table(launches, "part")
        operations = sum(parts[part]["tflop"] * n for part, n in facts["repeats"].items())
        print(f"{operations / 1e3:.2f} PFLOP on rank 0", end=", ")
    else:
        return {}
    print(
        f"modelled: {total:.1f} s for the challenge's {CHALLENGE_TOKENS:,} targets on {ranks} GPUs"
    )
    return {"challenge_seconds": round(total, 1)}


def part_seconds(launches: list[dict]) -> dict[str, float]:
    """Modelled seconds by part. A launch takes at least LAUNCH; where operators were counted, they
    have the bytes of the launches before them."""
    counted = {launch["part"] for launch in launches if launch["kind"] == "operator"}
    sums, waiting = collections.defaultdict(float), 0
    for launch in launches:
        if launch["part"] in counted and launch["kind"] != "operator":
            waiting += 1
            continue
        count = 1
        if launch["kind"] == "operator":
            count, waiting = waiting, 0
        if count:  # else it was an allocation
            sums[launch["part"]] += max(seconds(launch), count * LAUNCH)
    return dict(sums)


def price_updates(launches: list[dict]) -> dict[str, dict]:
    """Print what the ways of bench/optimizer.py cost one rank. Returns milliseconds by way."""
    ways, counts = collections.Counter(), collections.Counter()
    for part, time in part_seconds(launches).items():
        if not part.startswith(("step: ", "start")):
            ways[part.removesuffix(": Newton-Schulz")] += time
    for launch in launches:
        counts[launch["part"].removesuffix(": Newton-Schulz")] += launch.get("launches", 1)
    print(f"\n{'update, without communication':42}{'launches':>9}{'ms':>9}{'ratio':>8}")
    for way, time in ways.items():
        print(f"  {way:40}{counts[way]:9}{1e3 * time:9.3f}{time / ways['ours']:8.2f}")
    return {"updates": {way: round(1e3 * time, 4) for way, time in ways.items()}}


def time_line(words: list[str], times: dict[str, float]) -> list[tuple[str, float, float]]:
    """(word, start, end) of an update, as CUDA's streams run it. "NAME" keeps the device busy,
    ">NAME" queues a collective behind those before it and what the device has to do, "<NAME" lets
    the device wait."""
    device, link, ended, spans = 0.0, 0.0, {}, []
    for word in words:
        name, start = word.lstrip("<>"), device
        if word[0] == ">":
            start = max(link, device)
            end = link = ended[name] = start + times[name]
        else:
            end = device = max(device, ended[name]) if word[0] == "<" else device + times[name]
        spans.append((word, start, end))
    return spans


def finish(words: list[str], times: dict[str, float]) -> float:
    """Seconds until the device has done all of `words`."""
    return max(end for word, _, end in time_line(words, times) if word[0] != ">")


def draw(hp: Hyperparameters, ranks: int, spans: list[tuple[str, float, float]]) -> None:
    """Print which rank owns which rows of the banks, and a bar for each piece of work."""
    print(f"\nrows of the banks by rank, 0 to {ranks - 1}; -: padding")
    for bank, kinds in BANKS.items():
        rows, *shape = bank_shape(bank, hp)
        owned = -(-rows // ranks)
        letters = "".join(kind.name[0] * hp.num_layers for kind in kinds)
        shards = textwrap.wrap(letters.ljust(owned * ranks, "-"), owned)
        print(f"  {bank:10}{f'({rows}, {shape[0]}, {shape[1]})':16}{' '.join(shards)}")
    print("\nus from the end of backward on, of our order; #: device, =: links")
    scale = 60 / max(end for *_, end in spans)
    for word, start, end in spans:
        if word[0] != "<":
            first, last = round(start * scale), round(end * scale)
            bar = " " * first + "#="[word[0] == ">"] * max(1, last - first)
            print(f"  {word.lstrip('>'):18}{1e6 * start:6.0f}{1e6 * end:6.0f}  {bar}")


def orders(banks: list[str]) -> dict[str, list[str]]:
    """Updates by the order of their communication. Those that clip before the reduction compute
    something else: each rank scales its gradient by its own norm."""
    scatters, arrived = ([f"{sign}scatter {bank}" for bank in banks] for sign in "><")
    updates = [[f"update {bank}", f">gather {bank}"] for bank in banks]
    plain = sum(updates, [])
    early = sum(([wait, *update] for wait, update in zip(arrived, updates, strict=True)), [])
    gathered = [f"<gather {bank}" for bank in banks]
    end = ["clip", *plain, "Adam", *gathered]
    apart = [*arrived, "norms", ">norm", "<small", "<norm", *end]
    clipped = ["<small", "Adam", *early, *gathered]
    return {
        "ours": [*scatters, *arrived, "norms", ">small", "<small", *end],
        "small first, norm apart": [">small", *scatters, *apart],
        "small after the banks, norm apart": [*scatters, ">small", *apart],
        "#399: clip, banks, small": ["local", *scatters, ">small", *clipped],
        "mn#132: clip, small, banks": ["local", ">small", *scatters, *clipped],
    }


def price_orders(options: dict, launches: list[dict]) -> dict[str, dict]:
    """Print what the orders of communication cost, by bench/scaling.py's model of a collective.
    Returns microseconds by order: of all, and what Adam and the collectives add."""
    machine, ranks = scaling.H100, options["ranks"]
    hp, own = Hyperparameters.from_env(options["knobs"]), part_seconds(launches)
    steps = {part[6:]: time for part, time in own.items() if part.startswith("step: ")}
    banks = [part for part in steps if part.endswith("_bank")]
    times = {f"update {part}" if part in banks else part: time for part, time in steps.items()}
    calls = scaling.count(hp, ranks, ranks).calls
    names = [*(f"scatter {bank}" for bank in banks), "small", *(f"gather {bank}" for bank in banks)]
    times |= {name: call.seconds(machine) for name, call in zip(names, calls, strict=True)}
    times["norm"] = calls[len(banks)]._replace(nbytes=4).seconds(machine)
    # To clip reads all gradients of the rank for the norm, then reads and writes them
    times["local"] = 3 * sum(call.nbytes for call in calls[: len(banks) + 1]) / BANDWIDTH
    print("\nus: " + ", ".join(f"{name} {1e6 * time:.1f}" for name, time in times.items()))
    draw(hp, ranks, time_line(orders(banks)["ours"], times))
    print(f"\n{'update with communication':42}{'us':>9}{'ratio':>8}{'of Adam':>9}{'of links':>9}")
    linked = dict.fromkeys([*names, "norm"], 0.0)
    rows = {}
    for order, words in orders(banks).items():
        us = 1e6 * finish(words, times)
        adam, links = (us - 1e6 * finish(words, times | zero) for zero in ({"Adam": 0.0}, linked))
        rows[order] = {"us": round(us, 1), "adam": round(adam, 1), "links": round(links, 1)}
        print(f"  {order:40}{us:9.1f}{us / rows['ours']['us']:8.3f}{adam:9.1f}{links:9.1f}")
    return {"orders": rows}


def print_difference(first: list[dict], second: list[dict]) -> None:
    """What the second variant adds and saves, kernel by kernel."""
    before, after = (table(launches, "part kind name") for launches in (first, second))
    changes = {}
    for name in before.keys() | after.keys():
        row = [after[name][key] - before[name][key] for key in ("launches", "gb", "ms")]
        changes |= {name: row} if max(map(abs, row)) > 1e-6 else {}
    title = f"difference, second minus first: {len(changes)} kernels"
    print(f"\n{title:76}{'launches':>9}{'GB':>10}{'ms':>9}")
    total = [sum(row[i] for row in changes.values()) for i in range(3)]
    shown = sorted(changes.items(), key=lambda change: -abs(change[1][2]))[:TOP]
    for name, (count, gb, ms) in (*shown, ("all", total)):
        print(f"  {name[:74]:74}{count:+9d}{gb:+10.3f}{ms:+9.3f}")


def parse_knobs(words: list[str]) -> dict[str, str]:
    """KNOB=VALUE pairs. Raises UserError for another word."""
    for word in words:
        require(re.fullmatch(r"[A-Z0-9_]+=\S*", word), f"{word!r} is not KNOB=VALUE")
    return dict(word.split("=", 1) for word in words)


def main() -> None:
    parser = program.parser(__doc__)
    add, works = parser.add_argument, ("step", "update", "gptq", "eval", "ttt_sgd", "ttt_lora")
    add("knobs", nargs="*", metavar="KNOB=VALUE")
    add("--against", help="KNOB=VALUE,... or another train_gpt.py, to compare with")
    add("--script", type=Path, default=ROOT / "train_gpt.py", help="default: this repository's")
    add("--work", choices=works, default="step")
    add("--ranks", type=int, default=8, help="GPUs that share the batch; default: 8")
    add("--torch", choices=CUDA, default="2.9.1", help="default: 2.9.1")
    arguments = parser.parse_args()
    options = {"work": arguments.work, "ranks": arguments.ranks}
    options["script"] = str(arguments.script.resolve())
    options["knobs"] = parse_knobs(arguments.knobs)
    variants, other = [options], arguments.against
    if other and Path(other).is_file():
        variants.insert(0, options | {"script": str(Path(other).resolve())})
    elif other:
        variants.insert(0, options | {"knobs": parse_knobs(other.split(","))})
    for path in (variant["script"] for variant in variants):
        require(Path(path).is_file(), f"{path} is not a file: give a version of train_gpt.py")
    traces = [trace(HOME, arguments.torch, variant) for variant in variants]
    results = [report(*pair) for pair in zip(variants, traces, strict=True)]
    line = {"modelled": True, "variant": describe(options)} | results[-1]
    if other:
        print_difference(*map(launches_of, traces))
        line["against"] = {"variant": describe(variants[0])} | results[0]
    print(json.dumps(line))


if __name__ == "__main__":
    program.run_program(main)
