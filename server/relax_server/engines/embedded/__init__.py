"""The embedded engine: a small inference server over a transformers model that speaks the SGLang HTTP contract.

`python -m relax_server.engines.embedded --model-path DIR` starts it; `relax_server.engines.process.EngineProcess` starts
and watches it from Python.

server.py       HTTP routes, SGLang's own             web.py       JSON, errors and event streams over HTTP
prompts.py      wire ids and media to a `Prompt`      sglang_json.py  request bodies in, response bodies out
loop.py         the model thread                      scheduler.py queues, admission, retraction, batches
kv_pool.py      KV memory by token                    prefix_tree.py  which prefixes are in it
model.py        the forward pass                      attention.py attention over the pool
sampling.py     logits to tokens                      weights.py   HF folders into a loaded model
"""
