"""A run's settings of media, kept in the model folder that all of its processes read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from relax_sdk.errors import ConfigError
from relax_sdk.media_config import MediaConfig
from relax_server.models.families import media_rule
from relax_server.models.layout import model_config

FILE = "relax_media.json"


def read_settings(folder: Path) -> MediaConfig:
    """The settings that a model folder states; those of the model's own processor where it states none.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return MediaConfig(**json.loads((folder / FILE).read_text()))
    except FileNotFoundError:
        return MediaConfig()
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder / FILE}: cannot be read ({error}); delete it, or state settings of MediaConfig") from error


def with_media(folder: Path, media: MediaConfig, cache: Path) -> Path:
    """A folder of the same model that states settings of media; its other files are links.

    Args:
        folder: of the model.
        media: what to state; where it is all default, the answer is `folder` itself.
        cache: where the folder is made; one that is there is made anew, as files may have been added.

    Raises:
        ConfigError: the model does not take what the settings are about.
    """
    if media == MediaConfig():
        return folder
    rule, kind = media_rule(folder), model_config(folder).get("model_type")
    if rule is None:
        raise ConfigError(f"media = {_changed(media)}: the model {folder.name} ({kind}) takes text only; leave media out")
    if media.use_audio_in_video and not rule.audio_in_video:
        raise ConfigError(
            f"media.use_audio_in_video = True: the model {folder.name} ({kind}) does not hear films; choose a Qwen2.5-Omni or "
            "Qwen3-Omni thinker, or leave it out"
        )
    text = json.dumps(_changed(media), sort_keys=True)
    digest = hashlib.sha256(f"{folder.resolve()}\n{text}".encode()).hexdigest()[:12]
    target = cache / f"{folder.name}-media-{digest}"
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=cache, prefix=".media-"))
    try:
        for file in folder.resolve().iterdir():
            if file.is_file() and file.name != FILE:
                (made / file.name).symlink_to(file)
        (made / FILE).write_text(text)
        if _same(made, target):
            return target
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        if target.exists():
            os.rename(target, old)
        os.rename(made, target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _changed(media: MediaConfig) -> dict[str, object]:
    default = MediaConfig()
    return {k: v for k, v in dataclasses.asdict(media).items() if v != getattr(default, k)}


def _same(made: Path, target: Path) -> bool:
    """Whether a folder is there already with the same links."""
    if not target.is_dir():
        return False
    return {f.name: f.resolve() for f in made.iterdir() if f.name != FILE} == {
        f.name: f.resolve() for f in target.iterdir() if f.name != FILE
    }
