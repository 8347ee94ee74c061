"""A radix tree over token keys that remembers in which KV slots a prefix lies (RadixAttention, arXiv 2312.07104)."""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np

from relax_server.engines.embedded.kv_pool import KVPool


class _Node:
    __slots__ = ("children", "keys", "parent", "slots", "used")

    def __init__(self, keys: np.ndarray, slots: np.ndarray, parent: _Node | None, used: int) -> None:
        self.keys = keys
        self.slots = slots
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.used = used


class PrefixTree:
    """Prefixes by key; the tree holds one reference to each of its slots, requests hold their own.

    A key is an int64 per token: the token id, or a negative number made of the media's sha256 at a placeholder.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._clock = count()
        self.n_tokens = 0
        """Tokens held, whether or not requests use them too."""
        self._root = _Node(np.empty(0, np.int64), np.empty(0, np.int64), None, 0)

    def match(self, keys: np.ndarray) -> np.ndarray:
        """Slots int64 [m] of the longest known prefix; the caller retains them before anything is evicted."""
        found: list[np.ndarray] = []
        node, at, now = self._root, 0, next(self._clock)
        while at < len(keys):
            child = node.children.get(int(keys[at]))
            if child is None:
                break
            same = _common(child.keys, keys[at:])
            child.used = now
            found.append(child.slots[:same])
            at += same
            if same < len(child.keys):
                break
            node = child
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def insert(self, keys: np.ndarray, slots: np.ndarray) -> None:
        """Remember `keys` [n] in `slots` [n]; what is known already stays in the slots it is in."""
        node, at, now = self._root, 0, next(self._clock)
        while at < len(keys):
            child = node.children.get(int(keys[at]))
            if child is None:
                leaf = _Node(keys[at:].copy(), slots[at:].copy(), node, now)
                node.children[int(keys[at])] = leaf
                self._pool.retain(leaf.slots)
                self.n_tokens += len(leaf.slots)
                return
            same = _common(child.keys, keys[at:])
            child.used = now
            at += same
            node = child if same == len(child.keys) else self._split(child, same)

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two; returns the upper half."""
        assert node.parent is not None
        upper = _Node(node.keys[:at], node.slots[:at], node.parent, node.used)
        node.parent.children[int(upper.keys[0])] = upper
        node.keys, node.slots, node.parent = node.keys[at:], node.slots[at:], upper
        upper.children[int(node.keys[0])] = node
        return upper

    def evict(self, n: int) -> None:
        """Forget least recently used ends of prefixes that no request uses, until `n` more slots are free or none is left."""
        wanted = self._pool.n_free + n
        order = count()
        heap = [(leaf.used, next(order), leaf) for leaf in self._leaves()]
        heapq.heapify(heap)
        while heap and self._pool.n_free < wanted:
            _, _, leaf = heapq.heappop(heap)
            shared = np.flatnonzero(self._pool.refs[leaf.slots] > 1)
            keep = int(shared[-1]) + 1 if len(shared) else 0
            self._pool.release(leaf.slots[keep:])
            self.n_tokens -= len(leaf.slots) - keep
            if keep:
                leaf.keys, leaf.slots = leaf.keys[:keep], leaf.slots[:keep]
                continue
            parent = leaf.parent
            assert parent is not None
            del parent.children[int(leaf.keys[0])]
            if parent is not self._root and not parent.children:
                heapq.heappush(heap, (parent.used, next(order), parent))

    def flush(self) -> None:
        """Forget everything; slots that requests use stay theirs."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            self._pool.release(node.slots)
            stack.extend(node.children.values())
        self._root.children.clear()
        self.n_tokens = 0

    def _leaves(self) -> list[_Node]:
        leaves: list[_Node] = []
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            else:
                leaves.append(node)
        return leaves


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(same.argmin())
