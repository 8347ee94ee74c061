"""The service behind real proxies with TLS, with the configurations that the documentation gives."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import openai
import pytest
import websockets
from postgres_server import PostgresServer
from relax_server.api.keys import KeyRing
from relax_server.api.settings import ServiceConfig
from relax_server.journal import claims
from relax_server.journal.sql import SqlJournal
from service_process import Service, start
from websockets.sync.client import connect

import relax_sdk as relax
from relax_sdk.errors import ConfigError

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
    it = start_behind(tmp_path_factory.mktemp("behind"), service)
    yield it
    it.stop()


def start_behind(folder: Path, service: Service, *more: str) -> Service:
    folder.mkdir(exist_ok=True)
    journal = SqlJournal(folder / "journal.db")
    secret, _ = KeyRing(journal).create("anybody", ["run"])
    journal.close()
    with service.client() as client:
        engine = client.get("/v1/models").json()["engines"][0]["url"]
    options = ("--engine", engine, "--proxy", "127.0.0.1", "--allowed-host", "gym.example", "--drain-seconds", "0")
    return start(folder, *options, *more, key=secret)


@pytest.fixture(params=["nginx", "caddy"])
def port(request: pytest.FixtureRequest, tmp_path: Path, behind: Service, certificate: tuple[Path, Path]) -> Iterator[int]:
    """Where the proxy listens."""
    example, at = {"nginx": "nginx.conf", "caddy": "Caddyfile"}[request.param], {"127.0.0.1:8000": behind.url}
    with proxy(request.param, example, tmp_path, certificate, at) as listening:
        yield listening


@contextlib.contextmanager
def proxy(name: str, example: str, folder: Path, certificate: tuple[Path, Path], at: dict[str, str]) -> Iterator[int]:
    """A real proxy with an example of the documentation.

    Args:
        name: `nginx` or `caddy`.
        example: its file.
        folder: for its own files.
        certificate: of gym.example, and its key.
        at: URLs of the services, by the address that the example has for each.

    Yields:
        The port that it listens on.
    """
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if program is None:
        pytest.skip(f"{name} is not installed on this machine: apt install {name}")
    listening, (pem, key), text = free_port(), certificate, (EXAMPLES / example).read_text()
    for said, url in at.items():
        assert said in text
        text = text.replace(said, url.removeprefix("http://"))
    if name == "nginx":
        text = text.replace("listen 443", f"listen 127.0.0.1:{listening}")
        text = text.replace("/etc/ssl/gym.example.pem", str(pem)).replace("/etc/ssl/gym.example.key", str(key))
        command = nginx(program, folder, text)
    else:
        text = text.replace("\ngym.example {", f"\nhttps://gym.example:{listening} {{\n\ttls {pem} {key}")
        config = folder / "Caddyfile"
        config.write_text("{\n\tadmin off\n\tauto_https disable_redirects\n}\n" + text)
        command = [program, "run", "--config", str(config), "--adapter", "caddyfile"]
    with running(command, folder, listening):
        yield listening


def nginx(program: str, folder: Path, servers: str) -> list[str]:
    """The command that serves so."""
    paths = "".join(f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    own = f"user root;\ndaemon off;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
    own = own if os.getuid() == 0 else own.partition("\n")[2]
    config = folder / "nginx.conf"
    config.write_text(own + f"http {{\naccess_log off;\n{paths}{servers}\n}}\n")
    return [program, "-e", f"{folder}/error.log", "-c", str(config)]


@contextlib.contextmanager
def running(command: list[str], tmp_path: Path, listening: int) -> Iterator[None]:
    """A proxy that accepts connections."""
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
    try:
        yield
    finally:
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


@pytest.fixture
def under(tmp_path: Path, service: Service) -> Iterator[tuple[str, str]]:
    """URL of a service that nginx serves under a path, as the documentation says, and a key."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed on this machine: apt install nginx")
    it, listening = start_behind(tmp_path / "service", service, "--root-path", "/relax"), free_port()
    text = (EXAMPLES / "nginx.conf").read_text().replace("listen 443 ssl", f"listen 127.0.0.1:{listening}")
    text = "\n".join(line for line in text.splitlines() if "ssl_certificate" not in line).replace(
        "Host $host", "Host $http_host"
    )
    text = text.replace("location / {", "location /relax/ {").replace(
        "proxy_pass http://127.0.0.1:8000;", f"proxy_pass {it.url}/;"
    )
    with running(nginx(program, tmp_path, text), tmp_path, listening):
        yield f"http://127.0.0.1:{listening}/relax", it.key
    it.stop()


