"""Images of every kind, against pixel values computed without this package, and the limits of what is decoded."""

import json
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from pivotpatch.data.loading import resize_quickly
from pivotpatch.errors import InputError
from pivotpatch.runtime import decoding
from pivotpatch.runtime.decoding import MAX_PIXELS, MAX_SIDE, decode_image, decode_with_size, read_ahead, resize_pixels

RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (3, 5, 3), dtype=np.uint8)
GREYS = RNG.integers(0, 256, (3, 5), dtype=np.uint8)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def photograph(height: int, width: int) -> NDArray[np.uint8]:
    """Smooth noise with fine grain, about as hard to shrink as a photograph."""
    rng = np.random.default_rng(1)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=float)
    return np.clip(smooth + rng.normal(0, 12, (height, width, 1)), 0, 255).astype(np.uint8)


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_orientation_is_that_of_pillows_exif_transpose(orientation: int, kind: str) -> None:
    data = encode(Image.fromarray(photograph(48, 80)), kind, exif=turned(orientation))
    expected = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    decoded = decode_with_size(data)
    assert (decoded.pixels == np.asarray(expected)).all()
    assert decoded.size == decoded.pixels.shape[:2] == expected.size[::-1]
    shrunk = decode_with_size(data, size=(20, 30))
    resized = np.asarray(expected.resize((30, 20), Image.Resampling.BILINEAR), dtype=int)
    assert np.abs(shrunk.pixels - resized).max() <= 2
    assert shrunk.size == decoded.size


def indexed(indices: NDArray[np.uint8], palette: NDArray[np.uint8]) -> Image.Image:
    image = Image.new("P", indices.shape[::-1])
    image.putdata(indices.flatten().tolist())
    image.putpalette(palette.flatten().tolist())
    return image


def over_white(colours: NDArray[np.uint8], alpha: NDArray[np.uint8]) -> NDArray[np.float64]:
    part = alpha[..., None] / 255
    return colours * part + 255 * (1 - part)


INDICES = RNG.integers(0, 4, (3, 5), dtype=np.uint8)
PALETTE = RNG.integers(0, 256, (4, 3), dtype=np.uint8)
ENTRY_ALPHA = np.array([255, 0, 100, 200], dtype=np.uint8)
ALPHA = RNG.integers(0, 256, (3, 5), dtype=np.uint8)
ALPHA[0] = (0, 255, 1, 128, 254)
GREY3 = np.repeat(GREYS[..., None], 3, axis=2)
KEY = COLOURS[1, 2]
DEEP = np.array([[0, 1, 128, 129, 256], [257, 300, 32768, 65406, 65407], [65534, 65535, 40000, 20000, 10000]])
DEEP_IMAGE = Image.fromarray(DEEP.astype(np.uint16))
INKS = RNG.integers(0, 256, (3, 5, 4), dtype=np.uint8)


