"""Model folders: the small built-in models, tokens, chat templates, media features and positions; no weights are run here."""