def test_a_service_under_a_path(under: tuple[str, str]) -> None:
    url, key = under
    with relax.Client(url, key) as client:
        with client.session("tone-v0", sampling={"max_new_tokens": 1}) as session:
            assert session.base_url == f"{url}/v1/sessions/{session.id}/openai/v1"
            agent = openai.OpenAI(base_url=session.base_url, api_key=session.key, max_retries=0)
            assert agent.chat.completions.create(model="x", messages=session.observation).choices  # type: ignore[arg-type]
            session.finish()
            assert session.trajectory().turns
        rollout = client.rollout("tone-v0", n=2, sampling={"max_new_tokens": 1})
        assert [event.kind for event in rollout.events()].count("group") == 2
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=30.0) as http:
        page = http.get(f"{url}/docs").raise_for_status()
        for asset in re.findall(r'(?:href|src)="([^"]+)"', page.text):
            http.get(urljoin(str(page.url), asset)).raise_for_status()
        assert http.get(f"{url}/openapi.json").json()["servers"] == [{"url": "/relax"}]
        assert http.get(f"{url}/v1/models/").headers["Location"] == f"{url}/v1/models"
        assert http.get(f"{url}/healthz").status_code == 200 and http.get(f"{url}/v1/keys").status_code == 403
    with connect(f"ws{url[4:]}/v1/sessions/ws", additional_headers={"Authorization": f"Bearer {key}"}) as talk:
        talk.send('{"id": 1, "op": "open"}')
        assert f'"base_url":"{url}/v1/sessions/' in str(talk.recv(timeout=30))


def test_a_root_path_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    for wrong in ("relax", "/relax/", "/", "/v1", "/v1/x", "/a b", "//x"):
        with pytest.raises(ConfigError, match="allowed: a path as /relax"):
            ServiceConfig(tmp_path, root_path=wrong)
    assert ServiceConfig(tmp_path, root_path="/v1x/tools").root_path


