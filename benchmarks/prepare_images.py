"""How many photographs does `prepare` bring to 256 pixels per second of CPU time, beside an earlier commit and others?

Each side reads the same JPEGs, decodes them, brings them to 256 x 256 pixels and writes what it writes:

- ours, and the checkout `base`: all stages of `prepare`, so also features, thumbnails, clusters, a second copy in MDS
  shards, hashes and the report;
- reading: no more than the others do, with `prepare`'s reader, into MDS shards;
- img2dataset's way: cv2, INTER_AREA, and JPEGs of quality 95 as files;
- torchvision: Pillow's decoder, as `decode_jpeg` lacks in some builds, its antialiased resize, and one tensor on disk;
- Hugging Face: `datasets.map` with Pillow's Lanczos, in its Arrow file.

Every side has a process of its own with one thread, in turns. Counted is its CPU time without imports.

    pip install opencv-python-headless "datasets>=5"
    git worktree add --detach ../base fd829a81
    python benchmarks/prepare_images.py ../base FOLDER --json OUT
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, islice
from math import log10
from pathlib import Path
from statistics import median
from subprocess import check_output
from tempfile import TemporaryDirectory
from time import process_time

import numpy as np
import torch
from common import REPOSITORY, TINY, Report, parse, parser, run
from PIL import Image, ImageOps

from ddm_lightning.config.experiment import ImagesConfig, PluginConfig, PrepareConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.prepare.plugins import Plugins
from ddm_lightning.prepare.reading import Reading
from ddm_lightning.prepare.records import Pixels
from ddm_lightning.prepare.stages import prepare
from ddm_lightning.shards.mosaic import open_writer

SIZE = 256
# Photographs and rounds, in all and with ``--quick``.
SIZES = ((200, 3), (24, 1))
_SETTINGS = (
    f"prepare.images.size={SIZE}",
    "prepare.caption_encoder=null",
    "condition.kind=none",
    "sample.prompts=[]",
    "prepare.partition.kind=random",
)


def ours(photographs: Path, out: Path) -> None:
    """Prepare them, in this process."""
    source = f"prepare.source={{name: imagefolder, params: {{path: {photographs}}}}}"
    prepare(load_experiment(TINY, [source, *_SETTINGS]), out / "run")


def read(photographs: Path) -> Iterator[Pixels]:
    """Yield them as ``prepare`` resizes them."""
    source = PluginConfig("imagefolder", {"path": str(photographs)})
    plugins = Plugins(PrepareConfig(source, images=ImagesConfig(SIZE)))
    for chunk in Reading(chain.from_iterable(map(plugins.read, plugins.parts)), plugins).chunks():
        yield from chunk.squares


def reading(photographs: Path, out: Path) -> None:
    """Read them and write MDS shards."""
    with open_writer(out / "mds", {"image": f"ndarray:uint8:{SIZE},{SIZE},3"}, None, 1 << 26) as writer:
        for image in read(photographs):
            writer.write({"image": image})


def img2dataset(photographs: Path, out: Path) -> None:
    """Resize as img2dataset does with ``resize_mode=center_crop``."""
    import cv2  # type: ignore[import-not-found]

    cv2.setNumThreads(1)
    for path in photographs.iterdir():
        image = cv2.imread(str(path))
        side = min(image.shape[:2])
        top, left = [(length - side) // 2 for length in image.shape[:2]]
        image = cv2.resize(image[top:, left:][:side, :side], (SIZE, SIZE), interpolation=cv2.INTER_AREA)
        cv2.imwrite(str(out / path.name), image, [cv2.IMWRITE_JPEG_QUALITY, 95])


def torchvision(photographs: Path, out: Path) -> None:
    """Resize tensors, antialiased."""
    from torchvision.transforms.v2 import functional

    images = []
    for path in photographs.iterdir():
        image = functional.pil_to_tensor(Image.open(path))
        images.append(functional.center_crop(functional.resize(image, [SIZE]), [SIZE, SIZE]))

    torch.save(torch.stack(images), out / "images.pt")


def datasets(photographs: Path, out: Path) -> None:
    """Map over the files."""
    from datasets import Dataset
    from datasets import Image as Encoded

    def resized(row: dict[str, Image.Image]) -> dict[str, Image.Image]:
        return {"image": ImageOps.fit(row["image"], (SIZE, SIZE), Image.Resampling.LANCZOS)}

    rows = Dataset.from_dict({"image": [*map(str, photographs.iterdir())]}).cast_column("image", Encoded())
    rows.map(resized, cache_file_name=str(out / "images.arrow"))


today = ours  # of the earlier commit
OTHERS = ("img2dataset", "torchvision", "datasets")


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "", fixed=True)
    cli.add_argument("base", type=Path)
    cli.add_argument("photographs", type=Path)
    options = parse(cli, arguments)
    num_photographs, num_rounds = SIZES[options.quick]
    rates = defaultdict[str, list[float]](list)
    with TemporaryDirectory() as folder:
        photographs = Path(folder, "all")
        cut(options.photographs, Path(folder, "few"), 8)
        cut(options.photographs, photographs, num_photographs)
        psnr = min(map(decibels, sorted(photographs.iterdir()), read(photographs)))
        for _ in range(num_rounds):
            for side in ("ours", "reading", "today", *OTHERS):
                base = options.base if side == "today" else REPOSITORY
                rates[side].append(num_photographs / cpu_seconds(side, base, folder))

    report = Report("Photographs brought to 256 pixels per second of CPU time", ["side", "median", "least", "most"])
    figures = report.figures
    for side, found in rates.items():
        middle = median(found)
        report.row(side, f"{middle:.1f}", f"{min(found):.1f}", f"{max(found):.1f}")
        figures[f"images_over_{side}"] = median(rates["ours"]) / middle
        if side in OTHERS:
            figures[f"reading_over_{side}"] = median(rates["reading"]) / middle

    figures["psnr_db"] = psnr
    report.details["images_per_second"] = rates
    report.finish(options.json)


def cut(folder: Path, out: Path, num: int) -> None:
    """Cut JPEGs of 1024 to 1536 pixels a side and quality 90 from the photographs of a folder."""
    out.mkdir()
    random = np.random.default_rng(0)
    whole = [image for image in map(Image.open, sorted(folder.glob("*.jpg"))) if min(image.size) >= 1024]
    for number, image in enumerate(islice(cycle(whole), num)):
        size = random.integers(1024, np.minimum(image.size, 1536) + 1).tolist()
        part = ImageOps.fit(image.convert("RGB"), size, centering=(random.random(), random.random()))
        part.save(out / f"{number:03}.jpg", quality=90)


def cpu_seconds(side: str, code: Path, folder: str) -> float:
    """Let a process with the package of a checkout do its work; return the seconds that it took."""
    script = f"import prepare_images as sides; sides.child(sides.{side}, {folder!r})"
    command = ["env", f"PYTHONPATH={REPOSITORY}/benchmarks", "OMP_NUM_THREADS=1", sys.executable, "-c", script]
    return float(check_output(command, cwd=code).split()[-1])


def child(work: Callable[[Path, Path], None], folder: str) -> None:
    """Work on a few photographs to import everything, then on all; print the CPU seconds of that."""
    for name in ("few", "all"):
        with TemporaryDirectory() as out:
            began = process_time()
            work(Path(folder, name), Path(out))
            print(process_time() - began)


def decibels(path: Path, image: Pixels) -> float:
    """PSNR of an image of ``read`` to Pillow's Lanczos of the same square of the full decode.

    The square has whole pixels at half the size, so it is off the middle by a pixel of the photograph at most.
    """
    whole = Image.open(path)
    shorter = min(whole.size)
    left, top = (2 * round((side - shorter) / 4) for side in whole.size)
    end = shorter // 2 * 2
    full = np.asarray(whole.resize((SIZE, SIZE), Image.Resampling.LANCZOS, (left, top, left + end, top + end)), float)
    return -10 * log10(np.square((image - full) / 255).mean())


if __name__ == "__main__":
    run(main)
