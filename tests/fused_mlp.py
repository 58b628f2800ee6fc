"""Started by tests/test_fused_mlp.py: `fused_mlp.py SCRIPT cpu` in Triton's interpreter prints, as
JSON, how far the fused and the plain MLP of a train_gpt.py are from float64; `fused_mlp.py SCRIPT
cuda` compiles the fused one at the shapes of the record on the pretended GPU of bench/h100.py."""

import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Rows, width, hidden units, slope
CASES = [(300, 64, 192, 0.5), (256, 128, 512, 0.0), (5, 72, 200, 0.5)]


def load(path: str):
    specification = importlib.util.spec_from_file_location("script", path)
    script = sys.modules["script"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    return script


def mend_interpreter() -> None:
    """Triton's interpreter keeps bf16 as 16 bits: it would multiply these as integers and not round."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self, a, b, *others):
        a, b = (cast(self, t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b))
        return dot(self, a, b, *others)

    def cast_impl(self, source, kind):
        if source.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return cast(self, source, kind)
        return TensorHandle(
            torch.from_numpy(source.data).bfloat16().view(torch.uint16).numpy(), kind.scalar
        )

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl


def results(mlp, x, up, down) -> list[torch.Tensor]:
    """The output, and the gradients of its product with fixed numbers."""
    inputs = [t.detach().requires_grad_() for t in (x, up, down)]
    wide = inputs[0].to(torch.promote_types(x.dtype, torch.float32))
    scale = 1 / (wide.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps)
    y = mlp(inputs[0], scale, *inputs[1:])
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def errors(script, dtype, n: int, d: int, m: int, slope: float) -> dict[str, list[float]]:
    """Relative errors, by norms, of y and the gradients of x, up and down, of both forms."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((n, d), (m, d), (m, d))
    x, up, down = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    inputs = [x, up / d**0.5, down.mT / m**0.5]  # the down projection is stored transposed

    def plain(x, scale, up, down):
        return F.linear((F.leaky_relu(F.linear(x, up), slope).square() * scale).to(x.dtype), down)

    exact = results(plain, *(t.double() for t in inputs))
    forms, found = {"fused": script.load_fused_mlp(slope, torch.device("cpu")), "plain": plain}, {}
    for name, mlp in forms.items():
        pairs = zip(results(mlp, *inputs), exact, strict=True)
        found[name] = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]
    return found


def closed_gate(script) -> list[float]:
    """The gradients of a row whose gate, and so its scale, is 0."""
    fused = script.load_fused_mlp(0.5, torch.device("cpu"))
    x, up, down = (torch.ones(s, requires_grad=True) for s in ((1, 64), (128, 64), (64, 128)))
    scale = torch.zeros(1, 1, requires_grad=True)
    grads = torch.autograd.grad(fused(x, scale, up, down).sum(), (x, scale, up, down))
    return [float(grad.norm()) for grad in grads]


def main() -> None:
    script, device = load(sys.argv[1]), torch.device(sys.argv[2])
    if device.type == "cpu":
        mend_interpreter()
        cases = [(dtype, *case) for dtype in (torch.float32, torch.bfloat16) for case in CASES]
        found = {str(case): errors(script, *case) for case in cases}
        print(json.dumps(found | {"closed gate": closed_gate(script)}))
        return
    fused = script.compile_whole(script.load_fused_mlp(0.5, device), True)
    x, up, down = (
        torch.zeros(*shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        for shape in ((48, 2048, 512), (1536, 512), (512, 1536))
    )
    y = fused(x, torch.ones(48, 2048, 1, device=device), up, down)
    y.backward(torch.ones_like(y))


if __name__ == "__main__":
    main()
