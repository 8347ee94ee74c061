"""Films that have a sound."""

from __future__ import annotations

import io

import numpy as np

from relax_sdk import Video


def heard_film(seconds: float = 5.0, tone: float = 440.0) -> Video:
    """Frames at 4 a second with a tone, as MP4 with AAC."""
    import av

    file = io.BytesIO()
    rng = np.random.default_rng(1)
    with av.open(file, "w", format="mp4") as out:
        pictures, sound = out.add_stream("mpeg4", rate=4), out.add_stream("aac", rate=16_000, layout="mono")
        pictures.width = pictures.height = 64
        for _ in range(int(seconds * 4)):
            out.mux(pictures.encode(av.VideoFrame.from_ndarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8), "rgb24")))
        out.mux(pictures.encode(None))
        wave = (0.3 * np.sin(np.arange(int(seconds * 16_000)) * tone * 2 * np.pi / 16_000)).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(wave[None], "fltp", "mono")
        frame.sample_rate = 16_000
        out.mux(sound.encode(frame))
        out.mux(sound.encode(None))
    return Video.from_bytes(file.getvalue())
