"""The compiler that Triton asks a backend for. It supports no target, so nothing is ever compiled with it."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend


class DummyCompiler(BaseBackend):  # type: ignore[misc]  # Triton's types are not followed
    """Supports nothing."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """No target."""
        return False

    def hash(self) -> str:
        """A constant."""
        return "cpu"

    def parse_options(self, options: dict[str, Any]) -> object:
        """As they are."""
        return options

    def add_stages(self, stages: dict[str, Any], options: object, language: Any = None) -> None:
        """None."""

    def load_dialects(self, context: Any) -> None:
        """None."""

    def get_module_map(self) -> dict[str, Any]:
        """Nothing."""
        return {}
