"""Object stores on loopback for the tests.

moto (quick), SeaweedFS (a real one) and rclone (ignores conditional writes) speak S3; a fake of Google Cloud Storage and Azurite are
tried where they are installed. Each is a context manager that starts the server on a free port, waits until it answers, makes a
bucket and stops it at the end.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.effort import PATIENCE_SECONDS

BUCKET = "bucket"
KEY = "AKIATEST"
SECRET = "sekret123"
_random = random.SystemRandom()
"""Tests seed the other one."""


@dataclass(frozen=True)
class ObjectServer:
    """A bucket's URL and what reaching it takes."""

    url: str
    storage_options: dict[str, Any]


@dataclass(frozen=True)
class S3Server:
    """Where an S3 server listens."""

    port: int
    tls: bool = False
    """Over TLS, with a certificate that nobody signed."""

    @property
    def url(self) -> str:
        """The bucket's."""
        return f"s3://{BUCKET}"

    @property
    def endpoint(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What `tsck.open(..., storage_options=)` takes."""
        options = storage_options(self.endpoint)
        return options | {"client_kwargs": {**options["client_kwargs"], "verify": False}} if self.tls else options

    def client(self) -> Any:
        """A plain botocore client, which shares nothing with what is tested."""
        import botocore.session  # not on the machine with a GPU

        return botocore.session.Session().create_client(
            "s3", "us-east-1", endpoint_url=self.endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET, verify=not self.tls
        )


def storage_options(endpoint: str) -> dict[str, Any]:
    """s3fs's options for a server at `endpoint`."""
    return {"key": KEY, "secret": SECRET, "endpoint_url": endpoint, "client_kwargs": {"region_name": "us-east-1"}}


ROLES = ("reader", "writer", "keeper")


def role_options(endpoint: str, role: str) -> dict[str, Any]:
    """s3fs's options for an identity of `seaweedfs`; without a role, its owner's."""
    options = storage_options(endpoint)
    return {**options, "key": f"AKIA{role.upper()}", "secret": f"sekret-{role}"} if role else options


def _role_identity(role: str) -> dict[str, Any]:
    options = role_options("", role)
    credentials = [{"accessKey": options["key"], "secretKey": options["secret"]}]
    return {"name": role, "credentials": credentials, "actions": [], "policyNames": [role]}


def free_port() -> int:
    """A port that nobody listens on now, below those that the kernel of Linux hands out by itself."""
    while True:
        port = _random.randrange(23000, 32000)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """A port that refuses connections: it is taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


ONE_AT_A_TIME = """
import sys, threading
from moto import server

lock, serve = threading.Lock(), server.DomainDispatcherApplication.__call__

def serve_one(self, environ, start_response):
    with lock:
        return serve(self, environ, start_response)

server.DomainDispatcherApplication.__call__ = serve_one
server.main(sys.argv[1:])
"""
"""moto looks for an object and then writes it, so that two conditional writes at the same time can both succeed."""


@contextlib.contextmanager
def moto() -> Iterator[S3Server]:
    port = free_port()
    with _running([sys.executable, "-c", ONE_AT_A_TIME, "-H", "127.0.0.1", "-p", str(port)], S3Server(port)) as server:
        yield server


@contextlib.contextmanager
def seaweedfs(folder: Path, policies: Mapping[str, Any] | None = None, certificate: Path | None = None) -> Iterator[S3Server]:
    """With `policies` also an identity for each of these roles, which may do what its policy document says.

    With a `certificate`, a file that has its key, too, it speaks TLS.

    One process with master, volume server, filer and S3 gateway; SeaweedFS derives its gRPC ports as port + 10000."""
    data = folder / "data"
    data.mkdir()
    config = folder / "s3.json"
    identity = {
        "name": "t",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    given = policies or {}
    roles = [_role_identity(role) for role in given]
    documents = [{"name": role, "content": json.dumps(document)} for role, document in given.items()]
    config.write_text(json.dumps({"identities": [identity, *roles], "policies": documents}))
    ports = dict(zip(("master", "volume", "filer", "s3"), _ports_with_grpc(), strict=False))
    command = [_tool("weed"), "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.config={config}"]
    command += ["-master.volumeSizeLimitMB=1024", "-volume.max=20", "-s3.port.iceberg=0", "-s3.port.lance=0"]  # those have fixed ports
    for role, port in ports.items():
        command += [f"-{role}.port={port}", f"-{role}.port.grpc={port + 10000}"]
    if certificate is not None:
        command += [f"-s3.cert.file={certificate}", f"-s3.key.file={certificate}"]
    with _running(command, S3Server(ports["s3"], tls=certificate is not None), cwd=folder) as server:
        yield server


@contextlib.contextmanager
def rclone(folder: Path) -> Iterator[S3Server]:
    """A server that answers 200 to every conditional write."""
    port = free_port()
    command = [_tool("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}", str(folder)]
    command += ["--config", str(folder / "none.conf"), "--vfs-cache-mode", "off"]
    with _running(command, S3Server(port)) as server:
        yield server


@contextlib.contextmanager
def fake_gcs(program: Path) -> Iterator[ObjectServer]:
    """fsouza's fake-gcs-server, with gcsfs."""
    import gcsfs

    port = free_port()
    place = f"127.0.0.1:{port}"
    command = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    command += ["-external-url", f"http://{place}", "-public-host", place]
    options = {"endpoint_url": f"http://{place}", "token": "anon", "project": "p"}
    with _process(command) as process:
        _wait(process, port, lambda: gcsfs.GCSFileSystem(**options).mkdir(BUCKET))
        yield ObjectServer(f"gs://{BUCKET}", options)


@contextlib.contextmanager
def azurite(program: Path, folder: Path) -> Iterator[ObjectServer]:
    """Microsoft's emulator of Azure's blob storage, with adlfs; account and key are its published ones."""
    import adlfs

    port = free_port()
    account, key = "devstoreaccount1", "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    command = [str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port), "-l", str(folder)]
    command += ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    options = {
        "connection_string": f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{account};"
    }
    with _process(command) as process:
        _wait(process, port, lambda: adlfs.AzureBlobFileSystem(**options).mkdir(BUCKET))
        yield ObjectServer(f"az://{BUCKET}", options)


@contextlib.contextmanager
def mlflow_tracking(database: Path, folder: Path) -> Iterator[str]:
    """``mlflow server``, which is several processes; its URL."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    command += [f"--backend-store-uri=sqlite:///{database}", f"--artifacts-destination={folder}"]
    quiet, url = subprocess.DEVNULL, f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, cwd=folder, start_new_session=True) as process:
        try:
            _wait(process, port, lambda: urllib.request.urlopen(f"{url}/health").close())
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _tool(name: str) -> str:
    return os.path.join(os.path.dirname(sys.executable), name)


def _ports_with_grpc() -> Iterator[int]:
    """Free ports whose numbers plus 10,000 are free too, all below those that the kernel hands out to clients."""
    for port in range(11000 + os.getpid() % 1000 * 10, 22000):
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 10000))
            yield port


@contextlib.contextmanager
def _running(command: Sequence[str], server: S3Server, cwd: Path | None = None) -> Iterator[S3Server]:
    with _process(command, cwd) as process:
        _wait(process, server.port, lambda: _make_bucket(server))
        yield server


@contextlib.contextmanager
def _process(command: Sequence[str], cwd: Path | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, cwd=cwd) as process:
        try:
            yield process
        finally:
            process.kill()


def _wait(process: "subprocess.Popen[bytes]", port: int, prepare: Callable[[], object]) -> None:
    """Repeats `prepare` until it passes."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            prepare()
        except Exception:  # whatever it is, the server is not ready
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _make_bucket(server: S3Server) -> None:
    """Makes the bucket, and writes an object: a server may answer before it can store."""
    client = server.client()
    with contextlib.closing(client):
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
            client.create_bucket(Bucket=BUCKET)
        client.put_object(Bucket=BUCKET, Key="ready", Body=b"x")
        client.delete_object(Bucket=BUCKET, Key="ready")
