"""From a file, its bytes, a Pillow image or an array to RGB pixels, the right way up."""

import os
import stat
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from functools import partial
from importlib import import_module
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, TILELENGTH, TILEWIDTH, TiffImageFile

from pivotpatch.errors import InputError, explaining, install_hint

ImageSource = Path | bytes | NDArray[np.uint8]
"""Where an image's pixels come from: a file, its encoded bytes, or the pixels (H,W,3) themselves."""
Resize = Callable[[NDArray[np.uint8], tuple[int, int]], NDArray[np.uint8]]
"""Gives pixels (H,W,3) other rows and columns, anti-aliased."""

Item = TypeVar("Item")
Read = TypeVar("Read")

MAX_PIXELS = 89_478_485
"""Pixels that an image may have; the figure at which Pillow starts to warn."""
MAX_SIDE = 100_000
"""Rows or columns that an image may have: the filter that shrinks a side needs memory in proportion to it."""

# Pillow knows more: some run other programs on what the file says, some have no signature to tell them by, and ICO
# decodes what it holds before it tells the size.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "HEIF")

# Scaled JPEG decoding keeps at least this multiple of the wanted size. On photographs the result then differs from
# a full decode by 43 dB or more; at 1.0, where the final filter has nothing left to do, by only 34 dB.
_DRAFT_MARGIN = 1.5

# Bytes per pixel while an image is decoded: at most 10, of progressive JPEG. What needs more may have fewer pixels, so
# that no image takes more than 10 * MAX_PIXELS bytes.
_BYTES = 10
_FORMAT_BYTES = {"WEBP": 16, "AVIF": 17, "HEIF": 17, "JPEG2000": 28}
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"hevm", b"hevs", b"mif1", b"msf1")
_BAND = 1 << 20  # pixels that are converted at once


# Plugins raise whatever their parsers trip over: SyntaxError, struct.error, ...
_explaining = partial(explaining, wrong="cannot be decoded", todo="replace the image or leave it out")


class Decoded(NamedTuple):
    """Pixels (H,W,3), and the image's own rows and columns, which may be more."""

    pixels: NDArray[np.uint8]
    size: tuple[int, int]


def resize_pixels(
    pixels: NDArray[np.uint8], size: tuple[int, int], *, interpolation: str = "bilinear"
) -> NDArray[np.uint8]:
    """Pixels (H,W,3) of another size, as Pillow resizes them, "bilinear" or "bicubic".

    >>> resize_pixels(np.zeros((4, 6, 3), dtype=np.uint8), (8, 2)).shape
    (8, 2, 3)
    """
    if pixels.shape[:2] == size:
        return pixels
    if pixels.shape[0] > size[0] and pixels.shape[1] < size[1]:
        # Pillow would widen all the rows first.
        pixels = resize_pixels(pixels, (size[0], pixels.shape[1]), interpolation=interpolation)
    return np.asarray(Image.fromarray(pixels).resize(size[::-1], Image.Resampling[interpolation.upper()]))


def decode_image(
    source: ImageSource | Image.Image,
    *,
    size: tuple[int, int] | None = None,
    name: str = "image",
    resize: Resize = resize_pixels,
) -> NDArray[np.uint8]:
    """Decode an image to RGB.

    The EXIF orientation is applied where it can be read. Greyscale is repeated in three channels, 16-bit greyscale is
    divided by 257, CMYK is converted without its profile, transparent pixels are laid over white. Of an animation the
    first frame counts. An image that claims more than `MAX_PIXELS`, or `MAX_SIDE` rows or columns, is refused before it
    is decoded; those whose decoders hold many copies (WebP, AVIF, JPEG 2000, CMYK in JPEG, deep TIFF) above 3/10 to
    8/10 of the first.

    Args:
        source: a file, its encoded bytes, a Pillow image, or pixels (H,W,3).
        size: rows and columns, 1 or more, to squash the image to; its own by default.
            JPEG files that are much larger are decoded at a fraction of their size.
        name: what messages call an image that is not a file.
        resize: does the resizing; bilinear and anti-aliased by default.

    Returns:
        Pixels (H,W,3).
    """
    return decode_with_size(source, size=size, name=name, resize=resize).pixels


