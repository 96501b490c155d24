"""Where inside the compiler a finding starts: PyTorch's CompilerBisector around its script."""

from __future__ import annotations

from pathlib import Path

import pytest
from narrowfuzz.explain.compiler import in_part, sentence, starts_in

#: 5000 ones of fp16 stop growing at 2048 where index_add is decomposed.
INDEX_ADD = """
import sys
import torch

index = torch.zeros(5000, dtype=torch.long)
add = lambda x: torch.zeros(1, 4, dtype=x.dtype).index_add(0, index, x)
total = torch.compile(add)(torch.ones(5000, 4, dtype=torch.float16))[0, 0].item()
print(f"sum {total}")
sys.exit(int(total != 5000))
"""
#: A logsumexp of a product that is rounded in one of two graphs.
LOGSUMEXP = """
import sys
import torch

torch.manual_seed(0)
x = (1000 * torch.randn(64, 32)).bfloat16().requires_grad_()
weight = torch.randn(32).bfloat16()
loss = lambda x: torch.logsumexp(x * weight, -1).pow(2).mean()
(eager,) = torch.autograd.grad(loss(x), x)
(compiled,) = torch.autograd.grad(torch.compile(loss)(x), x)
sys.exit(int((compiled - eager).norm() > eager.norm()))
"""


def asked(tmp_path: Path, source: str, seconds: float = 200) -> str:
    script = tmp_path / "repro.py"
    script.write_text(source)
    return starts_in(script, "cpu", None, seconds)[0]


@pytest.mark.heavy
def test_a_decomposition_is_named(tmp_path: Path) -> None:
    said = asked(tmp_path, INDEX_ADD)
    assert said.startswith("aot_eager_decomp_partition, at decomposition number ")
    assert said.endswith(": aten.index_add.default")


@pytest.mark.heavy
def test_a_setting_that_removes_it_is_named(tmp_path: Path) -> None:
    said = asked(tmp_path, LOGSUMEXP)
    assert said == "inductor, and is gone with the setting emulate_precision_casts = True"


@pytest.mark.heavy
def test_nothing_is_said_of_a_script_that_cannot_tell_or_shows_nothing(tmp_path: Path) -> None:
    assert asked(tmp_path, "import os; os._exit(125)") == ""
    assert asked(tmp_path, "raise SystemExit(0)") == ""
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    assert starts_in(tmp_path / "slow.py", "cpu", None, 0.5) == ("", False)


@pytest.mark.heavy
def test_what_shows_in_every_backend_is_dynamos(tmp_path: Path) -> None:
    assert asked(tmp_path, "raise SystemExit(1)").startswith("Dynamo ")


#: Slow with Inductor alone.
SLOW = """
import sys, time
from torch._inductor.compiler_bisector import CompilerBisector

if CompilerBisector.get_backend() == "inductor":
    time.sleep(600)
"""


@pytest.mark.heavy
def test_without_time_for_more_it_names_the_backend(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    said = "inductor (it does not show with backend='aot_eager_decomp_partition')"
    assert starts_in(script, "cpu", None, 30) == (said, False)


def test_a_search_that_was_cut_off_says_what_it_knows() -> None:
    tried = [f'{{"backend": "{name}"}}\nMoving on\n' for name in ("eager", "aot_eager")]
    assert in_part("") == in_part("".join(tried)) == ""
    said = in_part("".join([*tried, '{"backend": "inductor"}\n']))
    assert said == "inductor (it does not show with backend='aot_eager_decomp_partition')"


@pytest.mark.parametrize(
    ("subsystem", "number", "what", "said"),
    [
        ("", 0, "", "Inductor's code generation (it shows whichever"),
        ("lowerings", 7, "", "inductor, at lowering number 7"),
        ("joint_graph_passes", 2, "fuse", "inductor, at pass over the joint graph number 2: fuse"),
    ],
)
def test_what_was_found_is_said(subsystem: str, number: int, what: str, said: str) -> None:
    found = {"backend": "inductor", "subsystem": subsystem, "number": number, "what": what}
    assert sentence(found).startswith(said)
