"""A black-box agent: the plain `openai` client against the base URL in its environment. `python -m relax_agents.openai_loop`.

It is told where to go by `OPENAI_BASE_URL` and `OPENAI_API_KEY`, which any OpenAI client heeds, and acts in the episode's
environment through `relax_sdk.client.attach`.
"""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from relax_sdk.client import attach


def main() -> None:
    """Play one episode."""
    policy = OpenAI()
    with attach() as session:
        messages: list[Any] = list(session.observation)
        while True:
            answer = policy.chat.completions.create(model="policy", messages=messages).choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            step = session.step(messages[-1])
            if step.done:
                break
            messages += step.observation
        session.finish()


if __name__ == "__main__":
    main()
