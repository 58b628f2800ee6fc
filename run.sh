#!/usr/bin/env bash
# Set up and run on this machine.
set -euo pipefail

usage() {
    cat <<'TEXT'
./run.sh             set up and train: the record run on all GPUs, or a demo of a few minutes on a CPU
./run.sh check       set up and benchmark this machine for the run with the same knobs
./run.sh test [...]  set up and run the tests; extra arguments go to pytest
./run.sh setup       install what tests and tools need, too, and print the interpreter

Knobs are environment variables (python train_gpt.py --help lists them) and override the settings of this script:
DEVICE=cpu           the demo, even if there are GPUs
NPROC=2              number of processes (default: the number of GPUs; on a CPU the fastest, with OMP_NUM_THREADS;
                     a run or sweep that is continued keeps both, because other numbers change the rounding)
DATA_PATH=folder     your own shards; a manifest.json there names tokenizer and vocabulary (data/README.md)
SCRIPT=packed.py     the packed script instead of train_gpt.py (python tools/pack_code.py -o packed.py)
DEMO_SIZE=small      model of the demo, small or large (default: by the speed of the CPU)
MAX_WALLCLOCK_SECONDS=30                        limit of the training (the demo: 150 or 230, by its model)
SEEDS="1337 42 2025"                            a run per seed, and a table; can be interrupted and resumed
GRID="MATRIX_LR=0.02,0.025 MUON_WD=0.03,0.04"   every combination of these values with every seed
TEXT
}

