"""Requests to a rollout service and streams of its events: what is sent, and what is sent again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relax_sdk.errors import ServiceError, ServiceUnavailable
from relax_sdk.messages import Message
from relax_sdk.retrying import retry_after, retrying, retrying_in_thread

if TYPE_CHECKING:
    import httpx

URL = "http://127.0.0.1:8000"
TIMEOUT = 600.0
"""Seconds for one request."""
ATTEMPTS, FIRST_PAUSE, LONGEST_PAUSE = 8, 0.2, 8.0
"""Tries of a request that is safe to repeat, enough for a service that is started again; seconds between two tries."""
STREAM_TIMEOUT = 60.0
"""Seconds of silence after which an event stream is opened again; the service gives a sign of life every 15."""
AGAIN = frozenset({429, 502, 503, 504})
"""Answers after which a request is repeated, if that is safe."""
REFUSED = frozenset({429, 503})
"""Answers that say nothing was done, so that any request may be repeated."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a rollout, a session or a run."""

    id: int
    """Rises; a stream can be resumed behind it."""
    kind: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One request."""

    method: str
    path: str
    json: Any = None
    content: bytes | None = None
    """Sent as `application/octet-stream`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    safe: bool = True
    """Doing it twice is the same as doing it once."""
    raw: bool = False
    """The answer is bytes, not JSON."""

    @property
    def sent_headers(self) -> dict[str, str]:
        """Headers of the request."""
        kind = {"Content-Type": "application/octet-stream"} if self.content is not None else {}
        return kind | dict(self.headers)

    def passes(self, error: BaseException) -> bool:
        """Whether it may be sent again after an error."""
        return isinstance(error, ServiceUnavailable) and (self.safe or error.status in REFUSED)


class _Settings:
    """What both transports are made with."""

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.verify = self.url.startswith("https:")
        """Reading the certificates takes a tenth of a second, and is for nothing where nothing is encrypted."""

    def _stream_options(self, after: int) -> dict[str, Any]:
        import httpx

        return {"headers": {"Last-Event-ID": str(after)}, "timeout": httpx.Timeout(self.timeout, read=STREAM_TIMEOUT)}

    def _unreachable(self, error: Exception) -> ServiceUnavailable:
        why = str(error) or type(error).__name__
        return ServiceUnavailable(f"the rollout service at {self.url} cannot be reached ({why}); start it with `relax serve`")


class Transport(_Settings):
    """Sends requests to a rollout service.

    Args:
        url: of the service.
        key: for services that want one.
        timeout: seconds for one request.
    """

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        import httpx

        super().__init__(url, key, timeout)
        self._http = httpx.Client(base_url=self.url, headers=self.headers, timeout=timeout, verify=self.verify)

    def send(self, call: Call) -> Any:
        """The answer to a request, which is sent again with growing pauses where that is safe and the error may pass.

        Returns:
            The JSON of the answer, or its bytes if the call is `raw`.

        Raises:
            ServiceUnavailable: the service cannot be reached or is busy, also at the last try.
            ServiceError: it refuses.
        """
        again = retrying_in_thread(call.passes, FIRST_PAUSE, longest_pause=LONGEST_PAUSE, attempts=ATTEMPTS)
        return again(self._try, call)

    def _try(self, call: Call) -> Any:
        import httpx

        try:
            response = self._http.request(
                call.method, call.path, json=call.json, content=call.content, params=call.params, headers=call.sent_headers
            )
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        return _read(call, response)

    def events(self, path: str, after: int) -> Generator[Event]:
        """Yield the events of a stream until `finished`; a stream that breaks off is opened again behind the last event.

        Args:
            path: of the stream.
            after: only behind the event with this id.

        Raises:
            ServiceUnavailable: as `send`, where no event came in between.
            ServiceError: the service refuses.
        """
        stream = self._open(path, after)

        def following() -> Event:
            nonlocal stream
            try:
                return next(stream)
            except ServiceUnavailable:
                stream = self._open(path, after)
                raise

        try:
            while True:
                again = retrying_in_thread(ServiceUnavailable, FIRST_PAUSE, longest_pause=LONGEST_PAUSE, attempts=ATTEMPTS)
                event = again(following)
                after = event.id
                yield event
                if event.kind == "finished":
                    return
        finally:
            stream.close()

    def _open(self, path: str, after: int) -> Generator[Event]:
        """One connection, until it breaks off."""
        import httpx
        from httpx_sse import connect_sse

        try:
            with connect_sse(self._http, "GET", path, **self._stream_options(after)) as stream:
                if not stream.response.is_success:
                    stream.response.read()
                    raise _failed(stream.response)
                for line in stream.iter_sse():
                    if line.data:  # httpx-sse makes an empty event of a sign of life
                        yield Event(int(line.id), line.event, line.json())
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        raise _broken(path)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


class AsyncTransport(_Settings):
    """`Transport` for asyncio; see there."""

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        import httpx

        super().__init__(url, key, timeout)
        self._http = httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=timeout, verify=self.verify)

    async def send(self, call: Call) -> Any:
        """See `Transport.send`."""
        again = retrying(call.passes, FIRST_PAUSE, longest_pause=LONGEST_PAUSE, attempts=ATTEMPTS)
        return await again(self._try, call)

    async def _try(self, call: Call) -> Any:
        import httpx

        try:
            response = await self._http.request(
                call.method, call.path, json=call.json, content=call.content, params=call.params, headers=call.sent_headers
            )
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        return _read(call, response)

    async def events(self, path: str, after: int) -> AsyncGenerator[Event]:
        """See `Transport.events`."""
        stream = self._open(path, after)

        async def following() -> Event:
            nonlocal stream
            try:
                return await anext(stream)
            except ServiceUnavailable:
                stream = self._open(path, after)
                raise

        try:
            while True:
                again = retrying(ServiceUnavailable, FIRST_PAUSE, longest_pause=LONGEST_PAUSE, attempts=ATTEMPTS)
                event = await again(following)
                after = event.id
                yield event
                if event.kind == "finished":
                    return
        finally:
            await stream.aclose()

    async def _open(self, path: str, after: int) -> AsyncGenerator[Event]:
        import httpx
        from httpx_sse import aconnect_sse

        try:
            async with aconnect_sse(self._http, "GET", path, **self._stream_options(after)) as stream:
                if not stream.response.is_success:
                    await stream.response.aread()
                    raise _failed(stream.response)
                async for line in stream.aiter_sse():
                    if line.data:  # httpx-sse makes an empty event of a sign of life
                        yield Event(int(line.id), line.event, line.json())
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        raise _broken(path)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def wire(message: Any) -> Any:
    """A message as it is sent, its media in it; what is no `Message` goes as it is."""
    return message.to_openai(lambda part: part.data_uri()) if isinstance(message, Message) else message


def _read(call: Call, response: httpx.Response) -> Any:
    if not response.is_success:
        raise _failed(response)
    return response.content if call.raw else response.json()


def _failed(response: httpx.Response) -> ServiceError:
    """The error in a response."""
    try:
        error = response.json()["error"]
        message, code = error["message"], error["code"]
    except (ValueError, LookupError, TypeError):
        message, code = response.text[:300] or response.reason_phrase, "http_error"
    kind = ServiceUnavailable if response.status_code in AGAIN else ServiceError
    where = f"{response.request.method} {response.request.url.path}"
    return kind(f"{where}: {message}", response.status_code, code, retry_after(response.headers, LONGEST_PAUSE))


def _broken(path: str) -> ServiceUnavailable:
    return ServiceUnavailable(f"{path}: the stream of events ended early")
