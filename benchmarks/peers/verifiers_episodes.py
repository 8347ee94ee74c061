"""Episodes of verifiers' `vf-eval`; run by `benchmarks.gyms` in the peers' venv.

Prints one line of JSON: episodes from the first `--concurrent` that were scored on to the last, the seconds that they took, and
the processor time of this process, in which all of verifiers and its agents run.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

CONFIG = """\
model = "fake"
num_rollouts = 1
push = false
max_concurrent = {concurrent}
output_dir = "{folder}"
[client]
base_url = "{url}"
api_key_var = "BENCH_KEY"
[env.taskset]
id = "verifiers_echo"
episodes = {episodes}
[env.agent.harness]
id = "verifiers_echo"
turns = {turns}
[env.agent.runtime]
type = "subprocess"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument("--concurrent", type=int, required=True)
    args = parser.parse_args()
    os.environ["BENCH_KEY"] = "none"
    import verifiers_echo
    from verifiers.v1.cli.eval.main import main as evaluate

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "eval.toml"
        file.write_text(CONFIG.format(folder=folder, **vars(args)))
        out, sys.stdout = sys.stdout, sys.stderr
        sys.argv = ["vf-eval", "@", str(file), "--no-rich"]
        try:
            evaluate()
        finally:
            sys.stdout = out
    ends = verifiers_echo.ENDS
    if len(ends) != args.episodes:
        raise SystemExit(f"{len(ends)} of {args.episodes} episodes were scored")
    (began, cpu), (ended, used) = ends[args.concurrent - 1], ends[-1]
    print(json.dumps({"episodes": len(ends) - args.concurrent, "seconds": ended - began, "cpu": used - cpu}))


if __name__ == "__main__":
    main()
