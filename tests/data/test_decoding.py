"""Pictures of every kind, against pixel values computed here without Pillow's conversions."""

import os
import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from pivotpatch.data.decoding import MAX_PIXELS, decode_image, decode_with_size
from pivotpatch.errors import InputError

RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (3, 5, 3), dtype=np.uint8)
FINEST = {"quality": 100, "subsampling": 0}
GREYS = RNG.integers(0, 256, (3, 5), dtype=np.uint8)


def encode(picture: Image.Image, kind: str, **options: object) -> bytes:
    stream = BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def photograph(height: int, width: int) -> NDArray[np.uint8]:
    """Smooth noise with fine grain, about as hard to shrink as a photograph."""
    rng = np.random.default_rng(1)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=float)
    return np.clip(smooth + rng.normal(0, 12, (height, width, 1)), 0, 255).astype(np.uint8)


def png_claiming(width: int, height: int) -> bytes:
    """A grey PNG whose header states a size and which holds no pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    data = b"IDAT" + zlib.compress(b"")
    return start + struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))


# How a viewer turns the stored rows and columns, by the EXIF standard.
TURNS = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored.swapaxes(0, 1)[::-1, ::-1],
    8: lambda stored: np.rot90(stored, 1),
}


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize(("kind", "tolerance"), [("PNG", 0), ("JPEG", 3)])
def test_exif_orientation_is_applied(orientation: int, kind: str, tolerance: int) -> None:
    stored = np.repeat(np.repeat(COLOURS // 2 + 64, 16, axis=0), 16, axis=1)  # whole JPEG blocks of one colour
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(Image.fromarray(stored), kind, exif=exif, **(FINEST if kind == "JPEG" else {}))
    shown = TURNS[orientation](stored)
    decoded = decode_image(data)
    assert decoded.shape == shown.shape
    assert np.abs(decoded.astype(int) - shown).max() <= tolerance


def test_scaled_decode_respects_the_turned_sides() -> None:
    stored = photograph(1600, 800)
    exif = Image.Exif()
    exif[0x0112] = 6
    decoded = decode_image(encode(Image.fromarray(stored), "JPEG", quality=95, exif=exif), size=(100, 300))
    expected = np.asarray(Image.fromarray(np.rot90(stored, -1).copy()).resize((300, 100), Image.Resampling.BILINEAR))
    assert decoded.shape == (100, 300, 3)
    assert np.abs(decoded.astype(int) - expected).mean() < 2


@pytest.mark.parametrize("orientation", TURNS)
def test_the_pictures_own_size_is_that_of_the_turned_one(orientation: int) -> None:
    stored = photograph(800, 1600)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(Image.fromarray(stored), "JPEG", exif=exif)
    decoded = decode_with_size(data, size=(20, 30))
    assert decoded.pixels.shape == (20, 30, 3)
    assert decoded.size == TURNS[orientation](stored).shape[:2]


def test_a_picture_that_pillow_holds_is_read_like_its_file_and_left_as_it_is() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(Image.fromarray(photograph(800, 1600)), "JPEG", exif=exif)
    held = Image.open(BytesIO(data))
    decoded = decode_with_size(held, size=(64, 32))
    assert decoded.size == (1600, 800)
    assert np.abs(decoded.pixels.astype(int) - decode_image(data, size=(64, 32))).mean() < 2
    assert held.size == (1600, 800)
    with pytest.raises(InputError, match="upload: cannot be decoded"):
        decode_with_size(Image.open(BytesIO(data[:2000])), name="upload")
    with pytest.raises(InputError, match="upload: 5 x 3 = 15 pixels are more than the limit of 14"):
        decode_with_size(Image.fromarray(COLOURS), max_pixels=14, name="upload")


def test_greyscale_is_repeated() -> None:
    assert (decode_image(encode(Image.fromarray(GREYS), "PNG")) == GREYS[..., None]).all()


def test_one_bit() -> None:
    bits = GREYS > 127
    decoded = decode_image(encode(Image.fromarray(bits), "PNG"))
    assert (decoded == np.where(bits, 255, 0)[..., None]).all()


def indexed(indices: NDArray[np.uint8], palette: NDArray[np.uint8]) -> Image.Image:
    picture = Image.new("P", indices.shape[::-1])
    picture.putdata(indices.flatten().tolist())
    picture.putpalette(palette.flatten().tolist())
    return picture


INDICES = RNG.integers(0, 4, (3, 5), dtype=np.uint8)
PALETTE = RNG.integers(0, 256, (4, 3), dtype=np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP"])
def test_palette(kind: str) -> None:
    assert (decode_image(encode(indexed(INDICES, PALETTE), kind)) == PALETTE[INDICES]).all()


def over_white(colours: NDArray[np.uint8], alpha: NDArray[np.uint8]) -> NDArray[np.float64]:
    part = alpha[..., None] / 255
    return colours * part + 255 * (1 - part)


def test_palette_with_one_transparent_entry_lies_over_white() -> None:
    for kind in ("PNG", "GIF"):
        decoded = decode_image(encode(indexed(INDICES, PALETTE), kind, transparency=2))
        assert (decoded == np.where(INDICES[..., None] == 2, 255, PALETTE[INDICES])).all()


def test_palette_with_an_alpha_for_each_entry_lies_over_white() -> None:
    alpha = np.array([255, 0, 100, 200], dtype=np.uint8)
    decoded = decode_image(encode(indexed(INDICES, PALETTE), "PNG", transparency=alpha.tobytes()))
    assert np.abs(decoded - over_white(PALETTE[INDICES], alpha[INDICES])).max() <= 1


def test_alpha_lies_over_white() -> None:
    alpha = RNG.integers(0, 256, (3, 5), dtype=np.uint8)
    alpha[0] = (0, 255, 1, 128, 254)
    for kind in ("PNG", "TIFF"):
        decoded = decode_image(encode(Image.fromarray(np.dstack([COLOURS, alpha])), kind))
        assert np.abs(decoded - over_white(COLOURS, alpha)).max() <= 1
    decoded = decode_image(encode(Image.fromarray(np.dstack([GREYS, alpha])), "PNG"))
    assert np.abs(decoded - over_white(np.repeat(GREYS[..., None], 3, axis=2), alpha)).max() <= 1


def test_a_transparent_colour_becomes_white() -> None:
    key = COLOURS[1, 2]
    decoded = decode_image(encode(Image.fromarray(COLOURS), "PNG", transparency=tuple(key.tolist())))
    assert (decoded == np.where((key == COLOURS).all(-1, keepdims=True), 255, COLOURS)).all()
    grey = int(GREYS[1, 2])
    decoded = decode_image(encode(Image.fromarray(GREYS), "PNG", transparency=grey))
    assert (decoded == np.where(grey == GREYS, 255, GREYS)[..., None]).all()


@pytest.mark.parametrize(("kind", "tolerance"), [("TIFF", 1), ("JPEG", 4)])
def test_cmyk(kind: str, tolerance: int) -> None:
    inks = np.array(
        [[0, 0, 0, 0], [0, 255, 255, 0], [255, 0, 0, 0], [0, 0, 0, 255], [100, 30, 200, 40]], dtype=np.uint8
    )
    stored = np.repeat(np.repeat(inks[None], 16, axis=0), 16, axis=1)
    data = encode(
        Image.frombytes("CMYK", (80, 16), stored.tobytes()), kind, **({"quality": 100} if kind == "JPEG" else {})
    )
    assert (b"Adobe" in data[:200]) == (kind == "JPEG")  # the marker under which JPEG holds inverted inks
    lit = 255.0 - stored
    expected = lit[..., :3] * lit[..., 3:] / 255
    assert np.abs(decode_image(data) - expected).max() <= tolerance


DEEP = np.array([[0, 1, 128, 129, 256], [257, 300, 32768, 65406, 65407], [65534, 65535, 40000, 20000, 10000]])


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(kind: str) -> None:
    decoded = decode_image(encode(Image.fromarray(DEEP.astype(np.uint16)), kind))
    assert (decoded == np.round(DEEP / 257)[..., None]).all()


def test_sixteen_bits_with_a_transparent_grey() -> None:
    decoded = decode_image(encode(Image.fromarray(DEEP.astype(np.uint16)), "PNG", transparency=300))
    assert (decoded == np.where(DEEP == 300, 255, np.round(DEEP / 257))[..., None]).all()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(kind: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert (decode_image(data) == (255, 0, 0)).all()


def test_pictures_without_a_set_white_are_refused() -> None:
    with pytest.raises(InputError, match=r"float\.tif: its pixels are floating point.*8 or 16 bits"):
        decode_image(encode(Image.fromarray(np.ones((2, 2), dtype=np.float32)), "TIFF"), name="float.tif")
    with pytest.raises(InputError, match=r"deep\.tif: its grey values run from 3 to 70000; save it"):
        decode_image(encode(Image.fromarray(np.array([[3, 70000]], dtype=np.int32)), "TIFF"), name="deep.tif")


@pytest.mark.parametrize("size", [(30, 50), (64, 48), (100, 200), (7, 90)])
def test_resize_is_pillows(size: tuple[int, int]) -> None:
    pixels = photograph(64, 96)
    expected = Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BILINEAR)
    decoded = decode_image(encode(Image.fromarray(pixels), "PNG"), size=size)
    assert decoded.shape == (*size, 3)
    assert decoded.flags.c_contiguous
    assert np.abs(decoded.astype(int) - np.asarray(expected)).max() <= 1


@pytest.mark.parametrize("size", [(256, 256), (170, 170), (128, 128), (100, 100), (60, 60), (64, 400), (400, 64)])
def test_scaled_jpeg_decode_loses_nothing_visible(size: tuple[int, int]) -> None:
    data = encode(Image.fromarray(photograph(512, 512)), "JPEG", quality=95)
    with Image.open(BytesIO(data)) as picture:
        expected = np.asarray(picture.resize(size[::-1], Image.Resampling.BILINEAR), dtype=float)
    error = np.square(decode_image(data, size=size) - expected).mean()
    assert 10 * np.log10(255**2 / (error + 1e-9)) > 40


def test_arrays_pass_through_and_are_resized() -> None:
    assert (decode_image(COLOURS) == COLOURS).all()
    pixels = photograph(64, 96)[:, ::-1]
    pixels.flags.writeable = False
    expected = Image.fromarray(pixels.copy()).resize((40, 30), Image.Resampling.BILINEAR)
    assert np.abs(decode_image(pixels, size=(30, 40)).astype(int) - np.asarray(expected)).max() <= 1


@pytest.mark.parametrize("array", [COLOURS / 255, GREYS, COLOURS[:0], np.dstack([COLOURS, GREYS])])
def test_arrays_of_another_kind_are_refused(array: NDArray[np.uint8]) -> None:
    with pytest.raises(InputError, match=r"scene 3: the array is (uint8|float64) of shape .*; give uint8 pixels"):
        decode_image(array, name="scene 3")


def test_pixel_limit_is_checked_in_the_header(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(png_claiming(60_000, 60_000))
    with pytest.raises(InputError, match=rf"bomb\.png: 60000 x 60000 = 3600000000 pixels .* {MAX_PIXELS}; shrink"):
        decode_image(bomb)
    with pytest.raises(InputError, match="15 pixels are more than the limit of 14"):
        decode_image(encode(Image.fromarray(COLOURS), "PNG"), max_pixels=14)
    assert decode_image(encode(Image.fromarray(COLOURS), "PNG"), max_pixels=15).shape == (3, 5, 3)


def test_the_limit_is_the_callers_not_pillows() -> None:
    before = Image.MAX_IMAGE_PIXELS
    for width in (10_000, 20_000):  # at 9,000 rows Pillow would warn of the first and refuse the second
        with pytest.raises(InputError, match=r"cannot be decoded \(image file is truncated"):
            decode_image(png_claiming(width, 9_000), max_pixels=10**9)
        with pytest.raises(InputError, match="more than the limit of 89999999"):
            decode_image(png_claiming(width, 9_000), max_pixels=89_999_999)
    assert before == Image.MAX_IMAGE_PIXELS


def test_damaged_files_are_named(tmp_path: Path) -> None:
    whole = encode(Image.fromarray(photograph(64, 64)), "JPEG")
    cases = {
        "cut.jpg": (whole[: len(whole) // 2], "cannot be decoded .*truncated.*; replace the picture or leave it out"),
        "cut.png": (encode(Image.fromarray(photograph(64, 64)), "PNG")[:-3000], "cannot be decoded .*truncated"),
        "stub.jpg": (whole[:12], "cannot be decoded"),
        "empty.jpg": (b"", "is empty; give one of JPEG, PNG"),
        "page.jpg": (b"<html>not found</html>", "is in none of the known formats; give one of JPEG"),
        "icon.ico": (encode(Image.fromarray(COLOURS).resize((16, 16)), "ICO"), "is in none of the known formats"),
        "script.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is in none of the known formats"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=rf"{name}: {message}"):
            decode_image(tmp_path / name)
        with pytest.raises(InputError, match=f"row 7: {message}"):
            decode_image(content, name="row 7")


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.jpg: cannot be read \(No such file or directory\); check the path"):
        decode_image(tmp_path / "gone.jpg")
    with pytest.raises(InputError, match=r"cannot be read \(it is no regular file\); check the path"):
        decode_image(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jpg")
    with pytest.raises(InputError, match=r"x\.jpg: cannot be read \(it is no regular file\)"):
        decode_image(tmp_path / "x.jpg")


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_a_size_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=r"scene 3: size is \(.*\); give rows and columns of 1 or more"):
        decode_image(COLOURS, size=size, name="scene 3")


def exif_cut_short() -> bytes:
    """EXIF data that end within the last tag, after an orientation that can still be read."""
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x0132] = "2020:02:02 20:20:20"
    return exif.tobytes()[:-12]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.filterwarnings("ignore:Truncated File Read", "ignore:Corrupt EXIF")
def test_damaged_exif_does_not_spoil_the_picture(kind: str) -> None:
    picture = Image.fromarray(COLOURS)
    decoded = decode_image(encode(picture, kind, exif=exif_cut_short()))
    assert (decoded == TURNS[6](decode_image(encode(picture, kind)))).all()


@pytest.mark.filterwarnings("ignore:Truncated File Read", "ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0no header at all", b"Exif\0\0II*\0\xff\xff\xff\xff"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_that_cannot_be_parsed_turns_nothing(kind: str, exif: bytes) -> None:
    picture = Image.fromarray(COLOURS)
    plain, damaged = encode(picture, kind), encode(picture, kind, exif=exif)
    assert (decode_image(damaged) == decode_image(plain)).all()


WHOLE = [
    encode(Image.fromarray(photograph(32, 32)), kind) for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(WHOLE), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=8), st.data())
def test_damage_gives_a_picture_or_our_error(whole: bytes, changes: list[tuple[int, int]], data: st.DataObject) -> None:
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for position, value in changes:
        if damaged:
            damaged[position % min(len(damaged), 200)] = value  # headers are where parsers trip
    message, decoded = "", None
    try:
        decoded = decode_image(bytes(damaged), size=(16, 16), max_pixels=100_000)
    except InputError as error:
        message = str(error)
    if decoded is None:
        assert message.startswith("picture: ")
        assert "\n" not in message
    else:
        assert decoded.shape == (16, 16, 3)
        assert decoded.dtype == np.uint8


def test_a_name_that_no_file_can_have_is_an_error_of_its_own() -> None:
    with pytest.raises(InputError, match=r"'a\\x00b': cannot be read \(embedded null byte\); check the path"):
        decode_image(Path("a\0b"))


def test_arrays_and_pillow_images_keep_to_the_limits_of_files() -> None:
    huge = np.broadcast_to(np.uint8(0), (20_000, 20_000, 3))
    with pytest.raises(InputError, match="20000 x 20000 = 400000000 pixels are more than the limit"):
        decode_image(huge, size=(8, 8))
    with pytest.raises(InputError, match="0 x 5 pixels: there is nothing to see"):
        decode_image(Image.new("RGB", (0, 5)), size=(8, 8))
