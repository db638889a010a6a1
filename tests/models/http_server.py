"""A package index on 127.0.0.1 that serves one wheel with byte ranges, and can misbehave on demand."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Index:
    """What the server serves and how it behaves; tests change it while it runs."""

    file: Path
    project: str = "tiny-llm"
    content: bytes = b""
    ranges: bool = True
    cut_after: int | None = None
    """Close the connection after this many bytes of a body."""
    status: int | None = None
    """Answer every request for the file with this status."""
    range_offset: int = 0
    """Answer range requests this many bytes off."""
    asked: list[str] = field(default_factory=list)
    """The Range header of every request for the file, ``""`` where it had none."""
    port: int = 0

    @property
    def url(self) -> str:
        """Where the file is served."""
        return f"http://127.0.0.1:{self.port}/files/{self.file.name}"

    @property
    def simple(self) -> str:
        """The index as pip is told of it."""
        return f"http://127.0.0.1:{self.port}/simple/"


@contextmanager
def serve(file: Path) -> Iterator[Index]:
    """Serve ``file`` until the block is left."""
    index = Index(file, content=file.read_bytes())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == f"/simple/{index.project}/":
                self._send(200, f'<a href="{index.url}">{index.file.name}</a>'.encode(), {"Content-Type": "text/html"})
            elif self.path == f"/files/{index.file.name}":
                self._send_file()
            else:
                self._send(404, b"", {})

        def _send_file(self) -> None:
            asked = self.headers.get("Range", "")
            index.asked.append(asked)
            span = re.fullmatch(r"bytes=(\d+)-", asked)
            size = len(index.content)
            if index.status is not None:
                self._send(index.status, b"", {})
            elif not index.ranges or span is None:
                self._send(200, index.content, {})
            elif int(span[1]) >= size:
                self._send(416, b"", {"Content-Range": f"bytes */{size}"})
            else:
                start = int(span[1]) + index.range_offset
                self._send(206, index.content[start:], {"Content-Range": f"bytes {start}-{size - 1}/{size}"})

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: index.cut_after] if self.path.startswith("/files/") else body)

        def log_message(self, *args: object) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
