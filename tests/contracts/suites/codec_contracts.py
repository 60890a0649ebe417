"""What every stripe codec must do, by itself and carried by a compressed mean.

Each function takes a factory that makes one codec for each worker, and raises `ContractError` where
the contract is broken. The mean is formed in this process, with the workers' buffers in a list.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.contracts.suites.communicator_contracts import require
from torchmn.comm.codecs import residuals
from torchmn.comm.codecs.base import StripeCodec
from torchmn.comm.codecs.layout import Layout
from torchmn.comm.codecs.residuals import State

Factory = Callable[[], StripeCodec]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WORLD_SIZES = (1, 2, 3, 4)
SHAPES: dict[str, tuple[int, ...]] = {
    "conv.weight": (24, 16, 3, 3),
    "conv.bias": (24,),
    "odd.weight": (3, 701),
    "scale": (1,),
    "dense.weight": (130, 67),
    "table": (9, 1000),
}
_GAP = 5  # elements between parameters that belong to none
_PADDING = 3.5  # and what they hold


def layout_of(
    dtype: torch.dtype = torch.float32, names: Sequence[str] = tuple(SHAPES), start: int = 0
) -> Layout:
    """Some parameters one after the other, with gaps between them."""
    entries = []
    for name in names:
        entries.append((name, start, SHAPES[name]))
        start += int(torch.Size(SHAPES[name]).numel()) + _GAP
    return Layout.of(entries, dtype)


def gradients(layout: Layout, worker: int, step: int, *, scale: float = 1.0) -> Tensor:
    """A buffer of this layout that any worker can compute for any worker."""
    buffer = torch.full((layout.end + _GAP,), _PADDING, dtype=layout.dtype)
    for position, segment in enumerate(layout.segments):
        generator = torch.Generator().manual_seed(1000 * step + 10 * worker + position)
        values = torch.randn(segment.numel, generator=generator, dtype=torch.float64)
        # a part that all workers and steps share, as gradients do
        common = torch.linspace(-1, 1, segment.numel, dtype=torch.float64)
        buffer[segment.start : segment.end] = (values + common) * scale
    return buffer


def exchange_(codecs: Sequence[StripeCodec], buffers: Sequence[Tensor], layout: Layout) -> bool:
    """The compressed mean as all-reduce forms it: the sum of all buffers, in place in each.

    Returns whether it was valid: whether all values were finite.
    """
    stripes = codecs[0].split(layout, len(codecs))
    sums = []
    for owner, stripe in enumerate(stripes):
        total = buffers[owner].to(layout.wide_dtype, copy=True)
        wide = stripe.moved(0, layout.wide_dtype)
        codecs[owner].flush_residual_into(total, wide)
        for worker, codec in enumerate(codecs):
            if worker != owner:
                message = _encoded(codec, buffers[worker], stripe)
                codecs[owner].decode_stripe(message, wide, total, add=True)
        sums.append(_encoded(codecs[owner], total, wide, owner=True))
    for codec, buffer in zip(codecs, buffers, strict=True):
        for message, stripe in zip(sums, stripes, strict=True):
            codec.decode_stripe(message, stripe, buffer)
    are_valid = {not codec.nonfinite.names("decoding") for codec in codecs}
    require(len(are_valid) == 1, "the workers disagree on whether the sum is finite")
    return are_valid.pop()


def _encoded(codec: StripeCodec, values: Tensor, stripe: Layout, *, owner: bool = False) -> Tensor:
    message = torch.full((codec.stripe_nbytes(stripe),), 171, dtype=torch.uint8)
    codec.encode_stripe(values, stripe, message, "owner" if owner else "worker")
    return message


def _finish(codecs: Sequence[StripeCodec], *, is_valid: bool = True) -> None:
    for codec in codecs:
        codec.finish(is_valid=is_valid)


def check_round_trip(make: Factory) -> None:
    """What is decoded is near, for odd sizes and all dtypes, and nothing else is touched."""
    layouts = [layout_of(dtype) for dtype in DTYPES]
    layouts += [layout_of(names=[name], start=7) for name in SHAPES]
    layouts += [Layout(()), layout_of().between(3_400, 3_403)]
    for layout in layouts:
        codec = make()
        values = gradients(layout, 0, 0)
        before = values.clone()
        message = _encoded(codec, values, layout)
        require(torch.equal(values, before), f"{codec.name}: encoding changed the gradient")
        require(
            torch.equal(message, _encoded(make(), values, layout)),
            f"{codec.name}: not all of the bytes are written, or not always the same",
        )
        decoded = torch.full_like(values, 9.0)
        codec.decode_stripe(message, layout, decoded)
        outside = torch.ones_like(values, dtype=torch.bool)
        outside[layout.begin : layout.end] = False
        require(
            bool((decoded[outside] == 9.0).all()),
            f"{codec.name}: decoding wrote outside of its stripe",
        )
        for segment in layout.segments:
            run = slice(segment.start, segment.end)
            _require_near(decoded[run], values[run], f"{codec.name}, {segment.name}")
        doubled = decoded.clone()
        codec.decode_stripe(message, layout, doubled, add=True)
        for segment in layout.segments:
            run = slice(segment.start, segment.end)
            _require_near(doubled[run], 2 * decoded[run], f"{codec.name}: adding to a sum", 0.999)
        codec.finish(is_valid=True)


def _require_near(got: Tensor, expected: Tensor, what: str, cosine: float = 0.6) -> None:
    a, b = got.double(), expected.double()
    require(bool(torch.isfinite(a).all()), f"{what}: not finite")
    require(
        float(a @ b) >= cosine * float(a.norm() * b.norm()) and float(a.norm()) <= 3 * b.norm(),
        f"{what}: the decoded values are not the encoded ones",
    )
    if bool(b.any()):
        require(bool(a.any()), f"{what}: all decoded values are zero")


def check_zeros(make: Factory) -> None:
    """Zeros in, zeros out, exactly."""
    for dtype in DTYPES:
        layout = layout_of(dtype)
        codecs = [make(), make()]
        for _ in range(2):
            buffers = [torch.zeros(layout.end, dtype=dtype) for _ in codecs]
            exchange_(codecs, buffers, layout)
            _finish(codecs)
            for buffer in buffers:
                require(not buffer.any(), f"{codecs[0].name}: zeros became {buffer.unique()[:3]}")


def check_cuts(make: Factory) -> None:
    """The decoded value depends neither on stripes nor on what else is in a bucket."""
    whole = layout_of()
    values = gradients(whole, 0, 0)
    expected = _decoded(make(), values, [whole])
    for num_stripes in (2, 3, 5):
        codec = make()
        stripes = codec.split(whole, num_stripes)
        require(
            sum(stripe.numel for stripe in stripes) == whole.numel,
            f"{codec.name}: stripes do not cover the bucket",
        )
        _require_same(_decoded(codec, values, stripes), expected, f"{codec.name}, stripes")
    other = layout_of(names=list(reversed(SHAPES)), start=11)
    moved = torch.zeros(other.end)
    places = {s.name: slice(s.start, s.end) for s in whole.segments}
    for segment in other.segments:
        moved[segment.start : segment.end] = values[places[segment.name]]
    _require_same(_decoded(make(), moved, [other]), expected, f"{make().name}, another bucket")


def _decoded(codec: StripeCodec, values: Tensor, stripes: Sequence[Layout]) -> dict[str, Tensor]:
    out = torch.zeros_like(values)
    for stripe in stripes:
        codec.decode_stripe(_encoded(codec, values, stripe), stripe, out)
    parts: dict[str, list[Tensor]] = {}
    for stripe in stripes:
        for segment in stripe.segments:
            parts.setdefault(segment.name, []).append(out[segment.start : segment.end])
    return {name: torch.cat(runs) for name, runs in parts.items()}


def _require_same(got: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for name, value in expected.items():
        require(torch.equal(got[name], value), f"{what}: '{name}' has other values")


def check_mean(make: Factory) -> None:
    """The compressed mean is near the mean, the same bits on every worker."""
    for dtype in DTYPES:
        layout = layout_of(dtype)
        for size in WORLD_SIZES:
            codecs = [make() for _ in range(size)]
            buffers = [gradients(layout, w, 0, scale=1 / size) for w in range(size)]
            expected = torch.stack([b.double() for b in buffers]).sum(0)
            require(exchange_(codecs, buffers, layout), f"{codecs[0].name}: not valid")
            _finish(codecs)
            what = f"{codecs[0].name}, {dtype}, {size} workers"
            for segment in layout.segments:
                run = slice(segment.start, segment.end)
                _require_near(buffers[0][run], expected[run], what, 0.5)
                for buffer in buffers:
                    require(torch.equal(buffer[run], buffers[0][run]), f"{what}: bits differ")


def residual_of(codecs: Sequence[StripeCodec], name: str) -> Tensor:
    """The residuals of all workers and owners for one parameter, (numel,) float64."""
    total = torch.zeros(torch.Size(SHAPES[name]).numel(), dtype=torch.float64)
    for codec in codecs:
        for entry in codec.state_dict().get("residuals", []):
            if entry["name"] == name:
                first = entry["offset"]
                total[first : first + len(entry["values"])] += entry["values"].double()
    return total


def check_sums_up(make: Factory) -> None:
    """What was returned adds up to the sum of the true means, less the residuals that remain."""
    for dtype in (torch.float32, torch.float64):
        layout = layout_of(dtype)
        for size in (2, 3):
            codecs = [make() for _ in range(size)]
            returned, true = _run(codecs, layout, range(12))
            _require_conserved(codecs, returned, true, f"{codecs[0].name}, {size} workers")
            for name in SHAPES:
                one_step = gradients(layout, 0, 0).double().norm()
                require(
                    float(residual_of(codecs, name).norm()) < 12 * float(one_step),
                    f"{codecs[0].name}: the residuals of '{name}' grow",
                )


def _run(
    codecs: Sequence[StripeCodec], layout: Layout, steps: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Some steps; returns for each parameter the sums of what was returned and of true means."""
    returned = {name: torch.zeros((), dtype=torch.float64) for name in SHAPES}
    true = dict(returned)
    for step in steps:
        buffers = [gradients(layout, w, step, scale=1 / len(codecs)) for w in range(len(codecs))]
        mean = torch.stack([b.double() for b in buffers]).sum(0)
        exchange_(codecs, buffers, layout)
        _finish(codecs)
        for s in layout.segments:
            returned[s.name] = returned[s.name] + buffers[0][s.start : s.end].double()
            true[s.name] = true[s.name] + mean[s.start : s.end]
    return returned, true


