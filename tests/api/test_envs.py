"""Environments from outside, in workers: registered by import string and package, and uploaded; what harm they may do."""

from __future__ import annotations

import base64
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import hosted_envs
import httpx
import psutil
import pytest
from service_process import Service, start

import relax_sdk as relax

pytestmark = pytest.mark.usefixtures("sandbox")
ONE = {"sampling": {"max_new_tokens": 1}}


@pytest.fixture(scope="module")
def client(locked: Service) -> Iterator[relax.Client]:
    with relax.Client(locked.url, locked.key) as it:
        yield it


@pytest.fixture
def hostile(client: relax.Client) -> Iterator[str]:
    yield client.upload_env(hosted_envs.Hostile, id="hostile")["id"]
    client.remove_env("hostile")


def test_a_name_with_a_namespace_goes_through_every_route(client: relax.Client, locked: Service) -> None:
    assert client.upload_env(hosted_envs.Echo, id="acme/echo-v1")["id"] == "acme/echo-v1"
    about = httpx.get(
        f"{locked.url}/v1/envs/acme/echo-v1", headers={"Authorization": f"Bearer {locked.key}"}, timeout=30.0
    ).json()
    assert (about["id"], about["kind"]) == ("acme/echo-v1", "upload")
    with client.session("acme/echo-v1", **ONE) as session:
        assert session.observation[1]["content"][1]["text"].startswith("shade")
    assert list(locked.folder.glob("**/env-acme%2Fecho-v1.log"))
    client.remove_env("acme/echo-v1")
    assert "acme/echo-v1" not in {env["id"] for env in client.envs()}


class Play:
    """A session in which actions are written by the test."""

    def __init__(self, client: relax.Client, env: str, **limits: float) -> None:
        self.session = client.session(env, **ONE, limits={"step_timeout": 20.0} | limits)
        self.session.chat(self.session.observation)

    def do(self, action: str) -> str:
        return self.session.step(action).observation[0]["content"]


def test_an_uploaded_class_is_played(client: relax.Client) -> None:
    about = client.upload_env(hosted_envs.Echo, id="echo")
    assert about["modalities"] == ["image"] and about["splits"] == {"train": 6, "eval": 2} and about["version"] == "7"
    row = next(env for env in client.envs() if env["id"] == "echo")
    assert (row["kind"], row["tools"]) == ("upload", ["look"])
    with client.session("echo", task_index=2, **ONE) as session:
        assert session.observation[0] == {"role": "system", "content": "be brief"}
        picture, text = session.observation[1]["content"]
        assert text["text"] == "shade 20?" and session.tools[0]["function"]["name"] == "look"
        answer = session.chat(session.observation)
        first = session.step({"role": "assistant", "content": "A"})
        assert first.reward == 0.25 and not first.done
        session.chat([*session.observation, answer, *first.observation])
        assert session.step("B").terminated
        done = session.finish()
        played = session.trajectory()
    assert done.rewards == {"env": 0.5, "length": 2.0} and done.reward == 4.5
    assert client.media(picture["image_url"]["url"].removeprefix("relax-media:"))[:4] == b"\x89PNG"
    assert played.env == "echo" and played.env_version == "7"


def test_rollouts_of_an_uploaded_class(client: relax.Client) -> None:
    client.upload_env(hosted_envs.Grouped, id="grouped")
    rollout = client.rollout("grouped", n=3, group_size=4, **ONE)
    groups = [event.data["trajectories"] for event in rollout.events() if event.kind == "group"]
    assert len(groups) == 3 and rollout.refresh().state == "completed"
    for group in groups:
        assert sorted(t["rewards"]["best"] for t in group) == [0.0, 1.0, 2.0, 3.0]


def test_by_import_string_and_by_package(client: relax.Client) -> None:
    about = client.register_env("my-tone", entry="relax_envs.tone:ToneEnv")
    assert about["modalities"] == ["audio"] and about["splits"]["eval"]
    assert client.register_env("their-colour", package="relax-gym", name="colour-v0")["modalities"] == ["image"]
    for env in ("my-tone", "their-colour"):
        with client.session(env, **ONE) as session:
            assert session.step(session.chat(session.observation)).terminated
    client.remove_env("my-tone")
    with pytest.raises(relax.ServiceError, match="no environment 'my-tone'"):
        client.session("my-tone")


