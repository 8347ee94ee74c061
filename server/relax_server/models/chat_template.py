"""Chat templates as transformers compiles them, for messages that are plain data already."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template


@lru_cache(maxsize=16)
def compiled(template: str) -> Template:
    """A chat template in the sandbox of transformers, to be rendered with text, numbers, lists and dictionaries only.

    `render_jinja_template` copies all that it is given for each prompt, as it may hold other objects, which takes as long as
    the template itself. Global names are copied into each context, which is slow from a chain of dictionaries.

    Raises:
        jinja2.TemplateSyntaxError: it cannot be compiled.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    program: Template = _compile_jinja_template(template)
    program.globals = dict(program.globals)
    return program
