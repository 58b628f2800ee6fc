#!/usr/bin/env python3
"""Let the model of an artifact continue a text.

    python tools/sample.py logs/demo.npz --prompt "def main(" --tokens 100 --temperature 0.8
    python tools/sample.py logs/demo.npz                  # interactive: continues each line that you type
    python tools/sample.py logs/demo.npz < notes.txt      # the whole file is the prompt

In interactive mode, an empty line starts over and Ctrl-D ends. A text also ends where the model
puts a BOS. The artifact names its tokenizer; TOKENIZER_PATH overrides it. The text goes to standard
output, the speed to standard error.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]

import program
import caseops
import train_gpt
from train_gpt import BOS, UserError

# isort: split
import torch
from torch import Tensor


class Reader:
    """A model and a text, of which it sees the last EVAL_SEQ_LEN tokens."""

    def __init__(self, hp: train_gpt.Hyperparameters, weights: dict[str, Tensor]):
        self.device = train_gpt.choose_device(hp.device)
        dtype = train_gpt.choose_dtype(hp.compute_dtype, self.device)
        self.model = train_gpt.GPT(hp, train_gpt.load_attention("sdpa"), dtype)
        self.model.load_state_dict(weights)
        self.model = self.model.to(self.device)
        matrices = self.model.matrices()
        # The weights stay, so they are cast once and not per token
        self.model.matrices = lambda qat: matrices
        self.restart()

    def restart(self) -> None:
        """Begin another text."""
        self.ids = [BOS]

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Those of the next token, (V,)."""
        seen = torch.tensor([self.ids[-self.model.hp.eval_seq_len :]], device=self.device)
        return self.model(seen)[0, -1].cpu()

    def continued(
        self, tokens: int, temperature: float, generator: torch.Generator
    ) -> Iterator[int]:
        """Sample and append at most so many tokens, one by one, until the document ends."""
        for _ in range(tokens):
            self.ids.append(sampled(self.logits(), temperature, generator))
            if self.ids[-1] == BOS:
                return
            yield self.ids[-1]


def sampled(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """A token, drawn from softmax(logits / temperature); the likeliest at temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    # At most 0, so that a low temperature does not overflow
    below = (logits - logits.max()).double()
    return int(torch.multinomial((below / temperature).softmax(-1), 1, generator=generator))


def load(artifact: str, environ: dict[str, str]) -> tuple[Reader, caseops.Tokenizer]:
    """The artifact's model and its tokenizer. Raises UserError if one of them cannot be used."""
    blob, hp = train_gpt.read_artifact(artifact, environ)
    tokenizer = caseops.Tokenizer(hp.tokenizer_path, hp.vocab_size)
    with train_gpt.reading_artifact(artifact):
        weights = train_gpt.load_artifact(blob)
    return Reader(hp, weights), tokenizer


def texts(
    ids: list[int], new: Iterator[int], decode: Callable[[list[int]], str], shown: int
) -> Iterator[str]:
    """The text of `ids` behind its first `shown` characters, in parts, while `new` appends tokens
    to it. A character of several byte pieces comes when it is complete."""
    for _ in new:
        text = decode(ids)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)
    yield decode(ids)[shown:]


def prompts(given: str | None) -> Iterator[str]:
    """The prompts: the given one, the lines typed in a terminal, or the whole of standard input."""
    try:
        if given is not None:
            yield given
        elif sys.stdin.isatty():
            while True:
                yield input("> ")
        else:
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")
            yield sys.stdin.read()
    except EOFError:
        print()
    except UnicodeError as error:
        raise UserError(f"the prompt is not UTF-8 text ({error.reason}): convert it") from error


def talk(reader: Reader, tokenizer: caseops.Tokenizer, arguments: argparse.Namespace) -> None:
    """Continue every prompt and print the text."""
    generator = torch.Generator().manual_seed(arguments.seed)
    typed = arguments.prompt is None and sys.stdin.isatty()
    for prompt in prompts(arguments.prompt):
        if typed and not prompt:
            reader.restart()
            continue
        reader.ids += tokenizer.encode(prompt)
        before = len(reader.ids)
        shown = len(tokenizer.decode(reader.ids)) if typed else 0  # the user sees what was typed
        began = time.perf_counter()
        new = reader.continued(arguments.tokens, arguments.temperature, generator)
        for part in texts(reader.ids, new, tokenizer.decode, shown):
            print(part, end="", flush=True)
        print(flush=True)
        count, seconds = len(reader.ids) - before, time.perf_counter() - began
        ended = "; the document ends here" * (reader.ids[-1] == BOS)
        speed = f"{count} tokens in {seconds:.1f} s, {count / seconds:.0f} per second"
        print(f"{speed}{ended}", file=sys.stderr)


def main() -> None:
    parser = program.parser(__doc__)
    add = parser.add_argument
    add("artifact", help="logs/<RUN_ID>.npz")
    add("--prompt", type=program.utf8, help="text to continue; default: standard input")
    add("--temperature", type=float, default=0.8, help="0: the likeliest token; default: 0.8")
    add("--tokens", type=program.count, default=200, help="most to add to a prompt; default: 200")
    add("--seed", type=int, default=1, help="of the random numbers; default: 1")
    arguments = parser.parse_args()
    if not 0 <= arguments.temperature < math.inf:
        parser.error(f"--temperature {arguments.temperature} is not a number from 0 on")
    if not 0 <= arguments.seed < 1 << 63:
        parser.error(f"--seed {arguments.seed} is not between 0 and 2^63")
    try:
        talk(*load(arguments.artifact, dict(os.environ)), arguments)
    except KeyboardInterrupt:
        print()  # ends the line of text
        raise


if __name__ == "__main__":
    program.run_program(main)
