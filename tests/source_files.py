"""Images, captions and folders that tests of sources share."""

import io
import json
import tarfile

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

CAPTIONS = {
    "plain": "a red apple",
    "empty": "",
    "emoji": "👩🏽‍🚀 in 🛰️, e\u0301 and é",
    "rtl": "חתול \u200fقطة\u200e cat",
    "long": "word " * 19_999 + "final",
    "lines": 'two\nlines, a "quote", a\ttab',
}
"""Captions that have to arrive unchanged."""


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image, format="PNG", **options):
    """An array or a Pillow image as bytes."""
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, format, **options)
    return buffer.getvalue()


def write(url, files):
    """Write ``{relative path: bytes or text}`` under a folder, local or not."""
    filesystem, root = fsspec.core.url_to_fs(url)
    for name, content in files.items():
        path = f"{root}/{name}"
        filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        filesystem.pipe_file(path, content.encode() if isinstance(content, str) else content)


def write_parquet(folder, name, table, **options):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), sink, **options)
    write(str(folder), {name: sink.getvalue().to_pybytes()})


def write_arrow(folder, table, file_format=False):
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.Table.from_pylist(table)
    with (pyarrow.ipc.new_file if file_format else pyarrow.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    write(str(folder), {"0.arrow": sink.getvalue().to_pybytes()})


def write_mds(folder, columns, table, **options):
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns=columns, **options) as writer:
        for row in table:
            writer.write(row)


def tar_of(files, format=tarfile.PAX_FORMAT):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            content = content.encode() if isinstance(content, str) else content
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def bad_images():
    """Name -> (content, cause); None where an image comes out."""
    moving = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    whole = encoded(noise(30, 30, 3), "JPEG")
    palette = Image.fromarray(noise(4, 4), "P")
    palette.putpalette(noise(256, 3).ravel().tolist())
    return {
        "zero.jpg": (b"", "empty file"),
        "cut.jpg": (whole[: len(whole) // 2], "damaged image"),
        "page.jpg": (b"<html>404</html>", "no image"),
        "cmyk.jpg": (encoded(Image.fromarray(noise(4, 4, 4), "CMYK"), "JPEG"), None),
        "palette.png": (encoded(palette), None),
        "deep.png": (encoded(noise(4, 4).astype(np.uint16) * 257), None),
        "moving.gif": (encoded(moving[0], "GIF", save_all=True, append_images=moving[1:]), None),
        "dot.png": (encoded(noise(1, 1, 3)), None),
    }


def read_all(source, build_again):
    """Everything a source yields; each part is read by a source of its own, as other processes do."""
    parts = source.parts()
    assert len({part.name for part in parts}) == len(parts)
    found = []
    for part in parts:
        assert json.loads(json.dumps(dict(part.where))) == dict(part.where), "plain JSON"
        samples = list(build_again().read(part))
        assert part.num_samples in (None, len(samples))
        found += samples
    return found


def lanczos(length, start, span, size):
    """The matrix [size, length] that scales ``span`` pixels from ``start`` on to ``size``, from Lanczos-3's formula."""
    scale = span / size
    centres = start + (np.arange(size) + 0.5) * scale
    distance = (np.arange(length) + 0.5 - centres[:, None]) / max(1.0, scale)
    weights = np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0)
    return weights / weights.sum(1, keepdims=True)
