"""The share of ``prepare`` of one machine, and what it tells other machines through the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.prepare.ledger import Job, Store
from ddm_lightning.prepare.records import Part


@dataclass(frozen=True)
class Share:
    """Parts and groups whose number modulo ``count`` is ``index`` - 1; all are part 1 of 1."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """Read ``--parts``.

        Raises:
            UserError: it is not ``i/n`` with i from 1 to n.
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise UserError(f"--parts {text}: give the number of this machine and of all machines, such as 1/8 to 8/8")

        return cls(int(index), int(count))

    @property
    def is_first(self) -> bool:
        """Whether this machine fits the clusters and merges."""
        return self.index == 1

    def owner_of(self, number: int) -> int:
        """Return the machine of a part or group."""
        return number % self.count + 1

    def is_own(self, number: int) -> bool:
        """Whether a part or group is this machine's."""
        return self.owner_of(number) == self.index


def agree_on_parts(store: Store, parts: Sequence[Part]) -> None:
    """Publish the list of parts, or compare it with that of other machines.

    Raises:
        UserError: the lists differ.
    """
    address = f"{store.url}/parts.json"
    with remote.reaching():
        is_same = remote.create(address, json.dumps([part.name for part in parts]).encode())

    if not is_same:
        raise UserError(
            f"{address}: lists other parts of the source than this machine finds; give all machines "
            "the same source, or set another remote"
        )


def take_over(store: Store, share: Share, kind: str, jobs: Sequence[Job]) -> set[str]:
    """Take over the ledgers in the store that are of the same inputs; empty this machine's others; name all."""
    there = store.names(kind)
    wanted = [job for job in jobs if job.name in there and not job.ledger.is_stored]
    found = remote.in_threads(lambda job: store.read(job.name), wanted)
    for job, entries in zip(wanted, found, strict=True):
        is_own = share.is_own(job.number)
        if all(name in entries and _is_of(entries[name]["key"], key, is_own) for name, key in job.keys.items()):
            for name, key in job.keys.items():
                entries[name]["key"] = key

            job.ledger.entries = entries
            job.ledger.is_stored = True
        elif is_own:
            store.forget(job.name)

    return there


def _is_of(theirs: str, key: str, is_own: bool) -> bool:
    """Whether keys of work agree. Only its owner compares the fingerprint of a part, which comes first."""
    if is_own:
        return theirs == key

    return theirs.split()[-1] == key.split()[-1]