def _require_conserved(
    codecs: Sequence[StripeCodec],
    returned: dict[str, Tensor],
    true: dict[str, Tensor],
    what: str,
) -> None:
    for name, total in true.items():
        off = float((returned[name] + residual_of(codecs, name) - total).abs().max())
        require(off < 1e-4, f"{what}: of '{name}' {off} is neither returned nor in the residual")


def check_nonfinite(make: Factory) -> None:
    """A gradient that is not finite reaches all workers, is named, and leaves no trace in state."""
    layout = layout_of()
    untouched = [make() for _ in range(3)]
    for step, segment in enumerate(layout.segments):
        codecs = [make() for _ in range(3)]
        for codec, other in zip(codecs, untouched, strict=True):
            codec.load_state_dict(other.state_dict())
        before = [codec.state_dict() for codec in codecs]
        buffers = [gradients(layout, w, 100) for w in range(3)]
        bad = (float("nan"), float("inf"), float("-inf"))[step % 3]
        buffers[1][segment.end - 1] = bad
        what = f"{codecs[0].name}, {bad} in '{segment.name}'"
        require(not exchange_(codecs, buffers, layout), f"{what}: it was not noticed")
        for worker, (codec, buffer) in enumerate(zip(codecs, buffers, strict=True)):
            run = buffer[segment.start : segment.end]
            require(not torch.isfinite(run).all(), f"{what}: worker {worker} got finite values")
            require(segment.name in codec.nonfinite.names("decoding"), f"{what}: not named")
            named = codec.nonfinite.names("encoding")
            expected = [segment.name] if worker == 1 else []
            require(named == expected, f"{what}: worker {worker} is named with {named}")
        _finish(codecs, is_valid=False)
        for codec, state in zip(codecs, before, strict=True):
            _require_same_residuals(codec.state_dict(), state, what)
        _require_same(_run(codecs, layout, [step])[0], _run(untouched, layout, [step])[0], what)


def _require_same_residuals(got: State, expected: State, what: str) -> None:
    """The same but for the order of entries, and for entries that hold only zeros."""

    def nonzero(state: State) -> dict[tuple[str, str, int], Tensor]:
        return {
            (entry["side"], entry["name"], entry["offset"]): entry["values"]
            for entry in state.get("residuals", [])
            if entry["values"].any()
        }

    a, b = nonzero(got), nonzero(expected)
    require(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a),
        f"{what}: residuals changed",
    )
    require(got.get("codec") == expected.get("codec"), f"{what}: the codec's state changed")


def check_state(make: Factory) -> None:
    """A loaded state continues with the same bits; an empty one starts from scratch."""
    layout = layout_of()
    originals = [make() for _ in range(3)]
    _run(originals, layout, range(3))
    copies = [make() for _ in originals]
    for original, copy in zip(originals, copies, strict=True):
        copy.load_state_dict(original.state_dict())
        _require_same_residuals(copy.state_dict(), original.state_dict(), f"{copy.name} loaded")
    expected, _ = _run(originals, layout, [3, 4])
    got, _ = _run(copies, layout, [3, 4])
    _require_same(got, expected, f"{originals[0].name} resumed")
    for copy in copies:
        copy.load_state_dict({})
    new, _ = _run([make() for _ in copies], layout, [3])
    _require_same(_run(copies, layout, [3])[0], new, f"{copies[0].name} with an empty state")


