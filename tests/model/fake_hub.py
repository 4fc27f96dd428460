"""The part of the Hugging Face hub's HTTP interface that a download uses, on this machine."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

Branches = Mapping[str, Mapping[str, bytes]]


class FakeHub(ThreadingHTTPServer):
    """`repos`: repository to branch to file name to content.

    `refusal` is the status and error code of every answer; files in `missing` are not found; the first answer with a
    file in `cut` breaks off half-way. Every answer carries `warning`, if there is one. `requests` are the method and
    path of each request; `ranges` the Range headers.
    """

    daemon_threads = True

    def __init__(self, repos: Mapping[str, Branches]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.refusal: tuple[int, str] | None = None
        self.missing: set[str] = set()
        self.cut: set[str] = set()
        self.warning = ""
        self.requests: list[str] = []
        self.ranges: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(repos: Mapping[str, Branches]) -> Iterator[FakeHub]:
    server = FakeHub(repos)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def commit(repo: str, branch: str) -> str:
    return hashlib.sha1(f"{repo} {branch}".encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        if self.server.refusal:
            self._refuse(*self.server.refusal)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|refs)(?:/(.+))?)?", path):
            self._describe(*found.groups())
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(*found.groups())
        else:
            self._refuse(404, "")

    do_HEAD = do_GET

    def log_message(self, *_args: object) -> None:
        pass

    def _describe(self, repo: str, kind: str | None, revision: str | None) -> None:
        branches = self.server.repos.get(repo)
        if branches is None:
            return self._refuse(404, "RepoNotFound")
        if kind == "refs":
            names = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": commit(repo, b)} for b in branches]
            return self._json({"branches": names, "converts": [], "tags": []})
        branch = self._branch(repo, revision or "main")
        if branch is None:
            return self._refuse(404, "RevisionNotFound")
        if kind == "tree":
            files = branches[branch].items()
            return self._json(
                [{"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for n, d in files]
            )
        return self._json({"id": repo, "sha": commit(repo, branch), "private": False, "tags": [], "downloads": 0})

    def _branch(self, repo: str, revision: str) -> str | None:
        return next((b for b in self.server.repos[repo] if revision in (b, commit(repo, b))), None)

    def _file(self, repo: str, revision: str, name: str) -> None:
        branch = self._branch(repo, revision)
        data = self.server.repos[repo].get(branch or "", {}).get(name)
        if data is None or name in self.server.missing:
            return self._refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": revision, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if self.command == "GET" and name in self.server.cut:
            self.server.cut.remove(name)
            return self._answer(200, data, headers, len(data) // 2)
        if not wanted:
            return self._answer(200, data, headers)
        self.server.ranges.append(wanted[0])
        start = int(wanted[1])
        headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return self._answer(206, data[start:], headers)

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code} if code else {})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str], sent: int | None = None) -> None:
        self.send_response(status)
        if self.server.warning:
            self.send_header("X-HF-Warning", self.server.warning)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
        self.close_connection = sent is not None
