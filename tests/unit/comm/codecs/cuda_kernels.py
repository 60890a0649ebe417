"""Compares the Triton kernels with the reference, or compiles them; `test_kernels_cuda` runs it.

As a script it compares by Triton's interpreter, with CPU tensors, if TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import itertools
import re
import sys

import torch
from packaging.version import Version

from tests.unit.comm.codecs.kernels import reference
from torchmn.comm.codecs import Layout, Quantized
from torchmn.comm.codecs.base import Lost
from torchmn.comm.codecs.layout import Segment

SIZES = [(1,), (33,), (512,), (1030, 96), (700, 5, 1999), (5000, 1999, 2048)]
EXTREMES = [[0.0], [-0.0, 0.1], [1e-42], [3e38, -3e38], [1e25, 1e20], [1e-25], [0.5, 1.5, -2.5]]
BAD = [[1.0, float("inf")], [1.0, float("nan")], [float("-inf"), 2.0]]


def compare(device: str) -> int:
    """Raises AssertionError where they differ; returns the number of cases."""
    num_cases = 0
    for bits, dtype, sizes in itertools.product(
        (8, 4, 2, 1), (torch.float32, torch.float64), SIZES
    ):
        stripe = layout(sizes, dtype)
        generator = torch.Generator().manual_seed(bits + len(sizes))
        values = torch.randn(stripe.end, generator=generator, dtype=dtype)
        residual = torch.randn(stripe.end, generator=generator, dtype=dtype)
        codec = Quantized(bits, block_length=96 if 700 in sizes else 512)
        for lost in (residual, None):
            _compare(device, codec, stripe, values, lost)
            num_cases += 1
    for bits, sample in itertools.product((8, 4, 2, 1), EXTREMES + BAD):
        values = torch.tensor(sample).repeat(700)[:700]
        _compare(device, Quantized(bits), layout((700,), torch.float32), values, torch.zeros(700))
        num_cases += 1
    return num_cases


def layout(sizes: tuple[int, ...], dtype: torch.dtype) -> Layout:
    segments, start = [], 0
    for index, size in enumerate(sizes):
        segments.append(Segment(f"p{index}", start, size, 1536 * index, size in (5, 33, 1999)))
        # The first begin where slots do, the others in between.
        start += size + (-size % 16 if size == 5000 else 3)
    return Layout(tuple(segments), dtype)


def _compare(
    device: str,
    codec: Quantized,
    stripe: Layout,
    values: torch.Tensor,
    residual: torch.Tensor | None,
) -> None:
    from torchmn.comm.codecs.kernels import cuda

    plan = codec.plan(stripe)
    encoded = torch.zeros(plan.nbytes, dtype=torch.uint8)
    lost = None if residual is None else Lost(residual, torch.zeros_like(residual))
    flags = reference.encode(values, lost, encoded, plan)

    there = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
    lost_there = None if lost is None else Lost(*(each.to(device) for each in lost))
    flags_there = cuda.encode(values.to(device), lost_there, there, plan).cpu()
    what = f"{codec!r}, {stripe.dtype}, {[s.numel for s in stripe.segments]}, {values[:3].tolist()}"
    assert torch.equal(flags_there, flags), what
    # Scales of 4 and 2 bits and the values of 1 bit are sums, which are added in another order.
    if codec.spec.bits == 8:
        differ = (there.cpu() != encoded).nonzero().flatten()[:9].tolist()
        assert not differ, f"{what}: bytes {differ}"
        if lost is not None:
            torch.testing.assert_close(
                lost_there.now.cpu(), lost.now, rtol=0, atol=0, equal_nan=True, msg=what
            )

    for source, add in itertools.product((encoded, there.cpu()), (False, True)):
        ours = torch.full(values.shape, 0.25, dtype=values.dtype, device=device)
        theirs = torch.full_like(values, 0.25)
        flags_ours = cuda.decode(source.to(device), ours, plan, add=add).cpu()
        assert torch.equal(flags_ours, reference.decode(source, theirs, plan, add=add)), what
        assert flags.any() == flags_ours.any(), what
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True, msg=what)
        if not add:
            decoded = ours.cpu()
    if flags.any():
        assert lost is None or torch.equal(lost_there.now.cpu()[:512], residual[:512]), what
        return
    # what was sent and what was lost add up to the value; the loss is at most the reference's
    if residual is not None:
        for s in stripe.segments:
            run = slice(s.start, s.end)
            v = values[run] + residual[run]
            if s.is_small:
                assert torch.equal(decoded[run], values[run]), what
                continue
            own = lost_there.now.cpu()[run]
            rounding = 1e-6 * float(v.abs().max())
            torch.testing.assert_close(decoded[run] + own, v, rtol=0, atol=rounding, msg=what)
            if torch.isfinite(v.square().sum()):
                assert own.norm() <= 1.001 * lost.now[run].norm() + rounding, what


def _named_by_version(kernel, constants: dict[str, object]) -> dict[object, object]:
    import triton

    if Version(triton.__version__) < Version("3.3"):
        return {**constants}
    return {(kernel.arg_names.index(name),): value for name, value in constants.items()}


def _aligned_by_version(kernel, pointers: dict[str, str]) -> object:
    """What Triton finds out at a call: tensors begin at multiples of 16 bytes."""
    import triton

    places = [kernel.arg_names.index(name) for name in pointers]
    if Version(triton.__version__) < Version("3.3"):
        from triton.backends.compiler import AttrsDescriptor

        return AttrsDescriptor.from_dict(
            {"arg_properties": {"tt.divisibility": places}, "cls": "AttrsDescriptor"}
        )
    return {(place,): [["tt.divisibility", 16]] for place in places}


def compile_all() -> int:
    """Compile every kernel for an H100, which need not be here; returns how many.

    Raises AssertionError: one divides inexactly or fuses a product with an addition.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torchmn.comm.codecs.kernels import cuda

    num_compiled = 0

    def compile_one(kernel, pointers: dict[str, str], constants: dict[str, object]) -> None:
        nonlocal num_compiled
        signature = {**pointers, **dict.fromkeys(constants, "constexpr")}
        attributes = _aligned_by_version(kernel, pointers)
        source = ASTSource(kernel, signature, _named_by_version(kernel, constants), attributes)
        target = GPUTarget("cuda", 90, 32)
        compiled = triton.compile(source, target=target, options=cuda.EXACT)
        assert compiled.asm["cubin"]
        ptx = compiled.asm["ptx"]
        assert not re.findall(r"\b(?:div\.full|div\.approx|fma)\S*f32", ptx)
        assert re.search(r"(?:ld|st)\.global\.v[24]", ptx), "no vectors of elements"
        num_compiled += 1

    shared = {"flags": "*u8", "table": "*i64"}
    for bits, wide in itertools.product((8, 4, 2, 1), ("*fp32", "*fp64")):
        plan = Quantized(bits).plan(layout((700,), torch.float32))
        compile_one(
            cuda._encode,
            {"values": wide, "residual": wide, "new_residual": wide, "out": "*u8"}
            | {"floats": "*fp32", "wide": wide, **shared},
            {**cuda._constants(plan), "HAS_RESIDUAL": True},
        )
        compile_one(
            cuda._decode,
            {"encoded": "*u8", "floats": "*fp32", "wide": wide, "out": wide, **shared},
            {**cuda._constants(plan), "ADD": True},
        )
    return num_compiled


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        print(compile_all(), "kernels compiled")
    else:
        print(compare(sys.argv[1]), "cases agree")