def test_a_name_can_be_replaced_by_its_owner_alone(client: relax.Client, locked: Service) -> None:
    client.upload_env(hosted_envs.Echo, id="mine")
    with locked.client() as http:
        secret = http.post("/v1/keys", json={"name": "other", "rights": ["run", "upload"]}).json()["secret"]
    with relax.Client(locked.url, secret) as other:
        with pytest.raises(relax.ServiceError, match="belongs to another key"):
            other.upload_env(hosted_envs.Hostile, id="mine")
        with pytest.raises(relax.ServiceError, match="belongs to another key"):
            other.remove_env("mine")
        with other.session("mine", **ONE):
            pass
    assert client.upload_env(hosted_envs.Hostile, id="mine")["splits"] == {"train": None}
    with client.session("mine", **ONE) as session:
        assert session.observation[0]["content"] == "ready"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"id": "x"}, 400, "name one of"),
        ({"id": "x", "entry": "a:b", "package": "c"}, 400, "name one of"),
        ({"id": "../x", "entry": "a:b"}, 400, "id"),
        ({"id": "tone-v0", "entry": "relax_envs.tone:ToneEnv"}, 409, "installed"),
        ({"id": "none", "entry": "relax_envs.tone:ToneEnv"}, 409, "installed"),
        ({"id": "x", "entry": "no_such_module:Env"}, 400, "cannot be imported"),
        ({"id": "x", "entry": "os:path"}, 400, "not a subclass"),
        ({"id": "x", "entry": "os;rm:path"}, 400, "entry"),
        ({"id": "x", "package": "no-such-package"}, 400, "not installed"),
        ({"id": "x", "package": "numpy"}, 400, "no entry point"),
        ({"id": "x", "upload": "!!!", "python": "3.11"}, 400, "base64"),
        ({"id": "x", "upload": "aGVsbG8=", "python": "3.11"}, 400, "unpickled"),
        ({"id": "x", "upload": "aGVsbG8=", "python": "2.7"}, 400, "Python 2.7"),
        ({"id": "x", "upload": base64.b64encode(cloudpickle.dumps(3)).decode(), "python": "3.11"}, 400, "not an EnvSpec"),
        ({"id": "x", "entry": "relax_envs.tone:ToneEnv", "more": 1}, 400, "more"),
    ],
)
def test_what_cannot_be_registered(locked: Service, body: dict, status: int, message: str) -> None:
    with locked.client() as http:
        answer = http.post("/v1/envs", json=body)
    assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text


def test_bringing_code_takes_the_right(locked: Service, service: Service) -> None:
    with locked.client() as http:
        secret = http.post("/v1/keys", json={"name": "player"}).json()["secret"]
    body = {"id": "x", "entry": "relax_envs.tone:ToneEnv"}
    for url, key in ((locked.url, secret), (service.url, "")):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx.post(f"{url}/v1/envs", json=body, headers=headers, timeout=30)
        assert answer.status_code == 403 and "right to upload" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("action", "how"),
    [
        ("exit", "exit code 3"),
        ("crash", "SIGSEGV"),
        ("memory", "memory"),
        ("fork", "processes"),
    ],
)
def test_what_ends_a_worker_ends_nothing_else(client: relax.Client, hostile: str, action: str, how: str) -> None:
    """Its own episodes fail with the reason; the next one gets a new worker, and other environments notice nothing."""
    bystander = client.session("tone-v0", **ONE)
    play = Play(client, hostile)
    with pytest.raises(relax.ServiceError, match=how):
        play.do(action)
    assert bystander.chat(bystander.observation)["role"] == "assistant"
    bystander.cancel()
    assert Play(client, hostile).do("hello") == "hello"
    assert not _left_over()


def test_a_hanging_step_is_given_up(client: relax.Client, hostile: str) -> None:
    play = Play(client, hostile, step_timeout=0.5)
    with pytest.raises(relax.ServiceError, match=r"longer than 0.5 s"):
        play.do("hang")
    assert Play(client, hostile).do("hello") == "hello"


def test_many_hanging_steps_get_a_new_worker(client: relax.Client, hostile: str) -> None:
    """Threads that hang would fill the worker up."""
    rollout = None
    for _ in range(32):
        play = Play(client, hostile, step_timeout=0.05)
        with pytest.raises(relax.ServiceError):
            play.do("hang")
    end = time.monotonic() + 30
    while not rollout and time.monotonic() < end:
        row = next(env for env in client.envs() if env["id"] == hostile)
        rollout = row["workers_ended"]
    assert rollout, "the worker was not started again"
    assert "hung" in row["last_end"]
    assert Play(client, hostile).do("hello") == "hello"


def test_nothing_outlives_its_worker(client: relax.Client, hostile: str) -> None:
    play, command = Play(client, hostile), ["sleep", "31415"]
    assert play.do("orphan 31415") == "left"
    assert _wait_for(lambda: command in _commands())
    with pytest.raises(relax.ServiceError):
        play.do("exit")
    assert command not in _commands()


def test_it_cannot_write_read_secrets_or_reach_the_engine(client: relax.Client, locked: Service, hostile: str) -> None:
    play = Play(client, hostile)
    engine = client.models()["engines"][0]["url"].rpartition(":")[2]
    assert play.do(f"write {locked.folder}/journal.db") == "FileNotFoundError"
    assert play.do(f"connect {engine}") != "connected"
    assert not {name for name in play.do("secrets").split(",") if name.endswith(("KEY", "TOKEN", "PASSWORD"))}
    assert play.do("write here") == "written"  # in its own folder, which is removed


