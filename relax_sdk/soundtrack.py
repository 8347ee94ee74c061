"""The sound of a film, by FFmpeg: from memory and nothing else, with the decoders that are named here."""

from __future__ import annotations

import io
from itertools import chain
from typing import Any

import numpy as np

from relax_sdk.decoding import SAMPLING_RATE, check_peak
from relax_sdk.errors import MediaError
from relax_sdk.films import MAX_STREAMS
from relax_sdk.media_formats import sniff
from relax_sdk.media_limits import LIMITS
from relax_sdk.truncation import check_complete

CODECS = ("aac", "mp3", "mp3float", "opus", "libopus", "vorbis", "flac", "pcm_s16le", "pcm_s16be", "pcm_f32le", "ac3")
"""FFmpeg's decoders of soundtracks that are read."""


def decode_soundtrack(data: bytes, sampling_rate: int = SAMPLING_RATE) -> np.ndarray | None:
    """Samples of a film's first soundtrack, mono.

    Args:
        data: the encoded film.
        sampling_rate: of what is returned, in Hz.

    Returns:
        float32 [n]; None: the film is silent.

    Raises:
        MediaError: of a format that is not taken, damaged, too long, not finite, or far beyond full scale.
    """
    import av

    check_complete(data)
    demuxer = sniff(data, "video").decoder
    options = {
        **{"format_whitelist": demuxer, "protocol_whitelist": "none"},
        **{"codec_whitelist": ",".join(CODECS), "max_streams": str(MAX_STREAMS)},
    }
    blocks: list[np.ndarray] = []
    n = 0
    try:
        with av.open(io.BytesIO(data), "r", format=demuxer, options=options) as container:
            if not container.streams.audio:
                return None
            stream: Any = container.streams.audio[0]
            stream.thread_count = 1
            resampler = av.AudioResampler("flt", "mono", sampling_rate)
            for frame in chain(container.decode(stream), [None]):
                for made in resampler.resample(frame):
                    blocks.append(made.to_ndarray()[0])
                    n += len(blocks[-1])
                    LIMITS.check_sound(n, 1, sampling_rate)
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"the film's sound cannot be decoded ({error}); write it as AAC, MP3, Opus or FLAC") from error
    if not n:
        return None
    wave = np.concatenate(blocks).astype(np.float32)
    if not np.isfinite(wave).all():
        raise MediaError("the film's sound holds samples that are NaN or infinite")
    check_peak(float(np.abs(wave).max()))
    return wave
