"""Groups of ranks that share experts."""

from __future__ import annotations

from typing import Any

import pytest
from narrowfuzz.play import experts


class _Mesh:
    """Refuses each name that there is, as torch 2.11's check of it is the wrong way round."""

    mesh_dim_names = ("data", "tensor")

    def __getitem__(self, names: Any) -> _Mesh:
        return self

    def size(self) -> int:
        return 4

    def _flatten(self) -> None:
        pass

    def _unflatten(self, dim: int | str, sizes: tuple[int, ...], names: tuple[str, ...]) -> _Mesh:
        if dim in self.mesh_dim_names:
            raise ValueError(f"dim {dim} specified in `_unflatten` is not in {self.mesh_dim_names}")
        assert (dim, sizes, names) == (0, (2, 2), ("groups", "experts"))
        return self


def test_a_dimension_is_named_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_clear_sharding_prop_cache", lambda: None)
    mesh = _Mesh()
    assert experts.in_groups(mesh, 2) is mesh
