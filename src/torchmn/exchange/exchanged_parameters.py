"""The parameters whose gradients are exchanged, and how changes of them are noticed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from torchmn.base.errors import UnsupportedError
from torchmn.comm import Communicator
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.sharded_parameters import LocalShards, ModelMesh, whole_of


class ExchangedParameters:
    """The parameters of one reducer.

    Args:
        trained: returns the optimizer's parameters with their names, in the order of registration.
        in_groups: returns the parameters as the optimizer's groups hold them now; called at each
            pass.
        find_sparse: returns the parameters whose gradients are sparse.
        find_untrained: returns the model's parameters that no optimizer trains. Called once, at the
            first exchange; until then another optimizer may be created for them.
    """

    def __init__(
        self,
        trained: Callable[[], Sequence[NamedParameter]],
        in_groups: Callable[[], Sequence[nn.Parameter]] = tuple,
        find_sparse: Callable[[], Collection[nn.Parameter]] = tuple,
        find_untrained: Callable[[], Sequence[NamedParameter]] = tuple,
    ) -> None:
        self._shards = LocalShards()
        self._trained = trained
        self._in_groups = in_groups
        self._laid_out: Sequence[nn.Parameter] = ()
        self.untrained: Sequence[NamedParameter] = ()
        """Parameters of the model that no optimizer trains, since the first exchange."""
        self.sparse: list[NamedParameter] = []
        """Parameters with sparse gradients, which are exchanged but are in no bucket."""
        self._find_sparse = find_sparse
        self._find_untrained: Callable[[], Sequence[NamedParameter]] | None = find_untrained
        self.are_sharded = False
        """Whether some are DTensors, of which each rank holds a part."""
        self.mesh = ModelMesh([])
        """The ranks that together hold the model; this rank alone unless it is sharded."""
        self._known: list[nn.Parameter] = []
        self._facts: list[tuple[object, ...]] = []
        self._addresses: list[tuple[bool, int]] = []

    def trained(self) -> list[NamedParameter]:
        """The optimizer's parameters with names, in order; a `LocalShard` for each DTensor."""
        return self._shards.named(self._trained())

    def of(self, parameter: Tensor) -> Tensor:
        """The `LocalShard` of a parameter that is a DTensor; others as they are."""
        return self._shards.of(parameter)

    @property
    def differentiable(self) -> list[nn.Parameter]:
        """All parameters that can have a gradient, including frozen ones."""
        return [p for p in self._known if p.is_floating_point() or p.is_complex()]

    def lay_out(self, with_gradients: Collection[Tensor]) -> list[NamedParameter]:
        """Note the current state of the parameters, and return those that belong into buckets.

        Parameters in ``with_gradients`` are exchanged even if they are frozen now.
        """
        self._shards.follow()
        self._laid_out = self._in_groups()
        trained = self.trained()
        self.are_sharded = self._shards.exist
        held = {parameter for _, parameter in trained}
        known = trained + [(n, p) for n, p in self.untrained if p not in held]
        self._known = [p for _, p in known]
        self._facts = [_layout_facts(p) for p in self._known]
        self._addresses = [(p.requires_grad, p.data_ptr()) for p in self._known]
        trainable = [(n, p) for n, p in known if p.requires_grad or p in with_gradients]
        sparse = set(self._find_sparse())
        self.sparse = [(n, p) for n, p in trainable if p in sparse]
        self.mesh = ModelMesh(whole_of(p) for p in self._known)
        return [(n, p) for n, p in trainable if p not in sparse]

    @property
    def has_parallel_layers(self) -> bool:
        """Whether some are parts of parallel layers: plain tensors, not DTensors."""
        return self.mesh.has_parallel_layers

    @property
    def can_be_compared_in_backward(self) -> bool:
        """Whether `have_changed` may be called inside a backward pass.

        `fully_shard` puts other parameters into the modules there, so `have_changed` must not
        search the model for untrained ones, as its first call does.
        """
        return self._find_untrained is None or not self.are_sharded

    def have_changed(self) -> bool:
        """Whether parameters differ from those that were laid out.

        `nn.Module.to`, `half`, `requires_grad_` and an assignment to ``.data`` change parameters in
        place at any time, and a script may put others into the optimizer's groups. Dtype, device
        and shape are compared only if an address or ``requires_grad`` has changed.
        """
        if self._find_untrained is not None:
            self.untrained = self._shards.named(self._find_untrained())
            self._find_untrained = None
            for _, parameter in self.untrained:  # as if they had been frozen until now
                self._known.append(parameter)
                self._facts.append((False, *_layout_facts(parameter)[1:]))
                self._addresses.append((False, 0))
        if [*map(id, self._in_groups())] != [*map(id, self._laid_out)]:
            return True  # a script has put others into the groups
        if self.are_sharded:
            self._shards.follow()
        # Asked before every pass, and an address is read faster than dtype, shape and device: what
        # changes these gives the tensor other memory.
        addresses = [(p.requires_grad, p.data_ptr()) for p in self._known]
        if addresses == self._addresses:
            return False
        if [_layout_facts(p) for p in self._known] != self._facts:
            return True
        self._addresses = addresses
        return False

    def release(self, parameters: Collection[nn.Parameter]) -> bool:
        """Forget untrained parameters that another optimizer trains; returns whether any were."""
        kept = [(n, p) for n, p in self.untrained if whole_of(p) not in parameters]
        is_changed, self.untrained = len(kept) < len(self.untrained), kept
        return is_changed


def raise_if_on_another_gpu(named: Iterable[NamedParameter], comm: Communicator) -> None:
    """Raise UnsupportedError if a parameter is on a GPU other than the communicator's. Local.

    The engine orders its stream with those of one GPU only, and NCCL uses one GPU per rank.
    """
    for name, parameter in named:
        if parameter.is_cuda and parameter.device != comm.device:
            raise UnsupportedError(
                f"{comm.rank_label}: '{name}' is on {parameter.device}, but this rank exchanges "
                f"gradients on {comm.device}. Move the model to comm.device, or leave the "
                "parameters on the CPU."
            )


def _layout_facts(parameter: nn.Parameter) -> tuple[bool, torch.dtype, torch.device, torch.Size]:
    """The properties on which a parameter's place in the buckets depends."""
    return parameter.requires_grad, parameter.dtype, parameter.device, parameter.shape
