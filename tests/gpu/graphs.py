"""A compiler's backend for tests: what it is given, and how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Graphs:
    """Keeps the graphs, and runs them operator by operator."""

    def __init__(self) -> None:
        self.made: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, example: object) -> Callable[..., Any]:
        self.made.append(graph)
        return graph.forward

    def operators(self) -> list[str]:
        """The names of the project's own operators, in the order of their calls."""
        targets = [str(node.target) for graph in self.made for node in graph.graph.nodes]
        return [name.removeprefix("flysurgery.").removesuffix(".default") for name in targets if "flysurgery" in name]
