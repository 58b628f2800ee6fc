"""Our model, optimizer, schedules and codes against numbers that published scripts compute
(records/published), and that the comparison notices a fault."""

import pytest
import torch

import conformance
import train_gpt
from conftest import user_error, variables

NAMES = conformance.files()


@pytest.fixture(scope="module", params=NAMES)
def findings(request) -> tuple[str, list[conformance.Finding]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param, conformance.check(request.param)
    torch.set_num_threads(threads)


def test_nothing_differs(findings):
    _, found = findings
    assert not [one.line() for one in found if one.verdict == conformance.DIFFERS]


def test_every_number_of_a_file_is_compared(findings):
    """A renamed parameter or case must not drop out silently."""
    name, found = findings
    # (equal, by design)
    counts = {"399": (297, 7), "2135": (701, 11), "2014": (12, 0), "1941": (16, 0)}
    verdicts = [one.verdict for one in found]
    assert (verdicts.count("equal"), verdicts.count("by design")) == counts[name]


def differing(check, name: str) -> set[str]:
    """The first word of each quantity that differs."""
    found = list(check(conformance.Golden(name)))
    return {one.quantity.split()[0] for one in found if one.verdict == conformance.DIFFERS}


@pytest.mark.parametrize("name", ["399", "2135"])
def test_a_lost_clip_differs(monkeypatch, name):
    knobs = conformance.Golden.knobs
    unclipped = lambda self, *more: knobs(self, *more, {"GRAD_CLIP_NORM": "0"})  # noqa: E731
    monkeypatch.setattr(conformance.Golden, "knobs", unclipped)
    assert "step" in differing(conformance.check_optimizer, name)


def test_a_published_configuration_has_the_knobs_that_were_compared():
    """The tiny models of the golden numbers differ from records/*.env in sizes only, or in what a
    case of its own compares."""
    sizes = {"VOCAB_SIZE", "MODEL_DIM", "NUM_HEADS", "NUM_KV_HEADS", "ROPE_DIMS", "TRAIN_SEQ_LEN"}
    sizes |= {"BIGRAM_VOCAB_SIZE", "BIGRAM_DIM", "TTT_LORA_RANK", "EVAL_SEQ_LEN", "EVAL_STRIDE"}
    sizes |= {"DATA_PATH", "TOKENIZER_PATH", "TTT_LORA_LR"}
    parts = {"SKIP_LERP", "SMEAR_TOKEN", "DOC_ATTENTION", "DOC_LEN", "SKIP_GATES"}
    cases = {"399": ("published", {"ROPE_BASE", "LATE_QAT"})}
    cases["2135"] = ("2135", parts | {"TTT_LORA_TARGETS"})
    for name, (record, compared) in cases.items():
        tiny = conformance.Golden(name).knobs()
        full = train_gpt.Hyperparameters.from_env(variables(record))
        unlike = {
            field.name.upper()
            for field in train_gpt.KNOBS
            if getattr(tiny, field.name) != getattr(full, field.name)
        }
        # The first of these decides only whether there is a third score.
        assert unlike - sizes - {"TTT_ENABLED"} <= compared, name


def test_the_rotary_base_of_the_record():
    """#399 rescales 10000 by T / 1024 to the power d / (d - 2), for T = 2048 and d = 16."""
    hp = train_gpt.Hyperparameters.from_env(variables("published"))
    dims, ratio = hp.rope_dims, hp.train_seq_len / 1024
    assert hp.rope_base == pytest.approx(10000 * ratio ** (dims / (dims - 2)), rel=1e-6)


def test_the_program(capsys, monkeypatch):
    """A line per group; the exit status says whether something differs."""
    monkeypatch.setattr("sys.argv", ["conformance.py", "1941"])
    with pytest.raises(SystemExit) as ended:
        conformance.main()
    assert not ended.value.code
    assert "16 equal, 0 by design, 0 DIFFERS" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["conformance.py", "399", "--all"])
    table = dict(train_gpt.NEWTON_SCHULZ, quintic=((3.4445, -4.7750, 2.0316),))
    monkeypatch.setattr(train_gpt, "NEWTON_SCHULZ", table)
    with pytest.raises(SystemExit) as ended:
        conformance.main()
    assert ended.value.code == 1 and "DIFFERS" in capsys.readouterr().out


def test_an_unknown_record_is_named():
    with user_error("does not exist: choose one of 1941"):
        conformance.Golden("77")
