"""From a file, its bytes, a Pillow picture or an array to RGB pixels, the right way up."""

import stat
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile
from torch.nn import functional as F

from pivotpatch.core.errors import InputError

if TYPE_CHECKING:
    from pivotpatch.data.records import ImageSource

MAX_PIXELS = 89_478_485
"""Pixels that a picture may have unless a caller allows more; the figure at which Pillow starts to warn."""

# Pillow knows more: some run other programs on what the file says, some have no signature to tell them by, and ICO
# decodes what it holds before it tells the size.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")

# Scaled JPEG decoding keeps at least this multiple of the wanted size. On photographs the result then differs from
# a full decode by 43 dB or more; at 1.0, where the final filter has nothing left to do, by only 34 dB.
_DRAFT_MARGIN = 1.5

# What undoes each EXIF orientation.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAPS = {_TURNS[orientation] for orientation in (5, 6, 7, 8)}  # those that make columns of rows


class Decoded(NamedTuple):
    """Pixels (H,W,3), and the picture's own rows and columns, which may be more."""

    pixels: NDArray[np.uint8]
    size: tuple[int, int]


def decode_image(
    source: "ImageSource",
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
        source: a file, its encoded bytes, or pixels (H,W,3).
        size: rows and columns, 1 or more, to squash the picture to, bilinear and anti-aliased; its own by default.
            JPEG files that are much larger are decoded at a fraction of their size.
        max_pixels: a picture that claims more is refused before it is decoded.
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
    """Decode as `decode_image` does, also a picture that Pillow holds, and say how large it is itself when turned."""
    if size is not None and min(size) < 1:
        raise InputError(name, f"size is {size}", "give rows and columns of 1 or more")
    if isinstance(source, np.ndarray):
        decoded = Decoded(_check_pixels(source, name), (source.shape[0], source.shape[1]))
    elif isinstance(source, Path):
        with _open_file(source) as stream:
            decoded = _decode(stream, size=size, max_pixels=max_pixels, where=str(source))
    else:
        stream_or_picture = source if isinstance(source, Image.Image) else BytesIO(source)
        decoded = _decode(stream_or_picture, size=size, max_pixels=max_pixels, where=name)
    if size is None or decoded.pixels.shape[:2] == size:
        return decoded
    return decoded._replace(pixels=_resize(decoded.pixels, size))


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


def _check_pixels(pixels: NDArray[np.uint8], where: str) -> NDArray[np.uint8]:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
        raise InputError(where, f"the array is {pixels.dtype} of shape {pixels.shape}", "give uint8 pixels (H, W, 3)")
    return pixels


def _resize(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    # Pillow's algorithm, vectorised: equal but for a rounding in some of 100,000 pixels, and 3 times as fast. The
    # order of these dimensions keeps it on the path that needs no transposition.
    images = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))[None].permute(0, 3, 1, 2)
    resized = F.interpolate(images, size=size, mode="bilinear", align_corners=False, antialias=True)
    return cast("NDArray[np.uint8]", resized[0].permute(1, 2, 0).numpy())


def _decode(source: IO[bytes] | Image.Image, *, size: tuple[int, int] | None, max_pixels: int, where: str) -> Decoded:
    try:
        picture = source if isinstance(source, Image.Image) else _open(source, where)
        if picture.width * picture.height > max_pixels:
            raise InputError(
                where,
                f"{picture.width} x {picture.height} = {picture.width * picture.height} pixels are more than the limit"
                f" of {max_pixels}",
                "shrink the picture",
            )
        own = picture.height, picture.width
        if size is not None and picture is not source:  # a caller's picture is not to be decoded smaller for good
            wanted = round(_DRAFT_MARGIN * max(size))  # a square, because orientation may swap the sides
            picture.draft(None, (wanted, wanted))
        picture.load()
        turn = _find_turn(picture)
        turned = picture if turn is None else picture.transpose(turn)
        return Decoded(_convert(turned, where), own[::-1] if turn in _SWAPS else own)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # plugins raise whatever their parsers trip over: SyntaxError, struct.error, ...
        wrong = f"cannot be decoded ({' '.join(str(error).split()) or type(error).__name__})"
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


def _find_turn(picture: Image.Image) -> Image.Transpose | None:
    """What undoes the EXIF orientation; Pillow's own `exif_transpose` fails on damaged EXIF data."""
    try:
        return _TURNS.get(picture.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # the parser trips over damage in many ways, none of which touches the pixels
        return None


def _convert(picture: Image.Image, where: str) -> NDArray[np.uint8]:
    if picture.mode.startswith("I"):
        return _convert_deep_grey(picture, where)
    if picture.mode == "F":
        raise InputError(where, "its pixels are floating point, which have no set white", "save it with 8 or 16 bits")
    if picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    return np.array(picture if picture.mode == "RGB" else picture.convert("RGB"))


def _convert_deep_grey(picture: Image.Image, where: str) -> NDArray[np.uint8]:
    grey = np.asarray(picture).astype(np.int64)
    if grey.min() < 0 or grey.max() > 65535:
        wrong = f"its grey values run from {grey.min()} to {grey.max()}"
        raise InputError(where, wrong, "save it with 8 or 16 bits, white at 65535")
    if "transparency" in picture.info:
        grey[grey == picture.info["transparency"]] = 65535
    return np.repeat(((grey + 128) // 257).astype(np.uint8)[..., None], 3, axis=2)
