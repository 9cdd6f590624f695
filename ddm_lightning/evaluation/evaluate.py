"""Compare generated images with real ones: resumable, split over ranks, with every setting recorded."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from rich.table import Table
from torch import Tensor, distributed

from ddm_lightning.config.load import leaves
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.core.devices import device_of
from ddm_lightning.core.environment import Ranks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write, atomic_write_json, read_json, sha256_file, sha256_json
from ddm_lightning.core.formatting import Bars, Shown, table
from ddm_lightning.core.grids import labelled_grid, save_png, scale_of
from ddm_lightning.core.registry import METRICS
from ddm_lightning.evaluation.image_sets import FileImages, Generated, ImageSet, ShardImages, parts
from ddm_lightning.evaluation.metrics.features import FeatureMetric, Score, nearest
from ddm_lightning.members.run import Run
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN

SETTINGS_FILE = "settings.json"
RESULT_FILE = "evaluation.json"
NUM_SUSPECTS = 8
NUM_NEIGHBOURS = 5
NEAR_QUANTILE = 0.05
"""Share of held-out images that count as near to a training image."""


class Results(Shown, dict[str, Any]):
    """Content of ``evaluation.json``, shown as a table of its scores."""

    path: Path
    """The file."""

    def __rich__(self) -> Table:
        rows = []
        buckets = self.get("buckets", {})
        for name, score in self["scores"].items():
            rows.append((name, *_cells(score)))
            for bucket, own in buckets.items():
                rows.append((f"{name}, {bucket}", *_cells(own["scores"].get(name))))

        memorised = self["memorisation"]
        if memorised is not None:
            expected = f"held-out images: {memorised['expected_share']:.0%}"
            rows.append(("samples near a training image", f"{memorised['share_nearer']:.1%}", expected))

        real = self["reference"]
        title = f"{self['num_generated']:,} images against {real['num']:,} of {real['images']}"
        return table(("score", "value", "95 % interval"), rows, title, ["score"])


def _cells(score: dict[str, float | None] | None) -> tuple[str, str]:
    """Value and interval of a score, if there are enough images for it."""
    if score is None:
        return "–", "too few images"

    interval = "" if score["low"] is None else f"{score['low']:.4g} to {score['high']:.4g}"
    return f"{score['value']:.4g}", interval


class Evaluation:
    """One comparison of generated with reference images, checked before anything is generated.

    Args:
        run: a run with prepared shards and, unless ``images`` is given, an ensemble; or a saved ensemble. Of its
            experiment, only the sections ``sample`` and ``evaluate`` and the key ``island.accelerator`` are used.
        images: folder or ``.npz`` file to evaluate instead of new samples.
        out: results folder; None for one in the run folder, named after strategy or member and a hash of the settings.

    Raises:
        UserError: a file or weights are missing, too few images for a metric, images of two sizes, no captions for a
            metric that needs them, or a results folder of other settings.
    """

    def __init__(self, run: Run, images: str | Path | None, out: str | Path | None) -> None:
        self.run = run
        self.experiment = experiment = run.experiment
        self.settings = experiment.evaluate
        manifest = run.manifest if run.folder.shards.exists() else None
        device = device_of(experiment.island.accelerator)
        self.metrics = [
            (plugin, METRICS.build(plugin.name, plugin.params).to(device)) for plugin in self.settings.metrics
        ]
        of_shards = partial(ShardImages, run.folder.shards, manifest)
        buckets = manifest.buckets if manifest else ()
        self.generated: ImageSet
        if images:
            self.generated = FileImages(Path(images), buckets)
        else:
            self.generated = Generated(run, manifest)
            buckets = self.generated.buckets

        wanted = self.settings.reference
        is_side = wanted in (HELD_OUT, TRAIN)
        self.reference: ImageSet = of_shards(wanted) if is_side else FileImages(Path(wanted).expanduser(), buckets)
        if isinstance(self.generated, Generated):
            self.generated.divide_as(self.reference)
        if not buckets and self.generated.shape != self.reference.shape:
            raise UserError(
                f"key 'evaluate.reference' = {wanted!r}: its images have {self.reference.shape[:2]} pixels, the "
                f"generated ones {self.generated.shape[:2]}; give a reference of the generated images' size"
            )

        self.by_features: list[FeatureMetric] = []
        for plugin, metric in self.metrics:
            if isinstance(metric, FeatureMetric):
                metric.check_nums(plugin.name, self.generated.num, self.reference.num)
                _ = metric.provenance  # looks for the weights
                self.by_features.append(metric)
            elif hasattr(metric, "captioned") and (images or experiment.condition.kind in ("class", "none")):
                raise UserError(f"metric {plugin.name!r} needs captions, and these images have none; use kid")

        self.known: list[ShardImages] = []
        """Training and held-out images, for the check of memorised samples."""
        has_held_out = manifest is not None and any(cluster.held_out for cluster in manifest.clusters)
        if self.by_features and self.settings.max_train_images and has_held_out:
            known = [of_shards(TRAIN, self.settings.max_train_images), of_shards(HELD_OUT)]
            if buckets or self.generated.shape == known[0].shape:
                self.known = known

        self.folder = self._open(out)

    def _open(self, out: str | Path | None) -> Path:
        """Find the results folder, refuse one with other settings, and write the settings into it."""
        generated = self.generated
        root = Path(__file__).parents[1]
        code = {str(path.relative_to(root)): sha256_file(path) for path in root.rglob("*.py")}
        self.origin = {"version": version("ddm_lightning"), "commit": _commit(), "code_sha256": sha256_json(code)}
        if isinstance(generated, Generated):
            self.origin |= generated.settings
            name = generated.name
        else:
            self.origin["images_sha256"] = generated.sha256
            name = "images"

        folder = Path(out or self.run.folder.root / "evaluation" / f"{name}-{sha256_json(self.origin)[:8]}")
        path = folder / SETTINGS_FILE
        remedy = "give another folder with --out"
        if path.exists():
            found = dict(leaves(read_json(path, "the settings of these results", remedy), lists=False))
            ours = dict(leaves(self.origin, lists=False))
            changed = []
            for key in {**found, **ours}:
                if found.get(key) != ours.get(key):
                    changed.append(f"{key} (was {found.get(key)!r})")

            if changed:
                raise UserError(f"{path}: results of other settings: {', '.join(changed)}; {remedy}")
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--out {folder}: is not empty and holds no {SETTINGS_FILE}; {remedy}")

        atomic_write_json(path, self.origin)
        if isinstance(generated, Generated):
            generated.folder = folder
            generated.sha256 = sha256_json(self.origin)

        return folder

    def features(self, metric: FeatureMetric, images: ImageSet, rows: range) -> Float[np.ndarray, "n d"]:
        """Return the features of one part, computed now if they are not on disk."""
        name = f"{metric.features}-{sha256_json(metric.provenance)[:12]}"
        folder = self.run.folder.root / "evaluation" / "features" / name / images.sha256[:16]
        path = folder / f"{rows.start:08d}-{rows.stop:08d}.npy"
        if not path.exists():
            found = metric.network.encode(images.images(rows))
            atomic_write(path, lambda temporary: np.save(temporary, found))

        return np.load(path, allow_pickle=False)

    def all_features(
        self, metric: FeatureMetric, images: ImageSet, bucket: Bucket | None = None
    ) -> Float[Tensor, "n d"]:
        """Return the features of all images, or of those of one bucket."""
        found = [self.features(metric, images, rows) for rows in parts(images, bucket)]
        return torch.from_numpy(np.concatenate(found))

    def compute_parts(self, rank: int, world: int) -> None:
        """Generate this rank's parts of the samples, and compute the features of its parts of all sets."""
        sets: list[ImageSet] = [self.generated, self.reference, *self.known]
        with Bars(show=not rank) as bars:
            for images in sets:
                metrics = self.by_features
                if images in self.known:
                    metrics = metrics[:1]  # memorisation() takes the first one's features

                own = parts(images)[rank::world]
                task = bars.add_task(images.name, total=sum(map(len, own)))
                for rows in own:
                    progress = bars.from_here(task)
                    if isinstance(images, Generated):
                        images.images(rows, progress)  # generates them if they are not on disk

                    for metric in metrics:
                        self.features(metric, images, rows)

                    progress(len(rows))

    def scores(self, bucket: Bucket | None = None) -> dict[str, dict[str, Any]]:
        """Compute all metrics from the finished parts; if two have one name, the second one's params follow it.

        Args:
            bucket: takes the images of this bucket alone, and leaves metrics out that need more; None takes all.
        """
        found: dict[str, dict[str, Any]] = {}
        num = min(len(self.generated.sections.get(bucket, ())), len(self.reference.sections.get(bucket, ())))
        for plugin, metric in self.metrics:
            values: Any
            if bucket and num < getattr(metric, "min_images", 1):
                continue

            if isinstance(metric, FeatureMetric):
                generated = self.all_features(metric, self.generated, bucket)
                real = self.all_features(metric, self.reference, bucket)
                values = metric.scores(generated.to(metric.device), real.to(metric.device))
            else:
                if bucket:
                    metric.reset()

                self._update(metric, self.reference, bucket, real=True)
                self._update(metric, self.generated, bucket, real=False)
                values = metric.scores() if hasattr(metric, "scores") else metric.compute()

            if not isinstance(values, dict):
                values = {plugin.name: values}

            for key, value in values.items():
                if key in found:
                    key = f"{key} {json.dumps(plugin.params)}"

                if not isinstance(value, Score):
                    value = Score(float(value))

                found[key] = value._asdict()

        return found

    def _update(self, metric: Any, images: ImageSet, bucket: Bucket | None, *, real: bool) -> None:
        for rows in parts(images, bucket):
            more = {}
            if hasattr(metric, "captioned") and isinstance(images, Generated):
                more["captions"] = images.given(rows, "caption")

            metric.update(images.images(rows), **more, real=real)

    def memorisation(self) -> dict[str, Any] | None:
        """Find the training images nearest to each sample; write a grid of the closest samples beside those images.

        Returns:
            None without held-out or training images. ``share_nearer`` is the share of samples whose distance
            to the nearest training image is below the ``NEAR_QUANTILE`` of held-out images' distances. About
            ``NEAR_QUANTILE`` is expected of new images.
        """
        if not self.known:
            return None

        metric = self.by_features[0]
        train_images, held_out = self.known
        train = self.all_features(metric, train_images)
        distances, neighbours = nearest(self.all_features(metric, self.generated), train, NUM_NEIGHBOURS)
        closest = distances[:, 0]
        distances, _ = nearest(self.all_features(metric, held_out), train, 1)
        of_held_out = distances[:, 0]
        grid = []
        for row in closest.argsort()[:NUM_SUSPECTS].tolist():
            images = [_image(self.generated, row)]
            for other in neighbours[row].tolist():
                images.append(_image(train_images, other))

            grid.append((f"sample {row}: {float(closest[row]):.3g}", images))

        title = "Closest samples, each beside its nearest training images"
        credit = self.run.manifest.attribution
        footer = f"Trained on: {credit}" if credit else ""
        scale = scale_of(_image(self.generated, 0))
        save_png(self.folder / "neighbours.png", labelled_grid(grid, scale, title, footer=footer))
        is_near = closest < of_held_out.quantile(NEAR_QUANTILE)
        return {
            "features": metric.features,
            "num_train": train_images.num,
            "num_held_out": held_out.num,
            "share_nearer": float(is_near.double().mean()),
            "expected_share": NEAR_QUANTILE,
            "median_distance": float(closest.median()),
            "median_distance_of_held_out": float(of_held_out.median()),
        }

    def write(self) -> Results:
        """Compute everything, and write and return ``evaluation.json``."""
        scores = self.scores()
        memorised = self.memorisation()
        generated = self.generated
        real = self.reference
        document = Results(
            {
                **self.origin,
                "num_generated": generated.num,
                "image_shape": list(generated.shape),
                "reference": {"images": real.name, "num": real.num, "sha256": real.sha256},
                "metrics": [asdict(plugin) for plugin in self.settings.metrics],
                "features": [metric.provenance for metric in self.by_features],
                "scores": scores,
                "memorisation": memorised,
                "device": f"{platform.processor() or platform.machine()}, torch {torch.__version__}",
            }
        )
        for bucket, rows in generated.sections.items():
            if bucket is not None:
                document.setdefault("buckets", {})[bucket.name] = {
                    "num_generated": len(rows),
                    "num_reference": len(real.sections.get(bucket, ())),
                    "scores": self.scores(bucket),
                }

        path = self.folder / RESULT_FILE
        if path.exists():  # of the same images; other metrics or another reference get a file of their own
            before = read_json(path, "earlier scores", "delete it")
            compared = [document["metrics"], document["reference"]]
            if [before.get("metrics"), before.get("reference")] != compared:
                path = path.with_stem(f"{path.stem}-{sha256_json(compared)[:8]}")

        atomic_write_json(path, document)
        document.path = path
        return document


def _image(images: ImageSet, row: int) -> UInt8[np.ndarray, "h w 3"]:
    rows = next(rows for rows in parts(images) if row in rows)
    return images.images(rows)[row - rows.start]


def _commit() -> str:
    """Commit of this package's repository; ``unknown`` outside of one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return "unknown"

    told = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def evaluate(run: Run, images: str | Path | None, out: str | Path | None) -> Results | None:
    """Generate and compare; see ``Evaluation``. All ranks of torchrun call it; only rank zero gets a result."""
    mine = Ranks.read()
    if mine.world_size == 1:
        evaluation = Evaluation(run, images, out)
        evaluation.compute_parts(0, 1)
        return evaluation.write()

    # On CPUs, because ranks only wait for each other's files.
    distributed.init_process_group("gloo", timeout=timedelta(days=7))
    try:
        if mine.rank:
            distributed.barrier()  # rank zero makes the folder, or says why not

        evaluation = Evaluation(run, images, out)
        if not mine.rank:
            distributed.barrier()

        evaluation.compute_parts(mine.rank, mine.world_size)
        distributed.barrier()
    finally:
        distributed.destroy_process_group()

    # After leaving the group: within it, metrics would synchronise with the other ranks.
    return None if mine.rank else evaluation.write()
