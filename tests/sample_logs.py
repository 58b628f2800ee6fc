"""Logs for the tests of tools/: of a sweep that conftest.py makes, and of published scripts."""

import json
import re
from pathlib import Path

import warm_python
from conftest import ROOT
from lib import record_curves, runs

SWEEP = [ROOT / "tools" / "sweep.py", "--", warm_python.python(), ROOT / "train_gpt.py"]


def logs_of(sweep: Path, rate: str = "0.025") -> list[Path]:
    return sorted((sweep / "logs").glob(f"t_MATRIX_LR={rate}_seed*.txt"))


PUBLISHED = """\
train_batch_tokens:786432 train_seq_len:2048 iterations:9000 warmup_steps:20 max_wallclock_seconds:600.000
world_size:8 grad_accum_steps:1
seed:42
step:0/9000 val_loss:6.9304 val_bpb:4.1046 train_time:0ms step_avg:0.01ms
step:1/9000 train_loss:6.9322 train_time:133ms step_avg:132.54ms
step:7000/9000 train_loss:1.7889 train_time:584853ms step_avg:83.55ms
step:7179/9000 val_loss:1.9214 val_bpb:1.1379 train_time:600128ms step_avg:83.59ms
stopping_early: wallclock_cap train_time:600128ms step:7179/9000
DIAGNOSTIC post_ema val_loss:1.9196 val_bpb:1.1369 eval_time:1971ms
Serialized model: 106027446 bytes
Code size: 89458 bytes
Serialized model int6+lzma: 15887928 bytes
Total submission size int6+lzma: 15977386 bytes
final_int6_roundtrip val_loss:1.9336 val_bpb:1.1452 eval_time:6562ms
final_int6_roundtrip_exact val_loss:1.93358885 val_bpb:1.14518023
final_int6_sliding_window val_loss:1.8939 val_bpb:1.1217 stride:64 eval_time:74066ms
final_int6_sliding_window_exact val_loss:1.89385556 val_bpb:1.12165091
final_int8_zlib_roundtrip_exact val_loss:1.89385556 val_bpb:1.12165091
"""
LEGAL = """\
ttt_sliding:done val_loss=1.889768 val_bpb=1.119230 elapsed=409.8s
legal_ttt val_loss:1.8898 val_bpb:1.1192 eval_time:410268ms
legal_ttt_exact val_loss:1.88976776 val_bpb:1.11922988
"""
LATER = """\
Hyperparameters:
  matrix_lr: 0.026
  seed: 42
  world_size: 8
1/20000 train_loss: 9.0087 train_time: 0.0m tok/s: 17921784
4500/20000 train_loss: 2.2771 train_time: 9.0m tok/s: 6589668
4945/20000 val_loss: 2.3539 val_bpb: 1.0756
stopping_early: wallclock_cap train_time: 599592ms step: 4945/20000
diagnostic pre-quantization post-ema val_loss:2.32848665 val_bpb:1.06395844 eval_time:6718ms
Code size (uncompressed): 157868 bytes
Code size (compressed): 31999 bytes
Serialized model quantized+pergroup: 15865260 bytes
Total submission size quantized+pergroup: 15897259 bytes
diagnostic quantized val_loss:2.34727563 val_bpb:1.07254371 eval_time:49995ms
quantized_ttt_phased val_loss:2.31944212 val_bpb:1.05989454 eval_time:508785ms
"""


def written(folder: Path, text: str, name: str = "train_seed42.log") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def group(folder: Path, values: dict[int, float], rate: float = 1.7) -> list[runs.Run]:
    """Logs that look published, with these losses by seed."""
    for seed, loss in values.items():
        log = PUBLISHED.replace("seed:42", f"seed:{seed}")
        log = log.replace("1.89385556 val_bpb:1.12165091", f"{loss:.8f} val_bpb:{loss / rate:.8f}")
        written(folder, log, f"train_seed{seed}.log")
    return runs.read_group(str(folder))


def counted(size: int, source: bytes):
    """A change of a log: as if the script that ran had this source and `size` bytes."""

    def change(text: str) -> str:
        text = source.decode() + text[text.index(f"\n{runs.SEPARATOR}\n") :]
        total = size + int(re.search(r"(?m)^Serialized model [^:]+: (\d+) b", text)[1])
        text = re.sub(r"(?m)^Code size: \d+ bytes", f"Code size: {size} bytes", text)
        return re.sub(r"(?m)^(Total submission size.*): \d+ bytes", rf"\1: {total} bytes", text)

    return change


CURVES = json.loads(record_curves.CURVES.read_text())
FINAL = "final_int6_roundtrip_exact val_loss:1.93000000 val_bpb:1.14300000\n"


def log_of(name: str, seed: str, change=lambda step, nats: nats, end=FINAL, **settings) -> str:
    """A log of this script with a record's losses, each changed."""
    settings = {"VOCAB_SIZE": record_curves.VOCABULARIES[name], "SHUFFLE_SEED": 0, **settings}
    lines = ["hyperparameters (* differs from the default)"]
    lines += [f"* {name}={value}" for name, value in settings.items()]
    for step, kind, nats, _, seconds in CURVES[name][seed]["curve"]:
        rate = record_curves.RATES[name](step, seconds) if step and seconds else 1.0
        tail = f"train_time:{1000 * (seconds or 0):.0f}ms step_avg:80.00ms lr_scale:{rate:.4f}"
        extra = "" if kind == "train" else " val_bpb:1.1"
        lines.append(f"step:{step}/9000 {kind}_loss:{change(step, nats):.4f}{extra} {tail}")
    return "\n".join(lines) + "\n" + end
