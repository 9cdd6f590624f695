import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from source_files import write

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.sources.urls import Files, content_or_error

KEY = "key 'prepare.source.params.path'"


class ServerDownError(Exception):
    """Of no known base class, as those of some back ends."""


class Refusing(LocalFileSystem):
    protocol = ("refusing",)

    def info(self, path, **kwargs):
        raise ServerDownError("503\nslow down")


fsspec.register_implementation("refusing", Refusing, clobber=True)
fsspec.register_implementation("absent", "no_such_package_there.FileSystem", errtxt="Install it", clobber=True)


class Store(AbstractFileSystem):
    """Breaks ``num_breaks`` times; marks its folder as S3's console does, and shows a link as SFTP does."""

    protocol = "breaking"
    num_breaks = 0

    def _reach(self):
        if Store.num_breaks:
            Store.num_breaks -= 1
            raise ConnectionError("reset by peer")

    def info(self, path, **kwargs):
        return {"name": path, "type": "file" if path.endswith(".png") else "directory", "size": 1}

    def ls(self, path, detail=True, **kwargs):
        entries = {"": "file", "a.png": "file", "b.png": "link", "sub": "directory"}
        if path.endswith("sub"):
            self._reach()
            entries = {"c.png": "file"}
        return [{"name": f"{path}/{name}", "type": kind, "size": 1} for name, kind in entries.items()]

    def cat_file(self, path, **kwargs):
        self._reach()
        return path.encode()


fsspec.register_implementation("breaking", Store, clobber=True)


def test_a_store_that_breaks_is_asked_again_and_no_image_is_lost(monkeypatch):
    monkeypatch.setattr(remote.time, "sleep", lambda _: None)
    files = Files("breaking://images")
    assert list(files.states) == ["a.png", "b.png", "sub/c.png"]
    monkeypatch.setattr(Store, "num_breaks", 1)
    with pytest.raises(UserError, match=r"'breaking://images' cannot be read: .*reset by peer; fix"):
        _ = Files("breaking://images").states
    Store.num_breaks = 2
    assert list(files.contents(["a.png"])) == [b"images/a.png"]
    Store.num_breaks = 1000
    with pytest.raises(UserError, match=r"'breaking://images: a\.png' cannot be read: .*reset by peer; fix"):
        list(files.contents(["a.png"]))


def test_files_are_listed_by_their_path_in_the_folder(folder):
    names = ["b.txt", "a/x [1].txt", "a/deep/y*.txt", ".hidden", "a/.git/z.txt", "__MACOSX/b.txt"]
    write(folder, {name: name for name in names})
    for path in (folder, folder + "/"):
        files = Files(path)
        assert list(files.states) == ["a/deep/y*.txt", "a/x [1].txt", "b.txt"]
        assert list(files.contents(list(files.states))) == [name.encode() for name in files.states]
        assert files.content("a/x [1].txt") == b"a/x [1].txt" == files.open("a/x [1].txt").read()
        assert files.is_local == ("memory" not in folder)


def test_one_file_and_patterns(folder):
    write(folder, {"0.tar": "zero", "1.tar": "one", "1.json": "{}", "sub/2.tar": "two"})
    assert list(Files(f"{folder}/1.tar").states) == ["1.tar"]
    assert Files(f"{folder}/1.tar").content("1.tar") == b"one"
    pattern = Files(f"{folder}/*.tar")
    assert list(pattern.states) == ["0.tar", "1.tar"] and pattern.content("0.tar") == b"zero"
    assert list(Files(f"{folder}/s*/*.tar").states) == ["sub/2.tar"]


@pytest.mark.parametrize("name", ["set [v2]", "50%", "a*b", "who?", "a#b", "a b"])
def test_what_exists_under_its_own_name_is_no_pattern(folder, name):
    write(folder, {f"{name}/1.tar": "own", "set v/1.tar": "other", "axb/1.tar": "other", "whom/1.tar": "other"})
    for path in (f"{folder}/{name}", f"{folder}/{name}/1.tar", f"{folder}/{name}/*.tar"):
        files = Files(path)
        assert list(files.states) == ["1.tar"] and files.content("1.tar") == b"own"
    for path in (f"{folder}/{name}/2.tar", f"{folder}/{name}/2/*.tar"):
        with pytest.raises(UserError, match=r"does not exist|no file in"):
            Files(path).ending(".tar")