def decode_with_size(
    source: ImageSource | Image.Image,
    *,
    size: tuple[int, int] | None = None,
    name: str = "image",
    resize: Resize = resize_pixels,
) -> Decoded:
    """Decode as `decode_image` does, and say how large the image is itself when turned."""
    if size is not None and min(size) < 1:
        raise InputError(name, f"size is {size}", "give rows and columns of 1 or more")
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3:
            wrong = f"the array is {source.dtype} of shape {source.shape}"
            raise InputError(name, wrong, "give uint8 pixels (H, W, 3)")
        height, width = source.shape[:2]
        _check_size(width, height, MAX_PIXELS, name)
        return Decoded(source if size is None else resize(source, size), (height, width))
    if isinstance(source, Path):
        with open_file(source) as stream:
            return _decode(stream, size, str(source), resize)
    return _decode(source if isinstance(source, Image.Image) else BytesIO(source), size, name, resize)


def read_ahead(
    items: Iterable[Item], read: Callable[[Item], Read], *, batch_size: int, threads: int
) -> Generator[list[Read | InputError], None, None]:
    """What `read` gives of each item, or its `InputError`, in order and by batches; threads read the next ones already.

    Args:
        items: as many as there are; only a few batches are held.
        read: such as `decode_image`; Pillow decodes in several threads at once.
        batch_size: items per batch.
        threads: how many read.
    """

    def try_to(item: Item) -> Read | InputError:
        try:
            return read(item)
        except InputError as error:
            return copy(error)  # a copy holds no frames, hence no pixels

    rest, waiting = iter(items), deque[Future[Read | InputError]]()
    with ThreadPoolExecutor(threads, "decoder") as pool:
        try:
            while True:
                missing = max(2 * batch_size, threads) - len(waiting)
                waiting.extend(pool.submit(try_to, item) for item in islice(rest, missing))
                if not waiting:
                    return
                yield [waiting.popleft().result() for _ in range(min(batch_size, len(waiting)))]
        finally:  # whoever asks has had enough
            for each in waiting:
                each.cancel()


def check_header(stream: IO[bytes], *, name: str = "image") -> int:
    """Refuse what is no image or too large, without decoding it; how many pixels it claims to have."""
    with _explaining(name):
        image = _open(stream, name)
        _check_claims(image, name)
        return image.width * image.height


def _decode(source: IO[bytes] | Image.Image, size: tuple[int, int] | None, where: str, resize: Resize) -> Decoded:
    with _explaining(where):
        image = source if isinstance(source, Image.Image) else _open(source, where)
        _check_claims(image, where)
        height, width = image.height, image.width
        if size is not None and image is not source:  # a caller's image is not to be decoded smaller for good
            wanted = round(_DRAFT_MARGIN * max(size))  # a square, because orientation may swap the sides
            image.draft(None, (wanted, wanted))
        image.load()
        _check_values(image, where)
        turn = _find_orientation(image)
        pixels = _render(image, size[::-1] if size is not None and turn > 4 else size, resize)
    if turn > 4:  # rows become columns
        pixels, height, width = pixels.swapaxes(0, 1), width, height
    down, right = -1 if turn in (3, 4, 7, 8) else 1, -1 if turn in (2, 3, 6, 7) else 1
    return Decoded(np.ascontiguousarray(pixels[::down, ::right]), (height, width))


