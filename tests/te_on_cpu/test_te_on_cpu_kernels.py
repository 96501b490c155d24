"""The emulated kernels against numbers that come from elsewhere, and who may install them."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from fresh import python
from te_on_cpu import environment, folders, install, kernels, norms

FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
INF, NAN = float("inf"), float("nan")


def saturated(values: np.ndarray, scale: float, format: kernels.Format) -> np.ndarray:
    """Codes by ml_dtypes: scaled in fp32, clipped, cast."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = values.astype(np.float32) * np.float32(scale)
    largest = np.float32(kernels.LARGEST[format])
    codes = np.clip(scaled, -largest, largest).astype(FORMATS[format]).view(np.uint8)
    return np.where(np.isnan(scaled), np.uint8(kernels.NAN_CODE), codes)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**20, 2.0**-20])
def test_cast_is_exact_on_every_bf16_value(format: kernels.Format, scale: float) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    codes = kernels.cast(every, torch.tensor([scale]), format)
    assert codes.dtype == torch.uint8 and codes.shape == every.shape
    np.testing.assert_array_equal(codes.numpy(), saturated(every.float().numpy(), scale, format))


@pytest.mark.parametrize(
    ("held", "values", "kept"),
    [
        (0.0, [1.0, -3.0], 3.0),
        (5.0, [1.0, -3.0], 5.0),
        (0.0, [NAN, -3.0], 3.0),
        (0.0, [NAN], 0.0),
        (1.0, [-INF, NAN], INF),
        (NAN, [1.0], NAN),
        (2.0, [], 2.0),
    ],
)
def test_amax_is_a_running_maximum_that_drops_nan(
    held: float, values: list[float], kept: float
) -> None:
    history = torch.zeros(3, 2)
    history[0, 1] = held
    kernels.cast(torch.tensor(values), None, "e4m3", history[0, 1])
    np.testing.assert_equal(history[0].numpy(), np.float32([0.0, kept]))
    assert not history[1:].any()


