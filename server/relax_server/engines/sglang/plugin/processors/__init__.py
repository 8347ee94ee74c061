"""Processors of media that SGLang is to know."""
