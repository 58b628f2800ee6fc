"""The artifact: what is written is what is read, exactly; a damaged one is refused with a sentence."""

import errno
import json
import lzma
import struct

import pytest
import torch

import train_gpt
from conftest import made, weights_of
from train_gpt import GPT, UserError, quantise_rows


@pytest.fixture
def model(hyperparameters):
    model = made(hyperparameters(), None, torch.float32, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.05)
    return model


def loaded(blob, hp) -> GPT:
    twin = GPT(hp, None, torch.float32)
    train_gpt.load_artifact(blob, twin)
    return twin


@pytest.mark.parametrize("bits, clip", [(6, 7.0), (8, 6.0)])
def test_codes_are_within_their_bits_and_half_a_step(bits, clip):
    rows = torch.randn(5, 40, 300, generator=torch.Generator().manual_seed(0))
    codes, scale = quantise_rows(rows, bits, clip)
    top = 2 ** (bits - 1) - 1
    assert codes.abs().max() <= top and torch.equal(codes, codes.round())
    inside = (rows / scale).abs() <= top
    assert inside.float().mean() > 0.999
    assert ((codes * scale - rows).abs() <= scale / 2 * 1.0001)[inside].all()
    assert torch.equal(scale, scale.bfloat16().float())


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.05, 0.2, 30.0])
def test_precision_does_not_depend_on_the_size_of_the_weights(size):
    """Faults B13, B14: a floor under the scale left a row of deviation 0.05 with 7 levels and 37 times the error."""
    rows = torch.randn(16, 512, generator=torch.Generator().manual_seed(0))
    for bits, clip in ((6, 7.0), (8, 6.0)):
        codes, scale = quantise_rows(rows * size, bits, clip)
        error = ((codes * scale / size - rows).square().mean() / rows.square().mean()).sqrt()
        step = clip / (2 ** (bits - 1) - 1)
        assert error == pytest.approx(step / 12**0.5, rel=0.05)


def test_rows_of_zeros_are_zeros():
    rows = torch.zeros(2, 3, 8)
    rows[1, 1] = 0.5  # a constant row has no deviation either
    codes, scale = quantise_rows(rows, 6, 6.0)
    assert not codes.any() and not scale.any()


@pytest.mark.parametrize("compressor", ["lzma", "zstd"])
def test_artifact_holds_the_quantised_model(model, compressor, hyperparameters):
    hp = hyperparameters(COMPRESSOR=compressor)
    twin = loaded(train_gpt.pack_artifact(weights_of(model), hp), hp)
    for (entry, original), (_, found) in zip(train_gpt.export_tensors(weights_of(model), model.hp), train_gpt.export_tensors(weights_of(twin), twin.hp), strict=True):
        if entry.bits == 16:
            assert torch.equal(found, original.half().float()), entry.name
        else:
            codes, scale = quantise_rows(original, entry.bits, hp.matrix_clip if entry.bits == 6 else hp.embed_clip)
            assert torch.equal(found, codes * scale), entry.name
    exported = {entry.name for entry, _ in train_gpt.export_tensors(weights_of(model), model.hp)}
    assert len(exported) == len(train_gpt.MATRICES) * hp.num_layers + len(dict(model.named_parameters())) - len(train_gpt.BANKS)


def test_every_block_matrix_is_int6_whatever_its_size(model):
    """The published export left matrices of up to 65,536 elements in half precision."""
    bits = {entry.name: entry.bits for entry, _ in train_gpt.export_tensors(weights_of(model), model.hp)}
    assert all(bits[name] == 6 for _, _, name, _ in train_gpt.bank_rows(model.hp))
    assert bits["tok_emb"] == bits["bigram_emb"] == bits["bigram_proj"] == 8 and bits["q_gain"] == 16


def test_file_is_an_xz_stream_without_pickles(model):
    blob = train_gpt.pack_artifact(weights_of(model), model.hp)
    raw = lzma.decompress(blob, format=lzma.FORMAT_XZ)
    assert raw.startswith(train_gpt.ARTIFACT_MAGIC)
    (length,) = struct.unpack_from("<I", raw, 8)
    assert json.loads(raw[12 : 12 + length])["model"]["model_dim"] == model.hp.model_dim


@pytest.mark.parametrize("compressor", ["lzma", "zstd"])
@pytest.mark.parametrize("damage", ["cut", "one byte", "last byte", "not one", "empty"])
def test_damaged_artifact_is_refused(model, compressor, damage, hyperparameters, tmp_path):
    blob = bytearray(train_gpt.pack_artifact(weights_of(model), hyperparameters(COMPRESSOR=compressor)))
    if damage == "cut":
        del blob[len(blob) // 2 :]
    elif damage == "one byte":
        blob[len(blob) // 2] ^= 1
    elif damage == "last byte":
        del blob[-1]
    else:
        blob = bytearray(b"hello" if damage == "not one" else b"")
    path = tmp_path / "model.xz"
    path.write_bytes(blob)
    with pytest.raises(UserError, match=f"artifact {path} cannot be used"):
        train_gpt.artifact_hyperparameters(str(path), bytes(blob), {})


def rewritten(blob, change) -> bytes:
    """The artifact with another header, in a valid stream."""
    raw = lzma.decompress(blob)
    (length,) = struct.unpack_from("<I", raw, 8)
    header = json.loads(raw[12 : 12 + length])
    change(header)
    text = json.dumps(header).encode()
    return lzma.compress(raw[:8] + struct.pack("<I", len(text)) + text + raw[12 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["tensors"].pop(),
        lambda header: header["tensors"][0].__setitem__(2, [1 << 40, 1 << 40]),
        lambda header: header["tensors"][0].__setitem__(2, [-1, 5]),
        lambda header: header.pop("model"),
        lambda header: header["tensors"].__setitem__(0, 7),
    ],
)
def test_contradictory_header_is_refused(model, change, tmp_path):
    blob = rewritten(train_gpt.pack_artifact(weights_of(model), model.hp), change)
    with pytest.raises(UserError, match="cannot be used"), train_gpt.reading_artifact("a.xz"):
        train_gpt.unpack_artifact(blob)


def test_artifact_of_another_model_is_refused(model, hyperparameters):
    other = GPT(hyperparameters(NUM_LAYERS=4, XSA_LAST_N=2), None, torch.float32)
    with pytest.raises(ValueError, match=r"NUM_LAYERS=3 \(here 4\)"):
        train_gpt.load_artifact(train_gpt.pack_artifact(weights_of(model), model.hp), other)


def test_bomb_is_not_unpacked(monkeypatch):
    monkeypatch.setattr(train_gpt, "MAX_RAW_BYTES", 1 << 20)
    with pytest.raises(ValueError):
        train_gpt.decompress(lzma.compress(bytes(1 << 24), preset=1))


def test_write_is_atomic(tmp_path, monkeypatch):
    """A full disk leaves the file that was there, and no temporary one."""
    path = tmp_path / "final_model.int6.xz"
    train_gpt.write_atomic(path, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train_gpt.os, "fsync", full)
    with pytest.raises(UserError, match="cannot write .*final_model.int6.xz: No space left"):
        train_gpt.write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_over_the_cap_is_an_error():
    """Fault D3."""
    train_gpt.check_size(16_000_000)
    with pytest.raises(UserError, match="16000001 bytes, 1 over the limit"):
        train_gpt.check_size(16_000_001)
