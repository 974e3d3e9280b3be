"""An S3 server in this process, on 127.0.0.1 and a free port."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def s3_bucket() -> Iterator[str]:
    """The URL of an empty bucket. Inside the context, environment variables tell obstore where the server is."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT": f"http://{host}:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "NO_PROXY": "127.0.0.1",
        }.items():
            patch.setenv(name, value)
        request = urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).close()
        yield "s3://bucket"
    server.stop()
