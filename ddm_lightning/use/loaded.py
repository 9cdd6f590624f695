"""What ``DecentralizedEnsemble`` computes: its networks and settings, and the samples of rows of conditions.

How users open, call and save it is in ``use.ensemble``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor, nn

from ddm_lightning.core.buckets import Bucket, Size, nearest
from ddm_lightning.core.devices import DTYPES, configure_cuda, own_defaults, resolve_precision
from ddm_lightning.core.errors import UserError, note
from ddm_lightning.core.registry import IMAGE_ENCODERS
from ddm_lightning.encoders.interfaces import StoredForm, shape_of
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import About, EnsembleManifest
from ddm_lightning.ensemble.sampler import sample
from ddm_lightning.ensemble.velocity import Cost, Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.members.flops import flops_per_sample
from ddm_lightning.members.meta import ArtifactMeta
from ddm_lightning.use import call
from ddm_lightning.use.rows import Rows, built_encoder, listed, rows_without_prompts, spread, text_condition
from ddm_lightning.use.settings import resolve

if TYPE_CHECKING:
    from typing_extensions import Self

# Images computed at once; the number does not change them.
BATCH_SIZE = 64


class LoadedEnsemble:
    """Experts, router and encoders with settings of sampling.

    Args:
        manifest: members, and settings in the field ``about``, as ``manifest_with_about`` or ``resolve`` returns it.
        device: where to sample.
    """

    def __init__(self, manifest: EnsembleManifest, device: torch.device | str = "cpu") -> None:
        self.manifest = manifest
        self.device = torch.device(device)
        self._progress_bar_config: dict[str, Any] = {}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.about.name!r}, members={list(self.manifest.folders)}, "
            f"condition={self.meta.condition.kind!r}, x_shape={self.meta.x_shape})"
        )

    @property
    def about(self) -> About:
        """Name, credit, classes and defaults."""
        return self.manifest.description

    @property
    def meta(self) -> ArtifactMeta:
        """The first expert's ``member.json``; all experts share x_shape, condition, timestep_shift and encoders."""
        return self.manifest.meta

    @property
    def credit_line(self) -> str:
        """Credit of the data, to print below images; empty if none is due."""
        if self.about.credit:
            return f"Trained on: {self.about.credit}"

        return ""

    @cached_property
    def field(self) -> Ensemble:
        """Experts and router as one velocity field; loaded on first use.

        Raises:
            UserError: an artifact is damaged or unusable.
        """
        return load_ensemble(self.manifest, self.device, self.about.sample.resident_experts)

    @property
    def cost(self) -> Cost:
        """Cost of the images sampled so far."""
        return self.field.cost(self.meta.condition)

    @property
    def dtype(self) -> torch.dtype:
        """Type in which the networks compute; weights, times and velocities are float32."""
        return DTYPES[resolve_precision(self.about.sample.precision, self.device)]

    @property
    def experts(self) -> list[nn.Module]:
        """The experts' networks."""
        return list(self.field.experts)

    @property
    def router(self) -> nn.Module | None:
        """The router's network, if there is one."""
        return self.field.router

    @own_defaults()
    def to(self, device: Any = None, dtype: Any = None) -> Self:
        """Load all networks onto a device, and choose the dtype in which they compute.

        Args:
            device, dtype: as in ``from_pretrained``, in any order. What is not given stays.

        Raises:
            UserError: torch cannot use them, and the ensemble stays as it is; or as ``field``.
        """
        usable, chosen = call.device_and_dtype(device, dtype)
        if chosen is not None:
            (precision,) = (name for name, dtype in DTYPES.items() if dtype == chosen)
            self.manifest = resolve(self.manifest, precision=precision)
        if usable is None:
            return self
        if usable.type == "cuda":
            configure_cuda()

        vars(self).pop("field", None)  # first, to free its memory
        self.field = load_ensemble(self.manifest, usable, self.about.sample.resident_experts)
        self.device = usable
        return self

    def with_settings(
        self,
        overrides: Sequence[str] = (),
        source: str = "sample",
        factors: Sequence[float] | None = None,
        **arguments: Any,
    ) -> Self:
        """A copy with other settings; it shares the networks.

        Args:
            overrides, source, arguments: as in ``resolve``.
            factors: multiply the clusters' weights; see ``Ensemble.reweighted``.

        Raises:
            UserError: as ``resolve`` and ``Ensemble.reweighted``.
        """
        changed = copy(self)
        changed.manifest = resolve(self.manifest, overrides, source, **arguments)
        changed.field = self.field
        if factors is not None:
            changed.field = self.field.reweighted(listed(factors))

        return changed

    def latents(
        self, condition: Condition | None, num: int, x_shape: tuple[int, int, int] | None = None, **more: Any
    ) -> Float[Tensor, "num c h w"]:
        """Generate ``num`` samples with the ensemble's settings. Threads that share the networks take turns.

        Args:
            condition: one per sample, or None for the null condition in all.
            num: number of samples.
            x_shape: channels, height and width of a sample; None for the experts' own.
            more: ``batch_size`` and the optional arguments of ``sampler.sample``, such as ``keys``.

        Returns:
            x_0, float32, on the CPU.

        Raises:
            UserError: as ``sampler.sample``.
        """
        x_shape = x_shape or self.meta.x_shape
        with self.field.lock:
            return sample(
                self.field,
                condition,
                num,
                x_shape,
                self.about.sample,
                shift=self.meta.shift_for(x_shape),
                **{"seed": self.about.seed, **more},
            )

    def decode(self, x_0: Float[Tensor, "n c h w"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Decode samples to images."""
        return built_encoder(IMAGE_ENCODERS, self.meta.image_encoder).decode(x_0)

    @cached_property
    def image_size(self) -> tuple[int, int]:
        """Height and width of images of ``meta.x_shape``, in pixels."""
        return self._decoded_size(self.meta.x_shape)

    def _decoded_size(self, x_shape: tuple[int, int, int]) -> Size:
        _, height, width, _ = self.decode(torch.zeros(1, *x_shape)).shape
        return height, width

    def bucket_of(self, size: Size | None = None, like: Size | None = None) -> Bucket | None:
        """Find the shape of images of a size, and note if it is another; None for the only one that there is.

        Args:
            size: height and width in pixels; None is the square if that is a bucket, otherwise the nearest to it.
            like: size of an image, whose nearest bucket takes the place of the square.

        Raises:
            UserError: there is one shape and ``size`` is another; or with ``sample.exact``, the encoder or a network
                does not take it.
        """
        meta = self.meta
        if size is None and not meta.buckets:
            return None

        buckets = meta.buckets or (Bucket(*self.image_size, meta.x_shape),)
        sizes = [bucket.size for bucket in buckets]
        if size is None:
            shapes = [bucket.x_shape for bucket in buckets]
            if like is None and meta.x_shape in shapes:
                return buckets[shapes.index(meta.x_shape)]

            return buckets[nearest(sizes, *(like or (1, 1)))]

        if size in sizes:
            return buckets[sizes.index(size)]
        if self.about.sample.exact:
            return self._exactly(*size)

        name = "{} x {} pixels".format(*size)
        found = buckets[nearest(sizes, *size)]
        if not meta.buckets:
            raise UserError(
                f"{name}: {self.about.name} makes images of {found.height} x {found.width} pixels; leave height and "
                "width out and resize the images, or set sample.exact=true to try"
            )

        note(f"{name}: no such images in training, so they are {found.name}; sample.exact=true takes the size as it is")
        return found

    def _exactly(self, height: int, width: int) -> Bucket:
        encoder = built_encoder(IMAGE_ENCODERS, self.meta.image_encoder)
        try:
            bucket = Bucket(height, width, shape_of(encoder, height, width))
            decoded = self._decoded_size(bucket.x_shape)
            if decoded != (height, width):
                raise ValueError(f"the image encoder makes images of {decoded}")

            for network, meta in zip(self.field.networks, self.manifest.metas.values(), strict=True):
                flops_per_sample(network, bucket.x_shape, meta.condition, backward=False)
        except (UserError, ValueError) as error:
            problem, _, _ = str(error).partition(";")
            raise UserError(f"{height} x {width} pixels: {problem}; give another size") from None

        return bucket

    def encode(self, image: Any, size: Size | None = None) -> Float[Tensor, "n c h w"]:
        """Encode images to samples x_0, the mean if the encoder gives a posterior.

        Args:
            image: as in ``call.images_of``.
            size: height and width to which images are stretched (Lanczos); None is ``image_size``.

        Raises:
            UserError: another type, shape or range, or the encoder cannot run here.
        """
        height, width = size or self.image_size
        stretched = []
        for one in call.images_of(image):
            stretched.append(np.asarray(one.resize((width, height), Image.Resampling.LANCZOS)))

        encoder = built_encoder(IMAGE_ENCODERS, self.meta.image_encoder)
        stored = encoder.encode(np.stack(stretched))
        return StoredForm(encoder.stores, self.meta.normalisation).mean(torch.from_numpy(stored))

    def rows(
        self,
        prompts: Sequence[str] = (),
        classes: Sequence[str | int] = (),
        negative_prompts: Sequence[str] = (),
        image: Any = None,
        size: Size | None = None,
    ) -> Rows:
        """Rows of a grid: one per prompt or class; by default the first ``MAX_ROWS`` classes, or one null condition.

        Args:
            prompts: texts.
            classes: names or numbers; a number may be text, unless a class has this name.
            negative_prompts: one for all or one per prompt; an empty text is the null condition.
            image: to start from, one for all or one per row, as in ``encode``; None is noise.
            size: as in ``bucket_of``; without one, all images have the bucket of the first one to start from.

        Raises:
            UserError: not this ensemble's kind of condition, an empty prompt, a class that does not exist, a negative
                prompt without guidance, or another number, type, shape or range; or as ``bucket_of``.
        """
        kind = self.meta.condition.kind
        name = self.about.name
        for word, given in (("prompts", prompts), ("negative_prompt", any(negative_prompts))):
            if given and kind in ("class", "none"):
                raise UserError(f"{name} is conditioned on {kind!r}, not on text; leave {word} out")

        if classes and kind != "class":
            raise UserError(f"{name} is conditioned on {kind!r}, not on class; leave classes out")
        if any(negative_prompts) and self.about.sample.guidance_scale == 1:
            raise UserError("negative_prompt: has no effect without guidance; give a guidance_scale, such as 3.0")

        if not all(map(str.strip, prompts)):
            raise UserError("a prompt is empty; describe an image")

        if prompts:
            rows = Rows(prompts, prompts, text_condition(prompts, self.meta))
        else:
            rows = rows_without_prompts(classes, self.about.class_names, self.meta.condition)

        num_rows = len(rows.labels)
        if any(negative_prompts):
            is_empty = torch.tensor([not text.strip() for text in negative_prompts])
            negative = text_condition(negative_prompts, self.meta).dropped(is_empty)
            rows.negative = negative.rows(spread("negative_prompt", len(negative_prompts), num_rows))

        images = [] if image is None else call.images_of(image)
        bucket = self.bucket_of(size, *[(one.height, one.width) for one in images[:1]])
        if bucket is not None and bucket.x_shape != self.meta.x_shape:
            rows.x_shape = bucket.x_shape
        if images:
            x_0 = self.encode(images, bucket.size if bucket else None)
            rows.start = x_0[spread("image", len(x_0), num_rows)]

        return rows

    def images(
        self,
        rows: Rows,
        num: int,
        progress: Callable[[float], object],
        **more: Any,
    ) -> Iterator[tuple[int, int, UInt8[np.ndarray, "h w 3"]]]:
        """Generate ``num`` images per row, in batches that bound the memory.

        A prompt or class that is given twice gets other images in its second row.

        Args:
            rows: output of ``rows``.
            num: images per row.
            progress: called with the number of finished images, fractional.
            more: as in ``samples``.

        Yields:
            Row, index within the row, and image.
        """
        numbers = range(num * len(rows.labels))
        for first in numbers[::BATCH_SIZE]:
            span = numbers[first : first + BATCH_SIZE]
            more["progress"] = lambda done, first=first: progress(first + done)
            for number, image in zip(span, self.decode(self.samples(rows, num, span, **more)), strict=True):
                yield *divmod(number, num), image

    def samples(self, rows: Rows, num: int, span: range, **more: Any) -> Float[Tensor, "n c h w"]:
        """Generate the samples x_0 of some of the images of ``images``.

        Args:
            rows, num: as in ``images``.
            span: numbers of these images, as in ``Rows.key``.
            more: as in ``latents``; ``batch_size`` is ``BATCH_SIZE`` by default. With one seed per image, each is its
                seed's first image of the row.
        """
        keys = [rows.key(number, num) for number in span]
        if "seed" in more:
            keys = [(noise, 0) for noise, _ in keys]

        places = torch.tensor(span) // num
        return self.latents(
            rows.condition and rows.condition.rows(places),
            len(span),
            rows.x_shape,
            negative=rows.negative and rows.negative.rows(places),
            image=None if rows.start is None else rows.start[places],
            keys=keys,
            **{"batch_size": BATCH_SIZE, **more},
        )