@pytest.mark.parametrize(
    ("image", "kinds", "options", "expected"),
    [
        (Image.fromarray(GREYS), ["PNG", "BMP", "PPM"], {}, GREY3),
        (Image.fromarray(GREYS > 127), ["PNG", "TIFF"], {}, np.where(GREY3 > 127, 255, 0)),
        (indexed(INDICES, PALETTE), ["PNG", "GIF", "BMP"], {}, PALETTE[INDICES]),
        (indexed(INDICES, PALETTE), ["PNG", "GIF"], {"transparency": 2},
         np.where(INDICES[..., None] == 2, 255, PALETTE[INDICES])),
        (indexed(INDICES, PALETTE), ["PNG"], {"transparency": ENTRY_ALPHA.tobytes()},
         over_white(PALETTE[INDICES], ENTRY_ALPHA[INDICES])),
        (Image.fromarray(np.dstack([COLOURS, ALPHA])), ["PNG", "TIFF"], {}, over_white(COLOURS, ALPHA)),
        (Image.fromarray(np.dstack([GREYS, ALPHA])), ["PNG"], {}, over_white(GREY3, ALPHA)),
        (Image.fromarray(COLOURS), ["PNG"], {"transparency": tuple(KEY.tolist())},
         np.where((KEY == COLOURS).all(-1, keepdims=True), 255, COLOURS)),
        (Image.fromarray(GREYS), ["PNG"], {"transparency": int(GREYS[1, 2])},
         np.where(GREY3 == GREYS[1, 2], 255, GREY3)),
        (DEEP_IMAGE, ["PNG", "TIFF"], {}, np.round(DEEP / 257)[..., None]),
        (DEEP_IMAGE, ["PNG"], {"transparency": 300}, np.where(DEEP == 300, 255, np.round(DEEP / 257))[..., None]),
        (Image.frombytes("CMYK", (5, 3), INKS.tobytes()), ["TIFF"], {},
         (255.0 - INKS[..., :3]) * (255.0 - INKS[..., 3:]) / 255),
        (Image.new("CMYK", (16, 16), (100, 30, 200, 40)), ["JPEG"], {"quality": 100},  # which stores it inverted
         np.broadcast_to(np.array([155.0, 225.0, 55.0]) * 215 / 255, (16, 16, 3))),
    ],
    ids=["grey", "bits", "palette", "clear entry", "alpha per entry", "rgba", "la", "clear colour", "clear grey",
         "16 bits", "clear 16 bits", "cmyk", "cmyk in jpeg"],
)  # fmt: skip
def test_every_mode_becomes_rgb_over_white(
    image: Image.Image, kinds: list[str], options: dict[str, Any], expected: NDArray[np.float64]
) -> None:
    for kind in kinds:
        assert np.abs(decode_image(encode(image, kind, **options)) - expected).max() <= 1


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(kind: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert (decode_image(data) == (255, 0, 0)).all()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("resize", [resize_pixels, resize_quickly])
@pytest.mark.parametrize("size", [(30, 50), (64, 48), (100, 200), (7, 90)])
def test_resize_is_pillows(size: tuple[int, int], resize: Any, interpolation: str) -> None:
    pixels = photograph(64, 96)
    expected = np.asarray(Image.fromarray(pixels).resize(size[::-1], Image.Resampling[interpolation.upper()]))
    mirrored = pixels[:, ::-1][:, ::-1]
    mirrored.flags.writeable = False
    for source in (encode(Image.fromarray(pixels), "PNG"), mirrored):
        decoded = decode_image(source, size=size, resize=partial(resize, interpolation=interpolation))
        assert decoded.flags.c_contiguous
        assert np.abs(decoded.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("size", [(256, 256), (170, 170), (100, 100), (64, 400), (400, 64)])
def test_scaled_jpeg_decode_loses_nothing_visible(size: tuple[int, int]) -> None:
    data = encode(Image.fromarray(photograph(512, 512)), "JPEG", quality=95)
    with Image.open(BytesIO(data)) as image:
        expected = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR), dtype=float)
    error = np.square(decode_image(data, size=size) - expected).mean()
    assert 10 * np.log10(255**2 / (error + 1e-9)) > 40


@pytest.mark.parametrize(
    ("source", "size", "message"),
    [
        (COLOURS / 255, None, "the array is float64 of shape .*; give uint8 pixels"),
        (GREYS, None, r"the array is uint8 of shape \(3, 5\)"),
        (COLOURS[:0], None, "5 x 0 pixels: there is nothing to see"),
        (COLOURS, (0, 5), r"size is \(0, 5\); give rows and columns of 1 or more"),
        (np.broadcast_to(np.uint8(0), (20_000, 20_000, 3)), (8, 8), "20000 x 20000 = 400000000 pixels are more than"),
        (b"P5 60000 60000 255\n", None, f"60000 x 60000 = 3600000000 pixels .* {MAX_PIXELS}; shrink"),  # its header
        (np.zeros((MAX_SIDE + 1, 1, 3), np.uint8), (8, 8), "pixels: a side has more than 100000; crop or shrink it"),
        (Image.new("1", (MAX_SIDE + 1, 1)), None, "pixels: a side has more than 100000"),
    ],
)
def test_files_arrays_and_pillow_images_keep_to_the_same_limits(source: Any, size: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"row 3: .*{message}"):
        decode_image(source, size=size, name="row 3")


def make_tiff(tags: Mapping[int, int | tuple[int, ...]]) -> bytes:
    """The header of a TIFF file; several values of a tag lie behind the others."""
    entries, behind = b"", b""
    for tag, value in sorted(tags.items()):
        values = value if isinstance(value, tuple) else (value,)
        packed = struct.pack(f"<{len(values)}I", *values)
        if len(values) > 1:
            place = 8 + 2 + 12 * len(tags) + 4 + len(behind)
            behind, packed = behind + packed, struct.pack("<I", place)
        entries += struct.pack("<HHI", tag, 4, len(values)) + packed
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + behind


DEEP_TIFF: dict[int, int | tuple[int, ...]] = {
    256: 40,
    257: 30,
    258: (16, 16, 16, 16),
    262: 2,
    273: 8,
    277: 4,
    279: 8,
    338: 2,
}
TILED_TIFF = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: 65536, 323: 65536, 324: 8, 325: 8}


