"""KV memory in units of one token: slots with reference counts, shared by requests and the prefix tree."""

from __future__ import annotations

import numpy as np
import torch


class KVPool:
    """Keys and values of all layers for `capacity` tokens.

    `keys` and `values` are [layers, kv_heads, capacity + 1, head_dim]; slot 0 is padding and stays zero. A slot is free
    when its reference count is 0. With `route_top_k`, `routes` int16 [capacity + 1, layers, top_k] holds the experts that
    each cached token was sent to, so that they are known for tokens served from the cache.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        route_top_k: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.capacity = capacity
        self.device = device or torch.device("cpu")
        self._shape = (layers, kv_heads, capacity + 1, head_dim)
        self._dtype = dtype
        self._route_shape = (capacity + 1, layers, route_top_k) if route_top_k else None
        self.refs = np.zeros(capacity + 1, np.int32)
        self._free = np.arange(capacity, 0, -1, dtype=np.int64)
        self._n_free = capacity
        self.allocate_memory()

    @staticmethod
    def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * kv_heads * head_dim * dtype.itemsize

    def allocate_memory(self) -> None:
        """Take the memory; pages are touched only when written."""
        self.keys, self.values = (torch.zeros(self._shape, dtype=self._dtype, device=self.device) for _ in range(2))
        self.routes = None
        if self._route_shape:
            self.routes = torch.zeros(self._route_shape, dtype=torch.int16, device=self.device)
        self._scratch = [torch.empty(0, dtype=self._dtype)] * 2

    def drop_memory(self) -> None:
        """Give the memory back; every slot must be free."""
        if self.n_free != self.capacity:
            raise RuntimeError(f"{self.capacity - self.n_free} KV slots are still in use")
        self.keys = self.values = torch.empty(0)
        self._scratch = []
        self.routes = None

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `slots` in one layer, each [kv_heads, len(slots), head_dim]; valid until the next call.

        The memory is kept between calls: fresh pages for every layer of every step would cost more than the copy.
        """
        shape = (self._shape[1], len(slots), self._shape[3])
        size = shape[0] * shape[1] * shape[2]
        if self._scratch[0].numel() < size:
            self._scratch = [torch.empty(size + size // 4, dtype=self._dtype, device=self.device) for _ in range(2)]
        out = [buffer[:size].view(shape) for buffer in self._scratch]
        torch.index_select(self.keys[layer], 1, slots, out=out[0])
        torch.index_select(self.values[layer], 1, slots, out=out[1])
        return out[0], out[1]

    @property
    def n_free(self) -> int:
        return self._n_free

    def allocate(self, n: int) -> np.ndarray:
        """Take `n` free slots, int64 [n], each with one reference; the caller has checked `n_free`."""
        if n > self._n_free:
            raise RuntimeError(f"asked for {n} KV slots but only {self._n_free} are free")
        self._n_free -= n
        slots = self._free[self._n_free : self._n_free + n].copy()
        self.refs[slots] = 1
        return slots

    def retain(self, slots: np.ndarray) -> None:
        """Add one reference to each slot."""
        self.refs[slots] += 1

    def release(self, slots: np.ndarray) -> None:
        """Take one reference from each slot (no slot twice); those without any become free."""
        left = self.refs[slots] - 1
        self.refs[slots] = left
        freed = slots[left == 0]
        self._free[self._n_free : self._n_free + len(freed)] = freed
        self._n_free += len(freed)
