"""Agents in processes of their own, inside training: each is given a base URL and a key, and plays one episode."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shlex
import socket
from collections.abc import Sequence
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route

from relax_sdk.errors import ConfigError, EpisodeError, RelaxError
from relax_sdk.media import PARTS, Kind, MediaRef, MediaStore
from relax_sdk.messages import Message
from relax_server.gateway.agent.processes import TERM_SECONDS, AgentProcess, AgentProcesses, end
from relax_server.gateway.bodies import Body, RewardBody, StepBody, checked
from relax_server.gateway.chat_route import ChatRoute
from relax_server.gateway.errors import ApiError, as_api_error, unknown
from relax_server.gateway.openai_responses import ResponsesRoute
from relax_server.gateway.played import PlayedSession, over
from relax_server.gateway.reading import parse
from relax_server.gateway.step import take_step
from relax_server.gateway.wire import bearer, error_response, json_response, on_wire, read_body
from relax_server.guard import Guard, GuardedApp, hosts_of
from relax_server.models.processor import Processor
from relax_server.rollout.fair_threads import FairThreads, KeyThreads
from relax_server.rollout.session import EpisodeSession
from relax_server.rollout.threads import CallThreads

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)

HOST = "127.0.0.1"
MAX_BODY = 64 << 20
MEDIA_LIMIT = 60.0
KEPT_OUTPUT = 16 << 10
"""Bytes of an agent's output that are kept with its trajectory: the last ones."""
CLOSE_SECONDS = 5.0


class _Server(uvicorn.Server):
    """Leaves the signals to the process that it runs in."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


class AgentSession(PlayedSession):
    """An episode of training that an agent in a process of its own plays."""

    def __init__(self, id: str, secret: str, session: EpisodeSession, observation: list[Message], work: KeyThreads) -> None:
        super().__init__(id, secret, session, session.task.sampling, session.task.split == "train", work)
        self.observation = observation
        self.gone = False
        """The process has ended."""
        self.given_up = False
        """The agent has cancelled the episode."""

    def require_open(self) -> None:
        if self.gone or self.ended.is_set():
            raise over(self.id, "its agent has ended" if self.gone else "it is being scored")

    async def finish(self) -> dict[str, Any]:
        """Let the episode be scored; that happens when the agent's process has ended, so its reward is not known yet."""
        if not self.ended.is_set():
            self.end()
        return {"trajectory_id": self.trajectory_id, "status": "finishing", "reward": 0.0, "rewards": {}, "error": None}


