"""Parameters in one flat buffer and their gradients in another, of which every process owns one share (ZeRO).

One reduce-scatter sums the gradients, each process updates its share, and one all-gather distributes the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eagle3.draft import parallel


class FlatParameters:
    """Owns the storage of its parameters: once constructed, they and their gradients are views of it."""

    def __init__(self, parameters: Sequence[nn.Parameter], offsets: Sequence[int], share: int) -> None:
        """Put every parameter at its offset; the process of rank r owns the elements r*share .. (r+1)*share-1."""
        device = parameters[0].device
        self.places = [slice(at, at + p.numel()) for at, p in zip(offsets, parameters, strict=True)]
        self.values = torch.zeros(share * parallel.world(), device=device)
        self.gradients = torch.zeros_like(self.values)
        for parameter, place in zip(parameters, self.places, strict=True):
            self.values[place] = parameter.detach().flatten()
            parameter.data = self.values[place].view_as(parameter)
            parameter.grad = self.gradients[place].view_as(parameter)
        self.own = slice(parallel.rank() * share, (parallel.rank() + 1) * share)
        # This process's share: master weights, and the summed gradients.
        self.masters = self.values[self.own]
        self.own_gradients = (
            self.gradients[self.own] if not dist.is_initialized() else torch.zeros(share, device=device)
        )

    def reduce(self) -> None:
        """Sum the gradients of all processes into `own_gradients`."""
        if dist.is_initialized():
            dist.reduce_scatter_tensor(self.own_gradients, self.gradients)

    def publish(self) -> None:
        """Send the masters to all processes, and clear the gradients; an optimiser has cleared `own_gradients`."""
        if dist.is_initialized():
            dist.all_gather_into_tensor(self.values, self.masters.clone())
            self.gradients.zero_()

    def collect(self, own: Tensor) -> Tensor:
        """Return the shares of all processes as one tensor on the CPU, the same for any number of processes."""
        whole = own
        if dist.is_initialized():
            whole = torch.empty_like(self.values)
            dist.all_gather_into_tensor(whole, own)
        return torch.cat([whole[place] for place in self.places]).cpu()

    def own_part(self, collected: Tensor) -> Tensor:
        """Return this process's share of what `collect` returned."""
        whole = torch.zeros_like(self.values)
        sizes = [place.stop - place.start for place in self.places]
        for place, part in zip(self.places, collected.split(sizes), strict=True):
            whole[place] = part.to(whole.device)
        return whole[self.own]
