"""What is declared of an architecture: one `Family`, which engine, processor and trainer read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from relax_sdk.errors import ConfigError
from relax_server.models.media_places import MediaTokens, PlaceRule

Sections = Literal["interleaved", "blocks"]
Served = Literal["tested", "untested"] | None
"""How an engine of somebody else serves an architecture: our tests run it; it has it and they do not; or it is refused."""


@dataclass(frozen=True)
class Tower:
    """A part of a model in front of its decoder, which transformers computes in engine and trainer alike."""

    module: str
    """Module below `transformers.models`, such as `qwen3_vl.modeling_qwen3_vl`."""
    cls: str
    config: str
    """The attribute of the model's configuration that holds the tower's."""
    first: str
    """A parameter that every such tower has; finds its prefix in a model folder."""

    def build(self, config: Any) -> Any:
        """A tower with random weights, or with none yet within `no_init_weights` of transformers.

        Args:
            config: of the whole model.
        """
        module = import_module(f"transformers.models.{self.module}")
        return getattr(module, self.cls)._from_config(getattr(config, self.config))


@dataclass(frozen=True)
class MediaRule:
    """How a family takes media."""

    visual: Tower
    """For images and videos."""
    audio: Tower | None
    """None: it hears nothing."""
    mrope: Sections
    """How the channels of a head are dealt to the coordinates (time, height, width)."""
    place: PlaceRule
    """What a placeholder becomes, and where its tokens are."""
    collapse: Callable[[Sequence[int], MediaTokens], list[int]] | None = None
    """Undoes what `place` does besides repeating a placeholder; None: nothing."""
    audio_tokens: Callable[[int], int] | None = None
    """Placeholders of a sound of so many mel frames."""
    padded_sounds: bool = False
    """Whether a sound's spectrogram is cut out of that of a longer, silent one, as its processor does."""
    tells_times: bool = False
    """Whether the model is told, in text, when each part of a film is shown."""
    video_processor: str = "Qwen2VLVideoProcessor"
    """Class of its video processor in transformers."""
    hf_seconds: str | None = "video_second_per_grid"
    """What `forward` of transformers calls the seconds that a temporal patch of a film spans; None: it takes none."""
    hf_types: bool = False
    """Whether `forward` of transformers is told which tokens are media."""
    audio_in_video: bool = False
    """Whether the sound of a video can be heard with it, interleaved by time."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of media that are taken."""
        return ("image", "video") if self.audio is None else ("image", "audio", "video")

    @property
    def towers(self) -> dict[str, Tower]:
        """By the names that transformers gives them."""
        return {"visual": self.visual} | ({"audio_tower": self.audio} if self.audio is not None else {})


@dataclass(frozen=True)
class Whole:
    """A folder that holds the trained part beside others, which stay as they are."""

    model_type: str
    config: str = "thinker_config"
    """The attribute of its configuration that holds the trained part's."""
    prefix: str = "thinker."
    """What the names of the trained part's weights begin with."""
    files: tuple[str, ...] = ()
    """Files that belong to it, though their names look like those of weights."""


@dataclass(frozen=True)
class Family:
    """An architecture. Each is declared in one file of this folder and listed in `TABLE`."""

    name: str
    """As its makers write it; the key of the table."""
    models: str
    """Published models of this architecture, for people."""
    model_type: str
    """In `config.json`."""
    cls: str
    """transformers' class of the whole trained part, with its head."""
    tiny: str
    """The built-in random model: `relax/tiny-…`."""
    tiny_config: Callable[[Mapping[str, int], int], dict[str, Any]]
    """Arguments of its configuration, from the ids of the media tokens (and `pad`, `eos`, `u`) and the size of the
    vocabulary."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    media: MediaRule | None = None
    """None: text only."""
    whole: Whole | None = None
    transposes_experts: bool = False
    """Whether published folders stack experts as [experts, inputs, outputs], and transformers [experts, outputs, inputs]."""
    sglang: Served = None
    """Whether SGLang serves it to this trainer; one that takes media needs a plugin of ours there."""
    vllm: Served = None

    def text(self, config: Any) -> Any:
        """The language model's part of a configuration."""
        return config if self.media is None else config.text_config

    def config_class(self) -> Any:
        """The class of its configuration in transformers."""
        import transformers

        return getattr(transformers, self.cls).config_class

    def model_class(self) -> Any:
        """The class of its model in transformers."""
        import transformers

        return getattr(transformers, self.cls)


def check_supported(config: Any, source: str) -> None:
    """Refuse what engine and trainer would compute otherwise than transformers.

    Args:
        config: of the language model.
        source: named in the message.

    Raises:
        ConfigError: the setting, its value and what is allowed.
    """
    for field in ("attention_bias", "mlp_bias"):
        if getattr(config, field, None):
            raise ConfigError(f"{source}: {field} = True is not supported for {config.model_type}; choose a model without")
    if getattr(config, "hidden_act", None) not in ("silu", None):
        raise ConfigError(f"{source}: hidden_act = {config.hidden_act!r} is not supported; allowed: 'silu'")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or window:
        raise ConfigError(
            f"{source}: sliding-window attention (sliding_window = {window}, layer_types {sorted(kinds)}) is not supported; "
            "choose a model without it, or one whose config.json has sliding_window: null"
        )
