"""The command `relax plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from relax_sdk.cli_settings import examples
from relax_sdk.planning import MemoryPlan, PlanRequest, parse_devices, parse_layout, parse_tuning, plan_memory
from relax_sdk.training_config import Recompute

app = typer.Typer()
MEDIA = {"visual": ("--visual-tokens", "an image or a film"), "audio_tower": ("--audio-tokens", "a sound")}
"""The option that says how many tokens a tower takes, and what they are of."""


@app.command(
    epilog=examples(
        "relax plan --model ~/models/Qwen3-8B --devices 8x80GB",
        "relax plan --model ~/models/Qwen3-30B-A3B --devices 1x80GB --set lora.rank=16 --recompute-selective",
        "relax plan --model relax/tiny-omni --devices 4x24GB --layout tp=2,dp=2",
    )
)
def plan(
    model: Annotated[str, typer.Option(help="A built-in name or a Hugging Face folder; only its configuration is read.")],
    devices: Annotated[str, typer.Option(help="Number and memory of the trainer's devices, such as 8x80GB.")],
    layout: Annotated[str | None, typer.Option(help="One layout, such as tp=2,dp=4; without it all that fit.")] = None,
    tokens: Annotated[int, typer.Option(help="training.token_budget: tokens of a forest.")] = 8192,
    dtype: Annotated[str, typer.Option(help="training.dtype: bfloat16 or float32.")] = "bfloat16",
    recompute: Annotated[
        bool, typer.Option("--recompute", help="training.recompute=true: whole layers, also of towers.")
    ] = False,
    selective: Annotated[
        bool, typer.Option("--recompute-selective", help="training.recompute='selective': attention alone.")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="What is trained, such as lora.rank=16 or towers.visual=freeze.")
    ] = None,
    offload: Annotated[
        bool,
        typer.Option("--offload-optimizer", help="training.offload='optimizer': its state is on the host between updates."),
    ] = False,
    visual_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of different images and films in a forest of --tokens.")
    ] = 0,
    audio_tokens: Annotated[int, typer.Option(min=0, help="Tokens of different sounds, those of films included.")] = 0,
    reference: Annotated[
        bool, typer.Option("--reference", help="The policy keeps a copy of what it trains, for the KL term.")
    ] = False,
    most: Annotated[int, typer.Option(help="Layouts shown.")] = 10,
) -> None:
    """Say how much memory training takes on every rank, from the model's configuration alone."""
    from relax_sdk.config import TrainingConfig
    from relax_sdk.progress import Waiting

    number, size = parse_devices(devices)
    way = "optimizer" if offload else "none"
    again: Recompute = recompute or ("selective" if selective else False)
    training = TrainingConfig(token_budget=tokens, dtype=dtype, recompute=again, offload=way)  # type: ignore[arg-type] - checked
    chosen = parse_layout(layout) if layout is not None else None
    tuning = parse_tuning(settings or [])
    request = PlanRequest(model, number, size, chosen, training, reference, tuning, visual_tokens, audio_tokens)
    with Waiting(f"planning {model}"):
        found = plan_memory(request)
    kinds = ("weights", "gradients", "optimizer", "reference", "activations", "towers", "logits", "attention_plan", "total")
    typer.echo(f"{'GB of a rank':<42} stage " + " ".join(f"{kind.replace('_', ' '):>14}" for kind in kinds) + "  fits")
    for planned in found.layouts[:most]:
        for rank in planned.ranks:
            cells = " ".join(f"{getattr(rank, kind) / 1e9:>14.3f}" for kind in kinds)
            typer.echo(f"{planned.layout!s:<42} {rank.stage:>5} {cells}  {'yes' if planned.fits else 'NO'}")
    room = f"it has room for {found.kv_tokens:,} tokens" if found.kv_tokens else "its weights do not fit"
    typer.echo(
        f"{found.parameters:,} parameters. An engine holds {found.engine_weights / 1e9:.3f} GB of weights and "
        f"{found.kv_bytes_per_token:,} bytes of keys and values a token: on a device of its own {room}."
    )
    _tell_of_towers(found, {"visual": visual_tokens, "audio_tower": audio_tokens})
    if not found.layouts:
        typer.echo(
            "no layout fits: use --recompute-selective or --recompute, --offload-optimizer, --set lora.rank=16, fewer "
            "--tokens, or more devices"
        )
        raise typer.Exit(1)


def _tell_of_towers(found: MemoryPlan, planned: Mapping[str, int]) -> None:
    """Say how many bytes each trained tower keeps for a token, and how many tokens were planned.

    Args:
        found: the plan.
        planned: tokens of media in a forest, by tower.
    """
    parts = []
    for tower, size in found.tower_bytes_per_token.items():
        option, media = MEDIA[tower]
        count = f"{planned[tower]:,} planned" if planned[tower] else "none planned"
        chunks = f"; a longer sound than {found.chunk_tokens} in whole chunks" if tower == "audio_tower" else ""
        if size:
            parts.append(f"{size / 1e6:.3f} MB for each token of {media} ({option}: {count}{chunks})")
    if parts:
        typer.echo(f"For the backward pass, towers on the first stage keep {', and '.join(parts)}.")
