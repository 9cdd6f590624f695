import fsspec
import pytest


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    """A folder on disk and one behind a URL."""
    if request.param == "local":
        yield str(tmp_path / "data")
        return
    yield "memory://bucket/data"
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
