"""Files of sounds as samples, within limits. Reading them takes the extra ``audio``: soundfile and soxr."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError, DataError
from nemorl.media import Media

from nemorl_media.decoding import media_of_url, require_size

if TYPE_CHECKING:
    from numpy import ndarray

FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
"""libsndfile's names. OGG holds Vorbis or Opus."""
MAX_CHANNELS = 8
RATES = range(1_000, 192_001)
"""Samples per second."""
SENT_AS = "send a data URL (data:audio/wav;base64,…), or the file's bytes"
MAX_S = 3600.0
"""Longest sound that is read where a model does not say."""
IEEE_FLOAT = 3
"""Format of samples in a WAV file."""


def media_of_sound(sound: Any) -> Media:
    """The item of a sound as datasets have them.

    Args:
        sound: The bytes of a file, a data URL, ``{"bytes": …}`` as the hub's datasets store it, or ``{"array": …,
            "sampling_rate": …}`` as they hand it out: [n] samples, or [channels, n].

    Raises:
        DataError: It is none of these, or too large.

    Example:
        >>> media_of_sound({"array": [0.0, 0.5], "sampling_rate": 16000}).kind
        'audio'
    """
    if isinstance(sound, Mapping) and isinstance(sound.get("bytes"), bytes):
        sound = sound["bytes"]
    if isinstance(sound, str):
        return media_of_url(sound)
    if isinstance(sound, bytes | bytearray | memoryview):
        require_size(len(sound))
        return Media("audio", bytes(sound))
    if isinstance(sound, Mapping) and "array" in sound and "sampling_rate" in sound:
        return Media("audio", _wav(sound["array"], sound["sampling_rate"]))
    raise DataError(f"a sound is a {type(sound).__name__}", fix=SENT_AS)


def samples(item: Media, rate: int, max_s: float) -> ndarray[Any, Any]:
    """[n] float32 samples of the sound, its channels averaged.

    Args:
        item: WAV, FLAC, OGG or MP3.
        rate: Of the samples, per second.
        max_s: Longest sound in seconds.

    Raises:
        DataError: It is damaged, silent about its length and too long, or of a format that is not taken.
        BackendError: The packages that read sounds are not installed.
    """
    import numpy

    soundfile, soxr = _readers()
    try:
        with soundfile.SoundFile(io.BytesIO(item.data)) as file:
            _require_readable(item, file)
            # A header may say any length: what is read is never more than the limit and one sample.
            limit = math.floor(max_s * file.samplerate)
            sound = file.read(min(file.frames, limit + 1), dtype="float32", always_2d=True)
            found_rate = file.samplerate
    except (soundfile.SoundFileError, RuntimeError, OSError, ValueError, TypeError) as error:
        raise DataError(f"{item} cannot be decoded: {error}", fix="leave it out, or save it anew") from error
    if len(sound) > limit:
        raise DataError(f"{item} is longer than {max_s:g} s", fix="cut it into several sounds")
    mono = sound.mean(1)
    if not len(mono) or not numpy.isfinite(mono).all():
        raise DataError(f"{item} has no samples, or some that are no numbers", fix="leave it out")
    resampled: ndarray[Any, Any] = mono if found_rate == rate else soxr.resample(mono, found_rate, rate)
    return resampled


def backwards(item: Media) -> Media:
    """The same sound from its end to its beginning; raises as ``samples`` does."""
    soundfile, _ = _readers()
    try:
        rate = soundfile.info(io.BytesIO(item.data)).samplerate
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise DataError(f"{item} cannot be decoded: {error}", fix="leave it out, or save it anew") from error
    return Media("audio", _wav(samples(item, rate, MAX_S)[::-1], rate))


def _readers() -> tuple[Any, Any]:
    try:
        import soundfile
        import soxr
    except ImportError as error:
        raise BackendError(f"to read sounds {error.name} is needed", fix="pip install 'nemorl-media[audio]'") from error
    return soundfile, soxr


def _require_readable(item: Media, file: Any) -> None:
    if file.format not in FORMATS or file.channels > MAX_CHANNELS or file.samplerate not in RATES:
        raise DataError(
            f"{item} is {file.format} with {file.channels} channels of {file.samplerate} samples per second",
            fix=f"use one of {', '.join(FORMATS)}, up to {MAX_CHANNELS} channels, {RATES.start} to {RATES.stop - 1}",
        )


def _wav(array: Any, rate: Any) -> bytes:
    """A WAV file of float32 samples (Microsoft's multimedia programming interface 1.0, 1991, and its revision 3)."""
    import numpy

    try:
        channels, rate = numpy.atleast_2d(numpy.asarray(array, dtype="<f4")), int(rate)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"a sound is no array of numbers with a rate: {error}", fix="give [n] or [channels, n] samples"
        ) from error
    if channels.ndim != 2 or not 0 < len(channels) <= MAX_CHANNELS or rate not in RATES:
        raise DataError(
            f"a sound of shape {channels.shape} with {rate} samples per second", fix="give [n] or [channels, n] samples"
        )
    require_size(channels.nbytes)
    data = numpy.ascontiguousarray(channels.T).tobytes()
    width = 4 * len(channels)
    form = struct.pack("<HHIIHH", IEEE_FLOAT, len(channels), rate, rate * width, width, 32)
    chunks = b"WAVE" + b"".join(
        name + struct.pack("<I", len(chunk)) + chunk for name, chunk in ((b"fmt ", form), (b"data", data))
    )
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks
