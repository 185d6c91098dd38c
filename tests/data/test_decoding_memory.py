"""What decoding costs in memory, measured in a process of its own."""

import json
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pivotpatch.data.decoding import MAX_PIXELS, MAX_SIDE, decode_image
from pivotpatch.errors import InputError

pytestmark = pytest.mark.slow

SIDE = 3000
MARGIN = 64 << 20
MEASURE = """
import json, re, sys
from collections.abc import Mapping
from pathlib import Path
import numpy as np
from pivotpatch.errors import InputError
from pivotpatch.data.decoding import decode_image

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
    turned = Image.Exif()
    turned[0x0112] = 6
    png: dict[str, Any] = {"compress_level": 1}
    Image.merge("RGBA", [band] * 4).save(folder / "rgba.png", **png, exif=turned)
    Image.merge("LA", [band] * 2).save(folder / "la.png", **png)
    Image.merge("CMYK", [band] * 4).save(folder / "cmyk.tif", compression="tiff_adobe_deflate")
    Image.fromarray(grey.astype(np.uint16) * 257).save(folder / "deep.png", **png)
    Image.fromarray(grey.astype(np.int32)).save(folder / "deeper.tif", compression="tiff_adobe_deflate")
    palette = Image.fromarray(grey)
    palette.putpalette(bytes(range(256)) * 3)
    palette.save(folder / "palette.png", **png, transparency=bytes(range(256)))
    Image.new("1", (9459, 9459), 1).save(folder / "one bit.png")
    Image.new("1", (1, 20_000_000)).save(folder / "thin.png")


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


@pytest.mark.parametrize(
    ("kind", "mode", "needed"),
    [("WEBP", "RGB", 1920), ("AVIF", "RGB", 2040), ("JPEG2000", "RGB", 3360), ("JPEG", "CMYK", 1440)],
)
def test_formats_whose_decoders_hold_many_copies_may_have_fewer_pixels(
    kind: str, mode: str, needed: int, tmp_path: Path
) -> None:
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"Pillow was built without {kind}")
    path = tmp_path / "image"
    Image.new(mode, (40, 30)).save(path, kind)
    assert decode_image(path, max_pixels=needed).shape == (30, 40, 3)
    with pytest.raises(InputError, match=f"1200 pixels are more than the limit of 1199 for {kind} of this kind"):
        decode_image(path, max_pixels=needed - 1)


def test_deep_tiff_may_have_fewer_pixels() -> None:
    shape: dict[int, int | tuple[int, ...]] = {
        256: 40,
        257: 30,
        258: (16, 16, 16, 16),
        262: 2,
        273: 8,
        277: 4,
        279: 8,
        338: 2,
    }
    with pytest.raises(InputError, match="1200 pixels are more than the limit of 1199 for TIFF of this kind"):
        decode_image(make_tiff(shape), max_pixels=1439)


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


def test_a_tile_of_a_tiff_file_counts_like_an_image() -> None:
    shape = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: 65536, 323: 65536, 324: 8, 325: 8}
    with pytest.raises(InputError, match=f"65536 x 65536 = 4294967296 pixels are more than the limit of {MAX_PIXELS};"):
        decode_image(make_tiff(shape))


@pytest.mark.parametrize("shape", [(MAX_SIDE + 1, 1, 3), (1, MAX_SIDE + 1, 3)])
def test_an_array_with_too_long_a_side_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="row 3: .* pixels: a side has more than 100000; crop or shrink it"):
        decode_image(np.zeros(shape, np.uint8), size=(8, 8), name="row 3")
    with pytest.raises(InputError, match="row 3: .* pixels: a side has more than 100000; crop or shrink it"):
        decode_image(Image.new("1", (shape[1], shape[0])), name="row 3")
    longest = np.zeros(tuple(min(side, MAX_SIDE) for side in shape), np.uint8)
    assert decode_image(longest, size=(8, 8)).shape == (8, 8, 3)
