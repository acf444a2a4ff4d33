"""Sounds: files of unknown origin are a right result or an error of the data, never anything else."""

from __future__ import annotations

import base64
import io
import random
import struct

import numpy
import pytest
from nemorl.errors import DataError
from nemorl.media import Media
from nemorl_media.audio import media_of_sound, samples
from nemorl_media.decoding import MAX_BYTES
from nemorl_testing.seeing import tune
from recorded_messages import Raises
from seen_families import seer

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")

RATE = 16_000


def tone(seconds: float = 0.5, rate: int = RATE, pitch: float = 440.0) -> numpy.ndarray:
    return (0.5 * numpy.sin(2 * numpy.pi * pitch * numpy.arange(int(seconds * rate)) / rate)).astype("float32")


def file_of(sound: numpy.ndarray, form: str, rate: int = RATE, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound, rate, format=form, subtype=subtype)
    return file.getvalue()


def heard(data: bytes, max_s: float = 30.0) -> numpy.ndarray:
    return samples(Media("audio", data), RATE, max_s)


@pytest.mark.parametrize(
    ("form", "subtype", "error"),
    [
        ("WAV", "FLOAT", 0.0),
        ("WAV", "PCM_16", 2**-15),
        ("WAV", "PCM_U8", 2**-7),
        ("WAV", "ULAW", 0.02),
        ("FLAC", "PCM_24", 2**-23),
        ("OGG", "VORBIS", 0.05),
        ("OGG", "OPUS", 0.1),
        ("MP3", "MPEG_LAYER_III", 0.05),
    ],
)
def test_formats_are_the_samples_they_hold(form: str, subtype: str, error: float) -> None:
    found = heard(file_of(tone(), form, subtype=subtype))
    assert found.dtype == numpy.float32
    assert numpy.abs(found[200 : len(tone()) - 200] - tone()[200:-200]).max() <= error


def test_channels_are_averaged_and_rates_converted() -> None:
    both = numpy.stack([tone(), 0.5 * tone()], 1)
    assert numpy.allclose(heard(file_of(both, "WAV", subtype="FLOAT")), 0.75 * tone(), atol=1e-6)
    found = heard(file_of(tone(rate=44_100), "WAV", rate=44_100, subtype="FLOAT"))
    assert len(found) == len(tone())
    assert numpy.abs(found - tone())[400:-400].max() < 1e-3


def test_a_sound_of_a_dataset_is_its_samples() -> None:
    both = numpy.stack([tone(), -tone()])
    assert numpy.array_equal(heard(media_of_sound({"array": tone(), "sampling_rate": RATE}).data), tone())
    assert not heard(media_of_sound({"array": both, "sampling_rate": RATE}).data).any()
    data = file_of(tone(), "FLAC")
    url = "data:audio/flac;base64," + base64.b64encode(data).decode()
    assert media_of_sound(url) == media_of_sound(data) == media_of_sound({"bytes": data, "path": "x.flac"})
    for bad in (
        "file:///etc/passwd",
        {"path": "/etc/passwd"},
        {"array": tone(), "sampling_rate": 0},
        {"array": numpy.zeros((2, 2, 2)), "sampling_rate": RATE},
        {"array": [[0.0], [0.0, 1.0]], "sampling_rate": RATE},
        {"array": ["loud"], "sampling_rate": RATE},
        {"array": tone(), "sampling_rate": None},
        b"\0" * (MAX_BYTES + 1),
        None,
    ):
        with pytest.raises(DataError):
            media_of_sound(bad)


def test_a_long_sound_is_refused_and_never_cut(raises: Raises) -> None:
    assert len(heard(file_of(tone(2.0), "FLAC"), max_s=2.0)) == 2 * RATE
    with raises(DataError):
        heard(file_of(tone(2.001), "FLAC"), max_s=2.0)
    hearing = seer("qwen2_audio")  # hears four seconds
    assert hearing.family.item(tune(1, 4.0)).tokens == 100  # 400 frames of 10 ms, four to a token
    with raises(DataError):
        hearing.family.item(tune(1, 4.01))
    with raises(DataError):
        hearing.family.item(tune(1, 0.01))


def test_headers_that_lie_are_refused_or_read_to_the_end_of_the_file() -> None:
    flac = bytearray(file_of(tone(), "FLAC"))
    flac[21:26] = bytes([flac[21] | 0x0F, 0xFF, 0xFF, 0xFF, 0xFF])  # 2^36 - 1 samples: 50 days
    with pytest.raises(DataError):
        heard(bytes(flac))
    wav = bytearray(file_of(tone(), "WAV"))
    at = wav.index(b"data") + 4
    wav[at : at + 4] = struct.pack("<I", 0xFFFFFFF0)
    assert len(heard(bytes(wav))) == len(tone())


def test_sounds_without_numbers_are_refused() -> None:
    broken = tone()
    broken[5] = numpy.nan
    for data in (
        file_of(broken, "WAV", subtype="FLOAT"),
        file_of(tone(0.0), "WAV"),
        file_of(tone(), "AIFF"),
        file_of(numpy.zeros((10, 9)), "WAV"),
        b"",
        b"RIFF",
        file_of(tone(), "WAV")[:30],
    ):
        with pytest.raises(DataError):
            heard(data)


def test_damaged_files_raise_nothing_but_errors_of_the_data() -> None:
    dice = random.Random(0)
    whole = [file_of(tone(0.1), form) for form in ("WAV", "FLAC", "OGG", "MP3")]
    outcomes = set()
    for _ in range(600):
        data = bytearray(dice.choice(whole))
        for _ in range(dice.randrange(1, 8)):
            data[dice.randrange(min(len(data), dice.choice((40, 200, len(data)))))] = dice.randrange(256)
        try:
            heard(bytes(data))
            outcomes.add("heard")
        except DataError:
            outcomes.add("refused")
    assert outcomes == {"heard", "refused"}


def test_ids_and_features_are_those_of_transformers_own_processor() -> None:
    from transformers import AutoFeatureExtractor, Qwen2AudioProcessor

    of = seer("qwen2_audio")
    extractor = AutoFeatureExtractor.from_pretrained(of.model.config._name_or_path)
    processor = Qwen2AudioProcessor(feature_extractor=extractor, tokenizer=of.tokenizer)
    media = [of.family.named(tune(seed, seconds)) for seed, seconds in enumerate((0.03, 0.5, 1.234, 4.0))]
    sounds = [heard(item.data) for item in media]
    own = processor(text=[of.chat(media, "what?")], audio=sounds, sampling_rate=RATE, return_tensors="pt")
    assert of.in_vocabulary(of.prompt(media, "what?"), media) == own["input_ids"][0].tolist()
    for index, item in enumerate(media):
        for name, tensor in of.family.item(item).tensors.items():
            assert tensor[0].equal(own[name][index])