def check_other_buckets(make: Factory) -> None:
    """Residuals follow into other buckets and stripes, after loading and while in use."""
    half = len(SHAPES) // 2
    names = tuple(SHAPES)
    buckets = [layout_of(names=names[half:]), layout_of(names=names[:half], start=3)]
    for is_loaded in (True, False):
        codecs = [make() for _ in range(3)]
        _run(codecs, layout_of(), range(3))
        if is_loaded:
            states = [codec.state_dict() for codec in codecs]
            codecs = [make() for _ in codecs]
            for codec, state in zip(codecs, states, strict=True):
                codec.load_state_dict(state)
        true = {name: residual_of(codecs, name) for name in SHAPES}
        returned = {name: torch.zeros_like(value) for name, value in true.items()}
        for bucket in buckets:
            returned_part, true_part = _run_unfinished(codecs, bucket, 5)
            for name, value in returned_part.items():
                returned[name] += value
                true[name] += true_part[name]
        _finish(codecs)
        _require_conserved(codecs, returned, true, f"{codecs[0].name} in other buckets")


def _run_unfinished(
    codecs: Sequence[StripeCodec], layout: Layout, step: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    buffers = [gradients(layout, w, step, scale=1 / len(codecs)) for w in range(len(codecs))]
    mean = torch.stack([b.double() for b in buffers]).sum(0)
    exchange_(codecs, buffers, layout)
    runs = {s.name: slice(s.start, s.end) for s in layout.segments}
    return (
        {name: buffers[0][run].double() for name, run in runs.items()},
        {name: mean[run] for name, run in runs.items()},
    )


def check_reshard(make: Factory) -> None:
    """Residuals are conserved from W to W' workers; owners begin with zeros."""
    layout = layout_of()
    for old_size, new_size in ((3, 2), (2, 4), (4, 3)):
        old = [make() for _ in range(old_size)]
        returned, true = _run(old, layout, range(3))
        state = residuals.reshard([codec.state_dict() for codec in old], new_size)
        require(
            all(entry["side"] == "worker" for entry in state["residuals"]),
            f"{old[0].name}: owners' residuals after resharding",
        )
        new = [make() for _ in range(new_size)]
        for codec in new:
            codec.load_state_dict(state)
        what = f"{old[0].name}, {old_size} to {new_size} workers"
        _require_conserved(new, returned, true, what)
        more_returned, more_true = _run(new, layout, range(3, 6))
        _require_conserved(
            new,
            {name: returned[name] + more_returned[name] for name in SHAPES},
            {name: true[name] + more_true[name] for name in SHAPES},
            f"{what}, three steps later",
        )


CONTRACTS = (check_round_trip, check_zeros, check_cuts, check_mean, check_nonfinite, check_state)
"""For every stripe codec."""
FEEDBACK_CONTRACTS = (check_sums_up, check_other_buckets, check_reshard)
"""For those with error feedback."""
