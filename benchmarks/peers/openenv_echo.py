"""OpenEnv's server with an echo environment; run by `benchmarks.gyms` and `benchmarks.sessions` in the peers' venv.

    python openenv_echo.py --port 8000 [--turns 5] [--step plain | async | wait] [--sessions 4096]

`plain`: methods are called in a thread for each session, as OpenEnv does with them. `async`: in the event loop. `wait`: as
`async`, each step waits a second first.
"""

import argparse
import asyncio

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Answer(Action):
    """What the policy said."""

    content: str


class Shown(Observation):
    """What the policy is shown."""

    text: str = ""


class Echo(Environment):
    """`turns` turns of text."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    turns = 1

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def reset(self, seed=None, episode_id=None, **_):
        self.turn = 0
        return Shown(text="question: which letter?", reward=0.0, done=False)

    def step(self, action, timeout_s=None, **_):
        self.turn += 1
        over = self.turn == self.turns
        return Shown(text=f"wrong, try again ({self.turn})", reward=float(action.content == "A"), done=over)

    @property
    def state(self) -> State:
        return State(step_count=self.turn)


class EchoAsync(Echo):
    """The same with coroutines."""

    async def reset_async(self, seed=None, episode_id=None, **_):
        return self.reset()

    async def step_async(self, action, timeout_s=None, **_):
        return self.step(action)


class Waits(EchoAsync):
    """Each step waits a second and holds no thread meanwhile."""

    async def step_async(self, action, timeout_s=None, **_):
        await asyncio.sleep(1.0)
        return self.step(action)


KINDS = {"plain": Echo, "async": EchoAsync, "wait": Waits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--step", choices=list(KINDS), default="plain")
    parser.add_argument("--sessions", type=int, default=4096)
    args = parser.parse_args()
    kind = KINDS[args.step]
    kind.turns = args.turns
    app = create_app(kind, Answer, Shown, env_name="echo", max_concurrent_envs=args.sessions)
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning", backlog=4096)


if __name__ == "__main__":
    main()
