"""Environments in other workers of the service: hosts are connected to worker 0, and others play them over its relay."""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from relax_sdk.hosting.protocol import Description
from relax_server.api.environments.relay_link import RelayLink
from relax_server.api.environments.sockets import SocketLink
from relax_server.api.workers.channel import Message
from relax_server.api.workers.place import HOME, WorkerPlace
from relax_server.rollout.hosted import HostLink

HOSTED, CHANGED = "hosted", "environment"


class OtherWorkers:
    """What the workers of a service tell each other of environments. Belongs to one event loop.

    Args:
        place: of this worker.
        media: the service's folder of media.
        hosted: the way to an environment that is hosted here; None: it is not.
        changed: told the name of an environment that has come or gone at worker 0.
    """

    def __init__(
        self,
        place: WorkerPlace,
        media: Path,
        hosted: Callable[[str], SocketLink | None],
        changed: Callable[[str], object],
    ) -> None:
        self._place, self._media, self._hosted = place, media, hosted
        self.relay_url = ""
        """Address of the relay; known when the service listens."""
        self._secrets: dict[str, tuple[SocketLink, str]] = {}
        place.on(HOSTED, self._told)
        self._changed = changed
        place.on(CHANGED, self._heard)

    def tell(self, env: str) -> None:
        """An environment has come or gone here; what comes and goes at worker 0 is known to the others at once."""
        if self._place.home:
            self._place.tell_others(CHANGED, env=env)

    async def find(self, env: str, known: HostLink | None) -> tuple[RelayLink, str, Description] | None:
        """An environment whose host is connected to worker 0.

        Args:
            env: its name.
            known: the way to it, as it was found last.

        Returns:
            The way, which is `known` if that still leads there, the id of its owner, and what it is; None: there is none.

        Raises:
            ApiError: worker 0 is not there.
        """
        if self._place.home:
            return None
        told = await self._place.ask(HOME, HOSTED, env=env)
        if not told:
            return None
        link = RelayLink(env, self.relay_url, told["secret"], self._media)
        if isinstance(known, RelayLink) and known.leads_as(link):
            link = known
        return link, told["owner"], msgspec.msgpack.decode(base64.b64decode(told["description"]), type=Description)

    def relayed(self, secret: str) -> str | None:
        """The environment that the holder of a secret may play."""
        known = ((env, own) for env, (_, own) in self._secrets.items())
        return next((env for env, own in known if hmac.compare_digest(own.encode(), secret.encode())), None)

    def _heard(self, message: Message) -> None:
        self._changed(message.body["env"])

    def _told(self, message: Message) -> dict[str, str]:
        env = message.body["env"]
        link = self._hosted(env)
        if link is None:
            self._secrets.pop(env, None)
            return {}
        if env not in self._secrets or self._secrets[env][0] is not link:
            self._secrets[env] = link, secrets.token_urlsafe(32)
        description = base64.b64encode(msgspec.msgpack.encode(link.description)).decode()
        return {"secret": self._secrets[env][1], "owner": link.owner, "description": description}
