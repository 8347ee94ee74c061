"""The service behind real proxies with TLS, with the configurations that the documentation gives."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import websockets
from relax_server.api.keys import KeyRing
from relax_server.journal.sql import SqlJournal
from service_process import Service, start

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
HELLO = [{"role": "user", "content": "hello"}]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for gym.example that it signed itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "gym.pem", folder / "gym.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=gym.example"]
    command += ["-addext", "subjectAltName=DNS:gym.example", "-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return files


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory, service: Service) -> Iterator[Service]:
    """A service with a key, behind a proxy on this machine."""
    folder = tmp_path_factory.mktemp("behind")
    journal = SqlJournal(folder / "journal.db")
    secret, _ = KeyRing(journal).create("anybody", ["run"])
    journal.close()
    with service.client() as client:
        engine = client.get("/v1/models").json()["engines"][0]["url"]
    options = ("--engine", engine, "--proxy", "127.0.0.1", "--allowed-host", "gym.example", "--drain-seconds", "0")
    it = start(folder, *options, key=secret)
    yield it
    it.stop()


@pytest.fixture(params=["nginx", "caddy"])
def port(request: pytest.FixtureRequest, tmp_path: Path, behind: Service, certificate: tuple[Path, Path]) -> Iterator[int]:
    """Where the proxy listens."""
    program = shutil.which(request.param) or shutil.which(request.param, path="/usr/sbin")
    if program is None:
        pytest.skip(f"{request.param} is not installed on this machine: apt install {request.param}")
    listening, (pem, key), upstream = free_port(), certificate, behind.url.removeprefix("http://")
    if request.param == "nginx":
        text = (EXAMPLES / "nginx.conf").read_text().replace("listen 443", f"listen 127.0.0.1:{listening}")
        text = text.replace("/etc/ssl/gym.example.pem", str(pem)).replace("/etc/ssl/gym.example.key", str(key))
        paths = "".join(
            f"{name}_temp_path {tmp_path}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        own = f"user root;\ndaemon off;\npid {tmp_path}/pid;\nerror_log {tmp_path}/error.log;\nevents {{}}\n"
        own = own if os.getuid() == 0 else own.partition("\n")[2]
        config = tmp_path / "nginx.conf"
        config.write_text(own + f"http {{\naccess_log off;\n{paths}{text.replace('127.0.0.1:8000', upstream)}\n}}\n")
        command = [program, "-e", f"{tmp_path}/error.log", "-c", str(config)]
    else:
        text = (
            (EXAMPLES / "Caddyfile")
            .read_text()
            .replace("gym.example {", f"https://gym.example:{listening} {{\n\ttls {pem} {key}")
        )
        config = tmp_path / "Caddyfile"
        config.write_text("{\n\tadmin off\n\tauto_https disable_redirects\n}\n" + text.replace("127.0.0.1:8000", upstream))
        command = [program, "run", "--config", str(config), "--adapter", "caddyfile"]
    log = tmp_path / "proxy.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"HOME": str(tmp_path)})
    end = time.monotonic() + 30
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", listening)) == 0:
                break
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    yield listening
    process.terminate()
    process.wait(20)


async def test_a_service_behind_a_proxy(port: int, behind: Service, certificate: tuple[Path, Path]) -> None:
    trust = ssl.create_default_context(cafile=str(certificate[0]))
    where, key = f"https://127.0.0.1:{port}", {"Authorization": f"Bearer {behind.key}"}
    name = {"headers": {"Host": "gym.example"}, "extensions": {"sni_hostname": "gym.example"}}
    async with httpx.AsyncClient(verify=trust, base_url=where, timeout=60) as client:
        refused = await client.post("/v1/sessions", json={}, **name)
        assert refused.status_code == 401 and refused.headers["X-Content-Type-Options"] == "nosniff"
        mine = {"headers": name["headers"] | key, "extensions": name["extensions"]}
        opened = (await client.post("/v1/sessions", json={}, **mine)).raise_for_status().json()
        assert opened["base_url"] == f"https://gym.example/v1/sessions/{opened['id']}/openai/v1"
        path, asked = f"/v1/sessions/{opened['id']}", {"messages": HELLO, "max_tokens": 8, "stream": True, "ignore_eos": True}
        async with client.stream("POST", f"{path}/openai/v1/chat/completions", json=asked, **mine) as streamed:
            assert [line async for line in streamed.aiter_lines()][-2] == "data: [DONE]"
        assert (await client.post(f"{path}/finish", **mine)).json()["status"] == "completed"
        with contextlib.suppress(httpx.ReadError, httpx.WriteError):  # the connection may end while it is being sent
            assert (await client.post("/v1/media/image", content=bytes(65 << 20), **mine)).status_code == 413
    raw = socket.create_connection(("127.0.0.1", port))
    socketed = f"wss://gym.example:{port}/v1/sessions/ws"
    async with websockets.connect(socketed, sock=raw, ssl=trust, additional_headers=key) as talk:
        await talk.send('{"id": 1, "op": "open"}')
        assert '"result"' in str(await talk.recv())


def test_the_page_shows_the_example_that_is_tested() -> None:
    example = (EXAMPLES / "Caddyfile").read_text().partition("\n")[2]
    assert example in (EXAMPLES.parent / "operations.md").read_text()