@pytest.mark.parametrize(
    ("kind", "mode", "needed"),
    [
        ("WEBP", "RGB", 1920),
        ("AVIF", "RGB", 2040),
        ("JPEG2000", "RGB", 3360),
        ("JPEG", "CMYK", 1440),
        ("PNG", "L", 1200),
    ],
)
def test_formats_whose_decoders_hold_many_copies_may_have_fewer_pixels(
    kind: str, mode: str, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"Pillow was built without {kind}")
    data = encode(Image.new(mode, (40, 30)), kind)
    monkeypatch.setattr(decoding, "MAX_PIXELS", needed)
    assert decode_image(data).shape == (30, 40, 3)
    monkeypatch.setattr(decoding, "MAX_PIXELS", needed - 1)
    with pytest.raises(InputError, match="1200 pixels are more than the limit of 1199"):
        decode_image(data)


def test_depth_and_tiles_of_tiff_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="65536 x 65536|a side has more"):
        decode_image(make_tiff(TILED_TIFF))
    with pytest.raises(InputError, match="1 x 200000 pixels: a side has more than 100000"):
        decode_image(make_tiff({**TILED_TIFF, 256: 1, 257: 200_000, 322: 512, 323: 512}))
    monkeypatch.setattr(decoding, "MAX_PIXELS", 1439)
    with pytest.raises(InputError, match="1200 pixels are more than the limit of 1199"):
        decode_image(make_tiff(DEEP_TIFF))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    whole = encode(Image.fromarray(photograph(64, 64)), "JPEG")
    cases = {
        "cut.jpg": (whole[: len(whole) // 2], "cannot be decoded .*truncated.*; replace"),
        "cut.png": (encode(Image.fromarray(photograph(64, 64)), "PNG")[:-3000], "cannot be decoded .*truncated"),
        "empty.jpg": (b"", "is empty; give one of JPEG, PNG"),
        "icon.ico": (encode(Image.fromarray(COLOURS).resize((16, 16)), "ICO"), "is in none of the known formats; give"),
        "deep.tif": (encode(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"), "its pixels are .*; save it with 8"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=rf"{name}: {message}"):
            decode_image(tmp_path / name)


def test_heif_is_told_from_avif_though_they_share_brands(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mif1` is what some cameras write first; the brands behind it say what is inside."""
    heif = pytest.importorskip("pillow_heif")
    stream, image = BytesIO(), Image.fromarray(photograph(64, 64))
    heif.from_pillow(image).save(stream)
    Image.init()
    others = [encode(image, "AVIF")] if "AVIF" in Image.SAVE else []  # which Pillow may be built without
    for content in (stream.getvalue(), *others):
        general = content[:8] + b"mif1" + content[12:]
        assert (decode_image(general) == decode_image(content)).all()
    for name in ("mif1", "heic"):
        monkeypatch.setitem(sys.modules, "pillow_heif", None)
        monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
        with pytest.raises(InputError, match=r"is a HEIC or HEIF image; read such images after pip install .*\[heif\]"):
            decode_image(stream.getvalue()[:8] + name.encode() + stream.getvalue()[12:])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.filterwarnings("ignore:Truncated File Read", "ignore:Corrupt EXIF")
def test_damaged_exif_does_not_spoil_the_image(kind: str) -> None:
    image = Image.fromarray(COLOURS)
    plain = decode_image(encode(image, kind))
    exif = turned(6)
    exif[0x0132] = "2020:02:02 20:20:20"  # cut off; the orientation before it can still be read
    assert (decode_image(encode(image, kind, exif=exif.tobytes()[:-12])) == np.rot90(plain, -1)).all()
    for unreadable in (b"Exif\0\0", b"Exif\0\0no header at all", b"Exif\0\0II*\0\xff\xff\xff\xff"):
        assert (decode_image(encode(image, kind, exif=unreadable)) == plain).all()


WHOLE = [
    encode(Image.fromarray(photograph(32, 32)), kind) for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
]


@settings(max_examples=200)
@given(st.sampled_from(WHOLE), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=8), st.data())
def test_damage_gives_an_image_or_our_error(whole: bytes, changes: list[tuple[int, int]], data: st.DataObject) -> None:
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for position, value in changes:
        if damaged:
            damaged[position % min(len(damaged), 200)] = value  # headers are where parsers trip
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoding, "MAX_PIXELS", 100_000)  # so that a large claim costs no time
            decoded = decode_image(bytes(damaged), size=(16, 16))
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017 (both ends are right)
    else:
        assert decoded.shape == (16, 16, 3)
        assert decoded.dtype == np.uint8


def test_what_is_read_ahead_comes_in_order_with_errors_in_their_places() -> None:
    def look(place: int) -> int:
        time.sleep(0.002 * (place % 3))
        if place % 4 == 1:
            raise InputError(str(place), "is none", "give another")
        return place

    batches = list(read_ahead(range(11), look, batch_size=3, threads=4))
    assert [len(batch) for batch in batches] == [3, 3, 3, 2]
    for place, each in enumerate(each for batch in batches for each in batch):
        assert str(each).startswith(f"{place}: is none") if place % 4 == 1 else each == place
    assert list(read_ahead([], look, batch_size=3, threads=1)) == []
    with pytest.raises(ZeroDivisionError):  # no fault of an image's
        list(read_ahead([0], lambda place: 1 // place, batch_size=1, threads=1))


def test_few_are_read_ahead_and_nothing_runs_on_when_nobody_asks() -> None:
    taken: list[int] = []
    items = (taken.append(place) or place for place in count())  # type: ignore[func-returns-value]
    reading = read_ahead(items, str, batch_size=4, threads=2)
    for asked in range(1, 4):
        assert next(reading) == [str(place) for place in range(4 * asked - 4, 4 * asked)]
        assert len(taken) <= 4 * asked + 4
    assert any(thread.name.startswith("decoder") for thread in threading.enumerate())
    reading.close()
    assert not any(thread.name.startswith("decoder") for thread in threading.enumerate())


SIDE = 3000
MARGIN = 64 << 20
MEASURE = """
import json, re, sys
from pathlib import Path
import numpy as np
from pivotpatch.errors import InputError
from pivotpatch.runtime.decoding import decode_image

def read_status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

def measure(source, size):
    Path("/proc/self/clear_refs").write_text("5")  # begin the highest mark anew
    before, error = read_status("VmRSS"), ""
    try:
        decode_image(source, size=size)
    except InputError as fault:
        error = str(fault)
    return {"peak": read_status("VmHWM") - before, "error": error}

decode_image(np.zeros((20, 20, 3), np.uint8), size=(8, 8))  # what is loaded at the first use does not count
strip = np.zeros((100_000, 2, 3), np.uint8)
found = {"strip": measure(strip, (64, 2048)), "lying strip": measure(strip.swapaxes(0, 1), (2048, 64))}
for path in sorted(Path(sys.argv[1]).iterdir()):
    found[path.name] = measure(path, (224, 224))
    if path.name in ("rgba.png", "deep.png"):
        found[path.name + " in full"] = measure(path, None)
print(json.dumps(found))
"""


def write_images(folder: Path) -> None:
    """Large images of every mode that is converted, and two that are as large as may be."""
    grey = np.broadcast_to((np.arange(SIDE) % 256).astype(np.uint8), (SIDE, SIDE)).copy()
    band = Image.fromarray(grey)
    png: dict[str, Any] = {"compress_level": 1}
    Image.merge("RGBA", [band] * 4).save(folder / "rgba.png", **png, exif=turned(6))
    Image.merge("LA", [band] * 2).save(folder / "la.png", **png)
    Image.merge("CMYK", [band] * 4).save(folder / "cmyk.tif", compression="tiff_adobe_deflate")
    Image.fromarray(grey.astype(np.uint16) * 257).save(folder / "deep.png", **png)
    Image.fromarray(grey.astype(np.int32)).save(folder / "deeper.tif", compression="tiff_adobe_deflate")
    palette = Image.fromarray(grey)
    palette.putpalette(bytes(range(256)) * 3)
    palette.save(folder / "palette.png", **png, transparency=bytes(range(256)))
    Image.new("1", (9459, 9459), 1).save(folder / "one bit.png")
    Image.new("1", (1, 20_000_000)).save(folder / "thin.png")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the highest use of memory")
def test_no_image_needs_more_than_ten_bytes_a_pixel(tmp_path: Path) -> None:
    write_images(tmp_path)
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(ran.stdout)
    thin = found.pop("thin.png")
    assert thin["error"].endswith(f"thin.png: 1 x 20000000 pixels: a side has more than {MAX_SIDE}; crop or shrink it")
    assert thin["peak"] < MARGIN
    assert len(found) == 11
    assert [name for name, measured in found.items() if measured["error"]] == []
    allowed = {name: 9459**2 * 4 if "one bit" in name else 10 * SIDE**2 for name in found}
    allowed |= {"strip": 0, "lying strip": 0}
    assert {name: each["peak"] for name, each in found.items() if each["peak"] > allowed[name] + MARGIN} == {}
    shrunk = found["rgba.png"]["peak"]
    assert shrunk < 5 * SIDE**2 + MARGIN  # the decoded image, and next to nothing beside it
