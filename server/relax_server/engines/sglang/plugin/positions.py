"""Where the plugin's processor tells its model the positions of a prompt."""

POSITIONS = "relax_positions"
"""Attribute of a request's first media item: float32 [3, prompt], the positions of its whole prompt."""