@pytest.mark.parametrize("format", FORMATS)
def test_dequantise_is_exact(format: kernels.Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.numpy().view(FORMATS[format]).astype(np.float32) * np.float32(0.37)
    values = kernels.dequantise(codes, torch.tensor([0.37]), format, torch.float32)
    np.testing.assert_array_equal(values.numpy(), expected)
    narrow = kernels.dequantise(codes, torch.tensor([0.37]), format, torch.bfloat16)
    np.testing.assert_array_equal(
        narrow.float().numpy(), expected.astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def updated(
    history: list[float], scale: float = 7.0, **options: object
) -> tuple[list[float], float, float]:
    """One slot's history, scale and inverse after an update."""
    table = torch.tensor(history)[:, None]
    scales, inverses = torch.tensor([scale]), torch.tensor([0.5])
    arguments = {"algorithm": "max", "format": "e4m3", "margin": 0, "reduced": table[0].clone()}
    arguments.update(options)
    kernels.update_amax_and_scale(
        arguments.pop("reduced"),  # type: ignore[arg-type]
        [table],
        [scales],
        [inverses],
        **arguments,  # type: ignore[arg-type]
    )
    return table[:, 0].tolist(), scales.item(), inverses.item()


def test_update_rolls_and_takes_the_maximum() -> None:
    # Row 0 is the newest and goes to the end. Row 1, the oldest, is looked at once more and gone.
    assert updated([2.0, 8.0, 4.0]) == ([0.0, 4.0, 2.0], 448 / 8, np.float32(8 / 448))
    assert updated([2.0, 4.0, 8.0])[:2] == ([0.0, 8.0, 2.0], 448 / 8)
    assert updated([2.0])[:2] == ([0.0], 448 / 2)


def test_update_options() -> None:
    assert updated([2.0, 4.0, 8.0], algorithm="most_recent")[:2] == ([0.0, 8.0, 2.0], 224.0)
    assert updated([2.0, 0.0], margin=3)[1] == 448 / 8 / 2
    assert updated([2.0, 0.0], format="e5m2")[1] == 57344 / 2
    # The maximum over ranks replaces the own one, unless it is 0.
    assert updated([2.0, 1.0], reduced=torch.tensor([16.0]))[:2] == ([0.0, 16.0], 28.0)
    assert updated([2.0, 1.0], reduced=torch.tensor([0.0]))[:2] == ([0.0, 2.0], 224.0)


def test_update_leaves_an_idle_slot() -> None:
    assert updated([0.0, 4.0, 8.0]) == ([0.0, 4.0, 8.0], 7.0, np.float32(1 / 7))
    assert updated([0.0, 4.0], algorithm="most_recent")[:2] == ([0.0, 4.0], 7.0)


def test_update_with_infinite_and_nan_amax() -> None:
    assert updated([INF, 4.0])[:2] == ([0.0, INF], 7.0)
    assert updated([1e-39, 0.0])[1] == torch.finfo(torch.float32).max
    history, scale, _ = updated([NAN, 1.0, 4.0])
    np.testing.assert_equal(history, [0.0, 4.0, NAN])
    assert scale == 448 / 4
    assert updated([NAN, 4.0], algorithm="most_recent")[1] == 7.0


def test_update_refuses_what_the_kernel_refuses() -> None:
    with pytest.raises(RuntimeError, match="median"):
        updated([1.0], algorithm="median")
    tables, scales = [torch.ones(2, 1), torch.ones(3, 1)], [torch.ones(1), torch.ones(1)]
    with pytest.raises(RuntimeError, match=r"\[2, 3\]"):
        kernels.update_amax_and_scale(
            None, tables, scales, None, algorithm="max", format="e4m3", margin=0
        )


def gamma(n: int) -> float:
    """Relative error of n fp32 roundings in a row, at most."""
    unit = 2.0**-24
    return n * unit / (1 - n * unit)


@pytest.mark.parametrize(("transa", "transb"), [(True, False), (False, False), (False, True)])
def test_matmul_within_its_bound(transa: bool, transb: bool) -> None:
    rng = np.random.default_rng(0)
    m, n, k = 24, 40, 100
    a, b = rng.normal(size=(m, k)), rng.normal(size=(n, k))
    bias, addend, scale = rng.normal(size=m), rng.normal(size=(n, m)), 3e-5
    # op(b) @ op(a) is b @ a.T whatever the layout they are handed over in.
    args = [torch.tensor(t).float() for t in (a if transa else a.T, b.T if transb else b)]
    result = kernels.matmul(
        args[0].contiguous(),
        args[1].contiguous(),
        transa=transa,
        transb=transb,
        scale=torch.tensor(scale, dtype=torch.float64),
        addend=torch.tensor(addend).float(),
        bias=torch.tensor(bias).float(),
    )
    a, b, bias, addend = (t.astype(np.float32).astype(np.float64) for t in (a, b, bias, addend))
    exact = scale * (b @ a.T) + addend + bias
    magnitude = scale * (abs(b) @ abs(a).T) + abs(addend) + abs(bias)
    assert (abs(result.double().numpy() - exact) <= gamma(k + 3) * magnitude).all()


def test_matmul_scales_without_overflow() -> None:
    ones = torch.ones(1, 1)
    huge = torch.tensor(1e38, dtype=torch.float64) * torch.tensor(1e-38, dtype=torch.float64)
    assert kernels.matmul(ones, ones, transa=True, transb=False, scale=huge).item() == 1.0


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_against_float64_autograd(zero_centered: bool) -> None:
    torch.manual_seed(0)
    x, dz = torch.randn(6, 48), torch.randn(6, 48)
    gain, shift = torch.randn(48), torch.randn(48)
    exact = [t.double().requires_grad_() for t in (x, gain, shift)]
    weight = exact[1] + 1 if zero_centered else exact[1]
    for kind in ("layer", "rms"):
        if kind == "layer":
            want = torch.nn.functional.layer_norm(exact[0], (48,), weight, exact[2], 1e-5)
            out, *stats = norms.layernorm_forward(x, gain, shift, 1e-5, zero_centered)
            grads = norms.layernorm_backward(dz, x, *stats, gain, zero_centered)
        else:
            want = torch.nn.functional.rms_norm(exact[0], (48,), weight, 1e-5)
            out, *stats = norms.rmsnorm_forward(x, gain, 1e-5, zero_centered)
            grads = norms.rmsnorm_backward(dz, x, *stats, gain, zero_centered)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        wanted = torch.autograd.grad(want, exact[: len(grads)], dz.double())
        for got, right in zip(grads, wanted, strict=True):
            torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4)


# ---- who may install


def pretend(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """As if TransformerEngine ``version`` were installed, or none."""

    def answer(package: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(importlib.metadata, "version", answer)


def test_install_refuses_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    with pytest.raises(
        ValueError, match=r"not installed; install one of 1\.9\.0\.post1, 1\.10\.\*"
    ):
        install.install()


@pytest.mark.parametrize("version", ["1.9.0", "1.14.0", "2.20.1", "1.1"])
def test_install_refuses_other_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, version)
    with pytest.raises(ValueError, match=f"does not carry TransformerEngine {version}; install"):
        install.install()


def test_install_refuses_a_library_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "1.12.0")
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    with pytest.raises(ValueError, match="imported already"):
        install.install()


def test_install_refuses_where_the_real_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "1.12.0")
    monkeypatch.setattr(install, "has_extension", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="use them as they are"):
        install.install()


