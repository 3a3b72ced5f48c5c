"""Fixtures: an authority, its file, and TLS servers on the loopback. Named in `pytest_plugins`, not imported."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from expected import written

from fl_dpgan.deploy.certificates import Signed, authority


@pytest.fixture(scope="session")
def ca() -> Signed:
    return authority(3650)


@pytest.fixture
def ca_file(ca: Signed, tmp_path: Path) -> Path:
    path = tmp_path / "the-ca.crt"
    path.write_bytes(ca.certificate_pem)
    return path


@contextmanager
def tls_server(
    signed: Signed, *, behind: float = 0.0, status: int = 404, body: str = "", dated: bool = True
) -> Iterator[int]:
    """An HTTPS server whose clock is `behind` by so many seconds; it answers a POST with this status and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(404)
            if dated:
                self.send_header("Date", self.date_time_string(datetime.now(UTC).timestamp() - behind))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            pass

    with TemporaryDirectory() as folder, HTTPServer(("127.0.0.1", 0), Handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*written(Path(folder), signed))
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def serving() -> Iterator[Callable[..., int]]:
    """`serving(signed, ...)` starts a server that ends with the test, and gives its port."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(tls_server(*args, **options))