caller=$(pwd -P)
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
given=""  # the user's data, script and settings of run.sh, as words of a command
for name in DATA_PATH TOKENIZER_PATH SCRIPT VOCAB_SIZE DEVICE NPROC DEMO_SIZE MAX_WALLCLOCK_SECONDS; do
    if [ -z "${!name:-}" ]; then continue; fi
    if [[ "$name" =~ PATH|SCRIPT ]] && [ "$caller" != "$PWD" ] && [[ "${!name}" != /* ]]; then
        export "$name=$caller/${!name}"
    fi
    given+="$name=$(printf %q "${!name}") "
done
script="${SCRIPT:-train_gpt.py}"

# Ctrl-C ends a run with a sentence of its own, and everything else with this one.
interrupted() {
    echo "error: interrupted by Ctrl-C; start again to go on" >&2
    end_helper
}
end_helper() {  # which may have workers and files to remove
    if [ -n "${helper:-}" ]; then { kill "$helper" && wait "$helper"; } 2>/dev/null || true; fi
    exit 130
}
trap interrupted INT

# Run a command that Ctrl-C ends without a traceback: bash lets it ignore SIGINT in the background, and kills it.
quietly() {
    if [ "$BASH_SUBSHELL" -gt 0 ]; then trap end_helper INT; fi  # it does not inherit the trap
    "$@" &
    helper=$!
    local status=0
    wait "$helper" || status=$?
    helper=""
    return $status
}

# For each package of a requirements file: "keep NAME==VERSION" if $PYTHON has it, whatever its version, else "install
# NAME==VERSION" as constraints.txt has it. Fails if $PYTHON has no supported torch.
packages() {
    "$PYTHON" - "$1" 2>/dev/null <<'PYTHON_CODE'
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
import torch

def names(path):
    for line in open(path):
        requirement, _, marker = line.partition("#")[0].partition(";")
        words = requirement.split()
        if words[:1] == ["-r"]:
            yield from names(words[1])
        elif words and (not marker or platform.system() in marker):  # platform_system == "Linux"
            yield re.match(r"[\w-]+", words[0])[0]

pins = dict(line.split("==") for line in open("constraints.txt").read().split() if "==" in line)
if [int(number) for number in torch.__version__.split(".")[:2]] < [2, 9]:
    sys.exit(1)
for name in names(sys.argv[1]):
    try:
        print("keep", f"{name}=={version(name)}")
    except PackageNotFoundError:
        if not find_spec(name):
            print("install", f"{name}=={pins[name]}")
PYTHON_CODE
}

pip_install() {
    # A virtual environment made by uv has no pip, and another .venv could not inherit its packages.
    if [ -e "$(dirname "$(command -v "$PYTHON")")/../pyvenv.cfg" ] && ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        "$PYTHON" -m ensurepip >&2 || return
    fi
    "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@" >&2
}

# Install what $PYTHON lacks of a requirements file. Fails if it has no supported torch, or if pip cannot write there.
complete() {
    local found missing
    found=$(packages "$1") || return
    missing=$(sed -n 's/^install //p' <<<"$found")
    if [ -z "$missing" ]; then return; fi
    echo "installing into $PYTHON:" $missing >&2
    # Packages that are there are constraints, or pip could replace them by what the new ones prefer.
    pip_install --no-user --constraint <(sed -n 's/^keep //p' <<<"$found") $missing
}

recent() {  # whether $PYTHON is new enough
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

install_all() {  # with torch, if $PYTHON has none
    if packages "$1" >/dev/null; then complete "$1"; else pip_install -r "$1" --constraint constraints.txt; fi
}

# Choose PYTHON and give it the packages of this requirements file. Any Python with a supported torch is kept: rented
# machines have a torch that fits their driver, and FlashAttention.
set_up() {
    local venv=.venv/bin/python site=""
    local order="python3 $venv"
    # Such a .venv was made below, because pip could not write to the machine's Python.
    if grep -qs "^include-system-site-packages = true" .venv/pyvenv.cfg; then order="$venv python3"; fi
    for PYTHON in $order; do
        if recent && complete "$1"; then return; fi
    done
    PYTHON=python3
    if ! recent; then
        local found
        found=$(python3 -c 'import sys; print("python3 is", sys.version.split()[0])' || echo "there is no python3")
        echo "error: Python 3.11 or later is needed, and $found: install one" >&2
        exit 1
    fi
    if packages "$1" >/dev/null; then
        site=--system-site-packages
        echo "making .venv, which also has the packages of $(command -v python3)" >&2
    else
        echo "installing $1 into .venv (a few minutes, once)" >&2
    fi
    PYTHON=$venv
    { quietly python3 -m venv $site .venv && install_all "$1"; } || {
        echo "error: could not install $1 into .venv: see the messages above, or install it yourself and start again" >&2
        exit 1
    }
}

count_gpus() {  # to train on, as gpus
    gpus=0
    if [ "${DEVICE:-}" = cpu ]; then return; fi
    # device_count() asks the driver's library, which answers even if the driver is too old for torch's CUDA.
    local code="import torch; print(torch.cuda.is_available() * torch.cuda.device_count())"
    gpus=$(quietly "$PYTHON" -c "$code")
    if [ "$gpus" = 0 ] && grep -q "^GPU [0-9]*:" <<<"$(nvidia-smi -L 2>/dev/null)"; then
        code="import torch; print(f'torch {torch.__version__}', f'(CUDA {torch.version.cuda or None})')"
        echo "error: nvidia-smi lists GPUs, but $("$PYTHON" -c "$code") of $PYTHON sees" \
            "none${CUDA_VISIBLE_DEVICES+ (CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES)}: install a torch for the CUDA" \
            "version that nvidia-smi shows (see pytorch.org) or a newer driver, or set DEVICE=cpu to use the CPU" >&2
        exit 1
    fi
}

train() {  # this command: one run, or a sweep if SEEDS or GRID is set
    trap - INT
    if [ -n "${SEEDS:-}${GRID:-}" ]; then "$PYTHON" tools/sweep.py -- "$@"; else "$@"; fi
    trap interrupted INT
}

next_steps() {
    local python=$PYTHON data="" score="" artifact=final_model.npz name launcher
    if [ -n "${RUN_ID:-}" ]; then artifact=$(printf %q "logs/$RUN_ID.npz"); fi
    echo
    echo "next:"
    if [ "$caller" != "$PWD" ]; then echo "    cd $(printf %q "$PWD")"; fi
    if [ "$PYTHON" = .venv/bin/python ]; then
        python=python
        if [ "${VIRTUAL_ENV:-}" != "$PWD/.venv" ]; then echo "    source .venv/bin/activate"; fi
    fi
    for name in DATA_PATH TOKENIZER_PATH; do
        if [ -n "${!name:-}" ]; then data+="$name=$(printf %q "${!name}") "; fi
    done
    # The knobs of role "score"
    for name in EVAL_MODE CANONICAL_MASK NGRAM_TILT VAL_BATCH_SIZE EVAL_MAX_SECONDS "${!TTT_@}" COMPUTE_DTYPE DEVICE ATTENTION; do
        if [ -n "${!name:-}" ]; then score+="$name=$(printf %q "${!name}") "; fi
    done
    launcher=$python
    if [ "${NPROC:-1}" != 1 ]; then launcher+=" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc_per_node=$NPROC"; fi
    if [ -z "${SEEDS:-}${GRID:-}" ]; then
        echo "    $data$python tools/sample.py $artifact --prompt '${prompt:-The }'"
        echo "    ${data}${score}EVAL_ONLY=$artifact $launcher $(printf %q "$script")"
        echo "    ${given}SEEDS='1337 42 2025' ./run.sh"
    else
        echo "    \$(./run.sh setup) tools/compare.py $("$PYTHON" tools/sweep.py --patterns)"  # it needs scipy
    fi
}

record_settings() {  # of the record run on GPUs
    local data="${DATA_PATH:-./data/datasets/fineweb10B_sp1024}" here=""
    if [ "$caller" != "$PWD" ]; then here="cd $(printf %q "$PWD") && "; fi
    export NPROC="${NPROC:-$gpus}"
    if ! compgen -G "$data/fineweb_train_*.bin" >/dev/null; then
        echo "error: DATA_PATH=$data has no fineweb_train_NNNNNN.bin; run: $here$PYTHON data/download_fineweb.py" >&2
        exit 1
    fi
    # The published warmdown of 3,000 steps was 0.41 of its 600 s on 8 x H100; other numbers of GPUs need the fraction.
    if [ "$NPROC" != 8 ] && [[ -z "${WARMDOWN_ITERS:-}" && ! "${GRID:-}" =~ (^|[[:space:]])WARMDOWN_ITERS= ]]; then
        export WARMDOWN_FRAC="${WARMDOWN_FRAC:-0.41}"
    fi
}

record() {  # on GPUs
    record_settings
    train "$PYTHON" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc_per_node="$NPROC" "$script"
    next_steps
}

demonstration_settings() {  # on a CPU: a model of 1 or 4 million parameters, on Python's own text or on DATA_PATH
    local settings line own="${DATA_PATH:-}"
    # glibc keeps freed memory. Else its pages fault again in every step, which cost more than the arithmetic.
    export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1099511627776
    settings=$(quietly "$PYTHON" tools/demo_settings.py)
    while IFS= read -r line; do
        if [[ "$line" == [A-Z]*=* ]]; then export "$line"; else echo "$line"; fi
    done <<<"$settings"
    if [ -z "$own" ]; then
        prompt="def __init__(self,"
        quietly "$PYTHON" data/demo_corpus.py "$DATA_PATH"
    fi
}

demonstration() {  # on a CPU
    local prompt=""
    demonstration_settings
    train "$PYTHON" tools/launch.py "$PYTHON" "$script"
    if [ -z "${SEEDS:-}${GRID:-}" ]; then
        if "$PYTHON" -c "import matplotlib" 2>/dev/null; then
            quietly "$PYTHON" tools/plot.py "logs/$RUN_ID.txt" -o "logs/$RUN_ID.png"
        fi
        quietly "$PYTHON" tools/report.py "logs/$RUN_ID.jsonl" "logs/$RUN_ID.npz" --prompt "$prompt"
    fi
    next_steps
}

check() {  # of the machine
    local prompt compile="${COMPILE:-}"  # the user's
    if [ "$gpus" -gt 0 ]; then
        record_settings
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # as torchrun sets it
    else
        demonstration_settings
        if [ -z "$compile" ] && [ "${COMPILE:-0}" != 0 ]; then
            echo "the check does not compile; the demonstration does, so its steps are faster"
        fi
        export COMPILE="${compile:-0}"
    fi
    trap - INT
    "$PYTHON" tools/launch.py "$PYTHON" tools/check_machine.py
}

case "${1:-}" in
    "" | check)
        set_up requirements.txt
        if [ -n "${SCRIPT:-}" ]; then "$PYTHON" tools/pack_code.py --check "$SCRIPT"; fi
        count_gpus
        # train_gpt.py refuses names that are nearly one of these, and leaves what comes next to next_steps.
        export RUN_SH="NPROC SEEDS GRID SCRIPT DEMO_SIZE"
        if [ "${1:-}" = check ]; then check; elif [ "$gpus" -gt 0 ]; then record; else demonstration; fi
        ;;
    test)
        set_up requirements-dev.txt
        export OMP_WAIT_POLICY=PASSIVE
        # One process more than cores that it may use, as tests often wait for what they start.
        code='import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())'
        processes=$(($("$PYTHON" -c "$code") + 1))
        exec "$PYTHON" -m pytest -q -n "$processes" --maxprocesses 8 --dist worksteal "${@:2}"
        ;;
    setup)
        set_up requirements-dev.txt
        echo "$PYTHON"
        ;;
    -h | --help) usage ;;
    *)
        usage >&2
        code="import difflib, sys; print(*difflib.get_close_matches(sys.argv[1], ['check', 'test', 'setup'], 1))"
        suggestion=$(python3 -c "$code" "$1")
        echo "error: run.sh has no command $1${suggestion:+; did you mean $suggestion?}" >&2
        exit 2
        ;;
esac
