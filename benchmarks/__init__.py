"""Side-by-side measurements; each script prints a table and writes JSON to `benchmarks/results/`."""
