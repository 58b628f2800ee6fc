#!/usr/bin/env bash
# Set up and run on this machine.
set -euo pipefail

usage() {
    cat <<'TEXT'
./run.sh             set up and train: a full run on all GPUs, or a demo of a few minutes on a CPU
./run.sh check       set up and benchmark this machine for the run with the same knobs
./run.sh test [...]  set up and run the tests; extra arguments go to pytest
./run.sh setup       install what tests and tools need, too, and print the interpreter

Knobs are environment variables (python train_gpt.py --help lists them) and override the settings of this script:
DEVICE=cpu           the demo (configs/cpu.env), even if there are GPUs
NPROC=2              number of processes (default: the number of GPUs; on a CPU a core each. A run or sweep that is
                     continued keeps its bits only with the same number)
DATA_PATH=folder     your own shards; on a CPU their manifest.json names tokenizer and vocabulary (data/README.md)
SCRIPT=packed.py     the packed script instead of train_gpt.py (python tools/pack_code.py -o packed.py)
MAX_WALLCLOCK_SECONDS=30                        limit of the training (the demo: 230)
SEEDS="1337 42 2025"                            a run per seed, and a table; can be interrupted and resumed
GRID="MATRIX_LR=0.02,0.025 MUON_WD=0.03,0.04"   every combination of these values with every seed
TEXT
}

