"""No file of ours imports another one that, by whatever way, imports it: each can be read before what imports it."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


@pytest.mark.parametrize("package", ["relax_sdk", "relax_server", "relax_envs", "relax_agents"])
def test_no_files_import_in_a_circle(package: str) -> None:
    """Imports inside functions count; those for type checkers alone do not."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))
