"""A real SGLang server as an engine: `SglangProcess` starts one, `SglangEngine` gives it commands.

SGLang lives in an environment of its own, as it wants other versions than we do; `environment.py` finds or builds it.
`cpu_shim/` lets it run where there is no CUDA, `plugin/` teaches it our omni models. Both are only ever imported by SGLang's
own process.
"""
