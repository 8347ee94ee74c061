"""A real vLLM server as an engine: `VllmProcess` starts one, `VllmEngine` is a client of its OpenAI completions.

vLLM lives in an environment of its own; `environment.py` finds or builds it. `inside/` is only ever imported by vLLM's process.
"""
