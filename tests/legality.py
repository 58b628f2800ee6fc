"""The challenge's four conditions as probes of any evaluator, by what goes in and what comes out.

An evaluator is a function: tokens (n + 1,) int32 -> nats (n,) float64, where nats[t] is the loss of tokens[t + 1]. Each
probe returns a sentence that says what it found wrong, or "".

C1  strictly causal: nats[t] depends on tokens[: t + 2] alone         future, truncation
C2  a whole distribution over the vocabulary at every position        distribution
C3  a target is scored before any update that saw it                  order (of what an evaluator does, as its spy tells)
C4  one pass from left to right, every target scored exactly once     order, and complete
"""

import math
from collections.abc import Callable, Iterable

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


def distribution(evaluate: Evaluate, tokens: torch.Tensor, vocab_size: int, targets: Iterable[int], tolerance: float = 1e-4) -> str:
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
