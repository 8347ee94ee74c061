"""Megatron-Core as the trainer: process groups, models over packed forests, Hugging Face weights, checkpoints."""
