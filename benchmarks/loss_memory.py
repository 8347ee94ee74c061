"""How much memory does the loss of a large batch need, beside the plain way of computing it?

    python -m benchmarks.loss_memory [--rows 8192] [--vocabulary 150000] [--width 1024]

Forward and backward pass from the states before the output layer to the gradients of these states and of the layer's weight, in
float32, with banned tokens: logprobs and entropy, once with the entropy in the loss, and once where it is only reported. *In
parts* is `relax_server.training.scoring`. *Plain* is how the trainer did it before: all logits at once, and autograd through
log softmax. Each measurement is a process of its own: the peak of its resident memory above what it held just before.

The plain way is also measured with 1/16 and 1/8 of the rows. Where the machine lacks the memory for all rows, its peak is the
line through these two, and the table says so. The bar: in parts no more than 1/8 of the plain way.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from relax_server.training.algorithms import distribution
from relax_server.training.scoring import Predictions, score
from torch import Tensor

from benchmarks.folders import resident
from benchmarks.report import save
from relax_sdk.config import SamplingParams

PLAIN, IN_PARTS = "plain", "in parts"
LIMIT = 1800.0
"""Seconds for one measurement."""
LEAVE_MB = 4000.0
"""Memory that other programs of the machine keep."""
BANNED = 20
"""Tokens that are never sampled, as placeholders of media are."""


def _plain(logits: Tensor, row: Tensor, token: Tensor, banned: Tensor) -> tuple[Tensor, Tensor]:
    found = distribution(logits, banned, SamplingParams())
    return found.of(row, token), found.entropy


def measure(way: str, rows: int, vocabulary: int, width: int, in_loss: bool) -> dict[str, float]:
    """One loss, in this process: MB above what it held before, and seconds."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    row, banned = torch.arange(rows), torch.arange(BANNED)
    token = torch.randint(BANNED, vocabulary, (rows,))
    (torch.ones(8, 8, requires_grad=True) @ torch.ones(8, 8)).sum().backward()  # threads and libraries are there
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = resident("VmRSS"), time.perf_counter()
    if way == PLAIN:
        logprobs, entropy = _plain(hidden @ weight.t(), row, token, banned)
    else:
        scores = score(Predictions(hidden, weight), row, token, banned, SamplingParams(), entropy=True)
        logprobs, entropy = scores.logprobs, scores.entropy
        assert entropy is not None
    loss = -logprobs.sum()
    if in_loss:
        loss = loss - 0.01 * entropy.sum()
    del entropy
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return {
        "peak_mb": resident("VmHWM") - before,
        "seconds": time.perf_counter() - began,
        "gradient": float(weight.grad.norm()),
        "loss": float(loss.detach()) / rows,
    }


def alone(way: str, rows: int, args: argparse.Namespace, in_loss: bool) -> dict[str, float]:
    """`measure` in a process of its own."""
    shape = ["--rows", str(rows), "--vocabulary", str(args.vocabulary), "--width", str(args.width)]
    command = [sys.executable, "-m", "benchmarks.loss_memory", "--way", way, *shape, *["--in-loss"] * in_loss]
    print(f"{way}, {rows} rows, entropy {'in the loss' if in_loss else 'reported'}", flush=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(args: argparse.Namespace, in_loss: bool) -> list[dict[str, Any]]:
    """Rows of the table for one kind of loss."""
    shared = {"entropy": "in the loss" if in_loss else "reported", "vocabulary": args.vocabulary}
    out = []
    few = [args.rows // 16, args.rows // 8]
    for way, rows in [(PLAIN, few[0]), (IN_PARTS, few[0]), (PLAIN, few[1]), (IN_PARTS, args.rows)]:
        out.append({**shared, "way": way, "rows": rows, **alone(way, rows, args, in_loss), "peak": "measured"})
    low, high = (next(r["peak_mb"] for r in out if r["way"] == PLAIN and r["rows"] == n) for n in few)
    whole = high + (high - low) / (few[1] - few[0]) * (args.rows - few[1])
    room = psutil.virtual_memory().available / 1e6 - LEAVE_MB - 4e-6 * args.vocabulary * args.width
    last: dict[str, Any] = {**shared, "way": PLAIN, "rows": args.rows}
    if whole < room:
        out.append({**last, **alone(PLAIN, args.rows, args, in_loss), "peak": "measured"})
    else:
        out.append({**last, "peak_mb": whole, "seconds": None, "gradient": None, "loss": None, "peak": "from fewer rows"})
    ratio = out[-1]["peak_mb"] / out[-2]["peak_mb"]
    for row in out:
        row["plain / in parts"] = ratio if row["rows"] == args.rows else None
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--way", choices=[PLAIN, IN_PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--in-loss", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way, args.rows, args.vocabulary, args.width, args.in_loss)))
        return
    rows = [row for in_loss in (True, False) for row in compare(args, in_loss)]
    save("loss_memory", rows, bars={"plain / in parts": 8})


if __name__ == "__main__":
    main()
