"""A stand-in for the Hugging Face hub on this machine: repositories of small files in memory."""

import base64
import gc
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import HfFileSystem, constants, file_download

COMMIT = "0" * 40


class _Handler(BaseHTTPRequestHandler):
    repositories: dict[str, dict[str, bytes]]

    def log_message(self, *_):
        pass

    def answer(self, value, status=200, **headers):
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self):
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = re.fullmatch(r"/api/models/(\w+/\w+)/(preupload|commit|paths-info)/\w+", self.path)
        if self.path == "/api/repos/create":
            asked = json.loads(content)
            if self.headers.get("Authorization") != "Bearer hf_good":
                return self.answer({"error": "Invalid username or password."}, 401)
            name = f"{asked['organization']}/{asked['name']}"
            self.repositories.setdefault(name, {})
            return self.answer({"url": f"{constants.ENDPOINT}/{name}"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        assert found is not None, self.path
        files = self.repositories[found[1]]
        if found[2] == "preupload":
            paths = [file["path"] for file in json.loads(content)["files"]]
            return self.answer(
                {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
            )
        if found[2] == "paths-info":
            paths = re.findall(r"paths=([^&]+)", content.decode().replace("%2F", "/"))
            rows = [{"type": "file", "path": p, "size": len(files[p]), "oid": COMMIT} for p in paths if p in files]
            return self.answer(rows)
        for line in map(json.loads, content.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"{constants.ENDPOINT}/{found[1]}/commit/{COMMIT}"
        return self.answer({"success": True, "commitOid": COMMIT, "commitUrl": url, "pullRequestUrl": None})

    def do_GET(self):
        name, _, rest = re.sub("^/(api/models/)?", "", self.path).partition("/resolve/")
        name = name.partition("/revision/")[0]
        files = self.repositories.get(name.partition("/tree/")[0])
        if files is None:
            return self.answer({}, 404, **{"X-Error-Code": "RepoNotFound"})
        if "/tree/" in name:
            folder = name.partition("?")[0].partition("/tree/")[2].partition("/")[2]
            paths = [path for path in files if path.rpartition("/")[0] == folder]
            return self.answer([{"type": "file", "path": p, "size": len(files[p]), "oid": COMMIT} for p in paths])
        if not rest:
            return self.answer({"id": name, "sha": COMMIT, "siblings": []})
        content = files.get(rest.partition("/")[2])
        if content is None:
            return self.answer({}, 404, **{"X-Error-Code": "EntryNotFound"})
        return self.answer(content, ETag=f'"{COMMIT}"')


@pytest.fixture
def hub(monkeypatch):
    """The repositories of a hub that huggingface_hub talks to: name -> path -> content."""
    repositories = {}
    handler = type("Handler", (_Handler,), {"repositories": repositories})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        for module in (file_download, constants):  # up to 0.36, and from 1 on
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        HfFileSystem.clear_instance_cache()
        try:
            yield repositories
        finally:
            HfFileSystem.clear_instance_cache()  # which keeps errors, and with them files that they left open
            gc.collect()
            server.shutdown()
            thread.join()
