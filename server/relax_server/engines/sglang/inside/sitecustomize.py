"""Lets SGLang 0.5.23 take each request's own `sampling_seed`, and its token; on PYTHONPATH of its process only.

SGLang draws each token of a request from (seed, position), whatever else is in the batch, but hands the seeds to its sampler
only under `--enable-deterministic-inference`, which takes other kernels, too, costs speed, and does not run on a CPU. Here the
seeds are handed over without that. A request without a seed gets a random one. A filtered token is drawn as an unfiltered one
is: SGLang sorts a whole batch by probability as soon as one of its requests is greedy or has a `top_p`, and then draws a rank.

SGLang's own `--api-key` would be seen in the list of processes and in its log, and does not look at `Host` or `Origin`; so the
guard of our other servers is put in front of it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import secrets
import sys
import types

SAMPLING = "sglang.srt.sampling.sampling_batch_info"
SAMPLER = "sglang.srt.layers.sampler"
SERVER = "sglang.srt.entrypoints.http_server"


class _After(importlib.abc.MetaPathFinder):
    """Runs an action on one module as soon as it has been imported."""

    def __init__(self, name, action):
        self.name, self.action = name, action

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self.action(module)

        spec.loader.exec_module = exec_module
        return spec


def _hand_over_seeds(module):
    """Wrap the one place where the sampler's inputs are made of requests; later merging and filtering keep the seeds."""
    import torch

    info = module.SamplingBatchInfo
    made = info.from_schedule_batch.__func__

    def from_schedule_batch(cls, batch, *args, **kwargs):
        out = made(cls, batch, *args, **kwargs)
        if out.sampling_seed is None:
            out.sampling_seed = torch.tensor([_seed(r.sampling_params) for r in batch.reqs], dtype=torch.int64).to(batch.device)
        return out

    info.from_schedule_batch = classmethod(from_schedule_batch)


def _seed(params):
    if params.sampling_seed is None:
        params.sampling_seed = secrets.randbits(62)
    return params.sampling_seed


def _draw_tokens(module):
    """Take the place of the filters of seeded draws: the random numbers are those of token ids, not of ranks."""
    import torch

    theirs = module.top_k_top_p_min_p_sampling_from_probs_torch

    def draw(probs, top_ks, top_ps, min_ps, need_min_p, seeds, positions, **more):
        if seeds is None or more.get("return_filtered_probs"):
            return theirs(probs, top_ks, top_ps, min_ps, need_min_p, seeds, positions, **more)
        top_ks, top_ps, min_ps = (values.view(-1, 1) for values in (top_ks, top_ps, min_ps))
        ranked, ids = probs.sort(dim=-1, descending=True, stable=True)
        out = torch.arange(probs.shape[-1], device=probs.device) >= top_ks
        out |= (ranked.cumsum(dim=-1) - ranked > top_ps) & (top_ps < 1)
        if need_min_p:
            out |= ranked < ranked[:, :1] * min_ps
        return module.sampling_from_probs_torch(probs.scatter(1, ids, ranked.masked_fill(out, 0)), seeds, positions)

    module.top_k_top_p_min_p_sampling_from_probs_torch = draw


def _guard(module):
    """Put the guard in front of the server; what the server asks of itself is sent with the token."""
    import requests
    from relax_guard import TOKEN, EngineGuard

    module.app.add_middleware(EngineGuard)
    own = requests.Session()
    own.trust_env = False  # a .netrc would take the place of the header
    own.headers["Authorization"] = f"Bearer {os.environ[TOKEN]}"
    module.requests = types.SimpleNamespace(get=requests.get, post=own.post, exceptions=requests.exceptions)


def _run_next():
    """Run the `sitecustomize` that this one stands in front of."""
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _After(SAMPLING, _hand_over_seeds))
sys.meta_path.insert(0, _After(SAMPLER, _draw_tokens))
sys.meta_path.insert(0, _After(SERVER, _guard))
_run_next()
