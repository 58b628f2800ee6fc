"""Started by tests/test_h100.py under the pretended driver of bench/h100.py: the script, or with the
word "check" tools/check_machine.py, without what needs numbers.

The device computes nothing, and its memory holds zeros or what was copied there. So six things are
replaced: the report of a step, the check that every target was scored, the check that gradients
agree with the plain form and its number of rows, the order and the Cholesky factors of GPTQ, whose
library is not pretended, and codes out of their range.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import check_machine
import train_gpt


def inverse_factor(hessian: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns in their order, without correlations: copied, as the device would compute neither."""
    count, width, _ = hessian.shape
    order, factor = torch.arange(width).repeat(count, 1), torch.eye(width).repeat(count, 1, 1)
    return order.to(hessian.device), factor.to(hessian.device)


def main() -> None:
    step, (encode, decode) = train_gpt.Run.train_step, train_gpt.CODERS["ans"]

    def train_step(run, *arguments):
        device = step(run, *arguments).device
        # Loss, seconds, no wish to stop
        return torch.tensor([1.0, run.clock.elapsed(), 0.0]).to(device)

    train_gpt.Run.train_step = train_step
    train_gpt.AGREEMENT = float("inf")
    torch.Tensor.bincount = lambda tensor: torch.ones(4).to(tensor.device)  # one for each row
    torch.Tensor.all = lambda tensor: torch.tensor(True)  # no target has a loss, no value is finite
    train_gpt.Evaluator.result = lambda self: train_gpt.Score(1.0, 1.0, 1.0, 1, 1)
    train_gpt.inverse_factor = inverse_factor
    train_gpt.CODERS["ans"] = lambda codes: encode(codes.clip(-31, 31)), decode
    program = check_machine if sys.argv[1:] == ["check"] else train_gpt
    del sys.argv[1:]
    program.main()


if __name__ == "__main__":
    main()