@pytest.fixture
def server():
    """The address of a web server that has every file, and the paths for which it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(b"ok")

        def do_HEAD(self):
            self.do_GET()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", asked
        running.shutdown()


def test_the_address_of_a_file_arrives_as_it_is_written(server):
    address, asked = server
    as_they_are = ["/a%2Fb", "/a%40b", "/a%7Eb", "/a%2fb?x=%2B+c&sig=a%3D/b", "/a::b", "/a[1]", "/x?u=http://y::z"]
    for path in as_they_are:
        assert content_or_error(address + path) == b"ok" and asked.pop() == path
    for path, expected in {"/a b": "/a%20b", "/ü": "/%C3%BC", "/a%20b c": "/a%20b%20c"}.items():
        assert content_or_error(address + path) == b"ok" and asked.pop() == expected


def test_a_signed_address_of_one_file_is_no_pattern_and_its_signature_is_no_name(server):
    address, asked = server
    files = Files(f"{address}/d/x.tar?sig=a/b%2Fc")
    assert files.ending(".tar") == ["x.tar"] and files.content("x.tar") == b"ok"
    assert set(asked) == {"/d/x.tar?sig=a/b%2Fc"}


def test_links_out_of_a_folder_are_refused_or_followed(tmp_path):
    write(str(tmp_path), {"in/a.txt": "a", "out/b.txt": "b", "out/deep/c.txt": "c"})
    (tmp_path / "path").symlink_to(tmp_path / "in")
    links = {"in/inside": "in/a.txt", "in/.hidden": "out/b.txt", "in/linked": "out", "out/up": "in", "out/round": "out"}
    for name, target in links.items():
        (tmp_path / name).symlink_to(tmp_path / target)
    with pytest.raises(UserError, match=r"path/linked is a link out of this folder, to .*/out; remove it, or set"):
        _ = Files(str(tmp_path / "path")).states
    files = Files(str(tmp_path / "path"), follow_links=True)
    assert list(files.states) == ["a.txt", "inside", "linked/b.txt", "linked/deep/c.txt"]
    assert list(files.contents(list(files.states))) == [b"a", b"a", b"b", b"c"]
    (tmp_path / "in" / "linked").unlink()
    (tmp_path / "in" / "b.txt").symlink_to(tmp_path / "out" / "b.txt")
    with pytest.raises(UserError, match=r"b\.txt is a link out"):
        _ = Files(f"{tmp_path}/in/*.txt").states
    assert Files(f"{tmp_path}/in/b.txt").content("b.txt") == b"b", "named by the user"


def test_the_state_of_a_file_changes_with_the_file(tmp_path):
    write(str(tmp_path), {"a": "same size", "b": "other"})
    before = Files(str(tmp_path)).states
    (tmp_path / "a").write_text("SAME SIZE")
    os.utime(tmp_path / "a", (1, 1))
    (tmp_path / "b").chmod(0o600)
    after = Files(str(tmp_path)).states
    assert before["a"] != after["a"] and before["b"] == after["b"]


def test_a_missing_file_comes_as_what_it_is(folder):
    write(folder, {"a": "1"})
    there, missing = Files(folder).contents(["a", "b"])
    assert there == b"1" and isinstance(missing, FileNotFoundError)
    with pytest.raises(UserError, match="does not exist"):
        Files(folder).open("b")


@pytest.mark.parametrize("source", ["imagefolder", "webdataset", "parquet", "huggingface", "mds"])
@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/nowhere/at/all", "'/nowhere/at/all' does not exist"),
        ("memory://nothing/here", "'memory://nothing/here' does not exist"),
        ("nonsense://bucket/a", "'nonsense://bucket/a' cannot be read: ValueError: Protocol not known: nonsense"),
        ("absent://bucket/a", "'absent://bucket/a' cannot be read: ImportError: Install it"),
        ("refusing:///bucket/a", "'refusing:///bucket/a' cannot be read: ServerDownError: 503 slow down"),
        ("absent://me:secret@host/a", "'absent://me:***@host/a'"),
    ],
)
def test_an_unreadable_url_is_one_line_that_names_url_and_key(source, path, problem):
    with pytest.raises(UserError, match=re.escape(problem)) as refusal:
        SOURCES.build(source, {"path": path})
    assert KEY in str(refusal.value) and "\n" not in str(refusal.value) and "secret" not in str(refusal.value)


@pytest.mark.parametrize("source", ["imagefolder", "webdataset", "parquet", "huggingface", "mds"])
def test_a_folder_without_what_is_looked_for_is_refused(source, folder):
    write(folder, {"notes.txt": "nothing"})
    with pytest.raises(UserError, match=re.escape(KEY)):
        SOURCES.build(source, {"path": folder}).parts()
