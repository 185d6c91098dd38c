"""From a file, its bytes, a Pillow picture or an array to RGB pixels, the right way up."""

import math
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, TILELENGTH, TILEWIDTH, TiffImageFile
from torch.nn import functional as F

from pivotpatch.errors import InputError, quote_fault

if TYPE_CHECKING:
    from pivotpatch.data.records import ImageSource

MAX_PIXELS = 89_478_485
"""Pixels that an image may have unless a caller allows more; the figure at which Pillow starts to warn."""
MAX_SIDE = 100_000
"""Rows or columns that an image may have: the filter that shrinks a side needs memory in proportion to it."""

# Pillow knows more: some run other programs on what the file says, some have no signature to tell them by, and ICO
# decodes what it holds before it tells the size.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")

# Scaled JPEG decoding keeps at least this multiple of the wanted size. On photographs the result then differs from
# a full decode by 43 dB or more; at 1.0, where the final filter has nothing left to do, by only 34 dB.
_DRAFT_MARGIN = 1.5

# Bytes for each pixel while an image is decoded: at most 10, of progressive JPEG. What needs more may have fewer
# pixels, so that no image takes more than 10 * MAX_PIXELS bytes.
_BYTES = 10
_FORMAT_BYTES = {"WEBP": 16, "AVIF": 17, "JPEG2000": 28}
_BAND = 1 << 20  # pixels that are converted at once

# Pixels (H,W,3) as a viewer shows them, by EXIF orientation; views of the same memory.
_TURNS: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored.swapaxes(0, 1)[::-1, ::-1],
    8: lambda stored: np.rot90(stored, 1),
}
_UNDO = {6: 8, 8: 6}  # every other turn undoes itself
_SWAPS = (5, 6, 7, 8)  # those that make columns of rows


class Decoded(NamedTuple):
    """Pixels (H,W,3), and the picture's own rows and columns, which may be more."""

    pixels: NDArray[np.uint8]
    size: tuple[int, int]


def decode_image(
    source: "ImageSource | Image.Image",
    *,
    size: tuple[int, int] | None = None,
    max_pixels: int = MAX_PIXELS,
    name: str = "picture",
) -> NDArray[np.uint8]:
    """Decode a picture to RGB.

    The EXIF orientation is applied where it can be read. Greyscale is repeated in three channels, 16-bit greyscale is
    divided by 257, CMYK is converted without its profile, transparent pixels are laid over white. Of an animation the
    first frame counts.

    Args:
        source: a file, its encoded bytes, a Pillow image, or pixels (H,W,3).
        size: rows and columns, 1 or more, to squash the picture to, bilinear and anti-aliased; its own by default.
            JPEG files that are much larger are decoded at a fraction of their size.
        max_pixels: an image that claims more is refused before it is decoded; those whose decoders hold many copies
            (WebP, AVIF, JPEG 2000, CMYK in JPEG, deep TIFF) above 3/10 to 8/10 of it. So is one with a side of more
            than `MAX_SIDE`, whatever it is given as.
        name: what messages call a picture that is not a file.

    Returns:
        Pixels (H,W,3).
    """
    return decode_with_size(source, size=size, max_pixels=max_pixels, name=name).pixels


def decode_with_size(
    source: "ImageSource | Image.Image",
    *,
    size: tuple[int, int] | None = None,
    max_pixels: int = MAX_PIXELS,
    name: str = "picture",
) -> Decoded:
    """Decode as `decode_image` does, and say how large the image is itself when turned."""
    if size is not None and min(size) < 1:
        raise InputError(name, f"size is {size}", "give rows and columns of 1 or more")
    if isinstance(source, np.ndarray):
        decoded = Decoded(_check_pixels(source, name, max_pixels), (source.shape[0], source.shape[1]))
    elif isinstance(source, Path):
        with _open_file(source) as stream:
            decoded = _decode(stream, size=size, max_pixels=max_pixels, where=str(source))
    else:
        stream_or_picture = source if isinstance(source, Image.Image) else BytesIO(source)
        decoded = _decode(stream_or_picture, size=size, max_pixels=max_pixels, where=name)
    return decoded if size is None else decoded._replace(pixels=_resize(decoded.pixels, size))


