import re
import threading

import pytest
from shards.mds import damage, write_mds

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import hash_file, sha256_file
from ddm_lightning.shards import verify
from ddm_lightning.shards.mosaic import decompress
from ddm_lightning.shards.verify import verify_shards


@pytest.fixture
def folder(tmp_path):
    return write_mds(tmp_path / "mds", range(100))


@pytest.mark.parametrize("kind", ["flipped", "truncated", "grown", "missing"])
def test_a_damaged_shard_is_named(folder, kind):
    index_sha256 = sha256_file(folder / "index.json")
    assert verify_shards(folder, index_sha256=index_sha256) == 100
    victim = folder / damage(folder, kind)
    if kind == "flipped":
        assert verify_shards(folder, hashes=False) == 100, "only the hash can see it"

    with pytest.raises(UserError, match=rf"^{victim}: shard is (missing|damaged).*run prepare again.*$"):
        verify_shards(folder, hashes=kind == "flipped")


def test_shards_are_hashed_together_and_the_first_damaged_one_is_named(folder, monkeypatch):
    first, _, later, *_ = sorted(folder.glob("*.mds"))
    for path in (first, later):
        path.write_bytes(b"x" + path.read_bytes()[1:])

    is_hashed = threading.Event()

    def hash_first_last(path, algorithm):
        assert path != first or is_hashed.wait(60)
        digest = hash_file(path, algorithm)
        if path == later:
            is_hashed.set()

        return digest

    monkeypatch.setattr(verify, "hash_file", hash_first_last)
    with pytest.raises(UserError, match=re.escape(str(first))):
        verify_shards(folder)


def test_compressed_shards_may_be_present_in_either_form(tmp_path):
    write_mds(tmp_path, range(9), compression="zstd", shard_bytes=1 << 16)
    (packed,) = tmp_path.glob("shard.*")
    whole = packed.read_bytes()
    raw = packed.with_suffix("")
    assert verify_shards(tmp_path) == 9
    raw.write_bytes(decompress("zstd", whole))
    assert verify_shards(tmp_path) == 9

    packed.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match=rf"^{packed}: shard is damaged"):
        verify_shards(tmp_path)

    packed.unlink()
    assert verify_shards(tmp_path) == 9
    damage(tmp_path, "flipped")
    with pytest.raises(UserError, match=rf"^{raw}: shard is damaged"):
        verify_shards(tmp_path)
