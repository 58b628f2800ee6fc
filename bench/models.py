"""The small model of the benchmarks, for a CPU: 4.1 million parameters."""

SMALL = {
    "NUM_LAYERS": "6",
    "MODEL_DIM": "256",
    "NUM_HEADS": "4",
    "NUM_KV_HEADS": "2",
    "TRAIN_SEQ_LEN": "512",
    "EVAL_SEQ_LEN": "512",
    "TRAIN_BATCH_TOKENS": "16384",
}
