"""Sums, gathers and broadcasts among the devices of ranks that torch executes.

NCCL on GPUs, where operations are enqueued and captured like kernels; gloo on the CPU. Embedding
and head of a rank are those of its part of the vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.kernels.operations import Linear
    from appliance.model.embedding import Embedding
    from appliance.model.shard.shard import Shard

# A rank may compile a kernel while the others wait; one that ends is noticed otherwise.
PATIENCE = timedelta(hours=1)
LOOPBACK = "127.0.0.1"
STORE = "steps"  # of the ranks that run steps


class Joint:
    """One rank's place among all ranks of a model.

    Args:
        store: shared by all ranks, in which they find each other.
        device: of this rank's tensors.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._store = store
        self._group: Any = None

    def connect(self, patience: timedelta = PATIENCE) -> None:
        """Wait for all ranks, and sum once, so that no step waits for that.

        Args:
            patience: time limit of this and of gloo's later operations.

        Raises:
            RuntimeError: a rank is missing, or the devices cannot reach each other.
        """
        if self.device.type == "cuda":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this machine
            kind: Any = dist.ProcessGroupNCCL
            options = kind.Options()
        else:
            kind = dist.ProcessGroupGloo
            options = kind._Options()
            options._devices = [kind.create_device(hostname=LOOPBACK)]
        options._timeout = patience
        # A group of its own: a program that loads a model may have another one of torch's.
        self._group = kind(self._store, self.rank, self.size, options)
        found = self.sum(torch.ones(1, device=self.device)).item()
        if found != self.size:
            raise RuntimeError(f"{self.size} ranks that each gave 1 got {found}")

    def sum(self, x: Tensor) -> Tensor:
        """Add up the tensors of all ranks, of one shape and dtype; may write to x."""
        x = x.contiguous()
        options = dist.AllreduceOptions()
        options.asyncOp = False
        _finish(self._group.allreduce([x], options))
        return x

    def broadcast(self, x: Tensor) -> None:
        """Copy rank 0's contiguous tensor to all ranks' tensors."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
        _finish(self._group.broadcast([x], options))

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Lay the tensors of all ranks side by side at rank 0; None at the others.

        Args:
            x: (num_rows, width).
            widths: of each rank's tensor.
        """
        num_rows, widest = x.shape[0], max(widths)
        if x.shape[1] < widest:  # the backends gather equal shapes
            x = torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        options = dist.GatherOptions()
        options.rootRank, options.asyncOp = 0, False
        parts: list[Tensor] = []
        if self.rank == 0:
            parts = [x.new_empty((num_rows, widest)) for _ in widths]
        _finish(self._group.gather([parts] if parts else [], [x.contiguous()], options))
        if not parts:
            return None
        own = [part[:, :width] for part, width in zip(parts, widths, strict=True)]
        return torch.cat(own, dim=1)


def _finish(work: Any) -> None:
    """Wait for the result; on a GPU, later work waits for it instead of the host."""
    if work is not None:
        work.wait()


def store_in(descriptor: int, size: int, name: str) -> Store:
    """Return a store in a file that all ranks have open.

    A file holds stores of several names. It stays open as long as the process: the store writes to
    it again when it ends, and by then its number must not be another file's.
    """
    return PrefixStore(name, FileStore(f"/proc/self/fd/{os.dup(descriptor)}", size))


@dataclass(frozen=True, slots=True)
class JoinedShard:
    """A rank's part of a model, and its place among the ranks."""

    shard: Shard
    joint: Joint

    def joints(self, layer: int) -> tuple[Joint | None, Joint | None]:
        """Return the joints of a layer's mixer and MLP; None if every rank has all of it."""
        share = self.shard.shares[layer]
        mixer = None if share.heads is None else self.joint
        return mixer, self.joint if share.has_part_of_mlp else None


@dataclass(frozen=True, slots=True)
class PartialEmbedding:
    """Looks up a rank's rows, and gets the others from the other ranks."""

    own: Embedding
    part: JoinedShard

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look up token_ids (num_tokens,) of the whole vocabulary: (num_tokens, hidden_size)."""
        tokens = self.part.shard.own_tokens
        count = tokens.stop - tokens.start
        places = token_ids - tokens.start
        is_other = (places < 0) | (places >= count)
        rows = self.own(places.clamp(0, count - 1))
        return self.part.joint.sum(rows.masked_fill(is_other.unsqueeze(1), 0))


@dataclass(frozen=True, slots=True)
class PartialHead:
    """Computes the logits of a rank's tokens; rank 0 collects all ranks' logits."""

    own: Linear
    part: JoinedShard

    @property
    def in_features(self) -> int:
        return self.own.in_features

    @property
    def out_features(self) -> int:
        return self.part.shard.whole.vocab_size

    @property
    def nbytes(self) -> int:
        return self.own.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (num_rows, in_features) to (num_rows, vocab_size); to (0, ...) beyond rank 0."""
        widths = [last - first for first, last in pairwise(self.part.shard.tokens)]
        logits = self.part.joint.gather(self.own(x), widths)
        return x.new_empty((0, self.out_features)) if logits is None else logits
