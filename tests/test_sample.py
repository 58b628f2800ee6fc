"""tools/sample.py: a model continues a text."""

import io
import sys
from unittest import mock

import pytest
import torch

import program
import caseops
import sample
import train_gpt
from conftest import PARTS, VOCAB, assert_mistake, exported, made, noise, run, weights_of
from train_gpt import BOS

SAMPLE = sample.__file__
TEXT = torch.randint(4, VOCAB, (70,), generator=torch.Generator().manual_seed(3)).tolist()
for place in (0, 9, 10, 25, 48):
    TEXT[place] = BOS


@pytest.mark.parametrize("parts", [{}, PARTS])
def test_the_model_sees_the_last_tokens(one_rank, parts):
    hp, runtime = one_rank(**parts)
    model = noise(made(hp, runtime.attend))
    reader = sample.Reader(hp, weights_of(model))
    for ids in (TEXT[:7], TEXT):
        reader.ids = ids
        with torch.no_grad():
            expected = model(torch.tensor([ids[-hp.eval_seq_len :]]))[0, -1]
        assert reader.logits().equal(expected)


def test_sampling():
    logits = torch.tensor([0.0, 3.0, 1.0])
    generator = torch.Generator().manual_seed(1)
    assert [sample.sampled(logits, t, generator) for t in (0, 5e-324, 0.01)] == [1] * 3
    drawn = [sample.sampled(logits, 2.0, generator) for _ in range(4000)]
    drawn = torch.tensor(drawn).bincount() / 4000
    # The largest deviation of a share is sqrt(0.25 / 4000) = 0.008; four of them.
    assert torch.allclose(drawn, (logits / 2).softmax(-1), atol=0.032)


def test_a_document_ends_a_text(hyperparameters, monkeypatch):
    reader = sample.Reader(hyperparameters(), weights_of(made(hyperparameters())))
    monkeypatch.setattr(sample, "sampled", lambda *_: 7 if len(reader.ids) < 4 else BOS)
    assert list(reader.continued(9, 0, None)) == [7, 7, 7] and reader.ids == [BOS, 7, 7, 7, BOS]
    monkeypatch.setattr(sample, "sampled", lambda *_: 8)
    assert list(reader.continued(2, 0, None)) == [8, 8] and reader.ids[-3:] == [BOS, 8, 8]


def test_a_character_of_several_tokens_comes_whole(data):
    tokenizer = caseops.Tokenizer(str(data / "tokenizer.model"), VOCAB)
    ids = [BOS, *tokenizer.encode("x")]
    after = tokenizer.encode("\u4e2d!")[-4:]  # three bytes, then a character
    parts = list(sample.texts(ids, (ids.append(token) for token in after), tokenizer.decode, 0))
    assert parts == ["x\u4e2d", "!", ""]
    cut = [BOS, *tokenizer.encode("x"), *after[:1]]
    assert "".join(sample.texts(cut, iter([0]), tokenizer.decode, 1)) == "\ufffd"


@pytest.fixture(scope="module")
def artifact(data, hyperparameters, tmp_path_factory):
    """An artifact of a model of random weights, made with the tokenizer of `data`."""
    hp, path = hyperparameters(**PARTS), tmp_path_factory.mktemp("artifact") / "a.npz"
    metadata = {"tokenizer_sha256": train_gpt.sha256_of(data / "tokenizer.model")}
    path.write_bytes(exported(weights_of(noise(made(hp))), hp, metadata=metadata))
    return path


def test_the_program_repeats_itself(artifact, data, tmp_path):
    def said(*options) -> str:
        knobs = {"TOKENIZER_PATH": str(data / "tokenizer.model"), "COMPUTE_DTYPE": "float32"}
        command = [SAMPLE, artifact, "--prompt", "def x", "--tokens", 12, *options]
        result = run(command, {**knobs, "DEVICE": "cpu"}, tmp_path)
        assert "tokens in" in result.stderr and "per second" in result.stderr
        return result.stdout

    first = said()
    assert first.startswith("def x") and len(first) > len("def x\n")
    assert said() == first != said("--seed", 2)
    assert said("--temperature", 0) == said("--temperature", 0, "--seed", 2) != first