def _open_file(path: Path) -> IO[bytes]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for whoever writes to it
            raise InputError(str(path), "cannot be read (it is no regular file)", "check the path")
        return path.open("rb")
    except InputError:
        raise
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "check the path") from None
    except ValueError as error:  # a name that no file can have, such as one with a NUL
        raise InputError(repr(str(path)), f"cannot be read ({error})", "check the path") from None


def _check_pixels(pixels: NDArray[np.uint8], where: str, max_pixels: int) -> NDArray[np.uint8]:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
        raise InputError(where, f"the array is {pixels.dtype} of shape {pixels.shape}", "give uint8 pixels (H, W, 3)")
    _check_sides(pixels.shape[1], pixels.shape[0], where)
    _check_count(pixels.shape[1], pixels.shape[0], max_pixels, where)
    return pixels


def _check_sides(width: int, height: int, where: str) -> None:
    if min(width, height) < 1:
        raise InputError(where, f"{width} x {height} pixels: there is nothing to see", "give another image")
    if max(width, height) > MAX_SIDE:
        raise InputError(where, f"{width} x {height} pixels: a side has more than {MAX_SIDE}", "crop or shrink it")


def _resize(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Pixels (H,W,3) of another size, by way of no array that is larger than both."""
    if pixels.shape[:2] == size:
        return pixels
    if pixels.shape[0] > size[0] and pixels.shape[1] < size[1]:
        pixels = _resize(pixels, (size[0], pixels.shape[1]))  # torch would widen all the rows first
    # Pillow's algorithm, vectorised: equal but for a rounding in some of 100,000 pixels, and 3 times as fast. The
    # order of these dimensions keeps it on the path that needs no transposition.
    images = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))[None].permute(0, 3, 1, 2)
    resized = F.interpolate(images, size=size, mode="bilinear", align_corners=False, antialias=True)
    return cast("NDArray[np.uint8]", resized[0].permute(1, 2, 0).numpy())


def _decode(source: IO[bytes] | Image.Image, *, size: tuple[int, int] | None, max_pixels: int, where: str) -> Decoded:
    with _explain_faults(where):
        picture = source if isinstance(source, Image.Image) else _open(source, where)
        _check_size(picture, max_pixels, where)
        own = picture.height, picture.width
        if size is not None and picture is not source:  # a caller's picture is not to be decoded smaller for good
            wanted = round(_DRAFT_MARGIN * max(size))  # a square, because orientation may swap the sides
            picture.draft(None, (wanted, wanted))
        picture.load()
        _check_values(picture, where)
        orientation = _find_orientation(picture)
        return Decoded(_render(picture, orientation, size), own[::-1] if orientation in _SWAPS else own)


def check_header(stream: IO[bytes], *, max_pixels: int = MAX_PIXELS, name: str = "image") -> int:
    """Refuse what is no image or too large, without decoding it; how many pixels it claims to have."""
    with _explain_faults(name):
        picture = _open(stream, name)
        _check_size(picture, max_pixels, name)
        return picture.width * picture.height


@contextmanager
def _explain_faults(where: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # plugins raise whatever their parsers trip over: SyntaxError, struct.error, ...
        wrong = f"cannot be decoded ({quote_fault(error)})"
        raise InputError(where, wrong, "replace the picture or leave it out") from error


def _open(stream: IO[bytes], where: str) -> ImageFile.ImageFile:
    """Read the header. Pillow's own `open` also warns and refuses by a limit that is one for the whole process."""
    Image.init()
    prefix = stream.read(16)
    for name in FORMATS:
        if name in Image.OPEN:  # what Pillow was built with differs
            factory, accept = Image.OPEN[name]
            if cast("Callable[[bytes], bool | str]", accept)(prefix) is True:
                stream.seek(0)
                return factory(stream, "")
    wrong = "is in none of the known formats" if prefix else "is empty"
    raise InputError(where, wrong, f"give one of {', '.join(FORMATS)}")


def _check_size(picture: Image.Image, max_pixels: int, where: str) -> None:
    _check_sides(picture.width, picture.height, where)
    width, height = max(picture.size, _get_tile_size(picture), key=math.prod)
    limit = min(max_pixels, max_pixels * _BYTES // _count_bytes(picture))
    _check_count(width, height, limit, where, kind=f" for {picture.format} of this kind" if limit < max_pixels else "")


def _check_count(width: int, height: int, limit: int, where: str, *, kind: str = "") -> None:
    if width * height > limit:
        wrong = f"{width} x {height} = {width * height} pixels are more than the limit of {limit}{kind}"
        raise InputError(where, wrong, "shrink the picture")


def _get_tile_size(picture: Image.Image) -> tuple[int, int]:
    """Columns and rows of a tile of a TIFF file, which is unpacked whole however small the image is."""
    if not isinstance(picture, TiffImageFile):
        return 0, 0
    return picture.tag_v2.get(TILEWIDTH, 0), picture.tag_v2.get(TILELENGTH, 0)


def _count_bytes(picture: Image.Image) -> int:
    """Bytes that decoding takes for each pixel, all copies of it that the format's decoder holds at the same time."""
    if isinstance(picture, TiffImageFile):  # one strip or tile may be the whole image
        return 4 + sum(picture.tag_v2.get(BITSPERSAMPLE, (1,))) // 8
    if picture.format == "JPEG" and picture.mode == "CMYK":
        return 12
    return _FORMAT_BYTES.get(picture.format or "", _BYTES)


def _find_orientation(picture: Image.Image) -> int:
    """The EXIF orientation; Pillow's own `exif_transpose` fails on damaged EXIF data."""
    try:
        orientation = picture.getexif().get(ExifTags.Base.Orientation, 1)
        return orientation if orientation in _TURNS else 1
    except Exception:  # the parser trips over damage in many ways, none of which touches the pixels
        return 1


def _render(picture: Image.Image, orientation: int, size: tuple[int, int] | None) -> NDArray[np.uint8]:
    """The pixels (H,W,3), upright and of a size. Of what lies between, nothing is as large as the image.

    Bands of rows are converted and, where a size is given, brought to its width; then all rows to its height.
    """
    own = picture.height, picture.width
    pixels = np.empty((*(size or (own[::-1] if orientation in _SWAPS else own)), 3), dtype=np.uint8)
    stored = _TURNS[_UNDO.get(orientation, orientation)](pixels)  # the same memory, as the image lies in its file
    narrow = stored
    if size is not None:
        narrow = np.empty((picture.height, min(picture.width, stored.shape[1]), 3), dtype=np.uint8)
    step = max(_BAND // picture.width, 1)
    for top in range(0, picture.height, step):
        rows = narrow[top : top + step]
        band = picture if len(rows) == picture.height else picture.crop((0, top, picture.width, top + len(rows)))
        _fill(rows, _resize(_convert(band), rows.shape[:2]))
    if narrow is not stored:
        _fill(stored, _resize(narrow, stored.shape[:2]))
    return pixels


def _fill(place: NDArray[np.uint8], pixels: NDArray[np.uint8]) -> None:
    """Copy pixels (H,W,3) to where they belong, which may lie there in columns."""
    if abs(place.strides[0]) > abs(place.strides[1]):
        place[:] = pixels
        return
    for channel in range(3):  # NumPy is 3 times as fast when each runs over pixels, not over channels
        place[..., channel] = pixels[..., channel]


def _check_values(picture: Image.Image, where: str) -> None:
    """Refuse pixels that do not tell what is white."""
    if picture.mode == "F":
        raise InputError(where, "its pixels are floating point, which have no set white", "save it with 8 or 16 bits")
    if picture.mode == "I":
        low, high = cast("tuple[int, int]", picture.getextrema())
        if low < 0 or high > 65535:
            wrong = f"its grey values run from {low} to {high}"
            raise InputError(where, wrong, "save it with 8 or 16 bits, white at 65535")


def _convert(picture: Image.Image) -> NDArray[np.uint8]:
    if picture.mode.startswith("I"):
        grey = np.asarray(picture).astype(np.int32)
        if "transparency" in picture.info:
            grey[grey == picture.info["transparency"]] = 65535
        return np.repeat(((grey + 128) // 257).astype(np.uint8)[..., None], 3, axis=2)
    if picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    return np.asarray(picture if picture.mode == "RGB" else picture.convert("RGB"))