class Honest:
    """A client of sessions that tries again what a proxy or a service could not do, for as long as it makes sense."""

    def __init__(self, port: int, certificate: tuple[Path, Path], key: str) -> None:
        trust = ssl.create_default_context(cafile=str(certificate[0]))
        self.http = httpx.Client(verify=trust, base_url=f"https://127.0.0.1:{port}", timeout=30)
        self.key = key
        self.kept: list[str] = []
        """Trajectories that were told as durable."""
        self.lost: list[str] = []
        """Sessions that no service knew any more."""

    def ask(self, method: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
        headers = {"Host": "gym.example", "Authorization": f"Bearer {key or self.key}"} | more.pop("headers", {})
        end, last = time.monotonic() + 90, ""
        while True:
            try:
                answer = self.http.request(method, path, headers=headers, extensions={"sni_hostname": "gym.example"}, **more)
                if answer.status_code not in (429, 502, 503, 504):
                    return answer
                last = f"{answer.status_code} {answer.text}"
            except httpx.TransportError as error:
                last = repr(error)
            assert time.monotonic() < end, f"{method} {path} was never answered: {last}"
            time.sleep(0.1)

    def play(self) -> str:
        """One session from its opening to its end; returns its id."""
        opened = self.ask("POST", "/v1/sessions", json={"sampling": {"max_new_tokens": 1}}).json()
        id, secret = opened["id"], opened["key"]
        asked = {"json": {"messages": HELLO}, "key": secret}
        for step in (
            lambda: self.ask("POST", f"/v1/sessions/{id}/openai/v1/chat/completions", **asked),
            lambda: self.ask("POST", "/v1/openai/v1/chat/completions", **asked),
            lambda: self.ask("POST", f"/v1/sessions/{id}/finish"),
        ):
            answer = step()
            if answer.status_code in (401, 404):
                assert "it was not opened at this server, or that was killed" in answer.json()["error"]["message"]
                self.lost.append(id)
                return id
            assert answer.status_code == 200, answer.text
        self.kept.append(answer.json()["trajectory_id"])
        return id


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["nginx", "caddy"])
def test_one_of_two_services_behind_a_proxy_is_killed(
    name: str, tmp_path: Path, service: Service, postgres: PostgresServer, certificate: tuple[Path, Path]
) -> None:
    """Sessions find their service; what was told as durable stays; the other one plays the rollout of the one that is gone."""
    journal = SqlJournal(url := postgres.make())
    secret, _ = KeyRing(journal).create("anybody", ["run"])
    groups_key, _ = KeyRing(journal).create("rollouts", ["run"])  # which has places of its own
    with service.client() as client:
        engine = client.get("/v1/models").json()["engines"][0]["url"]
    options = ("--engine", engine, "--journal", url, "--proxy", "127.0.0.1", "--allowed-host", "gym.example")
    two = {mark: start(tmp_path / mark, *options, "--name", mark, "--drain-seconds", "0", key=secret) for mark in "ab"}
    at = {f"10.0.0.{n}:8000": it.url for n, it in enumerate(two.values(), 1)}
    example, groups = {"nginx": "nginx-two.conf", "caddy": "Caddyfile-two"}[name], 600
    try:
        with proxy(name, example, tmp_path, certificate, at) as port:
            honest = Honest(port, certificate, secret)
            begun = {honest.play().partition("~")[2] for _ in range(8)}
            assert begun == {"a", "b"} and len(honest.kept) == 8 and not honest.lost
            body = {"env": "tone-v0", "n": groups, "group_size": 2, "sampling": {"max_new_tokens": 1}}
            once: dict[str, Any] = {"key": groups_key, "json": body, "headers": {"Idempotency-Key": "once"}}
            rollout = honest.ask("POST", "/v1/rollouts", **once).json()
            with journal.reading("see who plays") as connection:
                claim = claims.current(connection, f"rollout/{rollout['id']}")
            assert claim is not None
            dead = next(mark for mark, it in two.items() if (it.folder / "server.id").read_text() == claim.holder.id)
            waiting = [honest.ask("POST", "/v1/sessions", json={}).json() for _ in range(6)]
            while not journal.trajectories(rollout["id"], limit=1):
                time.sleep(0.02)
            two[dead].process.kill()
            two[dead].process.wait(30)
            for _ in range(6):
                assert honest.play().endswith(f"~{({'a', 'b'} - {dead}).pop()}") and not honest.lost
            for opened in waiting:
                asked = honest.ask("GET", f"/v1/sessions/{opened['id']}")
                assert asked.status_code == (404 if opened["id"].endswith(f"~{dead}") else 200), asked.text
            end = time.monotonic() + 240
            while (told := honest.ask("GET", f"/v1/rollouts/{rollout['id']}", groups_key).json())["state"] != "completed":
                assert time.monotonic() < end, told
                time.sleep(0.2)
            assert told["counts"] == {"groups": groups, "done": groups, "unusable": 0, "failed": 0, "trajectories": 2 * groups}
            assert honest.ask("POST", "/v1/rollouts", **once).json()["id"] == rollout["id"]
            assert len(honest.kept) == 14
            for id in honest.kept:
                assert honest.ask("GET", f"/v1/trajectories/{id}").json()["status"] == "completed"
        rows = journal.trajectories(rollout["id"], limit=4 * groups)
        assert len(rows) == len({row.id for row in rows}) == 2 * groups
    finally:
        for it in two.values():
            if it.process.poll() is None:
                it.stop()
        journal.close()


def test_the_page_shows_the_example_that_is_tested() -> None:
    example = (EXAMPLES / "Caddyfile").read_text().partition("\n")[2]
    assert example in (EXAMPLES.parent / "operations.md").read_text()
