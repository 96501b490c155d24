"""Cases that were false alarms once: a fault of ours, or a legal difference. They stay silent."""

from __future__ import annotations

import pytest

from harness.case import load_case
from harness.environment import prepare, settle
from harness.judge import Judge
from harness.ledger import load_ledger
from harness.recipe import load_recipes

prepare()
settle()

CASES = {
    "a graph takes its output gradients contiguous, so a bias gradient is summed in another order": '{"data":{"seed":99},"schema":2,"spec":{"backend":"emulated","bias":true,"compile":"a'
    'ot_eager","dtype":"fp32","grad_layout":"transposed","k":16,"m":16,"model":"own_forwa'
    'rd","n":16,"recipe":"torchao.float8.rowwise"}}',
    "the same on one linear": '{"data":{"seed":492974926},"schema":2,"spec":{"backend":"real","bias":true,"compile"'
    ':"aot_eager_decomp_partition","dtype":"fp32","grad_layout":"transposed","k":16,"m":8'
    ',"n":16,"recipe":"torchao.float8.tensorwise"}}',
    "a weight of zeros equals another GEMM's operand: no recompute": '{"data":{"seed":3,"values":"zero_rows"},"schema":2,"spec":{"backend":"native","check'
    'point":"reentrant","compile":"aot_eager","k":4,"m":1,"model":"frozen_first","n":1,"r'
    'ecipe":"torch.fp32"}}',
    "a scaled multiply that adds the bias itself": '{"data":{"seed":2414813856},"schema":2,"spec":{"backend":"tensorwise","bias":true,"c'
    'ompile":"aot_eager","k":1,"m":6,"model":"layernorm_linear","n":8,"recipe":"torch.sca'
    'led_mm"}}',
    "eager autocast keeps the cast of a leaf, a graph casts at each use": '{"data":{"seed":663421},"schema":2,"spec":{"autocast":true,"backend":"native","compi'
    'le":"aot_eager","dtype":"fp32","k":16,"m":16,"model":"used_twice","recipe":"torch.fp'
    '32"}}',
    "a probe between leaf and layer kept autocast from caching": '{"data":{"grad_exponent":-9,"input_exponent":-9,"seed":760531},"schema":2,"spec":{"a'
    'ttention":"math","autocast":true,"backend":"native","batch":2,"dtype":"fp32","heads"'
    ':2,"input_layout":"transposed","k":79,"m":64,"model":"mlp_swiglu","n":64,"recipe":"t'
    'orch.fp32"}}',
    "a bias must be copied before the optimizer steps": '{"data":{"seed":3994},"schema":2,"spec":{"backend":"native","bias":true,"k":1,"m":1,'
    '"n":1,"recipe":"torch.bf16","steps":2}}',
    "sums with one scale applied may overflow before the other is": '{"data":{"seed":746,"values":"near_max"},"schema":2,"spec":{"backend":"real","compil'
    'e":"aot_eager","k":64,"model":"dropout","recipe":"torchao.float8.rowwise"}}',
    "scores too large for fp32 to sum": '{"data":{"seed":1,"values":"outlier"},"schema":2,"spec":{"backend":"native","k":8,"m'
    '":16,"model":"attention","n":1,"recipe":"torch.bf16"}}',
}


@pytest.mark.parametrize("raw", CASES.values(), ids=CASES)
def test_what_was_no_bug_is_not_called_one(raw: str) -> None:
    judgement = Judge(load_recipes(), load_ledger()).judge(load_case(raw.encode()))
    assert judgement.ran
    assert [v.sentence() for v in judgement.causes] == []
