"""A stand-in for the Hugging Face hub: an HTTP server on loopback with its URLs for one data set."""

import contextlib
import hashlib
import http.server
import json
import threading
import time
import urllib.parse
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves the files below `root` as the data set `repository`; .bin are large, with SHA-256."""

    def __init__(self, root: Path, repository: str):
        self.root, self.repository, self.commit = root, repository, COMMIT
        self.corrupt = set()  # paths that are served with a flipped bit
        self.requests: list[tuple[str, str]] = []  # method, path
        self.limited: dict[str, int] = {}  # by method, requests of files to answer with HTTP 429
        self.delay = 0.0  # seconds before the content of a .bin
        answer = self.answer

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            do_GET = do_HEAD = do_POST = lambda request: answer(request)
            log_message = lambda *_: None  # noqa: E731

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fetched(self) -> list[str]:
        """The paths of the files that were requested."""
        marker = f"/datasets/{self.repository}/resolve/"
        got = [path.partition(marker)[2] for method, path in self.requests if method == "GET"]
        return [path.partition("/")[2] for path in got if path]

    def answer(self, request) -> None:
        path = urllib.parse.unquote(urllib.parse.urlparse(request.path).path)
        request.rfile.read(int(request.headers.get("Content-Length", 0)))
        self.requests.append((request.command, path))
        api, files = f"/api/datasets/{self.repository}", f"/datasets/{self.repository}/resolve/"
        name = path.removeprefix(files).partition("/")[2]
        if path.startswith(files) and self.limited.get(request.command, 0):
            self.limited[request.command] -= 1
            self.json(request, {"error": "Too Many Requests"}, 429, **{"Retry-After": "0"})
        elif path in (api, f"{api}/revision/{self.commit}"):
            siblings = [self.info(name) for name in self.names()]
            facts = {"id": self.repository, "sha": self.commit, "siblings": siblings, "tags": []}
            self.json(request, facts)
        elif path.startswith(files) and (self.root / name).is_file():
            self.file(request, name)
        else:
            code = "EntryNotFound" if path.startswith(files) else "RepoNotFound"
            self.json(request, {"error": "not found"}, 404, **{"X-Error-Code": code})

    def names(self) -> list[str]:
        files = filter(Path.is_file, self.root.rglob("*"))
        return sorted(str(path.relative_to(self.root)) for path in files)

    def info(self, name: str) -> dict:
        data = (self.root / name).read_bytes()
        git_sha1 = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry = {"rfilename": name, "size": len(data), "blobId": git_sha1}
        if name.endswith(".bin"):
            digest = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
        return entry

    def json(self, request, content, status: int = 200, **headers) -> None:
        headers["Content-Type"] = "application/json"
        self.send(request, json.dumps(content).encode(), status, headers)

    def file(self, request, name: str) -> None:
        info, data = self.info(name), (self.root / name).read_bytes()
        if name in self.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if name.endswith(".bin") and request.command == "GET":
            time.sleep(self.delay)
        digest = info["lfs"]["sha256"] if "lfs" in info else info["blobId"]
        self.send(request, data, 200, {"ETag": f'"{digest}"', "X-Repo-Commit": self.commit})

    @staticmethod
    def send(request, data: bytes, status: int, headers: dict) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # the client has ended
                request.wfile.write(data)
