"""A hub on 127.0.0.1: the few addresses that ``huggingface_hub`` asks, for one model, and a note of what was asked."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server has; tests change it while it runs."""

    folder: Path
    repository: str = "org/tiny"
    refused: tuple[int, str] | None = None
    """Answer every question about the model with this status and code."""
    cut: str = ""
    """Break off in the middle of the file of this name."""
    fetched: list[str] = field(default_factory=list)
    """The files whose content was sent."""
    port: int = 0

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """Serve the model in ``folder`` until the block is left."""
    hub = Hub(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path, api = unquote(urlsplit(self.path).path), f"/api/models/{hub.repository}"
            file = hub.folder / path.removeprefix(f"/{hub.repository}/resolve/{COMMIT}/")
            if hub.refused is not None:
                self._send(hub.refused[0], b"", {"X-Error-Code": hub.refused[1]})
            elif path == f"{api}/revision/main":
                self._send_json({"id": hub.repository, "sha": COMMIT, "siblings": []})
            elif path.startswith(f"{api}/revision/"):
                self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif path == f"{api}/tree/{COMMIT}":
                names = sorted(str(each.relative_to(hub.folder)) for each in hub.folder.rglob("*") if each.is_file())
                sizes = {name: (hub.folder / name).stat().st_size for name in names}
                self._send_json([{"type": "file", "path": n, "size": s, "oid": _oid(n)} for n, s in sizes.items()])
            elif path.startswith(f"/{hub.repository}/resolve/{COMMIT}/") and file.is_file():
                self._send_file(file)
            else:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

        def _send_file(self, file: Path) -> None:
            if self.command == "GET":
                hub.fetched.append(str(file.relative_to(hub.folder)))
            headers = {"ETag": f'"{_oid(str(file))}"', "X-Repo-Commit": COMMIT}
            self._send(200, file.read_bytes(), headers, cut=file.name == hub.cut)

        def _send_json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: len(body) // 2] if cut else body)

        def log_message(self, *args: object) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _oid(name: str) -> str:
    return hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
