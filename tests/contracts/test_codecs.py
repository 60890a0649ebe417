"""Every codec keeps the contracts, and each contract catches a codec that is made to break it."""

import pytest
import torch

from tests.contracts.broken import codecs as broken
from tests.contracts.suites import codec_contracts as contracts
from tests.contracts.suites.communicator_contracts import ContractError
from torchmn.comm.codecs import (
    CODECS,
    BFloat16,
    ErrorFeedback,
    Float16,
    Quantized,
    create_codec,
    residuals,
)
from torchmn.comm.codecs.base import StripeCodec

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gradients on cpu are quantized by plain torch"),
    pytest.mark.timeout(300),  # numba compiles once per machine, on one that may be busy
]


class Plainest(StripeCodec):
    """What a user writes who overrides the three abstract methods only."""

    name = "plainest"

    def stripe_nbytes(self, stripe):
        return 2 * stripe.span

    def encode_stripe(self, values, stripe, out, side="worker"):
        Float16().encode_stripe(values, stripe, out)
        if side == "worker":
            self.nonfinite.scan("encoding", stripe, values[stripe.begin : stripe.end])

    def decode_stripe(self, encoded, stripe, out, *, add=False):
        Float16().decode_stripe(encoded, stripe, out, add=add)
        self.nonfinite.scan("decoding", stripe, encoded.view(torch.float16))


NAMED = [name for name in CODECS if isinstance(create_codec(name), StripeCodec)]
MAKERS = {
    **{name: lambda name=name: create_codec(name) for name in NAMED},
    **{f"quantized {bits}": lambda bits=bits: Quantized(bits) for bits in (8, 4, 2, 1)},
    "short blocks": lambda: ErrorFeedback(Quantized(4, block_length=32)),
    "float16 with residual": lambda: ErrorFeedback(Float16()),
    "bfloat16 with residual": lambda: ErrorFeedback(BFloat16()),
    "plainest with residual": lambda: ErrorFeedback(Plainest()),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("check", contracts.CONTRACTS, ids=lambda check: check.__name__)
def test_codec(check, maker: str) -> None:
    check(MAKERS[maker])


@pytest.mark.parametrize(
    "maker", [n for n, make in MAKERS.items() if isinstance(make(), ErrorFeedback)]
)
@pytest.mark.parametrize("check", contracts.FEEDBACK_CONTRACTS, ids=lambda check: check.__name__)
def test_codec_with_error_feedback(check, maker: str) -> None:
    check(MAKERS[maker])


CAUGHT_BY = {
    broken.WritesTooFar: contracts.check_round_trip,
    broken.SendsHalfSteps: contracts.check_zeros,
    broken.ForgetsABlockStart: contracts.check_cuts,
    broken.CutsAnywhere: contracts.check_cuts,
    broken.WrongStripe: contracts.check_mean,
    broken.HidesNaN: contracts.check_nonfinite,
    broken.NeverRollsBack: contracts.check_nonfinite,
    broken.SavesHalf: contracts.check_state,
    broken.LosesResidualsInNewBuckets: contracts.check_other_buckets,
    broken.KeepsNoResidual: contracts.check_sums_up,
    broken.ForgetsTheOwner: contracts.check_sums_up,
    broken.ReshardsWorkersOnly: contracts.check_reshard,
}


@pytest.mark.parametrize("wrong", CAUGHT_BY, ids=lambda cls: cls.__name__)
def test_is_caught(wrong: type, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong is broken.ReshardsWorkersOnly:
        whole = residuals.reshard
        monkeypatch.setattr(
            residuals,
            "reshard",
            lambda states, num: whole([_workers_only(state) for state in states], num),
        )
    with pytest.raises(ContractError):
        CAUGHT_BY[wrong](wrong)


def _workers_only(state: dict) -> dict:
    return {**state, "residuals": [e for e in state["residuals"] if e["side"] == "worker"]}


def test_every_contract_has_one_that_breaks_it() -> None:
    assert set(CAUGHT_BY.values()) == {*contracts.CONTRACTS, *contracts.FEEDBACK_CONTRACTS}