def test_a_talk_is_one_text_until_an_empty_line(artifact, data, monkeypatch, capsys):
    """Standard input that is no terminal is the prompt, which must be text."""
    seen = []
    noted = lambda reader, *_: seen.append(list(reader.ids)) or iter([])  # noqa: E731
    monkeypatch.setattr(sample.Reader, "continued", noted)
    monkeypatch.setattr("builtins.input", mock.Mock(side_effect=["a", "b", "", "c", EOFError]))
    monkeypatch.setenv("TOKENIZER_PATH", str(data / "tokenizer.model"))
    monkeypatch.setattr(sys, "argv", ["sample.py", str(artifact)])
    whole = io.TextIOWrapper(io.BytesIO("caf\xe9\nfile".encode()), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", whole)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    sample.main()
    tokenizer = caseops.Tokenizer(str(data / "tokenizer.model"), VOCAB)
    a, b, c, whole = map(tokenizer.encode, ("a", "b", "c", "caf\xe9\nfile"))
    assert seen == [[BOS, *a], [BOS, *a, *b], [BOS, *c]]
    capsys.readouterr()
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    sample.main()
    assert seen[3:] == [[BOS, *whole]]
    assert capsys.readouterr().out == tokenizer.decode(whole) + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="latin-1"))
    with pytest.raises(train_gpt.UserError, match="the prompt is not UTF-8 text"):
        sample.main()


def test_ctrl_c_within_a_text_is_one_sentence(artifact, data, monkeypatch, capsys):
    def interrupted(reader, *_):
        reader.ids.append(reader.ids[-1])
        yield reader.ids[-1]
        raise KeyboardInterrupt

    monkeypatch.setattr(sample.Reader, "continued", interrupted)
    monkeypatch.setenv("TOKENIZER_PATH", str(data / "tokenizer.model"))
    monkeypatch.setattr(sys, "argv", ["sample.py", str(artifact), "--prompt", "x"])
    with pytest.raises(SystemExit) as ended:
        program.run_program(sample.main)
    printed = capsys.readouterr()
    assert ended.value.code == 130 and printed.err == "error: interrupted by Ctrl-C\n"
    assert printed.out.startswith("x") and printed.out.endswith("\n")


@pytest.mark.parametrize(
    "options, status, part",
    [
        (["none.xz"], 1, "artifact none.xz cannot be used: No such file or directory"),
        (["cut.xz"], 1, "artifact cut.xz cannot be used"),
        (["a.xz", "TOKENIZER_PATH=none.model"], 1, "TOKENIZER_PATH=none.model: No such"),
        (["a.xz", "TOKENIZER_PATH=other.model"], 1, "other.model is not the tokenizer of a.xz"),
        (["a.xz", "--temperature", "nan"], 2, "--temperature nan is not"),
        (["a.xz", "--tokens", "0"], 2, "--tokens: 0 is not a whole number above 0"),
        (["a.xz", "--prompt", "\udcff"], 2, "--prompt: it is not UTF-8 (invalid start byte)"),
        (["a.xz", "NUM_LAYERS=1"], 1, "NUM_LAYERS=1 is set, but a.xz was made with 5"),
        ([], 2, "required: artifact"),
    ],
)
def test_mistakes_are_named(artifact, data, tmp_path, options, status, part):
    blob = artifact.read_bytes()
    (tmp_path / "a.xz").write_bytes(blob)
    (tmp_path / "cut.xz").write_bytes(blob[:-50])
    (tmp_path / "other.model").write_bytes((data / "tokenizer.model").read_bytes() + b"\0")
    knobs = dict(option.split("=") for option in options if "=" in option)
    words = [option for option in options if "=" not in option]
    assert_mistake([SAMPLE, *words], tmp_path, part, status, **knobs)
