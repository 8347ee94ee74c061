"""`Client` and `AsyncClient`: a rollout service from Python, with the same names in both.

with relax.Client("http://127.0.0.1:8000") as service, service.session("tone-v0") as session:
    answer = session.chat(session.observation)
    session.step(answer)
    print(session.finish().reward)
"""

from relax_sdk.client.rollouts import AsyncRollout, Rollout, RolloutState
from relax_sdk.client.runs import AsyncRemoteRun, RemoteRun, RunState
from relax_sdk.client.service import AsyncClient, Client
from relax_sdk.client.sessions import AsyncRemoteSession, Finished, RemoteSession, Step, attach
from relax_sdk.client.transport import Event

__all__ = [
    "AsyncClient",
    "AsyncRemoteRun",
    "AsyncRemoteSession",
    "AsyncRollout",
    "Client",
    "Event",
    "Finished",
    "RemoteRun",
    "RemoteSession",
    "Rollout",
    "RolloutState",
    "RunState",
    "Step",
    "attach",
]
