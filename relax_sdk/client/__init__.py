"""`Client` and `AsyncClient`: a rollout service from Python, with the same names in both.

with relax.Client("http://127.0.0.1:8000") as service, service.session("tone-v0") as session:
    answer = session.chat(session.observation)
    session.step(answer)
    print(session.finish().reward)
"""

from relax_sdk.client.aio import AsyncClient, AsyncRemoteRun, AsyncRemoteSession, AsyncRollout
from relax_sdk.client.calls import Event, Finished, RolloutState, RunState, Step
from relax_sdk.client.sync import Client, RemoteRun, RemoteSession, Rollout, attach

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
