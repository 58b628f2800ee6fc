"""MICRO_BATCH_TOKENS=0: the tokens of a forward follow from a GPU's free memory."""

import pytest
import torch

import train_gpt
from conftest import variables
from train_gpt import Comm, Hyperparameters

# Peak memory of a training step in MiB: modelled by bench/h100.py, 1 of 8 ranks unless a row says
# otherwise, torch 2.9.1, 2026-11-24.
FRONTIER = variables("frontier")
MODELLED = {
    "defaults": ({}, 98_304, 17_086),
    "half": ({}, 49_152, 8_855),
    "quarter": ({}, 24_576, 4_655),
    "8,192 pieces": ({"VOCAB_SIZE": "8192"}, 98_304, 18_326),
    "6 layers": ({"NUM_LAYERS": "6"}, 98_304, 10_007),
    "MLP of 4 widths": ({"MLP_MULT": "4"}, 98_304, 19_335),
    "width 768": ({"MODEL_DIM": "768", "NUM_HEADS": "12", "NUM_KV_HEADS": "6"}, 49_152, 13_379),
    "frontier.env": (FRONTIER, 98_304, 34_346),
    "frontier.env, quarter": (FRONTIER, 24_576, 9_092),
    "frontier.env, no loop": (FRONTIER | {"LOOP_VISITS": "1"}, 98_304, 23_002),
    "2135.env": (variables("2135"), 98_304, 32_991),
    "one_gpu.env": (variables("one_gpu"), 98_304, 17_330),  # the only rank, which owns all rows
}
GPUS = (24, 32, 40, 48, 80)  # GB


@pytest.mark.parametrize("name", MODELLED)
def test_the_formula_is_a_little_above_the_model(name):
    knobs, tokens, modelled = MODELLED[name]
    fixed, per_token = train_gpt.step_memory(Hyperparameters.from_env(knobs), torch.bfloat16)
    assert modelled <= (fixed + per_token * tokens) / (1 << 20) <= 1.3 * modelled


def chosen(
    monkeypatch, free_gb: list[float], knobs: dict, rank: int = 0, dtype=torch.bfloat16
) -> int:
    """What a rank chooses if these are the free GB of all ranks."""

    def gather(values: list, value: float):
        assert value == int(1e9 * free_gb[rank]) and len(values) == len(free_gb)
        values[:] = [int(1e9 * free) for free in free_gb]

    monkeypatch.setattr(train_gpt.dist, "all_gather_object", gather)
    monkeypatch.setattr(train_gpt.dist, "get_rank", lambda: rank)
    free = int(1e9 * free_gb[rank])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 0))
    comm, gpu = Comm(rank, len(free_gb)), torch.device("cuda", 0)
    hp = Hyperparameters.from_env(knobs)
    return train_gpt.choose_micro_batch(hp, comm, gpu, dtype)


@pytest.mark.parametrize("gigabytes", GPUS)
@pytest.mark.parametrize("name", ["defaults", "frontier.env", "one_gpu.env"])
def test_what_is_chosen_fits(monkeypatch, gigabytes, name):
    """By the formula, and by the modelled bytes per token of the same configuration."""
    knobs, full, modelled = MODELLED[name]
    tokens = chosen(monkeypatch, [gigabytes * 0.98], knobs)
    assert tokens % 2048 == 0 and 2048 <= tokens <= 98_304
    assert modelled * tokens / full + 1000 < gigabytes * 1e9 * 0.95 / (1 << 20)
    if gigabytes == 80 or (gigabytes >= 24 and name != "frontier.env"):
        assert tokens == 98_304


def test_all_ranks_take_what_fits_the_smallest(monkeypatch):
    choices = {chosen(monkeypatch, [80, 20, 80], FRONTIER, rank) for rank in range(3)}
    assert len(choices) == 1 and choices == {chosen(monkeypatch, [20], FRONTIER)}


def test_a_small_gpu_still_gets_a_sequence(monkeypatch):
    assert chosen(monkeypatch, [0.5], FRONTIER) == 2048


def test_a_cpu_has_a_fixed_size():
    cpu = torch.device("cpu")
    hp = Hyperparameters()
    assert train_gpt.choose_micro_batch(hp, Comm(), cpu, torch.float32) == 16_384


def test_fp32_takes_half_the_tokens_and_many_pieces_need_room_for_logits(monkeypatch):
    bf16, fp32 = (
        chosen(monkeypatch, [16], FRONTIER, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert bf16 // 2 - 2048 <= fp32 <= bf16 // 2 + 2048
    pieces = {"VOCAB_SIZE": "65536", "NUM_LAYERS": "2", "XSA_LAST_N": "2"}
    plain, gptq = (
        train_gpt.step_memory(
            Hyperparameters.from_env(pieces | {"GPTQ_BATCHES": count}), torch.bfloat16
        )[1]
        for count in ("0", "4")
    )
    assert plain < gptq == 14 * 65536