def open_file(path: Path) -> IO[bytes]:
    """Open an image's file; whatever is not one is an error that names it."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for whoever writes to it
            if path.is_dir():
                os.scandir(path).close()  # says why the images in it were not found
            raise OSError(0, "it is no regular file")
        return path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have, such as one with a NUL
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(str(path), f"cannot be read ({why})", "check the path") from None


def _open(stream: IO[bytes], where: str) -> ImageFile.ImageFile:
    """Read the header. Pillow's own `open` also warns and refuses by a limit that is one for the whole process."""
    head = stream.read(64)
    prefix, brands = head[:16], head[8 : int.from_bytes(head[:4])] if head[4:8] == b"ftyp" else b""
    heif = brands[:4] in _HEIF_BRANDS and b"avif" not in brands  # mif1 and msf1 are brands of both
    if heif:
        with suppress(ImportError):  # the extra, which teaches Pillow the format of iPhone photos
            import_module("pillow_heif").register_heif_opener()
    for prepare in (Image.preinit, Image.init):  # the common formats, then all: that takes longer
        prepare()
        for name in FORMATS:
            if name in Image.OPEN and not (heif and name == "AVIF"):  # what Pillow was built with differs
                factory, accept = Image.OPEN[name]
                if cast("Callable[[bytes], bool | str]", accept)(prefix) is True:
                    stream.seek(0)
                    return factory(stream, "")
    if heif:
        raise InputError(where, "is a HEIC or HEIF image", f"read such images after {install_hint('heif')}")
    wrong = "is in none of the known formats" if prefix else "is empty"
    raise InputError(where, wrong, f"give one of {', '.join(FORMATS)}")


def _check_claims(image: Image.Image, where: str) -> None:
    """Refuse an image by what its header says, before it is decoded."""
    sizes = [image.size]
    needed = _FORMAT_BYTES.get(image.format or "", _BYTES)  # bytes per pixel, all copies that the decoder holds
    if image.format == "JPEG" and image.mode == "CMYK":
        needed = 12
    elif isinstance(image, TiffImageFile):
        needed = 4 + sum(image.tag_v2.get(BITSPERSAMPLE, (1,))) // 8  # one strip or tile may be the whole image
        if TILEWIDTH in image.tag_v2:  # a tile is unpacked whole, however small the image is
            sizes.append((image.tag_v2[TILEWIDTH], image.tag_v2.get(TILELENGTH, 1)))
    for width, height in sizes:
        _check_size(width, height, min(MAX_PIXELS, MAX_PIXELS * _BYTES // needed), where)


def _check_size(width: int, height: int, limit: int, where: str) -> None:
    if min(width, height) < 1:
        raise InputError(where, f"{width} x {height} pixels: there is nothing to see", "give another image")
    if max(width, height) > MAX_SIDE:
        raise InputError(where, f"{width} x {height} pixels: a side has more than {MAX_SIDE}", "crop or shrink it")
    if width * height > limit:
        wrong = f"{width} x {height} = {width * height} pixels are more than the limit of {limit}"
        raise InputError(where, wrong, "shrink the image")


def _check_values(image: Image.Image, where: str) -> None:
    """Refuse pixels that do not tell what is white."""
    low, high = cast("tuple[int, int]", image.getextrema()) if image.mode == "I" else (0, 0)
    if image.mode == "F" or low < 0 or high > 65535:
        wrong = "its pixels are floating point or deeper than 16 bits, which have no set white"
        raise InputError(where, wrong, "save it with 8 or 16 bits")


def _find_orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; Pillow's own `exif_transpose` fails on damaged EXIF data."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        return orientation if orientation in range(1, 9) else 1
    except Exception:  # the parser trips over damage in many ways, none of which touches the pixels
        return 1


def _render(image: Image.Image, size: tuple[int, int] | None, resize: Resize) -> NDArray[np.uint8]:
    """The pixels (H,W,3) as they lie in the file. Beside them and the image nothing is large.

    Bands of rows are converted and, where a size is given, brought to its width; then all rows to its height.
    """
    width = image.width if size is None else min(image.width, size[1])
    pixels = np.empty((image.height, width, 3), dtype=np.uint8)
    step = max(_BAND // image.width, 1)
    for top in range(0, image.height, step):
        rows = pixels[top : top + step]
        band = image if len(rows) == image.height else image.crop((0, top, image.width, top + len(rows)))
        rows[:] = resize(_convert(band), rows.shape[:2])
    return pixels if size is None else resize(pixels, size)


def _convert(image: Image.Image) -> NDArray[np.uint8]:
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int32)
        if "transparency" in image.info:
            grey[grey == image.info["transparency"]] = 65535
        return np.repeat(((grey + 128) // 257).astype(np.uint8)[..., None], 3, axis=2)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
