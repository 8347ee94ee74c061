"""What is imported by SGLang and vLLM, too: this folder is on their `PYTHONPATH`."""
