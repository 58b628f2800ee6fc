"""The challenge's four conditions as probes of any evaluator, by what goes in and what comes out.

An evaluator is a function: tokens (n + 1,) int32 -> nats (n,) float64, where nats[t] is the loss of tokens[t + 1]. Each
probe returns a sentence that says what it found wrong, or "".

C1  strictly causal: nats[t] depends on tokens[: t + 2] alone         future, truncation
C2  a whole distribution over the vocabulary at every position        distribution
C3  a target is scored before any update that saw it                  order (of what an evaluator does, as its spy tells)
C4  one pass from left to right, every target scored exactly once     order, and complete

`evaluator_of` makes such a function of a script built as train_gpt.py, `spied` tells what it does, and `suite` tries all
probes on all its ways of evaluation; records/check_record.py runs that on the script of a submission.
"""

import copy
import math
from collections.abc import Callable, Iterable
from types import ModuleType
from unittest import mock

import torch

Evaluate = Callable[[torch.Tensor], torch.Tensor]


def future(evaluate: Evaluate, tokens: torch.Tensor, vocab_size: int, cuts: Iterable[int]) -> str:
    """C1: with all tokens after target t replaced by others, nats[: t + 1] stay what they were, bit for bit."""
    before = evaluate(tokens)
    generator = torch.Generator().manual_seed(0)
    for cut in cuts:
        changed = tokens.clone()
        shift = torch.randint(1, vocab_size, (len(tokens) - cut - 2,), generator=generator, dtype=torch.int32)
        changed[cut + 2 :] = (changed[cut + 2 :] + shift) % vocab_size
        wrong = (evaluate(changed)[: cut + 1] != before[: cut + 1]).nonzero()
        if len(wrong):
            return f"C1: the loss of target {int(wrong[0])} changes with tokens after target {cut}"
    return ""


def truncation(evaluate: Evaluate, tokens: torch.Tensor, cuts: Iterable[int]) -> str:
    """C1: a stream that ends at target t gives the same nats[: t + 1]."""
    before = evaluate(tokens)
    for cut in cuts:
        wrong = (evaluate(tokens[: cut + 2].clone()) != before[: cut + 1]).nonzero()
        if len(wrong):
            return f"C1: the loss of target {int(wrong[0])} changes when the stream ends after target {cut}"
    return ""


def distribution(
    evaluate: Evaluate, tokens: torch.Tensor, vocab_size: int, targets: Iterable[int], tolerance: float = 1e-4
) -> str:
    """C2: the probabilities that a target's place gives to every token of the vocabulary are over 0 and add up to 1."""
    for target in targets:
        stream, chances = tokens.clone(), []
        for token in range(vocab_size):
            stream[target + 1] = token
            chances.append(math.exp(-evaluate(stream)[target].item()))
        if min(chances) <= 0 or abs(math.fsum(chances) - 1) > tolerance:
            return f"C2: the probabilities of target {target} add up to {math.fsum(chances):.4f}, the least is {min(chances):.2g}"
    return ""


def complete(evaluate: Evaluate, tokens: torch.Tensor) -> str:
    """C4: every target has one finite loss."""
    nats = evaluate(tokens)
    if len(nats) != len(tokens) - 1:
        return f"C4: {len(nats)} losses for {len(tokens) - 1} targets"
    wrong = (~nats.isfinite()).nonzero()
    return f"C4: target {int(wrong[0])} has no loss" if len(wrong) else ""


def order(events: list[tuple[str, list[int]]], targets: int, within: Callable[[int], int] = lambda target: 0) -> str:
    """C3 and C4 of what was done, in order: ("score", targets) and ("learn", targets whose losses an update saw).

    `within` tells which pass a target belongs to (a document that is adapted alone, say). In each pass everything is
    scored once, from left to right as far as learning lies between, and nothing is learned from before it is scored.
    """
    seen, reached, lowest = set(), {}, {}
    for kind, numbers in events:
        if kind == "score":
            for target in numbers:
                if target in seen:
                    return f"C4: target {target} is scored twice"
                if target < lowest.get(within(target), 0):
                    return f"C4: target {target} is scored after an update that followed later ones"
            seen.update(numbers)
            for target in numbers:
                reached[within(target)] = max(reached.get(within(target), 0), target)
        else:
            unseen = sorted(set(numbers) - seen)
            if unseen:
                return f"C3: target {unseen[0]} is learned from before it is scored"
            for target in numbers:
                lowest[within(target)] = reached[within(target)]
    missing = set(range(targets)) - seen
    return f"C4: target {min(missing)} is never scored" if missing else ""


def evaluator_of(script: ModuleType, hp, runtime, model) -> Evaluate:
    """The script's evaluation with these hyperparameters, on a copy of the model each time (training changes it).

    The function takes a leak, too: what to do to (model, evaluator) before, for tests of the probes.
    """
    def evaluate(tokens: torch.Tensor, leak: Callable | None = None) -> torch.Tensor:
        stream = object.__new__(script.Validation)  # of no files
        stream.tokens, stream.targets = tokens, len(tokens) - 1
        stream.nbytes = torch.ones(stream.targets, dtype=torch.int16)
        stream.total_bytes = stream.targets
        own = copy.deepcopy(model)
        evaluator = script.Evaluator(own, stream, hp, runtime, hp.eval_stride)
        if leak:
            leak(own, evaluator)
        if hp.ttt_enabled:
            {"sgd": script.ttt_sgd, "lora": script.ttt_lora}[hp.ttt_mode](own, evaluator)
        else:
            evaluator.score(script.plan_windows(stream.spans(hp.eval_documents), hp.eval_seq_len, hp.eval_stride))
        return evaluator.nats[:-1].double()

    return evaluate


