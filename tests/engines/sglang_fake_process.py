"""The fake SGLang as a process: ``python -m tests.engines.sglang_fake_process``."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2

from tests.engines.sglang_fake import FakeSGLang
from tests.places import ROOT


@contextmanager
def sglang_process(port: int, model_path: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers, and is killed at the end of the block.

    Args:
        port: of 127.0.0.1.
        model_path: what it was started with.
    """
    process = subprocess.Popen(
        (sys.executable, "-m", "tests.engines.sglang_fake_process", str(port), model_path),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def main(port: str, model_path: str) -> None:
    """Serve until it is killed. After SIGHUP it serves what a restart leaves, in no time."""
    fake = FakeSGLang(model_path)
    signal.signal(signal.SIGHUP, lambda *_: fake.restart())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked = httpx2.Request(self.command, f"http://host{self.path}", content=content)
            answer = fake.transport.handle_request(asked)
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_POST = do_GET  # noqa: N815 # the name that http.server calls

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", int(port)), Handler) as server:
        print("up", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
