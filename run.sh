#!/usr/bin/env bash
# Set up and run on this machine.
set -euo pipefail

usage() {
    cat <<'TEXT'
./run.sh             set up and train: the record run on all GPUs, or a demonstration of a few minutes on a CPU
./run.sh test [...]  set up and run the tests (more arguments go to pytest)
./run.sh setup       set up only and print the interpreter

Knobs are environment variables (python train_gpt.py --help lists them) and override the settings of this script:
NPROC=2 ./run.sh     number of processes under torchrun (default: the number of GPUs, or 1)
DEMO_SECONDS=30      training seconds of the demonstration (default 150)
SEEDS="1337 42" ./run.sh                                 one run per seed, and a table; can be interrupted and resumed
GRID="MATRIX_LR=0.02,0.025 MUON_WD=0.03,0.04" ./run.sh   every combination of these values with every seed
TEXT
}

cd "$(dirname "${BASH_SOURCE[0]}")"

# Find a Python with the packages of this requirements file: the current one (rented machines have torch and
# FlashAttention installed, and any supported torch will do), else .venv, which is made if necessary.
set_up() {
    local imports="import constriction, numpy, safetensors, sentencepiece, torch"
    imports+="; v = torch.__version__.split('.'); assert (int(v[0]), int(v[1])) >= (2, 9)"
    [ "$1" = requirements-dev.txt ] && imports+="; import huggingface_hub, matplotlib, pyarrow, pytest, ruff, scipy, tqdm, zstandard"
    for PYTHON in python3 .venv/bin/python; do
        if "$PYTHON" -c "$imports" 2>/dev/null; then return; fi
    done
    echo "installing $1 into .venv (a few minutes, once)" >&2
    { python3 -m venv .venv && .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$1"; } >&2 || {
        echo "error: could not install $1 into .venv: see the messages above, or install it yourself and start again" >&2
        exit 1
    }
}

train() {  # python with these options: one run, or a sweep if SEEDS or GRID is set
    if [ -n "${SEEDS:-}${GRID:-}" ]; then
        "$PYTHON" tools/sweep.py -- "$PYTHON" "$@" train_gpt.py
    else
        "$PYTHON" "$@" train_gpt.py
    fi
}

record() {  # on GPUs
    local gpus="$1" data="${DATA_PATH:-./data/datasets/fineweb10B_sp1024}"
    if ! compgen -G "$data/fineweb_train_*.bin" >/dev/null; then
        echo "error: DATA_PATH=$data has no fineweb_train_*.bin; run: $PYTHON data/download_fineweb.py" >&2
        exit 1
    fi
    # The published warmdown of 3,000 steps was 0.41 of its 600 s on 8 x H100; other machines need the fraction.
    if [ "$gpus" != 8 ]; then export WARMDOWN_FRAC="${WARMDOWN_FRAC:-0.41}"; fi
    train -m torch.distributed.run --standalone --nproc_per_node="${NPROC:-$gpus}"
}

demonstration() {  # on a CPU: a model of 4 million parameters on text that is on every machine
    local nproc="${NPROC:-1}" run="${RUN_ID:-demo}" data=demo_data
    # OpenMP threads that spin while they wait made bf16 ten times slower if anything else ran.
    export OMP_WAIT_POLICY=PASSIVE
    "$PYTHON" data/demo_corpus.py "$data"
    knobs() { for knob in "$@"; do export "${knob%%=*}=$(printenv "${knob%%=*}" || echo "${knob#*=}")"; done; }
    knobs RUN_ID="$run" DATA_PATH="$data" TOKENIZER_PATH="$data/tokenizer.model"
    knobs MAX_WALLCLOCK_SECONDS="${DEMO_SECONDS:-150}"
    knobs NUM_LAYERS=6 MODEL_DIM=256 NUM_HEADS=4 NUM_KV_HEADS=2 BIGRAM_VOCAB_SIZE=2048 XSA_LAST_N=4
    knobs TRAIN_SEQ_LEN=512 EVAL_SEQ_LEN=512 TRAIN_BATCH_TOKENS=4096
    # For a few hundred steps: shorter averages and momentum warm-up, warmdown as a fraction, no extra graphs.
    knobs ITERATIONS=2000 WARMDOWN_FRAC=0.5 EMA_DECAY=0.95 MUON_MOMENTUM=0.95 MUON_MOMENTUM_WARMUP_START=0.85
    knobs MUON_MOMENTUM_WARMUP_STEPS=50 LATE_QAT=0 SHORT_SEQ_PARTS=1 WARMUP_STEPS=2 VAL_LOSS_EVERY=100 TRAIN_LOG_EVERY=20
    if [ "$nproc" -gt 1 ]; then
        local threads=$(($(getconf _NPROCESSORS_ONLN) / nproc))
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
        train -m torch.distributed.run --standalone --nproc_per_node="$nproc"
    else
        train
    fi
    if [ -n "${SEEDS:-}${GRID:-}" ]; then return; fi
    "$PYTHON" -c "import matplotlib" 2>/dev/null && "$PYTHON" tools/plot.py "logs/$RUN_ID.txt" -o "logs/$RUN_ID.png"
    "$PYTHON" tools/report.py "$data" "logs/$RUN_ID.jsonl" "final_model.int6.xz"  # ends with the scores
}

case "${1:-}" in
    "")
        set_up requirements.txt
        gpus=$("$PYTHON" -c "import torch; print(torch.cuda.device_count())")
        if [ "$gpus" -gt 0 ]; then record "$gpus"; else demonstration; fi
        ;;
    test)
        set_up requirements-dev.txt
        export OMP_WAIT_POLICY=PASSIVE
        exec "$PYTHON" -m pytest -q "${@:2}"
        ;;
    setup)
        set_up requirements-dev.txt
        echo "$PYTHON"
        ;;
    -h | --help) usage ;;
    *)
        usage >&2
        exit 2
        ;;
esac