caller=$(pwd -P)
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
here=""
if [ "$caller" != "$PWD" ]; then
    here="cd $(printf %q "$PWD")"
    for name in DATA_PATH TOKENIZER_PATH SCRIPT; do
        if [ -n "${!name:-}" ] && [[ "${!name}" != /* ]]; then export "$name=$caller/${!name}"; fi
    done
fi
# Those of these variables that are set, as words of a command
words() { for name; do if [ -n "${!name:-}" ]; then printf "%s=%q " "$name" "${!name}"; fi; done; }
given=$(words DATA_PATH TOKENIZER_PATH SCRIPT VOCAB_SIZE DEVICE NPROC MAX_WALLCLOCK_SECONDS)
script="${SCRIPT:-train_gpt.py}"
torchrun="-m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc_per_node"
fail() { echo "error: $*" >&2; exit 1; }

# Choose PYTHON and give it the packages of this requirements file: python3 if it has all, else .venv, which also sees
# those of python3. pip keeps a torch in the range: a rented machine's fits its driver.
set_up() {
    local pip="-m pip install --quiet --disable-pip-version-check -r $1" pins=""
    local recent="import sys; sys.version_info < (3, 11) and sys.exit(1)"
    for PYTHON in .venv/bin/python python3; do  # without your pip.conf, whose find-links would count as installed
        if { "$PYTHON" -c "$recent" &&
            PIP_CONFIG_FILE=/dev/null "$PYTHON" $pip --isolated --no-index --dry-run; } >/dev/null 2>&1; then return; fi
    done
    # .venv could not see the packages of a virtual environment, which gets what it lacks.
    python3 -c "$recent; sys.exit(sys.prefix == sys.base_prefix)" 2>/dev/null || PYTHON=.venv/bin/python
    if [ ! -x "$(command -v "$PYTHON")" ]; then
        python3 -c "$recent" 2>/dev/null || fail "Python 3.11 or later is needed, and there is" \
            "$(python3 --version 2>/dev/null || echo "no python3"): install one"
        python3 -m venv --system-site-packages .venv
    fi
    echo "installing $1 into $PYTHON (a few minutes, once)" >&2
    "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip >&2 || true  # uv makes environments without
    # Pins could replace what belongs to a torch that is there.
    "$PYTHON" -c "import sys, torch; sys.exit([*map(int, torch.__version__.split('.')[:2])] < [2, 9])" 2>/dev/null ||
        pins="--constraint constraints.txt"
    "$PYTHON" $pip $pins >&2 ||
        fail "could not install $1 into $PYTHON: see the messages above, or install it yourself and start again"
}

count_gpus() {  # to train on, as gpus
    gpus=0
    if [ "${DEVICE:-}" = cpu ]; then return; fi
    # device_count() asks the driver's library, which answers even if the driver is too old for torch's CUDA.
    gpus=$("$PYTHON" -c "import torch; print(torch.cuda.is_available() * torch.cuda.device_count())")
    if [ "$gpus" = 0 ] && grep -q "^GPU [0-9]*:" <<<"$(nvidia-smi -L 2>/dev/null)"; then
        local code="import torch; print(f'torch {torch.__version__} (CUDA {torch.version.cuda})')"
        fail "nvidia-smi lists GPUs, but $("$PYTHON" -c "$code") of $PYTHON sees" \
            "none${CUDA_VISIBLE_DEVICES+ (CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES)}: install a torch for the CUDA" \
            "version that nvidia-smi shows (see pytorch.org) or a newer driver, or set DEVICE=cpu to use the CPU"
    fi
}

record_settings() {
    local data="${DATA_PATH:-./data/datasets/fineweb10B_sp1024}" variant=""
    if [[ "$data" =~ fineweb10B_([a-z0-9_]+)$ && "$data" != *_sp1024 ]]; then variant=" --variant ${BASH_REMATCH[1]}"; fi
    compgen -G "$data/fineweb_train_*.bin" >/dev/null || fail "DATA_PATH=$data has no fineweb_train_NNNNNN.bin; run:" \
        "${here:+$here && }$PYTHON data/download_fineweb.py$variant"
    export NPROC="${NPROC:-$gpus}"
    # The published warmdown of 3,000 steps was 0.41 of its 600 s on 8 x H100; other numbers of GPUs need the fraction.
    if [ "$NPROC" != 8 ] && [[ -z "${WARMDOWN_ITERS:-}" && ! "${GRID:-}" =~ (^|[[:space:]])WARMDOWN_ITERS= ]]; then
        export WARMDOWN_FRAC="${WARMDOWN_FRAC:-0.41}"
    fi
}

demonstration_settings() {  # on a CPU, on Python's own text or on DATA_PATH
    # glibc keeps freed memory. Else its pages fault again in every step, which cost more than the arithmetic.
    export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1099511627776
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    local chosen line own="${DATA_PATH:-}"
    chosen=$("$PYTHON" tools/demo_settings.py)
    while IFS= read -r line; do export "$line"; done <<<"$chosen"
    if [ -z "$own" ]; then
        prompt="def __init__(self,"
        "$PYTHON" data/demo_corpus.py "$DATA_PATH"
    fi
}

train() {  # one run, or a sweep if SEEDS or GRID is set
    local launcher="tools/launch.py $PYTHON"
    if [ "$gpus" -gt 0 ]; then launcher="$torchrun=$NPROC"; fi
    if [ -n "${SEEDS:-}${GRID:-}" ]; then "$PYTHON" tools/sweep.py -- "$PYTHON" $launcher "$script"; return; fi
    "$PYTHON" $launcher "$script"
    if [ "$gpus" = 0 ]; then "$PYTHON" tools/report.py "logs/$RUN_ID".{jsonl,npz} --prompt "${prompt:-}"; fi
}

next_steps() {
    local python=${PYTHON#.venv/bin/} launcher="" artifact=final_model
    if [ -n "${RUN_ID:-}" ]; then artifact=$(printf %q "logs/$RUN_ID"); fi
    printf "\nnext:\n"
    if [ -n "$here" ]; then echo "    $here"; fi
    if [ "$python" != "$PYTHON" ] && [ "${VIRTUAL_ENV:-}" != "$PWD/.venv" ]; then
        echo "    source .venv/bin/activate"
    fi
    if [ -n "${SEEDS:-}${GRID:-}" ]; then
        echo "    \$(./run.sh setup) tools/compare.py $("$PYTHON" tools/sweep.py --patterns)"  # it needs scipy
        return
    fi
    if [ "${NPROC:-1}" != 1 ]; then launcher=" $torchrun=$NPROC"; fi
    echo "    $python tools/sample.py $artifact.npz --prompt '${prompt:-The }'"
    echo "    EVAL_ONLY=$artifact.npz $python$launcher $(printf %q "$script")"
    echo "    ${given}SEEDS='1337 42 2025' ./run.sh"
}

case "${1:-}" in
    "" | check)
        set_up requirements.txt
        if [ -n "${SCRIPT:-}" ]; then "$PYTHON" tools/pack_code.py --check "$SCRIPT"; fi
        count_gpus
        # train_gpt.py refuses names that are nearly one of these, and leaves what comes next to next_steps.
        export RUN_SH="NPROC SEEDS GRID SCRIPT"
        if [ "$gpus" -gt 0 ]; then record_settings; else demonstration_settings; fi
        if [ "${1:-}" = check ]; then
            export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # as torchrun sets it
            exec "$PYTHON" tools/launch.py "$PYTHON" tools/check_machine.py
        fi
        train
        next_steps ;;
    test)
        set_up requirements-dev.txt
        n=$("$PYTHON" -c "import program; print(program.cores() + 1)")  # tests wait for what they start
        OMP_WAIT_POLICY=PASSIVE exec "$PYTHON" -m pytest -q -n "$n" --maxprocesses 8 --dist worksteal "${@:2}" ;;
    setup) set_up requirements-dev.txt; echo "$PYTHON" ;;
    -h | --help) usage ;;
    *) usage >&2; fail "run.sh has no command $1" ;;
esac
