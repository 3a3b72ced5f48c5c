"""PNG and JPEG files as 8-bit pixels, and pixels of any size and colour as the federation wants them.

Every rule looks at one image alone, and each that changes pixels has a name, which is counted and shown at the site.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_dpgan.data.formats import bad
from fl_dpgan.errors import DataError

# An image, uint8 (H, W) or (H, W, 3), and the names of the conversions that it took.
Picture = tuple[NDArray[np.uint8], tuple[str, ...]]

MAX_PIXELS = 1 << 26  # four times the largest radiograph; a small file can claim more to fill the memory
_BAND = 1 << 18  # pixels
_ORIENTATION = 0x0112  # the EXIF tag: what to do to the stored rows and columns so that up is up
_UPRIGHT: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    2: np.fliplr,
    3: lambda image: np.rot90(image, 2),
    4: np.flipud,
    5: lambda image: image.swapaxes(0, 1),
    6: lambda image: np.rot90(image, -1),
    7: lambda image: np.rot90(image, 2).swapaxes(0, 1),
    8: lambda image: np.rot90(image, 1),
}


def read_image(path: Path) -> Picture:
    """Read a PNG or JPEG file.

    16-bit grey is scaled by its type, round(value 255 / 65535); of 16-bit colour Pillow keeps the high byte. Alpha is
    composited on black, a palette becomes its colours, and EXIF's orientation is applied.

    Raises:
        DataError: the file is missing, damaged, of another format, deeper than 16 bits, animated, or too large.
    """
    from PIL import Image

    try:
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            if image.width * image.height > MAX_PIXELS:
                raise bad(path, f"claims {image.width} x {image.height} pixels", "crop or shrink it, or remove it")
            if getattr(image, "is_animated", False) and image.format == "PNG":
                raise bad(path, "is an animation", "save the frame that you mean as an image of its own")
            if image.mode in ("I", "F"):
                raise bad(path, f"has pixels deeper than 16 bits (mode {image.mode})", "save it with 16 bits at most")
            deep = any(str(tile[3]).endswith(";16B") for tile in image.tile)
            pixels, notes = _deep_grey(image) if image.mode.startswith("I;16") else _eight_bits(image, deep)
            turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except DataError:
        raise
    except (OSError, Image.DecompressionBombError) as error:
        raise bad(path, f"is not a readable image ({error})", "replace or remove the file") from None
    except Exception as error:  # Pillow raises whatever its parsers meet, and may quote it
        raise bad(path, f"is not a readable image ({type(error).__name__})", "replace or remove the file") from None
    if turn is not None:
        return turn(pixels), (*notes, "turned upright by EXIF")
    return pixels, notes


def _deep_grey(image: Any) -> Picture:
    values = np.asarray(image).astype(np.uint32)
    pixels = scale(values, 65535)
    transparent = image.info.get("transparency")
    if transparent is None:
        return pixels, ("16-bit grey scaled by its type",)
    pixels[values == transparent] = 0
    return pixels, ("16-bit grey scaled by its type", "alpha composited on black")


def _eight_bits(image: Any, deep: bool) -> Picture:
    notes = ["16-bit colour by its high byte"] if deep else []
    grey = image.mode in ("1", "L", "LA", "La")
    if not grey and image.mode not in ("RGB", "RGBA"):
        notes.append(f"{'palette' if image.mode in ('P', 'PA') else image.mode} to RGB")
    if not image.has_transparency_data:
        return np.asarray(image.convert("L" if grey else "RGB"), np.uint8), tuple(notes)
    values = np.asarray(image.convert("LA" if grey else "RGBA"))
    shown = np.empty((*values.shape[:2], values.shape[2] - 1), np.uint8)
    rows = max(1, _BAND // values.shape[1])  # at a time: the products take twice the room
    for start in range(0, len(values), rows):
        band = values[start : start + rows]
        shown[start : start + rows] = (band[..., :-1].astype(np.uint16) * band[..., -1:] + 127) // 255
    return shown[..., 0] if grey else shown, (*notes, "alpha composited on black")


def scale(values: NDArray[Any], top: int) -> NDArray[np.uint8]:
    """Map whole numbers 0 to `top` (255 to 65535) to 0 to 255, rounded to nearest; 0 and `top` stay the ends."""
    return ((values.astype(np.uint32) * 510 + top) // (2 * top)).astype(np.uint8)


def fit(image: NDArray[np.uint8], size: int, channels: int) -> NDArray[np.uint8]:
    """Bring one (H, W) or (H, W, 3) image to (channels, size, size): grey rule first, then resize, then replicate."""
    if image.ndim == 3 and channels == 1:
        # ITU-R BT.601 luma in integers, rounded to nearest: the same on every machine, and grey stays exactly grey.
        image = ((image.astype(np.uint32) @ np.array([299, 587, 114], np.uint32) + 500) // 1000).astype(np.uint8)
    if image.shape[:2] != (size, size):
        from PIL import Image

        # Pillow's bilinear filter widens with the reduction factor, so shrinking is antialiased.
        image = np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))
    planes = image[np.newaxis] if image.ndim == 2 else image.transpose(2, 0, 1)
    return np.broadcast_to(planes, (channels, size, size))


def fitting(image: NDArray[np.uint8], size: int, channels: int) -> tuple[str, ...]:
    """The names of what `fit` changes about an image."""
    return (
        *(("colour to grey (BT.601)",) if image.ndim == 3 and channels == 1 else ()),
        *(("grey to colour (replicated)",) if image.ndim == 2 and channels == 3 else ()),
        *(("resized",) if image.shape[:2] != (size, size) else ()),
    )


def is_image_name(path: Path) -> bool:
    """Whether a file is called like a PNG or JPEG image."""
    return os.path.splitext(path.name)[1].lower() in (".png", ".jpg", ".jpeg")
