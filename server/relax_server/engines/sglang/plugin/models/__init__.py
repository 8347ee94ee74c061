"""Models that SGLang is to know."""