def spied(script: ModuleType, evaluate: Evaluate, tokens: torch.Tensor) -> list[tuple[str, list[int]]]:
    """What an evaluation scores and learns from, in order, as `order` wants it."""
    events, last = [], []
    take, gradients, step = script.Evaluator.take, script.sgd_gradients, torch.optim.AdamW.step

    def seen(self, nats, target, counts):
        last[:] = target[counts].tolist()
        events.append(("score", list(last)))
        take(self, nats, target, counts)

    def learned(model, scorer, begin):
        events.append(("learn", list(range(begin, min(begin + scorer.hp.ttt_chunk_tokens, len(tokens) - 1)))))
        return gradients(model, scorer, begin)

    def stepped(self, *arguments):
        events.append(("learn", list(last)))
        return step(self, *arguments)

    with (mock.patch.object(script.Evaluator, "take", seen), mock.patch.object(script, "sgd_gradients", learned),
          mock.patch.object(torch.optim.AdamW, "step", stepped)):  # fmt: skip
        evaluate(tokens)
    return events


def documents_of(tokens: torch.Tensor, bos: int) -> list[int]:
    """The number of the document of each target."""
    return (tokens[:-1] == bos).cumsum(0).tolist()


# The shape of a model that answers in milliseconds, and steps large enough for a leak to show.
SMALL = {"VOCAB_SIZE": 64, "NUM_LAYERS": 3, "MODEL_DIM": 32, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "ROPE_DIMS": 4, "XSA_LAST_N": 2,
         "BIGRAM_VOCAB_SIZE": 64, "BIGRAM_DIM": 8, "TRAIN_SEQ_LEN": 32, "SHORT_SEQ_PARTS": 1, "TRAIN_BATCH_TOKENS": 768, "EVAL_SEQ_LEN": 32, "EVAL_STRIDE": 8,
         "VAL_BATCH_SIZE": 256, "COMPILE": "0", "COMPUTE_DTYPE": "float32", "DEVICE": "cpu", "ATTENTION": "auto", "TTT_CHUNK_TOKENS": 40,
         "TTT_LR": 0.05, "TTT_LORA_CHUNK": 8, "TTT_LORA_LR": 0.05, "EVAL_MAX_SECONDS": 0, "EVAL_ONLY": ""}  # fmt: skip


def suite(script: ModuleType, settings: dict[str, str], leak: Callable | None = None) -> str:
    """All probes on the ways of evaluation that a run with these knobs has, on a small model of random weights."""
    knobs = {
        name: value for name, value in settings.items() if name.lower() in script.Hyperparameters.__dataclass_fields__
    }
    learning = {"TTT_ENABLED": "1"} if knobs.get("TTT_ENABLED") == "True" else None
    for way in ({"EVAL_STRIDE": 32, "TTT_ENABLED": "0"}, {"TTT_ENABLED": "0"}, learning):
        if way is None:
            continue
        hp = script.Hyperparameters.from_env({name: str(value) for name, value in {**knobs, **SMALL, **way}.items()})
        with script.Runtime.start(hp) as runtime:
            model = script.GPT(hp, runtime.attend, torch.float32)
            model.initialise(0)
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            alone = evaluator_of(script, hp, runtime, model)
            if fault := probe_all(script, hp, lambda tokens, alone=alone: alone(tokens, leak)):
                return f"{fault} (EVAL_STRIDE={hp.eval_stride} TTT_ENABLED={int(hp.ttt_enabled)})"
    return ""


def probe_all(script: ModuleType, hp, evaluate: Evaluate, targets: int = 300) -> str:
    """The first fault that a probe finds in one way of evaluation."""
    tokens = torch.randint(
        2, hp.vocab_size, (targets + 1,), generator=torch.Generator().manual_seed(2), dtype=torch.int32
    )
    boundary = torch.zeros(len(tokens), dtype=torch.bool)
    boundary[[0, 25, 110, 210]] = True
    tokens[boundary] = script.BOS
    by_document, cuts = hp.eval_documents or (hp.ttt_enabled and hp.ttt_mode == "lora"), (40, 63, 64, 137, 250)

    def same_documents(changed: torch.Tensor) -> torch.Tensor:
        """Replaced tokens are no new boundaries: with documents apart, those decide which texts go side by side."""
        return evaluate(torch.where(boundary, script.BOS, torch.where(changed == script.BOS, 5, changed)))

    number = documents_of(tokens, script.BOS)
    within = (lambda target: number[target]) if hp.ttt_enabled and hp.ttt_mode == "lora" else (lambda target: 0)
    few = (tokens[:48], (44,)) if hp.ttt_enabled else (tokens[:60], (3, 50))
    return (future(same_documents if by_document else evaluate, tokens, hp.vocab_size, cuts)
            or ("" if hp.ttt_enabled else truncation(evaluate, tokens, cuts))
            or distribution(evaluate, few[0], hp.vocab_size, few[1])
            or complete(evaluate, tokens)
            or order(spied(script, evaluate, tokens), targets, within))  # fmt: skip
