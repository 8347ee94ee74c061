"""The prefix tree and the slot counts under it."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_server.engines.embedded.kv_pool import KVPool
from relax_server.engines.embedded.prefix_tree import PrefixTree


def keys(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


def new(capacity: int = 64) -> tuple[KVPool, PrefixTree]:
    pool = KVPool(1, 1, 1, capacity, torch.float32)
    return pool, PrefixTree(pool)


def remember(pool: KVPool, tree: PrefixTree, text: str) -> np.ndarray:
    """What a request that computed `text` and ended leaves behind."""
    known = tree.match(keys(text))
    pool.retain(known)
    slots = np.concatenate([known, pool.allocate(len(text) - len(known))])
    tree.insert(keys(text), slots)
    pool.release(slots)
    return slots


def test_prefixes_are_found_and_split():
    pool, tree = new()
    first = remember(pool, tree, "abcdef")
    second = remember(pool, tree, "abcxyz")
    assert (second[:3] == first[:3]).all()
    assert (tree.match(keys("abcxq")) == second[:4]).all()
    assert (tree.match(keys("abcdefgh")) == first).all()
    assert len(tree.match(keys("b"))) == 0
    assert tree.n_tokens == 9 and pool.n_free == 64 - 9


def test_eviction_takes_the_oldest_and_spares_what_is_used():
    pool, tree = new(12)
    remember(pool, tree, "aaaa")
    used = remember(pool, tree, "bbbb")
    remember(pool, tree, "cccc")
    pool.retain(used[:2])
    tree.match(keys("aaaa"))
    tree.evict(4)  # all free: c was used before a
    assert len(tree.match(keys("aaaa"))) == 4
    assert len(tree.match(keys("cccc"))) == 0
    assert len(tree.match(keys("bbbb"))) == 2
    tree.evict(100)
    assert pool.n_free == 10 and len(tree.match(keys("bbbb"))) == 2
    pool.release(used[:2])
    tree.flush()
    assert pool.n_free == 12 and tree.n_tokens == 0


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=12), st.sampled_from(["keep", "end", "evict"])), max_size=25))
def test_slots_hold_what_was_written_whatever_happens(actions: list[tuple[str, str]]):
    """The memory of every slot says for which prefix it was written; a match must only return slots of that prefix."""
    pool, tree = new(80)
    written: dict[int, str] = {}
    held: list[np.ndarray] = []
    for text, action in actions:
        known = tree.match(keys(text))
        assert [written[int(s)] for s in known] == [text[: i + 1] for i in range(len(known))]
        pool.retain(known)
        short = len(text) - len(known) - pool.n_free
        if short > 0:
            tree.evict(short)
        if pool.n_free < len(text) - len(known):
            pool.release(known)
            continue
        slots = np.concatenate([known, pool.allocate(len(text) - len(known))])
        written |= {int(s): text[: i + 1] for i, s in enumerate(slots)}
        tree.insert(keys(text), slots)
        if action == "keep":
            held.append(slots)
        else:
            pool.release(slots)
        if action == "evict":
            tree.evict(20)
    in_use = {int(s) for slots in held for s in slots}
    tree.flush()
    assert pool.n_free == 80 - len(in_use)
    for slots in held:
        pool.release(slots)
    assert pool.n_free == 80 and (pool.refs == 0).all()