# ---- where a version comes from


def test_environment_refuses_other_versions() -> None:
    with pytest.raises(
        ValueError, match=r"'1\.9\.0'; use one of 1\.9\.0\.post1, 1\.10\.\*, .*2\.20\.2"
    ):
        environment.ensure("1.9.0")


def test_environment_says_what_pip_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TE_ON_CPU_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=r"transformer_engine==1\.12\.0: .*No matching"):
        environment.ensure("1.12.0")
    assert list(tmp_path.iterdir()) == []


def test_environment_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def pip(folder: Path, *what: str) -> None:
        calls.append(what)
        (folder / what[-1]).touch()

    monkeypatch.setenv("TE_ON_CPU_CACHE", str(tmp_path))
    monkeypatch.setattr(folders, "pip", pip)
    folder = environment.ensure("1.12.0")
    assert folder.parent == tmp_path and folder.name.startswith("1.12.0-")
    made = sorted(p.name for p in folder.iterdir())
    assert made == ["importlib-metadata", "transformer_engine==1.12.0"]
    assert environment.ensure("1.12.0") == folder and len(calls) == 2
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    child = environment.worker_environment("1.12.0", {"PYTHONPATH": "mine", "HOME": "h"})
    assert child["PYTHONPATH"].split(":") == [str(folder), "mine"]
    assert child["HOME"] == "h" and child["NVTE_TORCH_COMPILE"] == "0"


def test_environment_of_a_faster_process_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def pip(_folder: Path, *_what: str) -> None:
        other = tmp_path / f"1.12.0-{sys.implementation.cache_tag}"
        other.mkdir(exist_ok=True)
        (other / "theirs").touch()

    monkeypatch.setenv("TE_ON_CPU_CACHE", str(tmp_path))
    monkeypatch.setattr(folders, "pip", pip)
    assert [p.name for p in environment.ensure("1.12.0").iterdir()] == ["theirs"]
    assert len(list(tmp_path.iterdir())) == 1


def test_nothing_is_patched_by_importing() -> None:
    code = (
        "import torch; before = torch.empty, torch.Tensor.to, torch.cuda.is_available; "
        "from te_on_cpu import install; "
        "assert before == (torch.empty, torch.Tensor.to, torch.cuda.is_available)"
    )
    python("-c", code)