class AgentGateway:
    """A server on this machine that agents in processes of their own talk to, and the agent that starts them.

    Args:
        command: what is started for every episode: words, or a line that is split as a shell would.
        processor: of the model.
        store: where media are.
        threads: that read media.
        fork: whether a Python program may be forked from a process that has imported its libraries.

    Raises:
        ConfigError: the command is empty, or its quotes do not match.
    """

    def __init__(
        self, command: str | Sequence[str], processor: Processor, store: MediaStore, threads: CallThreads, fork: bool = True
    ) -> None:
        try:
            self.command = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
        except ValueError as error:
            raise ConfigError(f"agent = {command!r}: not a command line ({error})") from error
        if not self.command:
            raise ConfigError("agent is an empty command; name a program, such as 'python my_agent.py'")
        self._processes = AgentProcesses(self.command, fork)
        self.processor, self.store, self.media_threads, self.max_body = processor, store, threads, MAX_BODY
        self._work = FairThreads("agents")
        self.url = ""
        self._sessions: dict[str, AgentSession] = {}
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------------------- playing

    async def play(self, session: Any) -> None:
        """Play one episode: the process's end, or its `finish`, ends it.

        Raises:
            EpisodeError: the program cannot be started, or ended with an error; its last output is told.
        """
        assert isinstance(session, EpisodeSession)
        if not self.url:
            await self.start()
        observation = await session.reset()
        id, secret = f"s_{secrets.token_hex(8)}", f"rls_{secrets.token_urlsafe(32)}"
        played = self._sessions[id] = AgentSession(id, secret, session, observation, self._work.of(id))
        try:
            await self._run(played, secret)
        finally:
            played.gone = True
            del self._sessions[id]

    async def _run(self, played: AgentSession, secret: str) -> None:
        """Start the process, keep the end of its output, and see to it that it ends."""
        base = f"{self.url}/v1/sessions/{played.id}/openai/v1"
        told = {"RELAX_BASE_URL": self.url, "RELAX_SESSION_ID": played.id, "RELAX_SESSION_KEY": secret}
        told |= {"OPENAI_BASE_URL": base, "OPENAI_API_KEY": secret}
        process = await self._processes.start(told)
        output = bytearray()
        reading = asyncio.create_task(_keep_end(process, output))
        ended, finished = asyncio.create_task(process.wait()), asyncio.create_task(played.ended.wait())
        try:
            await asyncio.wait({ended, finished}, return_when=asyncio.FIRST_COMPLETED)
            if finished.done() and not ended.done():
                await asyncio.wait({ended}, timeout=TERM_SECONDS)
        finally:
            finished.cancel()
            await end(process)
            reading.cancel()
            text = bytes(output).decode(errors="replace")
            played.session.extra_info["agent_output"] = text
            ended.cancel()
        if played.session.limit_reached is not None:
            return  # an agent that knows of no limit falls over the call that was refused; the episode is scored all the same
        if played.given_up:
            raise EpisodeError(f"the agent gave up; its last output:\n{text[-2000:]}")
        if process.returncode and not played.ended.is_set():
            raise EpisodeError(f"the agent ended with exit code {process.returncode}; its last output:\n{text[-2000:]}")

    # ------------------------------------------------------------------------------------------------------- serving

    async def start(self) -> None:
        """Listen on a port of this machine."""
        if self._serving is not None:
            return
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind((HOST, 0))
        listener.listen(4096)
        config = uvicorn.Config(self.app(), log_level="warning", access_log=False, lifespan="off", proxy_headers=False)
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        self.url = f"http://{HOST}:{listener.getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._serving, CLOSE_SECONDS)
        await self._processes.close()
        self.media_threads.close()
        self._work.close()

    def app(self) -> GuardedApp:
        """The routes of a session, as the rollout service has them; each asks for the session's own key."""
        base = "/v1/sessions/{id}"
        routes = [
            Route(f"{base}/openai/v1/chat/completions", ChatRoute(self, self.find).handle, methods=["POST"]),
            Route(f"{base}/openai/v1/responses", ResponsesRoute(self, self.find).handle, methods=["POST"]),
            Route(base, self._route(self._state), methods=["GET"]),
            Route(base, self._route(self._cancel), methods=["DELETE"]),
            Route(f"{base}/step", self._route(self._step), methods=["POST"]),
            Route(f"{base}/reward", self._route(self._reward), methods=["POST"]),
            Route(f"{base}/finish", self._route(self._finish), methods=["POST"]),
        ]
        return GuardedApp(Starlette(routes=routes), Guard(hosts=hosts_of(HOST)))

    async def find(self, request: HTTPConnection) -> AgentSession:
        """The session in a request's path, for its own key.

        Raises:
            ApiError: there is none.
        """
        session = self._sessions.get(request.path_params["id"])
        if session is None or not session.opens_with(bearer(request)):
            raise unknown("session", request.path_params["id"], ": its episode is over, or the key is another's")
        return session

    async def media_ref(self, sha256: str, kind: Kind | None = None) -> MediaRef | None:
        return await self.media_threads.call(self.store.find, sha256, kind, limit=MEDIA_LIMIT)

    async def take_media(self, kind: Kind, data: bytes, owner: str) -> MediaRef:
        """The agents are the run's own: what they send is decoded here."""
        return await self.media_threads.call(lambda: self.store.put(PARTS[kind].from_bytes(data)), limit=MEDIA_LIMIT)

    def _route(self, work: Any) -> Any:
        async def answer(request: Request) -> Response:
            try:
                return json_response(await work(request, await self.find(request)))
            except RelaxError as error:
                return error_response(as_api_error(error))
            except Exception as error:
                logger.exception("%s %s failed", request.method, request.url.path)
                return error_response(ApiError(500, f"{type(error).__name__}: {error}", "internal_error"))

        return answer

    async def _state(self, request: Request, session: AgentSession) -> Any:
        return {
            "id": session.id,
            "observation": on_wire(session.observation, session.media_form),
            "tools": list(session.session.tools),
            "seed": session.session.task.seed,
            "trajectory_id": session.trajectory_id,
            "done": session.session.done,
        }

    async def _step(self, request: Request, session: AgentSession) -> Any:
        return await take_step(self, session, await self._body(StepBody, request, session))

    async def _reward(self, request: Request, session: AgentSession) -> Any:
        return session.reward(await self._body(RewardBody, request, session))

    async def _finish(self, request: Request, session: AgentSession) -> Any:
        return await session.finish()

    async def _cancel(self, request: Request, session: AgentSession) -> Any:
        session.given_up = True
        session.ended.set()
        return {"id": session.id, "state": "cancelled"}

    async def _body(self, kind: type[B], request: Request, session: AgentSession) -> B:
        return checked(kind, (await parse(await read_body(request, self.max_body), session.work)).value)


async def _keep_end(process: AgentProcess, output: bytearray) -> None:
    """Read what a process writes, and keep the end of it."""
    while part := await process.output.read(1 << 16):
        output += part
        del output[:-KEPT_OUTPUT]
