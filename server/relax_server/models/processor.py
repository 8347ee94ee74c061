"""All of a model folder except its weights: tokens, chat template, media features and positions."""