def test_it_gets_one_processor(client: relax.Client, hostile: str) -> None:
    used = float(Play(client, hostile).do("spin 4"))
    assert used < 1.5 * 4, "two processes that spin for 4 s are held to about one processor"


def test_the_processor_time_of_a_worker_is_charged_to_whoever_brought_it(locked: Service) -> None:
    """Also that of processes which it starts and which have ended.

    The last of it may be spent in a step, which fails, or be told between two, so that the next one is refused.
    """
    used_up = r"key 'few' has used its 8 worker seconds an hour; try again in"
    with locked.client() as http:
        secret = _key_with_seconds(http, "few", 8)
    with relax.Client(locked.url, secret) as few:
        few.upload_env(hosted_envs.Hostile, id="greedy")
        with pytest.raises(relax.ServiceError, match=used_up):
            play = Play(few, "greedy", step_timeout=120.0)
            while True:
                play.do("spin 2")
        with locked.client(secret) as http:  # which does not wait and try again
            refused = http.post("/v1/sessions", json={"env": "greedy", **ONE})
        assert refused.status_code == 429 and "8 worker seconds an hour" in refused.text
        assert int(refused.headers["Retry-After"]) > 0
        few.remove_env("greedy")


def test_a_worker_that_spends_all_in_a_step_is_ended_in_it(locked: Service) -> None:
    with locked.client() as http:
        secret = _key_with_seconds(http, "fewer", 4)
    with relax.Client(locked.url, secret) as fewer:
        fewer.upload_env(hosted_envs.Hostile, id="endless")
        play = Play(fewer, "endless", step_timeout=120.0)
        with pytest.raises(
            relax.ServiceError, match=r"was ended: key 'fewer' has used its 4 worker seconds an hour; try again in"
        ):
            play.do("spin 600")
        fewer.remove_env("endless")


def _key_with_seconds(http: httpx.Client, name: str, seconds: int) -> str:
    """Secret of a key whose environments may use so many seconds of a processor an hour."""
    body = {"name": name, "rights": ["run", "upload"], "worker_seconds_per_hour": seconds}
    return http.post("/v1/keys", json=body).json()["secret"]


def test_a_registered_environment_survives_the_service(tmp_path: Path, service: Service) -> None:
    from relax_server.api.keys import KeyRing
    from relax_server.journal.sql import SqlJournal

    journal = SqlJournal(tmp_path / "journal.db")
    secret, _ = KeyRing(journal).create("root", ["admin"])
    journal.close()
    with service.client() as http:
        engine = http.get("/v1/models").json()["engines"][0]["url"]
    for number in range(2):
        one = start(tmp_path, "--engine", engine, key=secret)
        try:
            with relax.Client(one.url, secret) as client:
                if number == 0:
                    client.upload_env(hosted_envs.Echo, id="kept")
                with client.session("kept", **ONE) as session:
                    assert len(session.observation) == 2
        finally:
            one.process.kill()
            one.process.wait(30)
    assert _wait_for(lambda: not _left_over())


def test_without_a_sandbox_uploads_are_refused_or_trusted(
    tmp_path: Path, locked: Service, client: relax.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without bubblewrap; what was registered before is refused, too."""
    engine = client.models()["engines"][0]["url"]
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    for options in ((), ("--trust-uploads",)):
        one = start(tmp_path, "--engine", engine, *options, key=_admin(tmp_path))
        try:
            with relax.Client(one.url, one.key) as there:
                if options:
                    there.upload_env(hosted_envs.Hostile, id="mine")
                    assert Play(there, "mine").do("hello") == "hello"
                    continue
                with pytest.raises(relax.ServiceError, match=r"apt install bubblewrap.*--trust-uploads") as refused:
                    there.upload_env(hosted_envs.Hostile, id="mine")
                assert (refused.value.status, refused.value.code) == (403, "uploads_refused")
        finally:
            one.process.kill()
            one.process.wait(30)


def test_nobody_else_can_read_a_services_folder(locked: Service) -> None:
    """Its key was made before it started, and its journal was open to all."""
    assert locked.folder.stat().st_mode & 0o777 == 0o700
    names = {path.name: path.stat().st_mode & 0o777 for path in locked.folder.rglob("*")}
    assert {"journal.db", "journal.db-wal", "server.id"} <= names.keys()
    assert not {name: oct(mode) for name, mode in names.items() if mode & 0o077}


def _admin(folder: Path) -> str:
    """An admin key, made on the command line."""
    command = [sys.executable, "-m", "relax_sdk.cli", "keys", "add", "root", "--rights", "admin", "--folder", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert (folder / "journal.db").stat().st_mode & 0o777 == 0o600
    return made.stdout.strip()


def _commands() -> list[list[str]]:
    """Command lines of all processes."""
    return [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]


def _left_over() -> list[int]:
    """Processes of workers whose guard is gone."""
    found = []
    for process in psutil.process_iter():
        try:
            if "relax_server.api.environments.child" in process.cmdline() and process.ppid() == 1:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def _wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()
