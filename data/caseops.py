"""CaseOps: write text in lower case with operators, so that a word has the same pieces in every
case.

    encode("The NASA probe of SpaceX") == "{TITLE}the{ALLCAPS} nasa probe of{TITLE} space{CAPNEXT}x"

`decode(encode(text)) == text` for every string. The grammar is in README.md. Operators count no
bytes (`ByteCounter`); every other character counts as many as the one it stands for.
"""

import re
import sys
import unicodedata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt
from train_gpt import CASE_OPERATORS

# isort: split
import sentencepiece

TITLE, ALLCAPS, CAPNEXT, ESC = CASE_OPERATORS
# Stand for operators in a text, after ESC
LITERALS = "".join(chr(ord(operator) + 16) for operator in CASE_OPERATORS)


def letter_pairs() -> dict[str, str]:
    """Lower-case letters by upper-case letter: the pairs with a mapping in both directions and
    equal UTF-8 lengths. They are those of Unicode 3.2 below U+10000, whose mappings do not change
    any more, so every version of Python has the same pairs."""
    category = unicodedata.ucd_3_2_0.category
    pairs = {}
    for upper in map(chr, range(1 << 16)):
        lower = upper.lower()
        letters = [category(letter) for letter in upper + lower] == ["Lu", "Ll"]
        if letters and lower.upper() == upper and len(lower.encode()) == len(upper.encode()):
            pairs[upper] = lower
    return pairs


PAIRS = letter_pairs()
UPPER, LOWER = ("".join(letters) for letters in (PAIRS.keys(), PAIRS.values()))
CODED = str.maketrans(UPPER + CASE_OPERATORS, LOWER + LITERALS)
PLAIN = str.maketrans(LOWER + LITERALS, UPPER + CASE_OPERATORS)
OPERATOR = re.compile(f"[{CASE_OPERATORS}]")
CAPITALS = re.compile(
    f"[{UPPER}](?:(?P<inner>(?<=[{UPPER}{LOWER}][{UPPER}]))|(?P<word>[{UPPER}]+(?![{UPPER}{LOWER}])))?"
)
MARKS = {"inner": CAPNEXT, "word": ALLCAPS, None: TITLE}
OPERATIONS = re.compile(
    f"[{TITLE}{CAPNEXT}](?: ?[{LOWER}])?|{ALLCAPS}(?: ?[{LOWER}]+)?|{ESC}[{LITERALS}]?"
)


def encode(text: str) -> str:
    """The text in lower case with operators. ESC before a leading space keeps it apart from BOS,
    where a space would count no byte."""
    coded = OPERATOR.sub(lambda found: ESC + found.group().translate(CODED), text)
    coded = CAPITALS.sub(
        lambda found: MARKS[found.lastgroup] + found.group().translate(CODED), coded
    )
    for mark in (TITLE, ALLCAPS):
        coded = coded.replace(" " + mark, mark + " ")  # pieces of words begin with their space
    return ESC + coded if coded.startswith(" ") else coded


def decode(coded: str) -> str:
    """The text that `encode` was given. Operators that apply to nothing are removed."""
    return OPERATIONS.sub(lambda found: found.group()[1:].translate(PLAIN), coded)


class ByteCounter(train_gpt.ByteCounter):
    """The bytes of the original text behind each token: 0 for an operator. tokenize_text.py writes
    them to the sidecar of the validation shards."""

    def __init__(self, tokenizer_path: str, vocab_size: int):
        super().__init__(tokenizer_path, vocab_size)
        if self.caseops:
            self.length[4:8] = 0


class Tokenizer:
    """Text to tokens and back, with CaseOps operators. Raises UserError for another file."""

    def __init__(self, path: str, vocab_size: int):
        self.counter = ByteCounter(path, vocab_size)
        self.caseops = self.counter.caseops
        self.pieces = sentencepiece.SentencePieceProcessor(model_file=path)

    def encode(self, text: str) -> list[int]:
        return self.pieces.encode(encode(text) if self.caseops else text)

    def decode(self, ids: list[int]) -> str:
        text = self.pieces.decode(ids)
        return decode(text) if self.caseops else text
