"""Hostile media files against the processes that decode for the service.

    python -m benchmarks.hostile_media [--files 1000] [--seed 0]

Bombs made by hand, and good files of every kind that were cut, mutated and spliced with a fixed seed, are offered one after the
other, as the service offers what comes over the network. Between them comes an honest picture of another key now and then,
which has to be taken. What is accepted is decoded once more in this process, as engine and trainer would.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from relax_server.api.media.decoders import MediaDecoders
from relax_server.api.media.limits import DecoderLimits

from benchmarks.hostile_files import HostileFile, hostile_files
from benchmarks.report import save
from relax_sdk.errors import MediaError
from relax_sdk.media import Image, decode_audio, decode_image, decode_video

HONEST_EVERY = 50
"""Files between two honest pictures."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of one file."""

    file: HostileFile
    seconds: float
    refused: str = ""
    """Why; empty: it was accepted."""
    ended: bool = False
    """Its process was killed or has died."""


async def offer(files: Sequence[HostileFile], limits: DecoderLimits) -> list[Outcome]:
    """Offer all files, one after the other.

    Raises:
        MediaError: an honest picture was refused.
    """
    decoders, outcomes = MediaDecoders(limits), []
    honest = Image.from_array(np.zeros((8, 8, 3), np.uint8)).bytes()
    try:
        for number, file in enumerate(files):
            began, killed, refused = time.perf_counter(), decoders.killed, ""
            try:
                await decoders.check(file.kind, file.data, "hostile")
            except MediaError as error:
                refused = str(error)
            outcomes.append(Outcome(file, time.perf_counter() - began, refused, decoders.killed > killed))
            if number % HONEST_EVERY == 0:
                await decoders.check("image", honest, "honest")
        return outcomes
    finally:
        decoders.close()


def decoded_again(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Decode what was accepted in this process; how often that went well, and how often it was refused."""
    decode = {"image": decode_image, "audio": decode_audio, "video": decode_video}
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.refused:
            continue
        try:
            decode[outcome.file.kind](outcome.file.data)
            counts["well"] += 1
        except MediaError:
            counts["refused"] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    files = hostile_files(args.files, args.seed)
    limits = DecoderLimits()
    outcomes = asyncio.run(offer(files, limits))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    again = decoded_again(outcomes)
    slowest = sorted(outcomes, key=lambda outcome: outcome.seconds, reverse=True)
    for outcome in dict.fromkeys([*slowest[:10], *(outcome for outcome in outcomes if outcome.ended)]):
        print(f"{outcome.seconds:6.2f} s  {outcome.file.name}: {outcome.refused or 'accepted'}")
    rows = []
    for kind in ("image", "audio", "video"):
        mine = [outcome for outcome in outcomes if outcome.file.kind == kind]
        rows.append(
            {
                "offered as": kind,
                "files": len(mine),
                "accepted": sum(not outcome.refused for outcome in mine),
                "refused": sum(bool(outcome.refused) for outcome in mine),
                "of these, process ended": sum(outcome.ended for outcome in mine),
                "slowest, s": max(outcome.seconds for outcome in mine),
                "median, s": float(np.median([outcome.seconds for outcome in mine])),
            }
        )
    save("hostile_media", rows, peak_mib=peak, again=dict(again), seed=args.seed, memory_limit_mib=limits.memory >> 20)


if __name__ == "__main__":
    main()
