"""Decoding: files of unknown origin are a right result or an error of the data, never anything else."""

from __future__ import annotations

import base64
import io
import random
import struct
import subprocess
import sys
import zlib

import numpy
import pytest
from nemorl.errors import DataError
from nemorl.media import Media
from nemorl_media.decoding import MAX_BYTES, MAX_RATIO, data_url, media_of_base64, media_of_image, media_of_url, pixels
from nemorl_testing.seeing import tune
from PIL import Image
from recorded_messages import Raises


def file_of(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)  # type: ignore[arg-type]
    return file.getvalue()


def shown(data: bytes) -> Image.Image:
    return pixels(Media("image", data))


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def picture(width: int = 50, height: int = 40) -> Image.Image:
    noise = numpy.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(noise)


def is_red(image: Image.Image) -> bool:
    """But for what compression loses."""
    return bool(numpy.abs(numpy.asarray(image)[3, 4].astype(int) - (255, 0, 0)).max() < 15)


def upright(image: Image.Image) -> Image.Image:
    turned = image.transpose(Image.Transpose.ROTATE_270) if image.getexif().get(0x112) == 6 else image
    return turned.convert("RGB")


def test_a_png_cut_anywhere_is_refused() -> None:
    data = file_of(picture())
    for length in (0, 1, 8, 20, 33, len(data) // 2, len(data) - 100):
        with pytest.raises(DataError):
            shown(data[:length])


def test_a_header_of_more_pixels_than_allowed_is_refused_before_they_are_made(raises: Raises) -> None:
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)  # 10.8 GB of RGB in 100 bytes
    bomb = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )
    with pytest.raises(DataError):
        shown(bomb)
    just_over = struct.pack(">IIBBBBB", 8_001, 8_000, 8, 2, 0, 0, 0)
    with raises(DataError):
        shown(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", just_over) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))


def test_text_of_a_png_that_unpacks_to_megabytes_is_refused() -> None:
    whole = file_of(picture())
    packed = b"Comment\0\0" + zlib.compress(b"\0" * 50_000_000)
    with pytest.raises(DataError):
        shown(whole[:33] + chunk(b"zTXt", packed) + whole[33:])


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost/picture.png",
        "https://localhost/picture.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "ftp://localhost/picture.png",
        "data:image/png,plain",
        "data:text/html;base64,aGk=",
        "data:image/png;base64,not base64!",
        "data:image/png;base64,aGk",
        "data:image/png;base64,äöü=",
        "",
    ],
)
def test_other_urls_than_of_encoded_items_are_refused(url: str) -> None:
    with pytest.raises(DataError):
        media_of_url(url)
    with pytest.raises(DataError):
        media_of_image(url)


def test_a_data_url_is_the_file_in_it() -> None:
    data = file_of(picture())
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    assert media_of_url(url) == media_of_image(data) == media_of_image({"bytes": data, "path": None})
    too_long = "data:image/png;base64," + "A" * (MAX_BYTES * 4 // 3 + 8)
    for large in (lambda: media_of_url(too_long), lambda: media_of_image(b"\0" * (MAX_BYTES + 1))):
        with pytest.raises(DataError, match="MiB"):
            large()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_data_url_tells_the_type_of_the_file(form: str) -> None:
    item = media_of_image(file_of(picture(), form))
    url = data_url(item)
    assert url.startswith(f"data:image/{form.lower()};base64,")
    assert media_of_url(url) == item


def test_a_sound_as_a_data_url_is_a_sound() -> None:
    assert data_url(tune(1)).startswith("data:audio/wav;base64,UklGR")
    assert media_of_url(data_url(tune(1))) == tune(1)
    assert media_of_url(data_url(Media("audio", b"ID3"))) == Media("audio", b"ID3")


@pytest.mark.parametrize("media_type", ["", "text/plain", "imagepng", "video/mp4", "/image"])
def test_data_of_other_types_is_refused(media_type: str) -> None:
    with pytest.raises(DataError):
        media_of_base64("aGk=", media_type)
    assert media_of_base64("aGk=", "Image/PNG") == Media("image", b"hi")


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_its_first_frame(form: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue", "green")]
    data = file_of(frames[0], form, save_all=True, append_images=frames[1:])
    assert shown(data).size == (8, 6)
    assert is_red(shown(data))


def test_modes_are_shown_as_a_viewer_shows_them(raises: Raises) -> None:
    white, grey = (255, 255, 255), (128, 128, 128)
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))  # no cyan, all magenta and yellow: red
    assert is_red(shown(file_of(cmyk, "JPEG")))
    deep = Image.fromarray(numpy.array([[0, 0x5555], [0xAAAA, 0xFFFF]], dtype=numpy.uint16))
    assert numpy.asarray(shown(file_of(deep)))[..., 0].tolist() == [[0, 0x55], [0xAA, 0xFF]]
    hidden = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert shown(file_of(hidden)).getpixel((0, 0)) == white
    half = Image.new("LA", (2, 2), (0, 127))  # black at 127 / 255: 255 * 128 / 255
    assert shown(file_of(half)).getpixel((0, 0)) == grey
    turned = Image.Exif()
    turned[0x112] = 6  # shown turned by 90 degrees
    assert shown(file_of(picture(), "JPEG", exif=turned)).size == (40, 50)
    with raises(DataError):
        shown(file_of(Image.new("F", (2, 2), 0.5), "TIFF"))


def test_an_image_in_memory_is_what_its_file_is() -> None:
    turned = Image.Exif()
    turned[0x112] = 6
    for image in (
        picture(),
        picture().convert("CMYK"),
        picture().convert("YCbCr"),
        Image.open(io.BytesIO(file_of(picture(), "JPEG", exif=turned))),
    ):
        item = media_of_image(image)
        assert numpy.array_equal(numpy.asarray(pixels(item)), numpy.asarray(upright(image)))
    damaged = Image.open(io.BytesIO(file_of(picture())[:500]))
    for bad in (damaged, Image.new("RGB", (0, 5)), None, 5, ["a"], {"bytes": None, "path": "/etc/passwd"}):
        with pytest.raises(DataError):
            media_of_image(bad)


def test_tiny_and_long_images_are_shown_or_refused() -> None:
    for width, height in ((1, 1), (3, 1), (MAX_RATIO, 1), (2, 2 * MAX_RATIO)):
        assert shown(file_of(Image.new("RGB", (width, height)))).size == (width, height)
    for width, height in ((MAX_RATIO + 1, 1), (1, 3_000), (20_000, 2)):
        with pytest.raises(DataError, match=f"{width} x {height}"):
            shown(file_of(Image.new("RGB", (width, height))))


def test_damaged_files_raise_nothing_but_errors_of_the_data() -> None:
    dice = random.Random(0)
    whole = [
        file_of(picture().convert(mode), form)
        for form, mode in (
            ("PNG", "RGB"),
            ("PNG", "P"),
            ("JPEG", "RGB"),
            ("JPEG", "CMYK"),
            ("WEBP", "RGB"),
            ("GIF", "P"),
        )
    ]
    outcomes = set()
    for _ in range(1200):
        data = bytearray(dice.choice(whole))
        for _ in range(dice.randrange(1, 8)):
            data[dice.randrange(min(len(data), dice.choice((60, 200, len(data)))))] = dice.randrange(256)
        try:
            shown(bytes(data))
            outcomes.add("shown")
        except DataError:
            outcomes.add("refused")
    assert outcomes == {"shown", "refused"}


def test_decoding_imports_no_torch() -> None:
    code = "import sys, nemorl_media.decoding, nemorl_media.audio; assert not {'torch', 'PIL'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
