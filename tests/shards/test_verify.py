import json
import re
import threading
import time

import pytest
from shards.mds import damage, write_mds

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import hash_file, sha256_file
from ddm_lightning.shards import verify
from ddm_lightning.shards.verify import verify_shards


@pytest.fixture
def folder(tmp_path):
    return write_mds(tmp_path / "mds", range(100))


def test_whole_shards_pass(folder):
    assert len(list(folder.glob("*.mds"))) > 2
    assert verify_shards(folder) == 100
    assert verify_shards(folder, hashes=False, index_sha256=sha256_file(folder / "index.json")) == 100


@pytest.mark.parametrize("kind", ["flipped", "truncated", "grown", "missing"])
def test_a_damaged_shard_is_named(folder, kind):
    victim = folder / damage(folder, kind)
    if kind == "flipped":
        assert verify_shards(folder, hashes=False) == 100, "only the hash can see it"
    with pytest.raises(UserError, match=re.escape(str(victim))) as refusal:
        verify_shards(folder, hashes=kind == "flipped")
    line = str(refusal.value)
    assert "run prepare again" in line and "\n" not in line


def test_the_first_of_several_damaged_shards_is_named(folder, monkeypatch):
    """Although a later one is found out before."""
    first, _, later, *_ = sorted(folder.glob("*.mds"))
    for path in (first, later):
        path.write_bytes(b"x" + path.read_bytes()[1:])

    def hash_late(path, algorithm):
        time.sleep(0.2 * (path == first))
        return hash_file(path, algorithm)

    monkeypatch.setattr(verify, "hash_file", hash_late)
    with pytest.raises(UserError, match=re.escape(str(first))):
        verify_shards(folder)


def test_shards_are_hashed_together(folder, monkeypatch):
    """Each waits until another one is hashed, too."""
    assert len(list(folder.glob("*.mds"))) % 2 == 0
    pair = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(verify, "hash_file", lambda *given: (pair.wait(), hash_file(*given))[1])
    assert verify_shards(folder) == 100


def test_compressed_shards_may_be_present_in_either_form(tmp_path):
    packed, raw = tmp_path / "packed", tmp_path / "raw"
    write_mds(packed, range(100), compression="zstd:3")
    write_mds(raw, range(100))
    assert verify_shards(packed) == 100
    first = sorted(raw.glob("*.mds"))[0]
    index = json.loads((packed / "index.json").read_text())
    raw_index = json.loads((raw / "index.json").read_text())
    # The unpacked file of this writer differs by its header alone, so its entry is taken along.
    index["shards"][0]["raw_data"] = raw_index["shards"][0]["raw_data"]
    (packed / "index.json").write_text(json.dumps(index))
    (packed / first.name).write_bytes(first.read_bytes())
    assert verify_shards(packed) == 100
    zipped = packed / index["shards"][0]["zip_data"]["basename"]
    whole = zipped.read_bytes()
    zipped.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match=re.escape(str(zipped))):
        verify_shards(packed)
    zipped.unlink()
    assert verify_shards(packed) == 100
    (packed / first.name).write_bytes(b"x" + first.read_bytes()[1:])
    with pytest.raises(UserError, match=re.escape(str(packed / first.name))):
        verify_shards(packed)
