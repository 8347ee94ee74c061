"""Files that mean harm, from `benchmarks.hostile_files`: each is taken or refused in time, and honest pictures between them are
always taken."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np
import pytest
from relax_server.api.media.limits import DecoderLimits

from benchmarks.hostile_files import (
    MUTATIONS,
    TEXTS,
    HostileFile,
    gif,
    hostile_files,
    mutants,
    promising_flac,
    tiff,
    wav,
    webp,
)
from benchmarks.hostile_media import Outcome, decoded_again, offer

SMALL_BOMBS = [
    *(HostileFile(name, "video", data) for name, data in TEXTS.items()),
    HostileFile("GIF", "video", gif(4_000, 17_000)),
    HostileFile("TIFF", "image", tiff(4_000, 2**32 - 1)),
    HostileFile("WebP", "image", webp(16_383)),
    HostileFile("WAV", "audio", wav(b"junk" + bytes(4), 2**18)),
    HostileFile("FLAC", "audio", promising_flac()),
]


def looked_at(outcomes: list[Outcome], limits: DecoderLimits) -> None:
    """None has outlived its limits, and what was accepted can be decoded by whoever gets it."""
    again = decoded_again(outcomes)
    accepted = [outcome for outcome in outcomes if not outcome.refused]
    assert again["well"] >= 0.9 * len(accepted) and accepted
    reasons = {outcome.refused for outcome in outcomes if outcome.ended}
    assert all("longer than" in why or "made its decoder crash" in why for why in reasons), reasons
    assert max(outcome.seconds for outcome in outcomes) < limits.seconds + 30


async def test_a_sample_of_hostile_files():
    limits = DecoderLimits(processes=2, cpu_seconds=5)
    bombs = await offer(SMALL_BOMBS, limits)
    assert [outcome.file.name for outcome in bombs if not outcome.refused] == []
    looked_at([*bombs, *await offer(mutants(53), limits)], limits)


@pytest.mark.nightly
async def test_a_thousand_hostile_files():
    limits = DecoderLimits()
    looked_at(await offer(hostile_files(1_000), limits), limits)


async def test_damaged_avi_is_refused_and_crashes_nothing():
    """It made decord crash, which a trainer would not survive either."""
    rng = np.random.default_rng(0)
    with av.open(buffer := io.BytesIO(), "w", format="avi") as out:
        stream: Any = out.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for pixels in rng.integers(0, 256, (12, 64, 64, 3), dtype=np.uint8):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode())
    data = buffer.getvalue()
    files = [HostileFile("AVI", "video", how(rng, data, data)) for how in MUTATIONS for _ in range(25)]
    outcomes = await offer(files, DecoderLimits(processes=2))
    assert not [outcome.refused for outcome in outcomes if outcome.ended]
