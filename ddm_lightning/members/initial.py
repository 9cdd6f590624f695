"""Weights that members start from (``init_from``): fetched once, checked as a stranger's, and kept in the run folder.

``initial/SHA256/model.safetensors`` is named by its hash. ``initial/KEY.json`` says which hash a source had; from then
on the run does not look at the source again. ``prepare`` sends both to ``remote``, so islands need no access to the
source.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor, nn

from ddm_lightning.config.experiment import InitConfig, PluginConfig
from ddm_lightning.core import checks, remote
from ddm_lightning.core.errors import DOWNLOADS, UserError, first_line, redacted
from ddm_lightning.core.files import atomic_write_json, move_folder, read_json, sha256_file, sha256_json
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.core.weights import (
    in_short,
    load_weights,
    misfits,
    prefixed,
    read_header,
    save_weights,
)
from ddm_lightning.members.member import Member
from ddm_lightning.members.meta import WEIGHTS_FILE, read_meta
from ddm_lightning.members.roles import MONOLITH, ROUTER
from ddm_lightning.members.run_folder import MEMBER_FILE, RunFolder

_OF_DIFFUSERS = re.compile(r"diffusion_pytorch_model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True)
class _Recorded:
    """Which hash a source had."""

    source: checks.Text
    sha256: checks.Sha256


class Initial:
    """Weights that one member starts from.

    Args:
        member: the member.
        config: names them.
        folder: keeps them.
        url: the run's URL; None if there is none.

    Raises:
        UserError: the source has no description of its network, or another network's.
    """

    def __init__(self, member: Member, config: InitConfig, folder: RunFolder, url: str | None) -> None:
        self.config = config
        self.root = folder.initial
        self.source = redacted(config.source)
        """Where they come from, without a password."""
        self.differing: list[str] = []
        """Lines on weights that start anew or are skipped, and on params that differ; ``fitting`` fills it in."""
        self._url = url and f"{url}/{self.root.name}"
        # The member whose weights are taken, if the source is a run.
        if member.role.classifies:
            self._of_run = ROUTER
        else:
            self._of_run = MONOLITH

        self._remedy = f"remove {self.root} to fetch the weights again"
        self._record = self.root / f"{sha256_json([self.source, self._of_run])[:16]}.json"
        self.member = replace(member, network=self._configured(member), initial=self)
        """The member, with the params of the source's network if its own has none and can take them."""

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the weights, fixed when the run fetches them for the first time.

        Raises:
            UserError: the source is unknown or damaged, or has another hash than the experiment says.
        """
        if self.is_recorded():
            found = checks.read_record(self._record, _Recorded, "the record of initial weights", self._remedy).sha256
        else:
            found = self._fetch()
            atomic_write_json(self._record, asdict(_Recorded(self.source, found)))

        self._require(self.config.sha256 or found, found)
        return found

    @cached_property
    def path(self) -> Path:
        """File of the weights, in the run folder.

        Raises:
            UserError: they cannot be fetched, or have changed since the run fetched them.
        """
        path = self.root / self.sha256 / WEIGHTS_FILE
        if not path.exists():
            self._pull(*self._described(path.parent), path)
        if not path.exists():
            self._require(self.sha256, self._fetch())

        return path

    def _configured(self, member: Member) -> PluginConfig:
        """The member's network, with the params that the source describes; the weights are not fetched for this."""
        network = member.network
        params_of = None if member.role.classifies else getattr(EXPERTS.get(network.name), "params_of", None)
        if network.params or params_of is None:
            return network

        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            if self.is_recorded():
                folder = self.root / self.sha256
                self._pull(*(path for path in self._described(folder) if not path.exists()))
            else:
                DOWNLOADS[scratch] = self.source
                with remote.reaching(f"{self.source} cannot be read"):
                    self._describe(folder)

            member_file, config_file = self._described(folder)
            if member_file.exists():
                params = read_meta(folder).params
            else:
                config = read_json(
                    config_file, "the model's configuration", "give a model's folder, such as PIPELINE/transformer"
                )
                try:
                    params = params_of(config)
                except (ValueError, AttributeError) as error:  # the latter for JSON of another form
                    raise self._error(f"{config_file.name}: {first_line(error)}; give another model") from None

        return replace(network, params=params)

    @staticmethod
    def _described(folder: Path) -> tuple[Path, Path]:
        """Files of which one describes the weights: an artifact's, or that of a model of diffusers."""
        return folder / MEMBER_FILE, folder / "config.json"

    def is_recorded(self) -> bool:
        """Whether this folder, or the run's URL, says which hash the source had."""
        if not self._record.exists():
            self._pull(self._record)

        return self._record.exists()

    def check(self, network: nn.Module) -> None:
        """Compare the weights' description, names and shapes with a network, perhaps on the meta device.

        Weights that this call fetched and refuses are removed.

        Raises:
            UserError: as ``fitting``, but for the values.
        """
        is_new = not self.is_recorded()
        try:
            self.fitting(network, header_only=True)
        except UserError:
            if is_new and self._record.exists():
                shutil.rmtree(self.root / self.sha256)
                self._record.unlink()
                self._remove_if_empty()

            raise

    def load(self, network: nn.Module) -> None:
        """Load the weights into a network.

        Raises:
            UserError: as ``fitting``.
        """
        network.load_state_dict(self.fitting(network), strict=False)

    def fitting(self, network: nn.Module, *, header_only: bool = False) -> dict[str, Tensor]:
        """Return the weights that fit a network, by their names in it, and note what is ``differing``.

        Args:
            network: perhaps on the meta device.
            header_only: whether to return tensors without data.

        Raises:
            UserError: as ``path``; they are damaged, not finite or of another class, or do not fit.
        """
        path = self.path
        remedy = self._remedy
        if header_only:
            weights = read_header(path, remedy)
        else:
            weights = load_weights(path, self.sha256, remedy)

        notes = self._check_description(getattr(network, "prediction", None))
        needs = network.state_dict()
        named = prefixed(weights, network)
        if named is not weights:  # weights of the model that the network wraps; the wrapper's own are not needed
            needs = {name: value for name, value in needs.items() if name.startswith(str(network.wraps))}

        odd = misfits(named, needs)
        fitting = {}
        for name, value in named.items():
            if name not in odd:
                fitting[name] = value

        if odd and not (self.config.partial and fitting):
            if self.config.partial:
                more = ""
            else:
                more = ", or let these start anew: init_from: {source: …, partial: true}"

            raise self._error(f"the weights do not fit: {in_short(odd)}; take weights of this network{more}")

        fates = []
        for name, text in odd.items():
            fates.append(f"{text}: {'starts anew' if name in needs else 'left out'}")

        self.differing = [*fates, *notes]
        return fitting

    def _check_description(self, prediction: str | None) -> list[str]:
        """Compare an artifact's description with the member's network, which has this prediction type.

        Returns:
            Params that differ.
        """
        if not self.path.with_name(MEMBER_FILE).exists():
            return []

        meta = read_meta(self.path.parent)
        own = self.member.network
        if meta.lora is not None:
            raise self._error("is an adapter; give its base, or the weights of another whole network")

        wanted: dict[str, str | None] = {"network": own.name}
        if not self.config.partial:
            wanted["path"] = self.member.path
            if not self.member.role.classifies:
                wanted["prediction"] = prediction

        for what, now in wanted.items():
            was = getattr(meta, what)
            if was != now:
                raise self._error(f"its {what} is {was!r}, the experiment's {now!r}; take weights of this {what}")

        params = own.params
        return [
            f"the network's {key} is {params.get(key)!r}, and was {meta.params.get(key)!r}"
            for key in {**meta.params, **params}
            if meta.params.get(key) != params.get(key)
        ]

    def _pull(self, *paths: Path) -> None:
        """Bring files that the run's URL has."""
        for path in paths if self._url else ():
            with remote.reaching(f"{self.source} cannot be read"), suppress(FileNotFoundError):
                remote.get(f"{self._url}/{path.relative_to(self.root).as_posix()}", path)

    def _fetch(self) -> str:
        """Fetch and check the weights; return their hash."""
        self.root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=self.root))
        if self.source.endswith(".safetensors"):  # a file, not a folder of one
            DOWNLOADS[str(temporary / WEIGHTS_FILE)] = self.source

        DOWNLOADS[str(temporary)] = self.source
        try:
            with remote.reaching(f"{self.source} cannot be read"):
                self._bring(temporary)

            weights = temporary / WEIGHTS_FILE
            if (temporary / MEMBER_FILE).exists():
                found = read_meta(temporary).model_sha256
            else:
                found = sha256_file(weights)

            # Refuses weights that are not finite, too.
            load_weights(weights, found, "give other weights; they are never unpickled")
            self._require(self.config.sha256 or found, found)
            if not (self.root / found).exists():
                temporary.chmod(0o755)
                move_folder(temporary, self.root / found)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            self._remove_if_empty()

        return found

    def _remove_if_empty(self) -> None:
        """Remove the folders of a new run whose weights are refused."""
        with suppress(OSError):  # not empty
            self.root.rmdir()
            self.root.parent.rmdir()

    def _describe(self, folder: Path) -> str:
        """Fetch the description of the weights, if there is one; return where a single file's or an artifact's are.

        Raises:
            OSError: the source cannot be read.
        """
        source = self.config.source.rstrip("/")
        if source.endswith(".safetensors") or Path(source).expanduser().is_file():
            return source

        member_file, config_file = self._described(folder)
        for place in (source, f"{source}/members/{self._of_run}/artifact"):
            with suppress(FileNotFoundError):
                remote.get(f"{place}/{member_file.name}", member_file)
                return f"{place}/{WEIGHTS_FILE}"

        with suppress(FileNotFoundError):
            remote.get(f"{source}/{config_file.name}", config_file)

        return ""

    def _bring(self, folder: Path) -> None:
        """Fetch the weights as one file, and an artifact's description.

        Raises:
            OSError: the source cannot be read.
        """
        source = self.config.source.rstrip("/")
        target = folder / WEIGHTS_FILE
        found = self._describe(folder)
        parts = []
        if not found:
            parts = sorted(filter(_OF_DIFFUSERS.fullmatch, remote.files(source)))
        if len(parts) == 1:
            found = f"{source}/{parts[0]}"

        if found:
            remote.get(found, target)
        elif parts:
            state: dict[str, Tensor] = {}
            for name in (part for part in parts if "-of-" in part):
                remote.get(f"{source}/{name}", folder / name)
                state |= load_weights(folder / name, sha256_file(folder / name), "copy the model again")
                (folder / name).unlink()

            save_weights(target, state, self.source)
        else:
            raise self._error(
                f"does not exist, or is no artifact, no run whose {self._of_run} is finished, no .safetensors file and "
                "no folder of diffusers with such files; give one of them (weights are never unpickled)"
            )

    def _require(self, wanted: str, found: str) -> None:
        if found != wanted:
            raise self._error(
                f"the weights have SHA-256 {found[:12]}…, not {wanted[:12]}…; put the right ones there, or use another "
                "folder with run_dir=…"
            )

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self.source}: {problem}")
