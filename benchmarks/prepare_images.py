"""How many photographs does `prepare` bring to 256 pixels per second of CPU time, beside an earlier commit and others?

Each side reads the same JPEGs, decodes them, brings them to 256 x 256 pixels and writes what it writes:

- ours, and the checkout `--base`: all stages of `prepare`, so also features, thumbnails, MDS shards and the report;
- img2dataset's way: cv2, INTER_AREA, and JPEGs of quality 95 as files;
- torchvision: Pillow's decoder, as `decode_jpeg` lacks in some builds, its antialiased resize, and one tensor on disk;
- Hugging Face: `datasets.map` with Pillow's Lanczos, in its Arrow file.

Every side has a process of its own with one thread, in turns. Counted is its CPU time without imports.

    pip install opencv-python-headless "datasets>=5"
    git worktree add --detach ../base fd829a81
    python benchmarks/prepare_images.py --base ../base --photographs FOLDER --json OUT
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from common import REPOSITORY, TINY, Report, parse, parser, run
from PIL import Image, ImageOps

from ddm_lightning.config.load import load_experiment
from ddm_lightning.prepare.stages import prepare

SIZE = 256
LEAST = 1024
MOST = 1536
# Photographs and rounds, in all and with ``--quick``.
SIZES = ((200, 3), (24, 1))
_SETTINGS = (
    "prepare.caption_encoder=null",
    "condition.kind=none",
    "sample.prompts=[]",
    "prepare.partition.kind=random",
)

Work: TypeAlias = Callable[[Sequence[Path], Path], None]


def ours(photographs: Sequence[Path], folder: Path) -> None:
    """Prepare them from an image folder, in this process."""
    source = f"prepare.source={{name: imagefolder, params: {{path: {photographs[0].parent}}}}}"
    prepare(load_experiment(TINY, [source, f"prepare.images.size={SIZE}", *_SETTINGS]), folder / "run")


def img2dataset(photographs: Sequence[Path], folder: Path) -> None:
    """Resize as img2dataset does with ``resize_mode=center_crop``."""
    import cv2  # type: ignore[import-not-found]

    cv2.setNumThreads(1)
    for path in photographs:
        image = cv2.imread(str(path))
        side = min(image.shape[:2])
        top, left = [(length - side) // 2 for length in image.shape[:2]]
        image = cv2.resize(image[top:, left:][:side, :side], (SIZE, SIZE), interpolation=cv2.INTER_AREA)
        cv2.imwrite(str(folder / path.name), image, [cv2.IMWRITE_JPEG_QUALITY, 95])


def torchvision(photographs: Sequence[Path], folder: Path) -> None:
    """Resize tensors, antialiased."""
    from torchvision.transforms.v2 import functional

    images = []
    for path in photographs:
        image = functional.pil_to_tensor(Image.open(path))
        images.append(functional.center_crop(functional.resize(image, [SIZE]), [SIZE, SIZE]))

    torch.save(torch.stack(images), folder / "images.pt")


def datasets(photographs: Sequence[Path], folder: Path) -> None:
    """Map over the files."""
    from datasets import Dataset
    from datasets import Image as Encoded

    def resized(row: dict[str, Image.Image]) -> dict[str, Image.Image]:
        return {"image": ImageOps.fit(row["image"], (SIZE, SIZE), Image.Resampling.LANCZOS)}

    rows = Dataset.from_dict({"image": [*map(str, photographs)]}).cast_column("image", Encoded())
    rows.map(resized, cache_file_name=str(folder / "images.arrow"))


SIDES: dict[str, Work] = {
    "ours": ours,
    "today": ours,
    "img2dataset": img2dataset,
    "torchvision": torchvision,
    "datasets": datasets,
}


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "", fixed=True)
    cli.add_argument("--base", type=Path, required=True, help="an earlier commit of this repository")
    cli.add_argument("--photographs", type=Path, required=True)
    options = parse(cli, arguments)
    num_photographs, num_rounds = SIZES[options.quick]
    with tempfile.TemporaryDirectory(prefix="prepare-images-") as folder:
        cut(options.photographs, Path(folder, "few"), 8)
        photographs = cut(options.photographs, Path(folder, "all"), num_photographs)
        psnr = min(map(decibels, photographs))
        rates: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(num_rounds):
            for side in SIDES:
                base = options.base if side == "today" else REPOSITORY
                rates[side].append(num_photographs / cpu_seconds(side, base, folder))

    report = Report("Photographs brought to 256 pixels per second of CPU time", ["side", "median", "least", "most"])
    figures = report.figures
    for side, found in rates.items():
        median = statistics.median(found)
        report.row(side, *(f"{rate:.1f}" for rate in (median, min(found), max(found))))
        figures[f"images_over_{side}"] = statistics.median(rates["ours"]) / median

    figures["psnr_db"] = psnr
    report.details["images_per_second"] = rates
    report.finish(options.json)


def cut(folder: Path, out: Path, num: int) -> list[Path]:
    """Cut JPEGs of 1024 to 1536 pixels a side and quality 90 from the photographs of a folder."""
    out.mkdir()
    random = np.random.default_rng(0)
    whole = [image for image in map(Image.open, sorted(folder.glob("*.jpg"))) if min(image.size) >= LEAST]
    paths = []
    for number in range(num):
        image = whole[number % len(whole)]
        width, height = (int(random.integers(LEAST, min(side, MOST) + 1)) for side in image.size)
        left, top = random.random(2).tolist()
        paths.append(out / f"{number:03}.jpg")
        ImageOps.fit(image.convert("RGB"), (width, height), centering=(left, top)).save(paths[-1], quality=90)

    return paths


def cpu_seconds(side: str, code: Path, folder: str) -> float:
    """Let a process with the package of a checkout do its work; return the seconds that it took."""
    script = f"import prepare_images; prepare_images.child({side!r}, {folder!r})"
    paths = [str(code), str(REPOSITORY / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    told = subprocess.check_output([sys.executable, "-c", script], cwd=code, env=environment, text=True)
    return float(told.split()[-1])


def child(side: str, folder: str) -> None:
    """Work on a few photographs to import everything, then on all; print the CPU seconds of that."""
    seconds = 0.0
    for name in ("few", "all"):
        with tempfile.TemporaryDirectory() as out:
            began = time.process_time()
            SIDES[side](sorted(Path(folder, name).iterdir()), Path(out))
            seconds = time.process_time() - began

    print(seconds)


def decibels(path: Path) -> float:
    """PSNR of an image as ``prepare`` makes it to that of a full decode."""
    from ddm_lightning.prepare.reading import to_square
    from ddm_lightning.prepare.sources.decode import decode, decode_reduced

    data = path.read_bytes()
    found: Any = decode_reduced(data, "", lambda _: (2 * SIZE, 2 * SIZE))
    full: Any = decode(data, "")
    error = to_square(found["image"], SIZE, "crop", found["full_size"]) - to_square(full, SIZE, "crop").astype(float)
    return float(20 * np.log10(255) - 10 * np.log10(np.square(error).mean()))


if __name__ == "__main__":
    run(main)
