"""Commands that look at a rollout service: sessions, rollouts, runs, one episode, and what happens."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from relax_sdk.client.transport import URL
from relax_sdk.errors import ConfigError
from relax_sdk.printable import printable

app = typer.Typer()

Server = Annotated[str, typer.Option(envvar="RELAX_URL", help="URL of the rollout service.")]
Key = Annotated[str | None, typer.Option(envvar="RELAX_KEY", help="A key, if the service wants one.", show_default=False)]

LISTS = {
    "sessions": ("id", "env", "state", "turns", "trajectory_id", "error"),
    "rollouts": ("id", "env", "state", "done", "groups", "error"),
    "runs": ("id", "env", "state", "step", "error"),
}
PREFIXES = {"s_": "sessions", "r_": "rollouts", "t_": "runs"}


def _client(server: str, key: str | None) -> Any:
    from relax_sdk.client import Client

    return Client(server, key)


def _table(what: str, server: str, key: str | None) -> None:
    from rich.console import Console

    from relax_sdk.client.transport import Call

    with _client(server, key) as client:
        rows = client.transport.send(Call("GET", f"/v1/{what}"))[what]
    table = Table()
    for name in LISTS[what]:
        whole = name in ("id", "trajectory_id")  # they are there to be copied
        table.add_column(name, no_wrap=whole, overflow="fold")
    for row in rows:
        known = row.get("request", {}) | row.get("counts", {}) | row
        table.add_row(*(Text(printable(str(known[name]))) if known.get(name) is not None else "" for name in LISTS[what]))
    console = Console(width=max(Console().width, _least_width(table)))
    console.print(table if rows else f"no {what} at {server}")


def _least_width(table: Table) -> int:
    """Columns of the terminal in which no id is cut."""
    ids = [max((len(str(cell)) for cell in column.cells), default=0) for column in table.columns if column.no_wrap]
    return sum(max(length, 13) for length in ids) + 8 * (len(table.columns) - len(ids)) + 3 * len(table.columns) + 1


def _whole_id(client: Any, kind: str, id: str) -> str:
    """The id that begins like this; as it is where none does, so that the service says what it thinks of it.

    Raises:
        ConfigError: several ids begin like this.
    """
    from relax_sdk.client.transport import Call

    ids = [row["id"] for row in client.transport.send(Call("GET", f"/v1/{kind}"))[kind]]
    matching = [known for known in ids if known.startswith(id)]
    if id in matching or not matching:
        return id
    if len(matching) > 1:
        raise ConfigError(f"{len(matching)} {kind} begin with {id!r}: {', '.join(matching[:4])}{', …' if matching[4:] else ''}")
    return matching[0]


@app.command()
def sessions(server: Server = URL, key: Key = None) -> None:
    """List the sessions of a rollout service."""
    _table("sessions", server, key)


@app.command()
def rollouts(server: Server = URL, key: Key = None) -> None:
    """List the rollouts of a rollout service."""
    _table("rollouts", server, key)


@app.command()
def runs(server: Server = URL, key: Key = None) -> None:
    """List the training runs of a rollout service."""
    _table("runs", server, key)


@app.command()
def episode(
    id: Annotated[str, typer.Argument(help="Id of a trajectory, or of a session that is finished; its beginning will do.")],
    server: Server = URL,
    key: Key = None,
) -> None:
    """Show an episode: what was said, the tokens of every turn, and the reward."""
    from relax_sdk.client.transport import Call

    with _client(server, key) as client:
        if id.startswith("s_"):
            id = _whole_id(client, "sessions", id)
            id = client.transport.send(Call("GET", f"/v1/sessions/{id}"))["trajectory_id"]
        played = client.trajectory(id)
    typer.echo(f"{printable(played.id)}: {played.env}, task {played.task_index}, seed {played.seed}")
    for message in played.messages:
        typer.echo(printable(f"\n[{message['role']}] {_shown(message)}"))
    typer.echo("")
    for number, turn in enumerate(played.turns, 1):
        versions = sorted({span.version for span in turn.weight_versions})
        mean = sum(turn.response_logprobs) / max(1, len(turn.response_logprobs))
        drawn = turn.sampling.sampling_seed if turn.sampling is not None else None
        seed = "" if drawn is None else f", seed {drawn}"
        typer.echo(
            f"turn {number}: {len(turn.prompt_ids)} tokens in, {len(turn.response_ids)} out, {len(turn.media)} media, "
            f"mean logprob {mean:.3f}, weights {', '.join(map(str, versions))}, {turn.finish_reason}{seed}"
        )
    parts = printable(", ".join(f"{name} {value:g}" for name, value in played.rewards.items()))
    typer.echo(f"{played.status}, reward {played.reward:g}" + (f" ({parts})" if parts else ""))
    if played.error:
        typer.echo(printable(f"error: {played.error}"))


@app.command()
def follow(
    id: Annotated[str, typer.Argument(help="Id of a session (s_…), a rollout (r_…) or a run (t_…); its beginning will do.")],
    server: Server = URL,
    key: Key = None,
) -> None:
    """Follow what happens, from the beginning to the end."""
    kind = PREFIXES.get(id[:2])
    if kind is None:
        raise ConfigError(f"id = {id!r}; allowed: of a session (s_…), a rollout (r_…) or a run (t_…)")
    with _client(server, key) as client:
        id = _whole_id(client, kind, id)
        for event in client.transport.events(f"/v1/{kind}/{id}/events", 0):
            values = (f"{name}={_short(value)}" for name, value in event.data.items() if value is not None)
            typer.echo(printable(f"{event.kind}: {' '.join(values)}"))


def _shown(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        parts = [part.get("text") or f"<{part['type'].removesuffix('_url')}>" for part in content]
        content = " ".join(parts)
    calls = (f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ())
    return " ".join([content, *calls]).strip()


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{len(value)}]"
    return str(value)
